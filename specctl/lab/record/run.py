"""`specctl record`: write the table of a pool once, to replay policies on it."""

from dataclasses import replace
from typing import Any

from specctl import progress
from specctl.commands.select import PoolOnStream, load_stream
from specctl.decoding.protocols import Drafter
from specctl.decoding.target import Target
from specctl.drafters.hybrid.weighed import unweighed
from specctl.lab.record.recipe import RecordRecipe
from specctl.lab.recorded import recorder
from specctl.lab.recorded.recording import check_free
from specctl.lab.replay.recipe import ReplayRecipe, SeedRecipe
from specctl.lab.replay.run import replay_table
from specctl.measuring.records import fingerprints
from specctl.measuring.select_result import SelectResult, top_fields
from specctl.runs import Run
from specctl.selection.arms import Arm, longest_draft


def record_pool(
    recipe: RecordRecipe, run: Run, *, target: Target | None = None, drafters: dict[str, Drafter] | None = None
) -> SelectResult:
    """Record a pool on a stream, and replay every drafter by itself on the new table.

    `target` and `drafters`: see `load_stream`. Raises as `load_stream` and `record_table`.
    """
    pooled = load_stream(recipe, run, target, drafters)
    check_free(recipe.table, resume=recipe.resume, overwrite=recipe.overwrite)
    if recipe.resume:  # the recording must be compared first
        progress.interrupts.begin_work()
    else:
        pooled.begin(run)
    failures = record_table(recipe, pooled)
    pooled.begin(run)
    seed = SeedRecipe(seed=recipe.sampling.seed)
    alone = ReplayRecipe(replay=recipe.table, algo=["fixed"], arms=recipe.arms, session=recipe.session, sampling=seed)
    result = replay_table(alone)
    arms = [replace(row, failures=failures.get(row.algo, 0)) for row in result.policies if row.algo != "fixed"]
    best = max((row for row in arms if row.kind == "arm"), key=lambda row: row.mat or 0.0)
    shown: dict[str, Any] = dict(policies=arms, curves={}, per_domain=[], at_least=None, **top_fields(best))
    return replace(result, mode="record", rejected=pooled.rejections.count, **shown)


def record_table(recipe: RecordRecipe, pooled: PoolOnStream) -> dict[str, int]:
    """Record the pool on the stream into `recipe.record`; return how often each drafter raised.

    Raises as `recorder.record`.
    """
    kinds = pooled.pool.kinds
    # Drafts of one size do not depend on this machine's costs, and a table can cut them to other lengths.
    drafters = {name: unweighed(drafter) for name, drafter in pooled.pool.drafters.items()}
    arms = [Arm(name, drafter, trained_on=kinds.get(name)) for name, drafter in drafters.items()]
    queries = [
        recorder.Query(
            case.prompt.id, case.prompt.domain, case.ids, case.max_new_tokens, case.seed(recipe.sampling.seed), number
        )
        for number, session in enumerate(pooled.stream)
        for case in session
    ]
    table = recorder.record(
        pooled.target,
        arms,
        queries,
        recipe.sampling,
        max(1, *map(longest_draft, drafters.values())),
        recorder.TableFile(
            recipe.table,
            made_of={"drafters": fingerprints(pooled.places), "drafting": recipe.drafting.model_dump()},
            resume=recipe.resume,
            overwrite=recipe.overwrite,
        ),
    )
    # Failures before a resumption are known from the table alone, and only failures to draft.
    raised = [sum(int((trace.drafted[n] < 0).sum()) for trace in table.traces) for n in range(len(arms))]
    return {arm.name: max(arm.failures, known) for arm, known in zip(arms, raised, strict=True)}
