"""`specctl bench` with small sizes, from the command line to the document."""

import signal

import pytest
import torch

from specctl.decoding import timing
from specctl.decoding.device import graphs
from specctl.decoding.target import Target
from specctl.measuring.bench import kernels, rounds, shapes


def test_every_part_is_measured(specctl):
    done = specctl(
        "bench", "--json", "--drafter", "lookup", "--batches", "1,2", "--limit", "3", "--max-new-tokens", "6",
        "vocabularies=[300]", "repeats=1", "context=20", "draft_lengths=[2]",
    )  # fmt: skip
    assert done.code == 0, done.err
    document = done.json
    kernels = {row["kernel"] for row in document["kernels"]}
    assert kernels >= {"argmax + walk_tree", "row_params + accept_chain", "expand_topk", "linear_distill"}
    assert document["rounds"] == []  # there are no device rounds on a CPU
    assert not any(row["graphs"] for row in document["decoding"])
    assert {"the same + panorama, N 1", "the same + panorama, N 4"} <= kernels
    assert all(row["ours_ms"] > 0 and row["eager_ms"] > 0 for row in document["kernels"])
    assert [row["rows"] for row in document["steps"]] == [1, 4, 8, 16]
    decoding = {(row["drafter"], row["batch"], row["draft_length"]): row for row in document["decoding"]}
    assert set(decoding) == {(name, b, None) for name in ("vanilla", "transformers") for b in (1, 2)} | {
        ("lookup", b, length) for b in (1, 2) for length in (None, 2)
    }
    assert len({row["tokens"] for row in decoding.values()}) == 1  # the texts are the same for every drafter
    assert decoding["vanilla", 2, None]["mat"] == 1 and decoding["vanilla", 2, None]["speedup"] is None
    one, two = decoding["lookup", 1, None], decoding["lookup", 2, None]
    assert two["of_batch_1"] == pytest.approx(two["tokens_per_s"] / one["tokens_per_s"])
    theirs = decoding["transformers", 2, None]
    assert theirs["mat"] == 1 and theirs["speedup_transformers"] is None
    assert two["speedup_transformers"] == pytest.approx(two["tokens_per_s"] / theirs["tokens_per_s"])
    assert theirs["speedup"] == pytest.approx(theirs["tokens_per_s"] / decoding["vanilla", 2, None]["tokens_per_s"])
    assert document["versions"]["torch"] and document["threads"] >= 1


@pytest.mark.parametrize("rows", [1, 5])
def test_attention_kernels_are_compared_on_equal_outputs(monkeypatch, rows):
    """The kernel part runs on GPUs, which tests lack, so its inputs and head order are checked here."""
    monkeypatch.setattr(kernels, "LAYERS", 1)
    _, size, ours, eager, read = kernels.attention(torch.device("cpu"), torch.float32, 2, rows, 40)
    assert size == f"B 2, T {rows}, context 40" and read == 2 * (40 + rows) * 2 * 8 * 128 * 4
    found = ours().view(2, rows, kernels.HEADS, kernels.HEAD_DIM)
    torch.testing.assert_close(found, eager().transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("part", "place", "name"), [("kernels", kernels, "timed"), ("steps", Target, "step"), ("rounds", rounds, "_begin")]
)
def test_a_signal_stops_the_benchmark(specctl, monkeypatch, part, place, name):
    """The current measurement is finished; all of them would take minutes."""
    begun, measure = [], getattr(place, name)

    def signalled(*given):
        begun.append(name)
        signal.raise_signal(signal.SIGTERM)
        return measure(*given)

    monkeypatch.setattr(place, name, signalled)
    sizes = ["vocabularies=[300]", "repeats=9", "batches=[1]", "context=20"]
    done = specctl("bench", "--parts", part, "--drafter", "lookup", *sizes)
    assert done.code == 75 and begun == [name] and "interrupted by SIGTERM" in done.err


def test_without_json_tables_are_printed(specctl):
    done = specctl("bench", "--parts", "kernels", "vocabularies=[300]", "repeats=1", "batches=[1]")
    assert done.code == 0 and "eager / ours" in done.out and "tokens/s" not in done.out


