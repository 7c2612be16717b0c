"""Result document of `distill`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DistillResult:
    """Result document of `distill`; the counts cover this writer's part (`--shard i/n`) of the directory."""

    domain: str
    prompts: int
    responses: int
    response_tokens: int
    tokens_per_s: float  # of this run; includes prefill, excludes loading and rendering
    rejected: int
    left_out: int  # prompts: repeated or excluded
    dropped: int  # responses that the filters dropped
    shards: int
    output: str


def label(domains: list[str]) -> str:
    """Name of one or several domains that are distilled together: `sql`, `sql+math`."""
    return "+".join(domains)
