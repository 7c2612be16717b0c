"""Recipe of `specctl serve`."""

from typing import Annotated, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator, model_validator

from specctl.recipe.learn_from_server import PublicationRecipe
from specctl.recipe.learner import LearnerOptions, rule_and_family
from specctl.recipe.online import BufferRecipe
from specctl.recipe.sections import (
    CommandRecipe,
    Device,
    DraftingRecipe,
    LocalPath,
    Name,
    Names,
    PositiveFloat,
    Section,
)
from specctl.recipe.select import ArmRecipe, GameRecipe, PolicyRecipe
from specctl.recipe.server import Listen, ServerRecipe
from specctl.recipe.train import Tracker


class LimitsRecipe(Section):
    """Limits that protect a gateway from its clients."""

    headers: PositiveInt = 100  # of a request
    header_bytes: PositiveInt = 32 * 2**10
    body_bytes: PositiveInt = 8 * 2**20
    all_body_bytes: PositiveInt = 256 * 2**20  # bodies of all requests in flight
    header_s: PositiveFloat = 10.0  # from the first byte of a request, or from the connection, to the last header
    body_s: PositiveFloat = 30.0  # to read a body
    idle_s: PositiveFloat = 60.0  # between two requests of a connection
    request_s: PositiveFloat = 600.0  # for a whole request, streams included
    requests: PositiveInt = 1024  # in flight
    # Open connections (None = as many as the limit of open files allows, at most 16384). One more closes the idle
    # connection that was opened first.
    connections: PositiveInt | None = None
    # Without a key, a connection to the loopback must name an address, this machine, a name without a dot such as
    # localhost, or one of these hosts. This refuses the pages of a site that has pointed its name at this machine.
    hosts: Names = []
    stop_s: PositiveFloat = 30.0  # for requests in flight when a signal ends the gateway


class ServeLearningRecipe(Section):
    """Learning from served texts: in a process beside the target's own engine, or from the texts of running engines.

    Keys that say "own engine" have no effect on running engines, and the other way round.
    """

    enabled: bool = False
    algo: Name = "ogd"  # update rule of `specctl online`
    learner: LearnerOptions = LearnerOptions()
    # max_mb is the size of the texts that the gateway collects; the learner may hold three times as much.
    buffer: BufferRecipe = BufferRecipe(max_mb=256)
    chunk: PositiveInt | None = None  # texts between two updates (None = the default of the drafter's family)
    longest: Annotated[int, Field(ge=4)] = 2048  # own engine: longest text to learn from, in tokens, prompt included
    device: Device = "auto"  # own engine: of the learner, such as cuda:1
    save_s: PositiveFloat = 60.0  # own engine: shortest time between two copies of the drafter on the disk
    seed: NonNegativeInt = 0
    publication: PublicationRecipe = PublicationRecipe()  # running engines
    max_log_mb: PositiveFloat = 256.0  # running engines: size at which the log of their texts is rotated

    @field_validator("algo")
    @classmethod
    def _learns(cls, algo: str) -> str:
        rule, family = rule_and_family(algo)
        if rule == "static" or family is not None:
            raise ValueError(f"{algo!r}: name a rule that learns, without a family, such as ogd or ens")
        return algo


class ServeRecipe(CommandRecipe):
    """`specctl serve`: OpenAI's protocol, from the target's own engine or from running engines.

    There is one drafter, or a policy chooses: for every text a drafter of a pool, or an engine.
    """

    drafting: DraftingRecipe = DraftingRecipe()
    pool: LocalPath | None = None  # directory of drafters to choose from
    drafters: list[Name] = []  # one drafter for all texts, or further drafters to choose from; none = plain decoding
    strict: bool = False  # refuse a pool with an unusable drafter, instead of leaving that drafter out
    arms: ArmRecipe = ArmRecipe()
    choose: Name = "cgp-ucb"  # the policy that chooses a drafter for every text, if there are several
    policy: PolicyRecipe = PolicyRecipe()
    seed: NonNegativeInt = 0  # of the policy's draws
    game: GameRecipe = GameRecipe()
    server: ServerRecipe = ServerRecipe()  # running engines of the target, instead of an engine in this process
    listen: Listen = "127.0.0.1:8000"
    model: Name | None = None  # name that clients ask for (None = the target's)
    slots: PositiveInt = 32  # texts that are decoded at a time
    waiting: NonNegativeInt = 256  # texts that may wait for a place among them; others are refused with status 429
    max_new_tokens: PositiveInt | None = None  # most new tokens of an answer (None = the rest of the context)
    # On a CPU: size of the cache of recent texts. Their beginnings are not read again, such as earlier turns of a chat.
    prefix_cache_mb: NonNegativeFloat = 512.0
    limits: LimitsRecipe = LimitsRecipe()
    learn: ServeLearningRecipe = ServeLearningRecipe()
    log: list[Tracker] = []  # trackers that show the progress of learning
    key_env: Annotated[str, Field(pattern=r"^\w+$")] = "SPECCTL_SERVE_KEY"  # environment variable with clients' key
    overwrite: bool = False

    @property
    def chooses(self) -> bool:
        """Whether a policy chooses the drafter of every text."""
        return self.pool is not None or len(self.drafters) > 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.chooses and not self.server.urls and self.drafting.proposal == "sampled":
            raise ValueError("sampled and deterministic proposals are verified by different rules: serve one drafter")
        if self.arms != ArmRecipe(names=self.arms.names):
            raise ValueError("arms: serve chooses among drafters and plain decoding, not sizes: set arms.names alone")
        if self.learn.enabled and not (self.drafters or self.pool):
            raise ValueError("learn: name a drafter that learns: --drafter DIR, or --pool DIR")
        by_servers = self.learn.enabled and bool(self.server.urls)
        if by_servers and (self.pool or len(self.drafters) not in (1, len(self.server.urls))):
            raise ValueError("learn: name one --drafter for all servers, or one for each server, in their order")
        if self.log and not (self.learn.enabled and not self.server.urls):
            raise ValueError("log: trackers show the learning of the own engine: add --learn, or leave log out")
        if self.server.urls and (self.drafters or self.pool) and not self.learn.enabled:
            raise ValueError("server: the engines draft themselves: leave out drafters and pool, or server")
        return self
