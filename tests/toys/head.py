"""A family that is trained: Medusa's heads under another name."""

from specctl.drafters.medusa import drafter as medusa
from specctl.drafters.medusa.drafter import build, make_drafter, restore, set_training_options, stored_state

__all__ = ["build", "checkpoint_config", "make_drafter", "restore", "set_training_options", "stored_state"]


def checkpoint_config(module, target):
    return medusa.checkpoint_config(module, target) | {"family": "head"}
