"""Lookahead reasoning over a stream: every mode answers every prompt, and learning modes learn after each chunk.

    for arrivals in stream.chunks():
        chunk = reasoning.chunk(arrivals)          # one ReasoningTrace per mode and prompt, one lesson per learner

Mode `target` is the target alone, `draft` the draft LM alone. `lr` does not learn, `osd-lr` imitates the target's steps
(SFT), and `online-lr` learns to prefer them (DPO).
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specctl.adaptation.stream import EncodedPrompt
from specctl.decoding.models.loading import load_model, load_tokenizer
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.drafters import checkpoint
from specctl.drafters.lm.model import cast
from specctl.drafters.pool import load_module, merge_adapter, read_drafter
from specctl.errors import CheckpointError
from specctl.families import LM
from specctl.lab.reasoning.judge import Judge
from specctl.lab.reasoning.lookahead import Lookahead, ReasoningTrace
from specctl.lab.reasoning.options import LearningMode, LookaheadRecipe, ReasoningMode
from specctl.lab.reasoning.preferences import PreferenceLearner, PreferenceLesson
from specctl.lab.reasoning.writer import StepDrafter, Writer
from specctl.training.checkpoint import add_prefix, strip_prefix

WARMUP_TOKENS = 16
LEARNING: tuple[LearningMode, ...] = get_args(LearningMode)


@dataclass(frozen=True)
class DraftLM:
    """Draft model in fp32, the precision in which it learns, with its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: Any


@dataclass(frozen=True)
class ChunkRecord:
    """Results of a chunk.

    It holds the traces of every mode in the order of arrival, and lessons and learning time of the learning modes.
    """

    chunk: int
    traces: dict[ReasoningMode, list[ReasoningTrace]]
    lessons: dict[ReasoningMode, PreferenceLesson]
    learning_s: dict[ReasoningMode, float]


def load_draft_lm(name: str, target: Target) -> DraftLM:
    """Load a directory written by `train-drafter --arch lm`, or any causal LM of `transformers`.

    Raises CheckpointError if it does not exist, is of another family, or was made for another target.
    """
    path = Path(name).expanduser()
    if not checkpoint.is_drafter(path):
        return DraftLM(name, load_model(name, device=target.device, dtype=torch.float32), load_tokenizer(name))
    found = merge_adapter(read_drafter(path, target))
    if found.config["family"] != LM:
        raise CheckpointError(
            f"{name} is a drafter of family {found.config['family']}, which cannot write reasoning steps",
            "train a small LM instead: specctl train-drafter --arch lm",
        )
    return DraftLM(name, load_module(found, target).model.to(target.device), target.tokenizer)


class Reasoning:
    """Modes of one run, compared on the same prompts. `state` between chunks is all that a resumed run needs.

    Attributes:
        judges: for every mode with a judge; they share the model but not the cache, because modes are timed.
        learners: for every mode that learns.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftLM,
        recipe: LookaheadRecipe,
        modes: Sequence[ReasoningMode],
        *,
        judge: Judge,
        drafter: Drafter | None = None,
    ):
        """Set up the modes.

        Args:
            recipe: resolved here for the target.
            judge: only its `ask` is used.
            drafter: speculates on tokens inside the target's steps.

        Raises DataError if a draft LM with another tokenizer has no chat template.
        """
        self.target, self.draft, self.modes = target, draft, list(modes)
        self.recipe = recipe.resolved(target.name)
        self.judges = {mode: Judge(judge.ask) for mode in modes if mode not in ("target", "draft")}
        self.chunks = 0
        self._warm = False
        self.drafter = drafter
        self.learners = {
            mode: PreferenceLearner(copy.deepcopy(draft.model), draft.tokenizer, self.recipe, mode)
            for mode in LEARNING
            if mode in modes
        }
        self._answering = {mode: self._made(mode) for mode in modes}

    def chunk(self, arrivals: Sequence[EncodedPrompt], done: Callable[[], None] = lambda: None) -> ChunkRecord:
        """Answer every prompt in every mode, then learn. `done` is called after every prompt.

        Modes take turns prompt by prompt, in rotating order, so other load on the machine slows all of them equally.

        Raises Interrupted, with the learners anywhere in the chunk; resume from a `state()`.
        """
        if not self._warm:  # first calls are slow, in new and in resumed runs
            for answering in self._answering.values():
                answering.with_short_answers(WARMUP_TOKENS).answer(arrivals[0])
            self._warm = True
        for answering in self._answering.values():
            answering.forget()
        traces: dict[ReasoningMode, list[ReasoningTrace]] = {mode: [] for mode in self.modes}
        for place, arrival in enumerate(arrivals):
            turn = place % len(self.modes)
            for mode in self.modes[turn:] + self.modes[:turn]:
                traces[mode].append(self._answering[mode].answer(arrival))
            done()
        lessons: dict[ReasoningMode, PreferenceLesson] = {}
        seconds: dict[ReasoningMode, float] = {}
        for mode, learner in self.learners.items():
            started = time.perf_counter()
            lessons[mode] = learner.learn([one for trace in traces[mode] for one in trace.mismatches])
            self._answering[mode].draft = self._drafting(learner.played())  # also drops its old keys and values
            seconds[mode] = time.perf_counter() - started
        self.chunks += 1
        return ChunkRecord(self.chunks, traces, lessons, seconds)

    def state(self) -> dict[str, Tensor]:
        """States of all learners; the names of tensors begin with the mode."""
        found: dict[str, Tensor] = {}
        for mode, learner in self.learners.items():
            found |= add_prefix(f"{mode}.", learner.state())
        return found

    def restore(self, state: dict[str, Tensor], chunks: int) -> None:
        """Resume after `chunks` chunks from a `state()`. Raises CheckpointError if it has other modes or models."""
        modes = dict.fromkeys(name.partition(".")[0] for name in state)
        if set(modes) != set(self.learners):
            raise CheckpointError(
                f"the saved state has the modes {', '.join(modes)}", "resume with the same modes as the run"
            )
        for mode, learner in self.learners.items():
            learner.restore(strip_prefix(f"{mode}.", state))
            self._answering[mode].draft = self._drafting(learner.played())
        self.chunks = chunks

    def _made(self, mode: ReasoningMode) -> Lookahead:
        draft = None if mode == "target" else self._drafting(copy.deepcopy(self.draft.model))
        if mode == "draft":
            assert draft is not None
            return _DraftAlone(draft, self.recipe)
        return Lookahead(Writer(self.target, self.recipe, self.drafter), self.recipe, draft, self.judges.get(mode))

    def _drafting(self, model: PreTrainedModel) -> StepDrafter:
        """Set up the draft LM on the decoding core, in the target's dtype; takes ownership of `model`."""
        playing = cast(model, self.target.device, self.target.dtype).eval()
        return StepDrafter(Writer(Target(self.draft.name, playing, self.draft.tokenizer), self.recipe), self.target)


class _DraftAlone(Lookahead):
    """Mode `draft`: the draft LM answers alone, in its own tokens."""

    def __init__(self, draft: StepDrafter, recipe: LookaheadRecipe):
        super().__init__(draft.writer, recipe)
        self._own = draft

    def answer(self, arrival: EncodedPrompt) -> ReasoningTrace:
        return super().answer(EncodedPrompt(arrival.prompt, self._own.text(arrival, [])))
