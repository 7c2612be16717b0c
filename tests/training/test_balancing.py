"""Every process gets about the same work in every step, for realistic text lengths."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from specctl.training import data
from specctl.training.balancing import balanced_rows, batches, rebalance, texts_by_rank, useful_share
from specctl.training.example import Example
from specctl.training.step_cost import Work

ONLINE, KEPT = Work(0.56, 0.44), Work(0.03, 0.97)  # of an 8B target and its head, with features recomputed or kept


def texts(lengths):
    return [Example(i, str(i), [0] * (prompt + response), prompt) for i, (prompt, response) in enumerate(lengths)]


def spread(mean, count, seed=0):
    """Return texts with prompts of 128 tokens and responses of `mean` tokens ± 40 %."""
    rng = random.Random(seed)
    return texts([(128, round(mean * rng.uniform(0.6, 1.4))) for _ in range(count)])


def real(count, seed=0):
    """Return texts with lengths drawn from 512 real prompts and answers of seven domains, ± 25 %."""
    kept = json.loads(Path(__file__).with_name("lengths.json").read_text())
    rng = random.Random(seed)
    drawn = (rng.choice(kept) for _ in range(count))
    return texts([(prompt, max(2, round(response * rng.uniform(0.8, 1.25)))) for prompt, response in drawn])


@pytest.fixture(scope="module")
def corpora():
    return {"real": real(8000), **{f"{mean} tokens": spread(mean, 4000) for mean in (256, 512, 1024)}}


@pytest.mark.parametrize("world", [8, 16, 32])
@pytest.mark.parametrize("batch_tokens", [16_384, 65_536])
@pytest.mark.parametrize("name", ["real", "256 tokens", "512 tokens", "1024 tokens"])
def test_every_process_is_busy_95_percent_of_a_step(corpora, name, batch_tokens, world):
    """Assigning texts by index left processes busy 20 to 80 % of the time.

    If features are kept in memory, a text stays with one process in all epochs.
    """
    examples = corpora[name]
    for work in (ONLINE, KEPT):
        dealt = balanced_rows(examples, world, work)
        epoch = batches(dealt, batch_tokens, seed=0, epoch=0)
        assert useful_share(epoch, work) >= 0.95
        assert useful_share([rebalance(batch, work) for batch in epoch], work) >= 0.95
        homes = [{example.index for example in column} for column in texts_by_rank(dealt)]
        assert all(
            example.index in homes[rank] for batch in epoch for rank, share in enumerate(batch) for example in share
        )


def test_negative_control_texts_assigned_by_index_leave_processes_waiting(corpora):
    examples = corpora["512 tokens"]
    epoch = data.batches(examples, 16_384, seed=0, epoch=0)
    dealt = [[[e for e in batch if e.index % 8 == rank] for rank in range(8)] for batch in epoch]
    assert useful_share(dealt, KEPT) < 0.6


@pytest.mark.parametrize("world", [1, 2, 8, 32])
@pytest.mark.parametrize("count", [5, 64, 301])
def test_an_epoch_assigns_every_text_to_one_process(world, count):
    examples = real(count)
    epochs = [batches(balanced_rows(examples, world, KEPT), 2048, seed=0, epoch=epoch) for epoch in (0, 1)]
    for epoch in epochs:
        for dealt in (epoch, [rebalance(batch, KEPT) for batch in epoch]):
            assert sorted(e.index for batch in dealt for share in batch for e in share) == list(range(count))
            assert all(all(batch) or sum(map(len, batch)) < world for batch in dealt), "a process without work"
    assert len(epochs[0]) < 3 or epochs[0] != epochs[1]
    assert epochs[0] == batches(balanced_rows(examples, world, KEPT), 2048, seed=0, epoch=0)


def test_a_batch_exceeds_its_size_by_one_text_per_process_at_most(corpora):
    for batch in batches(balanced_rows(corpora["real"], 8, KEPT), 2048, seed=0, epoch=0):
        sizes = [sum(example.response_length for example in share) for share in batch]
        assert sum(sizes) <= 2048 or all(len(share) <= 1 for share in batch)


def test_one_process_keeps_the_batches_of_earlier_versions(corpora):
    """Existing runs can resume, and published figures stay valid."""
    examples = corpora["real"]
    expected = data.batches(examples, 1000, seed=3, epoch=1)
    epoch = batches(balanced_rows(examples, 1, ONLINE), 1000, seed=3, epoch=1)
    assert [share for (share,) in epoch] == expected
    assert [rebalance(batch, ONLINE) for batch in epoch] == epoch


@pytest.mark.slow
def test_two_processes_compute_the_gradient_of_one(distilled, tmp_path):
    """The processes hold different numbers of positions; the mean must be over all positions."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--module"]
    command += ["tests.training.two_ranks", str(distilled), str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "checked" in done.stdout
