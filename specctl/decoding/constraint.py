"""Constraints on the form of a text, such as a JSON schema: the tokens that the target may write next.

The library llguidance parses grammars and texts. Here its answers are applied to the rows of a step: a token that would
break the form gets the logit −inf before the draw. Drafts are made without the constraint, and a draft token that
breaks it is rejected, so speculative decoding draws what plain decoding with the same constraint would draw.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specctl.errors import DataError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from specctl.decoding.target_text import TargetText


# Largest work on a regular expression, in llguidance's units. `(a{1000}){1000}` takes 0.04 s until it is refused, where
# llguidance's own limits, ten and four times as large, take 1.1 s. Meanwhile all texts of the batch wait.
LEXER_FUEL = 100_000


def grammar_tokenizer(target: TargetText) -> LLTokenizer:
    """The target's tokenizer for grammars. Making it takes seconds. DataError if it is not a fast tokenizer."""
    import llguidance.hf

    try:
        ends = sorted(target.eos_ids)
        return llguidance.hf.from_tokenizer(target.tokenizer, n_vocab=target.vocab_size, eos_token=ends)
    except ValueError as error:
        raise DataError(f"no form can be enforced with the tokenizer of {target.name}: {error}") from error


class Constraint:
    """Form of one text: the part of a sequence from position `start` on matches a grammar.

    It follows its text, so every text needs its own: see `copy`.

    Args:
        grammar: in llguidance's variant of Lark's language.
        start: length of the prompt.

    Raises DataError if the grammar is wrong, or needs what llguidance does not support.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, start: int = 0):
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, step_lexer_fuel=LEXER_FUEL // 2)
        self._vocab_size, self._start, self._read = tokenizer.vocab_size, start, 0
        self._matcher: LLMatcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        self._check()

    def copy(self, start: int) -> Constraint:
        """The same constraint for another text, with a prompt of `start` tokens. To be called before the first
        `allowed`."""
        made = object.__new__(Constraint)
        vars(made).update(vars(self), _start=start, _matcher=self._matcher.deep_copy())
        return made

    def allowed(self, ids: list[int], parents: list[int], tokens: list[int]) -> Tensor:
        """Tokens that may follow a text `ids` and each node of a draft: [1 + n, V] bool, the text's row first. Rows of
        nodes that break the form are True throughout: no draw reaches them.

        `parents` and `tokens` are the draft's, as in `DraftTree`. Raises DataError if the grammar gets too complex.
        """
        matcher, written = self._matcher, ids[self._start :]
        if self._read > len(written):  # a text that is tried again may have lost tokens
            matcher.rollback(self._read - len(written))
        matcher.consume_tokens(written[self._read :])
        self._read = len(written)
        self._check()
        children: dict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(parents):
            children[parent].append(node)
        rows = np.full((1 + len(tokens), self._vocab_size), True)

        def visit(node: int) -> None:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            rows[node + 1] = np.unpackbits(bits, count=rows.shape[1], bitorder="little")
            for child in children[node]:
                if matcher.try_consume_tokens([tokens[child]]):
                    visit(child)
                    matcher.rollback(1)

        visit(-1)
        self._check()
        return torch.from_numpy(rows)

    def _check(self) -> None:
        if self._matcher.is_error():
            first, *others = self._matcher.get_error().splitlines()
            # Of a regular expression, the first line ends before the reason.
            reason = next((line for line in others if line.startswith("error: ")), "error: ").removeprefix("error: ")
            raise DataError(f"the form cannot be enforced: {first} {reason}".rstrip())
