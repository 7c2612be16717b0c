"""`distill` as a library call: the data does not depend on batches, shards, signals or kills."""

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.target import load_target
from specctl.distillation import generate, shards, store
from specctl.distillation.generate import distill
from specctl.errors import ChatTemplateError, DataError, Interrupted, UsageError
from specctl.progress import STOPPING, interrupts
from specctl.recipe import DistillRecipe
from specctl.runs import Run
from tests.distillation.million import NoEngine
from tests.distillation.test_store import by_id

IDENTITY = {"name": "fake", "hidden_size": 8, "num_layers": 1, "vocab_hash": "cafe"}


class FakeTarget:
    """A target with a context of 64 that renders a prompt as its bytes."""

    context_length, longest_text = 64, 6400
    device = torch.device("cpu")
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))

    def __init__(self, **identity):
        self.identity = IDENTITY | identity

    def render(self, messages, **options):
        if "forbidden" in messages[0]["content"]:
            raise ChatTemplateError("no such role")
        return list(messages[0]["content"].encode())


def fake_stream(engine, requests):
    """Yield texts that depend only on prompt, temperature and seed, out of order."""
    order, slots = list(range(len(requests))), engine.options.slots
    for start in range(0, len(order), slots):
        order[start : start + slots] = reversed(order[start : start + slots])
    for index in order:
        request = requests[index]
        temperature = request.sampling.temperature
        key = [request.prompt, temperature, request.seed if temperature else 0]
        digest = hashlib.sha256(json.dumps(key).encode()).digest()
        ids = list(digest[: min(request.max_new_tokens, 1 + digest[0] % 20)])
        yield SimpleNamespace(index=index, output_ids=ids, stop="eos")


@pytest.fixture(autouse=True)
def no_model(request, monkeypatch):
    if "built_in" not in request.node.name:
        monkeypatch.setattr(generate, "Engine", NoEngine)
        monkeypatch.setattr(generate, "stream", fake_stream)


@pytest.fixture
def questions(tmp_path):
    path, lengths = tmp_path / "prompts.jsonl", random.Random(0)
    texts = [f"{i:02d}" + "?" * lengths.randrange(40) for i in range(50)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def recipe(prompts, output, **fields) -> DistillRecipe:
    data = {"domain": ["sql"], "prompts": str(prompts), **fields.pop("data", {})}
    return DistillRecipe.model_validate(
        {"batch_size": 4, "shard_size": 7, "data": data, "output_dir": output, **fields}
    )


def go(prompts, output, target=None, **fields):
    (output.parent / "run").mkdir(exist_ok=True)
    return distill(recipe(prompts, output, **fields), Run(output.parent / "run"), target=target or FakeTarget())


def test_result_and_records_agree(questions, tmp_path):
    result = go(questions, tmp_path / "out")
    rows = list(store.read(tmp_path / "out"))
    assert (result.domain, result.prompts, result.responses, result.rejected, result.shards) == ("sql", 50, 50, 0, 8)
    assert result.response_tokens == sum(len(row["response_ids"]) for row in rows)
    assert result.tokens_per_s > 0 and result.output == str(tmp_path / "out")
    assert sorted(Counter(row["temperature"] for row in rows).values()) == [12, 12, 13, 13]
    assert {row["target"] for row in rows} == {"cafe"}
    assert store.summary(tmp_path / "out").complete


def test_texts_do_not_depend_on_batches_or_shards(questions, tmp_path):
    go(questions, tmp_path / "a", batch_size=1, samples_per_prompt=3)
    go(questions, tmp_path / "b", batch_size=17, samples_per_prompt=3)
    parts = [go(questions, tmp_path / "c", shard=f"{i}/3", samples_per_prompt=3) for i in range(3)]
    assert by_id(tmp_path / "a") == by_id(tmp_path / "b") == by_id(tmp_path / "c")
    assert sum(part.responses for part in parts) == 150 and all(part.prompts for part in parts)


def test_repeats_cycle_through_temperatures_and_skip_greedy_copies(questions, tmp_path):
    go(questions, tmp_path / "out", samples_per_prompt=5, data={"limit": 4})
    seen = Counter((row["prompt_id"], row["temperature"]) for row in store.read(tmp_path / "out"))
    per_prompt = Counter(prompt for prompt, _ in seen.elements())
    assert sorted(per_prompt.values()) == [4, 5, 5, 5]  # the prompt that starts greedy would end greedy
    assert all(seen[prompt, 0.0] == 1 for prompt in per_prompt)
    assert len({row["seed"] for row in store.read(tmp_path / "out")}) == 19


def test_batches_have_little_padding(questions, tmp_path, monkeypatch):
    widths = []

    def spy(engine, requests):
        lengths, slots = [len(request.prompt) for request in requests], engine.options.slots
        widths.extend(lengths[start : start + slots] for start in range(0, len(lengths), slots))
        return fake_stream(engine, requests)

    monkeypatch.setattr(generate, "stream", spy)
    go(questions, tmp_path / "out")
    padded = sum(max(row) * len(row) for row in widths)
    assert padded < 1.15 * sum(map(sum, widths))
    assert [len(row) for row in widths] == [4] * 12 + [2]
    assert widths != sorted(widths, key=max)


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in STOPPING}
    interrupts.remember_signals()
    yield
    interrupts.reset()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_in_a_long_text_keeps_finished_texts(questions, tmp_path, monkeypatch, signals):
    def signalled(*args):
        yield from itertools.islice(fake_stream(*args), 8)
        interrupts.handle(signal.SIGTERM)
        interrupts.check()

    monkeypatch.setattr(generate, "stream", signalled)
    with pytest.raises(Interrupted):
        go(questions, tmp_path / "out", batch_size=8)
    assert store.summary(tmp_path / "out").responses == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("budget", [None, 300])
