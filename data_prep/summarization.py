"""Summarization prompts: paper abstracts to put in one sentence, and conversations to put in a clinical note."""

from random import Random

from .domain import Domain, PublicSet
from .grammar import articles, capitalized, pick, tidy
from .phrasebook import phrasebook

# Draws that the parts of one abstract share: name → rule.
_SHARED = {"m": "method", "p": "problem", "k": "model", "name": "name"}
# Parts of an abstract, each with its least and most number of sentences.
_PLAN = (("context", 1, 4), ("proposal", 1, 2), ("detail", 1, 4), ("outcome", 2, 4))


def _abstract(random: Random) -> str:
    book = phrasebook("abstracts")
    bound = {name: book.grammar.draw(random, rule) for name, rule in _SHARED.items()}
    chosen = [random.sample(book[section], random.randint(least, most)) for section, least, most in _PLAN]
    body = " ".join(book.grammar.expand(random, template, bound) for part in chosen for template in part)
    return f"Summarize this paper abstract in one sentence.\n\n{articles(tidy(body))}"


def _dialogue(random: Random) -> str:
    """Write a conversation: an optional opening, some exchanges of its section, and an optional closing."""
    book = phrasebook("dialogues")
    weights, sections = zip(*(line.split(" ", 1) for line in book["weights"]), strict=True)
    section = random.choices(sections, tuple(map(int, weights)))[0]
    pool = book[section if section in book.sections else "results"]
    chosen = random.sample(pool, min(len(pool), 1 + int(random.random() ** 2 * 11)))
    if random.random() < 0.4:
        chosen.insert(0, pick(random, book["openings"]))
    if random.random() < 0.4:
        chosen.append(pick(random, book["closings"]))
    turns: list[str] = []
    for exchange in chosen:
        doctor, patient = articles(tidy(book.grammar.expand(random, exchange))).split(" / ")
        turns += (f"Doctor: {doctor}", f"Patient: {capitalized(patient)}")
    return f'Write the "{section}" section of a clinical note from this conversation.\n\n' + "\n".join(turns)


def _sample(random: Random) -> str:
    return _abstract(random) if random.random() < 0.45 else _dialogue(random)


DOMAIN = Domain(
    name="summarization",
    description="paper abstracts in one sentence, conversations as sections of a clinical note",
    public=PublicSet(
        id="allenai/scitldr",
        config=None,
        split={"train": "train", "test": "test"},
        columns={"abstract": "source"},
        template="Summarize this paper abstract in one sentence.\n\n{abstract}",
        licence="Apache-2.0",
        citation="Cachola et al., TLDR: Extreme Summarization of Scientific Documents (2020)",
        revision="refs/convert/parquet",
        data_dir="Abstract",
    ),
    sample=_sample,
)
