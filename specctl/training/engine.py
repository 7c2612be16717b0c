"""The DeepSpeed engine around a module, on one process or under torchrun, deepspeed or Slurm.

Also sums over these processes, and blocks that end in all of them when one fails.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specctl.decoding.models.loading import pick_dtype
from specctl.errors import Interrupted, RecipeError, SpecctlError
from specctl.recipe import TrainRecipe
from specctl.training.optimizers import make_optimizer

FP16_SCALE = 1024.0  # of gradients in fp16, which has no numbers below 6e-8
PATIENCE = timedelta(minutes=30)  # time that processes wait for the slowest, which may be computing features


def start_processes(device: torch.device) -> tuple[int, int]:
    """Join the process group; without a launcher, the process is a group by itself. Returns (rank, world size)."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    alone = "RANK" not in os.environ
    if alone:
        local = str(device.index or 0)  # DeepSpeed uses the GPU with this index
        os.environ.update(RANK="0", LOCAL_RANK=local, WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # collectives run on the target's device
    backend = "gloo" if device.type == "cpu" else "nccl"
    # DeepSpeed prints to stdout, which is for our result, and its logger keeps the stdout found at import.
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        # DeepSpeed compiles its shared-memory all-reduce at first use, which needs a C++ compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if not dist.is_initialized():
            if alone:  # needs no port, which another process could take first
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            deepspeed.init_distributed(dist_backend=backend, verbose=False, timeout=PATIENCE)
    return dist.get_rank(), dist.get_world_size()


def make_engine(module: nn.Module, recipe: TrainRecipe, learning_rate: float) -> Any:
    """Build a DeepSpeed engine over fp32 weights, with the optimizer and ZeRO stage of the recipe."""
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        options = recipe.optimizer
        if recipe.optimizer_type == "muon" and recipe.zero_stage > 0:
            raise RecipeError(
                f"optimizer.type muon needs whole matrices, but ZeRO stage {recipe.zero_stage} splits them",
                "use zero_stage 0 or optimizer.type adamw",
            )
        optimizer = make_optimizer(module, recipe.optimizer_type, options, learning_rate)
        autocast(module, recipe)
        try:
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=engine_config(recipe))
        except (ValueError, AssertionError, KeyError) as error:
            raise RecipeError(
                f"DeepSpeed rejects the configuration: {error}", "check `deepspeed:` in the recipe"
            ) from error
    return engine


def autocast(module: nn.Module, recipe: TrainRecipe) -> None:
    """Run the module's matrix products in the recipe's precision; weights and residual stream are fp32.

    The autocast is inside the module. On a GPU, DeepSpeed switches off an autocast that is missing in its own
    configuration. If its configuration has one, DeepSpeed reduces gradients in that precision, too. In fp16 the
    gradients of activations are `FP16_SCALE` times as large, and the gradients of parameters are divided by it again.
    """
    device = next(module.parameters()).device
    dtype = pick_dtype(recipe.precision, device)
    cast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    module.forward = cast(module.forward)
    if dtype == torch.float16:
        module.forward = _with_scaled_gradients(module.forward)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / FP16_SCALE)


def _with_scaled_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that returns (loss, …), with larger gradients in all that it computes."""

    def scaled(*inputs: Any) -> Any:
        loss, *rest = forward(*inputs)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * FP16_SCALE)
        return loss, *rest

    return scaled


def engine_config(recipe: TrainRecipe) -> dict[str, Any]:
    """DeepSpeed's configuration: the settings that the recipe decides, with `recipe.deepspeed` merged into them.

    `zero_optimization` is merged key by key: a user's options without a stage must not reset the recipe's stage.
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # unused: our batches are counted in tokens, DeepSpeed wants a number
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.optimizer.clip,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
        **recipe.deepspeed,
    }
    zero = {**config.get("zero_optimization", {}), "stage": recipe.zero_stage}
    return {**config, "zero_optimization": zero}


def set_learning_rate(engine: Any, share: float) -> None:
    """Set every parameter group to `share` of its peak learning rate."""
    for group in engine.optimizer.param_groups:
        group["lr"] = share * group.setdefault("peak_lr", group["lr"])


def weights(engine: Any) -> dict[str, Tensor]:
    """A copy of the module's state on the CPU, gathered from all ranks under ZeRO 3 (all ranks call this)."""
    with gathered(engine):
        return {name: value.detach().to("cpu", copy=True) for name, value in engine.module.state_dict().items()}


def gathered(engine: Any, changed: bool = False) -> Any:
    """Context in which the module's parameters are whole under ZeRO 3. With `changed`, the first process' values are
    divided again at its end."""
    import deepspeed

    if engine.zero_optimization_stage() < 3:
        return contextlib.nullcontext()
    return deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0 if changed else None)


def over_ranks(values: list[int], device: torch.device) -> list[int]:
    """Sum each of `values` over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [int(value) for value in values]  # without waiting for the device
    total = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return total.tolist()


@contextlib.contextmanager
def ends_together(device: torch.device, slices: int = 1) -> Iterator[None]:
    """Wait for all ranks at the end of a block. If one of them fails or is interrupted, all end: the others would
    wait for it until their job is killed, and a killed job does not go back into the queue.

    The block has no collectives, except the target's own if each rank has one of its `slices`. A rank that fails among
    them does not wait for the others: they are in the middle of a forward.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as failure:
        if slices > 1:
            raise
        error = failure
    interrupted, failed = over_ranks([isinstance(error, Interrupted), error is not None], device)
    if error is not None:
        raise error
    if failed:
        raise SystemExit(Interrupted.exit_code if interrupted == failed else SpecctlError.exit_code)
