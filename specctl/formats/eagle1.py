"""EAGLE-1 heads: fc [H, 2H] on cat(embedding, feature), layers.0.* without an input norm, no final norm, no lm_head.

vLLM wants the architecture LlamaForCausalLM and does not know fc.bias. SGLang wants LlamaForCausalLMEagle with an
fc.bias (of zeros). The reference code (SafeAILab/EAGLE) has the bias unless config.json says `bias: false`.
"""

import torch

from specctl.formats import llama, serving_commands
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

METHODS = {"vllm": "eagle", "sglang": "EAGLE"}


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of a head, for SGLang or for the others."""
    weight, sglang = head.tensors["fc.weight"], to == "sglang"
    config = {
        "architectures": ["LlamaForCausalLMEagle" if sglang else "LlamaForCausalLM"],
        **llama.write_config(head.architecture, facts, weight.dtype),
    }
    # SGLang always creates an fc.bias. A bias missing in the file would stay uninitialized memory.
    bias = {"fc.bias": torch.zeros(len(weight), dtype=weight.dtype)} if sglang else {}
    return Files(config, head.tensors | bias)


def claims(found: HeadDirectory) -> bool:
    fc = found.bare().tensors.get("fc.weight")
    return fc is not None and fc.dim() == 2 and fc.shape[1] == 2 * fc.shape[0]


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """A published head. Raises CheckpointError if ours cannot represent it, for example a bias that is not zero."""
    shape = llama.read_config(found, found.config, facts)
    notes = llama.check_vocabulary(found, found.config["vocab_size"], facts)
    copies = {"embed_tokens.weight": facts.embedding, "lm_head.weight": facts.head_weight}
    found = llama.without_copies(found.bare(), facts, copies)
    size = shape["hidden_size"]
    layer = llama.layer_shapes(shape, size)
    tensors = llama.take_exactly(
        found, {"fc.weight": (size, 2 * size), **{f"layers.0.{name}": s for name, s in layer.items()}}
    )
    whole = {"draft_vocab_size": facts.vocab_size, "taps": [facts.num_layers]}
    return Head("eagle", shape | whole, tensors, tuple(notes))


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The command line of an engine, or the line of Python for the reference repository."""
    if to == "eagle":
        return serving_commands.eagle_repository(use, eagle3=False)
    return serving_commands.serving(to, METHODS[to], use)
