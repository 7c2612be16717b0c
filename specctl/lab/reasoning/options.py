"""Recipe sections of lookahead reasoning (`specctl reason`).

The settings are from Lookahead Reasoning (Fu et al. 2025, arXiv 2506.19830) and from its online preference learning in
OnlineSpec.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from specctl.recipe.sections import Betas, Fraction, Name, PositiveFloat, Section

ReasoningMode = Literal["target", "draft", "lr", "osd-lr", "online-lr"]
LearningMode = Literal["osd-lr", "online-lr"]
LONGEST_LOOKAHEAD: Final = 4  # steps drafted ahead
LOOKAHEAD_CHUNK = 25  # prompts between two updates
FULL_BELOW = 1_000_000_000  # parameters: larger draft models learn an adapter


class JudgeRecipe(Section):
    """The judge that decides whether two steps mean the same."""

    kind: Literal["exact", "embedding", "model"] = "exact"
    # embedding: a local sentence encoder. model: a chat model, by Hugging Face id or directory, or by the name under
    # which `endpoint` serves it.
    name: Name | None = None
    revision: Name | None = None
    endpoint: Name | None = None  # OpenAI-compatible address, such as http://localhost:8000/v1
    key_variable: Name = "OPENAI_API_KEY"  # environment variable that holds the endpoint's key
    threshold: Fraction = 0.95  # embedding: least cosine similarity of two steps that mean the same
    timeout_s: PositiveFloat = 30.0  # per request
    max_tokens: PositiveInt = 16  # longest answer of the judge
    batch_size: PositiveInt = 32

    @model_validator(mode="after")
    def _complete(self) -> JudgeRecipe:
        if self.kind != "exact" and self.name is None:
            raise ValueError(f"judge.kind={self.kind} needs a model: set judge.name")
        if self.endpoint is not None and self.kind != "model":
            raise ValueError("judge.endpoint serves a chat model: set judge.kind=model")
        return self


class PreferenceRecipe(Section):
    """Preference learning: how a draft model learns from the steps of a chunk that the judge rejected.

    A default None depends on the mode and on the size of the model. OnlineSpec (appendix B.6) uses the learning rate
    5e-7 for both SFT and DPO, and so do the recipes that replicate it. The default rates differ.
    """

    beta: PositiveFloat = 0.1  # β of DPO (Rafailov et al. 2023)
    lr: PositiveFloat | None = None
    epochs: PositiveInt | None = None
    batch: PositiveInt = 16
    betas: Betas = [0.9, 0.95]  # of AdamW
    clip: PositiveFloat = 1.0
    max_length: PositiveInt = 4096  # tokens of context and step; longer texts lose their beginning
    lora: bool | None = None  # learn a LoRA adapter (None = only above a billion parameters)
    lora_rank: Annotated[int, Field(ge=1, le=4096)] = 16
    lora_alpha: PositiveFloat = 32.0


class LookaheadRecipe(Section):
    """Settings of all modes of lookahead reasoning.

    A default None has one value for the built-in target and one for reasoning models (`resolved`).
    """

    # The LM that drafts steps: a drafter directory of family lm, or any causal LM by Hugging Face id or directory. The
    # default is ./drafters/<domain>-lm, which is warmed up if it is missing.
    draft: Name | None = None
    drafter: Name | None = None  # drafts tokens inside the target's steps: a directory, lookup or suffix
    baselines: list[Literal["target", "draft", "lr"]] = ["target", "draft", "lr"]  # modes for comparison
    delimiter: Annotated[str, Field(min_length=1)] | None = None  # text that ends a step
    # Number of steps drafted ahead. auto: as many as save time by measurements along the stream, or none.
    depth: Literal[1, 2, 3, 4, "auto"] = LONGEST_LOOKAHEAD
    step_tokens: PositiveInt = 100  # longest step, in tokens
    budget: PositiveInt | None = None  # longest thinking, in tokens
    transition: str | None = None  # text inserted before the answer when the budget is spent
    answer_tokens: PositiveInt | None = None  # longest answer, in tokens
    max_repeats: Annotated[int, Field(ge=2)] = 4  # thinking ends if a step occurs this often in a row
    temperature: NonNegativeFloat = 0.6
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: PositiveFloat | None = None
    parallel: bool = True  # the target writes its steps for all prefixes in one batch; false = in turn
    judge: JudgeRecipe = JudgeRecipe()
    learning: PreferenceRecipe = PreferenceRecipe()
    allow_code_execution: bool = False  # run programs that the target wrote, to score them
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _one_way(self) -> LookaheadRecipe:
        if self.depth == "auto" and not self.parallel:
            raise ValueError("reasoning.parallel=false needs a fixed depth: set reasoning.depth to a number")
        return self

    @property
    def longest(self) -> int:
        """Largest number of steps drafted ahead."""
        return LONGEST_LOOKAHEAD if self.depth == "auto" else self.depth

    def resolved(self, target: str) -> LookaheadRecipe:
        """Return this section with the settings for a target filled in, unless the recipe names them.

        The built-in target writes one step per line, repeats numbers on purpose, and understands no instruction except
        the beginning of an answer.
        """
        builtin = target == "builtin"
        found = {
            "delimiter": "\n" if builtin else "\n\n",
            "budget": 200 if builtin else 1024,
            "transition": "\n####" if builtin else TRANSITION,
            "answer_tokens": 16 if builtin else 512,
            "repetition_penalty": 1.0 if builtin else 1.2,
        }
        return self.model_copy(update={name: value for name, value in found.items() if getattr(self, name) is None})

    def rate_of(self, mode: LearningMode, parameters: int) -> float:
        """Return the learning rate: `learning.lr`, or a default that depends on mode and number of parameters.

        SFT (`osd-lr`) learns at 1e-5; the paper has 5e-7. DPO learns at the paper's 5e-7 from 600 million parameters
        on, and for smaller models at a rate that grows with the inverse square root of their size.

        SFT on the few steps of a chunk does not tolerate such a rate. A model of 2.5 million parameters had 39 of 195
        steps accepted at first. After three chunks it had 28 with SFT at 1.5e-4, 38 with SFT at 1e-5, and 39 with DPO
        at 8e-6.
        """
        if self.learning.lr is not None:
            return self.learning.lr
        return 1e-5 if mode == "osd-lr" else 5e-7 * max(1.0, (6e8 / parameters) ** 0.5)

    def epochs_of(self, mode: LearningMode) -> int:
        """Return `learning.epochs`, or the paper's number (OnlineSpec, appendix B.6): one for SFT, three for DPO."""
        return self.learning.epochs or (1 if mode == "osd-lr" else 3)


TRANSITION = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    "</think>\n\n"
)
"""Text inserted when a thinking model has spent its budget, as in Qwen3's training (Yang et al. 2025, section 4.4)."""
