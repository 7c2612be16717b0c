"""Judges that decide whether two reasoning steps have the same meaning.

With every judge, two steps that are equal after folding are aligned without a request. A missing answer, an answer
without a ruling, a time-out and an unreachable judge all count as not aligned: then the target's own step is used.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.models import supported
from specctl.decoding.models.loading import check_within_reach, first_line, location, model_directory, pick_device
from specctl.decoding.models.supported import quiet
from specctl.decoding.offline import decode
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import Target, load_target
from specctl.errors import CheckpointError
from specctl.lab.reasoning import answers
from specctl.lab.reasoning.options import JudgeRecipe
from specctl.progress import interrupts, warn
from specctl.regular_files import parse_json

Pair = tuple[str, str]
RulingFunction = Callable[[list[Pair]], list[bool | None]]
"""Function that rules on pairs that are not equal; a ruling is None if there was no answer."""

QUESTION = """Two reasoning steps follow. Do they say the same thing?
Compare what they claim, how they argue and every number in them; wording does not matter.
Reply with [aligned] if meaning and results are the same, with [unaligned] if either differs.
Reply with [unaligned], too, if it is too hard to determine. Reply with nothing else.

<s1>
{}
</s1>
<s2>
{}
</s2>"""
"""Prompt with the three cases of the Lookahead Reasoning protocol (Fu et al. 2025, appendix), reworded."""

REMEMBERED = 1 << 16  # number of cached rulings
LONGEST_REPLY = 1 << 18  # bytes
LONGEST_STEP = 512  # tokens of a step that an encoder reads
_RULING = re.compile(r"\[(un)?aligned\]", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?")
_AROUND = re.compile(r"\s*([^\w\s])\s*")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "’": "'", "“": '"', "”": '"'})


@dataclass
class JudgeTally:
    """Counts of judged pairs.

    `identical` pairs needed no judge, `cached` pairs had been asked before, `unanswered` is the part of `asked` without
    a ruling.
    """

    pairs: int = 0
    identical: int = 0
    cached: int = 0
    asked: int = 0
    aligned: int = 0
    unanswered: int = 0


class Judge:
    """Rules on pairs of steps and asks about each pair only once. `tally` counts since the judge was created."""

    def __init__(self, ask: RulingFunction):
        self.ask, self.tally = ask, JudgeTally()
        self._cache: dict[Pair, bool] = {}

    def __call__(self, pairs: Sequence[Pair]) -> list[bool]:
        """Decide for every pair whether its steps are aligned."""
        folded = [(fold(one), fold(other)) for one, other in pairs]
        self.tally.pairs += len(pairs)
        self.tally.identical += sum(one == other for one, other in folded)
        new = {pair: texts for pair, texts in zip(folded, pairs, strict=True) if pair[0] != pair[1]}
        open_pairs = {pair: texts for pair, texts in new.items() if pair not in self._cache}
        self.tally.cached += sum(pair in self._cache for pair in folded if pair[0] != pair[1])
        if open_pairs:
            rulings = self.ask(list(open_pairs.values()))
            self.tally.asked += len(rulings)
            self.tally.unanswered += sum(ruling is None for ruling in rulings)
            # A missing ruling is not cached, as the judge may answer the next time.
            found = zip(open_pairs, rulings, strict=True)
            self._cache |= {pair: ruling for pair, ruling in found if ruling is not None}
        aligned = [one == other or self._cache.get((one, other), False) for one, other in folded]
        self.tally.aligned += sum(aligned)
        while len(self._cache) > REMEMBERED:
            del self._cache[next(iter(self._cache))]
        return aligned


def fold(text: str) -> str:
    """Normalize case, spacing, closing punctuation and number formats of a text: "1,200.0" becomes "1200"."""
    plain = _NUMBER.sub(lambda number: _plain(number[0]), text.translate(_SIGNS).casefold())
    return re.sub(r"\s+", " ", _AROUND.sub(r"\1", plain)).strip().rstrip(".,;:")


def _plain(number: str) -> str:
    value = answers.number(number)
    return number if value is None else str(value)


def make_judge(recipe: JudgeRecipe, device: str = "auto") -> Judge:
    """Build the judge of a recipe. Raises CheckpointError if its model cannot be loaded."""
    if recipe.kind == "exact":
        return Judge(lambda pairs: [False] * len(pairs))
    if recipe.kind == "embedding":
        return Judge(EmbeddingJudge(recipe, device))
    if recipe.endpoint is not None:
        return Judge(EndpointJudge(recipe))
    return Judge(ChatJudge(load_target(str(recipe.name), device=device, revision=recipe.revision), recipe))


class EmbeddingJudge:
    """Judge that uses a sentence encoder: cosine similarity of mean last hidden states against a threshold."""

    def __init__(self, recipe: JudgeRecipe, device: str):
        from transformers import AutoModel, AutoTokenizer

        self.recipe, self.device = recipe, pick_device(device)
        try:
            check_within_reach(str(recipe.name), recipe.revision)
            supported.check_adapter(f"judge {recipe.name}", model_directory(str(recipe.name), recipe.revision))
            where, options = location(str(recipe.name)), {"revision": recipe.revision, "trust_remote_code": False}
            self.tokenizer = AutoTokenizer.from_pretrained(where, **options)
            with quiet():
                loaded: Any = AutoModel.from_pretrained(where, use_safetensors=True, **options, **supported.REPORT)
        except CheckpointError:
            raise
        except Exception as error:  # any exception that transformers raises for bad files
            raise CheckpointError(f"cannot load judge {recipe.name}: {first_line(error)}") from error
        model, info = loaded
        info["missing_keys"] = {name for name in info["missing_keys"] if not name.startswith("pooler.")}  # not used
        supported.check_loaded(f"judge {recipe.name}", model, info)
        self.model = model.to(self.device).eval()
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        limit = getattr(model.config, "max_position_embeddings", None) or LONGEST_STEP
        self.longest = min(LONGEST_STEP, limit, self.tokenizer.model_max_length)

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> torch.Tensor:
        """Embed texts as unit vectors [n, H]."""
        options: dict[str, Any] = {"padding": True, "truncation": True, "return_tensors": "pt"}
        batch = self.tokenizer(texts, max_length=self.longest, **options).to(self.device)
        batch.pop("token_type_ids", None)  # not every encoder has segments
        states = self.model(**batch).last_hidden_state.float()
        mask = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1).clamp(min=1), dim=-1)

    def __call__(self, pairs: list[Pair]) -> list[bool | None]:
        rulings: list[bool | None] = []
        for start in range(0, len(pairs), self.recipe.batch_size):
            some = pairs[start : start + self.recipe.batch_size]
            ones, others = (self.embed([pair[side] for pair in some]) for side in (0, 1))
            rulings += [cosine >= self.recipe.threshold for cosine in (ones * others).sum(-1).tolist()]
        return rulings


class ChatJudge:
    """Judge that runs a chat model on our own decoding core."""

    def __init__(self, model: Target, recipe: JudgeRecipe):
        self.model, self.recipe = model, recipe

    def __call__(self, pairs: list[Pair]) -> list[bool | None]:
        prompts = [self.model.render([{"role": "user", "content": QUESTION.format(*pair)}]) for pair in pairs]
        fitting = [place for place, ids in enumerate(prompts) if len(ids) < self.model.context_length]
        rulings: list[bool | None] = [None] * len(pairs)
        if fitting:
            engine = Engine(self.model, options=EngineOptions(slots=self.recipe.batch_size))
            asked = [Request(prompts[place], GREEDY, self.recipe.max_tokens) for place in fitting]
            replies = decode(engine, asked)
            for place, reply in zip(fitting, replies, strict=True):
                rulings[place] = read_ruling(self.model.tokenizer.decode(reply.output_ids))
        return rulings


def read_ruling(reply: str) -> bool | None:
    """Return the last [aligned] or [unaligned] in a reply as a boolean, or None if it contains neither."""
    found = _RULING.findall(reply)
    return None if not found else not found[-1]


class EndpointJudge:
    """Judge that asks a chat model at an OpenAI-compatible endpoint. It warns once if a request fails."""

    def __init__(self, recipe: JudgeRecipe):
        self.recipe, self._told = recipe, False

    def __call__(self, pairs: list[Pair]) -> list[bool | None]:
        return [self._rule(pair) for pair in pairs]

    def _rule(self, pair: Pair) -> bool | None:
        interrupts.check()
        try:
            return read_ruling(parse_json(self._post(pair))["choices"][0]["message"]["content"])
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            if not self._told:
                self._told = True
                where = f"the judge at {self.recipe.endpoint} gave no verdict ({type(error).__name__}: {error})"
                warn(f"{where}; steps without a verdict count as unaligned")
            return None

    def _post(self, pair: Pair) -> bytes:
        """Send the question and read the reply piece by piece until a deadline.

        A socket time-out alone would let a server send slowly forever.
        """
        recipe, deadline = self.recipe, time.monotonic() + self.recipe.timeout_s
        message = {"role": "user", "content": QUESTION.format(*pair)}
        body = {"model": recipe.name, "messages": [message], "temperature": 0, "max_tokens": recipe.max_tokens}
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get(recipe.key_variable)) else {}
        address, received = f"{str(recipe.endpoint).rstrip('/')}/chat/completions", b""
        with httpx.stream("POST", address, json=body, headers=headers, timeout=recipe.timeout_s) as reply:
            reply.raise_for_status()
            for piece in reply.iter_bytes():
                received += piece
                if time.monotonic() > deadline or len(received) > LONGEST_REPLY:
                    raise TimeoutError(
                        f"the reply did not end within {recipe.timeout_s:g} s ({len(received)} bytes so far)"
                    )
        return received
