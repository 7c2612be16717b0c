"""Placement of a target: one GPU per process, or layers over several GPUs. Runs without a GPU."""

import contextlib
import ctypes
import gc
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specctl.decoding import target as target_module
from specctl.decoding.cache import KVCache
from specctl.decoding.models import linear
from specctl.decoding.models.hf import ShardedCache
from specctl.decoding.models.lean import LeanModel
from specctl.decoding.models.loading import own_gpus, pick_device, settle_memory
from specctl.decoding.plan import plan_rows
from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import TargetRecipe
from tests.conftest import SIZES
from tests.lossless.drafters import constant
from tests.toys.decoding import decode

CPU = torch.device("cpu")
CAPTURED: dict = dict(capture_output=True, text=True)


@pytest.mark.parametrize(
    ("count", "environ", "gpus"),
    [
        (8, {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, [3]),
        (8, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, [1, 3, 5, 7]),
        (8, {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, [1, 3, 5, 7]),  # deepspeed
        (1, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, [0]),
    ],
)
def test_processes_have_disjoint_gpus(count, environ, gpus):
    assert own_gpus(count, environ) == gpus


def test_more_processes_than_gpus_are_refused():
    with pytest.raises(UsageError, match="LOCAL_RANK=2"):
        own_gpus(2, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"})


def test_every_process_takes_its_own_gpu(monkeypatch):
    """Plain `cuda` is GPU 0: eight processes would all load the target there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda", 5)
    assert pick_device("cuda:2") == torch.device("cuda", 2)
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize(
    ("device", "gpus", "on"),
    [("auto", True, False), ("cuda", True, False), ("cuda:1", True, False), ("cpu", True, True), ("auto", False, True)],
)
def test_a_gpu_runs_attention_without_cudnn(monkeypatch, device, gpus, on):
    """cuDNN plans every new shape for some 0.4 s, and decoding has new shapes in every round."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        pick_device(device)
        assert torch.backends.cuda.cudnn_sdp_enabled() == on
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextlib.contextmanager
def no_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(("consume", "doubled"), [(True, False), (False, True)])
def test_packing_a_target_takes_no_second_copy(consume, doubled, monkeypatch):
    """A second copy took 28 GB for 16 GB of weights, and 112 for 64: more than the GPU has. Negative control: sharing
    the weights. Memory is counted by the allocator, because the size of the process depends on freed blocks. Garbage of
    earlier tests must not be freed during the measurement."""
    monkeypatch.setattr(linear, "PART", 2**10)  # less than a layer of this small model
    gc.collect()
    with (
        no_collection(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 8, "vocab_size": 64}))
        weights, layer = (sum(p.nbytes for p in part.parameters()) for part in (model, model.model.layers[0]))
        with torch.profiler.record_function("packing"):
            LeanModel(model, consume=consume)
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (began,) = (event.start_ns() for event in events if event.name() == "packing")
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = list(itertools.accumulate(change for _, change in changes))
    before = sum(change for at, change in changes if at < began)
    peak = max(size for (at, _), size in zip(changes, held, strict=True) if at >= began)
    assert sum(change for at, change in changes if at < began and change > 0) >= weights
    assert (peak - before > layer) == doubled


def test_a_target_takes_over_the_loaded_weights(tiny_directory, monkeypatch):
    """The packed weights of the `transformers` model are empty afterwards, so that nothing is stored twice."""
    loaded = []
    real = target_module.load_model
    monkeypatch.setattr(
        target_module, "load_model", lambda *args, **how: loaded.append(real(*args, **how)) or loaded[0]
    )
    target = load_target(tiny_directory("llama"), device="cpu", dtype="fp32")
    assert not any(parameter.numel() for parameter in loaded[0].model.layers.parameters())
    assert target.model.embedding.data_ptr() == loaded[0].get_input_embeddings().weight.data_ptr()


def test_a_device_map_of_one_device_keeps_the_text(prompts):
    plain = load_target("builtin", device="cpu", dtype="fp32")
    mapped = load_target("builtin", dtype="fp32", device_map="auto")
    options = dict(sampling=GREEDY, max_new_tokens=8, seeds=[0] * len(prompts))
    assert [d.output_ids for d in decode(mapped, prompts, **options)] == [
        d.output_ids for d in decode(plain, prompts, **options)
    ]
    if mapped.device.type == "cpu":
        assert mapped.path == "lean"


def test_a_target_that_spills_out_of_the_gpus_is_refused(monkeypatch):
    """`accelerate` silently keeps such layers in CPU memory and copies them to the GPU at every step."""
    load = AutoModelForCausalLM.from_pretrained

    def spilled(*arguments, **options):
        model, info = load(*arguments, **options)
        model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
        return model, info

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spilled)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_target("builtin", device="cpu")


@pytest.mark.parametrize(
    "wrong", [dict(device="cpu", device_map="auto"), dict(max_memory="9GiB"), dict(device_map="x")]
)
def test_contradictory_placement_options_are_refused(wrong):
    with pytest.raises(ValueError):
        TargetRecipe(**wrong)


def test_a_sharded_cache_equals_a_single_one():
    """After writing, compacting and dropping sequences, with all parts on one device."""
    torch.manual_seed(0)
    single = KVCache(3, 3, 2, 16, 12, dtype=torch.float32, device=CPU)
    sharded = ShardedCache([CPU] * 3, 3, 2, 16, 12, dtype=torch.float32)
    plan = plan_rows([0, 2, 5], 4, device=CPU, dtype=torch.float32)
    pairs = torch.randn(3, 12, 4, 12)
    for cache in (single, sharded):
        for layer in range(3):
            cache.write(layer, pairs[layer], plan)
        cache.compact(1, 2, [1])
        cache.select(torch.tensor([1, 2]))
    for layer in range(3):
        assert single.keys[layer].abs().sum() > 0
        assert torch.equal(single.keys[layer], sharded.keys[layer])
        assert torch.equal(single.values[layer], sharded.values[layer])


@pytest.mark.slow
def test_no_step_mixes_the_devices_of_a_sharded_target():
    """With layers on two devices a mask, cache row or feature on the wrong one fails only on GPUs."""
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("two_devices.py"))], **CAPTURED)
    if "cannot import name '_setup_privateuseone" in done.stderr:
        pytest.skip("this torch cannot register a backend in Python")
    assert done.stdout == "checked", done.stderr[-2000:]


