"""Baseline that every user has: `generate` of `transformers`, with the same weights and threads, in its fastest dtype.
Weights of a GGUF file are rounded to the target's dtype, also where our step reads them quantized.

It runs in three modes: plain, with prompt lookup, and with a small model as assistant; plain decoding also runs in
batches. The answers are returned as `Decoded`, so they get the same metrics.

Timing. `generate` hands tokens to a streamer after each target pass. In plain mode the first hand-over ends the
prefill, and the rest is the decode phase. In assisted modes the first pass already verifies a draft and cannot be
split. There the prefill time of plain mode on the same prompt is subtracted from the total. This gives the assisted
mode the tokens of its first pass for free: in doubt the baseline is favored.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from specctl import kernels, threads
from specctl.decoding.models import target_adapter
from specctl.decoding.models.loading import Source, load_model, settle_memory, with_fast_products
from specctl.decoding.records import Decoded
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target
from specctl.drafters import checkpoint, pool
from specctl.drafters.lm.model import cast
from specctl.families import LM
from specctl.recipe import TargetRecipe

PLAIN = "transformers"
LOOKUP_TOKENS = 10  # draft length of prompt lookup, as in transformers' documentation


class PassClock(BaseStreamer):
    """Streamer that records when each target pass of one `generate` call ends, in seconds since its creation."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.at: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.at.append(time.perf_counter() - self.started)
        self._prompt = False  # `generate` streams the prompt first

    def end(self) -> None:
        """Do nothing: no tokens are buffered."""


class TransformersBaseline:
    """`model.generate` in all modes, with the threads and the end-of-sequence ids of `target`.

    `assistants`: the drafters that are language models, by name.
    """

    def __init__(self, model: Any, target: Target, sampling: Sampling, assistants: Mapping[str, PreTrainedModel]):
        self.model, self.eos_ids, self.row_flops = model, target.eos_ids, target.row_flops
        # Replaces the model's own configuration, which `generate` would merge into every call (penalties, sampling).
        model.generation_config = configuration = _configuration(target.eos_ids, sampling)
        self.pad_id = configuration.pad_token_id
        self.assisted: dict[str, dict[str, Any]] = {}
        if not getattr(model, "_is_stateful", False):  # `generate` refuses drafts for the class of Granite 4
            self.assisted = {
                f"{PLAIN}+lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
                **{f"{PLAIN}+{name}": {"assistant_model": assistant} for name, assistant in assistants.items()},
            }

    def decode(self, prompt_ids: list[int], max_new_tokens: int, seed: int) -> dict[str, Decoded]:
        """Answer one prompt in every mode, plain first. The seed matters at temperature > 0."""
        plain = self._generate_one(prompt_ids, max_new_tokens, seed)
        answers = {PLAIN: plain}
        for name, options in self.assisted.items():
            answers[name] = self._generate_one(prompt_ids, max_new_tokens, seed, plain.prefill_s, **options)
        return answers

    def decode_batch(self, prompts: list[list[int]], max_new_tokens: list[int], seed: int) -> list[Decoded]:
        """Answer several prompts in one call, prompt i with at most `max_new_tokens[i]` tokens.

        `generate` pads prompts on the left, and runs until the last sequence has ended. All answers bear the times of
        the whole call.
        """
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out, clock, total = self._generate(ids, mask, max(max_new_tokens), seed)
        texts = [self._cut_at_eos(row.tolist(), room) for row, room in zip(out, max_new_tokens, strict=True)]
        prefill = clock.at[0]
        return [
            self._decoded(prompt, text, prefill, total, len(text) - 1)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def _generate_one(
        self, prompt_ids: list[int], max_new_tokens: int, seed: int, prefill_s: float | None = None, **options: Any
    ) -> Decoded:
        ids = torch.tensor([prompt_ids])
        out, clock, total = self._generate(ids, torch.ones_like(ids), max_new_tokens, seed, **options)
        prefill = clock.at[0] if prefill_s is None else min(prefill_s, total)
        return self._decoded(prompt_ids, out[0].tolist(), prefill, total, len(clock.at) - 1)

    def _generate(
        self, ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, seed: int, **options: Any
    ) -> tuple[torch.Tensor, PassClock, float]:
        """Run `generate` on prompts [B, P]: new ids [B, T], the clock of its passes, and seconds in all."""
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        torch.manual_seed(seed)
        with threads.step_threads(self.row_flops * len(ids)):  # as many threads as in our own decoding of this batch
            clock = PassClock()
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=clock, **options
            )
            new = out[:, ids.shape[1] :].cpu()
            return new, clock, time.perf_counter() - clock.started

    def _cut_at_eos(self, ids: list[int], room: int) -> list[int]:
        """Cut off the tokens that a sequence of a batch got after its end, while others went on."""
        ended = (place for place, token in enumerate(ids) if token in self.eos_ids)
        return ids[: min(room, next(ended, len(ids)) + 1)]

    def _decoded(
        self, prompt_ids: list[int], output_ids: list[int], prefill_s: float, total_s: float, passes: int
    ) -> Decoded:
        # transformers drafts by itself here: the numbers of accepted and rejected tokens are not known.
        return Decoded(
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            stop="eos" if output_ids[-1] in self.eos_ids else "length",
            target_passes=passes,
            accepted=0,
            rejections=0,
            drafted=0,
            accepted_by_depth=[],
            offered_by_depth=[],
            prefill_s=prefill_s,
            decode_s=total_s - prefill_s,
        )


def in_fastest_dtype(model: Any) -> Any:
    """A model of `transformers` in its dtype, or in fp32 on a CPU without bf16 instructions, where that is faster."""
    dtype = with_fast_products(torch.empty(0, dtype=model.dtype, device=model.device)).dtype
    if dtype != model.dtype:
        model = model.to(dtype)
        settle_memory()  # 0.56 GB with Qwen2.5-Coder-0.5B
    return model


def load_generator(
    recipe: TargetRecipe, target: Target, sampling: Sampling, assistants: Mapping[str, PreTrainedModel]
) -> TransformersBaseline:
    """Load the target a second time, through `transformers`. Raises CheckpointError if that fails."""
    model = load_model(
        recipe.name,
        device=target.device,
        dtype=target.dtype,
        revision=recipe.revision,
        trust_remote_code=recipe.trust_remote_code,
        source=Source(recipe.device_map, recipe.max_memory),
    )
    if recipe.adapter is not None:
        model = target_adapter.merge(model, recipe.adapter, recipe.name)
    return TransformersBaseline(in_fastest_dtype(model), target, sampling, assistants)


def load_assistant(directory: str, target: Target) -> PreTrainedModel | None:
    """Load a drafter directory as an assistant model for `generate`; returns None if it is not a language model.

    Raises CheckpointError if the drafter is damaged.
    """
    if not checkpoint.is_drafter(Path(directory)):
        return None
    assistant = checkpoint.load(directory)
    if assistant.config["family"] != LM:
        return None
    module = pool.load_module(pool.merge_adapter(assistant), target)
    return in_fastest_dtype(cast(module.model, target.device, target.dtype).eval())


def _configuration(eos_ids: frozenset[int], sampling: Sampling) -> GenerationConfig:
    ends = sorted(eos_ids)
    options: dict[str, Any] = {"eos_token_id": ends or None, "pad_token_id": ends[0] if ends else 0}
    sampled = sampling.temperature >= kernels.GREEDY_BELOW  # below it, transformers would divide logits to infinity
    if sampled:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return GenerationConfig(do_sample=sampled, **options)
