"""Recipe of `specctl select`: pool, stream, policies with their constants, and the rules of the game.

The commands that record a pool or replay its table use sections of it.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from specctl.families import STREAM_RETRIEVAL, TEXT_DRAFTERS
from specctl.recipe.sections import (
    DraftingRecipe,
    LocalPath,
    Name,
    Names,
    OneOf,
    PositiveFloat,
    SampledRecipe,
    Section,
    Seeds,
)

Yardstick = Literal["mat", "throughput"]
ROUTER = "router"  # the policy that plays the choice of a prompt classifier, in `specctl train-router`


class PolicyRecipe(Section):
    """Constants of all policies, with the values of their papers. Each policy reads only the constants it needs."""

    play: Literal["sample", "argmax"] = "sample"  # draw an arm by its weight, or take the largest weight
    arm: NonNegativeInt = 0  # fixed: number of the arm to play
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.1  # ucbspec: δ, probability that a confidence radius fails
    radius_scale: NonNegativeFloat = 1.0  # ucbspec: factor on the radius; 1 as in the paper, 0.1 in practice
    eta: PositiveFloat | None = None  # exp3spec, hedge: constant rate η (None = the papers' schedules)
    beta: NonNegativeFloat = 0.01  # metasd-ucb, -ducb, -swucb: factor β on the confidence radius
    mix: Annotated[float, Field(gt=0, le=1)] = 0.4  # metasd-exp3: γ, share of uniform exploration
    literal: bool = False  # metasd-sh, -petc as printed: keep the worse half, by the last stage's means
    period: PositiveInt = 1  # metasd-sh: pulls of each surviving arm before a halving
    # metasd-petc: halving takes about B0 = c ln B rounds (None: c = 2N). The paper gives no c. With seven arms and 128
    # tokens, c = 2 commits to one arm after 13 rounds; c = 2N explores for 63 rounds, longer than 128 tokens take.
    petc_c: PositiveFloat | None = 2.0
    horizon: Annotated[int, Field(ge=2)] = 128  # metasd-petc: B, expected number of tokens until a reset
    # metasd-ducb: discount λ; metasd-swucb: number of rounds in the window. The paper gives no values. On development
    # texts that change their kind halfway, 0.99 and 100 are no better than never forgetting. The defaults here lose 2 %
    # on texts that do not change.
    discount: Annotated[float, Field(gt=0, le=1)] = 0.9
    window: PositiveInt = 20


class CatchUpRecipe(Section):
    """Text that a drafter reads when it is chosen or scored after it has missed many tokens.

    It reads everything (`recompute`), or the first `sink` and the last `window` tokens (`streaming`, MetaSD F.11).
    """

    name: Literal["recompute", "streaming"] = "recompute"
    sink: PositiveInt = 4
    window: PositiveInt = 512


class GameRecipe(Section):
    """Rules of the game: the rewards and losses that a policy sees, and when it sees them.

    Skipped scorings and the hybrid loss are HedgeSpec's and concern only policies with full information.
    """

    # Number of draft depths at which idle drafters are scored (None = the longest draft, as in HedgeSpec). On
    # development prompts one depth led to choices as good as with two or three, at the least cost.
    depth: PositiveInt | None = 1
    # Reward of bandits. paper is tokens for BanditSpec's policies, bd for MetaSD's, and surplus for cgp-ucb: the tokens
    # of a round, less the average number of tokens that all rounds commit in the same time.
    reward: Literal["paper", "tokens", "be", "bd", "throughput", "surplus"] = "paper"
    # Loss of policies with full information: from the expected accepted length (HedgeSpec), from that length per second
    # of a round, or 1 - γ at depth 1. In a pool of heads the first two choose alike. If some drafters cost nothing,
    # only the loss per second shows which drafter to play.
    loss: Literal["length", "throughput", "acceptance"] = "throughput"
    # Estimator of the expected length. realised is noisier. It is unbiased, except for unlikely candidates that a draft
    # leaves out (by stop_below, by the nodes of a dynamic tree, or in trees wider than 1): both estimators count them
    # as drafted.
    estimator: Literal["product", "realised"] = "product"
    unit: Literal["token", "chunk"] = "token"  # one loss vector per token, or one per round
    hybrid_rounds: NonNegativeInt = 3  # number of first loss vectors that use depth 1 alone, without delay
    # Number of first rounds that are all scored: 6 in HedgeSpec. After one round choices are as good as after two.
    warmup_rounds: NonNegativeInt = 1
    batch_rounds: PositiveInt = 12  # after the warm-up: rounds between two scorings
    batch_growth: Annotated[float, Field(ge=1)] = 2.0  # growth of that number; HedgeSpec: 1, which costs more
    # Threshold of Page's test for an arm with falling acceptance. On an alarm the policy forgets, and idle drafters are
    # scored at once and often again. 5 alarms after about 4 rounds that are two standard deviations worse, after 10
    # that are one worse, and after 400 without a change. null = never, as in HedgeSpec.
    drift: PositiveFloat | None = 5.0
    # If a text ends within a game, also score its tokens that no scoring has reached; otherwise they are dropped. Any
    # scoring of a text costs a prefill of each idle drafter.
    score_ends: bool = False
    tokens_per_update: PositiveInt = 6  # after the warm-up: loss vectors averaged into an update
    # A position's loss vector is complete once every arm's draft from there continues with less than this probability,
    # so all drafts have ended. null = once the tokens of the longest draft are known, as in HedgeSpec.
    settled: Annotated[float, Field(gt=0, lt=1)] | None = 0.01

    @property
    def yardstick(self) -> Yardstick:
        """Measure of a game's best arm: throughput if the reward or the loss counts seconds, else mat."""
        seconds = {self.loss, self.reward} & {"throughput", "surplus"}
        return "throughput" if seconds else "mat"