@pytest.mark.parametrize("prefix_cache", [None, PrefixCache(most_texts=2)])
def test_speculation_with_a_sharded_cache_keeps_the_text(tiny_directory, monkeypatch, prefix_cache):
    """The whole decoding loop, with a drafter that is wrong, and the prefixes that `specctl reason` keeps."""
    target = load_target(tiny_directory("llama"), device="cpu", dtype="fp32", path="transformers")
    prompts = [[(37 * i) % 500 + 10 for i in range(n)] for n in (20, 5)]
    options = dict(sampling=GREEDY, max_new_tokens=8, seeds=[0, 0], drafter=constant([1, 1, 1]))
    expected = [d.output_ids for d in decode(target, prompts, **options)]
    options["prefix_cache"] = prefix_cache
    made = []

    def sharded(batch, capacity):
        made.append(ShardedCache([CPU] * 3, batch, 2, capacity, 12, dtype=torch.float32))
        return made[-1]

    monkeypatch.setattr(target.model, "new_cache", sharded)
    assert [d.output_ids for d in decode(target, prompts, **options)] == expected
    assert made


def resident_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc")
def test_settling_returns_the_memory_that_loading_has_freed():
    """Packing a 3.4B GGUF file left 2.4 GB of free blocks in the process."""
    settle_memory()  # from now on freed blocks stay
    blocks = [torch.ones(2**20 // 4) for _ in range(128)]
    last, full = blocks[-1].clone(), resident_mb()  # a block at the end keeps the heap from shrinking by itself
    del blocks
    assert resident_mb() > full - 16
    settle_memory()
    assert resident_mb() < full - 100
    assert last.sum() == 2**18
