"""Loading draft weights inside vLLM, with fake vLLM modules that fail where a loader can fail. Afterwards either the
new or the old drafter runs, never a mixture, and the target is not changed."""

import subprocess
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from specctl.engines import vllm_worker
from specctl.engines.vllm_worker import DrafterMismatch

HEAVY = ("torch", "safetensors", "pydantic", "rich", "httpx", "vllm", "numpy", "transformers")


class Head(nn.Module):
    """A draft model that computes with an attribute derived from its weight, like vLLM's on a CPU."""

    def __init__(self, embedding):
        super().__init__()
        self.embed_tokens = embedding
        self.fc, self.norm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)
        self.fails_after = None
        self.pack()

    def pack(self):
        packed = self.fc.weight.detach().clone()
        self.fc.packed = lambda rows: rows @ packed.T
        self.fc.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, ids):
        return self.norm(self.fc.packed(self.embed_tokens(ids)))

    def load_weights(self, weights):
        for place, (name, tensor) in enumerate(weights):
            if place == self.fails_after:
                raise AssertionError("a shape is wrong")
            if name == "fc.weight":
                self.fc.weight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.get_parameter(name).data.copy_(tensor)


class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)


@pytest.fixture
def worker(monkeypatch):
    """A worker of a fake vLLM. Its `fails_in` names the function of the reload that fails."""
    told = SimpleNamespace(resets=0, fails_in=None)

    def initialize(model):
        for module in model.modules():
            assert module is not told.target.embed_tokens, "the target's embedding is reloaded"
        model.fc.packed = None  # the old weight is lost from here on

    def finalize(model, config):
        model.pack()
        if told.fails_in == "finalize":
            raise RuntimeError("no memory")

    def info(module):
        told.resets += 1
        return SimpleNamespace(reset=lambda: None)

    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload, reload.finalize_layerwise_reload = initialize, finalize
    layerwise = ModuleType("vllm.model_executor.model_loader.reload.layerwise")
    layerwise.get_layerwise_info = info
    config = ModuleType("vllm.config")
    config.set_current_vllm_config = lambda config: nullcontext()
    loader = ModuleType("vllm.model_executor.model_loader")
    loader.reload = reload
    named = {
        "vllm": ModuleType("vllm"),
        "vllm.model_executor": ModuleType("vllm.model_executor"),
        loader.__name__: loader,
    }
    for name, module in (named | {one.__name__: one for one in (reload, layerwise, config)}).items():
        monkeypatch.setitem(sys.modules, name, module)
    told.target = Target()
    told.model = Head(told.target.embed_tokens)
    told.get_model, told.get_draft_model = lambda: told.target, lambda: told.model
    told.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=None))
    return told


def weights(seed):
    draw = torch.Generator().manual_seed(seed)
    return {"fc.weight": torch.randn(4, 4, generator=draw), "norm.weight": torch.randn(4, generator=draw)}


def computed(worker):
    with torch.no_grad():
        return worker.model(torch.arange(8))


def test_the_drafter_computes_with_the_new_weights(worker):
    fresh = Head(worker.target.embed_tokens)
    fresh.load_weights(iter(weights(1).items()))
    fresh.pack()
    before = computed(worker)
    address = worker.model.norm.weight.data_ptr()
    vllm_worker._load(worker, weights(1))
    assert torch.equal(computed(worker), fresh(torch.arange(8))) and not torch.equal(computed(worker), before)
    assert worker.model.norm.weight.data_ptr() == address  # CUDA graphs keep this address


@pytest.mark.parametrize("fault", [0, 1, "finalize"])
def test_a_failed_load_restores_the_old_drafter(worker, fault):
    vllm_worker._load(worker, weights(1))
    before = computed(worker)
    worker.model.fails_after, worker.fails_in = (fault, None) if isinstance(fault, int) else (None, fault)
    with pytest.raises((AssertionError, RuntimeError), match=r"a shape is wrong|no memory"):
        vllm_worker._load(worker, weights(2))
    assert torch.equal(computed(worker), before)
    assert worker.resets == 3  # resets of the model, fc and norm
    worker.model.fails_after = worker.fails_in = None
    vllm_worker._load(worker, weights(2))
    assert not torch.equal(computed(worker), before)


