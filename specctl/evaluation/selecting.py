"""`specctl select`: policies that choose among the drafters of a pool, side by side on one stream of prompts."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from specctl.decoding.draft import Controller, Drafter, Fixed
from specctl.decoding.loop import Decoded
from specctl.decoding.target import Target, load_target
from specctl.distillation.prompts import Rejections, read_domains
from specctl.drafters import pool
from specctl.errors import UsageError
from specctl.evaluation import lossless
from specctl.evaluation.lossless import Losslessness
from specctl.evaluation.measure import VANILLA, Case, Contender, Turn, decode_turn, engine, measure, prepare, warm_up
from specctl.evaluation.policy_rows import PolicyRow, Stream
from specctl.evaluation.records import Record, write_outputs, write_records
from specctl.evaluation.rows import Row, answers, summarise
from specctl.recipe import SelectRecipe
from specctl.runs import Run
from specctl.selection import registry
from specctl.selection.arms import load_pool, make_arms, members, named, reach
from specctl.selection.combined import Guarded, Together
from specctl.selection.controller import Round, Selector, Text
from specctl.selection.feedback import Scorer
from specctl.selection.game import Game
from specctl.selection.policy import Arms
from specctl.selection.rules import rules_for

ROUNDS = "rounds.jsonl"
DRAFT_ALL = "draft-all"


@dataclass(frozen=True)
class SelectResult:
    """The result document of `select`: the first policy's own numbers, then all contenders side by side.

    `oracle_mat` is the mat of playing each session's best arm throughout it; it, `regret` and `best_arm_ratio` need the
    baseline `fixed`. `curves` are by prompt, of every policy.
    """

    algo: str
    arms: list[str]
    reset: str
    queries: int
    sessions: int
    rounds: int
    mat: float | None
    tokens_per_s: float | None
    oracle_mat: float | None
    regret: int | None
    best_arm_ratio: float | None
    pulls: dict[str, int]
    decide_us_p50: float | None
    score_ms_p50: float | None
    per_domain: list[Row]
    policies: list[PolicyRow]
    curves: dict[str, dict[str, list[float]]]
    lossless: Losslessness
    rejected: int


def with_domains_of_pool(recipe: SelectRecipe, paths: list[str]) -> SelectRecipe:
    """Where no domain was named, those that the pool's drafters were made for."""
    if "domain" in recipe.data.model_fields_set:
        return recipe
    domains = list(dict.fromkeys(domain for path in paths for domain in pool.domains_of(path)))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"domain": domains})}) if domains else recipe


def select(
    recipe: SelectRecipe, run: Run, *, target: Target | None = None, drafters: dict[str, Drafter] | None = None
) -> SelectResult:
    """Decode one stream with every policy, arm and baseline of the recipe; all answer a prompt before the next one.

    `target` and `drafters` (by name) are given by callers that hold them already. Raises DataError (no usable prompts),
    CheckpointError (target or pool), UsageError (contradicting recipe).
    """
    rejections = Rejections(run.dir / "rejected.jsonl", recipe.data.max_rejected)
    data = recipe.data.model_copy(update={"limit": recipe.limit})
    prompts = read_domains(data, rejections, split=recipe.split, sample=True)
    paths = members(recipe) if drafters is None else []
    target = target or load_target(**recipe.target.loading)
    run.annotate(target=target.identity)
    stream = sessions(prepare(recipe, target, prompts, rejections), recipe)
    stage = Stage(recipe, target, stream, drafters or load_pool(recipe, target, paths))
    keep = functools.partial(write_records, run.dir, stamp={})
    with open(run.dir / ROUNDS, "w", encoding="utf-8") as file:
        records = stage.play(file, keep)
    if recipe.save_outputs:
        write_outputs(run.dir, records, target.tokenizer)
    return stage.result(records, rejections.count)


def sessions(cases: Sequence[Case], recipe: SelectRecipe) -> list[list[Case]]:
    """Runs of `session` prompts of one domain, in the order in which they are decoded."""
    found = []
    for domain in recipe.data.domain:
        mine = [case for case in cases if case.prompt.domain == domain]
        found += [mine[start : start + recipe.session] for start in range(0, len(mine), recipe.session)]
    if recipe.order == "mixed":
        random.Random(recipe.data.seed).shuffle(found)
    return found


