"""Registry of the policies, by name. `router` is no entry, because `build` has no classifier of prompts."""

from typing import Any

from specctl.errors import UsageError, did_you_mean
from specctl.recipe.select import ROUTER, PolicyRecipe
from specctl.selection.policies.bandits import (
    DiscountedUcb,
    Exp3Spec,
    ExploreThenCommit,
    MetaExp3,
    MetaUcb,
    SequentialHalving,
    SlidingUcb,
    UcbSpec,
)
from specctl.selection.policies.contextual import ContextualUcb
from specctl.selection.policies.hedge import AdaNormalHedge, FollowTheLeader, Hedge, NormalHedge
from specctl.selection.policies.policy import Arms, FixedArm, Learns, Policy, Random

_POLICIES: dict[str, Any] = {
    "fixed": FixedArm,
    "random": Random,
    "cgp-ucb": ContextualUcb,
    "ucbspec": UcbSpec,
    "exp3spec": Exp3Spec,
    "metasd-ucb": MetaUcb,
    "metasd-exp3": MetaExp3,
    "metasd-sh": SequentialHalving,
    "metasd-petc": ExploreThenCommit,
    "metasd-ducb": DiscountedUcb,
    "metasd-swucb": SlidingUcb,
    "ftl": FollowTheLeader,
    "hedge": Hedge,
    "normalhedge": NormalHedge,
    "adanormalhedge": AdaNormalHedge,
    "hedgespec": NormalHedge,  # the rules of its game make it HedgeSpec
}
NAMES = tuple(_POLICIES)


def check(names: list[str]) -> None:
    """Raise UsageError if there is no policy of a name, or if one is named twice."""
    known = (*NAMES, ROUTER)
    for name in names:
        if name not in known:
            hint = f"{did_you_mean(name, known)} use one of {', '.join(known)}".lstrip()
            raise UsageError(f"no policy {name!r}", hint)
        if names.count(name) > 1:
            raise UsageError(f"policy {name} is named twice", hint="name each policy once")


def learns(name: str) -> Learns:
    """The kind of feedback that a policy of this name learns from. Raises UsageError like `check`."""
    check([name])
    return "nothing" if name == ROUTER else _POLICIES[name].learns


def contextual(name: str) -> bool:
    """Whether a policy of this name reads prompts."""
    return _POLICIES.get(name) is ContextualUcb


def build(name: str, arms: Arms, options: PolicyRecipe) -> Policy:
    """Build a fresh policy.

    Raises:
        UsageError: no policy has that name, or it cannot play these arms.
    """
    check([name])
    if name == ROUTER:
        raise UsageError("the router needs prompts", hint="use it in live decoding, not in a replay")
    return _POLICIES[name](arms, options)
