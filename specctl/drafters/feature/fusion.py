"""Heads that fuse several tapped states to one feature, read together with a token: shared by EAGLE-3 and P-EAGLE."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from specctl.decoding.models.layers import RMSNorms
from specctl.decoding.target import Target
from specctl.drafters.blueprint import Count, Flag
from specctl.drafters.feature.head import (
    DraftHead,
    HeadConfig,
    HeadLayer,
    NormedLayer,
    copy_vocabulary_head,
    head_config,
    pass_through,
    taps_of,
)
from specctl.drafters.feature.layer import FeatureLayer, UpperLayer
from specctl.families import MIN_SLIDING_WINDOW
from specctl.recipe import DrafterRecipe

TABLE_ROWS = 4096  # most rows of a table by token that are normed at a time: a whole one takes gigabytes in fp32
Window = Annotated[int, Field(strict=True, ge=MIN_SLIDING_WINDOW, le=1 << 31)]


@dataclass(frozen=True)
class FusionConfig(HeadConfig):
    """Shape of a fusion head, its EAGLE-3.1 norms, and its attention window.

    Attributes:
        num_layers: number of layers; the first reads [token; feature], each other reads the output of the previous one.
        fc_norm: every tapped state has a separate norm before the states are fused.
        norm_before_fc: the concatenated tapped states have one norm before they are fused; excludes `fc_norm`.
        norm_before_residual: the residual stream of the layers begins with the normed feature instead of the feature.
        sliding_window: number of positions that a row attends to, including its own, as vLLM counts them (None = all
            up to its own).
    """

    num_layers: Count = 1
    fc_norm: Flag = False
    norm_before_fc: Flag = False
    norm_before_residual: Flag = False
    sliding_window: Window | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other: both are the norm before fc")

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary without unset options; a head without options is stored as in earlier versions."""
        unset = {
            key.name for key in fields(self) if key.default is not MISSING and getattr(self, key.name) == key.default
        }
        return {key: value for key, value in super().to_dict().items() if key not in unset}


class FusionLayer(HeadLayer):
    """Decoder layer over [token; feature], each with a separate norm."""

    def __init__(self, config: HeadConfig):
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class FusionHead(DraftHead):
    """Fusion head. Parameters have the names of the published checkpoints.

    These are `fc`, `midlayer.*`, `layers.1.*` etc. for the layers after the first, `norm`, `lm_head`, `d2t`, `t2d`, and
    `fc_norm.*` or `input_norm` for the norms before `fc`.
    """

    config: FusionConfig
    supports_checkpointing = True
    fc_norm: nn.ModuleList | None
    input_norm: nn.RMSNorm | None

    def __init__(self, config: FusionConfig, draft_ids: Tensor | None = None):
        super().__init__(config, draft_ids)
        size, width, eps = config.hidden_size, len(config.taps) * config.hidden_size, config.rms_norm_eps
        self.fc_norm = nn.ModuleList(nn.RMSNorm(size, eps) for _ in config.taps) if config.fc_norm else None
        self.input_norm = nn.RMSNorm(width, eps) if config.norm_before_fc else None
        self.fc = nn.Linear(width, size, bias=False)
        self.midlayer = FusionLayer(config)
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.layers = nn.ModuleDict({str(place): NormedLayer(config) for place in range(1, config.num_layers)})

    @property
    def upper(self) -> list[NormedLayer]:
        """Layers after the first."""
        return [layer for layer in self.layers.values() if isinstance(layer, NormedLayer)]

    @property
    def all_layers(self) -> list[HeadLayer]:
        return [self.midlayer, *self.upper]

    @property
    def sight(self) -> int | None:
        window = self.config.sliding_window
        return None if window is None else len(self.all_layers) * (window - 1) + 1

    @property
    def prompt_layers(self) -> Sequence[nn.Module]:
        return self.all_layers[:-1]

    @property
    def tapped_norms(self) -> list[nn.RMSNorm]:
        """Norms before `fc`, each for an equal part of the concatenated tapped states; may be empty."""
        return [self.input_norm] if self.input_norm is not None else cast(list[nn.RMSNorm], list(self.fc_norm or []))

    def feature(self, tapped: Tensor) -> Tensor:
        """Fuse tapped target states [M, taps·H] to features [M, H] in fp32."""
        norms = self.tapped_norms
        if norms:
            parts = tapped.float().chunk(len(norms), -1)
            tapped = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], -1)
        elif not torch.is_autocast_enabled(tapped.device.type):
            tapped = tapped.float()
        return self.fc(tapped).float()

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """Initialize from the target.

        The head copies its vocabulary head and final norm; `fc` starts by passing the last tapped state through.
        """
        copy_vocabulary_head(self.lm_head, self.draft_ids, target)
        if target.norm_weight is not None:
            self.norm.weight.copy_(target.norm_weight.float())
        pass_through(self.fc, slice(-self.config.hidden_size, None))