GAME_PRESETS: dict[str, dict[str, Any]] = {
    "normalhedge": {
        "depth": None,
        "loss": "length",
        "hybrid_rounds": 0,
        "warmup_rounds": 0,
        "batch_rounds": 1,
        "batch_growth": 1.0,
        "drift": None,
        "score_ends": True,
        "tokens_per_update": 1,
        "settled": None,
    }
}
"""Policies with other defaults for the rules of the game. `normalhedge` is HedgeSpec without its savings: every token
is scored at once and at all depths, and is one update."""


class ArmRecipe(Section):
    """Arms to choose from: the drafters, and how much they draft.

    If `draft_nodes` or `shapes` are given, the arms are all drafters × (`draft_nodes` and `shapes`). 0 nodes is a
    single arm of plain decoding.
    """

    names: Names = []  # use only these drafters of the pool; empty = all

    draft_nodes: list[NonNegativeInt] = []
    shapes: list[DraftingRecipe] = []
    # Plain decoding as one more arm, for a stream on which every drafter loses time. null: only when decoding, for
    # policies that count seconds. true: for all policies, and in replays.
    plain: bool | None = None

    @field_validator("shapes")
    @classmethod
    def _sizes_alone(cls, shapes: list[DraftingRecipe]) -> list[DraftingRecipe]:
        if any(shape.proposal != "deterministic" or shape.rescore for shape in shapes):
            raise ValueError("proposal and rescore are the same for all arms: set them in drafting")
        return shapes


class PoolRecipe(SampledRecipe):
    """Common keys of the commands that decode a stream of prompts with a pool of drafters.

    A session has `session` consecutive prompts, from one domain unless `order` says otherwise.
    """

    drafting: DraftingRecipe = DraftingRecipe()
    pool: LocalPath | None = None  # directory of drafters (None = ./drafters, if it exists)
    drafters: list[Name] = []  # further drafters of the pool: directories, lookup or suffix
    strict: bool = False  # refuse a pool with an unusable drafter, instead of leaving that drafter out
    arms: ArmRecipe = ArmRecipe()
    session: PositiveInt = 8  # prompts per session
    # mixed: sessions of all domains, shuffled. blocks: one domain after the other. shift: every session has half of its
    # prompts from one domain and half from a second one.
    order: Literal["mixed", "blocks", "shift"] = "mixed"
    limit: PositiveInt | None = 40  # prompts per domain; a sample if a file has more
    overwrite: bool = False


