"""Perturbed prompts, as people also write them: typing errors, lost words, paraphrases, added instructions, stray text.

A classifier of prompts loses accuracy on these, while full-information selection does not (HedgeSpec table 4, MetaSD
tables 6 and 8). Every function takes a strength in [0, 1]; at 0 the text is unchanged.
"""

import re
import string
from collections.abc import Sequence
from random import Random

from specctl.lab.train_router.recipe import Perturbation

BEFORE = [
    "You are a helpful assistant.",
    "Please answer the following.",
    "Read the text below carefully before you respond.",
    "I need some help with this.",
]
AFTER = [
    "Think step by step.",
    "Keep the answer short and clear.",
    "Please answer in English.",
    "Thank you very much in advance!",
]
PHRASES = {
    "write": ["compose", "produce"],
    "answer": ["respond to", "resolve"],
    "answers": ["responds to", "resolves"],
    "find": ["determine", "work out"],
    "calculate": ["compute", "work out"],
    "explain": ["clarify", "shed light on"],
    "describe": ["give an account of", "tell me about"],
    "summarize": ["condense", "boil down"],
    "list": ["enumerate", "name"],
    "give": ["provide", "supply"],
    "show": ["present", "display"],
    "function": ["routine", "procedure"],
    "query": ["request", "lookup"],
    "table": ["grid", "chart"],
    "columns": ["fields", "headings"],
    "question": ["inquiry", "problem"],
    "text": ["passage", "excerpt"],
    "how many": ["what number of", "the count of how many"],
    "how much": ["what amount", "what quantity"],
    "what is": ["tell me", "could you say what is"],
    "what are": ["which are", "could you say what are"],
    "is called": ["goes by the name of", "is known as"],
    "should": ["ought to", "has to"],
    "the following": ["this", "the given"],
}
PHRASE = re.compile(rf"\b({'|'.join(sorted(PHRASES, key=len, reverse=True))})\b", re.IGNORECASE)


def perturb(text: str, kind: Perturbation, strength: float, rng: Random, foreign: Sequence[str] = ()) -> str:
    """A perturbed prompt; it only depends on the arguments and the state of `rng`.

    swap, drop, insert: `strength` is the probability that a character changes places with the next one, is lost,
        or is followed by a random letter.
    words, paraphrase: the probability that a word is lost, or that a phrase of the table is replaced by another one.
    wrap: the share of the eight sentences that stand around the prompt.
    prefix, suffix: an excerpt of one of the `foreign` texts (prompts of another domain) before or after the prompt,
        with `strength` times as many words as the prompt. Without foreign texts, or words, the prompt is unchanged.
    """

    def hit() -> bool:
        return rng.random() < strength

    match kind:
        case "swap":
            letters = list(text)
            for i in range(len(letters) - 1):
                if hit():
                    letters[i], letters[i + 1] = letters[i + 1], letters[i]
            return "".join(letters)
        case "drop":
            return "".join(letter for letter in text if not hit())
        case "insert":
            return "".join(letter + (rng.choice(string.ascii_lowercase) if hit() else "") for letter in text)
        case "words":
            return re.sub(r"\S+", lambda word: "" if hit() else word[0], text)
        case "paraphrase":
            return PHRASE.sub(lambda phrase: _paraphrase(phrase[0], rng) if hit() else phrase[0], text)
        case "wrap":
            drawn = set(rng.sample(BEFORE + AFTER, round(strength * len(BEFORE + AFTER))))
            parts = [" ".join(one for one in sentences if one in drawn) for sentences in (BEFORE, AFTER)]
            return "\n\n".join(filter(None, (parts[0], text, parts[1])))
        case "prefix" | "suffix":
            words = rng.choice(foreign).split() if foreign else []
            stray = " ".join(words[: round(strength * len(text.split()))])
            return "\n\n".join(filter(None, (stray, text) if kind == "prefix" else (text, stray))) if stray else text


def _paraphrase(phrase: str, rng: Random) -> str:
    """Another phrase of the table, capitalized like this one."""
    other = rng.choice(PHRASES[phrase.lower()])
    return other.capitalize() if phrase[0].isupper() else other
