"""Export a datastore for engines: vLLM reads its directory, SGLang its documents as texts.

SGLang's method NGRAM drafts from external corpora too, with suffix automata. It reads a corpus from a file at its
start, or takes one while it runs (`engines.corpora`). In both cases it gets texts and tokenizes them itself (0.5.23).
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.decoding.models.loading import servable
from specctl.drafters.retrieval.datastore import LONGEST, Datastore
from specctl.formats.head import Serving, TargetFacts

FILE = "corpus.jsonl"
"""File for --speculative-ngram-external-corpus-path: one text per line, as a JSON string."""
PROPOSER = "specctl.engines.vllm_proposer.TextProposer"
DEFAULT_DRAFT_TOKENS = {"vllm": 7, "sglang": 15}
"""Default number of draft tokens per round: of a chain for vLLM, of a tree for SGLang."""
MOST_TOKENS = 10_000_000  # of all corpora, unless --speculative-ngram-external-corpus-max-tokens says otherwise
OWN_TEXT = (
    "half of the draft tokens come from the corpus (--speculative-ngram-external-sam-budget), the other half from text "
    "that the server has generated"
)


@dataclass(frozen=True)
class CorpusTexts:
    """The documents of a datastore as texts.

    Attributes:
        tokens: number of tokens by the target's tokenizer, plus one separator between texts.
        changed: number of documents with a response that is tokenized differently from the tokens that the target
            wrote.
    """

    texts: list[str]
    tokens: int
    changed: int

    @property
    def lines(self) -> str:
        """Content of the file."""
        return "".join(f"{json.dumps(text, ensure_ascii=False)}\n" for text in self.texts)

    @property
    def notes(self) -> list[str]:
        """Notes for the user."""
        if not self.changed:
            return []
        return [
            f"{self.changed} of {len(self.texts)} responses get different tokens when SGLang tokenizes their "
            "text again, so they are less useful there"
        ]


def corpus_of(store: Datastore, tokenizer: Any) -> CorpusTexts:
    """The texts of a store. The first `LONGEST` tokens of each are context, which may begin within a word."""
    texts, total, changed = [], 0, 0
    for document in store.documents():
        text = tokenizer.decode(document, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        again = tokenizer.encode(text, add_special_tokens=False)
        if not again:
            continue
        response = document[LONGEST:]
        changed += again[len(again) - len(response) :] != response
        texts.append(text)
        total += len(again)
    return CorpusTexts(texts, total + max(len(texts) - 1, 0), changed)


def serving(to: str, place: Path, facts: TargetFacts, tokens: int, corpus: CorpusTexts | None = None) -> Serving:
    """The command line of an engine: for vLLM with the directory `place`, for SGLang with `place` / `FILE`.

    The file holds `corpus`.
    """
    target = shlex.quote(servable(facts.name)) + (
        f" --revision {shlex.quote(facts.revision)}" if facts.revision else ""
    )
    if to == "vllm":
        named = json.dumps({"specctl_drafters": [str(place)]})
        method = json.dumps({"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": tokens})
        command = (
            f"vllm serve {target} --additional-config {shlex.quote(named)} --speculative-config {shlex.quote(method)}"
        )
        install = f"pip install --no-deps {shlex.quote(str(checkout()))}"
        return Serving([command], [f"vLLM needs specctl in its environment: {install}"])
    assert corpus is not None
    nodes = tokens + 1  # including the root
    most = f" --speculative-ngram-external-corpus-max-tokens {corpus.tokens}" if corpus.tokens > MOST_TOKENS else ""
    command = (
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm NGRAM "
        f"--speculative-num-draft-tokens {nodes} --speculative-ngram-external-sam-budget {max(tokens // 2, 1)} "
        f"--speculative-ngram-external-corpus-path {shlex.quote(str(place / FILE))}{most}"
    )
    return Serving([command], [OWN_TEXT, *corpus.notes])


def checkout() -> Path:
    """Directory of this package's source, or a placeholder if it was installed from a wheel.

    The package index has another project under our name, so its name is no argument for pip.
    """
    root = Path(__file__).parents[2]
    return root if (root / "pyproject.toml").is_file() else Path("SPECCTL-CHECKOUT")
