"""A proposer of vLLM that drafts from text: `lookup`, `suffix`, datastores (`retrieval`); no head, no forward.

    vllm serve MODEL --additional-config '{"specctl_drafters": ["lookup", "drafters/sql-retrieval"]}' \\
      --speculative-config '{"method": "custom_class", "model": "specctl.engines.vllm_proposer.TextProposer",
                             "num_speculative_tokens": 7}'

vLLM loads this file in its own environment (`pip install --no-deps specctl`). Of several drafters that one drafts in a
round whose chain is expected to be accepted furthest, by what it claims and by how often such claims came true in this
text (`Trust`): all of them propose, which costs no forward, so all of them are heard in every round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from specctl.drafters import checkpoint
from specctl.drafters.hybrid.candidates import Trust
from specctl.drafters.retrieval import drafter as retrieval
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import ProposedTree
from specctl.errors import UsageError

KEY = "specctl_drafters"
"""In vLLM's `additional_config`: names and directories of drafters."""
CPU = torch.device("cpu")


@dataclass(eq=False)
class RequestText:
    """A text that vLLM writes, as text drafters see a batch of one.

    Attributes:
        text: [length] prompt and output so far; `ids` is the same as a list.
        room: tokens that may be drafted.
        trust: in the claims of each drafter.
        offers: of each drafter in the last round, and the length of the text that they go on from.
    """

    text: np.ndarray
    room: int
    trust: list[Trust]
    ids: list[int] = field(default_factory=list)
    offers: list[ProposedTree] = field(default_factory=list)
    end: int = 0
    memory: dict[Any, Any] = field(default_factory=dict)
    batch: int = 1
    device: torch.device = CPU
    exact_rows: bool = True  # chains

    @property
    def rows(self) -> list[RequestText]:
        return [self]

    def goes_on_as(self, text: np.ndarray) -> bool:
        """Whether a text begins with this one."""
        size = len(self.text)
        return size <= len(text) and text[size - 1] == self.text[-1] and np.array_equal(text[:size], self.text)

    def read(self, text: np.ndarray, longest: int) -> None:
        """Go on to `text`, of `longest` tokens at most, and book which claims of the last round have come true."""
        self.ids += text[len(self.ids) :].tolist()
        self.text, self.room = text.copy(), longest - len(text) - 1
        for trust, offer in zip(self.trust, self.offers, strict=False):
            for token, claim, said in zip(offer.tokens, offer.odds, self.ids[self.end :], strict=False):
                trust.learn(claim, token == said)
                if token != said:
                    break
        self.offers, self.end = [], len(self.ids)


class TextProposer:
    """Draft chains of text drafters for the requests of vLLM's V1 runner."""

    def __init__(self, vllm_config: Any):
        """Raises UsageError, CheckpointError: a drafter that is none, or not of this vocabulary."""
        self.tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.longest: int = vllm_config.model_config.max_model_len
        named = (vllm_config.additional_config or {}).get(KEY, ["lookup"])
        self.drafters = named_drafters(named, vllm_config.model_config.get_vocab_size(), self.tokens)
        self.requests: list[RequestText] = []

    def load_model(self, *_: Any) -> None:
        """There are no weights."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain for every row; none where nothing was sampled, as in the middle of a prompt.

        Args:
            sampled_token_ids: of each row, the tokens of this step.
            num_tokens_no_spec: [rows] lengths of the texts, those tokens included.
            token_ids_cpu: [rows, max_model_len] the texts. Rows change places between steps.
        """
        before: list[RequestText | None] = [*self.requests]
        self.requests, drafts = [], []
        for row, sampled in enumerate(sampled_token_ids):
            text = token_ids_cpu[row, : num_tokens_no_spec[row]]
            request = self._known(before, row, text)
            request.read(text, self.longest)
            self.requests.append(request)
            drafts.append(self._draft(request) if len(sampled) else [])
        return drafts

    def _known(self, before: list[RequestText | None], row: int, text: np.ndarray) -> RequestText:
        """The request of a text, most often in its old row, taken out of `before`; or a new one."""
        for place in (row, *range(len(before))):
            request = before[place] if place < len(before) else None
            if request is not None and request.goes_on_as(text):
                before[place] = None
                return request
        return RequestText(text[:0], 0, [Trust(drafter.came_true) for drafter in self.drafters])

    def _draft(self, request: RequestText) -> list[int]:
        if request.room <= 0:
            return []
        request.offers = [drafter.offer(cast(Any, request), self.tokens)[0] for drafter in self.drafters]
        offers = zip(request.trust, request.offers, strict=True)
        return max(offers, key=lambda offer: expected(*offer))[1].tokens


def expected(trust: Trust, chain: ProposedTree) -> float:
    """Tokens of a chain that are expected to be accepted: Σ Π of what its claims are worth."""
    total, joint = 0.0, 1.0
    for claim in chain.odds:
        joint *= trust(claim)
        total += joint
    return total


def named_drafters(named: Any, vocab_size: int, tokens: int) -> list[Lookup | Suffix]:
    """The drafters of names and directories. UsageError, CheckpointError: see `TextProposer`; vLLM shows only messages,
    so cures are in them."""
    if not isinstance(named, list) or not named or not all(isinstance(one, str) for one in named):
        raise UsageError(f'{KEY} is {named!r}; it is a list, such as ["lookup", "drafters/D-retrieval"]')
    return [_drafter(one, vocab_size, tokens) for one in named]


def _drafter(name: str, vocab_size: int, tokens: int) -> Lookup | Suffix:
    if name == "lookup":
        return Lookup()
    if name == "suffix":
        return Suffix(depth=tokens)
    if not Path(name).expanduser().is_dir():
        raise UsageError(f"no text drafter {name!r}; {KEY} has lookup, suffix and directories of datastores")
    found = checkpoint.load(Path(name).expanduser())
    family, size = found.config["family"], cast(Mapping[str, Any], found.config["target"]).get("vocab_size")
    if family != "retrieval":
        raise UsageError(f"{name} is no datastore; specctl export {name} --to vllm prints the command for {family}")
    if size != vocab_size:
        raise UsageError(f"{name} is of a target of {size} tokens, this model has {vocab_size}: collect its own")
    return Suffix(depth=tokens, corpus=retrieval.restore(found.config, found.tensors))
