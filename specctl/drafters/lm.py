"""Family `lm`: an independent small Llama decoder with the target's vocabulary, reading none of its features."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specctl import kernels
from specctl.decoding.cache import KVCache, plan_rows
from specctl.decoding.draft import DraftTree, Score, empty_draft
from specctl.decoding.lean import LeanModel
from specctl.decoding.sampling import DRAFT
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.errors import CheckpointError, RecipeError
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe

# Layers, hidden size, heads, intermediate size. "68m" is that of SpecInfer (Miao et al. 2024, arXiv 2305.09781).
PRESETS = {"tiny": (2, 128, 4, 384), "small": (2, 192, 6, 512), "68m": (2, 768, 12, 3072)}


class LM(nn.Module):
    """The drafter as a trainable module."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.model = LlamaForCausalLM(config)
        self.model.model.rotary_emb = _Rotary(config)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the response tokens of `tokens` [B, S], given everything before them.

        `mask` [B, S] is true at the tokens to be predicted. Padding stands at the right: causal attention never sees
        it. Returns (sum of the losses, number of them), for the caller to normalise over ranks and micro-batches.
        """
        tokens, wanted = batch["tokens"], batch["mask"][:, 1:].bool()
        hidden = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        logits = self.model.lm_head(hidden[wanted])
        return F.cross_entropy(logits.float(), tokens[:, 1:][wanted], reduction="sum"), wanted.sum()


class _Rotary(LlamaRotaryEmbedding):
    """Keeps its frequencies in fp32 when the model is cast: in bf16 they are radians off after some hundred tokens."""

    def _apply(self, fn, recurse=True):
        exact = self.inv_freq
        super()._apply(fn, recurse)
        self.register_buffer("inv_freq", exact.to(self.inv_freq.device), persistent=False)
        return self


def prepare(model: LM, recipe: TrainRecipe) -> None:
    """The training options of a recipe."""


def build(recipe: TrainRecipe, target: Target, frequent: Callable[[int], list[int]]) -> LM:
    """A new drafter for `target` with random weights."""
    return LM(architecture(recipe.drafter, target))


def architecture(recipe: DrafterRecipe, target: Target) -> LlamaConfig:
    """A preset, each of whose sizes the recipe may override.

    Raises:
        RecipeError: an unknown preset, sizes that do not divide, or a field that this family does not have.
    """
    preset = recipe.preset or ("68m" if target.hidden_size >= 1024 else "small")
    if preset not in PRESETS:
        raise RecipeError(f"unknown preset {preset!r} of drafter family lm", hint=f"one of {', '.join(PRESETS)}")
    if recipe.taps or recipe.vocab_size not in (None, target.vocab_size):
        raise RecipeError("an lm drafter has the target's vocabulary and no taps", hint="leave vocab_size and taps out")
    layers, hidden, heads, intermediate = PRESETS[preset]
    hidden, heads = recipe.hidden_size or hidden, recipe.num_heads or heads
    kv_heads = recipe.num_kv_heads or heads
    if hidden % (2 * heads) or heads % kv_heads:
        raise RecipeError(
            f"lm drafter: {heads} heads of {kv_heads} kv heads do not fit hidden size {hidden}",
            hint="hidden_size must be a multiple of 2·num_heads, num_heads one of num_kv_heads",
        )
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=recipe.intermediate_size or intermediate,
        num_hidden_layers=recipe.num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=target.context_length,
        bos_token_id=target.tokenizer.bos_token_id,
        eos_token_id=sorted(target.eos_ids),
        pad_token_id=target.tokenizer.pad_token_id,
    )


def config(model: LM, target: dict[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint; `target` is `Target.identity`."""
    return {"family": "lm", "architecture": model.model.config.to_diff_dict(), "target": target}


def published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state as it is stored: under `transformers`' own names."""
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def restore(config: dict[str, Any], tensors: dict[str, Tensor]) -> LM:
    """The module from the contents of a checkpoint, e.g. to go on training. CheckpointError when they do not fit."""
    try:
        model = LM(LlamaConfig(**config["architecture"]))
        model.model.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"lm drafter: weights and architecture do not fit: {error}") from error
    return model


