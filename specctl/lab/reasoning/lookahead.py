"""Lookahead reasoning (Fu et al. 2025, arXiv 2506.19830): a draft LM writes some steps ahead, the target checks them.

    steps s₁ … s_d of the draft LM                           writer.py
    t₁ … t_{d+1}: the target's own step after each prefix    one batch through the decoding core
    judge: s₁ ≈ t₁, s₂ ≈ t₂, …                               judge.py
    keep s₁ … s_a, the longest aligned run, then t_{a+1}

The resulting text is not the target's own: kept steps only have the same meaning according to the judge. Therefore
final answers are always compared with the answers of the target alone.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from specctl.adaptation.draft_length import DECAY, TRIAL_EVERY, best_length
from specctl.adaptation.stream import EncodedPrompt
from specctl.lab.reasoning.answers import correct, extract
from specctl.lab.reasoning.judge import Judge
from specctl.lab.reasoning.options import LookaheadRecipe
from specctl.lab.reasoning.writer import Proposal, Step, StepDrafter, Writer, WritingWork, repeats_itself
from specctl.progress import interrupts

Stop = Literal["final", "budget", "loop"]
END_OF_THINKING = "</think>"  # marker by which a thinking model ends its thinking


@dataclass(frozen=True)
class Mismatch:
    """Drafted step that the judge found to differ, as a training pair in the draft model's tokens.

    `context` includes all kept steps. `chosen` is the target's step, `rejected` the draft's, both with delimiters; both
    are also given as text.
    """

    prompt_id: str
    context: list[int]
    chosen: list[int]
    rejected: list[int]
    chosen_text: str
    rejected_text: str


@dataclass
class ReasoningTrace:
    """Answer to one prompt, with statistics of its generation.

    Attributes:
        ids: all tokens after the prompt, in the writer's tokens, including the transition.
        stop: reason for the end: the text ended itself, or was cut at the budget or in a loop.
        rounds: number of batches of target steps.
        target_steps, own_steps: steps that the target wrote in these rounds, and how many of them were kept.
        cut: steps of the text that ended at the length limit, without a delimiter.
        drafted, accepted: steps of the draft LM, and how many of them were kept.
        rejected: rounds that ended with a rejected draft step.
        accepted_tokens: tokens of the kept draft steps.
        seconds, draft_s, judge_s: wall-clock time in total, in the draft LM and in the judge.
        target, draft: work of the two models.
        flops: of both models, counting products with weights only; the judge's are not counted.
        right: whether the answer is right, or None if the reference cannot tell.
    """

    prompt_id: str
    domain: str
    ids: list[int] = field(default_factory=list)
    text: str = ""
    stop: Stop = "final"
    rounds: int = 0
    target_steps: int = 0
    own_steps: int = 0
    cut: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    accepted_tokens: int = 0
    seconds: float = 0.0
    draft_s: float = 0.0
    judge_s: float = 0.0
    target: WritingWork = field(default_factory=WritingWork)
    draft: WritingWork = field(default_factory=WritingWork)
    flops: float = 0.0
    answer: str | None = None
    right: bool | None = None
    mismatches: list[Mismatch] = field(default_factory=list)


class Lookahead:
    """Answers prompts by lookahead reasoning; without a draft LM, the target writes alone, one step per round."""

    def __init__(
        self, target: Writer, recipe: LookaheadRecipe, draft: StepDrafter | None = None, judge: Judge | None = None
    ):
        """`recipe` must be resolved; a `draft` needs a `judge`."""
        assert recipe.budget is not None and recipe.answer_tokens is not None, "resolved() fills these in"
        self.target, self.recipe, self.draft, self.judge = target, recipe, draft, judge
        self.budget, self.answer_tokens = recipe.budget, recipe.answer_tokens
        self.transition = recipe.transition or ""
        self.auto = AutoDepth(recipe.longest) if draft is not None and recipe.depth == "auto" else None

    def answer(self, arrival: EncodedPrompt) -> ReasoningTrace:
        """Think, then answer. A prompt that leaves little room in the context gets a short answer, or none.

        Raises Interrupted between steps.
        """
        trace = ReasoningTrace(arrival.prompt.id, arrival.prompt.domain)
        before = self._work()
        with _clock(trace, "seconds"):
            thought = self._think(arrival, trace)
            over = trace.stop == "final" or END_OF_THINKING in self.target.stepper.text(thought)
            trace.ids = thought if over else self._conclude(arrival, thought)
        trace.target, trace.draft = (now.since(then) for now, then in zip(self._work(), before, strict=True))
        trace.flops = float(trace.target.rows * self.target.model.row_flops)
        if self.draft is not None:
            trace.flops += trace.draft.rows * self.draft.writer.model.row_flops
        trace.text = self.target.stepper.text(trace.ids)
        trace.answer = extract(trace.text)
        allowed = self.recipe.allow_code_execution
        trace.right = correct(trace.text, arrival.prompt.reference, allow_code_execution=allowed)
        return trace

    def with_short_answers(self, tokens: int) -> Lookahead:
        """Return a copy with the same models for answers of at most `tokens` tokens; its judge has a separate cache."""
        found = copy.copy(self)
        found.budget, found.answer_tokens = min(self.budget, tokens), min(self.answer_tokens, tokens)
        found.judge = self.judge and Judge(self.judge.ask)
        return found

    def forget(self) -> None:
        """Clear cached texts and the measurements of drafting.

        After that, results and work do not depend on where a run was resumed, and a draft LM that has learned is
        measured anew.
        """
        self.target.forget()
        if self.auto is not None:
            self.auto.forget()
        if self.draft is not None:
            self.draft.writer.forget()

    def _work(self) -> tuple[WritingWork, WritingWork]:
        """Total work of the target and of the draft LM."""
        draft = WritingWork() if self.draft is None else self.draft.writer.work
        return self.target.work.since(WritingWork()), draft.since(WritingWork())

    def _think(self, arrival: EncodedPrompt, trace: ReasoningTrace) -> list[int]:
        """Write steps until the text ends, repeats itself, or the budget is spent.

        A model that ends its thinking by itself is already writing the answer, so it may also use the tokens reserved
        for that.
        """
        room = self.target.model.context_length - len(arrival.ids)
        budget = min(self.budget, room - self.answer_tokens - len(self._transition([])))
        thought: list[int] = []
        steps: list[Step] = []
        while len(thought) < budget:
            interrupts.check()
            added, accepted = self._round(arrival, thought, budget - len(thought), trace)
            for place, step in enumerate(added):
                thought, steps = thought + step.ids, [*steps, step]
                trace.cut += step.end == "limit"
                if place < accepted:
                    trace.accepted += 1
                    trace.accepted_tokens += len(step.ids)
                else:
                    trace.own_steps += 1
                if step.end == "final":
                    return thought
                if END_OF_THINKING in step.text:
                    budget = min(self.budget + self.answer_tokens, room)
                if repeats_itself(steps, self.recipe.max_repeats):
                    trace.stop = "loop"
                    return thought
        trace.stop = "budget"
        return thought

    def _round(
        self, arrival: EncodedPrompt, thought: list[int], room: int, trace: ReasoningTrace
    ) -> tuple[list[Step], int]:
        """Run one round. Returns the added steps and how many of them were drafted.

        The added steps are the longest aligned run of drafted steps, then the target's own step.
        """
        seed, began = self._seed(arrival), time.perf_counter()
        depth = self.recipe.longest if self.auto is None else self.auto.next()
        proposals: list[Proposal] = []
        if self.draft is not None:
            with _clock(trace, "draft_s"):
                proposals = self.draft.propose(arrival, thought, depth, room, seed)
        drafted = [proposal.step for proposal in proposals]
        prefixes = list(accumulate((step.ids for step in drafted), initial=thought))
        if drafted and (drafted[-1].end == "final" or len(prefixes[-1]) >= len(thought) + room):
            prefixes.pop()  # nothing can follow
        own: list[Step] = []
        accepted = 0
        for batch in [prefixes] if self.recipe.parallel else [[prefix] for prefix in prefixes]:
            limits = [len(thought) + room - len(prefix) for prefix in batch]
            own += self.target.steps([arrival.ids + prefix for prefix in batch], limits, seed)
            rulings = self._aligned(drafted[accepted:], own[accepted:], trace)
            accepted += next((place for place, aligned in enumerate(rulings) if not aligned), len(rulings))
            if accepted < len(own):
                break
        rejected = accepted < min(len(drafted), len(own))
        if rejected:
            trace.rejected += 1
            self._record_mismatch(arrival, prefixes[accepted], proposals[accepted], own[accepted], trace)
        trace.rounds += 1
        trace.target_steps += len(own)
        trace.drafted += len(drafted)
        if self.auto is not None:
            self.auto.observe(len(drafted), accepted, accepted + rejected, time.perf_counter() - began)
        return drafted[:accepted] + own[accepted : accepted + 1], accepted

    def _aligned(self, drafted: list[Step], own: list[Step], trace: ReasoningTrace) -> list[bool]:
        """Decide for each drafted step whether it means the same as the target's step.

        Two aligned steps either both end the text or both continue it.
        """
        pairs = list(zip(drafted, own, strict=False))
        alike = [(mine.text, theirs.text) for mine, theirs in pairs if _final(mine) == _final(theirs)]
        if not alike:
            return [False for _ in pairs]
        assert self.judge is not None
        with _clock(trace, "judge_s"):
            rulings = iter(self.judge(alike))
        return [_final(mine) == _final(theirs) and next(rulings) for mine, theirs in pairs]

    def _record_mismatch(
        self, arrival: EncodedPrompt, prefix: list[int], proposal: Proposal, own: Step, trace: ReasoningTrace
    ) -> None:
        """Record a training pair for the draft LM, unless both steps are equal."""
        assert self.draft is not None
        chosen, rejected = self.draft.to_draft_tokens(own), proposal.own.ids
        if chosen and chosen != rejected:
            context = self.draft.text(arrival, prefix)
            trace.mismatches.append(
                Mismatch(arrival.prompt.id, context, chosen, rejected, own.text, proposal.step.text)
            )

    def _conclude(self, arrival: EncodedPrompt, thought: list[int]) -> list[int]:
        """End the thinking with the transition, and let the target answer alone."""
        ended = thought + self._transition(thought)
        text = arrival.ids + ended
        room = min(self.answer_tokens, self.target.model.context_length - len(text))
        return ended + (self.target.rest(text, room, self._seed(arrival)) if room > 0 else [])

    def _transition(self, thought: list[int]) -> list[int]:
        """Token ids of the transition, without its line break if the last step already ended with a line break."""
        words = self.transition
        if self.target.stepper.text(thought[-1:]).endswith("\n"):
            words = words.lstrip("\n")
        return list(self.target.model.tokenizer.encode(words, add_special_tokens=False))

    def _seed(self, arrival: EncodedPrompt) -> int:
        """Seed of a problem; it depends neither on the mode nor on earlier problems."""
        digest = hashlib.sha256(f"{self.recipe.seed}/{arrival.prompt.id}".encode()).hexdigest()
        return int(digest[:8], 16)


def _final(step: Step) -> bool:
    return step.end == "final"


@contextmanager
def _clock(trace: ReasoningTrace, name: str) -> Iterator[None]:
    """Add the duration of the block in seconds to a field of the trace."""
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(trace, name, getattr(trace, name) + time.perf_counter() - started)


TRIED = 8  # rounds at the start that alternate between zero and one drafted step


class AutoDepth:
    """Chooses the depth with the most steps per second.

    The acceptance rate a is the running share of drafted steps that were kept, among the steps judged in sequence. The
    relative cost α is the cost of a drafted step (drafting, its row in the target's batch, the judge) divided by a
    round of the target alone. Both are measured, so depths depend on the clock. Texts depend on it only if the judge
    accepts different steps.
    """

    def __init__(self, longest: int):
        self.longest = longest
        self.forget()

    def forget(self) -> None:
        """Reset all measurements."""
        self.rounds = 0
        self.accepted, self.judged = 1.0, 2.0  # prior: one of two steps was kept
        self.alone_s = self.alone = 0.0
        self.drafting_s = self.drafting = self.drafted = 0.0

    @property
    def alpha(self) -> float:
        """Relative cost α of a drafted step; 0 until both kinds of rounds were seen."""
        if not self.alone or not self.drafted:
            return 0.0
        alone = self.alone_s / self.alone
        return max(0.0, self.drafting_s - self.drafting * alone) / (self.drafted * alone)

    def next(self) -> int:
        """Number of steps to draft next: the best depth, or now and then the alternative (0 or 1) to measure it."""
        self.rounds += 1
        if self.rounds <= TRIED:
            return self.rounds % 2
        k = best_length(self.accepted / self.judged, self.alpha, self.longest)
        if self.rounds % TRIAL_EVERY == 0:
            return 0 if k else 1
        return k

    def observe(self, drafted: int, accepted: int, judged: int, seconds: float) -> None:
        """Record a round: steps drafted, kept, judged (up to the first that differed), and its duration in seconds."""
        if not drafted:
            self.alone_s, self.alone = DECAY * self.alone_s + seconds, DECAY * self.alone + 1
            return
        self.drafting_s, self.drafting = DECAY * self.drafting_s + seconds, DECAY * self.drafting + 1
        self.drafted = DECAY * self.drafted + drafted
        self.accepted, self.judged = DECAY * self.accepted + accepted, DECAY * self.judged + judged
