"""`specctl select`: pool and stream, and the constants of the policies and of the game that they play."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from specctl.families import GROWING, UNTRAINED
from specctl.recipe.router import RouterRecipe
from specctl.recipe.sections import (
    CommandRecipe,
    DataRecipe,
    DraftingRecipe,
    LocalPath,
    Name,
    Names,
    OneOf,
    PositiveFloat,
    SamplingRecipe,
    Section,
)
from specctl.recipe.server import Listen, ServerRecipe


class PolicyRecipe(Section):
    """Constants of all policies, with the values of their papers; each policy reads its own."""

    play: Literal["sample", "argmax"] = "sample"  # how an arm is drawn from weights
    arm: NonNegativeInt = 0  # fixed: the one it plays
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.1  # ucbspec: δ, probability that a radius does not hold
    radius_scale: NonNegativeFloat = 1.0  # ucbspec: 1 is literal, 0.1 practical
    eta: PositiveFloat | None = None  # exp3spec, hedge: a constant rate η instead of the papers' schedules
    beta: NonNegativeFloat = 0.01  # metasd-ucb, -ducb, -swucb: β, scale of the radius
    mix: Annotated[float, Field(gt=0, le=1)] = 0.4  # metasd-exp3: γ, share of uniform exploration
    literal: bool = False  # metasd-sh, -petc: as printed: keeps the worse half, by the last stage's means
    period: PositiveInt = 1  # metasd-sh: pulls of each surviving arm before a halving
    # metasd-petc: halving takes about B0 = c ln B rounds; None = 2N. The paper names no c. Of seven arms and 128 tokens
    # 2 has committed to one after 13 rounds; 2N explores for 63, which is more than 128 tokens take.
    petc_c: PositiveFloat | None = 2.0
    horizon: Annotated[int, Field(ge=2)] = 128  # metasd-petc: B, tokens that are expected until a reset
    # metasd-ducb: λ, and metasd-swucb: rounds that count. Not in the paper; on development texts whose kind changes
    # half-way 0.99 and 100 are no better than not forgetting, and these lose 2 % where nothing changes.
    discount: Annotated[float, Field(gt=0, le=1)] = 0.9
    window: PositiveInt = 20


class CatchUpRecipe(Section):
    """The text read by drafters that miss much of it, when they are chosen or scored: everything (`recompute`), or the
    first `sink` and the last `window` tokens (`streaming`, MetaSD F.11)."""

    name: Literal["recompute", "streaming"] = "recompute"
    sink: PositiveInt = 4
    window: PositiveInt = 512


class GameRecipe(Section):
    """The policies' view of a game. The skipping and the hybrid loss are HedgeSpec's, for full information only."""

    # Draft depths of idle drafters that are looked at; None = the longest draft, as in HedgeSpec. On development
    # prompts one chose as well as two or three, at the least cost.
    depth: PositiveInt | None = 1
    # Of bandits. paper = tokens (BanditSpec), bd (MetaSD), or surplus (cgp-ucb): tokens beyond those that all rounds
    # make in that time.
    reward: Literal["paper", "tokens", "be", "bd", "throughput", "surplus"] = "paper"
    # Of full information: expected length (HedgeSpec), that a second of a round, or 1 - γ at depth 1. In a pool of
    # heads the first two choose alike; beside drafters that cost nothing only seconds tell what is worth playing.
    loss: Literal["length", "throughput", "acceptance"] = "throughput"
    # Of the expected length. realised is noisier, and unbiased but for what a draft leaves out because it is unlikely
    # (stop_below, the nodes of a dynamic tree, expansions of one wider than 1): that both count as if it were there.
    estimator: Literal["product", "realised"] = "product"
    unit: Literal["token", "chunk"] = "token"
    hybrid_rounds: NonNegativeInt = 3  # first loss vectors that are 1 - γ, without delay
    # Rounds that are all scored: 6 in HedgeSpec. After one the choice is as good as after two, which score more.
    warmup_rounds: NonNegativeInt = 1
    batch_rounds: PositiveInt = 12  # rounds between two scorings afterwards
    batch_growth: Annotated[float, Field(ge=1)] = 2.0  # from scoring to scoring; 1 is HedgeSpec's, and costs more
    # Threshold of Page's test for an arm that accepts less than it did: forget, score now and often again. 5 alarms
    # after about 4 rounds that are two standard deviations worse, 10 one worse, 400 as ever. null = HedgeSpec's: never.
    drift: PositiveFloat | None = 5.0
    # Of a text that ends within a game, also score the tokens that no scoring has reached; else they are forgotten. A
    # text that is scored at all costs a prefill of each idle drafter.
    score_ends: bool = False
    tokens_per_update: PositiveInt = 6  # afterwards: the mean of so many vectors is one update
    # A position's vector is complete once every arm's draft from there goes on with less than this probability: all
    # have missed. null = HedgeSpec's: when the tokens of the longest draft are known.
    settled: Annotated[float, Field(gt=0, lt=1)] | None = 0.01

    @property
    def yardstick(self) -> Literal["mat", "throughput"]:
        """The measure of a game's best arm: tokens a second where these are played for, else mat."""
        seconds = {self.loss, self.reward} & {"throughput", "surplus"}
        return "throughput" if seconds else "mat"


