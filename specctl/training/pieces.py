"""Texts that are too long for a step, cut into pieces.

The loss of a response is a sum over its slots. A piece trains some of these slots. The tokens before them are context,
and the tokens after them are predicted by the draft steps of the last trained slot.

A slot's loss depends on its own position in heads without attention, and on the positions of a window in heads with a
window. If a piece has all these positions, the losses of the pieces add up to the loss of the text. Other heads attend
to the whole text. In a piece, they attend to the piece alone, which is an approximation.

Positions count from the start of the text, and the target's states come from the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as numbers_from
from typing import Any

from specctl.errors import RecipeError
from specctl.progress import log
from specctl.recipe import TrainRecipe
from specctl.training.data import Corpus
from specctl.training.example import Example


@dataclass(frozen=True)
class Cut:
    """How long texts are cut.

    Attributes:
        length: largest number of tokens in a piece.
        prefix: smallest number of tokens before the trained tokens of a piece, if the text has that many.
        exact: no slot depends on more tokens than the prefix has.
        steps: number of draft steps; each step after the first reads one more token.
    """

    length: int
    prefix: int
    exact: bool
    steps: int

    @classmethod
    def of(cls, recipe: TrainRecipe, module: Any) -> Cut | None:
        """The cut that a recipe asks for, for a drafter's module, or None. RecipeError if a piece has no room."""
        if recipe.piece_length is None:
            return None
        sight, steps = getattr(module, "sight", None), getattr(module, "steps", 1)
        prefix = recipe.piece_prefix
        if prefix is None:
            prefix = recipe.piece_length // 4 if sight is None else min(sight, recipe.piece_length // 2)
        prefix = max(1, prefix)
        if prefix + 2 * steps >= recipe.piece_length:
            raise RecipeError(
                f"piece_length={recipe.piece_length} has no room for {prefix} tokens before the trained ones and "
                f"{steps} draft steps after them",
                f"raise piece_length to more than {prefix + 2 * steps}, or lower piece_prefix",
            )
        return cls(recipe.piece_length, prefix, sight is not None and sight <= prefix, steps)

    def __call__(self, examples: Sequence[Example]) -> list[Example]:
        """Replace each text that is longer than a piece by its pieces. The first piece keeps the index of the text; the
        other pieces get new indices."""
        free = numbers_from(1 + max((example.index for example in examples), default=-1))
        made: list[Example] = []
        for example in examples:
            first, *later = self._pieces(example)
            made += [first, *(replace(piece, index=next(free)) for piece in later)]
        return made

    def corpus(self, corpus: Corpus) -> Corpus:
        """The corpus with its training texts and held-out responses in pieces. Logs how many texts were cut, and what
        that changes."""
        train = self(corpus.train)
        pieces = [example for example in train if example.is_piece]
        texts = len(corpus.train) - (len(train) - len(pieces))
        if pieces:
            how = "their loss is the same as that of whole texts"
            if not self.exact:
                how = f"a slot in a piece attends to at least {self.prefix} tokens before it, not to the whole text"
            log(f"{texts} texts longer than piece_length {self.length} are cut into {len(pieces)} pieces: {how}")
        counts = corpus.counts | {"in_pieces": texts}
        return replace(corpus, train=train, responses=list(map(self, corpus.responses)), counts=counts)

    def _pieces(self, example: Example) -> list[Example]:
        """The pieces of a text, all with its index."""
        tokens, prompt = example.tokens, example.prompt_length
        if len(tokens) <= self.length:
            return [example]
        slots = example.response_length - 1  # of the response; slot r predicts token prompt + r + 1
        found: list[Example] = []
        done = 0
        while done < slots:
            begin = prompt + done  # first token after the context
            before = min(begin, self.prefix)
            room = self.length - before  # tokens from `begin` on
            stop = len(tokens)
            count = slots - done
            if count + 1 > room:
                count = room - self.steps
                stop = begin + room
            first = begin - before if self.exact else max(0, stop - self.length)
            found.append(
                replace(
                    example,
                    tokens=tokens[first:stop],
                    prompt_length=begin - first,
                    whole=tokens,
                    start=first,
                    number=example.index,
                    done=done,
                    shared=stop - begin - count if done + count < slots else 0,
                )
            )
            done += count
        return found
