"""Export a fine-tuned MTP layer inside its target's directory, as vLLM and SGLang load it.

The layer's tensors stand in the target's files, under the target's names. An engine is given this directory as the
target, and drafts with its MTP layer. Both engines feed MiMo's layer the target's last state: vLLM before the
final norm, SGLang after it. A layer that was trained for the other side is refused.
"""

import json
import shlex
from dataclasses import replace
from typing import cast

from specctl.decoding.models.loading import model_directory
from specctl.decoding.target import Target
from specctl.drafters.mtp import layouts
from specctl.drafters.mtp.drafter import architecture
from specctl.drafters.mtp.layouts import LAYOUTS, NativeLayer
from specctl.errors import CheckpointError
from specctl.formats import serving_commands
from specctl.formats.head import Deployment, Files, Head, Serving, TargetFacts
from specctl.formats.head_directory import HeadDirectory
from specctl.recipe import DrafterRecipe

METHODS = {"vllm": "mtp", "sglang": "NEXTN"}


def write(head: Head, facts: TargetFacts, tokens: int, to: str) -> Files:
    """The target's directory with the head's tensors.

    Raises CheckpointError if an engine would compute something else.
    """
    shape, layout = head.architecture, LAYOUTS[head.architecture["layout"]]
    if shape["layout"] == "mimo":
        if not shape["qkv_bias"] or shape["qk_norm"]:
            raise CheckpointError(
                f"{serving_commands.VERSIONS[to]} supports MiMo's MTP layer only as Qwen2's: with biases, without "
                "q_norm"
            )
        if shape["normed_features"] != (to == "sglang"):
            side, other = ("after", "true") if to == "sglang" else ("before", "false")
            raise CheckpointError(
                f"{serving_commands.VERSIONS[to]} feeds MiMo's MTP layer the target's state {side} the final norm; "
                "this layer was trained on the other state",
                hint=f"train it with drafter.normed_features={other}",
            )
    base = model_directory(facts.name, facts.revision)
    if base is None:
        raise CheckpointError(f"target {facts.name} is not on this machine", f"run `hf download {facts.name}`")
    return Files({layouts.NORMED: shape["normed_features"]}, layouts.to_target_names(layout, head.tensors), base=base)


def claims(found: HeadDirectory) -> bool:
    return layouts.kind_of(found.tensors) is not None


def read(found: HeadDirectory, facts: TargetFacts) -> Head:
    """Read the MTP layer of a target's directory. Raises CheckpointError if our head cannot represent it."""
    kind = layouts.kind_of(found.tensors)
    if kind is None:
        raise found.invalid("tensors", ", ".join(sorted(found.tensors)[:3]), layouts.WHICH, where=found.file)
    place, normed = str(found.file.parent), found.config.get(layouts.NORMED, LAYOUTS[kind].normed)
    if not isinstance(normed, bool):
        raise found.invalid(layouts.NORMED, normed, "must be true or false")
    return read_layer(found, kind, layouts.to_our_names(LAYOUTS[kind], found.tensors, place), normed, facts)


def read_layer(found: HeadDirectory, kind: str, tensors: dict, normed: bool, facts: TargetFacts) -> Head:
    """A head of a layout from the layer's `tensors`, under our names. Raises CheckpointError if it cannot be ours."""
    native = NativeLayer(str(found.file.parent), kind, {name: tuple(t.shape) for name, t in tensors.items()})
    layouts.check_computable(native, facts.text_config)
    shape = architecture(native, DrafterRecipe(normed_features=normed), cast(Target, facts))
    if not normed:
        norm = found.tensors.get(layouts.FINAL_NORM)
        if norm is None or tuple(norm.shape) != (facts.hidden_size,):
            what = "missing" if norm is None else f"of shape {list(norm.shape)}"
            raise found.invalid(
                layouts.FINAL_NORM, what, "import from the directory of a whole target", where=found.file
            )
        tensors = tensors | {"target_norm": norm}
    return Head("mtp", shape.to_dict(), tensors)


def serving(head: Head, to: str, use: Deployment) -> Serving:
    """The command line of an engine, with the directory itself as the target."""
    note = serving_commands.refusal(to, METHODS[to], use.facts)
    if note is not None:
        return Serving([], [note])
    code = " --trust-remote-code" if getattr(use.facts.text_config, "auto_map", None) else ""
    whole = replace(use, facts=replace(use.facts, name=str(use.place), revision=None))
    found = serving_commands.serving(to, METHODS[to], whole)
    if to == "vllm":
        spec = json.dumps(serving_commands.speculative({"method": METHODS[to]}, use))
        commands = [f"vllm serve {shlex.quote(str(use.place))}{code} --speculative-config {shlex.quote(spec)}"]
        return Serving(commands, found.notes)
    return Serving([command + code for command in found.commands], found.notes)
