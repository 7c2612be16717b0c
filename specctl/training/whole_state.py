"""An engine's weights and optimizer state as named tensors, whatever its ZeRO stage and its number of processes.

    weights.<name>                                      the module's state, fp32
    step.<name>  exp_avg.<name>  exp_avg_sq.<name>      AdamW's, of a parameter
    momentum_buffer.<name>                              Muon's

DeepSpeed's own files hold what each process has of a flat buffer, and fit the number of processes that wrote them. Here
each parameter is whole: a state of eight processes can be divided among four.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specctl.training.engine import gathered

WEIGHTS = "weights"
MOMENTS = "exp_avg", "exp_avg_sq"  # of AdamW, beside its step


def collect(engine: Any) -> dict[str, Tensor]:
    """The state on the CPU of the first process, {} in the others (all processes call this)."""
    first = dist.get_rank() == 0
    tensors: dict[str, Tensor] = {}
    with gathered(engine):
        if first:
            tensors = {f"{WEIGHTS}.{name}": _on_cpu(value) for name, value in engine.module.state_dict().items()}
    for name, parameter in _trained(engine.module):  # one at a time: whole moments need not fit on a GPU
        for key, value in _of_optimizer(engine, parameter).items():
            if first:
                tensors[f"{key}.{name}"] = _on_cpu(value)
    return tensors


def restore(engine: Any, tensors: Mapping[str, Tensor]) -> None:
    """Set an engine that has made no step to a state that `collect` has made (all processes call this).

    ValueError where names, shapes, types or buffers are not the engine's own; the engine is as it was then.
    """
    taken: set[str] = set()
    with gathered(engine, changed=True):
        for name, value in engine.module.state_dict().items():
            _take(tensors, f"{WEIGHTS}.{name}", value, taken)
        for name, buffer in engine.module.named_buffers():  # such as the draft vocabulary, which recipe and data make
            if (key := f"{WEIGHTS}.{name}") in taken and not torch.equal(tensors[key], buffer.cpu()):
                raise ValueError(f"{name} is not what recipe and data make of it")
        states = {
            name: _state(tensors, name, parameter, _keys(engine, parameter), taken)
            for name, parameter in _trained(engine.module)
        }
        if extra := tensors.keys() - taken:
            raise ValueError(f"it has {min(extra)!r:.100}, which this run has not")
        stage = engine.zero_optimization_stage()
        if stage and not all(states.values()):
            raise ValueError("the optimizer's state is not there for all parameters")
        engine.module.load_state_dict({name: tensors[f"{WEIGHTS}.{name}"] for name in engine.module.state_dict()})
    if stage == 0:
        _give(engine, states)
    else:
        _divide(engine, states)


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _parts(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Optimizers with parameters of their own: an optimizer, or the halves of `MuonWithAdamW`."""
    return getattr(optimizer, "parts", (optimizer,))


def _of_optimizer(engine: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's state of a parameter, whole; {} of one that had no gradient yet."""
    if engine.zero_optimization_stage() == 0:
        return next((part.state[parameter] for part in _parts(engine.optimizer) if parameter in part.state), {})
    from deepspeed.utils import safe_get_full_optimizer_state

    steps = [state["step"] for state in engine.optimizer.optimizer.state.values()]  # of flat buffers: all the same
    return {"step": steps[0], **{key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS}}


def _keys(engine: Any, parameter: nn.Parameter) -> tuple[str, ...]:
    """Names of what the optimizer keeps of a parameter."""
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
    """A parameter's state, {} where there is none. ValueError where some of it is not there, or of another shape."""
    if not any(f"{key}.{name}" in tensors for key in keys):
        return {}
    scalar = torch.zeros(())
    return {key: _take(tensors, f"{key}.{name}", scalar if key == "step" else parameter, taken) for key in keys}


def _take(tensors: Mapping[str, Tensor], name: str, like: Tensor, taken: set[str]) -> Tensor:
    """The tensor of this name. ValueError where there is none of the shape and type of `like`."""
    value = tensors.get(name)
    if value is None:
        raise ValueError(f"it has no {name}")
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, not {like.dtype} {list(like.shape)}")
    taken.add(name)
    return value


def _give(engine: Any, states: Mapping[str, dict[str, Tensor]]) -> None:
    """Give an undivided optimizer the states by parameter; its options stay the recipe's."""
    named = {id(parameter): states[name] for name, parameter in _trained(engine.module)}
    made = []
    for part in _parts(engine.optimizer):
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        state = {
            place: {key: value.clone() for key, value in named[id(p)].items()}  # or it would be the file, mapped
            for place, p in enumerate(parameters)
            if named[id(p)]
        }
        made.append({"state": state, "param_groups": part.state_dict()["param_groups"]})
    engine.optimizer.load_state_dict({"parts": made} if hasattr(engine.optimizer, "parts") else made[0])


def _divide(engine: Any, states: Mapping[str, dict[str, Tensor]]) -> None:
    """Give each process its part of the states, and of the master weights of the module as it is."""
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
    for flat in flats:  # what a first step would make
        zero.optimizer.state[flat] = {
            "step": step.to(flat.device, copy=True) if options["fused"] else step.clone(),
            **{key: torch.zeros_like(flat) for key in MOMENTS},
        }
    if not whole:
        for group, flat in zip(zero.bit16_groups, flats, strict=True):
            lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)
    for name, parameter in _trained(engine.module):
        for key in MOMENTS:
            if whole:  # safe_set_full_optimizer_state fails where processes do not divide the parameter's size
                safe_set_local_optimizer_state(parameter, _share(states[name][key], parameter), key)
            else:
                safe_set_full_optimizer_state(parameter, states[name][key], key)


def _share(value: Tensor, parameter: Any) -> Tensor:
    """This process' numbers of a parameter that ZeRO 3 has divided, with zeros behind its end."""
    size = parameter.ds_tensor.numel()
    flat = nn.functional.pad(value.flatten(), (0, size * dist.get_world_size() - value.numel()))
    return flat.narrow(0, dist.get_rank() * size, size)
