"""Write the model card (README.md) of a drafter directory."""

from __future__ import annotations

import json
from typing import Any


def model_card(name: str, config: dict[str, Any], info: dict[str, Any]) -> str:
    """Text of a drafter's README.md: its description, target, acceptance length and usage."""
    target = config.get("target", {})
    head = {"license": info.get("licence"), "base_model": target.get("name"), "library_name": "specctl"}
    # Every JSON scalar is a valid YAML scalar, already quoted if necessary.
    front = "".join(f"{key}: {json.dumps(value)}\n" for key, value in head.items() if value)
    lengths = {
        "mat": "Tokens per target pass (mat)",
        "expected_mat": "Tokens per target pass, estimated from held-out responses and not measured (expected mat)",
    }
    apart = {*lengths, "prompts"}  # "prompts" is left out: it holds hundreds of numbers
    facts = "".join(f"- {key}: {json.dumps(value, default=str)}\n" for key, value in info.items() if key not in apart)
    tables = ""
    for key, what in lengths.items():
        rows = "".join(f"| {domain} | {value:.2f} |\n" for domain, value in (info.get(key) or {}).items())
        tables += f"{what}:\n\n| domain | {key.replace('_', ' ')} |\n|---|---|\n{rows}\n" if rows else ""
    return (
        f"---\n{front}tags:\n- speculative-decoding\n---\n\n"
        f"# {name}\n\n"
        f"A draft head of family `{config.get('family')}` for `{target.get('name')}` "
        f"(hidden size {target.get('hidden_size')}, {target.get('num_layers')} layers, "
        f"vocabulary {target.get('vocab_hash')}). It changes how fast the target writes, not what it writes.\n\n"
        f"{facts}\n"
        + tables
        + f'```\nspecctl generate "your prompt" --target {target.get("name")} --drafter PATH\n```\n'
    )
