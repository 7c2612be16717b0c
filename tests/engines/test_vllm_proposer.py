"""Text drafters as vLLM's V1 runner calls them: rows of tokens with lengths, and requests that change rows."""

from types import SimpleNamespace

import numpy as np
import pytest

from specctl.drafters import checkpoint
from specctl.drafters.retrieval.drafter import FAMILY as retrieval
from specctl.drafters.text.lookup import NGramIndex
from specctl.engines.vllm_proposer import KEY, TextProposer
from specctl.errors import SpecctlError, UsageError

LONGEST, TOKENS, VOCAB = 64, 4, 100
REPEATED = [5, 6, 7, 8, 9, 1, 5, 6]


def proposer(*named, tokens=TOKENS, additional=None):
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=tokens),
        model_config=SimpleNamespace(max_model_len=LONGEST, get_vocab_size=lambda: VOCAB),
        additional_config={KEY: list(named)} if additional is None else additional,
    )
    return TextProposer(config)


def asked(drafter, texts, sampled=None):
    """The drafts for texts. The last token of each was sampled in this step, unless `sampled` is given."""
    table = np.full((len(texts), LONGEST), -7, np.int32)  # padding after a text is never read
    for row, text in enumerate(texts):
        table[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts])
    return drafter.propose(sampled or [text[-1:] for text in texts], lengths, table)


def store(place, vocab=VOCAB):
    kept = retrieval.collect([([1, 2, 30, 31, 32, 33, 34], 2), ([1, 2, 30, 31, 32, 33, 34], 2)])
    config = retrieval.checkpoint_config(kept, {"name": "some", "vocab_size": vocab})
    return str(checkpoint.save(place, config=config, tensors=retrieval.tensors(kept), info={}))


def ours(text, count=TOKENS):
    index = NGramIndex()
    index.extend(text)
    return index.continuation(text, count)


def test_the_default_drafter_is_lookup():
    assert asked(proposer(additional={}), [REPEATED]) == [[7, 8, 9, 1]] == [ours(REPEATED)]


def test_drafts_do_not_depend_on_row_changes():
    """Every answer equals the answer of a new proposer."""
    rng, drafter, names, texts = np.random.default_rng(3), proposer("lookup", "suffix"), [0, 1, 2], {}
    single = proposer("lookup")
    for step in range(60):
        if step % 7 == 3:
            names = [*names[1:], max(names) + 1]
        rng.shuffle(names)
        for name in names:
            texts.setdefault(name, rng.integers(1, 6, 5).tolist())
            texts[name] = [*texts[name], *rng.integers(1, 6, rng.integers(1, 3)).tolist()][:LONGEST]
        rows = [texts[name] for name in names]
        assert asked(single, rows) == [ours(text, min(TOKENS, LONGEST - len(text) - 1)) for text in rows]
        asked(drafter, rows)
        assert [request.ids for request in drafter.requests] == rows
        known = {id(request) for request in drafter.requests}
        assert len(known) == len(rows)
    assert any(sum(trust.claimed) > 17 for request in drafter.requests for trust in request.trust)


def test_two_requests_with_one_prompt_are_kept_apart():
    drafter = proposer("lookup")
    asked(drafter, [REPEATED, REPEATED])
    assert asked(drafter, [[*REPEATED, 9], [*REPEATED, 7]]) == [ours([*REPEATED, 9]), ours([*REPEATED, 7])]


def test_a_row_with_another_text_is_read_again():
    drafter = proposer("suffix")
    asked(drafter, [REPEATED])
    other = [9, 8, 9, 8, 9]
    assert asked(drafter, [other]) == asked(proposer("suffix"), [other]) != [[]]


def test_without_a_sampled_token_or_room_nothing_is_drafted():
    drafter = proposer("lookup")
    assert asked(drafter, [REPEATED, REPEATED], [[], [6]]) == [[], [7, 8, 9, 1]]
    full = (REPEATED * 9)[: LONGEST - 2]
    assert len(asked(drafter, [full])[0]) == 1 and asked(drafter, [(REPEATED * 9)[:LONGEST]]) == [[]]
    assert asked(drafter, [[3]]) == [[]]


def test_a_datastore_drafts_where_the_text_has_no_match(tmp_path):
    assert asked(proposer(store(tmp_path / "store")), [[7, 1, 2]]) == [[30, 31, 32, 33]]
    assert asked(proposer("lookup"), [[7, 1, 2]]) == [[]]


def test_the_drafter_with_more_correct_drafts_is_preferred(tmp_path):
    """The store drafts 30 after 2, but the text always continues with 3. After some rounds lookup is preferred."""
    both, text, drafts = proposer("lookup", store(tmp_path / "store")), [1, 2], []
    for _ in range(8):
        drafts.append(asked(both, [text])[0][:1])
        text = [*text, 3, 4, 1, 2]
    assert drafts[0] == [30] and drafts[-1] == [3]
    request = both.requests[0]
    assert request.trust[0](0.9) > request.trust[1](0.9)


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("eagle9", "no text drafter 'eagle9'"),
        (None, "is None"),
        ([], r"is \[\]"),
        ([3], r"is \[3\]"),
        ("empty", "empty"),
        ("head", "not a datastore; `specctl export .*head --to vllm` prints the command for eagle3"),
        ("other", "a target of 7 tokens, but this model has 100"),
    ],
)
def test_unusable_drafters_are_refused_when_loaded(tmp_path, named, says):
    (tmp_path / "empty").mkdir()
    checkpoint.save(tmp_path / "head", config={"family": "eagle3", "target": {}}, tensors={}, info={})
    store(tmp_path / "other", vocab=7)
    place = [str(tmp_path / named) if (tmp_path / named).exists() else named] if isinstance(named, str) else named
    with pytest.raises(SpecctlError, match=says) as error:
        proposer(additional={KEY: place})
    assert isinstance(error.value, UsageError) or named == "empty"
