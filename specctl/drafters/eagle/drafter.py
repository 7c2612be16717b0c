"""Drafter of family `eagle`: an EAGLE-1 head (Li et al. 2024, arXiv 2401.15077), bias-free, in EAGLE-2's trees."""

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.models.linear import DraftLinear
from specctl.decoding.models.loading import with_fast_products
from specctl.decoding.target import Target
from specctl.drafters.eagle.head import EagleHead
from specctl.drafters.family import HeadFamily
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.head import HeadConfig, head_config
from specctl.drafters.tree import TreeShape
from specctl.errors import RecipeError
from specctl.recipe import DrafterRecipe


class EagleDrafter(FeatureDrafter):
    """Runs an `EagleHead` for drafting, with the target's vocabulary head."""

    def __init__(self, head: EagleHead, target: Target, shape: TreeShape):
        super().__init__(head, head.layer, target, shape)
        token, feature = self.weight(head.fc).chunk(2, -1)
        # Half of the fusion depends on the token alone, so it is tabulated.
        embedding = with_fast_products(self.embedding.to(self.dtype))
        self.token_part = (embedding @ with_fast_products(token).T).float()
        self.fc = DraftLinear(feature)
        self.head, self.scale = self.vocabulary_head(target)

    def feature(self, tapped: Tensor) -> Tensor:
        return tapped.float()

    def layer_input(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(tokens, self.token_part) + self.fc(features.to(self.dtype))
        return x, x.to(self.dtype)

    def to_head(self, hidden: Tensor) -> Tensor:
        return (hidden * self.scale).to(self.dtype)


class EagleFamily(HeadFamily):
    """EAGLE-1 heads."""

    head, drafter = EagleHead, EagleDrafter

    def architecture(self, recipe: DrafterRecipe, target: Target) -> HeadConfig:
        """Shape of a new head as the recipe sets it.

        Raises RecipeError if the recipe asks for a draft vocabulary, which the family does not support.
        """
        if recipe.vocab_size not in (None, target.vocab_size):
            raise RecipeError("an eagle drafter uses the target's vocabulary", "use eagle3, or leave out vocab_size")
        return replace(head_config(recipe, target), taps=(target.num_layers,))


FAMILY = EagleFamily("eagle")
