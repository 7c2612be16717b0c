"""Recipe of lookahead reasoning: `specctl reason`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from specctl.errors import did_you_mean
from specctl.families import LM
from specctl.lab.reasoning.options import LOOKAHEAD_CHUNK, LookaheadRecipe, ReasoningMode
from specctl.recipe.learner import STEP_ALGOS
from specctl.recipe.sections import DraftingRecipe, Names, SamplingRecipe
from specctl.recipe.stream import LearningRecipe

SHARED_KEYS = ("temperature", "top_k", "top_p", "seed")
"""Keys that `sampling` and `reasoning` share: either section may set them."""


class ReasonRecipe(LearningRecipe):
    """`specctl reason`: lookahead reasoning along a stream. Every prompt is answered in all `modes`."""

    algo: Annotated[Names, Field(min_length=1)] = ["lr"]
    reasoning: LookaheadRecipe = LookaheadRecipe()

    @field_validator("algo")
    @classmethod
    def _known(cls, algo: list[str]) -> list[str]:
        for name in algo:
            if name not in STEP_ALGOS:
                near = did_you_mean(name, STEP_ALGOS) or f"use {', '.join(STEP_ALGOS)}; specctl online drafts tokens"
                raise ValueError(f"{name!r} is no algo that drafts steps: {near}")
        if len(set(algo)) < len(algo):
            raise ValueError("names an algo twice")
        return algo

    @model_validator(mode="after")
    def _consistent(self) -> ReasonRecipe:
        if self.drafting != DraftingRecipe() and self.reasoning.drafter is None:
            raise ValueError("drafting configures reasoning.drafter, which is not set")
        sampling = SamplingRecipe()
        if (self.sampling.max_new_tokens, self.sampling.exact) != (sampling.max_new_tokens, sampling.exact):
            raise ValueError(
                "max_new_tokens and exact have no effect on steps: set reasoning.budget and reasoning.answer_tokens"
            )
        self._sample_alike()
        self._with_math()
        self._check_stdin()
        return self

    def _sample_alike(self) -> None:
        """Make the shared keys of `sampling` and `reasoning` equal; a resolved recipe sets them in both sections."""
        found = {}
        for name in SHARED_KEYS:
            sections = [part for part in (self.sampling, self.reasoning) if name in part.model_fields_set]
            given = {getattr(part, name) for part in sections}
            if len(given) > 1:
                values = " or ".join(map(str, sorted(given)))
                raise ValueError(
                    f"sampling.{name} and reasoning.{name} are the same setting, but differ ({values}): set one"
                )
            found[name] = given.pop() if given else getattr(self.reasoning, name)
        self.sampling = self.sampling.model_copy(update=found)
        self.reasoning = self.reasoning.model_copy(update=found)

    def _with_math(self) -> None:
        """Set the domain `math` if none is named: texts of other domains have one line and hardly any steps."""
        if "domain" not in self.data.model_fields_set and self.data.source != "unconditional":
            self.data = self.data.model_copy(update={"domain": ["math"]})

    @property
    def modes(self) -> list[ReasoningMode]:
        """Modes of lookahead reasoning, baselines first."""
        return list(dict.fromkeys([*self.reasoning.baselines, *self.algo]))  # type: ignore[list-item]

    @property
    def draft(self) -> str:
        """Name or directory of the LM that drafts steps."""
        return self.reasoning.draft or str(self.initial_drafter(LM))

    @property
    def families(self) -> list[str]:
        """Family of the draft LM, unless `reasoning.draft` names an LM."""
        return [] if self.reasoning.draft is not None else [LM]

    @property
    def chunk(self) -> int:
        """Prompts between two updates."""
        return self.stream.chunk or LOOKAHEAD_CHUNK
