"""A family that is trained: Medusa's heads under another name."""

from specctl.drafters.medusa.drafter import MedusaFamily

FAMILY = MedusaFamily("head")
