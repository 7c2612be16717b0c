"""Datastores for engines: the text file for SGLang, and the commands to serve a datastore."""

import json
import shlex
from dataclasses import replace

import pytest

from specctl.commands.export import export
from specctl.decoding.target_text import load_target_text
from specctl.drafters import checkpoint
from specctl.drafters.retrieval.datastore import LONGEST, Datastore
from specctl.drafters.retrieval.drafter import FAMILY as retrieval
from specctl.engines.vllm_proposer import KEY, TextProposer, named_drafters
from specctl.errors import CheckpointError, RecipeError, UsageError
from specctl.formats import corpus
from specctl.formats.head import TargetFacts
from specctl.recipe import ExportRecipe
from specctl.recipe.resolve import resolve
from tests.toys.engine import Corpora, FakeEngine

TEXTS = [
    "Question: names?\n<|assistant|>\nSELECT name FROM singer;<|end|>",
    "SELECT COUNT(*), 'é' FROM concert;<|end|>",
]


@pytest.fixture(scope="module")
def text():
    return load_target_text("builtin")


@pytest.fixture(scope="module")
def store(text):
    return Datastore.of(text.tokenizer.encode(one, add_special_tokens=False) for one in TEXTS)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory, text, store):
    place = tmp_path_factory.mktemp("drafters") / "sql-retrieval"
    config, tensors = retrieval.checkpoint_config(store, text.identity), retrieval.tensors(store)
    checkpoint.save(place, config=config, tensors=tensors, info={})
    return place


def option(command, name):
    words = shlex.split(command)
    return words[words.index(name) + 1]


def test_a_store_returns_its_documents(text, store):
    assert [*store.documents()] == [text.tokenizer.encode(one, add_special_tokens=False) for one in TEXTS]
    assert [*Datastore.of([[]]).documents()] == [[]]


def test_the_command_of_a_gguf_target_names_its_original(text, store, tmp_path):
    """vLLM and SGLang cannot serve the GGUF file."""
    facts = replace(TargetFacts.of_identity(text.identity), name="/models/m.gguf")
    texts = corpus.corpus_of(store, text.tokenizer)
    for engine in ("vllm", "sglang"):
        (command,) = corpus.serving(engine, tmp_path, facts, 4, texts).commands
        assert " ORIGINAL-MODEL " in command and "m.gguf" not in command


def test_sglang_tokenizes_the_corpus_to_the_stored_tokens(text, store):
    """SGLang splits the file at lines and tokenizes each string without special tokens."""
    made = corpus.corpus_of(store, text.tokenizer)
    read = [text.tokenizer.encode(json.loads(line), add_special_tokens=False) for line in made.lines.splitlines()]
    assert read == [*store.documents()] and made.tokens == sum(map(len, read)) + 1 and not made.notes


def test_responses_that_tokenize_differently_are_counted(text):
    context = text.tokenizer.encode("a b c d e f g h i j k l m n o p q r s t u", add_special_tokens=False)[:LONGEST]
    whole = text.tokenizer.encode("SELECT name", add_special_tokens=False)
    apart = [token for letter in "SELECT" for token in text.tokenizer.encode(letter, add_special_tokens=False)]
    made = corpus.corpus_of(Datastore.of([[*context, *whole], [*context, *apart], []]), text.tokenizer)
    assert made.changed == 1 and len(made.texts) == 2 and "1 of 2 responses" in made.notes[0]


