"""A family that is trained: Medusa's heads under another name."""

from specctl.drafters import medusa
from specctl.drafters.medusa import build, drafter, prepare, published, restore
from specctl.formats.head import Files

__all__ = ["build", "config", "drafter", "prepare", "published", "restore", "write"]


def config(module, target):
    return medusa.config(module, target) | {"family": "head"}


def write(head, facts, tokens):
    return Files({"made_for": facts.name, "depth": tokens}, head.tensors)
