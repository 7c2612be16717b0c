"""Math: short stories with a number for an answer."""

from __future__ import annotations

from random import Random

from .domain import Domain, PublicSet
from .grammar import Grammar, articles, lines, pick, tidy
from .lexicon import MEN, WOMEN
from .math_chains import CHAINS
from .math_stories import RULES, STORIES

_WOMAN = {"hero": (*WOMEN, *WOMEN, "Mrs. {surname}"), "she": ("she",), "her": ("her",), "him": ("her",)}
_MAN = {"hero": (*MEN, *MEN, "Mr. {surname}", "Farmer {man}"), "she": ("he",), "her": ("his",), "him": ("him",)}
_GRAMMARS = (Grammar(RULES, _WOMAN), Grammar(RULES, _MAN))

# A first sentence that sets the scene and adds nothing to count; {n} is the hero, where the story has one.
_SCENES = lines("""
    It is {day} morning.
    It was a sunny {day} in {month}.
    School starts <soon|next week|in {month}>.
    The {store} in town is having a sale.
    Summer vacation has just begun.
    The {group} is getting ready for {event}.
    The year is almost over.
    Winter is coming.
""")
_HERO_SCENES = lines("""
    {n} loves {sport}.
    It is {n}'s birthday next week.
    {n} lives in {city} with {her} {kin}.
    {n} is getting ready for {event}.
    {n} likes to help {her} {kin}.
    {n} and {her} {kin} have a plan for {the=event}.
    {n} is always busy <on {day}|in {month}|before {the=event}>.
    {n} wants to be a {job} one day.
    {n} has been looking forward to {the=event} for {small} weeks.
""")


def _chain(random: Random, grammar: Grammar, bound: dict[str, str]) -> str:
    chain = pick(random, CHAINS)
    events = random.sample(chain.events, random.randint(chain.least, chain.most))
    parts = (pick(random, chain.openings), *events, pick(random, chain.questions))
    return " ".join(_sentence(grammar.expand(random, part, bound)) for part in parts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sample(random: Random) -> str:
    grammar = pick(random, _GRAMMARS)
    bound: dict[str, str] = {}
    if random.random() < 0.6:
        story = _chain(random, grammar, bound)
    else:
        story = grammar.expand(random, pick(random, STORIES), bound)
    if random.random() < 0.35:
        scene = pick(random, _HERO_SCENES if "n" in bound and random.random() < 0.8 else _SCENES)
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
