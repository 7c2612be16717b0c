"""Public data sets are converted to prompts, here from local rows of the same shape."""

import io

import datasets
import pytest
from specctl.data_prep import DOMAINS, get, load_public

from specctl.errors import DataError

# one row of each data set, with its real column names and types
ROWS = {
    "sql": {"question": "How many heads?", "context": "CREATE TABLE head (age INTEGER)", "answer": "…"},
    "code": {"task_id": 1, "text": "Write a function to add.", "test_list": ["assert add(1, 2) == 3", "assert f()"]},
    "math": {"question": "Ann has 2 figs. How many?", "answer": "#### 2"},
    "medical": {
        "pubid": 1,
        "question": "Does it help?",
        "context": {"contexts": ["It was given.", "It did."], "labels": ["METHODS", "RESULTS"]},
    },
    "biochem": {"question": "What carries oxygen?", "correct_answer": "hemoglobin", "support": ""},
    "summarization": {"source": ["We study heads.", "They work."], "target": ["Heads work."]},
    "chat": {"instruction": "Name a fruit.", "context": "", "response": "Fig", "category": "open_qa"},
}  # fmt: skip
PROMPTS = {
    "sql": "Given the database schema, write one SQL query that answers the question.\n\n"
    "Schema:\nCREATE TABLE head (age INTEGER);\n\nQuestion: How many heads?",
    "code": "Write a function to add. Your code should pass these tests:\n\nassert add(1, 2) == 3\nassert f()",
    "math": "Ann has 2 figs. How many?",
    "medical": "Answer the research question from the abstract.\n\nIt was given.\nIt did.\n\nQuestion: Does it help?",
    "biochem": "What carries oxygen?",
    "summarization": "Summarize this paper abstract in one sentence.\n\nWe study heads.\nThey work.",
    "chat": "Name a fruit.",
}


@pytest.fixture(autouse=True)
def reachable(monkeypatch):
    monkeypatch.setattr("socket.create_connection", lambda *args: io.BytesIO())


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Replace `load_dataset` by a local one that records its arguments."""
    real, asked = datasets.load_dataset, []

    def serve(rows):
        path = tmp_path / "rows.jsonl"
        datasets.Dataset.from_list(rows).to_json(path)

        def load(id, config=None, *, split, **where):
            asked.append((id, config, split, where))
            return real("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return serve


@pytest.mark.parametrize("name", DOMAINS)
def test_rows_become_prompts(name, hub):
    asked = hub([ROWS[name]])
    assert list(load_public(get(name), "test")) == [PROMPTS[name]]
    ((id, config, split, where),) = asked
    public = DOMAINS[name].public
    assert (id, config, split) == (public.id, public.config, public.split["test"])
    assert where == ({"revision": "refs/convert/parquet", "data_dir": "Abstract"} if name == "summarization" else {})


def test_the_limit_counts_nonempty_rows(hub):
    hub([{"question": text} for text in ("one", " ", "two", "three")])
    assert list(load_public(get("math"), "train", limit=2)) == ["one", "two"]


def test_context_is_appended_if_present(hub):
    hub([{"instruction": "Say it shorter.", "context": "A long text."}])
    assert list(load_public(get("chat"))) == ["Say it shorter.\n\nA long text."]


def test_a_missing_column_is_named(hub):
    hub([{"prompt": "one", "answer": "two"}])
    with pytest.raises(DataError, match=r"openai/gsm8k: no column 'question'; this row has prompt, answer"):
        list(load_public(get("math")))


def test_a_network_error_is_reported(monkeypatch):
    def load(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"cannot load the data set openai/gsm8k: ConnectionError: no route") as caught:
        load_public(get("math"))
    assert "generator" in caught.value.hint


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="validation"):
        load_public(get("math"), "validation")


def test_an_unreachable_hub_is_reported_at_once(monkeypatch, capfd):
    """`huggingface_hub` tried six times within 30 seconds, and printed every try."""
    from huggingface_hub import constants

    def refused(*args):
        raise ConnectionRefusedError(111, "Connection refused")

    before = constants.HF_HUB_OFFLINE
    monkeypatch.setattr("socket.create_connection", refused)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(DataError, match=r"openai/gsm8k: .* huggingface.co cannot be reached \(Connection refused\)"):
        load_public(get("math"))
    assert (constants.HF_HUB_OFFLINE, capfd.readouterr().err) == (before, "")


def test_a_proxy_for_all_schemes_is_used(monkeypatch):
    from huggingface_hub import constants

    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.create_connection", lambda place, _: asked.append(place) or io.BytesIO())
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"all": "socks5://proxy:1080"})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: [{"question": f"{constants.HF_HUB_OFFLINE}"}])
    assert list(load_public(get("math"))) == ["False"] and asked == [("proxy", 1080)]
