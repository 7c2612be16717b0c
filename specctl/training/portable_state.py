"""An engine's weights and optimizer state as named tensors, independent of its ZeRO stage and number of processes.

    weights.<name>                                      the module's state, fp32
    step.<name>  exp_avg.<name>  exp_avg_sq.<name>      AdamW's state of a parameter
    momentum_buffer.<name>                              Muon's state of a parameter

DeepSpeed's own files hold each process' part of a flat buffer, so they fit only the number of processes that wrote
them. Here each parameter is whole: the state of eight processes can be divided among four.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specctl.training.engine import gathered
from specctl.training.optimizers import MuonWithAdamW

WEIGHTS = "weights"
MOMENTS = "exp_avg", "exp_avg_sq"  # AdamW's state besides `step`


def collect(engine: Any) -> dict[str, Tensor]:
    """Gather the state on the CPU of the first process; the others get {} (all processes call this)."""
    first = dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    with gathered(engine):
        if first:
            tensors = {f"{WEIGHTS}.{name}": _on_cpu(value) for name, value in engine.module.state_dict().items()}
    for name, parameter in _trained(engine.module):  # one at a time: all moments together may not fit on a GPU
        for key, value in _of_optimizer(engine, parameter).items():
            if first:
                tensors[f"{key}.{name}"] = _on_cpu(value)
    return tensors


def restore(engine: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load a state from `collect` into an engine that has made no step yet (all processes call this).

    ValueError if names, shapes, types or buffers differ from the engine's; the engine is then unchanged.
    """
    taken: set[str] = set()
    with gathered(engine, changed=True):
        for name, value in engine.module.state_dict().items():
            _tensor(tensors, f"{WEIGHTS}.{name}", value, taken)
        for name, buffer in engine.module.named_buffers():  # such as the draft vocabulary, which recipe and data decide
            if (key := f"{WEIGHTS}.{name}") in taken and not torch.equal(tensors[key], buffer.cpu()):
                raise ValueError(f"{name} differs from the value that recipe and data give")
        states = {
            name: _state(tensors, name, parameter, _keys(engine, parameter), taken)
            for name, parameter in _trained(engine.module)
        }
        if extra := tensors.keys() - taken:
            raise ValueError(f"it has {min(extra)!r:.100}, which this run does not have")
        stage = engine.zero_optimization_stage()
        if stage and not all(states.values()):
            raise ValueError("the optimizer state is missing for some parameters")
        engine.module.load_state_dict({name: tensors[f"{WEIGHTS}.{name}"] for name in engine.module.state_dict()})
    if stage == 0:
        _load_undivided(engine, states)
    else:
        _load_partitioned(engine, states)


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _parts(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that hold parameters: the optimizer itself, or the two parts of `MuonWithAdamW`."""
    return optimizer.parts if isinstance(optimizer, MuonWithAdamW) else (optimizer,)


def _of_optimizer(engine: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The undivided optimizer state of a parameter, or {} if the parameter had no gradient yet."""
    if engine.zero_optimization_stage() == 0:
        return next((part.state[parameter] for part in _parts(engine.optimizer) if parameter in part.state), {})
    from deepspeed.utils import safe_get_full_optimizer_state

    steps = [state["step"] for state in engine.optimizer.optimizer.state.values()]  # one per flat buffer, all equal
    return {"step": steps[0], **{key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}}


def _keys(engine: Any, parameter: nn.Parameter) -> tuple[str, ...]:
    """Names of the optimizer's state tensors for a parameter."""
    if engine.zero_optimization_stage() == 0:
        for part in _parts(engine.optimizer):
            if isinstance(part, torch.optim.Muon) and any(
                parameter is p for g in part.param_groups for p in g["params"]
            ):
                return ("momentum_buffer",)
    return "step", *MOMENTS


def _state(
    tensors: Mapping[str, Tensor], name: str, parameter: nn.Parameter, keys: tuple[str, ...], taken: set[str]
) -> dict[str, Tensor]:
    """State of a parameter, or {} if `tensors` has none. ValueError if the state is incomplete or of another shape."""
    if not any(f"{key}.{name}" in tensors for key in keys):
        return {}
    scalar = torch.zeros(())
    return {key: _tensor(tensors, f"{key}.{name}", scalar if key == "step" else parameter, taken) for key in keys}


def _tensor(tensors: Mapping[str, Tensor], name: str, like: Tensor, taken: set[str]) -> Tensor:
    """Return the tensor `name` and note it in `taken`. ValueError if it is missing or unlike `like` in shape or
    type."""
    value = tensors.get(name)
    if value is None:
        raise ValueError(f"it has no {name}")
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, not {like.dtype} {list(like.shape)}")
    taken.add(name)
    return value


def _load_undivided(engine: Any, states: Mapping[str, dict[str, Tensor]]) -> None:
    """Load the states by parameter into an undivided optimizer; its options stay the recipe's."""
    named = {id(parameter): states[name] for name, parameter in _trained(engine.module)}
    made = []
    for part in _parts(engine.optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        state = {
            place: {key: value.clone() for key, value in named[id(p)].items()}  # not a view of the mapped file
            for place, p in enumerate(parameters)
            if named[id(p)]
        }
        made.append({"state": state, "param_groups": part.state_dict()["param_groups"]})
    engine.optimizer.load_state_dict({"parts": made} if isinstance(engine.optimizer, MuonWithAdamW) else made[0])


def _load_partitioned(engine: Any, states: Mapping[str, dict[str, Tensor]]) -> None:
    """Give each process its part of the optimizer states, and of the master weights as copied from the module."""
    from deepspeed.utils import (
        lazy_init_hp_params_optimizer_state,
        safe_set_full_optimizer_state,
        safe_set_local_optimizer_state,
    )

    zero = engine.optimizer
    zero.refresh_fp32_params()
    whole = engine.zero_optimization_stage() == 3
    flats = zero.fp32_partitioned_groups_flat if whole else zero.single_partition_of_fp32_groups
    (options,) = zero.optimizer.param_groups
    step = next(iter(states.values()))["step"]
    for flat in flats:  # the state that a first step would allocate
        zero.optimizer.state[flat] = {
            "step": step.to(flat.device, copy=True) if options["fused"] else step.clone(),
            **{key: torch.zeros_like(flat) for key in MOMENTS},
        }
    if not whole:
        for group, flat in zip(zero.bit16_groups, flats, strict=True):
            lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)
    for name, parameter in _trained(engine.module):
        for key in MOMENTS:
            if whole:  # safe_set_full_optimizer_state needs a size that is divisible by the processes
                safe_set_local_optimizer_state(parameter, _share(states[name][key], parameter), key)
            else:
                safe_set_full_optimizer_state(parameter, states[name][key], key)


def _share(value: Tensor, parameter: Any) -> Tensor:
    """This process' slice of a parameter that ZeRO 3 has divided, padded with zeros past its end."""
    size = parameter.ds_tensor.numel()
    flat = nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return flat.narrow(0, dist.get_rank() * size, size)
