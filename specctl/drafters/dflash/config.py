"""Shape of a block-parallel head, and what each of its layers attends to."""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from specctl.decoding.target import Target
from specctl.drafters.blueprint import Count, Flag, Token
from specctl.drafters.feature.fusion import Window
from specctl.drafters.feature.head import HeadConfig, check_mask_token
from specctl.errors import UsageError
from specctl.families import FULL, SLIDING, LayerType
from specctl.recipe import DrafterRecipe

GROUP, CANDIDATES = 16, 16  # as in the published DFlash 2 heads
LAYERS = 2  # for targets with ten layers; the papers use five for 36
Rank = Annotated[int, Field(strict=True, ge=0, le=65_536)]
ATTENTION = ("sliding_window", "layer_types", "is_causal")


class Sight(NamedTuple):
    """Rows that the queries of a layer attend to.

    Attributes:
        window: number of positions, including a row's own, as vLLM counts them (None = the whole context).
        causal: rows of a block attend only to rows of the block up to themselves.
    """

    window: int | None
    causal: bool


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Shape of a block-parallel head.

    Attributes:
        block_size: slots of a block, including the anchor.
        sample_from_anchor: the anchor's slot predicts the token after it, and slot k the token k + 1 after it.
            Otherwise the anchor's slot predicts nothing, and slot k predicts its own token.
        mask_token_id: token in the slots after the anchor, for engines that need one.
        own_mask: the mask embedding is a parameter of the head; otherwise it is the mask token's embedding in the
            target.
        markov_rank: rank of the Markov head; 0 = no Markov head.
        confidence: add a confidence head, which reads the Markov head's W₁.
        conv_kernel_size: taps of the convolutions around every sublayer, including the slot itself; 0 = no
            convolutions.
        conv_group_size: channels that share a slot's addition to the convolution kernel.
        selector_rank: rank of the candidate selector, which replaces the Markov head; 0 = no selector.
        selector_top_k: tokens per slot among which the selector chooses.
        sliding_window: number of positions that a row attends to in layers with a window, including its own.
        layer_types: for each layer, whether it has the window (None = no layer has one).
        is_causal: whether the rows of a block attend only to rows up to themselves, in all layers (None = in layers
            with a window, as in engines).
    """

    num_layers: Count
    block_size: Annotated[int, Field(strict=True, ge=2, le=64)]
    sample_from_anchor: bool
    mask_token_id: Token
    own_mask: bool
    markov_rank: Rank
    confidence: Flag = False
    conv_kernel_size: Annotated[int, Field(strict=True, ge=0, le=64)] = 0
    conv_group_size: Count = GROUP
    selector_rank: Rank = 0
    selector_top_k: Count = CANDIDATES
    sliding_window: Window | None = None
    layer_types: tuple[LayerType, ...] | None = None
    is_causal: Flag | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = self.layer_types or ()
        if (self.sliding_window is not None) != (SLIDING in kinds):
            raise ValueError(f"sliding_window and a layer of type {SLIDING} in layer_types need each other")
        if kinds and len(kinds) != self.num_layers:
            raise ValueError(f"layer_types names {len(kinds)} layers, but num_layers is {self.num_layers}")
        if self.sliding_window is not None and self.sliding_window <= self.block_size:
            raise ValueError(f"sliding_window {self.sliding_window} must exceed block_size, {self.block_size}")
        if self.confidence and not self.markov_rank:
            raise ValueError("a confidence head needs a Markov head, but markov_rank is 0")
        if self.selector_rank and self.markov_rank:
            raise ValueError("a candidate selector replaces the Markov head, but markov_rank is not 0")
        if self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"convolutions have {self.conv_kernel_size} taps, but blocks have only {self.block_size} slots"
            )
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"{self.hidden_size} channels do not divide into groups of {self.conv_group_size} (conv_group_size)"
            )

    @property
    def depth(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size - self.first

    @property
    def first(self) -> int:
        """Index of the first slot that predicts a token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def sights(self) -> list[Sight]:
        """For each layer, the rows that its queries attend to."""
        sliding = [kind == SLIDING for kind in self.layer_types or (FULL,) * self.num_layers]
        causal = [slides if self.is_causal is None else self.is_causal for slides in sliding]
        return [Sight(self.sliding_window if slides else None, c) for slides, c in zip(sliding, causal, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary. A head without options of attention is stored as in earlier versions."""
        values = super().to_dict()
        if self.layer_types is not None:
            values["layer_types"] = list(self.layer_types)
        return {key: value for key, value in values.items() if key not in ATTENTION or value is not None}

    def check(self, target: Target) -> None:
        super().check(target)
        check_mask_token(self, self.mask_token_id)


def layer_attention(recipe: DrafterRecipe, block: int) -> dict[str, Any]:
    """Fields of a `BlockConfig` for the number of layers and their attention. Raises UsageError if they contradict."""
    window, kinds = recipe.sliding_window, recipe.layer_types
    layers = recipe.num_layers or (len(kinds) if kinds else LAYERS)
    given = f"drafter.layer_types=[{','.join(kinds or ())}]"
    if kinds and len(kinds) != layers:
        raise UsageError(
            f"{given} names {len(kinds)} layers, but drafter.num_layers={layers}", "name one type per layer"
        )
    if kinds and window is None and SLIDING in kinds:
        raise UsageError(f"{given} needs the size of the window", "add drafter.sliding_window=2048")
    if kinds and window is not None and SLIDING not in kinds:
        hint = f"leave it out, or name {SLIDING} in drafter.layer_types"
        raise UsageError(f"drafter.sliding_window={window}: no layer has the window ({given})", hint)
    if window is not None and window <= block:
        raise UsageError(
            f"drafter.sliding_window={window} must exceed the {block} slots of a block", "use a larger one"
        )
    types = None if window is None else tuple(kinds or [SLIDING] * layers)
    usual = {kind == SLIDING for kind in types or (FULL,)}
    causal = None if usual == {recipe.is_causal} else recipe.is_causal
    return {"num_layers": layers, "sliding_window": window, "layer_types": types, "is_causal": causal}
