"""Judges: identical steps need no judge, each pair is asked once, and every failure of a judge counts as unaligned."""

import base64
import json
import shutil
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from operator import eq
from pathlib import Path
from statistics import fmean

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from specctl.errors import CheckpointError
from specctl.lab.reasoning import judge as judges
from specctl.lab.reasoning.judge import QUESTION, ChatJudge, Judge, JudgeTally, fold, make_judge, read_ruling
from specctl.lab.reasoning.options import JudgeRecipe

PAIRS = Path(__file__).with_name("judged_pairs.json")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("So 2*3 = 6.\n", "so 2 * 3=6"),
        ("He pays $1,200.00", "he pays $1200"),
        ("It is 2.50 m", "It is 2.5 m;"),
        ("4 × 5 = 20", "4 * 5 = 20\n"),
        ("", "\n"),
        ("It is " + "9" * 5000, "it is " + "9" * 5000 + "."),  # more digits than Python reads
    ],
    ids=lambda text: text[:20],
)
def test_steps_that_differ_in_notation_fold_to_equal_texts(one, other):
    assert fold(one) == fold(other)


@pytest.mark.parametrize(
    ("one", "other"), [("2 + 3 = 5", "2 + 3 = 6"), ("1 2", "12"), ("x = -5", "x = 5"), ("2.5", "25")]
)
def test_steps_with_different_numbers_stay_different(one, other):
    assert fold(one) != fold(other)


def test_only_unequal_pairs_are_asked_and_only_once():
    asked = []

    def ask(pairs):
        asked.extend(pairs)
        return [True] * len(pairs)

    judge = Judge(ask)
    assert judge([("a.", "A"), ("a", "b"), ("a", "b")]) == [True, True, True]
    assert judge([("A ", "b.")]) == [True]
    assert asked == [("a", "b")]
    assert judge.tally == JudgeTally(pairs=4, identical=1, cached=1, asked=1, aligned=4, unanswered=0)


def test_a_pair_without_a_verdict_is_unaligned_and_asked_again():
    answers = [[None], [True]]
    judge = Judge(lambda pairs: answers.pop(0))
    assert judge([("a", "b")]) == [False]
    assert judge.tally.unanswered == 1
    assert judge([("a", "b")]) == [True], "the judge may respond the next time"


def test_the_question_has_the_three_cases_of_the_paper():
    """Without the third, a judge that cannot decide gives any answer, or none."""
    asked = QUESTION.format("one", "other")
    assert asked.count("[aligned]") == 1 and asked.count("[unaligned]") == 2 and "too hard to determine" in asked


@pytest.mark.parametrize(
    ("reply", "ruling"),
    [
        ("[aligned]", True),
        ("I think [Unaligned].", False),
        ("[aligned]? No: [unaligned]", False),
        ("It is too hard to determine: [unaligned]", False),
        ("aligned", None),
        ("", None),
        ("yes", None),
    ],
)
def test_a_verdict_is_one_of_two_words_in_brackets(reply, ruling):
    assert read_ruling(reply) is ruling


@pytest.fixture
def server():
    """`serve(body, status)` answers every request with this; `serve.requests` has the requests."""
    servers = []

    def serve(body, status=200, silent=False):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                serve.headers.append(self.headers)
                serve.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if silent:
                    release.wait(60)
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        running = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        servers.append(running)
        return f"http://127.0.0.1:{running.server_port}/v1"

    serve.requests, serve.headers, release = [], [], threading.Event()
    yield serve
    release.set()
    for running in servers:
        running.shutdown()
        running.server_close()


def served(endpoint, **options):
    return make_judge(JudgeRecipe(kind="model", name="m", endpoint=endpoint, **options))


def reply(text):
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def test_a_served_judge_gives_a_verdict(server):
    judge = served(server(reply("[aligned]")))
    assert judge([("It is 4", "We get 4")]) == [True]
    (request,) = server.requests
    assert request["model"] == "m" and request["temperature"] == 0
    assert "It is 4" in request["messages"][0]["content"] and "We get 4" in request["messages"][0]["content"]


def test_a_password_in_the_address_becomes_basic_authentication(server):
    """urllib takes the password for a port, so no request reached the judge."""
    address = server(reply("[aligned]")).replace("://", "://me:p%40ss@")
    assert served(address)([("a", "b")]) == [True]
    assert server.headers[0]["Authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"not json", 200),
        (b"[]", 200),
        (b'{"choices": []}', 200),
        (b'{"choices": [{"message": {"content": null}}]}', 200),
        (reply("perhaps"), 200),
        (b"\xff\xfe", 200),
        (b"[" * 9000, 200),
        (b"x" * (judges.LONGEST_REPLY + 1), 200),
        (reply("[aligned]"), 500),
    ],
)
def test_invalid_responses_of_a_server_are_unaligned(server, body, status):
    judge = served(server(body, status))
    assert judge([("a", "b")]) == [False]
    assert judge.tally.unanswered == 1


