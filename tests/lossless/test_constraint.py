"""Texts of a given form: speculative decoding draws what plain decoding draws under the same constraint."""

import json

import pytest
import torch

from specctl.decoding import verify
from specctl.decoding.constraint import Constraint, grammar_tokenizer
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.errors import DataError
from tests.lossless.drafters import bushes, perfect
from tests.lossless.test_equality import DRAFTERS, ONE_OF_EACH, SEEDS

HOT = Sampling(1.0, 0, 1.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["select", "insert"]},
        "columns": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 2, "maxItems": 3},
        "limit": {"type": "integer", "minimum": 10, "maximum": 500},
    },
    "required": ["kind", "columns", "limit"],
    "additionalProperties": False,
}
JSON = f"start: %json{json.dumps(SCHEMA | {'x-guidance': {'whitespace_flexible': False}})}"
LETTERS = 'start: /[a-c]{6}/ "." /[0-9 ]{9,}/'


@pytest.fixture(scope="module")
def tokenizer(target):
    return grammar_tokenizer(target)


@pytest.fixture(scope="module")
def requests(tokenizer, prompts):
    """Three requests, the middle one without a constraint, and shorter: it does not end by itself."""

    def make(samplings):
        forms = [(JSON, 80), (None, 24), (LETTERS, 80)]
        return [
            Request(
                prompt,
                sampling,
                room,
                seed,
                constraint=None if grammar is None else Constraint(tokenizer, grammar, len(prompt)),
            )
            for prompt, sampling, seed, (grammar, room) in zip(prompts, samplings, SEEDS, forms, strict=True)
        ]

    return make


def answers(target, requests, drafter=None, slots=None):
    """The texts' tokens and ends, in order."""
    engine = Engine(target, Fixed.of(drafter), EngineOptions(slots=slots))
    ids, ended = [engine.add(request) for request in requests], {}
    while engine.busy:
        for event in engine.step():
            assert event.error is None
            if event.ended is not None:
                ended[event.id] = event.ended
    return [(ended[id].output_ids, ended[id].stop) for id in ids]


@pytest.fixture(scope="module")
def plain(target, requests):
    """`plain(samplings)`: the answers of plain decoding, one request at a time, and the texts with their prompts."""
    known = {}

    def decoded(samplings):
        key = tuple(samplings)
        if key not in known:
            asked = requests(samplings)
            expected = answers(target, asked, slots=1)
            known[key] = expected, [[*one.prompt, *ids] for one, (ids, _) in zip(asked, expected, strict=True)]
        return known[key]

    return decoded


@pytest.mark.parametrize(
    ("name", "samplings"),
    [*((name, [GREEDY, HOT, HOT]) for name in ONE_OF_EACH), *((name, [GREEDY] * 3) for name in ("ragged", "trees"))],
)
def test_constrained_texts_equal_plain_constrained_texts(target, requests, plain, name, samplings):
    expected, texts = plain(samplings)
    assert answers(target, requests(samplings), DRAFTERS[name](target, texts)) == expected
    check_form(target, expected)


def check_form(target, expected):
    """The first text is a document of the schema, and the last has its letters."""
    (ids, stop), _, (letters, _) = expected
    assert stop == "eos"
    document = json.loads(target.tokenizer.decode(ids[:-1]))
    assert [*document] == ["kind", "columns", "limit"] and 10 <= document["limit"] <= 500
    text = target.tokenizer.decode(letters, skip_special_tokens=True)
    assert set(text[:6]) <= set("abc") and text[6] == "." and set(text[7:]) <= set("0123456789 ")


def test_right_drafts_are_accepted_under_a_constraint(target, requests, plain):
    _, texts = plain([GREEDY] * 3)
    engine = Engine(target, Fixed.of(perfect(texts)))
    for request in requests([GREEDY] * 3):
        engine.add(request)
    ended = [event.ended for _ in range(200) if engine.busy for event in engine.step() if event.ended]
    assert [one.rejections for one in ended] == [0, 0, 0]
    assert all(one.accepted > 0.7 * len(one.output_ids) for one in ended), [
        (len(o.output_ids), o.accepted) for o in ended
    ]


