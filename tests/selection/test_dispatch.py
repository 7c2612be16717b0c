"""`Dispatcher`: the server for each prompt, learning from its answer, and the limits that protect servers."""

import random
import statistics

import pytest

from specctl import data_prep
from specctl.engines.proxy_messages import TextCounts
from specctl.engines.records import DraftCounters
from specctl.errors import UsageError
from specctl.recipe.select import PolicyRecipe
from specctl.selection import dispatch
from specctl.selection.dispatch import (
    OVERLOAD_FACTOR,
    OVERLOAD_SLACK,
    Dispatcher,
    features_of,
    pass_statistics,
    words_of,
)
from specctl.selection.policies import registry

DOMAINS = ("sql", "math")
URLS = [f"http://{domain}" for domain in DOMAINS]
IDLE = dict.fromkeys(URLS, 0)


def counts(mat, tokens=60, drafts=True):
    """The counts of a text with about `mat` − 1 accepted tokens per pass."""
    passes = round(tokens / mat)
    accepted = tokens - passes
    return TextCounts(tokens, DraftCounters(passes, 3 * passes, accepted, [accepted]) if drafts else None)


def chat(prompt):
    return {"messages": [{"role": "user", "content": prompt}]}


@pytest.fixture(scope="module")
def stream():
    """[(domain, prompt)], the two domains in random order."""
    draw = random.Random(0)
    prompts = {domain: list(data_prep.get(domain).generate(120, seed=0)) for domain in DOMAINS}
    return [(domain, prompts[domain].pop()) for domain in (draw.choice(DOMAINS) for _ in range(160))]


