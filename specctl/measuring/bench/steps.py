"""Target steps and batches: what a step of several rows costs, and what that makes of drafts in batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from specctl.decoding.loop import decode
from specctl.decoding.metrics import unusable
from specctl.decoding.plan import plan_rows
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded
from specctl.decoding.target import Target
from specctl.decoding.timing import medians
from specctl.drafters import names, pool
from specctl.measuring.contenders import VANILLA, Case, filters
from specctl.measuring.transformers import PLAIN, load_generator
from specctl.progress import Progress, interrupts
from specctl.recipe import BenchRecipe

ROWS = (1, 4, 8, 16)


@dataclass(frozen=True)
class StepRow:
    """One forward of `rows` tokens behind `context`; `weights_ms` is the time to read the weights once."""

    rows: int
    context: int
    ours_ms: float
    transformers_ms: float
    ratio: float
    of_one_row: float
    weights_ms: float


@dataclass(frozen=True)
class DecodingRow:
    """Decoding all prompts, `batch` at a time, with drafts of `draft_length` nodes (None = the drafter's default).

    `tokens_per_s` and its ratios are of the decode phase; `with_prefill` counts the prompts' passes too.
    """

    drafter: str
    batch: int
    draft_length: int | None
    tokens: int
    mat: float
    tokens_per_s: float
    with_prefill: float
    speedup: float | None  # over vanilla decoding of the same batch
    of_batch_1: float | None  # over the same drafter, one sequence at a time
    speedup_transformers: float | None  # over transformers' generate, one sequence at a time
    graphs: bool  # rounds were replayed as CUDA graphs
    unusable: str | None  # why × plain says nothing (`metrics.unusable`)


def steps(recipe: BenchRecipe, target: Target, model, speed: float, bar: Progress) -> list[StepRow]:
    """Our step and `transformers`' own forward; `speed` in bytes/s."""
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
            1000 * weight_bytes(model) / speed,
        )
        for rows in ROWS
    ]


def weight_bytes(model) -> int:
    """Bytes of weights that a step reads."""
    embedding = model.get_input_embeddings().weight
    read = sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding)
    if model.get_output_embeddings().weight is embedding:  # a tied head is read, an embedding looked up
        read += embedding.numel() * embedding.element_size()
    return read


def batches(recipe: BenchRecipe, target: Target, cases: list[Case], bar: Progress) -> list[DecodingRow]:
    """Every drafter at every draft length and batch, after plain decoding and `transformers` on the same prompts."""
    rows: list[DecodingRow] = []
    theirs = None
    if recipe.shape is None:
        generator = load_generator(recipe.target, target, filters(recipe.sampling), {})
        theirs = _rate([generator.decode(case.ids, case.room, 0)[PLAIN] for case in cases])
        bar.update(1)
    contenders: list[tuple[str, int | None, Drafter | None]] = [(VANILLA, None, None)]
    for name in recipe.drafters:
        for length in (None, *recipe.draft_lengths):
            drafting = recipe.drafting if length is None else recipe.drafting.model_copy(update=_of_length(length))
            contenders.append((name, length, pool.load_drafter(name, target, drafting)))
    vanilla: dict[int, float] = {}
    for name, length, drafter in contenders:
        alone = None
        for batch in recipe.batches:
            interrupts.check()
            decoded = _decode(recipe, target, cases, drafter, batch)
            rate = _rate(decoded, batch)
            vanilla.setdefault(batch, rate)
            alone = rate if batch == 1 else alone
            plain = None if drafter is None else vanilla[batch]
            rows.append(_row(names.name_of(name), length, batch, decoded, plain=plain, alone=alone, theirs=theirs))
            bar.update(1)
    return rows


def _row(
    drafter: str,
    length: int | None,
    batch: int,
    decoded: list[Decoded],
    *,
    plain: float | None,
    alone: float | None,
    theirs: float | None,
) -> DecodingRow:
    """A drafter in batches. `plain`, `alone`, `theirs`: tokens a second of plain decoding in them, of the drafter in
    batches of one, and of `transformers`; None where these were not measured."""
    rate, tokens = _rate(decoded, batch), sum(one.decoded_tokens for one in decoded)
    mat = tokens / max(1, sum(one.target_passes for one in decoded))
    speedup = None if plain is None else rate / plain
    return DecodingRow(
        drafter=drafter,
        batch=batch,
        draft_length=length,
        tokens=tokens,
        mat=mat,
        tokens_per_s=rate,
        with_prefill=tokens / _seconds(decoded, batch, prefill=True),
        speedup=speedup,
        of_batch_1=None if alone is None else rate / alone,
        speedup_transformers=None if theirs is None else rate / theirs,
        graphs=any(one.replays for one in decoded),
        unusable=unusable(speedup, None, mat),
    )


def _of_length(nodes: int) -> dict[str, int]:
    return {"nodes": nodes, "depth": nodes}


def _decode(
    recipe: BenchRecipe, target: Target, cases: list[Case], drafter: Drafter | None, batch: int
) -> list[Decoded]:
    """All prompts; the first few once more before, to warm up."""
    for part in (cases[: min(batch, 2)], cases):
        decoded = decode(
            target,
            [case.ids for case in part],
            sampling=filters(recipe.sampling),
            max_new_tokens=[case.room for case in part],
            seeds=[case.seed(0) for case in part],
            drafter=drafter,
            slots=batch,
        )
    return decoded


def _rate(decoded: list[Decoded], batch: int | None = None) -> float:
    """Tokens a second of the decode phase."""
    return sum(text.decoded_tokens for text in decoded) / max(_seconds(decoded, batch, prefill=False), 1e-9)


def _seconds(decoded: list[Decoded], batch: int | None, prefill: bool) -> float:
    """Wall-clock of one call for all texts (`batch`), or of a call for each."""
    parts = decoded[:1] if batch is not None else decoded
    return sum(text.decode_s + (text.prefill_s if prefill else 0.0) for text in parts)
