"""Small Python tasks with solutions that run, so every example shown in a prompt is true.

Most tasks are compositions: a filter, a map and a fold over a list; a class of characters and an action; a kind of word
and an action. Combining the parts gives thousands of different tasks.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from .code_examples import Arguments, Task, digits, is_prime, numbers
from .code_formulas import tasks
from .grammar import pick
from .phrasebook import phrasebook

# (part of the function name, text, predicate)
_FILTERS: tuple[tuple[str, str, Callable[[int], bool]], ...] = (
    ("", "numbers", lambda n: True),
    ("even", "even numbers", lambda n: n % 2 == 0),
    ("odd", "odd numbers", lambda n: n % 2 == 1),
    ("positive", "positive numbers", lambda n: n > 0),
    ("negative", "negative numbers", lambda n: n < 0),
    ("prime", "prime numbers", is_prime),
    ("square", "perfect squares", lambda n: n >= 0 and math.isqrt(n) ** 2 == n),
    ("div_by_3", "numbers divisible by 3", lambda n: n % 3 == 0),
    ("multiple_of_5", "multiples of 5", lambda n: n % 5 == 0),
    ("two_digit", "two-digit numbers", lambda n: 10 <= abs(n) <= 99),
    ("large", "numbers greater than 10", lambda n: n > 10),
    ("small", "numbers less than 10", lambda n: n < 10),
    ("nonzero", "non-zero elements", lambda n: n != 0),
    ("palindrome", "palindromic numbers", lambda n: str(n) == str(n)[::-1]),
    ("power_of_two", "powers of two", lambda n: n > 0 and n & (n - 1) == 0),
)
_MAPS: tuple[tuple[str, str, Callable[[int], int]], ...] = (
    ("", "{}", lambda n: n),
    ("squared", "squares of the {}", lambda n: n * n),
    ("cubed", "cubes of the {}", lambda n: n**3),
    ("doubled", "doubles of the {}", lambda n: 2 * n),
    ("absolute", "absolute values of the {}", abs),
    ("negated", "negations of the {}", lambda n: -n),
    ("digit_sum", "digit sums of the {}", lambda n: sum(digits(n))),
    ("halved", "halves (rounded down) of the {}", lambda n: n // 2),
    ("last_digit", "last digits of the {}", lambda n: abs(n) % 10),
    ("incremented", "successors of the {}", lambda n: n + 1),
    ("bit_count", "numbers of set bits of the {}", lambda n: abs(n).bit_count()),
)
_FOLDS: tuple[tuple[str, str, str, Callable[[list[int]], Any]], ...] = (
    ("sum", "find the sum of the {}", "int", sum),
    ("product", "find the product of the {}", "int", math.prod),
    ("largest", "find the largest of the {}", "int", lambda v: max(v, default=0)),
    ("smallest", "find the smallest of the {}", "int", lambda v: min(v, default=0)),
    ("count", "count the {}", "int", len),
    ("count_distinct", "count the distinct {}", "int", lambda v: len(set(v))),
    ("filter", "extract the {}", "list[int]", list),
    ("sorted", "return the sorted {}", "list[int]", sorted),
    ("reversed", "return in reverse order the {}", "list[int]", lambda v: v[::-1]),
    ("unique", "find the unique {}, in order", "list[int]", lambda v: list(dict.fromkeys(v))),
    ("average", "find the average of the {}", "float", lambda v: sum(v) / len(v) if v else 0.0),
    (
        "range",
        "find the difference between the largest and smallest of the {}",
        "int",
        lambda v: max(v) - min(v) if v else 0,
    ),
    (
        "running_total",
        "compute the running totals of the {}",
        "list[int]",
        lambda v: [sum(v[: i + 1]) for i in range(len(v))],
    ),
    ("top_two", "return the two largest of the {}", "list[int]", lambda v: sorted(v)[::-1][:2]),
)


def _word(random: Random, rule: str = "word") -> str:
    return phrasebook("code_tasks").grammar.draw(random, rule)


def _list_task(random: Random) -> Task:
    (kept_name, kept_text, keep), (mapped_name, mapped_text, change) = pick(random, _FILTERS), pick(random, _MAPS)
    fold_name, fold_text, returns, fold = pick(random, _FOLDS)
    text = f"{fold_text.format(mapped_text.format(kept_text))} {_word(random, 'where')}"
    parts = [part for part in (fold_name, mapped_name, kept_name) if part]
    name = "_".join(parts if len(parts) > 1 else (*parts, pick(random, ("list", "numbers", "elements", "nums"))))

    def run(values: list[int]) -> Any:
        return fold([change(value) for value in values if keep(value)])

    return Task(name, text, ((_word(random, "list_name"), "list[int]"),), returns, lambda r: (numbers(r),), run)


_CHARACTERS: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("vowels", "vowels", lambda c: c.lower() in "aeiou"),
    ("consonants", "consonants", lambda c: c.isalpha() and c.lower() not in "aeiou"),
    ("digits", "digits", str.isdigit),
    ("uppercase", "uppercase letters", str.isupper),
    ("lowercase", "lowercase letters", str.islower),
    ("spaces", "spaces", str.isspace),
    ("letters", "letters", str.isalpha),
    ("alphanumeric", "alphanumeric characters", str.isalnum),
    ("e", "occurrences of the letter 'e'", lambda c: c == "e"),
    ("o", "occurrences of the letter 'o'", lambda c: c == "o"),
)
_ACTIONS: tuple[tuple[str, str, str, Callable[[str, Callable[[str], bool]], Any]], ...] = (
    ("count", "count the {} in a string", "int", lambda s, is_: sum(map(is_, s))),
    ("remove", "remove all {} from a string", "str", lambda s, is_: "".join(c for c in s if not is_(c))),
    ("keep", "keep only the {} of a string", "str", lambda s, is_: "".join(c for c in s if is_(c))),
    ("mask", "replace the {} of a string with '*'", "str", lambda s, is_: "".join("*" if is_(c) else c for c in s)),
    (
        "replace",
        "replace the {} of a given string with underscores",
        "str",
        lambda s, is_: "".join("_" if is_(c) else c for c in s),
    ),
    (
        "positions",
        "find the positions of the {} in a string",
        "list[int]",
        lambda s, is_: [i for i, c in enumerate(s) if is_(c)],
    ),
    (
        "first",
        "find the index of the first of the {} in a string, or -1",
        "int",
        lambda s, is_: next((i for i, c in enumerate(s) if is_(c)), -1),
    ),
    ("has", "check whether a string contains any {}", "bool", lambda s, is_: any(map(is_, s))),
    ("double", "double the {} of a string", "str", lambda s, is_: "".join(c * 2 if is_(c) else c for c in s)),
    (
        "unique",
        "return the set of {} of a string as a sorted list",
        "list[str]",
        lambda s, is_: sorted({c for c in s if is_(c)}),
    ),
    (
        "longest_run",
        "find the length of the longest run of {} in a string",
        "int",
        lambda s, is_: max(map(len, "".join(c if is_(c) else "\0" for c in s).split("\0"))),
    ),
)


def _phrase(random: Random) -> str:
    return " ".join(_word(random) for _ in range(random.randint(1, 4)))


def _string_task(random: Random) -> Task:
    (kind, noun, belongs), (action, text, returns, act) = pick(random, _CHARACTERS), pick(random, _ACTIONS)
    parameter = pick(random, ("text", "s", "string", "str1", "sentence", "word"))
    return Task(
        f"{action}_{kind}",
        text.format(noun),
        ((parameter, "str"),),
        returns,
        lambda r: (_phrase(r),),
        lambda s: act(s, belongs),
    )


_KINDS: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("long_words", "words longer than 4 characters", lambda w: len(w) > 4),
    ("short_words", "words with at most 4 characters", lambda w: len(w) <= 4),
    ("palindromes", "palindromes", lambda w: w.lower() == w.lower()[::-1]),
    ("capitalized", "capitalized words", lambda w: w[0].isupper()),
    ("vowel_words", "words that start with a vowel", lambda w: w[0].lower() in "aeiou"),
    ("even_words", "words of even length", lambda w: len(w) % 2 == 0),
    ("odd_words", "words of odd length", lambda w: len(w) % 2 == 1),
    ("double_words", "words with a doubled letter", lambda w: any(a == b for a, b in pairwise(w))),
    ("numeric_words", "words that contain a digit", lambda w: any(map(str.isdigit, w))),
    ("words", "words", lambda w: True),
)
_WORD_ACTIONS: tuple[tuple[str, str, str, Callable[[list[str]], Any]], ...] = (
    ("count", "count the {}", "int", len),
    ("filter", "filter the {}", "list[str]", list),
    ("join", "join with a hyphen the {}", "str", "-".join),
    ("longest", "find the longest of the {}", "str", lambda w: max(w, key=len, default="")),
    ("shortest", "find the shortest of the {}", "str", lambda w: min(w, key=len, default="")),
    ("sort", "sort by length the {}", "list[str]", lambda w: sorted(w, key=len)),
    ("reverse", "reverse each of the {}", "list[str]", lambda w: [x[::-1] for x in w]),
    ("upper", "convert to uppercase the {}", "list[str]", lambda w: [x.upper() for x in w]),
    ("initials", "return the first letters of the {}", "str", lambda w: "".join(x[0] for x in w)),
    ("lengths", "map to their lengths the {}", "dict[str, int]", lambda w: {x: len(x) for x in w}),
    ("alphabetical", "order alphabetically the {}", "list[str]", lambda w: sorted(w, key=str.lower)),
    ("total_length", "find the total length of the {}", "int", lambda w: sum(map(len, w))),
)


def _word_task(random: Random) -> Task:
    (kind, noun, keep), (action, text, returns, act) = pick(random, _KINDS), pick(random, _WORD_ACTIONS)
    arguments: Callable[[Random], Arguments]
    words: Callable[[Any], list[str]]
    if random.random() < 0.5:
        where, parameter = "of a sentence", (pick(random, ("sentence", "text", "phrase")), "str")
        arguments, words = lambda r: (_phrase(r),), str.split
    else:
        where, parameter = "in a list of strings", (pick(random, ("words", "strings", "texts")), "list[str]")
        arguments, words = lambda r: ([_word(r) for _ in range(r.randint(2, 5))],), list
    return Task(
        f"{action}_{kind}",
        f"{text.format(noun)} {where}",
        (parameter,),
        returns,
        arguments,
        lambda given: act([word for word in words(given) if keep(word)]),
    )


def draw(random: Random) -> Task:
    """Draw a task; 70 % of the draws are compositions."""
    kind = random.random()
    if kind < 0.4:
        return _list_task(random)
    if kind < 0.55:
        return _string_task(random)
    if kind < 0.7:
        return _word_task(random)
    return pick(random, tasks("formulas" if kind < 0.88 else "list operations"))
