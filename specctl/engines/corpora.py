"""Publish a datastore to all given SGLang servers or to none, as an external corpus of their method NGRAM.

SGLang adds a corpus whole and cannot append. Several corpora share the token budget of a draft. The previous corpus
therefore stays until the new one is loaded, and is then removed. Written from SGLang's sources, as the module `sglang`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specctl import progress
from specctl.engines import sglang
from specctl.engines.publication import PublicationServer, with_address
from specctl.engines.records import AdminCall, EngineError, MalformedResponse, parsing

if TYPE_CHECKING:
    from specctl.formats.corpus import CorpusTexts

INFO, LIST = AdminCall("/server_info"), AdminCall("/list_external_corpora")
FLAGS = "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16 --speculative-ngram-external-sam-budget 8"
MARK = "@"  # between a datastore's name and the digest of its texts


@dataclass(frozen=True)
class PublishedCorpus:
    """A corpus that a server has loaded.

    Attributes:
        tokens: number of tokens that the server counted, or None if it had this corpus already.
        replaced: earlier corpora of the same name, which were removed.
    """

    server: str
    corpus: str
    tokens: int | None
    replaced: list[str]


async def publish(places: Sequence[PublicationServer], name: str, corpus: CorpusTexts) -> list[PublishedCorpus]:
    """Load a corpus into every server, in place of earlier corpora with this `name`.

    Raises EngineError, which tells the server that rejected it, and why. All servers then have their previous corpora.
    """
    digest = hashlib.sha256(corpus.lines.encode()).hexdigest()[:12]
    new = f"{name}{MARK}{digest}"
    there = [await _loaded_corpora(place, new, corpus) for place in places]
    begun: list[PublicationServer] = []
    loaded: list[int | None] = []
    try:
        for place, known in zip(places, there, strict=True):
            if new in known:
                loaded.append(None)
                continue
            begun.append(place)
            loaded.append(await _add(place, new, corpus))
    except BaseException as error:  # also after a signal
        left = [place.url for place in begun if not await _remove(place, new)]
        if left and isinstance(error, EngineError):
            raise EngineError(f"{error.message}; {new} may be left in {', '.join(left)}", error.hint) from error
        raise
    done = []
    for place, known, count in zip(places, there, loaded, strict=True):
        earlier = [corpus for corpus in known if corpus.startswith(f"{name}{MARK}") and corpus != new]
        removed = [corpus for corpus in earlier if await _remove(place, corpus)]
        if stays := sorted({*earlier} - {*removed}):
            progress.warn(f"{place.url} has {new}, but still has {', '.join(stays)}, which it did not remove")
        done.append(PublishedCorpus(place.url, new, count, removed))
    return done


async def _loaded_corpora(place: PublicationServer, new: str, corpus: CorpusTexts) -> dict[str, int]:
    """Token counts of the corpora on a server, by name. Raises EngineError if the new one cannot be added."""
    try:
        room = max_corpus_tokens(await place.call(INFO))
        corpora = await place.call(LIST)
        with parsing("corpus_token_counts in its list of corpora"):
            known = {str(name): int(count) for name, count in corpora["corpus_token_counts"].items()}
    except (EngineError, MalformedResponse) as error:
        raise with_address(place, error) from error
    used = sum(known.values())
    if new not in known and used + corpus.tokens > room:
        raise EngineError(
            f"{place.url} has room for {room} tokens of corpora and holds {used}; this corpus adds "
            f"{corpus.tokens}, and the corpus that it replaces is removed only afterwards",
            f"start it with --speculative-ngram-external-corpus-max-tokens {used + corpus.tokens}, or remove a corpus: "
            "POST /remove_external_corpus",
        )
    return known


async def _add(place: PublicationServer, new: str, corpus: CorpusTexts) -> int:
    """Add a corpus and return the number of tokens loaded. Raises EngineError, also if the corpus was truncated."""
    try:
        document = await place.call(AdminCall("/add_external_corpus", {"corpus_id": new, "documents": corpus.texts}))
        loaded = document["loaded_token_count"]
        if not document["success"] or type(loaded) is not int:
            raise EngineError(f"/add_external_corpus failed: {document['message']}")
        if "truncated" in document["message"]:
            raise EngineError(f"it loaded only {loaded} of {corpus.tokens} tokens: {document['message']}")
        return loaded
    except (EngineError, MalformedResponse) as error:
        raise with_address(place, error) from error
    except (KeyError, TypeError) as error:
        raise EngineError(f"{place.url}: /add_external_corpus does not report how many tokens it loaded") from error


async def _remove(place: PublicationServer, corpus_id: str) -> bool:
    """Remove a corpus. Returns whether the server confirms the removal."""
    try:
        document = await place.call(AdminCall("/remove_external_corpus", {"corpus_id": corpus_id}))
    except (EngineError, MalformedResponse):
        return False
    return isinstance(document, dict) and document.get("success") is True


def max_corpus_tokens(info: Any) -> int:
    """Number of tokens that all corpora of a server may have together, from its server info.

    Raises EngineError if the server does not draft from corpora; MalformedResponse.
    """
    with parsing("speculative_algorithm in its server info"):
        method, budget = info["speculative_algorithm"], info.get("speculative_ngram_external_sam_budget")
        most = info.get("speculative_ngram_external_corpus_max_tokens")
    if method != "NGRAM":
        drafts = f"drafts by {method}" if method else "does not draft"
        raise EngineError(f"it {drafts}, but only NGRAM uses corpora", f"start SGLang with {FLAGS}")
    if budget is None or most is None:
        raise EngineError("it does not support external corpora", f"{sglang.VERSION} does")
    with parsing("number of tokens in its server info"):
        budget, most = int(budget), int(most)
    if budget < 1:
        raise EngineError("it does not draft from corpora (budget 0)", f"start SGLang with {FLAGS}")
    return most
