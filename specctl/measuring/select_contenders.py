"""Contenders of `specctl select` on one stream: the sessions of prompts, and the policies and drafters that answer."""

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import IO, Protocol

from specctl.decoding.cache import RECOMPUTE, CatchUp
from specctl.decoding.controllers import Fixed
from specctl.decoding.device import rounds as device_rounds
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.prompt_features import PromptClusters
from specctl.decoding.protocols import Controller, Drafter
from specctl.decoding.records import Label
from specctl.decoding.target import Target
from specctl.distillation.messages import ChatMessage, text_of
from specctl.drafters import pool
from specctl.drafters.names import labels
from specctl.drafters.retrieval.datastore import GrowingDatastore
from specctl.errors import UsageError
from specctl.families import STREAM_RETRIEVAL
from specctl.measuring.contenders import (
    VANILLA,
    Case,
    Contender,
    PromptBatch,
    RecordJournal,
    Shown,
    engine_contender,
    measure,
    warm_up,
)
from specctl.measuring.policy_rows import ArmReward, PolicyRow, StreamAnswers
from specctl.measuring.records import Record
from specctl.recipe import PoolRecipe, SelectRecipe
from specctl.selection.arms import Arm, Companion, DraftAll, make_arms, plain_arm
from specctl.selection.assembly import Decoding, make_batch_selector, make_selector, plain_step, plays_for_seconds
from specctl.selection.batched import BatchSelector
from specctl.selection.controller import RoundLine, Selector
from specctl.selection.policies import registry
from specctl.selection.policies.policy import Arms, Array, Policy

DRAFT_ALL = "draft-all"
RECOMPUTING = "recompute"


