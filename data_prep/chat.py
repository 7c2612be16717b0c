"""Chat prompts: everyday questions and requests, some with a text to work on."""

from random import Random

from .domain import Domain, PublicSet
from .grammar import articles, tidy
from .phrasebook import phrasebook


def _sample(random: Random) -> str:
    kind = random.random()
    section = "questions" if kind < 0.66 else "tasks" if kind < 0.84 else "short tasks"
    text = articles(tidy(phrasebook("chat").write(random, section))).replace("//", "\n\n")
    # People forget the question mark now and then.
    return text[:-1] if text.endswith("?") and random.random() < 0.08 else text


DOMAIN = Domain(
    name="chat",
    description="everyday questions and instructions",
    public=PublicSet(
        id="databricks/databricks-dolly-15k",
        config=None,
        split={"train": "train[:95%]", "test": "train[95%:]"},
        columns={"instruction": "instruction", "context": "context"},
        template="{instruction}\n\n{context}",
        licence="CC-BY-SA-3.0",
        citation="Conover et al., Free Dolly: Introducing the World's First Truly Open Instruction-Tuned LLM (2023)",
    ),
    sample=_sample,
)
