"""Target features are the same in every storage mode, survive a kill, and are never used for other data."""

import dataclasses
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from specctl.decoding.models.loading import builtin_path
from specctl.decoding.target import Target
from specctl.drafters import checkpoint as drafters
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.errors import CheckpointError, Interrupted, SpecctlError, UsageError
from specctl.progress import interrupts
from specctl.recipe import DrafterRecipe, FeatureRecipe
from specctl.runs import Run
from specctl.training import engine, feature_files, features, loop
from specctl.training.example import Example
from specctl.training.feature_files import GB, choose_mode
from specctl.training.features import FeatureStore, slot_batch
from tests.training.small import recipe

TAPS = (1, 2)
CACHED = FeatureRecipe(mode="cached")


@pytest.fixture(scope="module")
def examples():
    random = torch.Generator().manual_seed(0)
    return [Example(i, f"p{i}", torch.randint(5, 500, (8 + i % 5,), generator=random).tolist(), 4) for i in range(12)]


@pytest.fixture
def small_shards(monkeypatch):
    """Limit shards to about three examples each."""
    monkeypatch.setattr(features, "SHARD_BYTES", 2**16)


def cached(target, examples, place, *, taps=TAPS, **ranks):
    store = FeatureStore(target, taps)
    store.prepare(examples, CACHED, place, **ranks)
    return store


def shards(place):
    return sorted(place.glob("*/*.safetensors"))


def same(ours, theirs):
    """Return whether the features are bitwise equal, example by example."""
    pairs = [(vars(a).values(), vars(b).values()) for a, b in zip(ours, theirs, strict=True)]
    return all(torch.equal(x, y) for a, b in pairs for x, y in zip(a, b, strict=True))


def train(distilled, place, mode, **changes):
    """Return the losses of three steps and the weights."""
    place.mkdir(parents=True, exist_ok=True)
    features = FeatureRecipe(mode=mode, dir=place.parent / "features")
    try:
        loop.train_drafter(recipe(distilled, place, max_steps=3, features=features, **changes), Run(place))
    finally:
        interrupts.reset()
        path = place / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    return losses, drafters.load(place / "drafter").tensors


