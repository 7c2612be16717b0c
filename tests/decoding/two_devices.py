"""Run by test_placement.py in its own process: a model's layers on two simulated devices.

Fake tensors carry a device and refuse operations across devices, like GPUs. Torch without CUDA cannot slice even a fake
CUDA tensor, so this file registers a backend, which would remain for all other tests.
"""

import sys

import torch
from accelerate.utils import send_to_device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM, LlamaConfig

from specctl.decoding.models.hf import HFModel
from specctl.decoding.plan import plan_rows

FIRST, SECOND = "npy:0", "npy:1"


def place(module: torch.nn.Module, device: str) -> None:
    """Move a part of the model, with a hook as in `accelerate`: inputs are moved to the device of the weights."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(parameter.to(device), requires_grad=False)
        for name, buffer in part._buffers.items():
            part._buffers[name] = buffer.to(device)

    def carry(module, args, kwargs):
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=["past_key_values"])

    module.register_forward_pre_hook(carry, with_kwargs=True)


def check(batch: int) -> None:
    config = LlamaConfig(
        vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    whole = AutoModelForCausalLM.from_config(config)
    body = whole.model
    for part in (body.embed_tokens, body.rotary_emb, body.layers[0], body.layers[1]):
        place(part, FIRST)
    for part in (body.layers[2], body.norm, whole.lm_head):
        place(part, SECOND)
    model = HFModel(whole)
    layers = [str(device) for device in model.layer_devices]
    assert layers == [FIRST, FIRST, SECOND], layers
    cache = model.new_cache(batch, 32)
    for base, rows in ((0, 6), (6, 4)):
        plan = plan_rows([base] * batch, rows, device=model.device, dtype=model.dtype)
        tokens = torch.zeros(batch, rows, dtype=torch.long, device=model.device)
        hidden, tapped = model.forward(tokens, cache, plan, (1, 3))
        found = {str(tensor.device) for tensor in (hidden, tapped, model.logits(hidden))}
        assert found == {FIRST}, found
    assert [str(keys.device) for keys in cache.keys] == layers
    cache.compact(0, 6, [1, 2])
    cache.select(torch.arange(1, device=model.device))


_setup_privateuseone_for_python_backend("npy")
made = torch.tensor  # keeps its values for constant folding, which this backend cannot do; shapes are enough here
torch.tensor = lambda data, device=None, dtype=None: torch.zeros(  # type: ignore
    made(data).shape, dtype=dtype or made(data).dtype, device=device
)
with torch.no_grad(), FakeTensorMode():
    for size in (1, 2):
        check(size)
sys.stdout.write("checked")
