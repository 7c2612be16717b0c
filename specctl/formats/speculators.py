"""The `speculators` format of EAGLE-3 heads (vllm-project/speculators): layers.0.*, the Llama keys apart from the rest.

Its layer ids are indices of hidden_states, as vLLM's. Where `norm_before_residual` is missing, vLLM takes it for true.
By default the package trains heads with three of EAGLE-3.1's norms (all but `fc_norm`) and a window of 2,048 tokens.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from specctl.formats import eagle3_raw, engines, llama
from specctl.formats.foreign import Foreign
from specctl.formats.head import Files, Head, Serving, TargetFacts

VERSION = "0.9.0"  # of the package whose classes these keys were read from
TYPE = "speculators_model_type"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # in the order of the package's own files


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of a head that is to draft `tokens` a round."""
    eagle3_raw.check_taps(head, facts)
    taps = list(head.architecture["taps"])
    layer = llama.write_config(head.architecture, facts, head.tensors["fc.weight"].dtype)
    layer |= eagle3_raw.window_keys(head)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3DraftModel"],
        TYPE: "eagle3",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": facts.name, "architectures": list(facts.architectures)},
        },
        **{key: head.architecture.get(key, False) for key in NORMS},
        "draft_vocab_size": head.architecture["draft_vocab_size"],
        "target_hidden_size": facts.hidden_size,
        eagle3_raw.LAYERS: taps,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
        "transformer_layer_config": layer,
    }
    tensors = eagle3_raw.without_mapping_of_all(head)
    return Files(config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()})


def claims(found: Foreign) -> bool:
    return TYPE in found.config


def read(found: Foreign, facts: TargetFacts) -> Head:
    """A head of the type eagle3. CheckpointError where ours cannot represent it."""
    config = found.config
    if config.get(TYPE) != "eagle3":
        raise found.refuse(TYPE, repr(config.get(TYPE)), "only eagle3 can be imported in this format")
    if "norm_before_residual" not in config:
        right = "true or false, written out: vLLM takes a missing one for true, the package for false"
        raise found.refuse("norm_before_residual", "missing", right)
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise found.refuse("transformer_layer_config", layer, "a Llama configuration")
    verifier_copies = ("verifier_lm_head.weight", "verifier_norm.weight")
    kept = {name: tensor for name, tensor in found.tensors.items() if name not in verifier_copies}
    # Flags among the layer's keys do not count: vLLM overwrites them, the package reads its own.
    flags = {key: config.get(key) for key in (*NORMS, "use_aux_norm", "target_hidden_size")}
    llama.check_types(found, config)
    taps = tuple(config.get(eagle3_raw.LAYERS) or facts.default_taps)
    return eagle3_raw.read_parts(found.renamed(kept), {**layer, **flags, "eagle_config": None}, taps, facts)


def serving(to: str, place: Path, facts: TargetFacts, tokens: int) -> Serving:
    """vLLM's command lines: the target with the head, and the head, which names its target."""
    found = engines.serving("vllm", "eagle3", place, facts, tokens)
    # vLLM refuses a verifier that is a local path when such a directory is served by itself.
    if found.commands and not Path(facts.name).is_dir():
        found.commands.append(f"vllm serve {shlex.quote(str(place))}")
    return found