def turns(stream: Sequence[Sequence[Case]], batch: int) -> list[Turn]:
    """Prompts that are decoded at once, one of each of `batch` sessions: those of a session follow each other."""
    found: list[Turn] = []
    for start in range(0, len(stream), batch):
        abreast = stream[start : start + batch]
        for place in range(max(map(len, abreast))):
            found.append([session[place] for session in abreast if place < len(session)])
    return found


Alone = Guarded | Drafter | Together
"""What drafts all rounds by itself."""


class Stage:
    """The contenders of one `select`, and what they do."""

    def __init__(self, recipe: SelectRecipe, target: Target, stream: list[list[Case]], drafters: dict[str, Drafter]):
        self.recipe, self.target, self.stream, self.drafters = recipe, target, stream, drafters
        self.arms = make_arms(recipe, target, drafters)
        self.session_of = {case.prompt.id: n for n, session in enumerate(stream) for case in session}
        self.plays: dict[str, list[tuple[int, str]]] = {name: [] for name in recipe.algo}  # session and arm of rounds
        self.selectors = {name: self._selector(name) for name in recipe.algo}
        self.alone = self._alone()
        self._log: IO[str] | None = None

    def _selector(self, name: str) -> Selector:
        recipe = self.recipe
        deepest = max(1, *(reach(arm.drafter) for arm in self.arms))
        arms = Arms(len(self.arms), deepest, recipe.sampling.seed)
        policy = registry.build(name, arms, recipe.policy)
        if policy.learns == "losses" and recipe.game.depth is not None:
            arms = replace(arms, depth=min(recipe.game.depth, deepest))
        rules = rules_for(name, recipe.game, arms.depth)
        overlap = policy.learns == "reward" and rules.reward == "bd"
        scorer = None
        if policy.learns == "losses" or overlap:
            drafters = list(dict.fromkeys(arm.drafter for arm in self.arms))
            scorer = Scorer(self.target, drafters, arms.depth, overlap=overlap)

        def new_game() -> Game:
            return Game(registry.build(name, arms, recipe.policy), rules, arms)

        return Selector(
            [Guarded(arm.name, arm.drafter, arm.nodes) for arm in self.arms],  # each counts its own failures
            new_game,
            scorer,
            chosen_only=overlap,
            ends=recipe.reset != "query",
            on_round=functools.partial(self._note, name),
        )

    def _alone(self) -> dict[str, Alone]:
        """What is measured without a choice: every arm, everybody at once, the rivals.

        Raises UsageError where two contenders have one name.
        """
        recipe = self.recipe
        found: dict[str, Alone] = {}
        if "fixed" in recipe.baselines:
            found |= {arm.name: Guarded(arm.name, arm.drafter, arm.nodes) for arm in self.arms}
        if DRAFT_ALL in recipe.baselines:
            found[DRAFT_ALL] = Together(list(self.drafters.values()))
        rivals = {name: path for path, name in named(recipe.rivals).items()}
        twice = {*rivals, *recipe.algo} & {*self.drafters, *found, VANILLA} or {*rivals} & {*recipe.algo}
        if twice:
            raise UsageError(f"two contenders are called {min(twice)!r}", hint="a rival is no member of the pool")
        return found | {name: pool.load_drafter(path, self.target, recipe.drafting) for name, path in rivals.items()}

    def play(self, log: IO[str], keep: Callable[[Sequence[Record]], Path]) -> list[Record]:
        """Everybody's answers; rounds go to `log`."""
        recipe = self.recipe
        found = [engine(self.target, recipe.sampling, VANILLA, None)] if VANILLA in recipe.baselines else []
        found += [self._contender(name, Fixed(drafter), drafter.taps) for name, drafter in self.alone.items()]
        found += [self._contender(name, selector, selector.taps) for name, selector in self.selectors.items()]
        asked = turns(self.stream, recipe.batch)
        warm_up(asked, found)
        for name, selector in self.selectors.items():
            selector.forget()
            self.plays[name].clear()
        self._log = log
        return measure(recipe, asked, found, {recipe.algo[0]}, keep, label="select", warm=True)

    def _contender(self, name: str, controller: Controller, taps: tuple[int, ...]) -> Contender:
        def answer(turn: Turn, seeds: list[int]) -> list[dict[str, Decoded]]:
            if isinstance(controller, Selector):
                controller.open([self._text(case, seed) for case, seed in zip(turn, seeds, strict=True)])
            decoded = decode_turn(self.target, self.recipe.sampling, turn, seeds, controller=controller, taps=taps)
            return [{name: one} for one in decoded]

        return answer

    def _text(self, case: Case, seed: int) -> Text:
        unit = {"query": case.prompt.id, "session": self.session_of[case.prompt.id], "stream": ""}[self.recipe.reset]
        return Text(case.prompt.id, case.prompt.domain, f"{seed - case.seed(0)} {unit}")

    def _note(self, algo: str, entry: Round) -> None:
        self.plays[algo].append((self.session_of[entry.query], entry.arm))
        if self._log is not None:
            self._log.write(json.dumps({"algo": algo, **asdict(entry)}) + "\n")

    def result(self, records: Sequence[Record], rejected: int) -> SelectResult:
        """What the records say."""
        recipe, first = self.recipe, self.recipe.algo[0]
        names = list(dict.fromkeys(record.drafter for record in records))
        questions = [record.question for record in records if record.drafter == first]
        by_name = {name: answers(records, name) for name in names}
        stream = Stream(
            {name: [found[question].decoded for question in questions] for name, found in by_name.items()},
            [self.session_of[id] for _, id, _ in questions],
            [arm.name for arm in self.arms] if "fixed" in recipe.baselines else [],
            VANILLA if VANILLA in names else None,
        )
        policies = [self._row(stream, name) for name in [*recipe.algo, *(n for n in names if n not in recipe.algo)]]
        own = policies[0]
        return SelectResult(
            algo=first,
            arms=[arm.name for arm in self.arms],
            reset=recipe.reset,
            queries=len(questions),
            sessions=len(self.stream),
            rounds=own.rounds,
            mat=own.mat,
            tokens_per_s=own.tokens_per_s,
            oracle_mat=stream.oracle_mat,
            regret=own.regret,
            best_arm_ratio=own.best_arm_ratio,
            pulls=own.pulls,
            decide_us_p50=own.decide_us_p50,
            score_ms_p50=own.score_ms_p50,
            per_domain=[summarise(first, domain, records) for domain in recipe.data.domain],
            policies=policies,
            curves={name: {"stopping_regret": stream.regret(name)} for name in recipe.algo} if stream.best else {},
            lossless=self._losslessness(records),
            rejected=rejected,
        )

    def _row(self, stream: Stream, name: str) -> PolicyRow:
        selector = self.selectors.get(name)
        plays = self.plays.get(name, [])
        hits = [stream.best[session] == arm for session, arm in plays] if stream.best else []
        kind = "policy" if selector else "baseline" if name in (VANILLA, DRAFT_ALL) else "arm"
        if name in named(self.recipe.rivals).values():
            kind = "rival"
        return stream.row(
            name,
            kind,
            tally=selector.tally if selector else None,
            arms=[arm.name for arm in self.arms],
            best_arm_ratio=sum(hits) / len(hits) if hits else None,
            failures=sum(arm.failures for arm in selector.arms) if selector else 0,
        )

    def _losslessness(self, records: Sequence[Record]) -> Losslessness:
        """All contenders' texts against plain decoding's."""
        counts, sampling = Losslessness(), self.recipe.sampling
        if not lossless.comparable(sampling, self.recipe.drafting):
            return counts
        plain, tolerance = answers(records, VANILLA), lossless.tolerance(self.target, sampling)
        for record in records:
            if record.drafter != VANILLA and record.question in plain:
                theirs, ours = plain[record.question].decoded, record.decoded
                counts.add(
                    lossless.compare(self.target, ours.prompt_ids, theirs.output_ids, ours.output_ids, tolerance)
                )
        return counts
