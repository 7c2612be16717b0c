import json
import tracemalloc
from array import array

import pytest

from specctl.distillation import store
from specctl.errors import CheckpointError, DataError
from specctl.training import data
from specctl.training.data import (
    SAMPLE,
    batches,
    frequent_tokens,
    held_out_numbers,
    load_distilled,
    load_text,
)
from specctl.training.example import Example


def examples(count=50):
    return [Example(i, str(i), list(range(10 + i % 7)), 4) for i in range(count)]


def test_an_epoch_holds_every_example_once_in_an_order_given_by_the_seed():
    first = batches(examples(), 64, seed=0, epoch=0)
    assert sorted(e.index for batch in first for e in batch) == list(range(50))
    assert first == batches(examples(), 64, seed=0, epoch=0)
    assert first != batches(examples(), 64, seed=0, epoch=1) != batches(examples(), 64, seed=1, epoch=1)
    assert all(sum(e.response_length for e in batch) <= 64 for batch in first)


def test_an_example_takes_five_bytes_per_token(distilled, target):
    """Including overhead; a list takes 8 bytes for the pointer and 28 for an integer above 256."""

    def bytes_a_token(form):
        tracemalloc.start()
        kept = [Example(i, f"sql-{i:016}", form(range(1000, 1600)), 100) for i in range(300)]
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size / (600 * len(kept))

    assert bytes_a_token(lambda ids: array("i", ids)) < 5 and bytes_a_token(list) > 30
    corpus = load_distilled([distilled], target, max_length=2048, held_out=0.3, prompts=4)
    assert {type(example.tokens) for example in corpus.train} == {array}


def test_a_response_longer_than_a_batch_is_a_batch_of_its_own():
    long = Example(0, "a", list(range(100)), 4)
    assert batches([long], 8, seed=0, epoch=0) == [[long]]


def test_draft_vocabulary_holds_the_end_token_and_the_most_frequent_response_tokens():
    data = [Example(0, "a", [9, 9, 5, 5, 5, 7], 2)]  # 9 occurs in the prompt only
    assert frequent_tokens(data, 3, frozenset({3})) == [3, 5, 7]
    assert frequent_tokens(data, 5, frozenset({3})) == [0, 1, 3, 5, 7]


def test_held_out_prompts_are_not_trained_on(distilled, target):
    corpus = load_distilled([distilled], target, max_length=2048, held_out=0.3, prompts=4)
    assert len(corpus.held_out) == 4
    trained = {tuple(e.tokens[: e.prompt_length]) for e in corpus.train}
    assert not trained & {tuple(prompt.ids) for prompt in corpus.held_out}
    assert corpus.domains == ["biochem"]
    described = {tuple(prompt.ids) for prompt in corpus.prompts["biochem"]}
    assert described <= trained and len(described) == min(len(trained), SAMPLE)


@pytest.mark.parametrize("length", [0, 2048])
def test_a_prompt_that_the_target_cannot_decode_is_not_held_out(distilled, target, monkeypatch, length):
    """Logs have such prompts. The acceptance check refused them at the end of the training."""
    rows = records(distilled, 12)
    monkeypatch.setattr(data.store, "read", lambda directory: iter(rows))
    options = dict(max_length=4096, held_out=0.5, prompts=4)
    first = load_distilled([distilled], target, **options).held_out[0].ids
    next(row for row in rows if row["prompt_ids"] == first)["prompt_ids"] = [5] * length
    assert [5] * length not in [prompt.ids for prompt in load_distilled([distilled], target, **options).held_out]


@pytest.mark.parametrize("directories", [1, 2, 3])
@pytest.mark.parametrize("held_out", [1e-9, 0.1, 0.3, 0.5, 1 - 1e-9])
def test_a_plan_counts_the_prompts_that_training_holds_out(distilled, target, monkeypatch, held_out, directories):
    """The plan promised prompts that no training held out."""
    rows = records(distilled, 12)
    parts = [rows[start::directories] for start in range(directories)]
    monkeypatch.setattr(data.store, "read", lambda number: iter(parts[number]))
    for prompts in (2, 7, 32):
        planned = held_out_numbers([[row["prompt_id"] for row in part] for part in parts], held_out, prompts)
        corpus = load_distilled(list(range(directories)), target, max_length=2048, held_out=held_out, prompts=prompts)
        assert planned == (len(corpus.selection_prompts), len(corpus.report_prompts))


def test_data_of_another_target_is_refused(distilled, target, monkeypatch):
    monkeypatch.setitem(target.identity, "vocab_hash", "0" * 16)
    with pytest.raises(CheckpointError, match="different vocabulary"):
        load_distilled([distilled], target, max_length=2048, held_out=0.1, prompts=4)


def test_data_without_usable_responses_is_refused(distilled, target):
    with pytest.raises(DataError, match="no response"):
        load_distilled([distilled], target, max_length=8, held_out=0.1, prompts=4)