GAMES: dict[str, dict[str, Any]] = {
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
"""Policies with a game of their own: there these are the defaults. NormalHedge alone is HedgeSpec without its savings:
every token is scored at all depths, at once, and is an update."""


class ArmRecipe(Section):
    """Arms that can be chosen: which drafters, and how much they draft.

    The arms are all drafters × (`draft_nodes` and `shapes`), where any are given; 0 nodes is plain decoding, once.
    """

    names: Names = []  # only these of the pool's drafters; empty = all

    draft_nodes: list[NonNegativeInt] = []
    shapes: list[DraftingRecipe] = []
    # Plain decoding as one more arm, for a stream on which every drafter loses. null: for policies that play for
    # seconds, when decoding; true: for all policies, and in replays.
    plain: bool | None = None


SERVED = ("target", "resources", "algo", "policy", "seeds", "output_dir", "overwrite", "server", "listen")
"""Keys that count where requests are routed among servers."""


class SelectRecipe(CommandRecipe):
    """`specctl select`: policies that choose a drafter of the pool every round, on one stream of prompts.

    A session is a run of `session` consecutive prompts, of one domain unless `order` says otherwise. What a policy has
    learnt is forgotten at every `reset`.
    """

    sliceable = True

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    algo: Annotated[Names, Field(min_length=1)] = ["cgp-ucb"]  # one policy, or several side by side
    pool: LocalPath | None = None  # None = ./drafters where that is there
    drafters: list[Name] = []  # further members: directories, or lookup, suffix
    # A text drafter that every head, arm or rival, drafts with in one tree (a hybrid, which decides how deep), and one
    # more arm. auto: on a CPU `retrieval`, which reads all earlier texts of the stream, unless another option decides
    # how heads draft; on a GPU none, because a head with a text drafter does not run in CUDA graphs.
    beside: Annotated[str, OneOf(lambda: ("auto", "none", *UNTRAINED, GROWING))] = "auto"
    store_tokens: PositiveInt = 1_000_000  # of the newest texts that `retrieval` reads, 16 bytes each
    strict: bool = False  # refuse a pool with a member that cannot be used, instead of leaving it out
    arms: ArmRecipe = ArmRecipe()
    policy: PolicyRecipe = PolicyRecipe()
    game: GameRecipe = GameRecipe()
    catch_up: CatchUpRecipe = CatchUpRecipe()
    reset: Literal["query", "session", "stream"] = "query"  # as in the papers, and the hardest
    session: PositiveInt = 8
    # Sessions of all domains shuffled; domain after domain; or every session half of one domain and half of another.
    order: Literal["mixed", "blocks", "shift"] = "mixed"
    # beside: that text drafter; fixed: every arm by itself; recompute: the policies once more, without what
    # catch_up=streaming saves and loses
    baselines: list[Literal["vanilla", "beside", "fixed", "draft-all", "recompute"]] = ["vanilla", "beside"]
    rivals: list[Name] = []  # drafters measured by themselves that are no arms, such as a generalist
    batch: PositiveInt = 1  # sequences at a time
    # Who is given an arm in a round: every text its own, or all texts of a batch one, which a game for each load (texts
    # at a time, by powers of two) learns along the stream: how much to draft depends on that (BanditSpec, 6.2).
    choice: Literal["text", "batch"] = "text"
    split: Literal["train", "test"] = "test"
    limit: PositiveInt | None = 40  # prompts per domain; of a file with more, a sample
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]  # other draws of the policies, live or in replays
    record: LocalPath | None = None  # write the table of all drafters at all positions here, and stop
    replay: LocalPath | None = None  # play the policies on such a table instead of decoding
    pool_sizes: list[PositiveInt] = []  # replay: also on this many of the arms, some subsets each
    router: RouterRecipe = RouterRecipe()
    router_dir: LocalPath | None = None  # a trained router, for the policy `router` and for warm_start
    train_router: bool = False  # train one first, into router_dir or the run directory
    warm_start: bool = False  # full information begins with what the router thinks of the prompt
    resume: bool = False  # of record
    save_outputs: bool = False
    overwrite: bool = False
    server: ServerRecipe = ServerRecipe()  # engines with a drafter each, among which requests are routed
    listen: Listen | None = None  # the proxy that takes these requests

    @property
    def companion(self) -> str | None:
        """The text drafter that every head drafts with."""
        if self.beside != "auto":
            return None if self.beside == "none" else self.beside
        own = self.record is not None or self.replay is not None or self.arms.shapes or self.arms.draft_nodes
        return None if own or self.drafting.proposal == "sampled" or self.target.on_gpu else GROWING

    @property
    def companion_arm(self) -> str | None:
        """The same, where it can be chosen, too: heads that draft with it do not pay everywhere."""
        others = self.arms.names or self.train_router or self.router_dir  # these know which arms there are
        return None if others else self.companion

    @model_validator(mode="after")
    def _here_or_served(self) -> SelectRecipe:
        if not self.server.urls:
            if self.listen is not None:
                raise ValueError("listen takes requests for engines: name them with server")
            return self
        if len(self.server.urls) < 2:
            raise ValueError("server names one engine: there is nothing to choose from")
        if self.listen is None:
            raise ValueError("listen is missing: HOST:PORT where requests are taken, such as 127.0.0.1:8100")
        if len(self.algo) > 1 or len(self.seeds) > 1:
            raise ValueError("requests are routed by one policy, under one seed")
        for key, field in type(self).model_fields.items():
            if key not in SERVED and getattr(self, key) != field.default:
                raise ValueError(f"{key} is about choosing in this process, servers draft by themselves: leave it out")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> SelectRecipe:
        if self.beside not in ("auto", "none"):
            if self.record is not None or self.replay is not None:
                raise ValueError("beside: a hybrid drafts by what it has seen accepted, so no table knows its rounds")
            if self.arms.shapes or self.arms.draft_nodes:
                raise ValueError("beside: a hybrid decides itself how much it drafts, so arms have no sizes and shapes")
        if self.data.limit is not None:
            raise ValueError("use `limit`, not `data.limit`")
        if self.record is not None and self.replay is not None:
            raise ValueError("record makes the table that replay plays on: one after the other")
        if (self.warm_start or "router" in self.algo) and not (self.router_dir or self.train_router):
            raise ValueError("there is no router: name router_dir, or train one with train_router")
        if "recompute" in self.baselines and self.catch_up.name != "streaming":
            raise ValueError("the policies recompute already: the baseline is for catch_up=streaming")
        if self.arms.plain and (self.warm_start or "router" in self.algo):
            raise ValueError("arms.plain: a router knows drafters only, so plain decoding is no arm beside it")
        if self.resume and self.record is None:
            raise ValueError("resume goes on with a recording: name `record`")
        if self.choice == "batch":
            self._of_batch()
        elif self.batch > 1 and self.reset == "stream":
            raise ValueError("a policy that is never reset hears of one text at a time: batch must be 1")
        if self.batch > 1 and self.drafting.proposal == "sampled":
            raise ValueError("sampled and deterministic proposals are verified by different rules: batch must be 1")
        return self

    def _of_batch(self) -> None:
        """ValueError for what knows texts, and not batches."""
        of_texts = {
            "record": self.record is not None,
            "replay": self.replay is not None,
            "warm_start": self.warm_start,
            "train_router": self.train_router,
            "router_dir": self.router_dir is not None,
            "catch_up.name": self.catch_up.name == "streaming",
        }
        for key, there in of_texts.items():
            if there:
                raise ValueError(f"{key} is about texts: leave it out, or choice batch")
        if self.reset != "stream":
            raise ValueError(
                "choice batch: what a load has shown holds for the stream: set reset=stream, and an algo that reads no "
                "prompts, such as ucbspec (--recipe select/draft-lengths)"
            )
