"""Common prefixes of prompts are read once without changing any text; end ids and the repetition penalty."""

import pytest
import torch

from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.sampling import GREEDY, Draws, Sampling
from specctl.decoding.target import load_target
from specctl.drafters.text.lookup import Lookup
from tests.toys.decoding import decode

HOT = Sampling(0.8, 0, 1.0)
SHORT = {"max_new_tokens": 6, "sampling": GREEDY}


def texts(target, prompts, prefix_cache=None, **options):
    return [
        one.output_ids
        for one in decode(target, prompts, seeds=[7] * len(prompts), prefix_cache=prefix_cache, **options)
    ]


@pytest.fixture(scope="module")
def nested(prompts):
    """Prompts of which each begins with the previous one."""
    whole = prompts[1]
    return [whole[:12], whole[:13], whole[:25], whole]


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_cached_prefixes_change_no_text(target, nested, prompts, sampling):
    prefixes = PrefixCache(most_texts=3)
    options = {"max_new_tokens": 6, "sampling": sampling}
    for some in (nested, prompts, nested[::-1], [nested[2] + [50, 60]]):
        assert texts(target, some, prefixes, **options) == texts(target, some, **options)


def test_common_prefixes_are_read_once(target, nested):
    prefixes = PrefixCache(most_texts=4)
    found = texts(target, nested, prefixes, **SHORT)
    assert prefixes.read <= len(nested[-1]) + len(nested) - 1, "each prompt read only its own end"
    read = prefixes.read
    texts(target, [nested[-1] + found[-1] + [50]], prefixes, **SHORT)
    assert prefixes.read - read <= 2, "a generated text is cached except for its last token"


def test_a_text_without_room_leaves_the_others(target, prompts):
    """It used to drop all texts, and then itself."""
    prefixes = PrefixCache()
    for some in (prompts[:1], [prompts[1] * 3]):
        texts(target, some, prefixes, **SHORT)
        prefixes.most_bytes = 2 * prefixes.texts[0].nbytes
    assert [text.ids[: len(prompts[0])] for text in prefixes.texts] == [prompts[0]]


def test_reused_slots_do_not_damage_cached_prefixes(target, prompts):
    prefixes = PrefixCache(most_texts=8)
    first = texts(target, prompts, prefixes, slots=1, **SHORT)
    longer = [prompt + output for prompt, output in zip(prompts, first, strict=True)]
    assert texts(target, longer, prefixes, slots=2, **SHORT) == texts(target, longer, **SHORT)


def test_features_are_cached_with_keys_and_values(target, nested):
    """Without them, a drafter that reads features would read rows that were never written."""
    seen = []

    def watch(state, draft, verdict):
        seen.append(state.features[0, : len(nested[1]) - 1].clone())

    prefixes = PrefixCache(most_texts=2)
    options = {"seeds": [0], "taps": (2,), "max_new_tokens": 2, "sampling": GREEDY}
    decode(target, [nested[1]], on_round=watch, **options)
    decode(target, [nested[0]], prefix_cache=prefixes, **options)
    decode(target, [nested[1]], prefix_cache=prefixes, on_round=watch, **options)
    assert torch.allclose(*seen, atol=1e-4)


def test_speculation_after_a_cached_prefix_keeps_the_text(target, nested):
    prefixes = PrefixCache(most_texts=4)
    texts(target, nested, prefixes, **SHORT)
    longer = [nested[-1] + [50, 60]]
    drafted = texts(target, longer, prefixes, drafter=Lookup(), **SHORT)
    assert drafted == texts(target, longer, **SHORT)


def test_device_rounds_end_at_given_ids_and_fill_the_prefix_cache(target, prompts, monkeypatch):
    expected = texts(target, prompts, **SHORT)
    ends = frozenset({expected[0][2], expected[1][4]})
    cut = texts(target, prompts, ends=ends, **SHORT)
    assert cut != expected
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    prefixes = PrefixCache(most_texts=3)
    assert texts(target, prompts, prefixes, ends=ends, **SHORT) == cut
    longer = [prompt + output for prompt, output in zip(prompts, cut, strict=True)]
    read = prefixes.read
    assert texts(target, longer, prefixes, **SHORT) == texts(target, longer, **SHORT)
    assert prefixes.read - read == len(longer), "only the last token of each text is read"


@pytest.mark.parametrize("kind", ["gpt2", "mistral-window"])
def test_prefixes_work_with_transformers_forward(tiny_directory, kind):
    target = load_target(tiny_directory(kind), device="cpu", dtype="fp32")
    prompt = list(range(40, 70))
    prefixes = PrefixCache(most_texts=2)
    for some in ([prompt[:20]], [prompt[:21], prompt]):
        assert texts(target, some, prefixes, **SHORT) == texts(target, some, **SHORT)


def test_a_text_ends_at_given_ids(target, prompts):
    (whole,) = texts(target, prompts[:1], **SHORT)
    end = whole[4]
    (cut,) = texts(target, prompts[:1], ends=frozenset({end}), **SHORT)
    assert cut == whole[: whole.index(end) + 1]


def penalised_by_hand(logits, seen, penalty):
    out = logits.clone()
    for token in seen:
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    return out


def test_the_repetition_penalty_counts_text_and_ancestors_only():
    """A node that saw its siblings would be penalized for tokens that its path lacks."""
    logits = torch.randn(1, 4, 10, generator=torch.Generator().manual_seed(0))
    draws = Draws([Sampling(0.0, 0, 1.0, 1.5)], [0], torch.device("cpu"))
    found = draws.penalise(logits, [[1, 2, 2]], [[-1, -1, 0]], torch.tensor([[3, 4, 5]]))
    for row, seen in enumerate([{1, 2}, {1, 2, 3}, {1, 2, 4}, {1, 2, 3, 5}]):
        assert torch.equal(found[0, row], penalised_by_hand(logits[0, row], seen, 1.5))
    off = Draws([HOT], [0], torch.device("cpu"))
    assert off.penalise(logits, [[1]], [[]], torch.empty(1, 0)) is logits


def test_the_penalty_equals_transformers_and_drafts_do_not_change_it(target, prompts):
    import transformers

    processor = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(1))
    text = [3, 7, 7, 1]
    draws = Draws([Sampling(0.0, 0, 1.0, 1.3)], [0], torch.device("cpu"))
    ours = draws.penalise(logits.unsqueeze(1), [text], [[]], torch.empty(1, 0))[:, 0]
    assert torch.equal(ours, processor(torch.tensor([text]), logits))
    options = {"max_new_tokens": 16, "sampling": Sampling(0.8, 0, 1.0, 1.3)}
    plain = texts(target, prompts, **options)
    assert plain != texts(target, prompts, max_new_tokens=16, sampling=Sampling(0.8, 0, 1.0))
    assert texts(target, prompts, drafter=Lookup(), **options) == plain