def test_text_files_are_cut_and_partly_held_out(target, tmp_path):
    """JSONL and plain text give the same pieces, and every token is in a piece or a held-out text.

    A byte order mark and U+2028, a Unicode line separator, change nothing.
    """
    texts = [f"The {n}th story has many words,\u2028and it goes on for a while. " * 6 for n in range(12)]
    rows = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_text(rows, encoding="utf-8-sig")
    (tmp_path / "a.txt").write_text("\n\n".join(texts), encoding="utf-8-sig")
    found = [load_text(tmp_path / name, target, 50, 0.25, 2) for name in ("a.jsonl", "a.txt")]
    ids = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert found[0].held_out == found[1].held_out == [(ids[0][:32], None), (ids[4][:32], None)]
    kept = [text for number, text in enumerate(ids) if number not in (0, 4)]
    assert sum(len(example.tokens) for example in found[0].train) == sum(map(len, kept))
    assert all(len(example.tokens) <= 50 and example.prompt_length == 1 for example in found[0].train)
    assert [len(e.tokens) for e in found[1].train] == pytest.approx([len(e.tokens) for e in found[0].train], abs=1)


def test_a_single_document_is_trained_on(target, tmp_path):
    """Its first document is held out: a book, or any file with line ends of Windows, had "no text"."""
    (tmp_path / "book.txt").write_text("It was a long day, and nobody said a word. " * 8)
    corpus = load_text(tmp_path / "book.txt", target, 50, 0.02, 2)
    assert corpus.held_out == [] and sum(len(example.tokens) for example in corpus.train) > 32
    (tmp_path / "two.txt").write_bytes(b"It was a long day. " * 8 + b"\r\n\r\n" + b"Nobody said a word. " * 8)
    corpus = load_text(tmp_path / "two.txt", target, 500, 0.02, 2)
    assert (len(corpus.held_out), len(corpus.train)) == (1, 1)


@pytest.mark.parametrize(
    ("content", "says"), [('{"prompt": "x"}', ":1: no `text`"), ("{", ":1: not JSON"), ("", "no text")]
)
def test_invalid_text_files_are_refused(target, tmp_path, content, says):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=says):
        load_text(tmp_path / "a.jsonl", target, 50, 0.25, 2)


def records(distilled, count):
    return list(store.read(distilled))[:count]


def load(monkeypatch, target, found, held_out):
    monkeypatch.setattr(data.store, "read", lambda directory: iter(found))
    return load_distilled(["five"], target, max_length=2048, held_out=held_out, prompts=16)


@pytest.mark.parametrize(
    ("held_out", "says"),
    [(1e-9, "no prompt of five is held out"), (1 - 1e-9, "all 5 prompts of five would be held out")],
)
def test_a_split_with_an_empty_side_trains_on_every_prompt(distilled, target, monkeypatch, capsys, held_out, says):
    """The warning says which of the two happened."""
    corpus = load(monkeypatch, target, records(distilled, 5), held_out)
    assert [e.index for e in corpus.train] == list(range(5)) and corpus.held_out == []
    assert says in capsys.readouterr().err
    assert {tuple(prompt.ids) for prompt in corpus.prompts["biochem"]} == {
        tuple(e.tokens[: e.prompt_length]) for e in corpus.train
    }


@pytest.mark.parametrize("held_out", [1e-9, 1 - 1e-9])
def test_cut_texts_are_counted(distilled, target, monkeypatch, capsys, held_out):
    """This holds too if the split would hold out all prompts."""
    found = records(distilled, 5)
    lengths = sorted(len(one["prompt_ids"] + one["response_ids"]) for one in found)
    limit = max(lengths[2], max(len(one["prompt_ids"]) for one in found) + 2)
    lost = [length - limit for length in lengths if length > limit]
    monkeypatch.setattr(data.store, "read", lambda directory: iter(found))
    corpus = load_distilled(["five"], target, max_length=limit, held_out=held_out, prompts=16)
    assert corpus.counts | {"trained": 5, "cut": len(lost), "cut_tokens": sum(lost)} == corpus.counts and lost
    assert capsys.readouterr().err.count(f"{len(lost)} texts cut") == 1


def test_empty_responses_are_skipped(distilled, target, monkeypatch, capsys):
    found = records(distilled, 5)
    found[2]["response_ids"] = found[2]["response_ids"][:1]
    load(monkeypatch, target, found, 1e-9)
    assert "1 response left out, with" in capsys.readouterr().err
    found[1]["response_ids"] = []
    corpus = load(monkeypatch, target, found, 1e-9)
    assert [e.index for e in corpus.train] == list(range(3))
    assert "2 responses left out, with" in capsys.readouterr().err


def test_padding_rows_of_the_embedding_are_chosen_last():
    """Models round up their vocabulary; ids beyond the tokenizer's never occur and would waste rows of the head."""
    data, tokenizer, embedding = [Example(0, "a", [9, 7, 7, 11], 1)], 12, 16
    assert max(frequent_tokens(data, tokenizer, frozenset({3}))) == tokenizer - 1
    assert frequent_tokens(data, embedding, frozenset({3})) == list(range(embedding))
