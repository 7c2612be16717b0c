"""Recipe of lookahead reasoning: `specctl online --algo lr | osd-lr | online-lr`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from specctl.families import LM
from specctl.recipe.learner import rule_and_family
from specctl.recipe.lookahead import LOOKAHEAD_CHUNK, REASONING, LookaheadRecipe, ReasoningMode
from specctl.recipe.online import OnlineRecipe
from specctl.recipe.sections import DraftingRecipe, Names, SamplingRecipe
from specctl.recipe.stream import LearningRecipe

REPLACEMENTS = {
    "arch": "the draft model is an LM",
    "init": "name the draft LM by reasoning.draft",
    "learner": "set reasoning.learning",
    "baselines": "set reasoning.baselines",
    "save_outputs": "every text is in traces.jsonl",
}
"""Keys of token-level learning that lookahead reasoning lacks, with the advice for each."""
SHARED_KEYS = ("temperature", "top_k", "top_p", "seed")
"""Keys that `sampling` and `reasoning` share: either section may set them."""


class ReasonRecipe(LearningRecipe):
    """Lookahead reasoning along a stream: every prompt is answered in all `modes`.

    The keys of `OnlineRecipe` that are missing here belong to token-level learning. They may be given with their
    default values, and the JSON form contains them, so that the command has one form of recipe.
    """

    algo: Annotated[Names, Field(min_length=1)] = ["lr"]
    reasoning: LookaheadRecipe = LookaheadRecipe()

    @model_validator(mode="before")
    @classmethod
    def _check_steps(cls, values: Any) -> Any:
        """Remove the keys of token-level learning. Raises ValueError if one of them is not at its default."""
        if not isinstance(values, Mapping):
            return values
        unused = [name for name in _token_level_keys() if name in values and not _is_default(name, values[name])]
        if unused:
            raise _token_level_error(unused[0], values.get("algo", "lr"), REPLACEMENTS.get(unused[0], ""))
        return {name: value for name, value in values.items() if name not in _token_level_keys()}

    @field_validator("algo")
    @classmethod
    def _known(cls, algo: list[str]) -> list[str]:
        tokens = [name for name in algo if name not in REASONING and rule_and_family(name)]
        if tokens:
            steps = ", ".join(name for name in algo if name in REASONING)
            raise ValueError(f"{steps} drafts steps, but the other algos draft tokens: use separate runs")
        if len(set(algo)) < len(algo):
            raise ValueError("names an algo twice")
        return algo

    @model_validator(mode="after")
    def _consistent(self) -> ReasonRecipe:
        if self.drafting != DraftingRecipe() and self.reasoning.drafter is None:
            raise _token_level_error("drafting", self.algo, "it configures reasoning.drafter, which is not set")
        sampling = SamplingRecipe()
        if (self.sampling.max_new_tokens, self.sampling.exact) != (sampling.max_new_tokens, sampling.exact):
            raise ValueError(
                f"max_new_tokens and exact are for token-level learning, not for {self.algo[0]}: "
                "set reasoning.budget and reasoning.answer_tokens"
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
            said = {getattr(part, name) for part in sections}
            if len(said) > 1:
                values = " or ".join(map(str, sorted(said)))
                raise ValueError(
                    f"sampling.{name} and reasoning.{name} are the same setting, but differ ({values}): set one"
                )
            found[name] = said.pop() if said else getattr(self.reasoning, name)
        self.sampling = self.sampling.model_copy(update=found)
        self.reasoning = self.reasoning.model_copy(update=found)

    def _with_math(self) -> None:
        """Set the domain `math` if none is named: texts of other domains have one line and hardly any steps."""
        if "domain" not in self.data.model_fields_set and self.data.source != "unconditional":
            self.data = self.data.model_copy(update={"domain": ["math"]})

    @model_serializer(mode="wrap", when_used="json")
    def _without_passwords(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the JSON form of the command's recipe, with the keys of token-level learning at their defaults."""
        return OnlineRecipe().model_dump(mode="json") | super()._without_passwords(inner)

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


def _token_level_keys() -> list[str]:
    """Return the keys that only token-level learning uses."""
    return [name for name in OnlineRecipe.model_fields if name not in ReasonRecipe.model_fields]


def _is_default(name: str, value: Any) -> bool:
    """Whether a value is the default of a key of token-level learning."""
    field = OnlineRecipe.model_fields[name]
    try:
        return bool(TypeAdapter(field.rebuild_annotation()).validate_python(value) == field.default)
    except ValidationError:
        return False


def _token_level_error(name: str, algo: Any, instead: str) -> ValueError:
    first = algo.split(",")[0] if isinstance(algo, str) else algo[0]
    return ValueError(f"{name} is for token-level learning, not for {first}" + f": {instead}" * bool(instead))
