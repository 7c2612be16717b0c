"""Run by test_parallel.py under torchrun: answers of sliced targets, and of processes that diverge."""

import json
import sys

import torch

from specctl import processes
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import load_target
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.text.lookup import Lookup
from specctl.drafters.tree import TreeShape
from specctl.errors import SpecctlError
from tests.lossless.drafters import constant
from tests.toys.decoding import decode

PROMPTS = [[(7 * i) % 40 + 100 for i in range(30)], [(5 * i) % 90 + 50 for i in range(9)]]


def eagle3(target):
    """A random head with mostly wrong trees."""
    torch.manual_seed(0)
    config = Eagle3Config(
        hidden_size=target.hidden_size, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16,
        vocab_size=target.vocab_size, draft_vocab_size=500, taps=(0, 1, 3), rms_norm_eps=1e-5, rope_theta=10000.0,
        max_position_embeddings=2048,
    )  # fmt: skip
    return Eagle3Drafter(Eagle3Head(config, 3 * torch.arange(500)), target, TreeShape(3, 2, 7, 2, 0.0))


def answers(target):
    """Texts, plain and with drafters, logits, features, and sizes of a target."""
    drafters = {"plain": None, "eagle3": eagle3(target), "lookup": Lookup()}
    texts = {
        f"{name} at {sampling.temperature}": [
            decoded.output_ids
            for decoded in decode(
                target, PROMPTS, sampling=sampling, max_new_tokens=16, seeds=[3, 4], drafter=drafter, slots=slots
            )
        ]
        for name, drafter in drafters.items()
        for sampling, slots in ((GREEDY, None), (Sampling(0.8, 40, 0.9), 1))
    }
    cache = target.model.new_cache(2, 40)
    logits, _, tapped = target.prefill(PROMPTS, cache, (1, 3))
    layers = target.model.layers
    weights = [matrix.weight.numel() for layer in layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return {
        "texts": texts,
        "logits": logits.tolist(),
        "tapped": tapped[0].tolist(),
        "head": target.head_weight[::97].tolist(),
        "weights": sum(weights),
        "cache": cache.store.numel(),
    }


def main(directories, out):
    made = {}
    for directory in directories:
        target = load_target(directory, device="cpu", dtype="fp32", tensor_parallel=2)
        made[directory] = answers(target)
    leads = processes.broadcast_value(torch.distributed.get_rank()) == torch.distributed.get_rank()
    made["agreed"] = processes.broadcast_value("the first" if leads else "the second")
    own = constant([5, 6] if leads else [5, 7])
    try:
        decode(target, PROMPTS, sampling=GREEDY, max_new_tokens=8, seeds=[0, 0], drafter=own)
    except SpecctlError as error:
        made["drafts"] = error.message
    try:
        decode(target, PROMPTS, sampling=Sampling(5.0, 0, 1.0), max_new_tokens=8, seeds=[leads, 0])
    except SpecctlError as error:
        made["texts"] = error.message
    if processes.is_follower():
        made["follows"] = True
    with open(f"{out}.{torch.distributed.get_rank()}", "w") as file:
        json.dump(made, file)


if __name__ == "__main__":
    main(sys.argv[2:], sys.argv[1])