def test_a_signal_keeps_the_batch_and_resume_completes(questions, tmp_path, monkeypatch, signals, number, budget):
    go(questions, tmp_path / "whole", max_response_tokens=budget)

    def signalled(*args, **options):
        for count, one in enumerate(fake_stream(*args, **options)):
            if count == 11:
                os.kill(os.getpid(), number)
            yield one

    monkeypatch.setattr(generate, "stream", signalled)
    with pytest.raises(Interrupted) as caught:
        go(questions, tmp_path / "out", max_response_tokens=budget)
    assert caught.value.exit_code == 75 and "--resume" in caught.value.hint
    interrupts.reset()
    monkeypatch.setattr(generate, "stream", fake_stream)
    stopped = store.summary(tmp_path / "out")
    assert (stopped.responses, stopped.complete) == (12, False)
    result = go(questions, tmp_path / "out", max_response_tokens=budget, resume=True)
    assert list(store.read(tmp_path / "out")) == list(store.read(tmp_path / "whole"))
    assert result.responses == store.summary(tmp_path / "whole").responses


def test_a_budget_ends_at_the_same_response_after_any_torn_write(questions, tmp_path):
    go(questions, tmp_path / "whole", max_response_tokens=200, shard_size=100)
    rows = list(store.read(tmp_path / "whole"))
    lengths = [len(row["response_ids"]) for row in rows]
    assert sum(lengths) >= 200 > sum(lengths[:-1])
    for kept in range(1, len(rows)):
        path = shards.files(tmp_path / "whole", "shard")[0]
        (tmp_path / "whole" / "manifest-0of1.json").unlink()
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:kept]))
        go(questions, tmp_path / "whole", max_response_tokens=200, shard_size=100, resume=True)
        assert list(store.read(tmp_path / "whole")) == rows


def test_a_budget_that_is_used_up_decodes_nothing(questions, tmp_path, monkeypatch):
    """A resumed run decoded a batch, and noted its loops among the filtered responses."""
    whole = go(questions, tmp_path / "whole", max_response_tokens=200)
    monkeypatch.delattr(generate, "stream")
    assert go(questions, tmp_path / "whole", max_response_tokens=200, resume=True).responses == whole.responses


def test_repeated_kills_end_with_the_undisturbed_result(questions, tmp_path):
    go(questions, tmp_path / "whole")
    context, moments = multiprocessing.get_context("fork"), random.Random(1)

    def doomed(calls):
        def stream(*args, **options):
            for count, one in enumerate(fake_stream(*args, **options)):
                if count // 4 == calls:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield one

        generate.stream = stream
        go(questions, tmp_path / "out", resume=True)

    deaths = 0
    for _ in range(8):
        process = context.Process(target=doomed, args=(moments.randrange(4),))
        process.start()
        process.join()
        deaths += process.exitcode == -signal.SIGKILL
    assert deaths >= 4
    result = go(questions, tmp_path / "out", resume=True)
    assert by_id(tmp_path / "out") == by_id(tmp_path / "whole")
    assert result.responses == 50


def test_resume_with_nothing_left_and_with_more_prompts(questions, tmp_path):
    go(questions, tmp_path / "out", data={"limit": 20})
    again = go(questions, tmp_path / "out", data={"limit": 20}, resume=True)
    assert (again.responses, again.tokens_per_s) == (20, 0.0)
    more = go(questions, tmp_path / "out", resume=True)
    go(questions, tmp_path / "whole")
    assert more.responses == 50 and by_id(tmp_path / "out") == by_id(tmp_path / "whole")


