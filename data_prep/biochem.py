"""Biology and chemistry prompts: terms to define, textbook sections to write, exercises to solve."""

from random import Random

from .domain import Domain, PublicSet
from .grammar import articles
from .phrasebook import phrasebook


def _sample(random: Random) -> str:
    kind = random.random()
    section = "terms" if kind < 0.62 else "sections" if kind < 0.82 else "exercises"
    return articles(phrasebook("biochem").write(random, section).replace("\\n", "\n"))


DOMAIN = Domain(
    name="biochem",
    description="anatomy, microbiology and chemistry: terms, textbook sections, exercises",
    public=PublicSet(
        id="allenai/sciq",
        config=None,
        split={"train": "train", "test": "test"},
        columns={"question": "question"},
        template="{question}",
        licence="CC-BY-NC-3.0",
        citation="Welbl et al., Crowdsourcing Multiple Choice Science Questions (2017)",
    ),
    sample=_sample,
)
