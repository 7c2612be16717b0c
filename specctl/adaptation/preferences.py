"""The draft LM learns from the steps that the judge rejected: DPO (`online-lr`), or SFT on the target's (`osd-lr`).

Preferences are pairs behind the full context, kept steps included: y_w the target's step, y_l the draft's (Rafailov et
al. 2023, equation 7). The reference of DPO is the draft LM as it was when the chunk began.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specctl.adaptation.lookahead import Mismatch
from specctl.decoding.target import Target
from specctl.drafters.lm import cast as moved
from specctl.errors import CheckpointError
from specctl.progress import interrupts
from specctl.recipe import LookaheadRecipe
from specctl.recipe.lookahead import FULL_BELOW, ReasoningMode


@dataclass(frozen=True)
class Lesson:
    """What a chunk taught.

    Attributes:
        pairs, steps: preference pairs, and optimizer steps made with them; 0 where there was nothing to learn.
        loss: mean over those steps; None without any.
        margin: of DPO, the mean of β · (log-ratio of y_w − that of y_l) over the last epoch's steps.
        refused: a loss or weight was not finite: the draft LM is as it was.
    """

    pairs: int
    steps: int = 0
    loss: float | None = None
    margin: float | None = None
    refused: bool = False


def table(mismatches: Sequence[Mismatch]) -> Any:
    """The pairs as a `datasets.Dataset`, each once: ids as DPO reads them, and text for people."""
    from datasets import Dataset

    once = {(*one.context, -1, *one.chosen, -1, *one.rejected): one for one in mismatches}
    return Dataset.from_dict(
        {
            "prompt_id": [one.prompt_id for one in once.values()],
            "prompt_ids": [one.context for one in once.values()],
            "chosen_ids": [one.chosen for one in once.values()],
            "rejected_ids": [one.rejected for one in once.values()],
            "chosen": [one.chosen_text for one in once.values()],
            "rejected": [one.rejected_text for one in once.values()],
        }
    )


class PreferenceLearner:
    """A draft LM that learns chunk by chunk; AdamW's moments persist.

    Attributes:
        model: the LM in fp32, with a LoRA adapter around it where it is large.
        chunks: learnt from so far. They number the shuffles, so that there is no other random state.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, recipe: LookaheadRecipe, mode: ReasoningMode):
        """`mode`: "online-lr" or "osd-lr"; with any other one the model stays as it is."""
        self.recipe, self.mode, self.tokenizer, self.chunks = recipe, mode, tokenizer, 0
        learning, count = recipe.learning, sum(weight.numel() for weight in model.parameters())
        self.adapts = learning.lora if learning.lora is not None else count > FULL_BELOW
        self.model: nn.Module = model
        if self.adapts and self.learns:
            import peft

            targets = "all-linear"  # peft leaves the output layer out
            with torch.random.fork_rng():
                torch.manual_seed(recipe.seed)
                options = peft.LoraConfig(r=learning.lora_rank, lora_alpha=learning.lora_alpha, target_modules=targets)  # type: ignore[arg-type]
                self.model = peft.get_peft_model(model, options)
        self._optimizer = torch.optim.AdamW(
            [weight for weight in self.model.parameters() if weight.requires_grad],
            lr=recipe.rate_of(mode, count),
            betas=(learning.betas[0], learning.betas[1]),
            weight_decay=0.0,
        )

    @property
    def learns(self) -> bool:
        return self.mode in ("online-lr", "osd-lr")

    def played(self, name: str, like: Target) -> Target:
        """The LM as it is now, for the decoding core: a copy in the dtype and on the device of `like`."""
        model: Any = copy.deepcopy(self.model)
        if self.adapts and self.learns:
            model = model.merge_and_unload()
        return Target(name, moved(model, like.device, like.dtype).eval(), self.tokenizer)

    def learn(self, mismatches: Sequence[Mismatch]) -> Lesson:
        """Several epochs over the pairs of a chunk."""
        pairs = table(mismatches)
        self.chunks += 1
        if not self.learns or len(pairs) == 0:
            return Lesson(len(pairs))
        interrupts.check()
        before = self.state()
        steps, losses, margins = self._train(pairs)
        sound = all(bool(weight.isfinite().all()) for weight in self._trainable().values())
        if not sound or not torch.tensor(losses).isfinite().all():
            self.restore(before)
            return Lesson(len(pairs), refused=True)
        return Lesson(len(pairs), steps, sum(losses) / len(losses), sum(margins) / len(margins) if margins else None)

    def _train(self, pairs: Any) -> tuple[int, list[float], list[float]]:
        """Run TRL's trainer; optimizer steps, losses of all and margins of the last epoch's."""
        learning, dpo = self.recipe.learning, self.mode == "online-lr"
        with _quiet():
            trainer = _trainer(
                self.model,
                None if self.adapts else copy.deepcopy(self.model),
                pairs.select_columns(["prompt_ids", "chosen_ids", "rejected_ids"]),
                self.tokenizer,
                self._optimizer,
                loss_type=["sigmoid" if dpo else "sft"],
                beta=learning.beta,
                num_train_epochs=learning.epochs,
                per_device_train_batch_size=learning.batch,
                max_grad_norm=learning.clip,
                max_length=learning.max_length,
                seed=self.recipe.seed + self.chunks,
            )
            trainer.train()
        base: Any = cast(Any, self.model).get_base_model() if self.adapts else self.model
        vars(base).pop("forward", None)  # TRL's own, which would end up in copies of the model
        base.eval()
        if self.adapts:
            cast(Any, self.model).delete_adapter("ref")  # the next chunk has another reference
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        last = [entry for entry in log if entry["epoch"] > learning.epochs - 1]
        margins = [entry["rewards/margins"] for entry in last if dpo]
        return trainer.state.global_step, [entry["loss"] for entry in log], margins

    def _trainable(self) -> dict[str, Tensor]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and counters: copies, which later learning leaves as they are."""
        found = {f"weight.{name}": weight.detach().clone() for name, weight in self._trainable().items()}
        for place, moments in self._optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{place}.{name}": value.detach().clone() for name, value in moments.items()}
        return found | {"chunks": torch.tensor(self.chunks)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state()`. CheckpointError where it is that of another model."""
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


