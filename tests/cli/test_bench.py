"""`specctl bench` with small sizes, from the command line to the document."""

import signal

import pytest

from specctl.decoding.target import Target
from specctl.measuring.bench import rounds, shapes


def test_every_part_is_measured(specctl, tiny_directory):
    done = specctl(
        "bench", "--json", "--drafter", "lookup", "--batches", "1,2", "--limit", "3", "--max-new-tokens", "6",
        "repeats=1", "context=20", "draft_lengths=[2]", "--target", tiny_directory("llama"),
    )  # fmt: skip
    assert done.code == 0, done.err
    document = done.json
    assert document["rounds"] == []  # there are no device rounds on a CPU
    assert not any(row["graphs"] for row in document["decoding"])
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


@pytest.mark.parametrize(("part", "place", "name"), [("steps", Target, "step"), ("rounds", rounds, "_begin")])
def test_a_signal_stops_the_benchmark(specctl, monkeypatch, part, place, name):
    """The current measurement is finished; all of them would take minutes."""
    begun, measure = [], getattr(place, name)

    def signalled(*given):
        begun.append(name)
        signal.raise_signal(signal.SIGTERM)
        return measure(*given)

    monkeypatch.setattr(place, name, signalled)
    sizes = ["repeats=9", "batches=[1]", "context=20"]
    done = specctl("bench", "--parts", part, "--drafter", "lookup", *sizes)
    assert done.code == 75 and begun == [name] and "interrupted by SIGTERM" in done.err


def test_without_json_tables_are_printed(specctl, tiny_directory):
    target = tiny_directory("llama")
    done = specctl("bench", "--target", target, "--parts", "steps", "repeats=1", "context=20")
    assert done.code == 0 and "transformers / ours" in done.out and "tokens/s" not in done.out


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
    for part, advice in (("kernels", "tests/benchmarks/kernels.py"), ("floors", "--parts rounds")):
        refused = specctl("bench", "--parts", f"steps,{part}")
        assert refused.code == 2 and advice in refused.err
    assert specctl("bench", "--batches", "0").code == 2
    assert specctl("bench", "--drafter", "nowhere").code == 2


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_shape_without_memory_is_refused(specctl, monkeypatch, flags):
    """Before any weights are made. If only some parts fit, the error names them."""
    monkeypatch.setattr(shapes, "free_memory", lambda device: 20e9)
    done = specctl("bench", "--shape", "32b", "--dtype", "bf16", "--device", "cpu", *flags)
    assert done.code == 2 and "66 GB of weights and needs 72." in done.err and "smaller shape" in done.err
    done = specctl("bench", "--shape", "8b", "--dtype", "bf16", "--device", "cpu", *flags)
    assert done.code == 2 and "--parts rounds,decoding" in done.err
    planned = specctl(
        "bench", "--shape", "8b", "--dtype", "bf16", "--device", "cpu", "--parts", "decoding", "--dry-run"
    )
    assert planned.code == 0