def play(name, stream, best=3.0, other=1.6):
    """The share of the last two thirds of the texts that went to the server of their domain."""
    one = Dispatcher(URLS, name, PolicyRecipe(), 0)
    noise, hits = random.Random(1), []
    for domain, prompt in stream:
        choice = one.choose(chat(prompt), IDLE)
        hit = choice.order[0] == f"http://{domain}"
        one.learn(choice, choice.order[0], counts((best if hit else other) + noise.uniform(-0.3, 0.3)))
        hits.append(hit)
    return statistics.fmean(hits[len(hits) // 3 :])


def test_cgp_ucb_sends_prompts_to_the_server_of_their_domain(stream):
    """A policy that ignores the prompt, or reads it wrongly, gets half of them right: three standard deviations below
    0.65."""
    assert play("cgp-ucb", stream) > 0.85
    assert play("random", stream) < 0.65  # negative control


def test_bandits_find_a_server_that_is_always_better(stream):
    for name in ("metasd-ucb", "metasd-ducb", "metasd-swucb", "cgp-ucb"):
        always = [("sql", prompt) for _, prompt in stream]
        assert play(name, always) > 0.8, name


def test_only_the_ends_of_a_long_prompt_are_read():
    """The choice blocks the event loop: reading a megabyte would delay all streams."""
    assert len(words_of({"prompt": "word " * 10**6})) <= dispatch.HEAD + dispatch.TAIL
    assert len(words_of({"prompt": [1] * 10**6})) <= dispatch.HEAD + dispatch.TAIL


def test_an_overloaded_server_is_passed_over(stream):
    one = Dispatcher(URLS, "cgp-ucb", PolicyRecipe(), 0)
    for _ in range(40):
        choice = one.choose(chat("How many?"), IDLE)
        one.learn(choice, choice.order[0], counts(4.0 if choice.order[0] == URLS[0] else 1.1))
    assert one.choose(chat("How many?"), IDLE).order == URLS
    assert (
        one.choose(chat("How many?"), {URLS[0]: OVERLOAD_FACTOR * 3 + OVERLOAD_SLACK, URLS[1]: 3}).order[0] == URLS[0]
    )
    assert (
        one.choose(chat("How many?"), {URLS[0]: OVERLOAD_FACTOR * 3 + OVERLOAD_SLACK + 1, URLS[1]: 3}).order
        == URLS[::-1]
    )


def test_equally_good_servers_are_ordered_by_load():
    one = Dispatcher(URLS, "cgp-ucb", PolicyRecipe(), 0)
    assert one.choose(chat("Hi"), {URLS[0]: 1, URLS[1]: 0}).order == URLS[::-1]
    fixed = Dispatcher([*URLS, "http://c"], "fixed", PolicyRecipe(arm=2), 0)
    assert fixed.choose({}, {URLS[0]: 2, URLS[1]: 1, "http://c": 3}).order == ["http://c", *URLS[::-1]]


def test_each_model_has_a_game_of_its_own(stream):
    """The server with the best drafter for one adapter is the worst for another, and the text does not tell which."""
    one, best = Dispatcher(URLS, "cgp-ucb", PolicyRecipe(), 0), {"law": URLS[0], "bank": URLS[1]}
    for place, (_, prompt) in enumerate(stream[:60]):
        model = ("law", "bank")[place % 2]
        choice = one.choose(chat(prompt), IDLE, model)
        one.learn(choice, choice.order[0], counts(4.0 if choice.order[0] == best[model] else 1.1))
    assert {model: one.choose(chat("How many?"), IDLE, model).order[0] for model in best} == best
    assert one.choose(chat("How many?"), {URLS[1]: 0}, "law").order == [URLS[1]]


def test_passes_without_a_draft_are_counted():
    """A text drafter often proposes nothing. Judged by its drafts alone it would look better than every other
    drafter."""
    shown = pass_statistics(TextCounts(10, DraftCounters(rounds=2, drafted=6, accepted=4, accepted_at=[2, 1, 1])))
    # Two drafts with 3 and 1 accepted tokens, and four passes that commit one token each.
    assert (shown.rounds, shown.total, shown.squares) == (6, 10.0, 16 + 4 + 4)
    assert pass_statistics(TextCounts(5, DraftCounters())) == (5, 5.0, 5.0)
    assert pass_statistics(TextCounts(2, DraftCounters(1, 3, 3, [1, 1, 1]))).rounds == 1


def test_a_server_without_counters_counts_as_plain_decoding(capsys):
    one = Dispatcher(URLS, "cgp-ucb", PolicyRecipe(), 0)
    for _ in range(3):
        one.learn(one.choose(chat("Hi"), IDLE), URLS[0], counts(3, drafts=False))
    said = capsys.readouterr().err
    assert said.count("does not report") == 1 and "--per-request-spec-decode-metrics summary" in said
    assert pass_statistics(counts(3, drafts=False)).rounds == 60


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "SELECT a_b;"}, ["select", "a_b", ";"]),
        ({"prompt": [5, 6]}, ["5", "6"]),
        ({"input_ids": [7]}, ["7"]),
        ({"text": "Grüße"}, ["grüße"]),
        (
            {"messages": [{"content": "A"}, {"content": [{"type": "text", "text": "b"}, {"type": "image_url"}]}]},
            ["a", "b"],
        ),
        ({"messages": [{"content": None}, 3]}, []),
        ({"prompt": {"a": 1}}, []),
        ({}, []),
    ],
)
def test_prompts_are_read_from_every_request_format(body, words):
    assert words_of(body) == words
    assert features_of(body).shape == (dispatch.FEATURES,)


def test_the_end_of_a_long_prompt_is_read():
    long = "a " * 10**5
    assert (features_of({"prompt": f"{long} select"}) != features_of({"prompt": f"{long} integral"})).any()
    ids = [1] * 10**5
    assert (features_of({"prompt": [*ids, 2]}) != features_of({"prompt": [*ids, 3]})).any()


def test_without_counts_per_position_the_variance_is_geometric():
    """llama.cpp reports sums only. Without this estimate the sum of squares was smaller than the mean allows."""
    shown = pass_statistics(TextCounts(60, DraftCounters(20, 60, 40)))
    assert shown[:2] == (20, 60.0) and shown.squares == 20 + 2 * 40 + 40 + 2 * 40**2 / 20
    assert shown.squares >= 60**2 / 20, "the mean of the squares is at least the square of the mean"


def test_policies_that_cannot_choose_a_server_are_refused():
    for name in set(registry.NAMES) - {*dispatch.POLICIES} | {"router"}:
        with pytest.raises(UsageError, match=f"{name} cannot choose"):
            dispatch.check(name)
    with pytest.raises(UsageError, match="no policy 'cgp'"):
        dispatch.check("cgp")
