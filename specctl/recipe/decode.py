"""Commands that decode with drafters: `specctl eval`, `generate`, `select` and `bench`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.recipe.router import RouterRecipe
from specctl.recipe.sections import (
    CommandRecipe,
    DataRecipe,
    DraftingRecipe,
    LocalPath,
    Name,
    Names,
    ResumableRecipe,
    SamplingRecipe,
    Section,
)
from specctl.recipe.select import CatchUpRecipe, GameRecipe, PolicyRecipe


class EvalRecipe(ResumableRecipe):
    """`specctl eval`: one row per drafter × domain; output_dir None = the run directory under ./runs.

    `matrix` asks for the table of `metric` over pool × domains, its picture, and the test of the diagonal; the domains
    are then those that the drafters were made for, unless `data.domain` is given.
    """

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    drafters: list[Name] = []  # drafter directories, or the name of a family without weights: lookup, suffix
    pool: LocalPath | None = None  # directory of drafter directories
    matrix: bool = False
    metric: Literal["mat", "speedup", "accept_rate"] = "mat"  # in the cells of the matrix
    baselines: list[Literal["vanilla", "transformers"]] = ["vanilla", "transformers"]
    split: Literal["train", "test"] = "test"
    limit: PositiveInt | None = 100  # prompts per domain; of a file with more, a sample
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)] = [0]
    save_outputs: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> EvalRecipe:
        if self.data.limit is not None:
            raise ValueError("use `limit`, not `data.limit`")
        if self.matrix and not self.drafters and self.pool is None:
            raise ValueError("a matrix needs drafters: name a pool")
        if self.matrix and self.metric == "speedup" and "vanilla" not in self.baselines:
            raise ValueError("a matrix of speedup needs the vanilla baseline")
        if self.resume and self.output_dir is None:
            raise ValueError("resume needs output_dir, the directory of the run to continue")
        return self


class GenerateRecipe(CommandRecipe):
    """`specctl generate`: one prompt with and without a drafter."""

    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    prompt: str | None = None
    drafter: Name | None = None
    save_outputs: bool = False
    overwrite: bool = False


class ArmRecipe(Section):
    """Arms that can be chosen: which drafters, and how much they draft.

    The arms are all drafters × (`draft_nodes` and `shapes`), where any are given; 0 nodes is plain decoding, once.
    """

    names: Names = []  # only these of the pool's drafters; empty = all

    draft_nodes: list[NonNegativeInt] = []
    shapes: list[DraftingRecipe] = []


class SelectRecipe(CommandRecipe):
    """`specctl select`: policies that choose a drafter of the pool every round, on one stream of prompts.

    A session is a run of `session` consecutive prompts, of one domain unless `order` says otherwise. What a policy has
    learnt is forgotten at every `reset`.
    """

    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    algo: Annotated[Names, Field(min_length=1)] = ["hedgespec"]  # one policy, or several side by side
    pool: LocalPath | None = None  # None = ./drafters where that is there
    drafters: list[Name] = []  # further members: directories, or lookup, suffix
    strict: bool = False  # refuse a pool with a member that cannot be used, instead of leaving it out
    arms: ArmRecipe = ArmRecipe()
    policy: PolicyRecipe = PolicyRecipe()
    game: GameRecipe = GameRecipe()
    catch_up: CatchUpRecipe = CatchUpRecipe()
    reset: Literal["query", "session", "stream"] = "query"  # as in the papers, and the hardest
    session: PositiveInt = 8
    # Sessions of all domains shuffled; domain after domain; or every session half of one domain and half of another.
    order: Literal["mixed", "blocks", "shift"] = "mixed"
    # fixed: every arm by itself; recompute: the policies once more, without what catch_up=streaming saves and loses
    baselines: list[Literal["vanilla", "fixed", "draft-all", "recompute"]] = ["vanilla"]
    rivals: list[Name] = []  # drafters measured by themselves that are no arms, such as a generalist
    batch: PositiveInt = 1  # sequences at a time, each with a choice of its own
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

    @model_validator(mode="after")
    def _consistent(self) -> SelectRecipe:
        if self.data.limit is not None:
            raise ValueError("use `limit`, not `data.limit`")
        if self.record is not None and self.replay is not None:
            raise ValueError("record makes the table that replay plays on: one after the other")
        if (self.warm_start or "router" in self.algo) and not (self.router_dir or self.train_router):
            raise ValueError("there is no router: name router_dir, or train one with train_router")
        if "recompute" in self.baselines and self.catch_up.name != "streaming":
            raise ValueError("the policies recompute already: the baseline is for catch_up=streaming")
        if self.resume and self.record is None:
            raise ValueError("resume goes on with a recording: name `record`")
        if self.batch > 1 and self.reset == "stream":
            raise ValueError("a policy that is never reset hears of one text at a time: batch must be 1")
        if self.batch > 1 and self.drafting.proposal == "sampled":
            raise ValueError("sampled and deterministic proposals are verified by different rules: batch must be 1")
        return self


class BenchRecipe(CommandRecipe):
    """`specctl bench`: kernels, target steps and batches against their baselines, on this machine.

    `shape` puts a target with random weights of that size in the place of `target`: speed does not need their values.
    """

    parts: Annotated[list[Literal["kernels", "steps", "rounds", "decoding"]], Field(min_length=1)] = [
        "kernels",
        "steps",
        "rounds",
        "decoding",
    ]
    shape: Literal["1b", "8b"] | None = None
    data: DataRecipe = DataRecipe()
    sampling: SamplingRecipe = SamplingRecipe()
    drafting: DraftingRecipe = DraftingRecipe()
    drafters: list[Name] = ["lookup"]
    limit: PositiveInt = 16  # prompts
    batches: Annotated[list[PositiveInt], Field(min_length=1)] = [1, 8]
    draft_lengths: list[PositiveInt] = []  # nodes of a draft; besides each drafter's own default
    vocabularies: Annotated[list[PositiveInt], Field(min_length=1)] = [32_000, 128_000]
    drafted: PositiveInt = 8  # rows of a sequence that the kernels verify
    context: PositiveInt = 256  # of the steps that are timed
    repeats: PositiveInt = 30
    overwrite: bool = False
