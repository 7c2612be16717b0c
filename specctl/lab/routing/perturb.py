"""Perturbed prompts, as people also write them: typing errors, lost words, paraphrases, added instructions, stray text.

A classifier of prompts loses accuracy on these, while full-information selection does not (HedgeSpec table 4, MetaSD
tables 6 and 8). Every function takes a strength in [0, 1]; at 0 the text is unchanged.
"""

import re
import string
from collections.abc import Callable, Sequence
from random import Random

from specctl.lab.routing.options import Perturbation

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
    return _RULES[kind](text, strength, rng, foreign)


def _swap(text: str, strength: float, rng: Random, _: Sequence[str]) -> str:
    letters = list(text)
    for i in range(len(letters) - 1):
        if rng.random() < strength:
            letters[i], letters[i + 1] = letters[i + 1], letters[i]
    return "".join(letters)


def _drop(text: str, strength: float, rng: Random, _: Sequence[str]) -> str:
    return "".join(letter for letter in text if rng.random() >= strength)


def _insert(text: str, strength: float, rng: Random, _: Sequence[str]) -> str:
    letters = (letter + (rng.choice(string.ascii_lowercase) if rng.random() < strength else "") for letter in text)
    return "".join(letters)


def _words(text: str, strength: float, rng: Random, _: Sequence[str]) -> str:
    return re.sub(r"\S+", lambda word: word[0] if rng.random() >= strength else "", text)


def _paraphrase(text: str, strength: float, rng: Random, _: Sequence[str]) -> str:
    def other(match: re.Match[str]) -> str:
        if rng.random() >= strength:
            return match[0]
        phrase = rng.choice(PHRASES[match[0].lower()])
        return phrase.capitalize() if match[0][0].isupper() else phrase

    return PHRASE.sub(other, text)


def _wrap(text: str, strength: float, rng: Random, _: Sequence[str]) -> str:
    sentences = [*BEFORE, *AFTER]
    drawn = set(rng.sample(sentences, round(strength * len(sentences))))
    before = " ".join(sentence for sentence in BEFORE if sentence in drawn)
    after = " ".join(sentence for sentence in AFTER if sentence in drawn)
    return "\n\n".join(part for part in (before, text, after) if part)


def _prefix(text: str, strength: float, rng: Random, foreign: Sequence[str]) -> str:
    stray = _excerpt(text, strength, rng, foreign)
    return f"{stray}\n\n{text}" if stray else text


def _suffix(text: str, strength: float, rng: Random, foreign: Sequence[str]) -> str:
    stray = _excerpt(text, strength, rng, foreign)
    return f"{text}\n\n{stray}" if stray else text


def _excerpt(text: str, strength: float, rng: Random, foreign: Sequence[str]) -> str:
    length = round(strength * len(text.split()))
    return " ".join(rng.choice(foreign).split()[:length]) if foreign else ""


_RULES: dict[Perturbation, Callable[[str, float, Random, Sequence[str]], str]] = {
    "swap": _swap,
    "drop": _drop,
    "insert": _insert,
    "words": _words,
    "paraphrase": _paraphrase,
    "wrap": _wrap,
    "prefix": _prefix,
    "suffix": _suffix,
}
