"""The result of `distill`, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DistillResult:
    """The result document of `distill`; counts are those of this writer's part (`--shard i/n`) of the directory."""

    domain: str
    prompts: int
    responses: int
    response_tokens: int
    tokens_per_s: float  # of this run, prefill included, loading and rendering not
    rejected: int
    left_out: int  # prompts that are repeated, excluded, or nearly so
    dropped: int  # responses
    shards: int
    output: str


def label(domains: list[str]) -> str:
    """The name of one or several domains distilled together: `sql`, `sql+math`."""
    return "+".join(domains)


def default_output(domains: list[str]) -> Path:
    """./distilled/<domain>"""
    return Path("distilled") / label(domains)
