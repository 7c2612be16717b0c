"""`specctl bench` on small sizes, from the command line to the document."""

import pytest
import torch

from specctl.measuring.bench import kernels


def test_every_part_is_measured(specctl):
    done = specctl(
        "bench", "--json", "--drafter", "lookup", "--batches", "1,2", "--limit", "3", "--max-new-tokens", "6",
        "vocabularies=[300]", "repeats=1", "context=20", "draft_lengths=[2]",
    )  # fmt: skip
    assert done.code == 0, done.err
    document = done.json
    kernels = {row["kernel"] for row in document["kernels"]}
    assert kernels >= {"argmax + walk_tree", "row_params + accept_chain", "expand_topk", "linear_distill"}
    assert document["rounds"] == []  # those of a CPU are the host's
    assert not any(row["graphs"] for row in document["decoding"])
    assert {"the same + panorama, N 1", "the same + panorama, N 4"} <= kernels
    assert all(row["ours_ms"] > 0 and row["eager_ms"] > 0 for row in document["kernels"])
    assert [row["rows"] for row in document["steps"]] == [1, 4, 8, 16]
    decoding = {(row["drafter"], row["batch"], row["draft_length"]): row for row in document["decoding"]}
    assert set(decoding) == {(name, b, None) for name in ("vanilla", "transformers") for b in (1, 2)} | {
        ("lookup", b, length) for b in (1, 2) for length in (None, 2)
    }
    assert len({row["tokens"] for row in decoding.values()}) == 1  # the same texts, whoever drafts
    assert decoding["vanilla", 2, None]["mat"] == 1 and decoding["vanilla", 2, None]["speedup"] is None
    one, two = decoding["lookup", 1, None], decoding["lookup", 2, None]
    assert two["of_batch_1"] == pytest.approx(two["tokens_per_s"] / one["tokens_per_s"])
    theirs = decoding["transformers", 2, None]
    assert theirs["mat"] == 1 and theirs["speedup_transformers"] is None
    assert two["speedup_transformers"] == pytest.approx(two["tokens_per_s"] / theirs["tokens_per_s"])
    assert theirs["speedup"] == pytest.approx(theirs["tokens_per_s"] / decoding["vanilla", 2, None]["tokens_per_s"])
    assert document["versions"]["torch"] and document["threads"] >= 1


@pytest.mark.parametrize("rows", [1, 5])
def test_attention_is_measured_against_the_same(monkeypatch, rows):
    """On GPUs alone, where no test sees it: both must compute one thing, of heads in one order."""
    monkeypatch.setattr(kernels, "LAYERS", 1)
    _, size, ours, eager, read = kernels.attention(torch.device("cpu"), torch.float32, 2, rows, 40)
    assert size == f"B 2, T {rows}, context 40" and read == 2 * (40 + rows) * 2 * 8 * 128 * 4
    found = ours().view(2, rows, kernels.HEADS, kernels.HEAD_DIM)
    torch.testing.assert_close(found, eager().transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_people_see_tables(specctl):
    done = specctl("bench", "--parts", "kernels", "vocabularies=[300]", "repeats=1", "batches=[1]")
    assert done.code == 0 and "eager / ours" in done.out and "tokens/s" not in done.out


def test_random_weights_of_a_shape(specctl, monkeypatch):
    """The built-in tokenizer, no prompts and no transformers baseline: only speed is asked for."""
    from specctl.commands import bench

    monkeypatch.setitem(bench.SHAPES, "1b", (1, 32, 2, 1, 48))
    monkeypatch.setattr(bench, "VOCABULARY", 4096)
    done = specctl(
        "bench", "--json", "--shape", "1b", "--parts", "decoding", "--limit", "2", "--batches", "2",
        "--max-new-tokens", "4", "--device", "cpu",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert [row["drafter"] for row in done.json["decoding"]] == ["vanilla", "lookup"]
    assert done.json["decoding"][1]["speedup_transformers"] is None


def test_rounds_of_random_weights(specctl, monkeypatch):
    """A random head stands in for a trained one; lookup drafts on the host and has no such round."""
    from specctl.commands import bench
    from specctl.measuring.bench import rounds as bench_rounds

    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    monkeypatch.setitem(bench.SHAPES, "1b", (4, 32, 2, 1, 48))
    monkeypatch.setattr(bench, "VOCABULARY", 4096)
    monkeypatch.setattr(bench_rounds, "NEW", 16)
    done = specctl(
        "bench", "--json", "--shape", "1b", "--parts", "rounds", "--device", "cpu", "repeats=1", "context=20",
        "drafting.stop_below=0", "drafting.width=2", "drafting.depth=3", "drafting.nodes=8",
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = {row["drafter"]: row for row in done.json["rounds"]}
    assert set(rows) == {"vanilla", "eagle3, random"}
    assert rows["vanilla"]["rows"] == 1 and rows["eagle3, random"]["rows"] == 9
    assert all(row["round_ms"] > 0 and not row["graphs"] for row in rows.values())


def test_a_plan_and_bad_input(specctl):
    done = specctl("bench", "--shape", "8b", "--dry-run")
    assert done.code == 0 and "8b" in done.out
    assert specctl("bench", "--parts", "none").code == 2
    assert specctl("bench", "--batches", "0").code == 2
    assert specctl("bench", "--drafter", "nowhere").code == 2
