"""A datastore into SGLang servers that run, as an external corpus of their method NGRAM: all of them have it, or none.

A corpus is added whole: nothing can be appended to one, and several share what a draft has room for. So the one of
before stays until the new one is there, and goes then. Written after SGLang's sources, as `sglang`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl import progress
from specctl.engines import sglang
from specctl.engines.publication import Served, named
from specctl.engines.records import Call, EngineError, Malformed

if TYPE_CHECKING:
    from specctl.formats.corpus import CorpusTexts

INFO, LIST = Call("/server_info"), Call("/list_external_corpora")
FLAGS = "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16 --speculative-ngram-external-sam-budget 8"
MARK = "@"  # between a datastore's name and the digest of its texts


@dataclass(frozen=True)
class PublishedCorpus:
    """A corpus as a server has it.

    Attributes:
        tokens: as the server counts them; None where it had this corpus already.
        replaced: corpora of the same name that it had before.
    """

    server: str
    corpus: str
    tokens: int | None
    replaced: list[str]


async def publish(places: Sequence[Served], name: str, corpus: CorpusTexts) -> list[PublishedCorpus]:
    """Every server drafts from a corpus, which takes the place of those that had its `name`.

    Raises EngineError: which server does not take it, and why. All have then what they had before.
    """
    digest = hashlib.sha256(corpus.lines.encode()).hexdigest()[:12]
    new = f"{name}{MARK}{digest}"
    there = [await _there(place, new, corpus) for place in places]
    begun: list[Served] = []
    loaded: list[int | None] = []
    try:
        for place, known in zip(places, there, strict=True):
            if new in known:
                loaded.append(None)
                continue
            begun.append(place)
            loaded.append(await _added(place, new, corpus))
    except BaseException as error:  # a signal, too
        left = [place.url for place in begun if not await _removed(place, new)]
        if left and isinstance(error, EngineError):
            raise EngineError(f"{error.message}; {new} may be left in {', '.join(left)}", error.hint) from error
        raise
    done = []
    for place, known, count in zip(places, there, loaded, strict=True):
        olds = [old for old in known if old.startswith(f"{name}{MARK}") and old != new]
        gone = [old for old in olds if await _removed(place, old)]
        if stays := sorted({*olds} - {*gone}):
            progress.warn(f"{place.url} has {new}, and still {', '.join(stays)}, which it did not remove")
        done.append(PublishedCorpus(place.url, new, count, gone))
    return done


async def _there(place: Served, new: str, corpus: CorpusTexts) -> dict[str, int]:
    """Tokens of the corpora that a server has. EngineError where it could not draft from another one."""
    try:
        room = room_of(await place.asked(INFO))
        known = corpora_of(await place.asked(LIST))
    except (EngineError, Malformed) as error:
        raise named(place, error) from error
    used = sum(known.values())
    if new not in known and used + corpus.tokens > room:
        raise EngineError(
            f"{place.url} takes {room} tokens of corpora and has {used}; these are {corpus.tokens} more, and what they "
            "replace goes when they are there",
            f"start it with --speculative-ngram-external-corpus-max-tokens {used + corpus.tokens}, or remove a corpus: "
            "POST /remove_external_corpus",
        )
    return known


async def _added(place: Served, new: str, corpus: CorpusTexts) -> int:
    """Tokens that were loaded. EngineError, also where they are not all."""
    try:
        document = await place.asked(Call("/add_external_corpus", {"corpus_id": new, "documents": corpus.texts}))
        loaded = document["loaded_token_count"]
        if not document["success"] or type(loaded) is not int:
            raise EngineError(f"/add_external_corpus failed: {document['message']}")
        if "truncated" in document["message"]:
            raise EngineError(f"it loaded {loaded} of {corpus.tokens} tokens: {document['message']}")
        return loaded
    except (EngineError, Malformed) as error:
        raise named(place, error) from error
    except (KeyError, TypeError) as error:
        raise EngineError(f"{place.url}: /add_external_corpus does not say what it loaded") from error


async def _removed(place: Served, corpus_id: str) -> bool:
    """Whether a server says that it has removed a corpus."""
    try:
        document = await place.asked(Call("/remove_external_corpus", {"corpus_id": corpus_id}))
    except (EngineError, Malformed):
        return False
    return isinstance(document, dict) and document.get("success") is True


def room_of(info: Any) -> int:
    """Tokens of all corpora that a server takes, by what it says of itself. EngineError where it drafts from none;
    Malformed."""
    try:
        method, budget = info["speculative_algorithm"], info.get("speculative_ngram_external_sam_budget")
        most = info.get("speculative_ngram_external_corpus_max_tokens")
    except (KeyError, TypeError, AttributeError) as error:
        raise Malformed("no speculative_algorithm in what it says of itself") from error
    if method != "NGRAM":
        drafts = f"drafts by {method}" if method else "does not draft"
        raise EngineError(f"it {drafts}, and NGRAM alone draws on corpora", f"start SGLang with {FLAGS}")
    if budget is None or most is None:
        raise EngineError("it knows no external corpora", f"{sglang.VERSION} does")
    if budget < 1:
        raise EngineError("it drafts no tokens from corpora (budget 0)", f"start SGLang with {FLAGS}")
    return int(most)


def corpora_of(document: Any) -> dict[str, int]:
    """Tokens of each corpus. Raises Malformed."""
    try:
        return {str(name): int(count) for name, count in document["corpus_token_counts"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Malformed("no corpus_token_counts in its list of corpora") from error