@pytest.mark.slow
def test_every_mode_trains_the_same_and_a_stopped_run_resumes(distilled, target, tmp_path, monkeypatch, small_shards):
    """Bitwise in fp32. The cached run is stopped once while writing features and once after a step."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    runs = {mode: train(distilled, tmp_path / mode, mode) for mode in ("memory", "online")}
    place = tmp_path / "cached"
    compute, computed = FeatureStore.compute, []

    def stop_at_the_tenth(self, group):
        computed.append(group)
        if len(computed) == 10:
            interrupts.handle(15)
        return compute(self, group)

    monkeypatch.setattr(FeatureStore, "compute", stop_at_the_tenth)
    with pytest.raises(Interrupted):
        train(distilled, place, "cached")
    kept = {path: path.stat().st_mtime_ns for path in shards(tmp_path / "features")}
    assert kept
    step = loop.Trainer.step

    def stop_after_one(self, bar):
        step(self, bar)
        if self.state.step == 1:
            interrupts.handle(15)

    monkeypatch.setattr(loop.Trainer, "step", stop_after_one)
    with pytest.raises(Interrupted):
        train(distilled, place, "cached", resume=True)
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in shards(tmp_path / "features")}.items()
    monkeypatch.setattr(loop.Trainer, "step", step)
    computed.clear()
    runs["cached"] = train(distilled, place, "cached", resume=True)
    assert not computed
    assert runs["memory"][0] == runs["online"][0] == runs["cached"][0]
    for mode in ("online", "cached"):
        assert all(torch.equal(runs[mode][1][name], tensor) for name, tensor in runs["memory"][1].items())


@pytest.mark.parametrize(
    ("others", "ends"),
    [([0, 0], None), ([1, 1], 75), ([0, 1], 1), ([1, 2], 1)],
    ids=["none", "stopped", "failed", "both"],
)
@pytest.mark.parametrize("mode", ["memory", "cached"])
def test_all_ranks_end_when_one_of_them_ends(target, examples, tmp_path, monkeypatch, mode, others, ends):
    """A rank that had computed its features waited for a rank that a signal had stopped, until Slurm killed the job
    and did not queue it again. This process plays one rank, and `others` are the counts of the rest."""
    total, compute, sums = engine.over_ranks, FeatureStore.compute, []

    def over_ranks(values, device):
        sums.append(values)
        computed = len(sums) == (2 if mode == "memory" else 3)
        return total([a + b for a, b in zip(values, others, strict=True)] if computed else values, device)

    monkeypatch.setattr(engine, "over_ranks", over_ranks)
    with pytest.raises(SystemExit) if ends else nullcontext() as left:
        FeatureStore(target, TAPS).prepare(examples[:2], FeatureRecipe(mode=mode), tmp_path)
    assert ends is None or left.value.code == ends
    sums.clear()

    def stopped(self, group):
        interrupts.handle(15)
        interrupts.check()
        return compute(self, group)

    monkeypatch.setattr(FeatureStore, "compute", stopped)
    try:
        with pytest.raises(Interrupted):
            FeatureStore(target, TAPS).prepare(examples[:2], FeatureRecipe(mode=mode), tmp_path / "anew")
    finally:
        interrupts.reset()
    assert sums[-1] == [True, True], "the other ranks are not told"


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size - 8),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(shards(path.parent.parent)[0].read_bytes()),
        lambda path: path.write_bytes(b""),
        lambda path: flip(path, -5),
        lambda path: flip(path, path.stat().st_size // 2),
        lambda path: rewritten(path, lambda all: {n: x.flip(0) for n, x in all.items()}),
    ],
    ids=["truncated", "missing", "another shard", "empty", "flipped at the end", "in the middle", "resealed"],
)
def test_only_the_damaged_shard_is_computed_again(target, examples, tmp_path, small_shards, damage):
    first = cached(target, examples, tmp_path)
    expected = [dataclasses.replace(f) for f in FeatureStore(target, TAPS).get(examples)]
    files = shards(tmp_path)
    assert len(files) >= 3
    before = {path: path.stat().st_mtime_ns for path in files}
    damage(files[1])
    files[1].with_name(f".{files[1].name}.tmp").write_bytes(b"left by a kill")
    del first
    again = cached(target, examples, tmp_path)
    assert same(again.get(examples), expected)
    changed = [path for path in files if path.stat().st_mtime_ns != before[path]]
    assert changed == [files[1]]
    assert not list(tmp_path.glob("*/.*.tmp")) and not list(tmp_path.glob("*/*.lock"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 64
    path.write_bytes(data)


def rewritten(path, change):
    """Write a valid shard with the same key and changed tensors."""
    with safe_open(path, framework="pt") as file:
        tensors, about = {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(change(tensors), path, metadata=about)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 8), "is damaged: "),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b"\xff" * 4096), "is damaged: "),
        (lambda path: path.write_bytes(shards(path.parent.parent)[0].read_bytes()), "it has different examples"),
        (lambda path: rewritten(path, lambda all: {n: x.double() for n, x in all.items()}), r"is F64 \["),
        (
            lambda path: rewritten(path, lambda all: {n: x[1:].contiguous() for n, x in all.items()}),
            r"not (F32|I32) \[",
        ),
    ],
    ids=["truncated", "missing", "garbage", "another shard", "another type", "another shape"],
)
def test_a_shard_damaged_during_the_run_is_an_error_with_a_hint(
    target, examples, tmp_path, small_shards, capsys, damage, says
):
    """Otherwise it would end in a traceback of another library or train on wrong features; a restart repairs it."""
    store = cached(target, examples, tmp_path)
    expected = FeatureStore(target, TAPS).get(examples)
    damage(shards(tmp_path)[1])
    store.kept.opened.clear()
    with pytest.raises(CheckpointError, match=says) as caught:
        store.get(examples)
    assert "--resume" in caught.value.hint and str(tmp_path) in caught.value.message
    assert same(cached(target, examples, tmp_path).get(examples), expected)
    assert ("the file is computed again" in capsys.readouterr().err) == ("No such file" not in says)


def test_other_taps_data_or_weights_get_another_directory(target, examples, tmp_path, monkeypatch):
    cached(target, examples, tmp_path)
    cached(target, examples, tmp_path, taps=(2, 1))
    cut = dataclasses.replace(examples[3], tokens=examples[3].tokens[:-1])
    cached(target, [*examples[:3], cut, *examples[4:]], tmp_path)
    monkeypatch.setitem(target.identity, "weights", "of the same directory, fine-tuned in place")
    cached(target, examples, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_nothing_is_written_without_enough_disk_space(target, examples, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "free_bytes", lambda path: 1000)
    with pytest.raises(SpecctlError, match=r"need 0\.0 GB more in .*, but only 0\.0 GB are free") as caught:
        cached(target, examples, tmp_path / "new")
    assert "features.dir" in caught.value.hint and "features.mode=online" in caught.value.hint
    assert not (tmp_path / "new").exists()


@pytest.fixture
def in_turn(target, examples, monkeypatch):
    """Return `prepare(place, world)`, which runs the preparation of all ranks one after the other.

    The sums over ranks that each process needs are recorded first and then injected.
    """

    def prepare(place, world, recipe=CACHED):
        homes = [examples[rank::world] for rank in range(world)]
        stores = [FeatureStore(target, TAPS) for _ in homes]
        found = []

        class Found(Exception):
            pass

        def note(values, device):
            found.append(values)
            raise Found

        for rank, store in enumerate(stores):
            monkeypatch.setattr(features, "over_ranks", note)
            with pytest.raises(Found):
                store.prepare(examples, recipe, place, homes, rank)
        sums = [sum(column) for column in zip(*found, strict=True)]
        monkeypatch.setattr(features, "over_ranks", lambda own, device: sums)
        monkeypatch.setattr(
            feature_files.FeatureFiles, "check_visible", lambda self, numbers: None
        )  # other ranks have not written yet
        for rank, store in enumerate(stores):
            store.prepare(examples, recipe, place, homes, rank)
        return stores

    return prepare


def test_disk_space_is_checked_for_all_processes_together(target, examples, tmp_path, monkeypatch, in_turn):
    """One process alone would fit."""
    need = FeatureStore(target, TAPS).estimate(examples)
    monkeypatch.setattr(features, "free_bytes", lambda path: need)
    with pytest.raises(SpecctlError, match="GB more"):
        in_turn(tmp_path, 2)


def test_every_process_reads_the_shards_of_all(target, examples, tmp_path, small_shards, in_turn):
    """Each process writes some shards; another number of processes computes nothing again."""
    whole = FeatureStore(target, TAPS).get(examples)
    stores = in_turn(tmp_path, 2)
    assert all(0 < store.target_tokens < sum(len(e.tokens) - 1 for e in examples) for store in stores)
    assert all(same(store.get(examples), whole) and not store.is_sharded for store in stores)
    again = in_turn(tmp_path, 3)
    assert not any(store.target_tokens for store in again)
    assert all(same(store.get(examples), whole) for store in again)


def test_features_in_memory_stay_with_one_process(target, examples, tmp_path, in_turn):
    """Features kept elsewhere are computed again, for a process that has no text of its own in a batch."""
    whole = FeatureStore(target, TAPS).get(examples)
    for rank, store in enumerate(in_turn(tmp_path, 3, FeatureRecipe(mode="memory"))):
        assert store.is_sharded and set(store.kept) == {e.index for e in examples[rank::3]}
        assert same(store.get(examples), whole)


def test_a_directory_that_other_nodes_cannot_see_is_refused(target, examples, tmp_path):
    store = cached(target, examples, tmp_path)
    store.kept.check_visible([0])
    with pytest.raises(SpecctlError, match="not shared by all processes") as caught:
        store.kept.check_visible([0, 99])
    assert "features.dir" in caught.value.hint


def test_a_second_writer_is_refused(target, examples, tmp_path, small_shards):
    store = cached(target, examples, tmp_path)
    with store.kept.writing():
        cached(target, examples, tmp_path)  # reading needs no lock
        shards(tmp_path)[0].unlink()
        with pytest.raises(SpecctlError, match="is being written by process"):
            cached(target, examples, tmp_path)


def test_fp8_features_take_a_byte_per_number(target, examples, tmp_path, small_shards):
    """Each number is within half a step of e4m3, or of the scale of its state for tiny numbers.

    fp8 features have files of their own, which the next run reuses.
    """
    exact = cached(target, examples, tmp_path)
    small = FeatureStore(target, TAPS)
    small.prepare(examples, FeatureRecipe(mode="cached", fp8=True), tmp_path)
    assert small.kept.dir != exact.kept.dir
    sizes = [sum(path.stat().st_size for path in store.kept.dir.glob("*.safetensors")) for store in (small, exact)]
    assert sizes[0] < 1.3 * sizes[1] / target.dtype.itemsize, "headers are large beside so few tokens"
    for ours, theirs in zip(small.get(examples), exact.get(examples), strict=True):
        assert torch.equal(ours.best, theirs.best)
        for read, made in ((ours.taps, theirs.taps), (ours.teacher, theirs.teacher)):
            assert read.dtype == made.dtype and not torch.equal(read, made)
            states = made.float().unflatten(-1, (-1, target.hidden_size))
            scale = (states.abs().amax(-1, keepdim=True) / 448).expand_as(states).flatten(-2)
            allowed = torch.maximum(made.float().abs() / 16, scale * 2**-10) * 1.01 + made.float().abs() / 256
            assert ((read.float() - made.float()).abs() <= allowed).all()
    again = FeatureStore(target, TAPS)
    again.prepare(examples, FeatureRecipe(mode="cached", fp8=True), tmp_path)
    assert not again.target_tokens and same(again.get(examples), small.get(examples))


def test_fp8_handles_zero_and_empty_states():
    zero, scales = feature_files.quantize_fp8(torch.zeros(3, 8), 4)
    assert scales.shape == (3, 2) and torch.equal(
        feature_files.dequantize_fp8(zero, scales, torch.bfloat16), torch.zeros(3, 8)
    )
    none, scales = feature_files.quantize_fp8(torch.zeros(3, 0), 4)
    assert feature_files.dequantize_fp8(none, scales, torch.float32).shape == (3, 0)


def test_few_shards_are_mapped_at_a_time(target, examples, tmp_path, monkeypatch, small_shards):
    """Mapped pages count as memory of the process, so they must not accumulate."""
    monkeypatch.setattr(feature_files, "OPEN", 2)
    store = cached(target, examples, tmp_path)
    found = store.get(examples)
    assert len(shards(tmp_path)) > 2 >= len(store.kept.opened)
    assert same(found, FeatureStore(target, TAPS).get(examples)), "views outlive the handle of their file"


@pytest.mark.parametrize(
    ("recipe", "size", "free", "chosen"),
    [
        ({}, 1, 0, "memory"),
        ({}, 5, 100, "online"),
        ({"dir": "d"}, 1, 100, "memory"),
        ({"dir": "d"}, 5, 100, "cached"),
        ({"dir": "d"}, 5, 5, "online"),
        ({"mode": "online"}, 1, 100, "online"),
        ({"mode": "memory"}, 1, 0, "memory"),
        ({"mode": "memory"}, 5, 100, "features.budget_gb is 2"),
        ({"mode": "cached"}, 5, 6, "cached"),
        ({"mode": "cached"}, 5, 5, "5.0 GB more in place, but only 5.0 GB are free"),
    ],
)
def test_the_mode_is_chosen_by_size_and_free_space(tmp_path, capsys, recipe, size, free, chosen):
    """`auto` uses no disk unasked, and a mode set in the recipe is never replaced."""
    options = FeatureRecipe(**recipe)
    if " " in chosen:
        with pytest.raises(SpecctlError, match=chosen):
            choose_mode(options, Path("place"), size * GB, size * GB, free * GB)
        return
    assert choose_mode(options, Path("place"), size * GB, size * GB, free * GB) == chosen
    assert "target features" in capsys.readouterr().err


def test_several_adapters_without_disk_space_are_refused(capsys):
    options = FeatureRecipe(dir="d", budget_gb=2)
    with pytest.raises(SpecctlError, match=r"several adapters need 5.0 GB in d, but only 5.0 GB are free"):
        choose_mode(options, Path("d"), 5 * GB, 5 * GB, 5 * GB, switches=True)
    assert capsys.readouterr().err == ""
    assert choose_mode(options, Path("d"), 5 * GB, 5 * GB, 100 * GB, switches=True) == "cached"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["taps", "teacher"])
def test_a_non_finite_state_names_its_prompt(target, examples, monkeypatch, value, where):
    real = target.model.forward

    def poisoned(tokens, *rest):
        hidden, tapped = real(tokens, *rest)
        chosen = {"taps": tapped, "teacher": hidden}[where]
        rows = (tokens == examples[7].tokens[4]).any(1)
        chosen[rows, 4, 3] = value
        return hidden, tapped

    monkeypatch.setattr(target.model, "forward", poisoned)
    store = FeatureStore(target, TAPS)
    with pytest.raises(SpecctlError, match=r"not finite for prompt p7$"):
        store.get([examples[7]])


@pytest.mark.parametrize(("path", "length"), [("lean", 32_768), ("transformers", 8192)])
def test_a_long_document_needs_linear_memory(path, length, largest_tensor):
    """Covers the target pass, packing, training-time test and gradients."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_path())
    sizes = dict(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    config = transformers.LlamaConfig(
        **sizes, vocab_size=len(tokenizer), max_position_embeddings=length, eos_token_id=3
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    target = Target("tiny", model, tokenizer, path=path)
    document = Example(0, "long", torch.randint(5, 500, (length,)).tolist(), length - 200)
    store = FeatureStore(target, (1,))
    head = Eagle3Head(eagle3.architecture(DrafterRecipe(vocab_size=64, taps=[1]), target), torch.arange(64))
    head.steps, head.decay = 2, 0.8
    with largest_tensor() as seen:
        batch = slot_batch([document], store.get([document]), 2, head.t2d)
        total, _, _ = head(batch, target.model.embedding, target.head_weight[:64])
        total.backward()
    assert total.isfinite() and batch.features.shape == (length - 2, 16)
    assert seen.elements <= max(300 * length, features.CHUNK_MASK["cpu"])


def test_a_file_in_the_place_of_the_features_is_refused_with_their_key(tmp_path):
    """The hint used to be another --output-dir, which changes nothing."""
    (tmp_path / "file").touch()
    about = {"target": {"hidden_size": 4}, "dtype": "torch.float32", "taps": []}
    files = feature_files.FeatureFiles(tmp_path / "file", about, [])
    with pytest.raises(UsageError, match="is a file, not a directory") as caught, files.writing():
        pass
    assert caught.value.hint == "set another features.dir"
