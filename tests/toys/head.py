"""A trainable family: Medusa's heads under another name."""

from specctl.drafters.medusa.drafter import MedusaFamily

FAMILY = MedusaFamily("head")