def test_a_slow_or_unreachable_server_is_unaligned(server):
    for judge in (served(server(b"", silent=True), timeout_s=0.05), served("http://127.0.0.1:9", timeout_s=1.0)):
        assert judge([("a", "b")]) == [False]
        assert judge.tally.unanswered == 1


def test_a_chat_model_without_a_verdict_is_unaligned(target):
    judge = Judge(ChatJudge(target, JudgeRecipe(kind="model", name="builtin", max_tokens=4)))
    assert judge([("2 + 2 = 4", "2 + 2 = 5"), ("a", "b")]) == [False, False]
    assert judge.tally.unanswered == 2


def test_a_step_too_long_for_the_judge_is_unaligned(target):
    judge = Judge(ChatJudge(target, JudgeRecipe(kind="model", name="builtin", max_tokens=4)))
    assert judge([("word " * 3000, "b")]) == [False]


def test_an_encoder_judges_by_its_threshold(tiny_directory):
    """Any `transformers` model works. Padding must not change the embedding of a text."""
    recipe = JudgeRecipe(kind="embedding", name=tiny_directory("llama"), threshold=0.999)
    judge = make_judge(recipe, "cpu")
    alone, padded = judge.ask.embed(["two"])[0], judge.ask.embed(["two", "a much longer text than that"])[0]
    assert alone.tolist() == pytest.approx(padded.tolist(), abs=1e-5)
    assert judge([("two", "a much longer text than that")]) == [False]
    assert make_judge(recipe.model_copy(update={"threshold": 0.0}), "cpu")([("two", "2 of them")]) == [True]


def test_an_encoder_reads_no_more_tokens_than_it_has_positions(tiny_directory, tmp_path):
    """A long step stopped the run with an index error."""
    shutil.copytree(tiny_directory("llama"), tmp_path / "encoder")
    sizes = dict(vocab_size=4096, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(BertConfig(**sizes, max_position_embeddings=24)).save_pretrained(tmp_path / "encoder")
    judge = make_judge(JudgeRecipe(kind="embedding", name=str(tmp_path / "encoder"), threshold=0.0), "cpu")
    assert judge([("one " * 40, "two " * 40)]) == [True]


def test_a_missing_judge_is_named():
    with pytest.raises(CheckpointError, match="no/such"):
        make_judge(JudgeRecipe(kind="embedding", name="./no/such"), "cpu")


def test_an_encoder_is_read_from_safetensors_only(tiny_directory, tmp_path):
    """Like all models except the target. A pickle is not even opened."""
    place = tmp_path / "encoder"
    shutil.copytree(tiny_directory("llama"), place)
    torch.save(load_file(place / "model.safetensors"), place / "pytorch_model.bin")
    (place / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot load judge"):
        make_judge(JudgeRecipe(kind="embedding", name=str(place)), "cpu")


@pytest.mark.parametrize("wrong", [{"kind": "model"}, {"kind": "embedding"}, {"endpoint": "http://x"}])
def test_an_incomplete_recipe_is_refused(wrong):
    with pytest.raises(ValidationError, match="judge"):
        JudgeRecipe(**wrong)


def test_accuracy_of_the_exact_judge_on_labeled_pairs():
    """50 pairs (draft LM's step, target's step) from runs of the built-in target on math test prompts. 41 are a
    random sample of 143 pairs that differ after folding (20 prompts), and 9 of 39 pairs that are equal (14 other
    prompts); in the first run 35 of 190 pairs were equal. One reader labeled each pair without a judge (`same`), a
    second reader without seeing judge or labels (`again`). They agree on 47 pairs, Cohen's kappa 0.85. The exact
    judge never takes different steps for equal ones, but misses paraphrases: it is wrong on 5 of 50 by the first
    reader, 4 by the second."""
    pairs = json.loads(PAIRS.read_text())
    assert len(pairs) == 50
    rulings = make_judge(JudgeRecipe())([(pair["draft"], pair["target"]) for pair in pairs])
    first, second = ([pair[reader] for pair in pairs] for reader in ("same", "again"))
    rate, yes, again = fmean(map(eq, first, second)), fmean(first), fmean(second)
    chance = yes * again + (1 - yes) * (1 - again)
    assert (rate, (rate - chance) / (1 - chance)) == (0.94, pytest.approx(0.85, abs=0.005))
    for labels, wrong, alike in ((first, 5, 14), (second, 4, 13)):
        counts = Counter(zip(rulings, labels, strict=True))
        assert (sum(labels), counts[True, False], counts[False, True]) == (alike, 0, wrong)
