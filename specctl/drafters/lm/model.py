"""Small independent language model with the target's vocabulary as a trainable module, with its presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from specctl.decoding.models.loading import load_model, load_tokenizer
from specctl.decoding.target import Target
from specctl.decoding.target_text import vocab_hash
from specctl.drafters.blueprint import CONFIG, config_error
from specctl.errors import CheckpointError, RecipeError
from specctl.kernels.distill import Squash, Teacher, linear_distill
from specctl.recipe import DrafterRecipe

# Layers, hidden size, heads, intermediate size. "68m" is the size of SpecInfer (Miao et al. 2024, arXiv 2305.09781).
PRESETS = {"tiny": (2, 128, 4, 384), "small": (2, 192, 6, 512), "68m": (2, 768, 12, 3072)}
HEAD_ROWS = 512  # rows of logits that are in memory at a time for the confidence head


class AcceptanceHead(nn.Module):
    """Logit of the probability that the target accepts the most probable next token, from the last hidden state.

    SpecDec++ (Huang et al. 2024, arXiv 2405.19715, §3) reads the state after the token. This head reads the state
    before it, so the decision to draft the token costs no pass, and does not depend on a sampled token.
    """

    def __init__(self, size: int):
        super().__init__()
        self.linear, self.out = nn.Linear(size, size), nn.Linear(size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[N] for `hidden` [N, H]."""
        logits: Tensor = self.out(hidden + F.silu(self.linear(hidden)))
        return logits[..., 0]


class LM(nn.Module):
    """Trainable wrapper around a causal LM of `transformers`, with an optional `confidence_head`."""

    supports_checkpointing = True

    def __init__(self, model: PreTrainedModel, confidence_head: AcceptanceHead | None = None):
        super().__init__()
        self.model, self.confidence_head = model, confidence_head
        self.objective = "ce"
        self.squash = Squash()  # squash of the target's logits

    def check(self, target: Target) -> None:
        """Raise CheckpointError if the vocabulary lacks tokens of `target`; the number of padding rows may differ."""
        embedding: Any = self.model.get_input_embeddings()
        own, used = len(embedding.weight), max(target.tokenizer.get_vocab().values()) + 1
        if own < used:
            raise config_error(
                CONFIG, "architecture.vocab_size", f"is {own}, but target {target.name} uses {used} tokens"
            )

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether only the inputs of every layer are kept for the backward pass."""
        return self.model.is_gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, batch: LMBatch, target_head: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss of the response tokens given all preceding tokens: (sum of the losses, number of tokens). A confidence
        head adds its cross-entropy.

        The caller normalizes over ranks and micro-batches. Padding is on the right, so causal attention never reads it.
        `target_head` [V, Ht] turns the batch's teacher states into the target's distributions, which every objective
        except "ce" needs.
        """
        wanted = batch.mask[:, 1:]
        read = {"input_ids": batch.tokens, "position_ids": batch.positions}
        hidden = self.model.base_model(**read, use_cache=False).last_hidden_state[:, :-1]
        hidden = hidden[wanted]
        head: Any = self.model.get_output_embeddings()
        width = len(head.weight)
        if batch.teacher is None or target_head is None:
            teacher = Teacher(batch.tokens[:, 1:][wanted])
        else:
            width = min(width, len(target_head))
            teacher = Teacher(batch.teacher, target_head[:width], self.squash.of(slice(width)))
        rows, bias = torch.arange(len(hidden), device=hidden.device), None if head.bias is None else head.bias[:width]
        shares = torch.ones_like(rows, dtype=torch.float32)
        total, _ = linear_distill(hidden, head.weight[:width], bias, teacher, rows, shares, self.objective)
        if self.confidence_head is not None:
            states = hidden.detach()  # the stopping head does not change the states that draft
            with torch.no_grad():
                parts = [F.linear(part, head.weight, head.bias).argmax(-1) for part in states.split(HEAD_ROWS)]
            best = torch.cat(parts)
            right = (best == batch.tokens[:, 1:][wanted]).float()
            confidence = self.confidence_head(states.float())
            total = total + F.binary_cross_entropy_with_logits(confidence, right, reduction="sum")
        return total, wanted.sum()


@dataclass(frozen=True)
class LMBatch:
    """Documents padded on the right.

    Attributes:
        tokens: [B, S].
        mask: [B, S] bool, true at the N tokens to predict.
        teacher: [N, Ht] target hidden states (after the final norm) that predict these tokens.
        positions: [B, S] positions of the tokens in their texts (None = from 0).
    """

    tokens: Tensor
    mask: Tensor
    teacher: Tensor | None = None
    positions: Tensor | None = None


def base_of(recipe: DrafterRecipe, target: Target) -> PreTrainedModel:
    """Load the small model named by `drafter.base`. Raises CheckpointError if its vocabulary is not the target's."""
    name = str(recipe.base)
    sizes = recipe.model_fields_set - {"base", "confidence"}
    if sizes:
        raise RecipeError(f"drafter.base determines the sizes: leave out {', '.join(sorted(sizes))}")
    if vocab_hash(load_tokenizer(name)) != target.identity["vocab_hash"]:
        raise CheckpointError(
            f"{name} and target {target.name} have different vocabularies",
            "use a small model of the target's family, such as Qwen3-0.6B for Qwen3-8B",
        )
    return load_model(name, device=target.device, dtype=torch.float32)


def architecture(recipe: DrafterRecipe, target: Target) -> LlamaConfig:
    """Configuration of a preset, with all sizes that the recipe overrides.

    Raises:
        RecipeError: an unknown preset, sizes that do not divide, or a field that this family does not have.
    """
    preset = recipe.preset or ("68m" if target.hidden_size >= 1024 else "small")
    if preset not in PRESETS:
        raise RecipeError(f"unknown preset {preset!r} of drafter family lm", hint=f"use one of {', '.join(PRESETS)}")
    if recipe.vocab_size not in (None, target.vocab_size):
        raise RecipeError("an lm drafter has the target's vocabulary", hint="leave out vocab_size")
    layers, hidden, heads, intermediate = PRESETS[preset]
    hidden, heads = recipe.hidden_size or hidden, recipe.num_heads or heads
    kv_heads = recipe.num_kv_heads or heads
    if hidden % (2 * heads) or heads % kv_heads:
        raise RecipeError(
            f"lm drafter: {heads} heads and {kv_heads} KV heads do not fit hidden size {hidden}",
            hint="hidden_size must be a multiple of 2·num_heads, and num_heads a multiple of num_kv_heads",
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


def cast(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Move and cast the model like `model.to(device, dtype)`, but keep its rotary frequencies in fp32.

    In bf16 they are radians off after some hundred tokens.
    """
    exact = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(device, dtype)  # type: ignore[arg-type]
    for name, buffer in exact.items():
        module, _, last = name.rpartition(".")
        model.get_submodule(module).register_buffer(last, buffer.to(device), persistent=False)
    return model
