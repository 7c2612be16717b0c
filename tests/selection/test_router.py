"""The router: it learns which drafter suits a prompt, is saved and loaded, and is refused for another pool."""

import json
import pickle
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers.models import WordLevel
from transformers import BertConfig, BertModel, BertTokenizerFast, PreTrainedTokenizerFast

from specctl import data_prep
from specctl.drafters.checkpoint import digests
from specctl.drafters.pool import find_pool
from specctl.errors import CheckpointError, DataError, SpecctlError, UsageError
from specctl.lab.recorded.hindsight import round_starts
from specctl.lab.recorded.trace import Table, Trace
from specctl.lab.routing.router import RECORD, Router
from specctl.lab.routing.training import (
    RouterExample,
    label_by_domain,
    label_by_hindsight,
    perturb_all,
    split,
    train_router,
)
from specctl.lab.train_router.recipe import RouterRecipe

ARMS = ["sql-eagle", "math-eagle", "code-eagle"]
DOMAINS = ["sql", "math", "code"]
SMALL = RouterRecipe(
    layers=1, hidden_size=32, lr=5e-3, epochs=8, max_length=48, perturbations={"drop": 0.3, "wrap": 1.0}
)


def generated(count, split="train"):
    return [
        RouterExample(text, domain, arm)
        for arm, domain in enumerate(DOMAINS)
        for text in data_prep.get(domain).generate(count, 0, split)
    ]


@pytest.fixture(scope="module")
def trained(target):
    return train_router(SMALL, generated(80), ARMS, target)


@pytest.fixture
def saved(trained, target, tmp_path):
    return trained[0].save(tmp_path / "router", target, report=asdict(trained[1]))


def test_token_ids_may_have_gaps():
    """The small encoder had a row for every token, and none for the last ids of a vocabulary with gaps."""
    words = tokenizers.Tokenizer(WordLevel({"[UNK]": 0, "students": 9}, unk_token="[UNK]"))
    target = SimpleNamespace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"))
    assert Router.new(SMALL, ARMS, target).probabilities(["students"]).shape == (1, 3)


def test_a_trained_router_recognizes_domains(trained):
    router, report = trained
    assert (report.trained, report.held_out) == (192, 48)
    unseen = generated(40, "test")
    chosen = router.probabilities([example.text for example in unseen]).argmax(1)
    assert np.mean(chosen == [example.arm for example in unseen]) > 0.95
    assert report.accuracy > 0.95
    assert report.confusion["sql"]["sql-eagle"] == round(16 * report.per_domain["sql"])
    assert set(report.perturbed) == {"drop", "wrap"} and report.ms_per_prompt > 0
    assert router.arm("") in range(3)


def test_probabilities_do_not_depend_on_the_batch(trained):
    """Longer neighbors in the batch must not change a prompt's row."""
    router, _ = trained
    texts = ["SELECT", "", "x = 1\n" * 500, "What is 12 + 30?"]
    together = router.probabilities(texts)
    assert together.shape == (4, 3) and together.dtype == np.float64
    np.testing.assert_allclose(together.sum(1), 1)
    alone = np.concatenate([router.probabilities([text]) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert router.probabilities([]).shape == (0, 3)


def test_the_same_seed_trains_the_same_router(target):
    """Training also leaves torch's global generator unchanged."""
    recipe = SMALL.model_copy(update={"epochs": 1, "perturbations": {}})
    before = torch.random.get_rng_state()
    first, again = (train_router(recipe, generated(12), ARMS, target)[0] for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    np.testing.assert_array_equal(first.probabilities(["a b"]), again.probabilities(["a b"]))


def test_training_does_not_change_the_targets_tokenizer(trained, target):
    """Truncation is a state of a fast tokenizer: with a shared one, the router would truncate the target's prompts."""
    assert target.tokenizer.backend_tokenizer.truncation is None
    assert target.tokenizer.chat_template is not None


def test_a_loaded_router_equals_the_saved_one(trained, saved, target):
    texts = [example.text for example in generated(5)]
    loaded = Router.load(saved, ARMS, target)
    np.testing.assert_array_equal(loaded.probabilities(texts), trained[0].probabilities(texts))
    assert json.loads((saved / RECORD).read_text())["report"]["accuracy"] == trained[1].accuracy


def test_columns_follow_the_order_of_the_pool(trained, saved, target):
    """Otherwise every prompt would go to a wrong drafter."""
    loaded = Router.load(saved, ARMS[::-1], target)
    texts = [example.text for example in generated(5)]
    np.testing.assert_array_equal(loaded.probabilities(texts), trained[0].probabilities(texts)[:, ::-1])
    again = loaded.save(saved.with_name("again"), target, report={})
    np.testing.assert_array_equal(
        Router.load(again, ARMS, target).probabilities(texts)[:, ::-1], loaded.probabilities(texts)
    )


def test_a_router_for_another_pool_is_refused(saved, target):
    with pytest.raises(CheckpointError, match="it lacks lookup; the pool lacks code-eagle") as error:
        Router.load(saved, ["sql-eagle", "math-eagle", "lookup"], target)
    assert "train-router" in error.value.hint


def test_a_router_for_another_target_is_refused(saved, target):
    record = json.loads((saved / RECORD).read_text())
    record["target"] |= {"name": "other", "hidden_size": 7}
    (saved / RECORD).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"router .* was made for other"):
        Router.load(saved, ARMS, target)


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_pickles_are_never_read(saved, target):
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    Router.load(saved, ARMS, target)
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        Router.load(saved, ARMS, target)
    record = json.loads((saved / RECORD).read_text())
    del record["files"]["model.safetensors"]
    (saved / RECORD).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"does not list model\.safetensors"):
        Router.load(saved, ARMS, target)


def test_a_router_without_its_head_is_refused(saved, target):
    """The files hold an encoder only, with matching digests: `transformers` would initialize the missing head at
    random."""
    held = load_file(saved / "model.safetensors")
    encoder = {name: tensor for name, tensor in held.items() if not name.startswith("classifier.")}
    save_file(encoder, saved / "model.safetensors", metadata={"format": "pt"})
    record = json.loads((saved / RECORD).read_text())
    record["files"] |= {name: about for name, about in digests(saved).items() if name in record["files"]}
    (saved / RECORD).write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=r"its files lack classifier\.bias, classifier\.weight"):
        Router.load(saved, ARMS, target)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_file_is_named(saved, target, name):
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        Router.load(saved, ARMS, target)