def test_random_weights_of_a_shape_are_benchmarked(specctl, monkeypatch):
    """With the built-in tokenizer, no prompts and no transformers baseline."""
    monkeypatch.setitem(shapes.SHAPES, "1b", shapes.Shape(1, 32, 2, 1, 48, 4096, 16))
    done = specctl(
        "bench", "--json", "--shape", "1b", "--parts", "decoding", "--limit", "2", "--batches", "2",
        "--max-new-tokens", "4", "--device", "cpu",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [row["drafter"] for row in done.json["decoding"]] == ["vanilla", "lookup"]
    assert done.json["decoding"][1]["speedup_transformers"] is None


def test_rounds_of_random_weights_are_benchmarked(specctl, monkeypatch):
    """A random head replaces a trained one; lookup has no device rounds."""
    from specctl.measuring.bench import rounds as bench_rounds

    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    monkeypatch.setitem(shapes.SHAPES, "1b", shapes.Shape(4, 32, 2, 1, 48, 4096, 16))
    monkeypatch.setattr(bench_rounds, "NEW_TOKENS", 16)
    done = specctl(
        "bench", "--json", "--shape", "1b", "--parts", "rounds", "--device", "cpu", "repeats=1", "context=20",
        "drafting.stop_below=0", "drafting.keep_above=0", "drafting.width=2", "drafting.depth=3", "drafting.nodes=8",
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = {row["drafter"]: row for row in done.json["rounds"]}
    assert set(rows) == {"vanilla", "eagle3, random"}
    assert rows["vanilla"]["rows"] == 1 and rows["eagle3, random"]["rows"] == 9
    assert all(row["round_ms"] > 0 and not row["graphs"] for row in rows.values())


def test_a_plan_is_printed_and_bad_input_refused(specctl):
    done = specctl("bench", "--shape", "1b", "--dry-run")
    assert done.code == 0 and "1b" in done.out
    assert specctl("bench", "--parts", "none").code == 2
    assert specctl("bench", "--batches", "0").code == 2
    assert specctl("bench", "--drafter", "nowhere").code == 2


def test_floors_of_absent_gpus_equal_a_computation_by_hand(specctl):
    """70.6 B parameters minus a 1.05 B embedding, at two bytes each; keys and values take 320 KiB per token."""
    done = specctl.ok(
        "bench", "--json", "--parts", "floors", "--shape", "70b", "gpus=[h100-80g,h200]", "--batches", "1,64"
    )
    assert not any(done.json[part] for part in ("kernels", "steps", "rounds", "decoding"))
    found = {(row["gpu"], row["batch"]): row for row in done.json["floors"]}
    one, many = found["h100-80g", 1], found["h100-80g", 64]
    assert one["gpus"] == 2 and many["gpus"] == 4 and found["h200", 64]["gpus"] == 2
    weights, kv = 2 * 69.50e9, 256 * 80 * 2 * 8 * 128 * 2
    assert one["weights_ms"] == pytest.approx(weights / (2 * 3.35e12) * 1000, rel=1e-3)
    assert one["kv_ms"] == pytest.approx(kv / (2 * 3.35e12) * 1000)
    assert one["tokens_per_s"] == pytest.approx(1000 / (one["weights_ms"] + one["kv_ms"]))
    assert one["of_plain"] == 1 and one["rows"] == 9  # reading takes longer than the products of nine rows
    computing = 2 * 69.50e9 * 64 * 9 / (4 * 989e12) * 1000
    assert many["rows_ms"] == pytest.approx(computing, rel=1e-3)
    assert many["of_plain"] == pytest.approx(computing / many["plain_ms"], rel=1e-3) and many["of_plain"] > 1
    assert many["plain_ms"] == pytest.approx((weights + 64 * kv) / (4 * 3.35e12) * 1000, rel=1e-3)


def test_floors_are_computed_from_the_configuration(specctl):
    done = specctl("bench", "--json", "--parts", "floors", "--batches", "1", "gpus=[l40s]", "context=100")
    (row,) = done.json["floors"]
    assert done.code == 0 and row["gpus"] == 1 and 0 < row["weights_ms"] < 0.1 and row["context"] == 100
    people = specctl("bench", "--parts", "floors", "--batches", "1", "gpus=[l40s]")
    assert people.code == 0 and "l40s" in people.out and "eager / ours" not in people.out


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_shape_without_memory_is_refused(specctl, monkeypatch, flags):
    """Before any weights are made. If only some parts fit, the error names them."""
    monkeypatch.setattr(shapes, "free_memory", lambda device: 20e9)
    done = specctl("bench", "--shape", "32b", "--dtype", "bf16", "--device", "cpu", *flags)
    assert done.code == 2 and "66 GB of weights" in done.err and "--parts floors" in done.err
    done = specctl("bench", "--shape", "8b", "--dtype", "bf16", "--device", "cpu", *flags)
    assert done.code == 2 and "--parts kernels,rounds,decoding" in done.err
    planned = specctl(
        "bench", "--shape", "8b", "--dtype", "bf16", "--device", "cpu", "--parts", "decoding", "--dry-run"
    )
    assert planned.code == 0
    assert specctl("bench", "--shape", "32b", "--parts", "kernels", "--dry-run").code == 0


def test_gpu_kernels_are_replayed_with_cold_caches(monkeypatch):
    """Order of calls: flush the cache, start the timer, replay, stop the timer."""
    order = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            order.append("event")

        def elapsed_time(self, other):
            return 2.0 if order[-3] == "ours replayed" else 6.0

    class Cache:
        def zero_(self):
            order.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(timing, "synchronise", lambda device: order.append("wait"))
    monkeypatch.setattr(graphs, "replay_of", lambda run, device: lambda: order.append(f"{run} replayed"))
    monkeypatch.setattr(torch, "empty", lambda *size, **options: Cache())
    times, replayed = kernels.timed("attention", "ours", "eager", 2, torch.device("cuda"))
    assert replayed and times == {"ours": 0.002, "eager": 0.006}
    turn = [step for name in ("ours", "eager") for step in ("flush", "event", f"{name} replayed", "event", "wait")]
    assert order == (2 + timing.WARM_UP) * turn
    asking = {name: lambda name=name: order.append(name) for name in ("ours", "eager")}
    assert not kernels.timed("linear_distill", *asking.values(), 1, torch.device("cuda"))[1]
