"""Learning of the draft LM from rejected steps: DPO (`online-lr`), or SFT on the target's steps (`osd-lr`).

A preference pair follows its full context, including kept steps: y_w is the target's step, y_l the draft's (Rafailov et
al. 2023, equation 7). DPO's reference model is the draft LM at the start of the chunk.
"""

import copy
import gc
import io
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from specctl.decoding.models.supported import quiet
from specctl.errors import CheckpointError
from specctl.lab.reasoning.lookahead import Mismatch
from specctl.lab.reasoning.options import FULL_BELOW, LearningMode, LookaheadRecipe
from specctl.progress import interrupts


@dataclass(frozen=True)
class PreferenceLesson:
    """Result of learning from a chunk.

    Attributes:
        pairs, steps: number of preference pairs and of optimizer steps; 0 if there was nothing to learn.
        loss: mean over these steps, or None without any.
        margin: for DPO, the mean of β · (log-ratio of y_w − log-ratio of y_l) over the last epoch's steps.
        refused: a loss or weight was not finite, so the draft LM was restored.
    """

    pairs: int
    steps: int = 0
    loss: float | None = None
    margin: float | None = None
    refused: bool = False


def pairs_dataset(mismatches: Sequence[Mismatch], max_length: int) -> Any:
    """Convert the pairs, without duplicates, to a `datasets.Dataset` with ids for DPO and text for readers.

    If context and step together exceed `max_length` tokens, the context is cut at its beginning.
    """
    from datasets import Dataset

    def end(one: Mismatch) -> list[int]:
        return one.context[-max(1, max_length - max(len(one.chosen), len(one.rejected))) :]

    once = {(*one.context, -1, *one.chosen, -1, *one.rejected): one for one in mismatches}
    return Dataset.from_dict(
        {
            "prompt_id": [one.prompt_id for one in once.values()],
            "prompt_ids": [end(one) for one in once.values()],
            "chosen_ids": [one.chosen for one in once.values()],
            "rejected_ids": [one.rejected for one in once.values()],
            "chosen": [one.chosen_text for one in once.values()],
            "rejected": [one.rejected_text for one in once.values()],
        }
    )


