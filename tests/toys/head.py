"""A family that is trained: Medusa's heads under another name."""

from specctl.drafters import medusa
from specctl.drafters.medusa import build, drafter, prepare, published, restore

__all__ = ["build", "config", "drafter", "prepare", "published", "restore"]


def config(module, target):
    return medusa.config(module, target) | {"family": "head"}
