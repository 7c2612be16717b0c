"""Medical prompts: short questions about a condition, and research questions to answer from an abstract."""

from random import Random

from .domain import Domain, PublicSet
from .grammar import articles, capitalized, pick, tidy
from .phrasebook import phrasebook

# Draws that the parts of one abstract share: name → rule.
_SHARED = {"p": "patients", "t": "treatment", "o": "outcome", "m": "marker"}


def _abstract(random: Random) -> str:
    book = phrasebook("medical")
    bound = {name: book.grammar.draw(random, rule) for name, rule in _SHARED.items()}

    def write(section: str, least: int, most: int) -> str:
        count = len(book[section])
        chosen = sorted(random.sample(range(count), random.randint(least, most)))  # in the order of the list
        return tidy(" ".join(book.grammar.expand(random, book[section][i], bound) for i in chosen))

    parts = (write("aim", 1, 2), write("methods", 3, 6), write("results", 3, 6))
    labels = pick(random, book["labels"]).split(" | ")
    body = articles("\n".join(f"{label} {part}" for label, part in zip(labels, parts, strict=True)))
    question = capitalized(write("research questions", 1, 1))
    return f"Answer the research question from the abstract.\n\n{body}\n\nQuestion: {question}"


def _sample(random: Random) -> str:
    return _abstract(random) if random.random() < 0.38 else phrasebook("medical").write(random, "questions")


DOMAIN = Domain(
    name="medical",
    description="questions about diseases, and research questions over abstracts",
    public=PublicSet(
        id="qiaojin/PubMedQA",
        config="pqa_labeled",
        split={"train": "train[:90%]", "test": "train[90%:]"},
        columns={"contexts": "context.contexts", "question": "question"},
        template="Answer the research question from the abstract.\n\n{contexts}\n\nQuestion: {question}",
        licence="MIT",
        citation="Jin et al., PubMedQA: A Dataset for Biomedical Research Question Answering (2019)",
    ),
    sample=_sample,
)
