"""Models that continue a text step by step on the decoding core: the target, and the LM that drafts steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from specctl.adaptation.stream import EncodedPrompt
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Request
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target
from specctl.errors import DataError
from specctl.lab.reasoning.options import LookaheadRecipe


@dataclass
class WritingWork:
    """Work of a model: forwards (one per batch), their rows, and the number of texts started."""

    passes: int = 0
    rows: int = 0
    texts: int = 0

    def since(self, before: WritingWork) -> WritingWork:
        return WritingWork(self.passes - before.passes, self.rows - before.rows, self.texts - before.texts)


class Writer:
    """Writes the next step of texts. It keeps recently read and written prefixes, so they are not read again.

    Attributes:
        work: total work of this writer.
    """

    def __init__(self, model: Target, recipe: LookaheadRecipe, drafter: Drafter | None = None):
        """`recipe` must be resolved; `drafter` speculates on tokens inside the steps, and changes no text."""
        assert recipe.delimiter is not None and recipe.repetition_penalty is not None, "resolved() fills these in"
        self.model, self.drafter = model, drafter
        self.sampling = Sampling(recipe.temperature, recipe.top_k, recipe.top_p, recipe.repetition_penalty)
        self.stepper = StepSplitter(model, recipe.delimiter, recipe.step_tokens)
        self.work = WritingWork()
        self._lines = recipe.longest + 1
        self.forget()

    def steps(self, texts: list[list[int]], limits: list[int], seed: int) -> list[Step]:
        """Write the next step of every text in one batch, with at most `limits` tokens each.

        The seed belongs to the problem: a position draws the same random number for every writer, however often.
        """
        written = self._decode(texts, [min(limit, self.stepper.limit) for limit in limits], seed, self.stepper.ends)
        return [self.stepper.first(ids) for ids in written]

    def forget(self) -> None:
        """Drop all cached prefixes."""
        self._prefixes = PrefixCache(most_texts=self._lines)
        controller = Fixed.of(self.drafter)
        self._engine = Engine(self.model, controller, EngineOptions(prefix_cache=self._prefixes))

    def rest(self, text: list[int], limit: int, seed: int) -> list[int]:
        """Write the rest of a text, up to its end or the limit."""
        return self._decode([text], [limit], seed, frozenset())[0]

    def _decode(self, texts: list[list[int]], limits: list[int], seed: int, ends: frozenset[int]) -> list[list[int]]:
        ends = frozenset(id for id in ends if id < self.model.vocab_size)  # tokenizers may have more tokens
        read = self._prefixes.read
        found = decode(
            self._engine,
            [Request(text, self.sampling, limit, seed, ends) for text, limit in zip(texts, limits, strict=True)],
        )
        self.work.passes += 1 + max(one.target_passes for one in found)
        self.work.rows += self._prefixes.read - read + sum(one.target_passes + one.drafted for one in found)
        self.work.texts += len(texts)
        return [one.output_ids for one in found]


class Proposal(NamedTuple):
    """Drafted step in the target's tokens, and as the draft LM wrote it."""

    step: Step
    own: Step