def make_sessions(cases: Sequence[Case], recipe: PoolRecipe) -> list[list[Case]]:
    """Split the prompts into sessions of `recipe.session` prompts, in decoding order.

    A session is of one domain; with order `shift` its two halves are of different domains.
    """
    shift = recipe.order == "shift"
    size = max(1, recipe.session // 2) if shift else recipe.session
    runs: list[list[Case]] = []
    for domain in recipe.data.domain:
        mine = [case for case in cases if case.prompt.domain == domain]
        runs += [mine[start : start + size] for start in range(0, len(mine), size)]
    if recipe.order != "blocks":
        random.Random(recipe.data.seed).shuffle(runs)
    return pair_halves(runs) if shift else runs


def pair_halves(halves: list[list[Case]]) -> list[list[Case]]:
    """Join every half session with the next half of another domain; a half without a partner stays alone."""
    pairs, waiting = [], list(halves)
    while waiting:
        first = waiting.pop(0)
        other = next((n for n, half in enumerate(waiting) if half[0].prompt.domain != first[0].prompt.domain), None)
        pairs.append(first if other is None else first + waiting.pop(other))
    return pairs


def prompt_batches(stream: Sequence[Sequence[Case]], batch: int) -> list[PromptBatch]:
    """Batches of prompts to decode at once, one from each of `batch` sessions. Every session keeps its order."""
    together: list[PromptBatch] = []
    for start in range(0, len(stream), batch):
        abreast = stream[start : start + batch]
        for place in range(max(map(len, abreast))):
            together.append([session[place] for session in abreast if place < len(session)])
    return together


def companion_of(recipe: SelectRecipe, target: Target) -> Companion:
    return Companion(recipe.companion, target, recipe.drafting, GrowingDatastore(recipe.store_tokens))


FixedContender = Arm | DraftAll
"""A contender that drafts all rounds without a policy: one drafter, or all of them together."""


@dataclass(frozen=True)
class DrafterPool:
    """Drafters to choose among, by name.

    Attributes:
        companion: the text drafter that heads draft with in one tree; by default the recipe's, with an empty store.
        kinds: kinds of prompts that each drafter was trained on.
    """

    drafters: dict[str, Drafter]
    companion: Companion | None = None
    kinds: Mapping[str, PromptClusters] = field(default_factory=dict)


class PromptPrior(Protocol):
    """A classifier of prompts with one class per drafter of the pool.

    Attributes:
        arms: names of the drafters, in the order of the pool.
    """

    arms: list[str]

    def probabilities(self, texts: Sequence[str]) -> Array:
        """[n, N] probability that each drafter is the right one for each prompt."""


def prompt_text(messages: Sequence[ChatMessage]) -> str:
    """The text of a conversation as a classifier reads it: all messages."""
    return "\n\n".join(text_of(message) for message in messages)


class SelectContenders:
    """All contenders of one `select` run, with their policies, logs and statistics."""

    def __init__(
        self,
        recipe: SelectRecipe,
        target: Target,
        stream: list[list[Case]],
        pool: DrafterPool,
        router: PromptPrior | None = None,
    ):
        self.recipe, self.target, self.stream, self.router = recipe, target, stream, router
        self.drafters = pool.drafters
        self._check_router()
        self.companion = pool.companion or companion_of(recipe, target)
        self.store_s = 0.0  # seconds spent on adding texts to the store
        self.arms = make_arms(recipe, pool.drafters, pool.kinds)
        prompts = [(n, case.prompt) for n, session in enumerate(stream) for case in session]
        self.session_of = {(prompt.domain, prompt.id): n for n, prompt in prompts}  # a prompt may be in two domains
        self.prompts = {prompt.id: prompt for _, prompt in prompts}
        self.policy_of = {name: name for name in recipe.algo}  # by contender
        if RECOMPUTING in recipe.baselines:
            self.policy_of |= {f"{name} {RECOMPUTING}": name for name in recipe.algo}
        self.with_plain_arm = {name for name in self.policy_of if self._has_plain_arm(name)}
        self.arms = [*([plain_arm()] if self.with_plain_arm else []), *self.arms]
        # Game, arm and committed tokens of every round, by contender.
        self.plays: dict[str, list[tuple[str, str, int]]] = {name: [] for name in self.policy_of}
        self.selectors = {name: self._selector(name) for name in self.policy_of}
        self.fixed = self._fixed_contenders()
        self._lines: list[tuple[str, RoundLine]] = []  # rounds of the current turn, to be written outside of timing

    def _check_router(self) -> None:
        """Raise UsageError if a policy lacks its router, or if the router was trained for other arms."""
        if self.router is None and registry.ROUTER in self.recipe.algo:
            raise UsageError("the policy router needs a trained router", hint="see specctl train-router")
        if self.router is not None and [*self.drafters] != self.router.arms:
            raise UsageError("a router chooses drafters, not their shapes or sizes", hint="leave arms.* out")

    @functools.cached_property
    def _step(self) -> float:
        return plain_step(self.target, self.recipe.batch)

    @property
    def rounds_on_host(self) -> bool:
        """Whether the rounds of drafting contenders run on the host, as in `OnlineContenders`."""
        recipe = self.recipe
        if not device_rounds.possible(self.target):
            return True
        if recipe.catch_up.name == "streaming" or (recipe.batch > 1 and recipe.choice == "text"):
            return True
        drafters = [*self.fixed.values(), *self.arms]
        able = all(isinstance(drafter, Arm) and drafter.fixed_shape for drafter in drafters)
        return not (able and all(selector.accepts_late_counts for selector in self.selectors.values()))

    def _has_plain_arm(self, name: str) -> bool:
        """Whether plain decoding is an additional arm of a contender's policy."""
        recipe, policy = self.recipe, self.policy_of[name]
        if any(arm.plain for arm in self.arms):
            return False
        if recipe.arms.plain is not None:
            return recipe.arms.plain
        return plays_for_seconds(self._copies_of(self.arms), policy, recipe.game)

    def _copies_of(self, arms: Sequence[Arm]) -> list[Arm]:
        """Copies of the arms for one selector, with separate counts of failures."""
        return [arm.copy(self.companion.head_of(arm.drafter)) for arm in arms]

    def _selector(self, name: str) -> Selector | BatchSelector:
        joined = self.with_plain_arm and name not in self.with_plain_arm
        arms = self._copies_of([arm for arm in self.arms if not (joined and arm.plain)])
        recipe, policy = self.recipe, self.policy_of[name]
        new_policy = functools.partial(self._policy, policy)
        decoding = Decoding(
            lambda: self._step,
            recipe.sampling.seed,
            functools.partial(self._note, name),
            within_query=recipe.reset == "query",
            greedy=recipe.sampling.temperature == 0 and recipe.choice != "batch",
        )
        if recipe.choice == "batch":
            return make_batch_selector(arms, policy, recipe.game, new_policy, decoding)
        return make_selector(self.target, arms, policy, recipe.game, new_policy, decoding)

    def _policy(self, name: str, arms: Arms, text: Label) -> Policy:
        """Make a fresh policy for a game that begins with this prompt."""
        options = self.recipe.policy
        if name == registry.ROUTER:
            return registry.build("fixed", arms, options.model_copy(update={"arm": int(self._routed(text).argmax())}))
        return registry.build(name, arms, options)

    def _routed(self, text: Label) -> Array:
        """[N] router probabilities for a prompt: how likely each arm is the right one to play."""
        assert self.router is not None
        return self.router.probabilities([prompt_text(self.prompts[text.query].messages)])[0]

    def _fixed_contenders(self) -> dict[str, FixedContender]:
        """Contenders without a policy: every arm by itself, the text drafter, all drafters together, and the rivals.

        Raises UsageError if two contenders have the same name.
        """
        recipe = self.recipe
        contenders: dict[str, FixedContender] = {}
        if "fixed" in recipe.baselines:
            contenders |= {arm.name: arm.copy() for arm in self.arms}
        if "beside" in recipe.baselines and self.companion.name and self.companion.text:
            contenders[self.companion.name] = Arm(self.companion.name, self.companion.text_drafter(self.companion.name))
        if DRAFT_ALL in recipe.baselines:
            contenders[DRAFT_ALL] = DraftAll([Arm(name, drafter) for name, drafter in self.drafters.items()])
        rivals = {name: path for path, name in labels(recipe.rivals).items()}
        twice = {*rivals, *self.policy_of} & {*self.drafters, *contenders, VANILLA} or {*rivals} & {*self.policy_of}
        if twice:
            raise UsageError(f"two contenders are called {min(twice)!r}", hint="rivals must not be in the pool")
        loaded = {
            name: self.companion.with_text_drafter(path, pool.load_drafter(path, self.target, recipe.drafting))
            for name, path in rivals.items()
        }
        return contenders | {name: Arm(name, drafter) for name, drafter in loaded.items()}

    def play(self, log: IO[str], keep: Callable[[Sequence[Record]], Path]) -> list[Record]:
        """Return all contenders' answers. Rounds are written to `log`, records are handed to `keep`."""
        recipe = self.recipe
        competing: list[Contender] = []
        if VANILLA in recipe.baselines:
            plain = Engine(self.target, options=EngineOptions(exact=recipe.sampling.exact))
            competing.append(engine_contender(VANILLA, plain, recipe.sampling))
        for name, drafter in self.fixed.items():
            engine = self._engine(name, Fixed(drafter, drafter.taps))
            competing.append(engine_contender(name, engine, recipe.sampling))
        engines = {name: self._engine(name, selector) for name, selector in self.selectors.items()}
        competing += [
            engine_contender(name, engine, recipe.sampling, functools.partial(self._label, name))
            for name, engine in engines.items()
        ]
        asked = prompt_batches(self.stream, recipe.batch)
        if not self.rounds_on_host:
            self._warm_up_arms(asked, engines)
        warm_up(asked, competing)
        for name, selector in self.selectors.items():
            selector.forget()
            self.plays[name].clear()
        self._lines.clear()
        for fixed in self.fixed.values():
            fixed.forget()
        turns = 0

        def remember(records: Sequence[Record]) -> None:
            """Write the rounds of a turn, and add its texts, which all contenders share, to the store.

            The store is emptied after each seed.
            """
            nonlocal turns
            turns += 1
            for algo, line in self._lines:
                self.plays[algo].append((self.game_of(line.domain, line.query, line.seed), line.arm, line.committed))
                line.weights = [round(weight, 4) for weight in line.weights]
                log.write(json.dumps({"algo": algo, **asdict(line)}) + "\n")
            self._lines.clear()
            if turns % len(asked) == 0:
                self.companion.store.clear()
            elif self.companion.name == STREAM_RETRIEVAL:
                texts = [record.decoded for record in records if record.drafter == recipe.algo[0]]
                self.store_s += self.companion.add_to_store(texts)

        journal = RecordJournal(keep, resumable=False)
        return measure(recipe, asked, competing, Shown("select", {recipe.algo[0]}), journal, on_answers=remember)

    def _warm_up_arms(self, asked: Sequence[PromptBatch], engines: Mapping[str, Engine]) -> None:
        """Let every policy's engine decode with each of its arms.

        Each arm has separate CUDA graphs. Capturing them takes as long as tens of rounds, and would otherwise happen
        when the arm first plays.
        """
        for name, engine in engines.items():
            selector = self.selectors[name]
            for arm in selector.arms:
                engine.controller = Fixed(arm, selector.taps)
                warm_up(asked, [engine_contender(name, engine, self.recipe.sampling)])
            engine.controller = selector

    def _engine(self, name: str, controller: Controller) -> Engine:
        options = self.recipe.catch_up
        # Only a policy leaves drafters idle, so only a policy can save anything by `streaming`.
        streams = options.name == "streaming" and name in self.recipe.algo
        on_host = self.rounds_on_host
        return Engine(
            self.target,
            controller,
            EngineOptions(
                exact=self.recipe.sampling.exact,
                catch_up=CatchUp(options.sink, options.window) if streams else RECOMPUTE,
                keeps_hidden=not on_host and controller.keeps_hidden,
                on_host=on_host,
            ),
        )

    def _label(self, name: str, case: Case, seed: int) -> Label:
        repeat = seed - case.seed(self.recipe.sampling.seed)
        forgets_each_prompt = self.recipe.reset == "query" or self.policy_of[name] == registry.ROUTER
        key = None if forgets_each_prompt else self.game_of(*case.question(repeat))
        return Label(case.prompt.id, case.prompt.domain, key, repeat)

    def game_of(self, domain: str, id: str, repeat: int) -> str:
        """Key of the game that a prompt belongs to: the same for all prompts between two resets."""
        if self.recipe.reset == "stream":
            return f"{repeat} "
        return f"{repeat} {f'{domain} {id}' if self.recipe.reset == 'query' else self.session_of[domain, id]}"

    def _note(self, algo: str, entry: RoundLine) -> None:
        self._lines.append((algo, entry))  # called within a timed round: only append here

    def row(self, stream: StreamAnswers, name: str) -> PolicyRow:
        selector = self.selectors.get(name)
        plays = self.plays.get(name, [])
        hits = [stream.best_arm_of[game] == arm for game, arm, _ in plays] if stream.best_arm_of else []
        others = {VANILLA, DRAFT_ALL, self.companion.name} - {arm.name for arm in self.arms}
        kind = "policy" if selector else "baseline" if name in others else "arm"
        if name in labels(self.recipe.rivals).values():
            kind = "rival"
        return stream.row(
            name,
            kind,
            tally=selector.tally if selector else None,
            arms=[arm.name for arm in selector.arms] if selector else [],
            best_arm_ratio=sum(hits) / len(hits) if hits else None,
            failures=(selector or self.fixed[name]).failures if name != VANILLA else 0,
        )

    def rewards(self) -> list[ArmReward]:
        """Tokens committed per round of each arm, over the rounds of all policies."""
        committed: dict[str, list[int]] = {arm.name: [] for arm in self.arms}
        for plays in self.plays.values():
            for _, arm, tokens in plays:
                committed[arm].append(tokens)
        return [ArmReward(arm, len(t), fmean(t), pstdev(t)) for arm, t in committed.items() if t]
