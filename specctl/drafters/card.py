"""Model cards (README.md) of drafter directories and of exports."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specctl.decoding.models.loading import is_hub_id

LIBRARIES = {"hf": "transformers", "speculators": "speculators", "llama.cpp": "gguf"}  # the hub's names, by reader
LENGTHS = {
    "mat": "Tokens per pass of the target (mat), decoded greedily by `specctl train-drafter`",
    "expected_mat": "Tokens per pass of the target, estimated from held-out responses and not measured (expected mat)",
}
OWN = "specctl"
"""Reader of our own directories."""
LEFT_OUT = {*LENGTHS, "prompts", "licence"}  # "prompts" holds hundreds of numbers; the license has its own sentence


def model_card(
    name: str, config: dict[str, Any], info: dict[str, Any], reader: str = OWN, commands: Sequence[str] | None = None
) -> str:
    """Text of a drafter's README.md: its description, target, acceptance length and usage.

    `config`, `info`: contents of config.json and drafter.json. `reader`: the engine or repository that reads the
    directory. `commands`: shell commands that use the directory; by default `specctl generate`. A directory of this
    machine as the target is shown by its last part.
    """
    target, family = config.get("target", {}), config.get("family")
    path = str(target.get("name"))
    base = shown_name(path)
    if commands is None:
        commands = [f'specctl generate "your prompt" --target {base} --drafter PATH']
    licence = str(info.get("licence", ""))
    head = {
        "license": licence if licence and " " not in licence else None,  # the hub takes identifiers only
        "base_model": path if is_hub_id(path) else None,
        "library_name": OWN if reader == OWN else LIBRARIES.get(reader),
        "pipeline_tag": "text-generation",
    }
    # Every JSON scalar is a valid YAML scalar, already quoted if necessary.
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items() if value)
    tags = "".join(f"- {tag}\n" for tag in dict.fromkeys(["speculative-decoding", family, reader, OWN]))
    facts = "".join(
        f"- {key}: {json.dumps(value, default=str)}\n" for key, value in info.items() if key not in LEFT_OUT
    )
    usage = "\n".join(commands)
    adapters = [one and f"its adapter `{Path(one).name}`" for one in adapters_of(target).values()]
    made_for = f" and {' or '.join(one or 'no adapter' for one in adapters)}" if any(adapters) else ""
    made_for += "" if reader == OWN else f", in the format of {reader}"
    return (
        f"---\n{front}tags:\n{tags}---\n\n# {name}\n\n"
        f"A draft model of family `{family}` for speculative decoding with `{base}`{made_for}. "
        f"The target has hidden size {target.get('hidden_size')}, {target.get('num_layers')} layers and vocabulary "
        f"{target.get('vocab_hash')}. The drafter changes how fast the target writes, not what it writes.\n\n"
        + "".join(_table(what, info.get(key) or {}, key) for key, what in LENGTHS.items())
        + (f"```\n{usage}\n```\n\n" if commands else "")
        + (f"Training:\n\n{facts}\n" if facts else "")
        + ("" if head["license"] else "The license is that of the target, unless the training data ask for more.\n")
    )


def shown_name(target: str) -> str:
    """Name of a target without the directories of this machine."""
    return target if is_hub_id(target) else Path(target).name


def adapters_of(identity: Mapping[str, Any]) -> dict[str | None, str | None]:
    """Directories of the adapters in a target's `identity` by digest, with None for the target without one."""
    listed = identity.get("adapters")
    pairs = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    read = [[one.get(key) for key in ("adapter_weights", "adapter")] for one in pairs or [identity]]
    return {digest and str(digest): name and str(name) for digest, name in read}


def _table(title: str, lengths: dict[str, float], key: str) -> str:
    rows = "".join(f"| {domain} | {value:.2f} |\n" for domain, value in lengths.items())
    return f"{title}:\n\n| prompts | {key.replace('_', ' ')} |\n|---|---|\n{rows}\n" if rows else ""