class StepDrafter:
    """LM that drafts steps for a target.

    With the target's tokenizer it shares token ids. With another tokenizer, prompts and steps are exchanged as text.
    """

    def __init__(self, writer: Writer, target: Target):
        """Raises DataError if text must be exchanged and the draft model has no chat template."""
        self.writer, self.target = writer, target
        self.shared = writer.model.identity["vocab_hash"] == target.identity["vocab_hash"]
        if not self.shared and getattr(writer.model.tokenizer, "chat_template", None) is None:
            raise DataError(
                f"draft model {writer.model.name} has another tokenizer than target {target.name} and no chat template",
                "use a small model of the target's family, or one with a chat template",
            )

    def text(self, arrival: EncodedPrompt, thought: list[int]) -> list[int]:
        """Encode the prompt and the text written after it in the draft model's tokens."""
        if self.shared:
            return arrival.ids + thought
        if not arrival.prompt.messages:
            raise DataError(
                f"{arrival.prompt.where}: a draft model with another tokenizer needs prompts with `messages`"
            )
        written = self.target.tokenizer.decode(thought, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self.writer.model.render(arrival.prompt.messages) + self._ids(self.writer.model, written)

    def propose(self, arrival: EncodedPrompt, thought: list[int], depth: int, room: int, seed: int) -> list[Proposal]:
        """Draft up to `depth` steps of `room` tokens in total; fewer if the text or the draft model's context ends."""
        text = self.text(arrival, thought)
        proposals: list[Proposal] = []
        while len(proposals) < depth and room > 0 and len(text) < self.writer.model.context_length:
            (own,) = self.writer.steps([text], [room], seed)
            step = self._to_target_tokens(own)
            if len(step.ids) > room:  # in the target's tokens the step is too long
                break
            proposals.append(Proposal(step, own))
            text, room = text + own.ids, room - len(step.ids)
            if own.end == "final":
                break
        return proposals

    def to_draft_tokens(self, step: Step) -> list[int]:
        """Convert a step of the target to the draft model's tokens."""
        if self.shared:
            return step.ids
        return self._ids(self.writer.model, step.text) + self._end(self.writer.model, step)

    def _to_target_tokens(self, own: Step) -> Step:
        if self.shared:
            return own
        return Step(self._ids(self.target, own.text) + self._end(self.target, own), own.text, own.end)

    @staticmethod
    def _end(model: Target, step: Step) -> list[int]:
        return [model.end_id] if step.end == "final" and model.end_id is not None else []

    @staticmethod
    def _ids(model: Target, text: str) -> list[int]:
        return list(model.tokenizer.encode(text, add_special_tokens=False))


End = Literal["delimiter", "final", "limit"]


@dataclass(frozen=True)
class Step:
    """Reasoning step: its writer's tokens, with delimiter or end-of-sequence token, and its text without the latter.

    `end` tells whether the step ended with the delimiter, with the end of the text ("final"), or at the length limit.
    """

    ids: list[int]
    text: str
    end: End


class StepSplitter:
    """Cuts the tokens of one model into steps.

    A step ends with the token that completes the delimiter, so no text is ever tokenized again. Other characters of
    this token ("\\n   ") also belong to the step.

    Attributes:
        ends: ids of the tokens that contain the delimiter; a decoder may stop there. A delimiter that spans two
            tokens is found only by `first`.
    """

    def __init__(self, model: Target, delimiter: str, limit: int):
        """`limit`: maximal number of tokens per step."""
        self.tokenizer, self.eos_ids = model.tokenizer, model.eos_ids
        self.delimiter, self.limit = delimiter, limit
        self.ends = _holding(self.tokenizer, delimiter)

    def text(self, ids: list[int]) -> str:
        """Decode ids to text, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def first(self, ids: list[int]) -> Step:
        """Return the first step of `ids` (at least one token)."""
        for count, token in enumerate(ids[: self.limit], 1):
            if token in self.eos_ids:
                return Step(ids[:count], self.text(ids[:count]), "final")
            if token in self.ends or (count > 1 and self._completed(ids[:count])):
                return Step(ids[:count], self.text(ids[:count]), "delimiter")
        cut = ids[: self.limit]
        return Step(cut, self.text(cut), "limit")

    def _completed(self, ids: list[int]) -> bool:
        """Whether the last token completes a delimiter that spans several tokens."""
        return len(self.delimiter) > 1 and self.delimiter in self.text(ids[-len(self.delimiter) :])


@lru_cache(maxsize=4)
def _holding(tokenizer: Any, delimiter: str) -> frozenset[int]:
    """Ids of the tokens that contain the delimiter; this takes a second for a large vocabulary."""
    tokens = list(tokenizer.get_vocab().values())  # the ids may have gaps
    pieces = tokenizer.batch_decode([[token] for token in tokens])
    return frozenset(token for token, piece in zip(tokens, pieces, strict=True) if delimiter in piece)


def repeats_itself(steps: Sequence[Step], repeats: int) -> bool:
    """Whether the text ends with `repeats` repetitions of its last step, or of its last two: an endless loop."""
    texts = [step.text.strip().casefold() for step in steps]
    for period in (1, 2):
        tail = texts[-period * repeats :]
        if len(tail) == period * repeats and tail == tail[-period:] * repeats:
            return True
    return False
