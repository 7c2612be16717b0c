"""The baseline everyone has: `transformers`' `generate` on the same weights, dtype and threads.

Three ways: plain, with prompt lookup, and with a small model as assistant; plain also in batches. Their answers come
back as `Decoded`, so the same metrics apply to them.

How time is split. `generate` hands a streamer the tokens of each target pass as soon as they are known. In plain mode
the first hand-over ends the prefill, and what follows is the decode phase. In assisted modes the first pass already
verifies a draft and cannot be split: the plain mode's prefill of the same prompt is subtracted from the total instead,
which gives the assisted mode the tokens of its first pass for nothing. In doubt the baseline is favoured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer

from specctl import kernels, threads
from specctl.decoding.models.loading import load_model
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
    """Seconds from its making until each target pass of one `generate` call was done."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.at: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.at.append(time.perf_counter() - self.started)
        self._prompt = False  # the first thing that `generate` streams is the prompt

    def end(self) -> None:
        """Nothing is buffered."""


class Generator:
    """`model.generate` in all modes, with the threads and ends of `target`.

    `assistants`: the drafters that are language models, by drafter name.
    """

    def __init__(
        self,
        model: Any,
        target: Target,
        sampling: Sampling,
        assistants: Mapping[str, PreTrainedModel],
    ):
        self.model, self.eos_ids, self.row_flops = model, target.eos_ids, target.row_flops
        # Replaces the model's own configuration: what it holds (penalties, sampling) would be merged into every call.
        model.generation_config = configuration = _configuration(target.eos_ids, sampling)
        self.pad_id = configuration.pad_token_id
        self.assisted: dict[str, dict[str, Any]] = {
            f"{PLAIN}+lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
            **{f"{PLAIN}+{name}": {"assistant_model": assistant} for name, assistant in assistants.items()},
        }

    @property
    def names(self) -> list[str]:
        return [PLAIN, *self.assisted]

    def decode(self, prompt_ids: list[int], max_new_tokens: int, seed: int) -> dict[str, Decoded]:
        """Answer one prompt in every mode, plain first; `seed` matters at temperature > 0."""
        plain = self._alone(prompt_ids, max_new_tokens, seed)
        answers = {PLAIN: plain}
        for name, options in self.assisted.items():
            answers[name] = self._alone(prompt_ids, max_new_tokens, seed, plain.prefill_s, **options)
        return answers

    def decode_batch(self, prompts: list[list[int]], rooms: list[int], seed: int) -> list[Decoded]:
        """Answer several prompts at once, each with at most `rooms` tokens. All bear the times of the whole call.

        `generate` pads prompts on the left, and goes on until the last text has ended.
        """
        longest = max(map(len, prompts))
        ids = torch.tensor([[self.pad_id] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out, clock, total = self._generate(ids, mask, max(rooms), seed)
        texts = [self._until_its_end(row.tolist(), room) for row, room in zip(out, rooms, strict=True)]
        prefill = clock.at[0]
        return [
            self._decoded(prompt, text, prefill, total, len(text) - 1)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def _alone(
        self, prompt_ids: list[int], max_new_tokens: int, seed: int, prefill_s: float | None = None, **options: Any
    ) -> Decoded:
        ids = torch.tensor([prompt_ids])
        out, clock, total = self._generate(ids, torch.ones_like(ids), max_new_tokens, seed, **options)
        prefill = clock.at[0] if prefill_s is None else min(prefill_s, total)
        return self._decoded(prompt_ids, out[0].tolist(), prefill, total, len(clock.at) - 1)

    def _generate(
        self, ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, seed: int, **options: Any
    ) -> tuple[torch.Tensor, PassClock, float]:
        """New ids [B, T] behind prompts [B, P], when each pass was done, and seconds in all."""
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        torch.manual_seed(seed)
        with threads.suited(self.row_flops * len(ids)):  # as many as our own decoding of so many texts has
            clock = PassClock()
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=max_new_tokens, streamer=clock, **options
            )
            new = out[:, ids.shape[1] :].cpu()
            return new, clock, time.perf_counter() - clock.started

    def _until_its_end(self, ids: list[int], room: int) -> list[int]:
        """A text of a batch without what was written behind its end while others went on."""
        ended = (place for place, token in enumerate(ids) if token in self.eos_ids)
        return ids[: min(room, next(ended, len(ids)) + 1)]

    def _decoded(
        self, prompt_ids: list[int], output_ids: list[int], prefill_s: float, total_s: float, passes: int
    ) -> Decoded:
        # Drafts are the business of transformers here: accepted and rejected tokens are not known.
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


def load_generator(
    recipe: TargetRecipe, target: Target, sampling: Sampling, assistants: Mapping[str, PreTrainedModel]
) -> Generator:
    """The target a second time, as `transformers` loads it. Raises CheckpointError where it cannot."""
    model = load_model(
        recipe.name,
        device=target.device,
        dtype=target.dtype,
        revision=recipe.revision,
        trust_remote_code=recipe.trust_remote_code,
        device_map=recipe.device_map,
        max_memory=recipe.max_memory,
    )
    return Generator(model, target, sampling, assistants)


def load_assistant(directory: str, target: Target) -> PreTrainedModel | None:
    """The drafter in a directory as a model that `generate` can use, None when it is no language model.

    Raises CheckpointError where it is damaged.
    """
    if not checkpoint.is_drafter(Path(directory)):
        return None
    assistant = checkpoint.load(directory)
    if assistant.config["family"] != LM:
        return None
    return cast(pool.module(assistant, target).model, target.device, target.dtype).eval()


def _configuration(eos_ids: frozenset[int], sampling: Sampling) -> GenerationConfig:
    ends = sorted(eos_ids)
    options: dict[str, Any] = {"eos_token_id": ends or None, "pad_token_id": ends[0] if ends else 0}
    sampled = sampling.temperature >= kernels.COLDEST  # below, transformers would divide logits to infinity
    if sampled:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    return GenerationConfig(do_sample=sampled, **options)
