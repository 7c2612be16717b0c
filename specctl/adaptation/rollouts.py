"""Roll-outs for `trl` by speculative decoding, with a drafter that learns while the policy is trained.

    rollouts = DraftedRollouts("drafters/math-eagle3")
    trainer = GRPOTrainer(..., rollout_func=rollouts)
    trainer.train()
    rollouts.save("drafters/math-eagle3-rl")

Every optimizer step changes the policy, and a fixed drafter predicts it less and less well. Here the policy is the
target. Before a batch of roll-outs, the learner gets the policy's present weights. After the batch, the learner learns
from the verification of the drafts.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl.adaptation.online_drafter import OnlineDrafter
from specctl.adaptation.updates.watchdog import Acceptance
from specctl.decoding import metrics
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.logprobs import LogprobRecorder
from specctl.decoding.models import lean
from specctl.decoding.models.supported import DENSE
from specctl.decoding.offline import decode
from specctl.decoding.records import Decoded, Request, RoundResult
from specctl.decoding.sampling import Sampling
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target
from specctl.drafters import checkpoint
from specctl.errors import UsageError
from specctl.recipe.learner import rule_and_family
from specctl.recipe.online import DrafterStreamRecipe


@dataclass(frozen=True)
class RolloutBatch:
    """Counts and seconds of one call of the trainer.

    Attributes:
        step: the trainer's global step.
        training: false for the texts of an evaluation.
        tokens, passes: tokens of the decode phase, and passes of the policy that wrote them.
        decode_s, learn_s: seconds of writing the texts (prefill included), and of learning from them.
        lesson: status of the update: updated, rested and so on (`UpdateOutcome`), or None if the texts taught nothing.
        rolled_back: the update before this batch lowered acceptance and was taken back.
    """

    step: int
    training: bool
    texts: int
    tokens: int
    passes: int
    decode_s: float
    learn_s: float
    lesson: str | None
    rolled_back: bool

    @property
    def mat(self) -> float | None:
        """Tokens per pass, or None if all texts ended with their first token."""
        return metrics.ratio(self.tokens, self.passes)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, the time of learning included."""
        return self.tokens / (self.decode_s + self.learn_s)