def test_every_node_of_a_tree_has_its_own_row(target, tokenizer):
    """A row allows what may follow the path to its node; a path that breaks the form allows everything."""
    constraint = Constraint(tokenizer, 'start: "a" ("b" | "cd") /[0-9]/', 0)
    a, b, c, d, x = (target.tokenizer.encode(letter)[0] for letter in "abcdx")
    digits = {target.tokenizer.encode(digit)[0] for digit in "0123456789"}
    rows = constraint.allowed([], [-1, -1, 0, 0, 3, 1, -2], [a, x, b, c, d, a, 0])
    assert allowed(rows[0]) >= {a} and not allowed(rows[0]) & {b, c, d, x}
    assert {b, c} <= allowed(rows[1]) and not allowed(rows[1]) & {a, d, x}
    assert rows[2].all() and rows[6].all() and rows[7].all()
    assert allowed(rows[3]) == digits == allowed(rows[5]) and allowed(rows[4]) == {d}
    assert allowed(constraint.allowed([a, b], [], [])[0]) == digits
    assert allowed(constraint.allowed([a], [], [])[0]) == allowed(rows[1])  # a step that failed is tried again


def allowed(row):
    return set(torch.nonzero(row).flatten().tolist())


def test_copies_follow_different_texts(target, tokenizer):
    constraint = Constraint(tokenizer, 'start: "a" "b" | "c" "d"', 0)
    other = constraint.copy(0)
    a, b, c, d = (target.tokenizer.encode(letter)[0] for letter in "abcd")
    assert allowed(constraint.allowed([a], [], [])[0]) == {b}
    assert allowed(other.allowed([c], [], [])[0]) == {d}


def test_a_finished_form_ends_the_text(target, tokenizer, prompts):
    request = Request(prompts[0], HOT, 40, constraint=Constraint(tokenizer, 'start: "ab"', len(prompts[0])))
    ((ids, stop),) = answers(target, [request])
    assert stop == "eos" and target.tokenizer.decode(ids[:-1]) == "ab"


@pytest.mark.parametrize("grammar", ["start: unknown", 'start: %json{"type": "strange"}', "start: /(/"])
def test_a_wrong_grammar_is_refused(tokenizer, grammar):
    with pytest.raises(DataError, match="the form cannot be enforced"):
        Constraint(tokenizer, grammar, 0)


def test_a_regular_expression_has_a_limit_of_work(tokenizer):
    """All texts of the batch wait for a mask. Ten times the work is llguidance's own limit."""
    constraint = Constraint(tokenizer, "start: /(a{300}){300}/", 0)
    with pytest.raises(DataError, match="the form cannot be enforced: lexer error"):
        token = constraint.allowed([], [], [])[0].nonzero()[0].tolist()
        constraint.allowed(token, [], [])


def test_a_constraint_that_fails_costs_its_text_alone(target, requests, monkeypatch):
    asked = requests([GREEDY] * 3)
    expected = answers(target, asked[1:2])
    asked = requests([GREEDY] * 3)

    def broken(ids, parents, tokens):
        raise DataError("the grammar is too complex")

    monkeypatch.setattr(asked[0].constraint, "allowed", broken)
    engine = Engine(target, Fixed.of(None))
    ids, events = [engine.add(request) for request in asked], []
    while engine.busy:
        events += engine.step()
    errors = {event.id: str(event.error) for event in events if event.error}
    assert errors == {ids[0]: "the grammar is too complex"}
    (whole,) = [event.ended for event in events if event.id == ids[1] and event.ended]
    assert (whole.output_ids, whole.stop) == expected[0]


def test_negative_control_without_masks_the_form_is_lost(target, requests, monkeypatch):
    monkeypatch.setattr(verify, "constrain", lambda logits, texts, parents, tokens: (logits, {}))
    found = answers(target, requests([GREEDY] * 3), bushes([[]] * 3, 0, target.vocab_size))
    with pytest.raises((AssertionError, ValueError)):
        check_form(target, found)
