"""Device rounds, kernels and forwards on a real GPU. Other tests use an interpreter or fake tensors instead.

python -m pytest tests/gpu                  # on a machine with a CUDA GPU: about three minutes
python -m pytest tests/gpu -m ''             # on a CPU: the same code without graphs, to check the tests themselves
"""

import warnings

import pytest
import torch
import transformers

from specctl import kernels
from specctl.commands.generate import generate
from specctl.decoding import attention
from specctl.decoding.device import graphs
from specctl.decoding.device import rounds as device_round
from specctl.decoding.models import layers
from specctl.decoding.models.loading import load_tokenizer, pick_device
from specctl.decoding.plan import plan_rows
from specctl.decoding.records import Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.state import DecodeState
from specctl.decoding.target import Target, load_target
from specctl.drafters.hybrid.costs import ROWS, Costs
from specctl.drafters.hybrid.drafter import Hybrid
from specctl.kernels.self_check import LayerShape
from specctl.recipe import FeatureRecipe, GenerateRecipe, ServerRecipe
from specctl.training import served_features
from specctl.training.example import Example
from specctl.training.features import FeatureStore
from tests.decoding import test_device_round as toys
from tests.toys.capture import CapturingEngine
from tests.toys.decoding import decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE != "cpu"
FASTEST = "1" if ON_GPU else "eager"  # value of SPECCTL_GRAPHS
MODES = ["0", "eager", "1"] if ON_GPU else ["0", "eager"]
NEW = [80, 90, 60, 50, 100] if ON_GPU else toys.NEW
FREE = Costs(tuple(1.0 for _ in ROWS), first=0.0, level=0.0)

pytestmark = [
    pytest.mark.filterwarnings("error:.*(CUDA graphs|kernel|unfused|PyTorch|contiguous)"),  # a fallback is an error
]
slow_on_cpu = [] if ON_GPU else [pytest.mark.slow]  # tests/decoding has shorter tests for a CPU
only_gpu = pytest.mark.skipif(not ON_GPU, reason="a CPU has no such kernels")


@pytest.fixture(scope="module")
def target(tiny_directory):
    """A random target with only seven possible tokens, so that random drafts are often right."""
    found = load_target(tiny_directory("qwen3"), device=DEVICE, dtype="fp32")
    bias = torch.full((found.vocab_size,), -1e4, device=found.device)
    bias[toys.WORDS] = 0.0
    bias[toys.WORDS[0]] = -5.0  # the end of a text
    found.model.head.bias = bias
    return found


def made(name, target):
    with torch.device(target.device):
        return toys.MADE[name](target)


def texts(target, monkeypatch, mode, **options):
    """Decode `toys.PROMPTS`. With graphs, most rounds must be replays."""
    monkeypatch.setenv("SPECCTL_GRAPHS", mode)
    how = dict(max_new_tokens=NEW, seeds=[1, 2, 3, 4, 5], share_rows=False) | options
    found = decode(target, toys.PROMPTS, **how)
    if mode == "1":
        assert found[-1].replays > 0.5 * found[-1].rounds
    return [one.output_ids for one in found]


@only_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [
        LayerShape(4096, 14336, 32, 8, 128, False),
        LayerShape(5120, 25600, 64, 8, 128, True),
        LayerShape(2048, 8192, 32, 8, 64, False),
        LayerShape(3584, 18944, 28, 4, 128, False),
    ],
    ids=["llama-8b", "qwen3-32b", "llama-1b", "qwen2-7b"],
)
def test_kernels_pass_their_self_checks(dtype, shape):
    device = torch.device(DEVICE, 0)
    pick_device(DEVICE)
    assert kernels.select_backend(device) == "triton"
    heads = device, dtype, shape.heads, shape.kv_heads, shape.dim
    assert attention.serves(*heads) and attention.serves_pages(*heads) and layers.fuses(device, dtype, shape)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-3), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize(
    ("kind", "more"), [("LlamaConfig", {}), ("Qwen3Config", {"head_dim": 32}), ("Qwen2Config", {})]
)
def test_forward_equals_transformers(kind, more, dtype, close):
    """Prefill, then steps of one row, 8 rows and 41 rows."""
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, vocab_size=1000)
    own = dict(num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, eos_token_id=3, pad_token_id=0)
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, **own, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(DEVICE, dtype)
    target = Target("random", model, load_tokenizer("builtin"))
    ids = torch.randint(5, 1000, (1, 200), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with torch.inference_mode():
        expected = model(ids).logits[0, 149:].float()
        state = DecodeState(target, spare=63)
        state.assign_slots([state.sequence(Request(ids[0, :150].tolist(), GREEDY, 60))])
        logits = [target.prefill([ids[0, :150].tolist()], state.cache)[0]]
        for base, rows in ((150, 1), (151, 8), (159, 41)):
            plan = plan_rows([base], rows, device=target.device, dtype=dtype)
            logits.append(target.step(ids[:, base : base + rows], state.cache, plan)[0][0])
    error = (torch.cat(logits).float() - expected).norm() / expected.norm()
    assert error < close


@pytest.mark.parametrize(("sampling", "slots"), [(GREEDY, 1), (toys.MIXED, 2)], ids=["greedy", "mixed"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_on_cpu) for name in toys.MADE])
def test_device_rounds_of_every_drafter_commit_the_texts_of_host_rounds(target, monkeypatch, name, sampling, slots):
    how = dict(drafter=made(name, target), slots=slots, sampling=sampling)
    host, *others = [texts(target, monkeypatch, mode, **how) for mode in MODES]
    assert all(other == host for other in others)


