"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable

from specctl.errors import UsageError
from specctl.recipe.select import PolicyRecipe
from specctl.selection.bandits import DiscountedUcb, MetaUcb, SlidingUcb, UcbSpec
from specctl.selection.baselines import Fixed, Random
from specctl.selection.exponential import Exp3Spec, MetaExp3
from specctl.selection.halving import ExploreThenCommit, SequentialHalving
from specctl.selection.hedge import AdaNormalHedge, FollowTheLeader, Hedge, NormalHedge
from specctl.selection.policy import Arms, Policy

_POLICIES: dict[str, Callable[[Arms, PolicyRecipe], Policy]] = {
    "fixed": Fixed,
    "random": Random,
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
    "hedgespec": NormalHedge,  # what makes it HedgeSpec are the rules of its game
}
NAMES = tuple(_POLICIES)


def build(name: str, arms: Arms, options: PolicyRecipe) -> Policy:
    """A fresh policy.

    Raises:
        UsageError: there is none of that name, or it cannot play these arms.
    """
    if name not in _POLICIES:
        raise UsageError(f"no policy {name!r}", hint=f"there are {', '.join(NAMES)}")
    return _POLICIES[name](arms, options)