class PreferenceLearner:
    """Draft LM that learns chunk by chunk; AdamW's moments persist.

    Attributes:
        model: the LM in fp32, with a LoRA adapter if it is large.
        chunks: number of chunks learned from. It seeds the shuffles, so there is no other random state.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, recipe: LookaheadRecipe, mode: LearningMode):
        """`model` is trained in place; `recipe` must be resolved."""
        self.recipe, self.mode, self.tokenizer, self.chunks = recipe, mode, tokenizer, 0
        learning, count = recipe.learning, sum(weight.numel() for weight in model.parameters())
        self.adapts = learning.lora if learning.lora is not None else count > FULL_BELOW
        self.model: nn.Module = model
        if self.adapts:
            import peft

            sizes: dict[str, Any] = {"r": learning.lora_rank, "lora_alpha": learning.lora_alpha}
            with _quiet():
                torch.manual_seed(recipe.seed)  # "all-linear" leaves the output layer out
                self.model = peft.get_peft_model(model, peft.LoraConfig(**sizes, target_modules="all-linear"))
        self._optimizer = torch.optim.AdamW(
            [weight for weight in self.model.parameters() if weight.requires_grad],
            lr=recipe.rate_of(mode, count),
            betas=(learning.betas[0], learning.betas[1]),
            weight_decay=0.0,
        )

    def played(self) -> PreTrainedModel:
        """Return a copy of the current LM, with its adapter merged."""
        model: Any = copy.deepcopy(self.model)
        return model.merge_and_unload() if self.adapts else model

    def learn(self, mismatches: Sequence[Mismatch]) -> PreferenceLesson:
        """Train for several epochs on the pairs of a chunk.

        Raises Interrupted between two optimizer steps, with part of the chunk learned; resume from a `state()`.
        """
        pairs = pairs_dataset(mismatches, self.recipe.learning.max_length)
        self.chunks += 1
        if len(pairs) == 0:
            return PreferenceLesson(len(pairs))
        interrupts.check()
        before = self.state()
        steps, losses, margins = self._train(pairs)
        sound = all(bool(weight.isfinite().all()) for weight in self._trainable().values())
        if not sound or not torch.tensor(losses).isfinite().all():
            self.restore(before)
            return PreferenceLesson(len(pairs), refused=True)
        return PreferenceLesson(
            len(pairs), steps, sum(losses) / len(losses), sum(margins) / len(margins) if margins else None
        )

    def _train(self, pairs: Any) -> tuple[int, list[float], list[float]]:
        """Run TRL's trainer. Returns the number of optimizer steps, all losses, and the margins of the last epoch."""
        dpo, epochs = self.mode == "online-lr", self.recipe.epochs_of(self.mode)
        base: Any = cast(Any, self.model).get_base_model() if self.adapts else self.model
        with _quiet(), tempfile.TemporaryDirectory() as place:
            gc.collect()  # trainers are reference cycles: the last one would keep its reference model in memory
            trainer = self._dpo_trainer(pairs, place) if dpo else self._sft_trainer(pairs, place)
            trainer.add_callback(SignalCheck())
            try:
                trainer.train()
            finally:
                vars(base).pop("forward", None)  # TRL's own, which copies of the model would inherit
                base.get_input_embeddings()._forward_hooks.clear()  # every trainer with checkpointing adds hooks
                base.eval()
                if self.adapts and dpo:
                    cast(Any, self.model).delete_adapter("ref")  # the next chunk has another reference model
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        margins = [entry["rewards/margins"] for entry in log if dpo and entry["epoch"] > epochs - 1]
        return trainer.state.global_step, [entry["loss"] for entry in log], margins

    def _dpo_trainer(self, pairs: Any, place: str) -> Any:
        """Build a DPO trainer on pairs of token ids.

        TRL's own preparation tokenizes text, possibly differently than it was written. It also ends every step with the
        end-of-sequence token, so a draft LM that learns from it would stop after each step.
        """
        from trl import DPOConfig, DPOTrainer

        class OnIds(DPOTrainer):
            def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
                return dataset

        model = cast(Any, self.model)
        return OnIds(
            model=model,
            ref_model=None if self.adapts else copy.deepcopy(model),
            args=_on_one_gpu(DPOConfig(**self._options(place), beta=self.recipe.learning.beta)),
            train_dataset=pairs.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"]),
            processing_class=self.tokenizer,
            optimizers=self._optimizers(),
        )

    def _sft_trainer(self, pairs: Any, place: str) -> Any:
        """Build an SFT trainer on the target's steps, given their contexts."""
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        contexts, steps = pairs["prompt_ids"], pairs["chosen_ids"]
        texts = [context + step for context, step in zip(contexts, steps, strict=True)]
        labels = [[-100] * len(context) + step for context, step in zip(contexts, steps, strict=True)]
        return SFTTrainer(
            model=cast(Any, self.model),
            args=_on_one_gpu(SFTConfig(**self._options(place), dataset_kwargs={"skip_prepare_dataset": True})),
            train_dataset=Dataset.from_dict({"input_ids": texts, "labels": labels}),
            processing_class=self.tokenizer,
            optimizers=self._optimizers(),
        )

    def _options(self, place: str) -> dict[str, Any]:
        """Arguments of both trainers. On a CPU all is fp32: a chunk changes weights by less than bf16 can represent."""
        learning, cuda = self.recipe.learning, next(self.model.parameters()).device.type == "cuda"
        return {
            "output_dir": place,  # created, but nothing is written to it
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "logging_steps": 1,
            "use_cpu": not cuda,
            "bf16": cuda,
            "gradient_checkpointing": cuda,
            "remove_unused_columns": False,
            "max_length": None,
            "num_train_epochs": self.recipe.epochs_of(self.mode),
            "per_device_train_batch_size": learning.batch,
            "max_grad_norm": learning.clip,
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "seed": self.recipe.seed + self.chunks,
        }

    def _optimizers(self) -> tuple[torch.optim.Optimizer, Any]:
        """Our optimizer, with a constant learning rate."""
        return self._optimizer, torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: 1.0)

    def _trainable(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and counters, as copies that later learning does not change."""
        tensors = {f"weight.{name}": weight.detach().clone() for name, weight in self._trainable().items()}
        for place, moments in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{place}.{name}": value.detach().clone() for name, value in moments.items()}
        return tensors | {"chunks": torch.tensor(self.chunks)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Resume from a `state()`. Raises CheckpointError if it belongs to another model."""
        weights = self._trainable()
        if {f"weight.{name}" for name in weights} != {name for name in state if name.startswith("weight.")}:
            raise CheckpointError("the learner's state belongs to another draft model", "start again with --overwrite")
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(state[f"weight.{name}"])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("optimizer."):
                _, place, key = name.split(".")
                moments.setdefault(int(place), {})[key] = value.clone()
        self._optimizer.load_state_dict(self._optimizer.state_dict() | {"state": moments})
        self.chunks = int(state["chunks"])


def _on_one_gpu(arguments: Any) -> Any:
    """Restrict a trainer to one GPU; by default it uses all with `nn.DataParallel`, which TRL refuses."""
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


class SignalCheck(TrainerCallback):
    """Checks for SIGTERM after every optimizer step."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        interrupts.check()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress TRL's output and progress bars, and restore the process's random states afterwards."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    states = random.getstate(), np.random.get_state()
    bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with quiet(), torch.random.fork_rng(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if bars:
            enable_progress_bars()