def test_export_for_sglang_writes_the_corpus_and_its_command(drafter, tmp_path, store, text):
    result = export(ExportRecipe(drafter=drafter, to="sglang", output_dir=tmp_path / "out"))
    (command,) = result.commands
    assert option(command, "--speculative-algorithm") == "NGRAM"
    path = option(command, "--speculative-ngram-external-corpus-path")
    assert path == str(tmp_path / "out" / corpus.FILE) and result.files == ["corpus.jsonl", "export.json"]
    # SGLang requires 0 < budget < draft tokens, and a positive number of corpus tokens
    budget, nodes = (
        option(command, f"--speculative-{name}") for name in ("ngram-external-sam-budget", "num-draft-tokens")
    )
    assert 0 < int(budget) <= int(nodes) - 1 and "max-tokens" not in command
    assert json.loads((tmp_path / "out" / "export.json").read_text())["commands"] == [command]
    with pytest.raises(UsageError, match="already contains a converted drafter"):
        export(ExportRecipe(drafter=drafter, to="sglang", output_dir=tmp_path / "out"))
    export(ExportRecipe(drafter=drafter, to="sglang", output_dir=tmp_path / "out", overwrite=True, tokens=1))
    big = corpus.CorpusTexts([], corpus.MOST_TOKENS + 1, 0)
    facts = type("Facts", (), {"name": "m", "revision": "r"})
    (command,) = corpus.serving("sglang", tmp_path, facts, 1, big).commands
    assert option(command, "--speculative-ngram-external-corpus-max-tokens") == str(corpus.MOST_TOKENS + 1)
    assert option(command, "--speculative-ngram-external-sam-budget") == "1" and option(command, "--revision") == "r"


def test_the_command_for_vllm_loads_the_directory(drafter, text, tmp_path):
    result = export(ExportRecipe(drafter=drafter, output_dir=tmp_path / "out"))
    (command,) = result.commands
    method = json.loads(option(command, "--speculative-config"))
    assert (
        method["model"] == f"{TextProposer.__module__}.{TextProposer.__name__}" and method["method"] == "custom_class"
    )
    (named,) = json.loads(option(command, "--additional-config"))[KEY]
    assert named == str(drafter) == result.output and not (tmp_path / "out").exists()
    (loaded,) = named_drafters([named], text.vocab_size, method["num_speculative_tokens"])
    assert len(loaded.corpus.tokens) == len(Datastore.of([*loaded.corpus.documents()]).tokens)


def test_options_of_heads_are_refused_for_a_store(drafter, tmp_path):
    for fields, words in (
        ({"to": "hf"}, "cannot be written for hf"),
        ({"to": "vllm", "check": True}, "--check is for heads"),
        ({"to": "sglang", "tune": tmp_path}, "--tune is for heads"),
    ):
        with pytest.raises(UsageError, match=words):
            export(ExportRecipe(drafter=drafter, output_dir=tmp_path / "out", **fields))
    with pytest.raises(RecipeError, match="only SGLang supports"):
        resolve("export", None, ["server.urls=http://a", "to=vllm"])


def test_a_store_of_another_tokenizer_is_refused(tmp_path, text, store):
    config = retrieval.checkpoint_config(store, text.identity | {"vocab_hash": "other"})
    checkpoint.save(tmp_path / "store", config=config, tensors=retrieval.tensors(store), info={})
    with pytest.raises(CheckpointError, match="another tokenizer"):
        export(ExportRecipe(drafter=tmp_path / "store", to="sglang", output_dir=tmp_path / "out"))


def test_a_running_server_receives_the_texts(drafter, store, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with FakeEngine(text.tokenizer, "sglang") as engine:
        engine.admin = Corpora(text.tokenizer)
        recipe = ExportRecipe(drafter=drafter, to="sglang", server={"urls": [engine.url]})
        (one,) = export(recipe).published
        assert engine.admin.texts == {one.corpus: TEXTS} and one.corpus.startswith("sql-retrieval@")
        assert one.tokens == corpus.corpus_of(store, text.tokenizer).tokens
        engine.tokenizer = type("Other", (), {"encode": lambda self, text, **options: [1, 2, 3]})()
        with pytest.raises(CheckpointError, match="a different tokenizer from target"):
            export(recipe)
    assert not [*tmp_path.iterdir()]


def test_heads_are_not_sent_to_a_server(tmp_path, target):
    from tests.measuring.streams import write_head

    head = write_head(tmp_path / "head", target, "eagle3")
    with pytest.raises(UsageError, match="is a head") as caught:
        export(ExportRecipe(drafter=head, to="sglang", server={"urls": ["http://a"]}))
    assert "learn-from-server" in caught.value.hint
