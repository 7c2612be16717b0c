"""Work of a text in a training step, in FLOPs per token; attention is left out."""

from dataclasses import dataclass

from torch import nn

from specctl.decoding.target import Target
from specctl.drafters.feature.head import DraftHead
from specctl.families import FAMILIES
from specctl.recipe import TrainRecipe
from specctl.training.example import Example
from specctl.training.optimizers import is_embedding_like
from specctl.training.schedule import ttt_stride

# Cost of a prompt position relative to a pass of a head, without `prompt_layers`: after the fusion of the taps, it is
# only a key and a value.
PROMPT_COST = 0.2


@dataclass(frozen=True)
class Work:
    """FLOPs per token of a text (`token`), additional FLOPs per token of its response (`response`), and FLOPs per token
    of the text before a piece (`before`)."""

    token: float
    response: float
    before: float = 0.0

    def __call__(self, example: Example) -> float:
        here = self.token * len(example.tokens) + self.response * example.response_length
        return here + self.before * example.start


def step_work(drafter: nn.Module, recipe: TrainRecipe, target: Target, target_flops: float) -> Work:
    """Work of a text in a step: the drafter's forward and backward. If features are recomputed in every step,
    `target_flops` per token adds the target's forward (0 if features are kept)."""
    flops = 6.0 * matrix_parameters(drafter)
    if not reads_features(drafter):
        return Work(flops + target_flops, 0.0, target_flops)
    prompt = PROMPT_COST * flops + 6.0 * (1 - PROMPT_COST) * prompt_parameters(drafter)
    return Work(prompt + target_flops, flops * passes(drafter, recipe, target) - prompt, target_flops)


def passes(drafter: nn.Module, recipe: TrainRecipe, target: Target) -> float:
    """Rows that the drafter's layers compute per response position: steps of the training-time test, or blocks."""
    steps = recipe.ttt_steps if FAMILIES[recipe.arch].unrolls_steps else 1
    return drafter.passes(steps, ttt_stride(recipe, target)) if isinstance(drafter, DraftHead) else steps


def reads_features(drafter: nn.Module) -> bool:
    """Whether the drafter reads hidden states of the target."""
    return isinstance(drafter, DraftHead)


def prompt_parameters(drafter: nn.Module) -> float:
    """Number of parameters in the layers that run over the prompts too, of a drafter that reads features."""
    return sum(matrix_parameters(layer) for layer in drafter.prompt_layers) if isinstance(drafter, DraftHead) else 0


def matrix_parameters(drafter: nn.Module) -> float:
    """Number of parameters that every position is multiplied with. Lookup tables are excluded, and of a vocabulary
    matrix only the rows of a sampled softmax count."""
    share = 1.0
    if isinstance(drafter, DraftHead) and drafter.sampled_softmax:
        share = min(1.0, drafter.sampled_softmax / drafter.config.draft_vocab_size)
    tables = ("embed_tokens", "markov_w1", "predecessor_codebook", "base_kernel")
    return sum(
        p.numel() * (share if is_embedding_like(name) else 1.0)
        for name, p in drafter.named_parameters()
        if p.ndim >= 2 and not any(t in name for t in tables)
    )
