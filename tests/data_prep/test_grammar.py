"""The template language of the generators."""

from random import Random

import pytest
from specctl.data_prep.grammar import Grammar, articles, capitalized, tidy

GRAMMAR = Grammar({"fruit": ("apple", "pear", "fig"), "basket": ("{fruit} and {fruit}",)}, {"one": ("kiwi",)})


def texts(template: str, n: int = 200) -> set[str]:
    random = Random(0)
    return {GRAMMAR.expand(random, template) for _ in range(n)}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", {"plain"}),
        ("{fruit}", {"apple", "pear", "fig"}),
        ("{One}!", {"Kiwi!"}),
        ("<a|b|>c", {"ac", "bc", "c"}),
        ("<x <1|2>|{one}>", {"x 1", "x 2", "kiwi"}),
        ("{1-3}", {"1", "2", "3"}),
        ("{10-20/5}", {"10", "15", "20"}),
        ("{n=2-3} {n}", {"2 2", "3 3"}),
        ("{!n=4-4}{=n*2+1}", {"9"}),
        ("{!a=2-2}{!b=3-3}{=a+b*4}", {"20"}),
        ("{x=fruit}, {X}", {"apple, Apple", "pear, Pear", "fig, Fig"}),
        ("p < 0.05", {"p < 0.05"}),
        ("a > b | c", {"a > b | c"}),
    ],
)
def test_templates_expand_to_all_alternatives(template, expected):
    assert texts(template) == expected


def test_rules_expand_recursively():
    assert len(texts("{basket}")) == 9


def test_an_unknown_slot_is_an_error():
    with pytest.raises(KeyError, match="nothing"):
        GRAMMAR.expand(Random(0), "{nothing}")


def test_remembered_draws_are_shared_through_the_same_dict():
    bound: dict[str, str] = {}
    first = GRAMMAR.expand(Random(0), "{x=fruit}", bound)
    assert GRAMMAR.expand(Random(1), "{x}", bound) == first


def test_articles_case_and_spaces_are_corrected():
    assert articles("a apple, a unicorn, A hour, a 8-pack, a one") == "an apple, a unicorn, An hour, an 8-pack, a one"
    assert capitalized("a NASA") == "A NASA" and capitalized("") == ""
    assert tidy("How much  is it ?") == "How much is it?"