def test_shared_target_weights_are_never_overwritten(worker):
    shared = worker.target.embed_tokens.weight.detach().clone()
    vllm_worker._load(worker, weights(1) | {"model.embed_tokens.weight": shared.clone()})
    before = computed(worker)
    with pytest.raises(DrafterMismatch, match=r"it contains a different model\.embed_tokens\.weight"):
        vllm_worker._load(worker, weights(2) | {"model.embed_tokens.weight": shared + 1})
    assert torch.equal(worker.target.embed_tokens.weight, shared) and torch.equal(computed(worker), before)
    assert worker.model.embed_tokens is worker.target.embed_tokens


def test_a_worker_compares_its_part_of_the_targets_embedding(worker):
    """With tensor parallelism every export with `embed_tokens` was refused. The last part has padding."""
    table, part = torch.arange(24.0).view(6, 4), worker.target.embed_tokens
    part.shard_indices = SimpleNamespace(org_vocab_start_index=4)
    part.weight.data = torch.cat((table[4:], torch.zeros(2, 4)))
    vllm_worker._load(worker, weights(1) | {"model.embed_tokens.weight": table})
    for wrong in (table.flip(0), table[:, :2]):
        with pytest.raises(DrafterMismatch, match="a different"):
            vllm_worker._load(worker, weights(2) | {"model.embed_tokens.weight": wrong})


def test_the_module_imports_no_heavy_packages():
    """vLLM's environment may lack specctl's requirements."""
    code = f"import sys, specctl.engines.vllm_worker; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Projection(nn.Module):
    """The keys and values of all ranks have four rows; this rank has the last two."""

    tp_rank, num_kv_head_replicas = 3, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.Module()
        self.self_attn.qkv_proj, self.self_attn.kv_size = Projection(), 2


class Inner(nn.Module):
    """The part of vLLM's DFlash models that a swap changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self._fused_kv_weight, self._fused_kv_bias = torch.zeros(8, 3), None
        self._k_norm_weights = torch.zeros(2, 5)

    def _build_fused_kv_buffers(self):
        raise AssertionError("the weights are not loaded yet")


class Block(nn.Module):
    """A block drafter with a loader that stacks weights and reads the mask embedding from a file."""

    def __init__(self):
        super().__init__()
        self.model, self.mask, self.fails = Inner(), None, False

    def _read_mask_embedding(self):
        raise AssertionError("the directory that vLLM was started with has the old embedding")

    def load_weights(self, weights):
        assert vllm_worker.MASK not in dict(weights)
        self.mask = self._read_mask_embedding()
        self.model._build_fused_kv_buffers()
        if self.fails:
            raise RuntimeError("no memory")


def test_derived_tensors_of_a_block_drafter_are_updated_in_place(worker, monkeypatch):
    """The code that reads the context refers to these tensors. A failed load restores them, and vLLM's own methods."""
    from vllm.model_executor.model_loader import reload

    monkeypatch.setattr(reload, "initialize_layerwise_reload", lambda model: None)
    monkeypatch.setattr(reload, "finalize_layerwise_reload", lambda model, config: None)
    worker.model = block = Block()
    draw = torch.Generator().manual_seed(0)
    new = {vllm_worker.MASK: torch.randn(3, generator=draw)}
    for place in range(2):
        key = f"layers.{place}.self_attn"
        new |= {f"{key}.{name}_proj.weight": torch.randn(4, 3, generator=draw) for name in "kv"}
        new[f"{key}.k_norm.weight"] = torch.randn(5, generator=draw)
    address = block.model._fused_kv_weight.data_ptr()
    vllm_worker._load(worker, dict(new))
    rows = [new[f"layers.{place}.self_attn.{name}_proj.weight"][2:] for place in range(2) for name in "kv"]
    assert torch.equal(block.model._fused_kv_weight, torch.cat(rows)) and torch.equal(block.mask, new[vllm_worker.MASK])
    norms = torch.stack([new[f"layers.{place}.self_attn.k_norm.weight"] for place in range(2)])
    assert torch.equal(block.model._k_norm_weights, norms) and block.model._fused_kv_weight.data_ptr() == address
    block.fails, before = True, block.model._fused_kv_weight.clone()
    with pytest.raises(RuntimeError, match="no memory"):
        vllm_worker._load(worker, {name: tensor + 1 for name, tensor in new.items()})
    assert torch.equal(block.model._fused_kv_weight, before)
    for method in (block._read_mask_embedding, block.model._build_fused_kv_buffers):
        with pytest.raises(AssertionError):
            method()