@pytest.mark.parametrize("head", ["eagle3 tree", "hydra tree", "medusa tree", "dflash tree", "peagle tree"])
@pytest.mark.parametrize("text", [pytest.param(name, marks=slow_on_cpu) for name in ("lookup", "suffix")])
def test_hybrids_commit_the_texts_of_plain_decoding(target, monkeypatch, head, text):
    plain = texts(target, monkeypatch, "0", sampling=toys.MIXED, slots=2)
    hybrid = Hybrid(made(head, target), made(text, target), FREE)
    assert texts(target, monkeypatch, FASTEST, sampling=toys.MIXED, slots=2, drafter=hybrid) == plain


def test_graphs_are_captured_after_some_texts_have_ended(target, monkeypatch):
    """All rows without a sequence write to one page, in an order that a GPU does not define."""
    monkeypatch.setenv("SPECCTL_GRAPHS", FASTEST)
    monkeypatch.setattr(graphs, "_refused", set())
    prompts = [[5 + i, 9, 300 + i, 12, 7] * (i + 2) for i in range(8)]
    new = [2, 3, 2, *[100] * 5]
    how = dict(drafter=made("eagle3 tree", target), sampling=GREEDY, max_new_tokens=new, seeds=[0] * 8)
    with warnings.catch_warnings(action="error"):
        found = decode(target, prompts, share_rows=False, **how)
    assert not graphs._refused
    assert not ON_GPU or found[-1].replays


def test_generate_uses_device_rounds(monkeypatch):
    monkeypatch.setenv("SPECCTL_GRAPHS", FASTEST)
    launched, launch = [], device_round.DeviceRounds._launch
    monkeypatch.setattr(device_round.DeviceRounds, "_launch", lambda rounds: (launched.append(1), launch(rounds))[1])
    recipe = GenerateRecipe(prompt="List the names of all students.", sampling={"max_new_tokens": 16})
    generate(recipe, target=load_target("builtin", device=DEVICE, dtype="fp32"))
    assert launched


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_on_cpu) for name in toys.EACH])
def test_graphs_stay_valid_while_the_batch_shrinks_and_grows(target, monkeypatch, name):
    """A captured graph reads and writes the same memory after the batch had other sizes."""
    monkeypatch.setattr(graphs, "WARM_UP", 0)
    captured, capture = [], graphs.capture
    monkeypatch.setattr(graphs, "capture", lambda *args: (captured.append(1), capture(*args))[1])
    prompts = [[5 + i, 9, 300 + i, 12, 7] for i in range(12)]
    new = [100, 30, 80, 20, 60, 90, 40, 100, 50, 70, 100, 100]
    how = dict(sampling=toys.HOT, max_new_tokens=new, seeds=[*range(12)])
    monkeypatch.setenv("SPECCTL_GRAPHS", "0")
    host = [text.output_ids for text in decode(target, prompts, drafter=made(name, target), slots=8, **how)]
    monkeypatch.setenv("SPECCTL_GRAPHS", FASTEST)
    engine = toys.engine_for(target, made(name, target), slots=8)
    for _ in range(3):
        before = len(captured)
        assert [text.output_ids for text in decode(target, prompts, engine=engine, **how)] == host
    assert len(captured) == before and {*engine.device.batches} >= {1, 8}


@pytest.mark.parametrize("taps", [(0, 1), ()], ids=["taps", "last"])
def test_streamed_features_equal_the_servers_states(target, tmp_path, taps):
    """With features read ahead on a stream of their own or not, while the GPU is busy."""
    texts = [Example(n, str(n), torch.randint(5, 200, (20 + 5 * n,)).tolist(), 4) for n in range(12)]
    texts = [texts[n] for n in (3, 1, 0, 2, 5, 4, 7, 6, 9, 11, 8, 10)]
    width = target.hidden_size
    kept = {tuple(one.tokens[:-1]): torch.randn(len(one.tokens) - 1, len(taps) + 1, width) for one in texts}
    store = FeatureStore(target, taps)
    engine = CapturingEngine(target.tokenizer, "vllm", tmp_path, lambda ids: states_of(kept, ids, len(taps) + 1, width))
    with engine, pytest.MonkeyPatch.context() as patched:
        patched.setattr(served_features, "check_same", lambda *_: None)
        features = FeatureRecipe(mode="stream", ahead=5, server=ServerRecipe(urls=[engine.url]))
        stream = store.open_stream(texts, features, iter(texts), 1)
        busy = torch.randn(2048, 2048, device=target.device)
        try:
            batches = [texts[n : n + 3] for n in range(0, 12, 3)]
            for number, batch in enumerate(batches):
                found = store.get(batch)
                store.prefetch([*batches, []][number + 1])
                busy = busy @ busy / 50  # a training step: reading ahead must not wait for it
                for example, one in zip(batch, found, strict=True):
                    rows = kept[tuple(example.tokens[:-1])]
                    own = served_features.to_features(store, stream.client, stream.states, example, rows)
                    assert all(torch.equal(getattr(own, name), part) for name, part in vars(one).items())
                    assert one.taps.device.type == target.device.type
        finally:
            stream.close()


def states_of(kept, ids, layers, width):
    found = kept.get(tuple(ids))
    return torch.ones(len(ids), layers, width) if found is None else found