def test_incompatible_runs_are_refused(questions, tmp_path):
    go(questions, tmp_path / "out")
    with pytest.raises(UsageError, match="already"):
        go(questions, tmp_path / "out")
    with pytest.raises(DataError, match=r"target\.hidden_size was 8 and is 16 now"):
        go(questions, tmp_path / "out", target=FakeTarget(hidden_size=16), resume=True)
    with pytest.raises(DataError, match=r"sampling\.max_new_tokens"):
        go(questions, tmp_path / "out", sampling={"max_new_tokens": 5}, resume=True)
    with pytest.raises(UsageError, match="one domain"):
        go(questions, tmp_path / "two", data={"domain": "sql,math"})
    with pytest.raises(DataError, match="--shard 0/5000"):
        try:
            go(questions, tmp_path / "thin", shard="0/5000")
        except DataError as error:
            raise DataError(error.hint) from error


def test_prompts_that_do_not_fit_the_target_are_rejected(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = ["a" * 63, "b" * 64, "forbidden", "d"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    with pytest.raises(DataError, match="2 of 4") as caught:
        go(path, tmp_path / "out")
    assert f"{path}:2: 64 tokens do not fit the target's context of 64" in caught.value.message
    assert not store.exists(tmp_path / "out")
    result = go(path, tmp_path / "out", data={"max_rejected": 0.5})
    assert (result.rejected, result.prompts) == (2, 2)
    assert {len(row["prompt_ids"]) + len(row["response_ids"]) for row in store.read(tmp_path / "out")} >= {64}
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert reasons[1] == "no such role"


def test_only_overlong_prompts_are_an_error(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x" * 100}))
    with pytest.raises(DataError, match="none of the 1 prompts"):
        go(path, tmp_path / "out", data={"max_rejected": 1.0})


def test_built_in_target_answers_in_a_batch_as_alone(tmp_path):
    """The whole path with a real target in fp32: ragged batches and mixed temperatures."""
    path = tmp_path / "prompts.jsonl"
    texts = ["Tell me a joke.", "What is 2 + 3?", "List the names of all students older than 20.", "Hi"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    target = load_target("builtin", dtype="fp32", device="cpu")
    options = {"sampling": {"max_new_tokens": 12}, "samples_per_prompt": 4, "target": target}
    go(path, tmp_path / "together", batch_size=16, **options)
    go(path, tmp_path / "alone", batch_size=1, **options)
    rows = by_id(tmp_path / "together")
    assert rows == by_id(tmp_path / "alone")
    assert len(rows) == 16 and len({row["text"] for row in rows}) > 4
    for row in rows:
        assert target.tokenizer.decode(row["prompt_ids"]).endswith("<|assistant|>\n")
        assert (row["stop"] == "eos") == (row["response_ids"][-1] in target.eos_ids)
        assert "<|end|>" not in row["text"]


def test_common_instructions_of_built_in_prompts_are_read_once(tmp_path, monkeypatch):
    path, caches = tmp_path / "prompts.jsonl", []
    texts = [f"Answer in one short sentence, and name the table that you use. {text}?" for text in "abcdefgh"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    target = load_target("builtin", dtype="fp32", device="cpu")
    options = {"sampling": {"max_new_tokens": 8}, "target": target}
    for name, most_bytes in (("cached", 2**20), ("uncached", 0)):
        caches.append(PrefixCache(most_bytes=most_bytes))
        monkeypatch.setattr(generate, "cpu_prefix_cache", lambda target: caches[-1])
        go(path, tmp_path / name, batch_size=2, **options)
    rows = by_id(tmp_path / "cached")
    assert rows == by_id(tmp_path / "uncached") and len(rows) == len(texts)
    total = sum(len(row["prompt_ids"]) for row in rows)
    assert caches[0].read < 0.4 * total < caches[1].read < total, "within a batch prompts share their beginning anyway"


def test_a_limit_samples_from_the_whole_file(questions, tmp_path):
    """Files are often sorted by origin. The sample of a smaller limit is a prefix of a larger one."""
    go(questions, tmp_path / "ten", data={"limit": 10})
    ten = {row["messages"][0]["content"][:2] for row in store.read(tmp_path / "ten")}
    assert len(ten) == 10 and any(text < "25" for text in ten) and any(text >= "25" for text in ten)
    more = go(questions, tmp_path / "ten", data={"limit": 30}, resume=True)
    every = go(questions, tmp_path / "ten", resume=True)
    assert (more.responses, every.responses) == (30, 50)
    go(questions, tmp_path / "other", data={"limit": 10, "seed": 1})
    assert ten != {row["messages"][0]["content"][:2] for row in store.read(tmp_path / "other")}
