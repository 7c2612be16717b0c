"""P-EAGLE heads as published, which vLLM reads as EAGLE-3 heads under `parallel_drafting`.

The tensors are EAGLE-3's, with the name `layers.0.*` also for a single layer.
P-EAGLE adds `mask_hidden` [1, 1, taps·H], and often `embed_tokens`, since embeddings are trained.

vLLM takes the mask token from `mask_token_id` or `pard_token`, and feeds one row per draft token. With fewer tokens
than trained depths, drafts are the same, only shorter. The architecture is written as EAGLE-3's: under the method
eagle3, vLLM 0.32 puts "Eagle3" before any other architecture name, even before its own name for P-EAGLE.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specctl.formats import eagle3, llama, serving_commands
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory

MASK, EMBEDDING = "mask_hidden", "embed_tokens.weight"
TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token, in the order in which vLLM looks for them."""
UNUSED = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight$")
DEPTHS = 8
"""Default number of depths if the files do not say how many were trained, from the package `speculators`."""


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The directory of a head for vLLM. Raises CheckpointError if vLLM could not run it."""
    files = eagle3.write(head, facts, tokens, to)
    more = {**depth_key(head), "mask_token_id": head.architecture["mask_token_id"]}
    return Files(files.config | more, tensors(head))


def depth_key(head: Head) -> dict[str, int]:
    """The config key for the number of trained depths."""
    return {"num_depths": head.architecture["depths"]}


def tensors(head: Head) -> dict[str, Tensor]:
    """The head's tensors by their published names."""
    kept = eagle3.without_full_mapping(head)
    return {name.replace("midlayer.", eagle3.FIRST): tensor for name, tensor in kept.items()}


def claims(found: HeadDirectory) -> bool:
    return MASK in found.bare().tensors


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """Read a published head. Raises CheckpointError if our head cannot represent it, or it does not fit the target."""
    return read_parts(found, found.config, eagle3.taps(found, facts), facts)


def read_parts(found: HeadDirectory, config: Mapping[str, Any], taps: tuple[int, ...], facts: TargetFacts) -> Head:
    """Read a head with its Llama keys in `config`, which taps hidden_states `taps`."""
    mask = next((config[key] for key in TOKEN_KEYS if config.get(key) is not None), None)
    if type(mask) is not int or not 0 <= mask < facts.vocab_size:
        right = f"must be a token of target {facts.name}, below {facts.vocab_size}"
        raise found.invalid(TOKEN_KEYS[0], "missing" if mask is None else mask, right)
    renamed = found.bare().tensors
    own: dict[str, Tensor] = {}
    if llama.row_count(found.with_tensors(renamed), EMBEDDING) is not None:
        shipped = renamed[EMBEDDING]
        if facts.embedding is None or not llama.same_matrix(shipped, facts.embedding):
            own[EMBEDDING] = llama.fitted_rows(shipped, facts.vocab_size)
    parts = {name: tensor for name, tensor in renamed.items() if name == MASK} | own
    # Drop hidden_norm of further layers: vLLM creates one per layer, but only the first layer uses it.
    unused = [name for name in renamed if UNUSED.match(name)]
    rest = found.with_tensors(renamed).without({*parts, *unused})
    count = eagle3.layer_count(rest, config, stated=True)
    # Only EAGLE-3 feeds the output of the final norm back.
    head = eagle3.read_layers(rest, {**config, "norm_output": False}, taps, facts)
    shape = head.architecture
    size = shape["hidden_size"]
    more = llama.take_exactly(
        found.with_tensors(parts),
        {
            MASK: tuple(parts[MASK].shape) if MASK in parts else (1, 1, len(taps) * size),
            **({EMBEDDING: (facts.vocab_size, size)} if own else {}),
        },
    )
    if more[MASK].numel() != len(taps) * size:
        raise found.invalid(
            MASK, f"of shape {list(more[MASK].shape)}", f"must have {len(taps) * size} elements", where=found.file
        )
    more[MASK] = more[MASK].reshape(1, 1, -1)
    ours = {"num_layers": count, "depths": depths(found, config), "mask_token_id": mask}
    return Head("peagle", shape | ours | ({"own_embedding": True} if own else {}), head.tensors | more, head.notes)


def depths(found: HeadDirectory, config: Mapping[str, Any]) -> int:
    """Number of tokens that a head drafts in one pass, from its files or the default. CheckpointError if it is no
    number."""
    try:
        proposed = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (LookupError, TypeError):
        proposed = None
    declared = config.get("num_depths") or proposed or DEPTHS
    if type(declared) is not int:
        raise found.invalid("num_depths", declared, "must be the number of tokens that the head drafts in one pass")
    return min(max(declared, 2), 64)


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The command line of vLLM."""
    return serving_commands.serving(to, "eagle3", use, {"parallel_drafting": True})