class SelectRecipe(PoolRecipe):
    """`specctl select`: policies that choose a drafter of the pool every round, on one stream of prompts.

    At every `reset` a policy forgets what its rounds have shown; only cgp-ucb keeps its memory of prompts.
    """

    sliceable = True

    algo: Annotated[Names, Field(min_length=1)] = ["cgp-ucb"]  # one policy, or several side by side
    # Text drafter that drafts in one tree with every head, arm or rival. This hybrid chooses its depth itself. The text
    # drafter is also one more arm. auto: on a CPU `retrieval` from all earlier texts of the stream, unless another
    # option decides how heads draft; on a GPU none, because a head with a text drafter does not run in CUDA graphs.
    beside: Annotated[str, OneOf(lambda: ("auto", "none", *TEXT_DRAFTERS, STREAM_RETRIEVAL))] = "auto"
    store_tokens: PositiveInt = 1_000_000  # size of the datastore of `retrieval`: the newest tokens, 16 bytes each
    policy: PolicyRecipe = PolicyRecipe()
    game: GameRecipe = GameRecipe()
    catch_up: CatchUpRecipe = CatchUpRecipe()
    reset: Literal["query", "session", "stream"] = "query"  # query as in the papers, the hardest case
    # Contenders for comparison. vanilla: plain decoding. beside: the text drafter of the key `beside`. fixed: every arm
    # alone. draft-all: all drafters draft in every round, and the longest accepted draft counts. recompute: the
    # policies once more, without the savings and losses of catch_up=streaming.
    baselines: list[Literal["vanilla", "beside", "fixed", "draft-all", "recompute"]] = ["vanilla", "beside"]
    rivals: list[Name] = []  # drafters that are measured alone and are no arms, such as a generalist
    batch: PositiveInt = 1  # sequences at a time
    # Scope of a choice in a round. text: every text gets its own arm. batch: all texts of a batch get the same arm,
    # because the best draft length depends on the load (BanditSpec, 6.2). Then each load (number of texts, by powers of
    # two) has a game, which learns along the stream.
    choice: Literal["text", "batch"] = "text"
    seeds: Seeds = [0]  # repeats with other draws
    save_outputs: bool = False

    @property
    def companion(self) -> str | None:
        """Text drafter that drafts in one tree with every head, or None."""
        if self.beside != "auto":
            return None if self.beside == "none" else self.beside
        own = self.arms.shapes or self.arms.draft_nodes
        return None if own or self.drafting.proposal == "sampled" or self.target.on_gpu else STREAM_RETRIEVAL

    @property
    def companion_arm(self) -> str | None:
        """The companion text drafter if it is an arm, too, else None.

        As an arm it drafts alone, because heads that draft with it do not pay off everywhere.
        """
        return None if self.arms.names else self.companion

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.beside not in ("auto", "none") and (self.arms.shapes or self.arms.draft_nodes):
            raise ValueError("beside: a hybrid chooses its draft size itself: leave out draft_nodes and shapes")
        if "recompute" in self.baselines and self.catch_up.name != "streaming":
            raise ValueError("the baseline recompute needs catch_up=streaming: otherwise all policies recompute")
        if self.choice == "batch":
            self._check_batch()
        elif self.batch > 1 and self.reset == "stream":
            raise ValueError("a policy that is never reset learns from one text at a time: set batch to 1")
        if self.batch > 1 and self.drafting.proposal == "sampled":
            raise ValueError("sampled and deterministic proposals are verified by different rules: set batch to 1")
        return self

    def _check_batch(self) -> None:
        """Raise ValueError for options that need a choice per text, not per batch."""
        if self.catch_up.name == "streaming":
            raise ValueError("catch_up.name needs a choice per text: leave it out, or choice=batch")
        if self.reset != "stream":
            raise ValueError(
                "choice=batch keeps the statistics of each load along the stream: set reset=stream, and an algo that "
                "reads no prompts, such as ucbspec (--recipe select/draft-lengths)"
            )
