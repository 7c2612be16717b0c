"""Recipe of `specctl learn-from-server`."""

from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from specctl.errors import UsageError
from specctl.recipe.learner import rule_and_family
from specctl.recipe.online import DrafterStreamRecipe
from specctl.recipe.sections import LocalPath, Names, PositiveFloat, Section
from specctl.recipe.server import Listen, ServerRecipe


class PublicationRecipe(Section):
    """Publication of the learned drafter to the running engines, and the test of each version there."""

    enabled: bool = True  # false = learn, but change nothing in the engines
    # Prompts that are sent before and after a publication, for comparison. They are the newest of the texts that
    # learner.holdout keeps from the update, or of all texts if it keeps none. 0 = trust the learner.
    probes: NonNegativeInt = 8
    tokens: PositiveInt = 64  # longest answer to a probe
    # Significance level of that comparison: at most this share of the versions that are no worse is rolled back.
    level: Annotated[float, Field(gt=0, lt=1)] = 0.05
    keep: PositiveInt = 3  # versions kept on disk
    dir: LocalPath | None = None  # of the versions, readable by the engines (None = in the run directory)


class TrafficRecipe(Section):
    """Source of the texts. By default the prompts of the stream are sent to the server."""

    listen: Listen | None = None  # HOST:PORT of a proxy to the servers
    log: LocalPath | None = None  # file of requests with responses, one per line, read as it grows
    follow: bool = True  # wait for more lines of the log
    max_log_mb: PositiveFloat = 256.0  # size at which the proxy's log is rotated; one old file is kept


class LearnFromServerRecipe(DrafterStreamRecipe):
    """`specctl learn-from-server`: a drafter that learns from the texts of servers, which draft with it."""

    algo: Annotated[Names, Field(min_length=1, max_length=1)] = ["ogd"]
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=1)] = [0]
    server: ServerRecipe = ServerRecipe()  # engines of the target, which draft with the learned drafter
    baseline_server: ServerRecipe = ServerRecipe()  # engine with a fixed drafter, sent the same prompts
    traffic: TrafficRecipe = TrafficRecipe()
    publication: PublicationRecipe = PublicationRecipe()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.traffic.listen is not None and self.traffic.log is not None:
            raise ValueError("traffic comes through the proxy (listen) or from an existing log: leave one of them out")
        live = self.traffic.listen is not None or self.traffic.log is not None
        if live and self.baseline_server.urls:
            raise ValueError("baseline_server answers the prompts of a stream, but traffic has none: leave one out")
        if self.sampling.exact:
            raise ValueError("sampling.exact is for drafting in this process: leave it out, a server drafts by itself")
        if rule_and_family(self.algo[0])[0] in ("osd", "static"):
            raise ValueError("osd needs the rejected positions, which no server reports, and static does not learn")
        self._check_stdin()
        return self

    def check_server(self) -> None:
        """Raise UsageError without a server."""
        if not self.server.urls:
            raise UsageError(
                "there is no server to learn from", hint="specctl learn-from-server --server http://host:8000"
            )