FORMATTED = '{"format": 1, "max_length": 4, "target": {}, "files": {}, "arms": '


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', "{" * 3000, FORMATTED + "[1]}", FORMATTED + "[]}"])
def test_an_invalid_record_is_named(saved, target, text):
    (saved / RECORD).write_text(text)
    with pytest.raises(CheckpointError, match=RECORD):
        Router.load(saved, ARMS, target)


@pytest.mark.parametrize("length", [-1, 0, 10**30, True])
def test_an_impossible_length_of_prompts_is_refused(saved, target, length):
    """The first prompt used to end the run with a traceback."""
    record = json.loads((saved / RECORD).read_text())
    (saved / RECORD).write_text(json.dumps(record | {"max_length": length}))
    with pytest.raises(CheckpointError, match=RECORD):
        Router.load(saved, ARMS, target)


def test_a_missing_router_directory_is_refused(tmp_path, target):
    with pytest.raises(CheckpointError, match="no router directory"):
        Router.load(tmp_path / "none", ARMS, target)


def test_overwrite_replaces_only_a_router(trained, saved, target):
    router, _ = trained
    with pytest.raises(UsageError, match="already contains a router"):
        router.save(saved, target, report={})
    router.save(saved, target, report={}, overwrite=True)
    precious = saved.with_name("precious")
    precious.mkdir()
    (precious / "file").touch()
    with pytest.raises(UsageError, match="not a router"):
        router.save(precious, target, report={}, overwrite=True)


def test_a_router_beside_the_drafters_is_not_an_arm(saved):
    with pytest.raises(CheckpointError, match="no drafters"):
        find_pool(saved.parent)


@pytest.fixture
def bert(tmp_path):
    """A BERT checkpoint like the hub's: an encoder without our head, a WordPiece tokenizer, at most 40 positions."""
    words = sorted({word for example in generated(30) for word in example.text.lower().split() if word.isalpha()})
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    place = tmp_path / "bert"
    BertTokenizerFast(str(vocabulary)).save_pretrained(place)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 64,
        "initializer_range": 0.2,
    }
    config = BertConfig(vocab_size=len(words) + 5, max_position_embeddings=40, **shape)
    BertModel(config).save_pretrained(place)
    return place


def test_a_pretrained_encoder_is_fine_tuned(bert, target, tmp_path):
    recipe = SMALL.model_copy(update={"model": str(bert), "max_length": 128, "perturbations": {}})
    router, report = train_router(recipe, generated(80), ARMS, target)
    assert router.max_length == 40 and report.accuracy > 0.9
    place = router.save(tmp_path / "router", target, report=asdict(report))
    texts = ["", "SELECT names", "word " * 100]
    np.testing.assert_array_equal(Router.load(place, ARMS, target).probabilities(texts), router.probabilities(texts))


def test_an_encoder_with_only_pickled_weights_is_refused(bert, target):
    (bert / "model.safetensors").unlink()
    (bert / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="cannot load the classifier"):
        train_router(SMALL.model_copy(update={"model": str(bert)}), generated(4), ARMS, target)