def drafter(model: LM, target: Target, drafting: DraftingRecipe) -> LMDrafter:
    """Inference of `model`."""
    return LMDrafter(model, target, shape_for(drafting, target.device))


@dataclass(frozen=True)
class Shape:
    """A chain of at most `depth` tokens, ended by the first token whose joint probability is under `stop_below`.

    `sampled` draws the tokens (ratio rule) where the target samples; otherwise they are the most probable ones.
    """

    depth: int
    stop_below: float
    sampled: bool


def shape_for(drafting: DraftingRecipe, device: torch.device) -> Shape:
    """The default of the device with what the recipe sets.

    A draft step of a small target costs a CPU a good fifth of a verification: only likely tokens are worth one. On a
    GPU reading the probabilities back costs as much as the step.
    """
    shape = Shape(7, 0.25, False) if device.type == "cpu" else Shape(5, 0.0, False)
    given = {key: value for key in ("depth", "stop_below") if (value := getattr(drafting, key)) is not None}
    return replace(shape, **given, sampled=drafting.proposal == "sampled")


@dataclass
class _Memory:
    """Slots 0 .. length−1 hold the committed tokens, those behind them the `drafted` ones; `logits` [B, V] follow the
    last committed token."""

    cache: KVCache
    length: list[int]
    drafted: list[list[int]]
    logits: Tensor

    def select(self, index: Tensor) -> None:
        kept = index.tolist()
        self.cache.select(index)
        self.length = [self.length[b] for b in kept]
        self.drafted = [self.drafted[b] for b in kept]
        self.logits = self.logits[index]

    def unseen(self, b: int, ids: list[int]) -> int:
        """How many tokens at the end of `ids` are not cached; accepted draft tokens are, the last token never is."""
        new = ids[self.length[b] :]
        known = 0
        for token, drafted in zip(new[:-1], self.drafted[b], strict=False):
            if token != drafted:
                break
            known += 1
        return len(new) - known


