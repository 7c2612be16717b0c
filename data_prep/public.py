"""Prompts from the public data set of a domain. The only part that needs a network and the `datasets` package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ..errors import DataError
from .domain import SPLITS, Domain, PublicSet


def load_public(domain: Domain, split: str = "train", limit: int | None = None) -> Iterator[str]:
    """Yields up to `limit` prompts in the order of the data set; rows whose template comes out empty are skipped.

    Raises ValueError for an unknown split; DataError when the set cannot be loaded or lacks a column, naming the set.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    rows = _load(domain.public, split)
    prompts = (prompt for row in rows if (prompt := to_prompt(domain.public, row)))
    return islice(prompts, limit)


def to_prompt(public: PublicSet, row: Mapping[str, Any]) -> str:
    """One row as a prompt: the template over its columns, without the blank lines that empty columns leave."""
    return public.template.format(**{name: _column(public, row, path) for name, path in public.columns.items()}).strip()


def _column(public: PublicSet, row: Mapping[str, Any], path: str) -> str:
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise DataError(f"{public.id}: no column {path!r}; this row has {', '.join(map(str, row))}")
        value = value[key]
    if value is None:
        return ""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _load(public: PublicSet, split: str) -> Iterator[Mapping[str, Any]]:
    from datasets import load_dataset

    where = {key: value for key, value in (("revision", public.revision), ("data_dir", public.data_dir)) if value}
    try:
        return iter(load_dataset(public.id, public.config, split=public.split[split], **where))
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"cannot load the public data set {public.id}: {error}",
            hint="it needs a network once; source=generator works without one",
        ) from error
