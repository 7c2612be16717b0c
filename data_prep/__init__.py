"""Domains that `specctl` knows, with offline prompt generators and public data sets.

`get("sql").generate(1000, seed=0)` writes prompts offline; `load_public(get("sql"))` reads the public data set.
"""

from ..errors import did_you_mean
from . import biochem, chat, code, math, medical, sql, summarization
from .domain import SPLITS, Domain, PromptsExhausted, PublicSet, UnknownDomain
from .public import load_public

DOMAINS: dict[str, Domain] = {
    module.DOMAIN.name: module.DOMAIN for module in (sql, code, math, medical, biochem, summarization, chat)
}


def get(name: str) -> Domain:
    """Return the domain with this name. Raises UnknownDomain (a ValueError) with the nearest names."""
    if name in DOMAINS:
        return DOMAINS[name]
    meant = did_you_mean(name.lower(), [*DOMAINS], most=2)
    raise UnknownDomain(
        f"unknown domain {name!r}" + (f"; {meant}" if meant else ""),
        hint=f"known domains: {', '.join(DOMAINS)}; --prompts FILE has the prompts of any other",
    )


__all__ = ["DOMAINS", "SPLITS", "Domain", "PromptsExhausted", "PublicSet", "UnknownDomain", "get", "load_public"]