@pytest.mark.parametrize(("file", "content"), [("model.safetensors", b"short"), ("config.json", b"[]")])
def test_a_damaged_encoder_is_refused(bert, target, file, content):
    """Damaged weights used to end with a SafetensorError and without the name of the encoder."""
    (bert / file).write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot load the classifier"):
        train_router(SMALL.model_copy(update={"model": str(bert)}), generated(4), ARMS, target)


def test_the_default_learning_rate_depends_on_the_encoder():
    """The rate for training from scratch would destroy a pretrained encoder; the rate for fine-tuning would not train a
    new one."""
    assert RouterRecipe(model="bert-base-uncased").learning_rate == 2e-5
    assert RouterRecipe().learning_rate > 1e-4
    assert RouterRecipe(lr=3e-4).learning_rate == 3e-4


def test_a_router_can_be_trained_with_one_arm_or_one_label(target):
    recipe = SMALL.model_copy(update={"epochs": 1})
    one, report = train_router(recipe, [RouterExample(f"prompt {n}", "sql", 0) for n in range(8)], ["only"], target)
    np.testing.assert_array_equal(one.probabilities(["x", ""]), [[1.0], [1.0]])
    assert report.accuracy == 1 and report.perturbed["wrap"] == 1
    unused, _ = train_router(recipe, [RouterExample(f"prompt {n}", "sql", 1) for n in range(8)], ARMS, target)
    assert unused.probabilities(["x"]).shape == (1, 3)


def test_too_few_prompts_are_refused(target):
    with pytest.raises(DataError, match="too few"):
        train_router(SMALL, [RouterExample("a", "sql", 0), RouterExample("b", "math", 1)], ARMS, target)


def test_training_stops_at_a_loss_that_is_not_finite(target):
    with pytest.raises(SpecctlError, match="not finite"):
        train_router(SMALL.model_copy(update={"lr": 1e30}), generated(12), ARMS, target)


def test_the_split_holds_out_prompts_of_every_domain():
    kept, held = split(generated(10), SMALL)
    assert [sum(example.domain == domain for example in held) for domain in DOMAINS] == [2, 2, 2]
    assert not {example.text for example in kept} & {example.text for example in held}
    assert split(generated(10), SMALL) == (kept, held)


def test_foreign_text_comes_from_another_domain():
    examples = [RouterExample("a b", "x", 0), RouterExample("c d", "y", 1)]
    assert perturb_all(examples, "prefix", 1.0, 0) == ["c d\n\na b", "a b\n\nc d"]


def test_a_domain_is_labeled_with_its_most_specialized_drafter(capsys):
    made_for = [["sql", "math", "code"], ["sql"], ["math", "sql"], [], ["sql"]]
    assert label_by_domain(["sql", "math", "code", "chat", "sql"], made_for) == {
        "sql": 1,
        "math": 2,
        "code": 0,
        "chat": 0,
    }
    assert capsys.readouterr().err == ""
    assert label_by_domain(["sql", "chat"], [["sql"], ["math"]]) == {"sql": 0}
    assert "no drafter was made for chat" in capsys.readouterr().err


def trace(query, accepted):
    accepted = np.array(accepted, np.int16)
    nothing = np.zeros((*accepted.shape, 2))
    return Trace(query, "sql", accepted, accepted, nothing, nothing, nothing.astype(bool), True)


def test_the_hindsight_label_is_the_arm_with_the_fewest_rounds():
    """Rounds are counted along each arm's own trajectory: the accepted lengths summed over all positions would choose
    arm 0 for `a`."""
    a = trace("a", [[0, 2, 1, 0, 2], [2, 0, 0, 1, 0]])
    assert round_starts(a.accepted).sum(axis=1).tolist() == [3, 2]
    even = trace("b", [[1, 0, 1, 0], [1, 0, 1, 0]])
    table = Table(["x", "y"], 2, [a, even], np.zeros(2), np.zeros(3), np.full(2, 2))
    assert label_by_hindsight(table, ["x", "y"]) == {"a": 1, "b": 0}


@pytest.mark.parametrize("pool", [["suffix", "lookup"], ["lookup", "suffix"], ["lookup", "sql"], ["lookup"]])
def test_hindsight_labels_follow_the_order_of_the_pool(pool):
    """The pool may be a part of the table, in another order."""
    one = trace("a", [[2, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]])  # rounds: 1, 3, 2, 3
    arms = ["ofa", "sql", "lookup", "suffix"]
    table = Table(arms, 2, [one], np.zeros(4), np.zeros(5), np.full(4, 2))
    assert pool[label_by_hindsight(table, pool)["a"]] == "lookup"
    with pytest.raises(CheckpointError, match="no arm math"):
        label_by_hindsight(table, [*pool, "math"])