class FusedInput(FeatureLayer):
    """Run-time input of a `FusionHead`: it fuses tapped states and combines them with tokens.

    Attributes:
        token_input: [V, H] the half of the layer's input that depends on the token alone.
    """

    def fuse(self, head: FusionHead, embedding: Tensor, target: Target) -> None:
        """Copy the weights around and after the first layer from `head`; `embedding` is the token embedding [V, H]."""
        self.upper = [UpperLayer(head, layer, target) for layer in head.upper]
        self.layers = head.config.num_layers
        self.norm_before_residual, self.window = head.config.norm_before_residual, head.config.sliding_window
        weights = [norm.weight.detach().to(self.device) for norm in head.tapped_norms]
        eps = head.config.rms_norm_eps
        self.tapped_norms = RMSNorms(torch.stack(weights), eps, self.dtype) if weights else None
        self.fc = self.linear(head.fc)
        self.hidden_norm, self.norm = self.rms_norm(head.midlayer.hidden_norm), self.rms_norm(head.norm)
        self.head: Any = self.linear(head.lm_head)
        norm = self.rms_norm(head.midlayer.input_layernorm)
        self.token_input = torch.cat([norm(rows.float()) for rows in embedding.split(TABLE_ROWS)])

    def feature(self, tapped: Tensor) -> Tensor:
        norms = self.tapped_norms
        if norms is not None:
            tapped = norms(tapped.float().unflatten(-1, norms.shape)).flatten(-2)
        return self.fc(tapped).float()

    def layer_input(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(features)
        residual = normed.float() if self.norm_before_residual else features
        return residual, torch.cat((F.embedding(tokens, self.token_input), normed), -1)


def fusion_shape(recipe: DrafterRecipe, target: Target) -> dict[str, Any]:
    """Fields of a `FusionConfig` as the recipe sets them; options left out follow the target's own layers."""
    vocabulary = recipe.vocab_size or min(32_000, target.vocab_size // 2)
    layer = vars(head_config(recipe, target))
    chosen = {
        "taps": taps_of(recipe, target, default_taps(target.num_layers)),
        "draft_vocab_size": min(vocabulary, target.vocab_size),
        # Measured on the built-in target (EAGLE-3, sql, 300 steps): fc_norm and norm_output together raise mat from 3.2
        # to 4.0, norm_before_fc raises it to 3.7.
        "fc_norm": not recipe.norm_before_fc if recipe.fc_norm is None else recipe.fc_norm,
    }
    options = ("norm_before_fc", "norm_before_residual", "sliding_window")
    return layer | chosen | {key: getattr(recipe, key) for key in options}


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's choice, hidden_states[2], [n//2], [n−3]. A shallower target gets states between its first and its last
    layer, because engines provide no others. A target of up to three layers has fewer than three such states."""
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    return (1, layers // 2, layers - 1) if layers >= 4 else tuple(range(1, layers + 1))
