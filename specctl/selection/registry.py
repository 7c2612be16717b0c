"""The policies by name."""

from __future__ import annotations

import difflib
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


def check(names: list[str]) -> None:
    """Raises UsageError where there is no policy of a name, or one is named twice."""
    for name in names:
        if name not in _POLICIES:
            near = difflib.get_close_matches(name, NAMES, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"no policy {name!r}", hint=f"{meant}there are {', '.join(NAMES)}")
        if names.count(name) > 1:
            raise UsageError(f"policy {name} is named twice", hint="each needs a name of its own")


def build(name: str, arms: Arms, options: PolicyRecipe) -> Policy:
    """A fresh policy.

    Raises:
        UsageError: there is none of that name, or it cannot play these arms.
    """
    check([name])
    return _POLICIES[name](arms, options)