class DraftedRollouts:
    """`rollout_func` of `trl.GRPOTrainer`: texts of the present policy, drafted by a drafter that learns from them.

    The texts are samples of the policy at the trainer's temperature, top-k and top-p. With the same seed plain decoding
    writes the same texts, and the whole training is the same, unless rounding moves a draw to another token. (With
    `drafting.proposal=sampled`, which is for small LMs, only the distribution is the same.)

    The log probabilities belong to the distributions that the tokens were drawn from, as `trl` asks of vLLM
    (`processed_logprobs`). They come from the logits of the verification. At top_k=0 and top_p=1 the trainer computes
    the same numbers.

    The forward of the roll-outs shares the policy's weights. It copies them only if a CPU needs another layout (bf16).
    An adapter of peft is merged while the texts are written. Every process of DDP has a learner of its own.

    Attributes:
        batches: counts and seconds of each call, in order.
        learner: the drafter with its learner, from the first call on.
    """

    def __init__(
        self,
        drafter: str | Path | None,
        recipe: DrafterStreamRecipe | None = None,
        *,
        slots: int | None = None,
        logprobs: bool = True,
    ):
        """
        Args:
            drafter: drafter directory with weights; None: plain decoding, to compare.
            recipe: update rule (the first one of `algo`; `static` does not learn), with `learner`, `buffer` and
                `drafting` as in `specctl online`. Its other keys are not read.
            slots: most texts at a time (None = all that the trainer asks for).
            logprobs: return log probabilities; rounds then run from the host. Without them, `trl` cannot tell by how
                much a text is off-policy (`off_policy_mask_threshold`).

        Raises CheckpointError if `drafter` is not a drafter directory.
        """
        self.start = None if drafter is None else Path(drafter)
        if self.start is not None:
            checkpoint.family(self.start)  # a wrong name fails here, and not after the trainer has loaded its model
        self.recipe = recipe or DrafterStreamRecipe()
        self.slots, self.logprobs = slots, logprobs
        self.batches: list[RolloutBatch] = []
        self.learner: OnlineDrafter | None = None
        self.algo = self.recipe.algo[0]
        self._learns = rule_and_family(self.algo)[0] != "static"
        self._calls = 0  # earlier calls at `_step`
        self._step: int | None = None  # the trainer's step of the last call

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """One completion per prompt: token ids of prompts and completions, and a log probability per completion token.

        Raises:
            UsageError: the trainer has an option that `Sampling` does not have, shards the policy, or has images.
            CheckpointError: the drafter was made for another model.
        """
        sampling = sampling_of(trainer)
        ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise UsageError("roll-outs do not support images", "leave out rollout_func")
        training = trainer.model.training
        # Numbers drawn here must not change the numbers that the trainer draws.
        with policy_weights(trainer) as policy, torch.random.fork_rng([*{policy.device} - {torch.device("cpu")}]):
            target = Target(policy.config._name_or_path or "policy", policy, trainer._tokenizer)
            self._retarget(target, trainer.args.seed + trainer.accelerator.process_index)
            requests = [
                Request(prompt, sampling, trainer.max_completion_length, seed)
                for prompt, seed in zip(ids, self._seeds(trainer, len(ids)), strict=True)
            ]
            pupil = self.learner if training and self._learns else None
            began = time.perf_counter()
            decoded, logprobs = self._write(target, requests, pupil)
            decode_s = time.perf_counter() - began
            lesson = None
            if pupil is not None:
                acceptance = Acceptance.of((text.accepted, text.accepted + text.rejections) for text in decoded)
                lesson = pupil.learn_chunk(acceptance, decode_s)
        self.batches.append(
            RolloutBatch(
                step=trainer.state.global_step,
                training=training,
                texts=len(decoded),
                tokens=sum(text.decoded_tokens for text in decoded),
                passes=sum(text.target_passes for text in decoded),
                decode_s=decode_s,
                learn_s=lesson.learn_s + lesson.swap_s if lesson else 0.0,
                lesson=lesson.outcome.status if lesson else None,
                rolled_back=lesson is not None and lesson.ruling == "rollback",
            )
        )
        self._log(trainer)
        return {"prompt_ids": ids, "completion_ids": [text.output_ids for text in decoded], "logprobs": logprobs}

    def save(self, directory: str | Path) -> Path:
        """Write the drafter with its present weights. Raises UsageError before the first roll-outs."""
        if self.learner is None or self.start is None:
            raise UsageError("there is no drafter that learns", "save after the training, of roll-outs with a drafter")
        info = {**checkpoint.read_info(self.start), "learnt": f"{self.algo}, roll-outs, from {self.start}", "mat": {}}
        return self.learner.save(Path(directory), info)

    def _retarget(self, target: Target, seed: int) -> None:
        """Let the drafter draft for the policy with its present weights."""
        if self.learner is not None:
            self.learner.retarget(target)
        elif self.start is not None:
            self.learner = OnlineDrafter(self.recipe, self.algo, target, seed, self.start)

    def _seeds(self, trainer: Any, count: int) -> list[int]:
        """A seed per text, by the trainer's seed, step and process, and by the number of earlier calls at this step."""
        step = trainer.state.global_step
        self._calls = self._calls + 1 if step == self._step else 0
        self._step = step
        draws = random.Random(f"{trainer.args.seed}/{step}/{self._calls}/{trainer.accelerator.process_index}")
        return [draws.getrandbits(48) for _ in range(count)]

    def _write(
        self, target: Target, requests: list[Request], pupil: OnlineDrafter | None
    ) -> tuple[list[Decoded], list[list[float]] | None]:
        """Decode the requests as one batch. Returns the texts, and the log probabilities of their tokens.

        `pupil`: takes in the texts to learn from them, or None.
        """
        recorder = LogprobRecorder(as_drawn=True)

        def on_round(state: DecodeState, result: RoundResult) -> None:
            recorder.on_round(state, result)
            if pupil is not None:
                pupil.observe(state, result)

        keeps_hidden = pupil is not None and pupil.keeps_hidden
        options = EngineOptions(slots=self.slots, keeps_hidden=keeps_hidden, on_host=self.logprobs)
        controller = None if self.learner is None else self.learner.controller
        engine = Engine(target, controller, options, on_round)
        if self.logprobs:
            engine.on_prefill = recorder.on_prefill
            recorder.wanted = dict.fromkeys(range(len(requests)), 0)  # a new engine numbers its requests from 0
        decoded = decode(engine, requests)
        if not self.logprobs:
            return decoded, None
        return decoded, [[token.logprob for token in recorder.take(text.index)] for text in decoded]

    def _log(self, trainer: Any) -> None:
        """Add the last batch to the trainer's metrics."""
        batch = self.batches[-1]
        values = {"tokens_per_s": batch.tokens_per_s, "mat": batch.mat, "learn_s": batch.learn_s}
        for name, value in values.items():
            if value is not None:
                trainer._metrics["train" if batch.training else "eval"][f"rollout/{name}"].append(value)


def sampling_of(trainer: Any) -> Sampling:
    """The sampling of a trainer's texts. Raises UsageError for an option that roll-outs do not support."""
    args = trainer.args
    unsupported = {
        "min_p": args.min_p,
        "repetition_penalty": args.repetition_penalty != 1.0,
        "generation_kwargs": args.generation_kwargs,
        "tools": trainer.tools,
        "use_vllm": args.use_vllm,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
    }
    if wrong := [name for name, value in unsupported.items() if value]:
        raise UsageError(
            f"roll-outs do not support {', '.join(wrong)} of GRPOTrainer",
            "leave it out: roll-outs take temperature, top_k and top_p, and a policy that is whole in every process",
        )
    return Sampling(args.temperature, args.top_k or 0, args.top_p)


@contextmanager
def policy_weights(trainer: Any) -> Iterator[Any]:
    """The trainer's policy as a plain `transformers` model in evaluation mode, with its adapter merged.

    If our own forward can run the policy, its weights are moved so that the forward shares them.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    adapted = hasattr(model, "merge_adapter")
    training = model.training
    model.eval()
    if adapted:
        model.merge_adapter()
    policy = model.get_base_model() if adapted else model
    try:
        builtin = type(policy).__module__.startswith("transformers.models.")
        if builtin and policy.config.model_type in DENSE and not lean.unsupported_reason(policy.config):
            lean.place_together(policy)
        yield policy
    finally:
        if adapted:
            model.unmerge_adapter()
        model.train(training)