def _trainer(
    model: Any, reference: Any, pairs: Any, tokenizer: Any, optimizer: torch.optim.Optimizer, **options: Any
) -> Any:
    """TRL's trainer on pairs of ids.

    Its own preparation tokenises text, which may cut it differently than it was written, and ends every step with the
    end-of-sequence token: a draft LM that learns from that stops after each step.
    """
    from trl import DPOConfig, DPOTrainer

    class OnIds(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    device = next(model.parameters()).device
    config = DPOConfig(
        output_dir=str(Path("trainer")),  # never written: nothing is saved
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        logging_strategy="steps",
        use_cpu=device.type == "cpu",
        bf16=device.type == "cuda",
        gradient_checkpointing=device.type == "cuda",
        truncation_mode="keep_end",
        remove_unused_columns=False,
        learning_rate=optimizer.param_groups[0]["lr"],
        **options,
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return OnIds(
        model=model,
        ref_model=reference,
        args=config,
        train_dataset=pairs,
        processing_class=tokenizer,
        optimizers=(optimizer, constant),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither the trainer's seeds nor its lines: it prints every log entry to stdout and seeds every generator."""
    import random

    import numpy as np
    from datasets import disable_progress_bars
    from transformers import PrinterCallback
    from transformers.utils import logging as library

    disable_progress_bars()
    kept, verbosity = (random.getstate(), np.random.get_state()), library.get_verbosity()
    library.set_verbosity_error()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.set_verbosity(verbosity)
        random.setstate(kept[0])
        np.random.set_state(kept[1])
