"""A target split into slices over two processes answers like a whole one, and processes that diverge are stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from specctl import processes
from specctl.decoding.models.lean import check_slices
from specctl.decoding.models.parallel import Slice
from specctl.decoding.target import load_target
from specctl.errors import UsageError
from tests.conftest import SIZES, write_tiny
from tests.decoding.two_slices import answers

ROOT = Path(__file__).parents[2]
ODD = 4099  # a vocabulary that two processes cannot split evenly
KINDS = {
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16, "attention_bias": True, "vocab_size": ODD}),
    "tied": (
        "LlamaConfig",
        SIZES
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "vocab_size": ODD}
        | {"num_key_value_heads": 1},  # the single KV head is in both slices
    ),
}


def torchrun(*arguments, **options):
    """Run two processes on this machine without the environment of an outer launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=300, env=environment, **options
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """(targets, answers of the first process, answers of the second process)."""
    directory = tmp_path_factory.mktemp("slices")
    targets = {"builtin": "builtin"}
    targets |= {name: write_tiny(directory / name, *kind) for name, kind in KINDS.items()}
    done = torchrun(ROOT / "tests" / "decoding" / "two_slices.py", directory / "said", *targets.values())
    assert done.returncode == 0, done.stderr[-3000:]
    return targets, *(json.loads(Path(f"{directory}/said.{rank}").read_text()) for rank in (0, 1))


@pytest.mark.slow  # tests/commands/test_tensor_parallel.py is the quick test with two processes
@pytest.mark.parametrize("name", ["builtin", *KINDS])
def test_slices_answer_like_the_whole_target(said, name):
    targets, *both = said
    target = load_target(targets[name], device="cpu", dtype="fp32")
    alone = answers(target)
    for sliced in (one[targets[name]] for one in both):
        assert sliced["texts"] == alone["texts"]
        assert sliced["head"] == alone["head"]
        for key in ("logits", "tapped"):
            torch.testing.assert_close(torch.tensor(sliced[key]), torch.tensor(alone[key]), rtol=1e-3, atol=1e-3)
        assert 2 * sliced["cache"] == alone["cache"] * (2 if name == "tied" else 1)
        if name == "tied":  # the single KV head is in both slices
            assert sliced["weights"] < 0.6 * alone["weights"]
        else:
            assert 2 * sliced["weights"] == alone["weights"]


@pytest.mark.slow
def test_both_processes_have_the_same_bits(said):
    """Decisions follow from logits: if these differ in the last bit, a tie would make the processes diverge."""
    targets, first, second = said
    for place in targets.values():
        assert all(first[place][key] == second[place][key] for key in ("texts", "logits", "tapped", "head"))


@pytest.mark.slow
def test_diverging_processes_are_stopped(said):
    """Otherwise a differing draft would be verified wrongly, and after a differing text a forward pass would hang."""
    _, *both = said
    for one in both:
        assert one["agreed"] == "the first"
        assert "=2 differ in the drafts" in one["drafts"]
        assert "=2 differ in the texts" in one["texts"]
    assert ["follows" in one for one in both] == [False, True]


def test_slices_cover_the_whole():
    """If there are more slices than elements, neighboring slices share one."""
    for total, count in ((8, 2), (8, 8), (4, 8), (1, 4)):
        parts = [Slice(rank, count).of(total) for rank in range(count)]
        assert {one for part in parts for one in part} == set(range(total))
        assert {len(part) for part in parts} == {max(1, total // count)}
        assert parts == sorted(parts, key=lambda part: part.start)


@pytest.mark.parametrize(
    ("config", "count", "reason"),
    [
        (LlamaConfig(**SIZES), 3, "4 attention heads"),
        (LlamaConfig(**SIZES | {"num_attention_heads": 12, "num_key_value_heads": 4}), 6, "4 KV heads"),
        (LlamaConfig(**SIZES | {"intermediate_size": 66}), 4, "intermediate_size 66"),
        (Qwen3MoeConfig(), 2, "model type 'qwen3_moe'"),
    ],
)
def test_unsliceable_models_are_refused(config, count, reason):
    with pytest.raises(UsageError, match=f"cannot be split into {count} slices: {reason}"):
        check_slices("X", config, count)
    check_slices("X", Qwen3Config(**SIZES), 4)


def test_slices_need_one_process_each():
    with pytest.raises(UsageError, match="needs 2 processes, but 1 was started"):
        load_target("builtin", device="cpu", tensor_parallel=2)
    assert processes.group_size() == 1


def test_a_target_without_slices_is_refused(tiny_directory):
    with pytest.raises(UsageError, match="cannot be split into 2 slices: model type 'gpt2'"):
        load_target(tiny_directory("gpt2"), device="cpu", tensor_parallel=2)


def test_a_single_process_agrees_with_itself():
    assert processes.broadcast_value({"a": 1}) == {"a": 1}
    processes.check_same("nothing", object())
    assert not processes.is_follower()
