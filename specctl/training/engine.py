"""The DeepSpeed engine around a module, on one process or under torchrun, deepspeed or Slurm."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from specctl.decoding.target import pick_dtype
from specctl.errors import RecipeError
from specctl.recipe import OptimizerRecipe, TrainRecipe


def start_processes(device: torch.device) -> tuple[int, int]:
    """Join the process group (one process on its own makes a group of one). Returns (rank, world size)."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(alone)
    import torch.distributed as dist

    with _stdout_to_stderr():
        import deepspeed

        # Its shared-memory all-reduce is compiled by a C++ compiler at first use, which a machine need not have.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm_op"] = False
        if not dist.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo" if device.type == "cpu" else "nccl", verbose=False)
    return dist.get_rank(), dist.get_world_size()


def make_engine(module: nn.Module, recipe: TrainRecipe, learning_rate: float) -> Any:
    """A DeepSpeed engine with fp32 master weights and AdamW, ZeRO stage from the recipe."""
    with _stdout_to_stderr():
        import deepspeed

        options = recipe.optimizer
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = _optimizer(options, parameters, learning_rate)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # batches are counted in tokens here; DeepSpeed only wants a number
            "gradient_accumulation_steps": 1,
            "gradient_clipping": options.clip,
            "zero_optimization": {"stage": recipe.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**31,
            "wall_clock_breakdown": False,
        }
        try:
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config | recipe.deepspeed)
        except (ValueError, AssertionError, KeyError) as error:
            raise RecipeError(f"DeepSpeed refuses the configuration: {error}", "see `deepspeed:` in the recipe") from error
    return engine


def _optimizer(options: OptimizerRecipe, parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    betas = (options.betas[0], options.betas[1])
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=betas, weight_decay=options.weight_decay)


def compute_dtype(recipe: TrainRecipe, device: torch.device) -> torch.dtype:
    """Precision of matrix products; weights, residual stream and optimizer state are fp32."""
    return pick_dtype(recipe.precision, device)


def set_learning_rate(engine: Any, learning_rate: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate


def weights(engine: Any) -> dict[str, Tensor]:
    """A copy of the module's state on the CPU, gathered from all ranks under ZeRO 3 (all ranks call this)."""
    with gathered(engine):
        return {name: value.detach().to("cpu", copy=True) for name, value in engine.module.state_dict().items()}


def gathered(engine: Any) -> Any:
    """The module's parameters made whole, under ZeRO 3."""
    import deepspeed

    if engine.zero_optimization_stage() < 3:
        return contextlib.nullcontext()
    return deepspeed.zero.GatheredParameters(list(engine.module.parameters()))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """DeepSpeed logs to stdout, which belongs to the result."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
    for name in ("DeepSpeed", "deepspeed"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.WARNING)
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(sys.stderr)
