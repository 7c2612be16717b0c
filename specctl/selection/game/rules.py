"""Rules of the game between a policy and decoding: the kind of feedback, for which rounds or tokens, and when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specctl import progress
from specctl.errors import UsageError
from specctl.recipe.select import GAME_PRESETS, GameRecipe
from specctl.selection.policies.registry import NAMES, ROUTER, contextual, learns


@dataclass(frozen=True)
class Rules:
    """The rules of a game: a `GameRecipe` made definite for one policy and one pool.

    Attributes:
        depth: K, the longest draft of the arms that play; with full information, the number of scored depths.
        reward: of a round, for bandits: tokens = committed; be = accepted/K; bd = mean overlap of K positions of its
            draft; throughput = committed per second, in units of K + 1 tokens per plain `step`; surplus = committed
            minus the number that all rounds make in that time.
        costs: seconds per round of each arm by a table's cost model, for its yardsticks. A game measures instead, also
            in a replay, and knows the seconds of an arm once the arm has played.
        step: seconds of a plain decoding step, per text; for throughput alone.
        loss: of a position, for full information: length = 1 − AL/(K + 1); throughput = the corresponding loss for AL
            per second, with AL of a whole draft even if fewer depths are scored; acceptance = 1 − γ at depth 1.
        estimator: of acceptance in the length: product = γ, realised = hit.
        unit: token = every position is a start; chunk = only positions where a round began, with the committed tokens:
            their number k in place of K, and their mean acceptance (HedgeSpec, B.3).
        hybrid_rounds: number of first vectors that are known at once. They have the loss `acceptance`, or, for
            throughput, the length that follows from γ at depth 1.
        warmup_rounds, batch_rounds: all rounds of the warm-up are scored, afterwards one in `batch_rounds`. This
            interval grows by the factor `batch_growth` with every scoring: the longer a game, the less is still to be
            learned.
        score_ends: whether the last tokens of a text that ends within a game are scored, too.
        tokens_per_update: after the warm-up, number of vectors in the mean that is one update.
        drift: threshold of the test (`drift.py`) for a game that has changed: its learner forgets, all is scored, and
            the rounds between two scorings are `batch_rounds` again. Never, if None.
        settled: a position's vector no longer waits for its K tokens once every arm's draft from there goes on with
            less than this probability. It always waits, if None.
        longest: longest draft of the pool, in tokens.
        reach: [N] the longest draft of each arm; () if all of them are `longest`.
    """

    depth: int
    reward: Literal["tokens", "be", "bd", "throughput", "surplus"]
    loss: Literal["length", "throughput", "acceptance"]
    estimator: Literal["product", "realised"]
    unit: Literal["token", "chunk"]
    hybrid_rounds: int
    warmup_rounds: int
    batch_rounds: int
    batch_growth: float
    score_ends: bool
    tokens_per_update: int
    drift: float | None
    settled: float | None = None
    longest: int = 0
    reach: tuple[int, ...] = ()
    costs: tuple[float, ...] = ()
    step: float | None = None

    @property
    def horizon(self) -> int:
        """Number of draft tokens that a loss counts: the scored depths, or, for throughput, all of a whole draft."""
        return self.longest if self.loss == "throughput" else self.depth


def rules_for(name: str, recipe: GameRecipe, depth: int, reach: tuple[int, ...] = (), greedy: bool = False) -> Rules:
    """The rules of a recipe for the policy `name`. All policies play the same game, for comparison, except for the
    options in `preset_options`. `depth`: length of the pool's longest draft.

    `greedy` text has the realised estimator if lengths follow from fewer depths than drafts have. γ is then the softmax
    at temperature 1, with products that are far too small to be compared with seconds.
    """
    pool = depth
    options = recipe.model_dump() | preset_options(name, recipe)
    longest = options.pop("depth")
    if learns(name) == "losses":
        depth = min(longest or depth, depth)
        if greedy and options["loss"] == "throughput" and depth < pool and "estimator" not in recipe.model_fields_set:
            options["estimator"] = "realised"
    return Rules(depth=depth, longest=pool, reach=reach, **options)


def preset_options(name: str, recipe: GameRecipe) -> dict[str, Any]:
    """Options that a policy replaces by its own values: the presets in `GAME_PRESETS`, if the recipe leaves them at
    their defaults, and the reward `paper`, which is bd for MetaSD's policies, tokens for BanditSpec's, surplus for
    `cgp-ucb`."""
    defaults = {key: field.default for key, field in GameRecipe.model_fields.items()}
    preset = {key: value for key, value in GAME_PRESETS.get(name, {}).items() if getattr(recipe, key) == defaults[key]}
    if recipe.reward == "paper":
        preset["reward"] = "bd" if name.startswith("metasd") else "surplus" if contextual(name) else "tokens"
    return {key: value for key, value in preset.items() if value != getattr(recipe, key)}


def check_batch(names: Sequence[str], recipe: GameRecipe) -> None:
    """Raise UsageError if a policy needs more feedback than the outcome of a batch."""
    able = [name for name in NAMES if learns(name) != "losses" and not contextual(name)]
    for name in names:
        if name not in able:
            kind = "reads prompts" if name == ROUTER or contextual(name) else "scores the tokens of each text"
            raise UsageError(
                f"policy {name} {kind}: it does not work with choice=batch", hint=f"use one of {', '.join(able)}"
            )
        if learns(name) == "reward" and (recipe.model_dump() | preset_options(name, recipe))["reward"] == "bd":
            raise UsageError(
                f"{name}: the reward bd needs the draft of each sequence: it does not work with choice=batch",
                hint="set game.reward=throughput",
            )


def overridden_options(names: Sequence[str], recipe: GameRecipe) -> list[str]:
    """A line for every policy with presets that replace explicitly set options, if these were set to their defaults."""
    lines = []
    for name in names:
        forced = preset_options(name, recipe)
        replaced = [f"game.{key}={forced[key]}" for key in forced if key in recipe.model_fields_set and key != "reward"]
        if replaced:
            lines.append(
                f"{name} uses its own game settings: {', '.join(replaced)}; only values other than the defaults "
                "override them"
            )
    return lines


def log_overridden_options(names: Sequence[str], recipe: GameRecipe) -> None:
    for line in overridden_options(names, recipe):
        progress.log(line)


class ScoringSchedule:
    """Counts the rounds of a game, and says after which of them to score: all of the warm-up, then ever fewer.

    With `batch_growth` 1 the intervals stay equal, as in HedgeSpec (B.5).

    Attributes:
        rounds: number of rounds played.
    """

    def __init__(self, rules: Rules):
        self.rules = rules
        self.rounds = 0
        self.begin(rules.warmup_rounds)

    def begin(self, warmup: int) -> None:
        """Begin anew: score all of the next `warmup` rounds, then after intervals that grow from the shortest."""
        self._warm_until = self.rounds + warmup
        self._interval = float(self.rules.batch_rounds)
        self._next = self._warm_until + self.rules.batch_rounds

    def hurry(self) -> None:
        """Make scoring due after this round; the intervals do not change."""
        self._next = min(self._next, self.rounds)

    @property
    def warm(self) -> bool:
        """Whether the last round was one of the warm-up."""
        return self.rounds <= self._warm_until

    def due(self) -> bool:
        """Whether scoring is due after the last round; to be called once per round."""
        if self.warm:
            return True
        if self.rounds < self._next:
            return False
        self._interval *= self.rules.batch_growth
        self._next = self.rounds + round(self._interval)
        return True
