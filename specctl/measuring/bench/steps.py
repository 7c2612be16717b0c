"""Benchmark of target steps with several rows, and of decoding in batches with and without drafts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.metrics import why_unusable
from specctl.decoding.offline import decode
from specctl.decoding.plan import plan_rows
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded, Request
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target
from specctl.decoding.timing import medians
from specctl.drafters import names, pool
from specctl.measuring.contenders import VANILLA, Case
from specctl.measuring.transformers_baseline import PLAIN, TransformersBaseline, load_generator
from specctl.progress import Progress, interrupts
from specctl.recipe import BenchRecipe

ROWS = (1, 4, 8, 16)
PROMPTS_PER_TURN = 3  # prompts per slot that a contender decodes before the next contender's turn


@dataclass(frozen=True)
class StepRow:
    """Times of one forward pass of `rows` tokens after `context`. `weights_ms`: time to read the weights once."""

    rows: int
    context: int
    ours_ms: float
    transformers_ms: float
    ratio: float
    of_one_row: float
    weights_ms: float


@dataclass(frozen=True)
class DecodingRow:
    """Speed of decoding all prompts, `batch` at a time, with drafts of `draft_length` nodes (None = drafter's default).

    `tokens_per_s` and its ratios cover the decode phase; `with_prefill` covers prefill and decode phase.
    """

    drafter: str
    batch: int
    draft_length: int | None
    tokens: int
    mat: float
    tokens_per_s: float
    with_prefill: float
    speedup: float | None  # over vanilla decoding of the same batch
    of_batch_1: float | None  # over the same drafter in batches of 1
    speedup_transformers: float | None  # over transformers' plain generate of the same batch
    graphs: bool  # some rounds were replayed as CUDA graphs
    unusable: str | None  # why the speed-up cannot be used (`metrics.why_unusable`)


@dataclass
class Timed:
    texts: list[Decoded] = field(default_factory=list)
    decode_s: float = 0.0
    prefill_s: float = 0.0

    def add(self, decoded: list[Decoded]) -> None:
        """Add the sequences of one call; each of them bears the times of the whole call."""
        self.texts += decoded
        self.decode_s += decoded[0].decode_s
        self.prefill_s += decoded[0].prefill_s

    @property
    def tokens(self) -> int:
        return sum(one.decoded_tokens for one in self.texts)

    @property
    def rate(self) -> float:
        """Tokens per second of the decode phase."""
        return self.tokens / max(self.decode_s, 1e-9)


def steps(recipe: BenchRecipe, target: Target, model, weights_ms: float, bar: Progress) -> list[StepRow]:
    """Time our step against the forward of `model`, which is `transformers`' own. `weights_ms`: see `StepRow`.

    Raises Interrupted: SIGTERM arrived.
    """
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(recipe.data.seed)
    context = min(recipe.context, target.context_length - max(ROWS))
    ids = torch.randint(5, target.vocab_size, (1, context), generator=generator).to(target.device)
    cache = target.model.new_cache(1, context + max(ROWS))
    target.prefill(ids.tolist(), cache)
    theirs = DynamicCache(config=model.config)
    model(ids, past_key_values=theirs, use_cache=True)

    def ours(tokens: torch.Tensor) -> object:
        plan = plan_rows([context], tokens.shape[1], device=target.device, dtype=target.dtype)
        return target.step(tokens, cache, plan)

    def reference(tokens: torch.Tensor) -> object:
        output = model(tokens, past_key_values=theirs, use_cache=True)
        theirs.crop(-tokens.shape[1])
        return output

    timed: dict[str, Callable[[], object]] = {}
    for rows in ROWS:
        timed[f"ours {rows}"] = partial(ours, ids[:, :rows])
        timed[f"theirs {rows}"] = partial(reference, ids[:, :rows])
    ms = {name: 1000 * seconds for name, seconds in medians(timed, recipe.repeats, target.device).items()}
    bar.update(1)
    return [
        StepRow(
            rows,
            context,
            ms[f"ours {rows}"],
            ms[f"theirs {rows}"],
            ms[f"theirs {rows}"] / ms[f"ours {rows}"],
            ms[f"ours {rows}"] / ms["ours 1"],
            weights_ms,
        )
        for rows in ROWS
    ]


Contender = Callable[[list[Case], int], Iterator[list[Decoded]]]
"""Function that decodes prompts in batches of a given size, and yields the sequences call by call."""


def batches(recipe: BenchRecipe, target: Target, cases: list[Case], bar: Progress) -> list[DecodingRow]:
    """Time plain decoding, `transformers`, and every drafter at every draft length, in all batch sizes."""
    named: list[tuple[str, int | None, Contender]] = [(VANILLA, None, partial(_ours, recipe, target, None, {}))]
    if recipe.shape is None:
        generator = load_generator(recipe.target, target, Sampling.of(recipe.sampling), {})
        named.append((PLAIN, None, partial(_theirs, generator)))
    for name in recipe.drafters:
        for length in (None, *recipe.draft_lengths):
            drafting = (
                recipe.drafting
                if length is None
                else recipe.drafting.model_copy(update={"nodes": length, "depth": length})
            )
            drafter = pool.load_drafter(name, target, drafting)
            named.append((names.name_of(name), length, partial(_ours, recipe, target, drafter, {})))
    found: dict[tuple[int, int], Timed] = {}  # by contender and batch
    for batch in recipe.batches:
        timed = _in_turns(cases, [contender for *_, contender in named], batch)
        found |= {(place, batch): one for place, one in enumerate(timed)}
        bar.update(len(named))
    rows: list[DecodingRow] = []
    for place, (name, length, _) in enumerate(named):
        for batch in recipe.batches:
            plain = found[0, batch].rate if place > 0 else None
            alone = found[place, 1].rate if (place, 1) in found else None
            theirs = found[1, batch].rate if recipe.shape is None and place != 1 else None
            rows.append(_row(name, length, batch, found[place, batch], (plain, alone, theirs)))
    return rows


def _row(
    drafter: str,
    length: int | None,
    batch: int,
    timed: Timed,
    references: tuple[float | None, float | None, float | None],
) -> DecodingRow:
    """Compare a contender's rate with the rates, in tokens per second, of plain decoding and of `transformers` at the
    same batch size, and with its own at batch size 1 (None: not measured)."""
    plain, alone, theirs = references
    rate, tokens = timed.rate, timed.tokens
    mat = tokens / max(1, sum(one.target_passes for one in timed.texts))
    speedup = None if plain is None else rate / plain
    return DecodingRow(
        drafter=drafter,
        batch=batch,
        draft_length=length,
        tokens=tokens,
        mat=mat,
        tokens_per_s=rate,
        with_prefill=tokens / (timed.decode_s + timed.prefill_s),
        speedup=speedup,
        of_batch_1=None if alone is None else rate / alone,
        speedup_transformers=None if theirs is None else rate / theirs,
        graphs=any(one.replays for one in timed.texts),
        unusable=why_unusable(speedup, None, mat),
    )


def _in_turns(cases: list[Case], contenders: list[Contender], batch: int) -> list[Timed]:
    """Run all prompts through every contender, in turns, so that a change in the machine's pace affects all alike."""
    timed = [Timed() for _ in contenders]
    for contender in contenders:  # warm up
        list(contender(cases[: min(batch, 2)], batch))
    for start in range(0, len(cases), PROMPTS_PER_TURN * batch):
        for contender, one in zip(contenders, timed, strict=True):
            interrupts.check()
            for texts in contender(cases[start : start + PROMPTS_PER_TURN * batch], batch):
                one.add(texts)
    return timed


def _ours(
    recipe: BenchRecipe,
    target: Target,
    drafter: Drafter | None,
    engines: dict[int, Engine],
    cases: list[Case],
    batch: int,
) -> Iterator[list[Decoded]]:
    """Decode all prompts in one call: a sequence that ends makes room for the next prompt. `engines` has the
    contender's engine for each batch size."""
    if batch not in engines:
        engines[batch] = Engine(target, Fixed.of(drafter), EngineOptions(slots=batch))
    sampling = Sampling.of(recipe.sampling)
    yield decode(engines[batch], [Request(case.ids, sampling, case.max_new_tokens, case.seed(0)) for case in cases])


def _theirs(generator: TransformersBaseline, cases: list[Case], batch: int) -> Iterator[list[Decoded]]:
    """Decode one batch per call; a call lasts as long as its longest sequence."""
    for start in range(0, len(cases), batch):
        some = cases[start : start + batch]
        yield generator.decode_batch([case.ids for case in some], [case.max_new_tokens for case in some], 0)