class LMDrafter:
    """Inference of an `LM` on the lean step, with a copy of its weights in the target's dtype."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: LM, target: Target, shape: Shape):
        self.shape = shape
        self.model = LeanModel(copy.deepcopy(model.model).requires_grad_(False).to(target.device, target.dtype))

    def invalidate(self, state: DecodeState) -> None:
        """Forget keys and values; the next `advance` recomputes them from the text."""
        state.memory.pop(self, None)

    def advance(self, state: DecodeState) -> None:
        """Read the committed tokens that are not cached yet, the last one included, in one forward."""
        memory = state.memory.get(self)
        if memory is None:
            memory = state.memory[self] = _Memory(
                self.model.new_cache(state.batch, state.capacity),
                [0] * state.batch,
                [[] for _ in state.rows],
                torch.empty(0),
            )
        texts = [row.ids for row in state.rows]
        width = max(memory.unseen(b, ids) for b, ids in enumerate(texts))
        if width == 0:
            return
        hidden, _ = self._read(state, width)
        last = torch.tensor([min(len(ids), width) - 1 for ids in texts], device=state.device)
        memory.logits = self.model.logits(hidden[torch.arange(state.batch, device=state.device), last])
        memory.length = [len(ids) for ids in texts]
        memory.drafted = [[] for _ in texts]

    def score(self, state: DecodeState, spans: list[range], depths: int = 1) -> list[Score]:
        """Its row before each position; whatever the depth, the text before it is the same.

        One forward over the last tokens of every sequence writes the keys and values again that are there already.
        """
        self.advance(state)
        width = max((len(row.ids) - span.start for row, span in zip(state.rows, spans, strict=True) if span), default=0)
        if width == 0:
            return [Score(span) for span in spans]
        hidden, base = self._read(state, width + 1)
        scores = []
        for b, (start, span) in enumerate(zip(base, spans, strict=True)):
            at = slice(span.start - 1 - start, span.stop - 1 - start) if span else slice(0, 0)
            scores.append(Score(span, self.model.logits(hidden[b, at]).unsqueeze(0)))
        return scores

    def _read(self, state: DecodeState, width: int) -> tuple[Tensor, list[int]]:
        """Hidden states [B, width, H] of every sequence's last `width` tokens, and the position of the first of each.

        Re-reading a few costs nothing, and no row needs a padding slot, which for a finished sequence could lie behind
        the end of the cache. Short prompts are padded.
        """
        memory: _Memory = state.memory[self]
        texts = [row.ids for row in state.rows]
        base = [max(len(ids) - width, 0) for ids in texts]
        tokens = torch.tensor([ids[-width:] + [0] * (width - len(ids)) for ids in texts], device=state.device)
        plan = plan_rows(base, width, device=state.device, dtype=state.dtype)
        return self.model.forward(tokens, memory.cache, plan, ())[0], base

    def propose(self, state: DecodeState, budget: int) -> DraftTree:
        """A chain from the last committed token, never longer than the sequence has room for."""
        self.advance(state)
        memory: _Memory = state.memory[self]
        assert memory.length == [len(row.ids) for row in state.rows], "stale draft cache"
        depths = [min(self.shape.depth, budget, row.room) for row in state.rows]
        if max(depths) <= 0:
            return empty_draft(state.batch, state.device)
        sampled = self.shape.sampled and not state.draws.greedy
        chains: list[list[int]] = [[] for _ in state.rows]
        joint = [1.0] * state.batch
        rows: list[kernels.Rows] = []
        logits = memory.logits
        for step in range(max(depths)):
            if sampled:
                drawn, gains = self._sample(state, logits, step, rows)
            else:
                drawn, gains = self._best(logits)
            picked = drawn.tolist()
            growing = False
            for b, token in enumerate(picked):
                if step < depths[b] and joint[b] >= self.shape.stop_below:
                    chains[b].append(token)
                    # The token itself stays in the draft: leaving it out because of what it is would bias the law.
                    joint[b] *= gains[b]
                    growing |= step + 1 < depths[b] and joint[b] >= self.shape.stop_below
            if not growing:
                break
            plan = plan_rows([n + step for n in memory.length], 1, device=state.device, dtype=state.dtype)
            hidden, _ = self.model.forward(drawn.unsqueeze(1), memory.cache, plan, ())
            for fed, token in zip(memory.drafted, picked, strict=True):
                fed.append(token)
            logits = self.model.logits(hidden[:, 0])
        return DraftTree.from_chains(chains, state.device, _stacked(rows) if sampled else None)

    def _best(self, logits: Tensor) -> tuple[Tensor, list[float]]:
        """The most probable tokens [B], and their probabilities (1 when nobody asks)."""
        if self.shape.stop_below <= 0:
            return logits.float().argmax(-1), [1.0] * len(logits)
        logprob, token = kernels.expand_topk(logits, 1)
        return token[:, 0], logprob[:, 0].exp().tolist()

    def _sample(
        self, state: DecodeState, logits: Tensor, step: int, rows: list[kernels.Rows]
    ) -> tuple[Tensor, list[float]]:
        """Tokens [B] drawn from the rows of `logits`, which are kept in `rows`, and their probabilities.

        One random stream per depth: a position drafted again in a later round is then at another depth, so that no
        uniform is used twice, whatever a controller concluded from the first draft.
        """
        row = state.draws.rows(logits.unsqueeze(1))
        rows.append(row)
        positions = torch.tensor([[len(sequence.ids) + step] for sequence in state.rows])
        drawn = kernels.sample_rows(row, state.draws.uniform(positions, DRAFT + step).reshape(-1))
        if self.shape.stop_below <= 0:
            return drawn, [1.0] * len(logits)
        score = row.logits.gather(1, drawn.unsqueeze(1))[:, 0] * row.inv_temp
        return drawn, (score - row.lse).exp().tolist()


def _stacked(rows: list[kernels.Rows]) -> kernels.Rows:
    """The rows of all depths, sequence-major: row b·n + i is that of token i of sequence b."""
    return kernels.Rows(*(torch.stack(field, 1).flatten(0, 1) for field in zip(*rows, strict=True)))
