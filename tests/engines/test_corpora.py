"""Datastores in running SGLang servers: all of them get the new corpus or none, and the old corpus is removed last."""

import pytest

from specctl.engines.client import Client
from specctl.engines.records import EngineError
from specctl.errors import SpecctlError, UsageError
from specctl.formats.corpus import CorpusTexts
from specctl.recipe import ServerRecipe
from tests.toys.engine import Corpora, FakeEngine

ADD, REMOVE, LIST = "/add_external_corpus", "/remove_external_corpus", "/list_external_corpora"


def corpus(text, *texts):
    sizes = [len(text.tokenizer.encode(one, add_special_tokens=False)) for one in texts]
    return CorpusTexts(list(texts), sum(sizes) + len(sizes) - 1, 0)


@pytest.fixture
def first(text):
    return corpus(text, "SELECT name FROM singer;", "SELECT COUNT(*) FROM concert;")


@pytest.fixture
def second(text):
    return corpus(text, "SELECT name FROM singer;", "SELECT age FROM pet;", "SELECT 1;")


def server(text, **options):
    engine = FakeEngine(text.tokenizer, "sglang")
    engine.admin = Corpora(text.tokenizer, **options)
    return engine


@pytest.fixture
def engine(text):
    with server(text) as engine:
        yield engine


def recipe(*engines):
    return ServerRecipe(urls=[engine.url for engine in engines], timeout_s=10)


def refusal(client, given, name="sql", kind=SpecctlError):
    with pytest.raises(kind) as caught:
        client.publish_corpus(name, given)
    return f"{caught.value.message} | {caught.value.hint}"


def test_a_corpus_is_published_and_replaced(text, engine, first, second):
    admin = engine.admin
    with Client(recipe(engine)) as client:
        client.check(text)
        (one,) = client.publish_corpus("sql", first)
        assert admin.texts == {one.corpus: first.texts} and one.corpus.startswith("sql@")
        assert one.tokens == first.tokens and one.replaced == []
        seen = []
        engine.breaks = lambda name: seen.append((name, len(admin.texts)))
        (two,) = client.publish_corpus("sql", second)
        assert admin.texts == {two.corpus: second.texts} and two.replaced == [one.corpus]
        # The old corpus is removed after the new one was added.
        assert seen == [(ADD, 1), (REMOVE, 2)]
        (again,) = client.publish_corpus("sql", second)
        assert again.tokens is None and again.corpus == two.corpus and len(seen) == 2


def test_corpora_with_other_names_stay(text, engine, first, second):
    engine.admin.add("somebody", documents=["a b c"])
    with Client(recipe(engine)) as client:
        client.publish_corpus("sql", first)
        client.publish_corpus("sql-2", first)
        client.publish_corpus("sql", second)
    assert sorted(name.partition("@")[0] for name in engine.admin.texts) == ["somebody", "sql", "sql-2"]


@pytest.mark.parametrize("fault", ["error", "reset", "gone"])
def test_if_one_of_two_servers_fails_neither_gets_the_new_corpus(text, first, second, fault, engine):
    with server(text) as other, Client(recipe(engine, other)) as client:
        before = [one.corpus for one in client.publish_corpus("sql", first)]
        once = iter([fault])
        other.breaks = lambda name: next(once, None) if name == ADD else None
        assert other.url in refusal(client, second, kind=EngineError)
        assert [[*one.admin.texts] for one in (engine, other)] == [[name] for name in before]
        client.publish_corpus("sql", second)
        assert [one.admin.texts for one in (engine, other)] == [engine.admin.texts] * 2
        assert [*engine.admin.texts.values()] == [second.texts]


def test_a_corpus_that_cannot_be_removed_again_is_named(text, first, engine):
    with server(text) as other, Client(recipe(engine, other)) as client:
        other.breaks = lambda name: "error" if name == ADD else None
        engine.breaks = lambda name: "error" if name == REMOVE else None
        assert f"may be left in {engine.url}" in refusal(client, first)


def test_an_old_corpus_that_was_not_removed_is_named(engine, first, second, capsys):
    with Client(recipe(engine)) as client:
        (one,) = client.publish_corpus("sql", first)
        engine.breaks = lambda name: "error" if name == REMOVE else None
        (two,) = client.publish_corpus("sql", second)
    assert two.replaced == [] and sorted(engine.admin.texts) == sorted([one.corpus, two.corpus])
    assert f"still has {one.corpus}, which it did not remove" in capsys.readouterr().err


UNABLE = [
    (dict(algorithm="EAGLE3"), "drafts by EAGLE3, but only NGRAM uses corpora | start SGLang with --speculative-alg"),
    (dict(algorithm=None), "it does not draft"),
    (dict(budget=0), "it does not draft from corpora (budget 0) | start SGLang with"),
    (dict(budget=None), "it does not support external corpora | SGLang 0.5.23 does"),
    (dict(budget="many"), "no number of tokens in its server info"),
    (dict(most=3), "has room for 3 tokens of corpora and holds 0"),
]


@pytest.mark.parametrize(("options", "words"), UNABLE)
def test_an_unsuitable_server_is_refused_before_anything_changes(text, first, engine, options, words):
    with server(text, **options) as other, Client(recipe(engine, other)) as client:
        said = refusal(client, first, kind=EngineError)
        assert words in said and other.url in said
    assert not engine.posted and not other.posted


def test_an_older_server_without_corpora_is_refused(engine, first):
    engine.admin.__class__ = type("Older", (Corpora,), {"pages": property(lambda self: {"/server_info": self.info})})
    with Client(recipe(engine)) as client:
        assert f"not have {LIST} | SGLang 0.5.23 has it" in refusal(client, first, kind=EngineError)


def test_the_server_needs_room_for_the_old_and_the_new_corpus(text, first, second):
    with server(text, most=first.tokens + second.tokens - 1) as engine, Client(recipe(engine)) as client:
        client.publish_corpus("sql", first)
        said = refusal(client, second)
        assert f"external-corpus-max-tokens {first.tokens + second.tokens}" in said
        assert [*engine.admin.texts.values()] == [first.texts]


def test_a_corpus_truncated_by_the_server_is_removed(text, engine, first):
    """The server may count tokens otherwise, for example with another tokenizer since the check."""
    short = CorpusTexts(first.texts, 5, 0)
    engine.admin.most = first.tokens - 1
    with Client(recipe(engine)) as client:
        assert "of 5 tokens" in refusal(client, short) and not engine.admin.texts


@pytest.mark.parametrize("strange", [{"a": 1}, {"success": True}, {"success": True, "loaded_token_count": "many"}, []])
def test_malformed_answers_are_engine_errors(engine, first, strange):
    engine.breaks = lambda name: strange if name == ADD and strange else None
    if not strange:
        engine.pages = {LIST: {"corpus_token_counts": strange}}
        engine.admin.__class__ = type(
            "Strange", (Corpora,), {"pages": property(lambda self: {"/server_info": self.info})}
        )
    with Client(recipe(engine)) as client:
        refusal(client, first, kind=EngineError)
    assert not engine.admin.texts


def test_vllm_does_not_accept_corpora(text, first):
    with FakeEngine(text.tokenizer, "vllm") as engine, Client(recipe(engine)) as client:
        assert "is vllm, which does not accept corpora while it runs" in refusal(client, first, kind=UsageError)