def test_the_mask_embedding_is_part_of_a_block_drafters_layout(tmp_path):
    """It is in a separate file, which is read without executing its pickle. It must exist if the running drafter has
    one."""
    from safetensors.torch import save_file

    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / name / "model.safetensors")
    torch.save({"mask_token_id": 3, "embedding": torch.ones(1, 4)}, tmp_path / "with" / vllm_worker.MASK)
    forms = [vllm_worker.read_layout(tmp_path / name) for name in ("without", "with")]
    (wrong,) = vllm_worker.differences(*forms)
    assert vllm_worker.MASK in wrong
    files = vllm_worker.contents(tmp_path / "with")
    assert torch.equal(vllm_worker._tensors(files, 8)[vllm_worker.MASK], torch.ones(4))
    for spoiled in (b"no file of torch", files[vllm_worker.MASK][:-20]):
        with pytest.raises(DrafterMismatch, match="does not contain an embedding"):
            vllm_worker._tensors(files | {vllm_worker.MASK: spoiled}, 8)


def written(place, config=b'{"hidden_size": 2}', header=None, more=0):
    """An exported drafter. `header` replaces the header of its safetensors file; `more` bytes are appended."""
    from safetensors.torch import save_file

    place.mkdir()
    (place / "config.json").write_bytes(config)
    save_file({"fc.weight": torch.zeros(2, 2)}, place / "model.safetensors")
    if header is not None:
        (place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with open(place / "model.safetensors", "ab") as file:
        file.truncate(file.tell() + more)
    return place


DEEP = b"[" * 100_000
HOSTILE = {
    "deep config": {"config": DEEP},
    "no object": {"config": b'"HUSH"'},
    "no JSON": {"config": b"HUSH"},
    "no text": {"config": b"HUSH\xfe"},  # Python's error quotes the byte
    "deep header": {"header": DEEP},
    "no dtype": {"header": b'{"HUSH": {"shape": [2]}}'},
    "no shape": {"header": b'{"HUSH": {"dtype": "F32", "shape": ["HUSH"]}}'},
    "a list": {"header": b'["HUSH"]'},
    "more bytes than tensors": {"more": 2**40},
    "a text as header": {"header": b"HUSH", "more": 100},
}


@pytest.mark.parametrize("how", HOSTILE)
def test_errors_of_damaged_directories_do_not_quote_their_files(tmp_path, how):
    """A client may name any directory, but must not learn the contents of its files."""
    place = written(tmp_path / "drafter", **HOSTILE[how])
    with pytest.raises(DrafterMismatch, match=str(place)) as error:
        vllm_worker.read_layout(place)
    assert "HUSH" not in str(error.value) and "0xfe" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "more.safetensors", vllm_worker.MASK])
@pytest.mark.parametrize("read", [vllm_worker.read_layout, vllm_worker.contents])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_pipes_devices_and_directories_are_refused(tmp_path, pipe, name, read, kind):
    place = written(tmp_path / "drafter")
    (place / name).unlink(missing_ok=True)
    if kind == "pipe":
        pipe(place / name)
    elif kind == "device":
        (place / name).symlink_to("/dev/zero")
    else:
        (place / name).mkdir()
    with pytest.raises(DrafterMismatch, match="cannot be read"):
        read(place)


def test_a_file_larger_than_the_limit_is_not_read(tmp_path):
    place = written(tmp_path / "drafter")
    with open(place / vllm_worker.MASK, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(DrafterMismatch, match="larger than the limit"):
        vllm_worker.contents(place)


def test_reported_differences_quote_only_numbers(tmp_path):
    running = vllm_worker.read_layout(written(tmp_path / "running"))
    other = vllm_worker.read_layout(
        written(tmp_path / "other", b'{"hidden_size": 3, "auth": "HUSH", "keys": ["HUSH"]}')
    )
    wrong = "; ".join(vllm_worker.differences(other, running))
    assert "hidden_size is 3 in its config.json, but 2 in" in wrong and "auth is something else" in wrong
    assert "HUSH" not in wrong
