"""`specctl reason`: lookahead reasoning along a stream, all modes side by side."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedModel

from specctl import progress
from specctl.adaptation.stream import PromptStream
from specctl.decoding.target import Target, load_target
from specctl.drafters import checkpoint, pool
from specctl.drafters.lm.drafter import FAMILY as LM_FAMILY
from specctl.drafters.lm.model import LM
from specctl.lab.reason.recipe import ReasonRecipe
from specctl.lab.reasoning.journal import ReasoningChunk, ReasoningJournal, chunk_rows
from specctl.lab.reasoning.judge import Judge, make_judge
from specctl.lab.reasoning.lookahead import ReasoningTrace
from specctl.lab.reasoning.modes import LEARNING, DraftLM, Reasoning, load_draft_lm
from specctl.lab.reasoning.options import ReasoningMode
from specctl.lab.reasoning.rows import ModeRow, acceptance_difference, row
from specctl.measuring.measured import Measured
from specctl.measuring.records import recipe_stamp
from specctl.runs import Run


@dataclass(frozen=True)
class Difference:
    """Step acceptance of `mode` minus the acceptance of `than`, on the same prompts; the interval is paired."""

    mode: ReasoningMode
    than: ReasoningMode
    step_acceptance: Measured


SEED_RATES = ("step_acceptance", "accepted_per_target_step", "avg_len", "agreement")


@dataclass(frozen=True)
class ReasoningSeedRow:
    """Results of one mode on one pass over the stream."""

    mode: ReasoningMode
    seed: int
    step_acceptance: float | None
    accepted_per_target_step: float | None
    avg_len: float | None
    agreement: float | None
    seconds: float
    learning_s: float


@dataclass(frozen=True)
class ReasoningResult:
    """The result document of `reason`.

    Attributes:
        modes: results over all passes.
        per_chunk: rows of the first pass; chunks.jsonl has all passes.
        judges: counts of the judge's rulings on pairs of steps, by mode.
        drafters: directories of the learned draft LMs, in their state after the first pass.
    """

    algo: str
    chunks: int
    prompts: int
    draft: str
    judge: str
    modes: list[ModeRow]
    differences: list[Difference]
    per_chunk: list[ReasoningChunk]
    per_seed: list[ReasoningSeedRow]
    judges: dict[str, dict[str, int]]
    drafters: dict[str, str]
    rejected: int


def reason(recipe: ReasonRecipe, run: Run, *, target: Target | None = None) -> ReasoningResult:
    """Answer the stream in all modes, once per seed. Learning modes learn after every chunk.

    `target`: passed by callers that have loaded it already.

    Raises:
        DataError, CheckpointError, UsageError: prompts or models cannot be used, or the run cannot be resumed.
        Interrupted: a signal; the state after the last chunk is saved.
        SpecctlError: the disk is full.
    """
    target = target or load_target(**recipe.target.loading)
    stamp = recipe_stamp(recipe) | {"target": target.identity, "drafters": _fingerprints(recipe)}
    draft, judge = load_draft_lm(recipe.draft, target), make_judge(recipe.reasoning.judge, str(target.device))
    journal = ReasoningJournal(recipe, run, stamp)
    journal.start()
    for seed, stream in journal.remaining_passes(target):
        _pass(seed, target, draft, judge, journal, stream)
    journal.begin(target)  # in case every pass was finished already
    return _result(recipe, journal)


def _fingerprints(recipe: ReasonRecipe) -> dict[str, str | None]:
    """Fingerprints of the models in drafter directories. Raises CheckpointError if the domain has no draft LM."""
    if recipe.reasoning.draft is None:
        checkpoint.existing_directory(Path(recipe.draft))
    named = [name for name in (recipe.draft, recipe.reasoning.drafter) if name is not None]
    return {name: checkpoint.fingerprint(place) if (place := _directory(name)) else None for name in named}


def _directory(name: str) -> Path | None:
    """Directory of a drafter, or None for a model of `transformers` and for drafters without weights."""
    place = Path(name).expanduser()
    return place if checkpoint.is_drafter(place) else None


def _pass(
    seed: int, target: Target, draft: DraftLM, judge: Judge, journal: ReasoningJournal, stream: PromptStream
) -> None:
    """Run one pass over the stream, and save the learned draft LMs after it."""
    recipe = journal.recipe
    options = recipe.reasoning.model_copy(update={"seed": recipe.reasoning.seed + seed})
    inside = pool.load_drafter(options.drafter, target, recipe.drafting) if options.drafter else None
    reasoning = Reasoning(target, draft, options, recipe.modes, judge=judge, drafter=inside)
    mark = journal.mark
    if mark.stage is not None:
        with journal.restoring():
            reasoning.restore(journal.tensors, mark.stage["chunks"])
    journal.begin(target, stream.rejections)
    with journal.tracking(seed, stream) as bar:
        for arrivals in stream.chunks():
            before = _judge_counts(reasoning)
            record = reasoning.chunk(arrivals, bar.update)
            judged = {
                mode: {name: count - before[mode][name] for name, count in now.items()}
                for mode, now in _judge_counts(reasoning).items()
            }
            rows = chunk_rows(record, seed, judged)
            bar.update(0, chunk=record.chunk, accepted=rows[-1].step_acceptance)
            for mode, lesson in record.lessons.items():
                if lesson.refused:
                    progress.warn(f"{mode}: a loss or weight was not finite, so chunk {record.chunk} changed nothing")
            journal.keep(record, rows)
            tensors = {name: value.cpu() for name, value in reasoning.state().items()}  # on the host until saved
            journal.advance(stream, {"chunks": reasoning.chunks}, tensors)
    for mode, learner in reasoning.learners.items():
        learnt = f"{mode}, {reasoning.chunks} chunks"
        _save(recipe, journal.drafter_dir(mode, seed), learner.played(), draft, target, learnt)
    journal.finish_pass()


def _judge_counts(reasoning: Reasoning) -> dict[str, dict[str, int]]:
    return {mode: asdict(judge.tally) for mode, judge in reasoning.judges.items()}


def _save(
    recipe: ReasonRecipe, place: Path, model: PreTrainedModel, draft: DraftLM, target: Target, learnt: str
) -> None:
    """Write a learned draft LM in its original form: a drafter of family lm, or a model of `transformers`."""
    start = _directory(draft.name)
    if start is None:
        with checkpoint.staged(place) as folder:
            model.save_pretrained(folder)
            draft.tokenizer.save_pretrained(folder)
        return
    module = LM(model)
    domains = dict.fromkeys([*pool.domains_of(str(start)), *recipe.stream_domains])
    info = {**checkpoint.read_info(start), "domain": list(domains), "mat": {}}
    info["learnt"] = f"{learnt}, from {draft.name}"
    config, tensors = LM_FAMILY.checkpoint_config(module, target.identity), LM_FAMILY.stored_state(module.state_dict())
    checkpoint.save(place, config=config, tensors=tensors, info=info, overwrite=True)


def _result(recipe: ReasonRecipe, journal: ReasoningJournal) -> ReasoningResult:
    chunks, traces, modes = journal.rows(), journal.traces(), recipe.modes

    def over(mode: ReasoningMode, seeds: Sequence[int]) -> list[ReasoningTrace]:
        return [trace for seed in seeds for trace in traces.get((mode, seed), [])]

    def rated(mode: ReasoningMode, seeds: Sequence[int]) -> ModeRow:
        learning_s = sum(chunk.learning_s for chunk in chunks if chunk.mode == mode and chunk.seed in seeds)
        alone = over("target", seeds) if "target" in modes else None
        return row(mode, over(mode, seeds), alone, learning_s)

    learners = [mode for mode in modes if mode in LEARNING]
    pairs = [(mode, than) for mode in learners for than in modes if than == "lr" or (than, mode) == tuple(LEARNING)]
    judged: dict[str, Counter[str]] = {}
    for chunk in chunks:
        if chunk.judge:
            judged.setdefault(chunk.mode, Counter()).update(chunk.judge)
    rows = [rated(mode, recipe.seeds) for mode in modes]
    return ReasoningResult(
        algo=recipe.algo[0],
        chunks=len(chunks) // len(modes),
        prompts=rows[0].prompts,
        draft=recipe.draft,
        judge=recipe.reasoning.judge.name or recipe.reasoning.judge.kind,
        modes=rows,
        differences=[
            Difference(mode, than, acceptance_difference(over(mode, recipe.seeds), over(than, recipe.seeds)))
            for mode, than in pairs
        ],
        per_chunk=[chunk for chunk in chunks if chunk.seed == recipe.seeds[0]],
        per_seed=[_seed_row(rated(mode, [seed]), seed) for seed in recipe.seeds for mode in modes],
        judges={mode: dict(counts) for mode, counts in judged.items()},
        drafters={mode: str(journal.drafter_dir(mode, recipe.seeds[0])) for mode in learners},
        rejected=journal.rejected,
    )


def _seed_row(row: ModeRow, seed: int) -> ReasoningSeedRow:
    rates = {name: getattr(row, name).value for name in SEED_RATES}
    return ReasoningSeedRow(row.mode, seed, seconds=row.seconds, learning_s=row.learning_s, **rates)
