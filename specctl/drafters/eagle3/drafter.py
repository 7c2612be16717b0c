"""Drafter of family `eagle3`: an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), drafting chains or dynamic trees."""

from torch import Tensor

from specctl.decoding.target import Target
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.family import HeadFamily
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.fusion import FusedInput, fusion_shape
from specctl.drafters.tree import TreeShape
from specctl.recipe import DrafterRecipe


class Eagle3Drafter(FeatureDrafter, FusedInput):
    """Runs an `Eagle3Head` for drafting. With `norm_output` its cached states are taken after the final norm."""

    def __init__(self, head: Eagle3Head, target: Target, shape: TreeShape):
        super().__init__(head, head.midlayer, target, shape)
        self.fuse(head, self.embedding, target)
        self.output_norm = self.norm if head.config.norm_output else None

    def to_head(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.dtype) if self.output_norm is not None else self.norm(hidden)


class Eagle3Family(HeadFamily):
    """EAGLE-3 heads."""

    head, config, drafter = Eagle3Head, Eagle3Config, Eagle3Drafter

    def architecture(self, recipe: DrafterRecipe, target: Target) -> Eagle3Config:
        return Eagle3Config(
            **fusion_shape(recipe, target),
            num_layers=recipe.num_layers or 1,
            norm_output=True if recipe.norm_output is None else recipe.norm_output,
        )


FAMILY = Eagle3Family("eagle3")
