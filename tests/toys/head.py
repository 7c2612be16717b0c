"""A family that is trained: Medusa's heads under another name."""

from specctl.drafters.medusa import drafter as medusa
from specctl.drafters.medusa.drafter import build, drafter, prepare, published, restore

__all__ = ["build", "config", "drafter", "prepare", "published", "restore"]


def config(module, target):
    return medusa.config(module, target) | {"family": "head"}
