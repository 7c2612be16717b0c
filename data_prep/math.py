"""Math prompts: short stories with a number for an answer, told at once or in several steps."""

from functools import cache
from random import Random

from .domain import Domain, PublicSet
from .grammar import Grammar, articles, capitalized, pick, tidy
from .phrasebook import phrasebook

# Subjects of problems in several steps, each with its least and most number of events.
_CHAINS = (
    ("collection", 2, 5),
    ("shopping", 2, 5),
    ("job", 2, 4),
    ("comparison", 3, 5),
    ("training", 3, 5),
    ("crowd", 2, 4),
    ("trip", 2, 5),
    ("business", 2, 5),
)


@cache
def _grammars() -> tuple[Grammar, Grammar]:
    """Grammars of stories about a woman and about a man, in which hero and pronouns agree."""
    rules = phrasebook("math_stories").grammar.rules
    women, men = rules["woman"], rules["man"]
    she = {"hero": (*women, *women, "Mrs. {surname}"), "she": ("she",), "her": ("her",), "him": ("her",)}
    he = {"hero": (*men, *men, "Mr. {surname}", "Farmer {man}"), "she": ("he",), "her": ("his",), "him": ("him",)}
    return Grammar(rules, she), Grammar(rules, he)


def _chain(random: Random, grammar: Grammar, bound: dict[str, str]) -> str:
    """Write an opening, a few events in any order, and a question. They share their remembered draws."""
    book = phrasebook("math_chains")
    subject, least, most = pick(random, _CHAINS)
    events = random.sample(book[f"{subject} events"], random.randint(least, most))
    parts = (pick(random, book[f"{subject} openings"]), *events, pick(random, book[f"{subject} questions"]))
    return " ".join(capitalized(grammar.expand(random, part, bound)) for part in parts)


def _sample(random: Random) -> str:
    book = phrasebook("math_stories")
    grammar = pick(random, _grammars())
    bound: dict[str, str] = {}
    if random.random() < 0.6:
        story = _chain(random, grammar, bound)
    else:
        story = grammar.expand(random, pick(random, book["stories"]), bound)
    if random.random() < 0.35:
        scene = pick(random, book["hero scenes" if "n" in bound and random.random() < 0.8 else "scenes"])
        story = f"{grammar.expand(random, scene, bound)} {story}"
    return articles(tidy(story))


DOMAIN = Domain(
    name="math",
    description="grade-school word problems",
    public=PublicSet(
        id="openai/gsm8k",
        config="main",
        split={"train": "train", "test": "test"},
        columns={"question": "question"},
        template="{question}",
        licence="MIT",
        citation="Cobbe et al., Training Verifiers to Solve Math Word Problems (2021)",
    ),
    sample=_sample,
)
