"""Prompts from the public data set of a domain. The only part that needs a network and the `datasets` package."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from ..errors import DataError, brief
from .domain import SPLITS, Domain, PublicSet


def load_public(domain: Domain, split: str = "train", limit: int | None = None) -> Iterator[str]:
    """Yields up to `limit` prompts in the order of the data set; rows whose template comes out empty are skipped.

    Raises ValueError for an unknown split; DataError when the set cannot be loaded or lacks a column, naming the set.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    public = domain.public
    where = {key: value for key, value in (("revision", public.revision), ("data_dir", public.data_dir)) if value}
    hint = "it needs a network once; source=generator works without one"
    rows = load_rows(public.id, public.config, public.split[split], hint=hint, **where)
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


def load_rows(
    id: str, config: str | None = None, split: str | None = None, *, hint: str, **where: str
) -> Iterator[Mapping[str, Any]]:
    """Rows of a data set's split; without `split`, of its test split if it has one, or of its first.

    Raises DataError with `hint`, here or at a row, when the set cannot be loaded or read, naming set and cause.
    """
    from datasets import load_dataset

    with _naming(id, hint):
        found = load_dataset(id, config, split=split, **where)
        if split is None:
            found = found["test"] if "test" in found else next(iter(found.values()), ())
    return _rows(found, id, hint)


def _rows(found: Iterable[Mapping[str, Any]], id: str, hint: str) -> Iterator[Mapping[str, Any]]:
    with _naming(id, hint):
        yield from found


@contextmanager
def _naming(id: str, hint: str) -> Iterator[None]:
    """DataError in place of what `datasets` and the readers below it raise, of many kinds."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except StopIteration as error:  # by which `datasets` says that all of its files are empty
        raise DataError(f"the data set {id} has no rows", hint=hint) from error
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, DatasetGenerationError) and cause.__cause__ is not None:
            cause = cause.__cause__  # its own message is that "an error occurred"
        said = brief(" ".join(f"{type(cause).__name__}: {cause}".split()))
        raise DataError(f"cannot load the data set {id}: {said}", hint=hint) from error
