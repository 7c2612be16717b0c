"""Drafter of family `mtp`: the target's own MTP layer, applied recursively (FastMTP, arXiv 2509.18362)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.decoding.plan import Plan
from specctl.decoding.rope import Rope
from specctl.decoding.target import Target
from specctl.drafters.family import HeadFamily
from specctl.drafters.feature.drafter import FeatureDrafter
from specctl.drafters.feature.head import head_config
from specctl.drafters.feature.layer import Projected
from specctl.drafters.mtp import layouts
from specctl.drafters.mtp.head import MtpConfig, MtpHead
from specctl.drafters.mtp.layouts import LAYOUTS, NativeLayer
from specctl.drafters.tree import TreeShape
from specctl.errors import CheckpointError
from specctl.recipe import DrafterRecipe, TrainRecipe

UNSEEN = -1  # replaces a token id to give it a zero embedding


class MtpDrafter(FeatureDrafter):
    """Runs an `MtpHead` for drafting. Its cached states are taken after its norm, as the vocabulary head reads them."""

    def __init__(self, head: MtpHead, target: Target, shape: TreeShape):
        super().__init__(head, head.layer, target, shape)
        self.ignores_first_token = head.config.ignores_first_token
        self.token_norm, self.hidden_norm = self.rms_norm(head.token_norm), self.rms_norm(head.hidden_norm)
        self.input_norm, self.output_norm = self.rms_norm(head.layer.input_layernorm), self.rms_norm(head.norm)
        self.fc = self.linear(head.fc)
        unnorm = head.inverse_norm_weight
        self.unnorm = None if unnorm is None else unnorm.to(self.device)
        self.head, self.scale = self.vocabulary_head(target)

    def feature(self, tapped: Tensor) -> Tensor:
        return tapped.float() if self.unnorm is None else tapped.float() * self.unnorm

    def layer_input(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.token_norm(F.embedding(tokens.clamp_min(0), self.embedding).float())
        if self.ignores_first_token:
            embedded = embedded.masked_fill((tokens == UNSEEN)[:, None], 0)
        x = self.fc(torch.cat((embedded, self.hidden_norm(features)), -1)).float()
        return x, self.input_norm(x)

    def seen(self, tokens: Tensor, plan: Plan) -> Tensor:
        return tokens.masked_fill(plan.positions == 0, UNSEEN) if self.ignores_first_token else tokens

    def _project(self, tokens: Tensor, features: Tensor, table: tuple[Tensor, Tensor]) -> Projected:
        if self.ignores_first_token:
            tokens = tokens.masked_fill(Rope.at_start(table), UNSEEN)
        return super()._project(tokens, features, table)

    def to_head(self, hidden: Tensor) -> Tensor:
        return (hidden * self.scale).to(self.dtype)


class MtpFamily(HeadFamily):
    """MTP layers. They are stored under our names; `layouts.to_target_names` converts these to the target's names."""

    head, config, drafter = MtpHead, MtpConfig, MtpDrafter

    def build(self, recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> MtpHead:
        """Load the MTP layer from the files of the target that `recipe` names.

        Raises CheckpointError if the target has no MTP layer.
        """
        layer = layouts.find(recipe.target.name, recipe.target.revision)
        layouts.check_computable(layer, target.config)
        shape = architecture(layer, recipe.drafter, target)
        if target.device.type == "meta":  # only a training estimate
            return MtpHead(shape)
        tensors = {name: tensor.float() for name, tensor in layouts.read(layer, recipe.target.revision).items()}
        if not shape.normed_features:
            assert target.norm_weight is not None  # every supported model type has one
            tensors["target_norm"] = target.norm_weight.float().cpu()
        head = MtpHead(shape)
        head.load_state_dict(tensors)
        return head


FAMILY = MtpFamily("mtp")


def architecture(layer: NativeLayer, recipe: DrafterRecipe, target: Target) -> MtpConfig:
    """Shape of a target's MTP layer. Raises CheckpointError if it does not match the sizes of the target."""
    own = vars(head_config(DrafterRecipe(), target))
    usual = getattr(target.config, layouts.NORMED, LAYOUTS[layer.layout].normed)
    normed = usual if recipe.normed_features is None else recipe.normed_features
    shape = MtpConfig(
        **own | {"taps": (target.num_layers,)},
        layout=layer.layout,  # type: ignore[arg-type]  # a key of LAYOUTS
        qkv_bias="layer.self_attn.q_proj.bias" in layer.shapes,
        qk_norm="layer.self_attn.q_norm.weight" in layer.shapes,
        normed_features=normed,
    )
    with torch.device("meta"):
        called = {name: tuple(tensor.shape) for name, tensor in MtpHead(shape).named_parameters()}
    for name in sorted(called.keys() | layer.shapes.keys()):
        if called.get(name) != layer.shapes.get(name):
            sizes = (
                f"{layer.shapes.get(name, 'missing')}, but config.json of the target requires "
                f"{called.get(name, 'none')}"
            )
            raise CheckpointError(f"target {layer.target}: its MTP layer: {name} is {sizes}", layouts.WHICH)
    return shape
