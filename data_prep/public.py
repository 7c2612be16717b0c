"""Prompts from the public data set of a domain. Only this module needs a network and the `datasets` package."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from .. import hub
from ..errors import DataError, brief
from .domain import SPLITS, Domain, PublicSet


def load_public(domain: Domain, split: str = "train", limit: int | None = None) -> Iterator[str]:
    """Yield up to `limit` prompts in the order of the data set; rows that give an empty prompt are skipped.

    Raises ValueError for an unknown split. Raises DataError, naming the set, if the set cannot be loaded or lacks a
    column.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    public = domain.public
    where = {key: value for key, value in (("revision", public.revision), ("data_dir", public.data_dir)) if value}
    hint = "the data set needs network access the first time; source=generator does not"
    rows = load_rows(public.id, public.config, public.split[split], hint=hint, **where)
    prompts = (prompt for row in rows if (prompt := to_prompt(domain.public, row)))
    return islice(prompts, limit)


def to_prompt(public: PublicSet, row: Mapping[str, Any]) -> str:
    """Convert a row to a prompt: fill the template, and strip the blank lines that empty columns leave at its ends."""
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
    id: str, config: str | None = None, split: str | None = None, *, prefer: str = "train", hint: str, **where: str
) -> Iterator[Mapping[str, Any]]:
    """Rows of a data set's split. Without `split`: of the first split with a name that begins with `prefer`, such as
    `train_sft`, or of the first split if there is none.

    Raises DataError with `hint`, at once or at a row, if the set cannot be loaded or read; the error names set and
    cause.
    """
    from datasets import load_dataset

    with _naming(id, hint), _offline_if_unreachable():
        found = load_dataset(id, config, split=split, **where)
        if split is None:
            name = next((name for name in found if name.startswith(prefer)), next(iter(found), None))
            found = () if name is None else found[name]
    return _rows(found, id, hint)


@contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Load only from the cache if the hub cannot be reached: `huggingface_hub` would retry for half a minute, and print
    every try."""
    import datasets.config
    from huggingface_hub import constants

    try:
        hub.connect()
    except ConnectionError as error:
        before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        try:
            yield
        except ConnectionError:
            raise error from None
        finally:
            constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
    else:
        yield


def _rows(found: Iterable[Mapping[str, Any]], id: str, hint: str) -> Iterator[Mapping[str, Any]]:
    with _naming(id, hint):
        yield from found


@contextmanager
def _naming(id: str, hint: str) -> Iterator[None]:
    """Replace the many kinds of errors from `datasets` and its readers by DataError."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except StopIteration as error:  # raised by `datasets` if all files of the set are empty
        raise DataError(f"the data set {id} has no rows", hint=hint) from error
    except Exception as error:
        cause: BaseException = error
        while isinstance(cause, DatasetGenerationError) and cause.__cause__ is not None:
            cause = cause.__cause__  # its message says only that an error occurred
        said = brief(" ".join(f"{type(cause).__name__}: {cause}".split()))
        raise DataError(f"cannot load the data set {id}: {said}", hint=hint) from error
