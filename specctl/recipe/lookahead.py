"""Lookahead reasoning (`specctl online --algo lr | osd-lr | online-lr`): steps, judge, budget and what is learnt from.

Settings of Lookahead Reasoning (Fu et al. 2025, arXiv 2506.19830) and of its online preference learning in OnlineSpec.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from specctl.recipe.sections import Fraction, Name, PositiveFloat, Section

ReasoningMode = Literal["target", "draft", "lr", "osd-lr", "online-lr"]
LearningMode = Literal["osd-lr", "online-lr"]
REASONING = ("lr", "osd-lr", "online-lr")  # the modes that are an `algo` of specctl online
LONGEST_LOOKAHEAD = 4  # steps
LOOKAHEAD_CHUNK = 25  # prompts between two updates
FULL_BELOW = 1_000_000_000  # parameters: larger draft models learn an adapter


class JudgeRecipe(Section):
    """Who decides whether two steps mean the same."""

    kind: Literal["exact", "embedding", "model"] = "exact"
    # embedding: a local sentence encoder; model: a chat model, by Hugging Face id or directory, or the name under which
    # `endpoint` serves one
    name: Name | None = None
    revision: Name | None = None
    endpoint: Name | None = None  # OpenAI-compatible, such as http://localhost:8000/v1
    key_variable: Name = "OPENAI_API_KEY"  # environment variable with the endpoint's key
    threshold: Fraction = 0.95  # embedding: cosine from which on two steps are aligned
    timeout_s: PositiveFloat = 30.0  # of one request
    max_tokens: PositiveInt = 16  # of a ruling
    batch_size: PositiveInt = 32

    @model_validator(mode="after")
    def _complete(self) -> JudgeRecipe:
        if self.kind != "exact" and self.name is None:
            raise ValueError(f"judge.kind={self.kind} needs judge.name, a model")
        if self.endpoint is not None and self.kind != "model":
            raise ValueError("judge.endpoint serves a chat model: set judge.kind=model")
        return self


class PreferenceRecipe(Section):
    """How a draft model learns from a chunk's disagreements; None = by mode and size of the model.

    OnlineSpec (appendix B.6) learns at 5e-7, SFT like DPO, and so do the recipes that replicate it. The default rates
    depart from that.
    """

    beta: PositiveFloat = 0.1  # of DPO (Rafailov et al. 2023)
    lr: PositiveFloat | None = None
    epochs: PositiveInt | None = None
    batch: PositiveInt = 16
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.95]  # of AdamW
    clip: PositiveFloat = 1.0
    max_length: PositiveInt = 4096  # tokens of context and step; of longer ones the end
    lora: bool | None = None  # None = above a billion parameters
    lora_rank: PositiveInt = 16
    lora_alpha: PositiveFloat = 32.0


class LookaheadRecipe(Section):
    """One protocol for all modes; None = the built-in target's value or that of a reasoning model (`resolved`)."""

    # The LM that drafts steps: a drafter directory of family lm, or any causal LM by Hugging Face id or directory.
    # None = ./drafters/<domain>-lm, warmed up if missing.
    draft: Name | None = None
    drafter: Name | None = None  # speculates on tokens inside the target's steps: a directory, lookup or suffix
    baselines: list[Literal["target", "draft", "lr"]] = ["target", "draft", "lr"]  # modes measured beside the algos
    delimiter: Annotated[str, Field(min_length=1)] | None = None  # ends a step
    # Steps that are drafted ahead; auto: as many as pay, of what is measured along the stream, or none.
    depth: Annotated[int, Field(ge=1, le=LONGEST_LOOKAHEAD)] | Literal["auto"] = LONGEST_LOOKAHEAD
    step_tokens: PositiveInt = 100  # longest step
    budget: PositiveInt | None = None  # tokens of thinking
    transition: str | None = None  # what is said when the budget is spent, before the answer
    answer_tokens: PositiveInt | None = None  # longest answer behind it
    max_repeats: Annotated[int, Field(ge=2)] = 4  # the same step so many times in a row is a loop: thinking ends
    temperature: NonNegativeFloat = 0.6
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    repetition_penalty: PositiveFloat | None = None
    parallel: bool = True  # the target's steps for all prefixes in one batch; False: one by one, to compare
    judge: JudgeRecipe = JudgeRecipe()
    learning: PreferenceRecipe = PreferenceRecipe()
    allow_code_execution: bool = False  # run programs that the target wrote, to score them
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _one_way(self) -> LookaheadRecipe:
        if self.depth == "auto" and not self.parallel:
            raise ValueError("reasoning.parallel=false compares fixed depths: name one instead of auto")
        return self

    @property
    def longest(self) -> int:
        """Steps drafted ahead at most."""
        return LONGEST_LOOKAHEAD if self.depth == "auto" else self.depth

    def resolved(self, target: str) -> LookaheadRecipe:
        """With the settings of a target where the recipe names none. The built-in one writes one step a line, repeats
        numbers on purpose and knows no instructions but the beginning of an answer."""
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
        """`learning.lr`, or 1e-5 for SFT (the paper: 5e-7), and for DPO the paper's 5e-7 on a model of 600 million
        parameters, growing as models shrink: with the inverse square root of their size. (SFT on a chunk's few steps
        does not bear that: at 1.5e-4 a model of 2.5 million had 28 of 195 steps accepted after three chunks, at 1e-5
        38, before 39; DPO at 8e-6 39.)
        """
        if self.learning.lr is not None:
            return self.learning.lr
        return 1e-5 if mode == "osd-lr" else 5e-7 * max(1.0, (6e8 / parameters) ** 0.5)

    def epochs_of(self, mode: LearningMode) -> int:
        """`learning.epochs`, or the paper's (OnlineSpec, appendix B.6): one of SFT, three of DPO."""
        return self.learning.epochs or (1 if mode == "osd-lr" else 3)


TRANSITION = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
    "</think>\n\n"
)
"""Said when a thinking model has spent its budget: the words Qwen3 was trained with (Yang et al. 2025, section 4.4)."""
