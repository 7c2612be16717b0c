"""Proposer for vLLM with text drafters, which need no forward: `lookup`, `suffix` and datastores (`retrieval`).

    vllm serve MODEL --additional-config '{"specctl_drafters": ["lookup", "drafters/sql-retrieval"]}' \\
      --speculative-config '{"method": "custom_class", "model": "specctl.engines.vllm_proposer.TextProposer",
                             "num_speculative_tokens": 7}'

vLLM loads this file in its own environment (`pip install --no-deps CHECKOUT`). With several drafters, each proposes a
chain in every round, and the chain with the longest expected accepted length becomes the draft. The expectation comes
from the probabilities that a drafter claims, corrected by how often such claims came true in this text (`Calibration`).
Proposals cost no forward, so in every round each drafter's claims are compared with the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from specctl.drafters import checkpoint
from specctl.drafters.hybrid.candidates import Calibration
from specctl.drafters.retrieval.drafter import FAMILY as RETRIEVAL
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.text.suffix import Suffix
from specctl.drafters.tree import ProposedTree
from specctl.errors import UsageError

KEY = "specctl_drafters"
"""Key in vLLM's `additional_config` that lists names and directories of drafters."""
CPU = torch.device("cpu")


@dataclass(eq=False)
class RequestText:
    """A text that vLLM is decoding, in the form of a batch of one that text drafters read.

    Attributes:
        text: [length] prompt and output up to now; `ids` holds the same tokens as a list.
        room: maximum number of draft tokens.
        trust: trust in the claims of each drafter.
        proposals: proposals of each drafter in the last round. They continue the text at length `end`.
    """

    text: np.ndarray
    draft_room: int
    trust: list[Calibration]
    ids: list[int] = field(default_factory=list)
    proposals: list[ProposedTree] = field(default_factory=list)
    end: int = 0
    memory: dict[Any, Any] = field(default_factory=dict)
    batch: int = 1
    device: torch.device = CPU
    exact_rows: bool = True  # drafters propose chains, not trees

    @property
    def rows(self) -> list[RequestText]:
        return [self]

    def is_prefix_of(self, text: np.ndarray) -> bool:
        """Whether `text` begins with this text."""
        size = len(self.text)
        return size <= len(text) and text[size - 1] == self.text[-1] and np.array_equal(text[:size], self.text)

    def extend(self, text: np.ndarray, longest: int) -> None:
        """Extend to `text`, which may grow to `longest` tokens, and record which claims of the last round came true."""
        self.ids += text[len(self.ids) :].tolist()
        self.text, self.draft_room = text.copy(), longest - len(text) - 1
        for trust, offer in zip(self.trust, self.proposals, strict=False):
            for token, claim, written in zip(offer.tokens, offer.probabilities, self.ids[self.end :], strict=False):
                trust.learn(claim, token == written)
                if token != written:
                    break
        self.proposals, self.end = [], len(self.ids)


class TextProposer:
    """Draft chains of text drafters for the requests of vLLM's V1 runner."""

    def __init__(self, vllm_config: Any):
        """Load the drafters. Raises UsageError or CheckpointError if one is invalid or has another vocabulary."""
        self.tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.longest: int = vllm_config.model_config.max_model_len
        named = (vllm_config.additional_config or {}).get(KEY, ["lookup"])
        self.drafters = named_drafters(named, vllm_config.model_config.get_vocab_size(), self.tokens)
        self.requests: list[RequestText] = []

    def load_model(self, *_: Any) -> None:
        """Do nothing: text drafters have no weights."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a chain for every row, empty if the row sampled no token, as in the middle of a prefill.

        Args:
            sampled_token_ids: tokens that each row sampled in this step.
            num_tokens_no_spec: [rows] lengths of the texts, including the sampled tokens.
            token_ids_cpu: [rows, max_model_len] the texts. Rows may change their order between steps.
        """
        before: list[RequestText | None] = [*self.requests]
        self.requests, drafts = [], []
        for row, sampled in enumerate(sampled_token_ids):
            text = token_ids_cpu[row, : num_tokens_no_spec[row]]
            request = self._known(before, row, text)
            request.extend(text, self.longest)
            self.requests.append(request)
            drafts.append(self._draft(request) if len(sampled) else [])
        return drafts

    def _known(self, before: list[RequestText | None], row: int, text: np.ndarray) -> RequestText:
        """Take the request with this text out of `before`, where it is usually still in its old row; or create one."""
        for place in (row, *range(len(before))):
            request = before[place] if place < len(before) else None
            if request is not None and request.is_prefix_of(text):
                before[place] = None
                return request
        return RequestText(text[:0], 0, [Calibration(drafter.calibration) for drafter in self.drafters])

    def _draft(self, request: RequestText) -> list[int]:
        if request.draft_room <= 0:
            return []
        request.proposals = [drafter.propose_trees(cast(Any, request), self.tokens)[0] for drafter in self.drafters]
        offers = zip(request.trust, request.proposals, strict=True)
        return max(offers, key=lambda offer: expected_accepted_length(*offer))[1].tokens


def expected_accepted_length(trust: Calibration, chain: ProposedTree) -> float:
    """Expected accepted length of a chain: Σ over its tokens of Π of the calibrated claims up to the token."""
    total, joint = 0.0, 1.0
    for claim in chain.probabilities:
        joint *= trust(claim)
        total += joint
    return total


def named_drafters(named: Any, vocab_size: int, tokens: int) -> list[Lookup | Suffix]:
    """Load drafters by names and directories.

    Raises UsageError, CheckpointError as `TextProposer` does. vLLM shows only messages, so hints are part of the
    message.
    """
    if not isinstance(named, list) or not named or not all(isinstance(one, str) for one in named):
        raise UsageError(f'{KEY} is {named!r}; it must be a list, such as ["lookup", "drafters/D-retrieval"]')
    return [_drafter(one, vocab_size, tokens) for one in named]


def _drafter(name: str, vocab_size: int, tokens: int) -> Lookup | Suffix:
    if name == "lookup":
        return Lookup()
    if name == "suffix":
        return Suffix(depth=tokens)
    if not Path(name).expanduser().is_dir():
        raise UsageError(f"no text drafter {name!r}; {KEY} may contain lookup, suffix and directories of datastores")
    found = checkpoint.load(Path(name).expanduser())
    family, size = found.config["family"], cast(Mapping[str, Any], found.config["target"]).get("vocab_size")
    if family != "retrieval":
        raise UsageError(
            f"{name} is not a datastore; `specctl export {name} --to vllm` prints the command for {family}"
        )
    if size != vocab_size:
        raise UsageError(
            f"{name} was made for a target of {size} tokens, but this model has {vocab_size}: collect a "
            "datastore for it"
        )
    return Suffix(depth=tokens, corpus=RETRIEVAL.restore(found.config, found.tensors))
