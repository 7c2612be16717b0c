"""The C++ step is as exact as PyTorch, and a row has the same bits in any batch."""

import shutil
import subprocess
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from specctl.decoding.cache import KVCache
from specctl.decoding.models import lean
from specctl.decoding.plan import plan_rows
from specctl.decoding.prefix_cache import PrefixCache
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.decoding.target import load_target
from specctl.drafters.text.lookup import Lookup
from specctl.kernels import cache, native, reference
from tests.conftest import SIZES, write_tiny
from tests.toys.decoding import decode

needed = pytest.mark.skipif(native.library() is None, reason="no AVX2, or no C++ compiler")
WIDE = SIZES | {"hidden_size": 96, "head_dim": 32, "intermediate_size": 160, "num_attention_heads": 12}
HALF_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MULTIPLIERS = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS = {
    "llama": ("LlamaConfig", WIDE | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", WIDE | {"num_key_value_heads": 2}),  # six queries per key, more than one group
    "qwen3": ("Qwen3Config", WIDE | {"num_key_value_heads": 12, "vocab_size": 301}),
    "phi3": ("Phi3Config", WIDE | {"num_key_value_heads": 4, "rope_parameters": HALF_ROTATED}),
    "smollm3": ("SmolLM3Config", WIDE | {"num_key_value_heads": 4, "no_rope_layers": [0, 1, 0]}),
    "mistral": ("MistralConfig", WIDE | {"num_key_value_heads": 4, "sliding_window": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        WIDE | {"num_key_value_heads": 4, "sliding_window": 16, "query_pre_attn_scalar": 20, "layer_types": TYPES},
    ),
    "glm4": ("Glm4Config", WIDE | {"num_key_value_heads": 2, "head_dim": 32}),
    "granite": ("GraniteConfig", WIDE | {"num_key_value_heads": 4} | MULTIPLIERS),
}
PROMPT, LONG = 21, 300  # longer than the windows, and than two chunks of attention


SUPPORTED = native.instructions()


@pytest.fixture(scope="module", params=SUPPORTED)
def instructions(request):
    """Run with each instruction set that this processor supports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "instructions", lambda: [request.param])
        patch.setattr(lean, "SHORTEST_WINDOW", 4)
        yield request.param


@pytest.fixture(scope="module", params=KINDS)
def three(request, instructions, tmp_path_factory):
    """Return the target with the C++ step, without it, and in fp32 with the same weights."""
    place = write_tiny(tmp_path_factory.mktemp("native") / request.param, *KINDS[request.param])
    AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).save_pretrained(place)
    target, plain, exact = (load_target(str(place), device="cpu", dtype=dtype) for dtype in ("bf16", "bf16", "fp32"))
    assert target.model._native is not None and exact.model._native is None
    plain.model._native = None
    return target, plain, exact


def stepped(target, base, rows, taps=(0, 1, 2), **tree):
    """Step `rows` [B, T] after prompts of `base` tokens; return logits, states, taps and the cache."""
    texts = torch.arange(len(base) * max(base)).view(len(base), -1) * 7 % target.vocab_size
    cache = target.new_cache(len(base), max(base) + 8)
    for b, count in enumerate(base):
        target.prefill([texts[b, :count].tolist()], cache, slots=[b])
    plan = plan_rows(base, rows.shape[1], device=target.device, dtype=target.dtype, **tree)
    with torch.inference_mode():
        return target.step(rows, cache, plan, taps), cache.store


TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
DEPTH = torch.tensor([[0, 1, 1, 2]])


@needed
@pytest.mark.parametrize("base", [[PROMPT], [PROMPT, 5], [LONG, 140]], ids=["alone", "ragged", "long"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_the_cpp_step_is_as_exact_as_pytorch(three, base, tree):
    """Compare logits, states, tapped states, keys and values with fp32."""
    shape = {"visible": TREE.expand(len(base), -1, -1), "depth": DEPTH.expand(len(base), -1)} if tree else {}
    rows = torch.arange(4 * len(base)).view(len(base), 4) + 3
    found = [stepped(target, base, rows, **shape) for target in three]
    for ours, theirs, exact in zip(*((*step, store) for step, store in found), strict=True):
        off, usual = ((one.float() - exact).norm() / exact.norm() for one in (ours, theirs))
        assert off < 1.2 * usual + 1e-4 and usual < 0.07


@needed
@pytest.mark.parametrize("length", [PROMPT, LONG])
def test_a_row_has_the_same_bits_in_a_tree_in_a_batch_and_alone(three, length):
    """Also where a step of one row shares its chunks among the threads."""
    target, *_ = three
    ids = [3, 4, 5, 6]  # the path of the tree is 0, 2, 3
    (tree, _, _), _ = stepped(target, [length], torch.tensor([ids]), visible=TREE[None], depth=DEPTH)
    rows = torch.tensor([[3, 5, 6]])
    (chain, _, _), _ = stepped(target, [length], rows)
    (batch, _, _), _ = stepped(target, [length, 5], rows.expand(2, -1))
    assert torch.equal(tree[0, [0, 2, 3]], chain[0])
    assert torch.equal(batch[0], chain[0])
    alone = [stepped(target, [length], rows[:, :count])[0][0][0, -1] for count in (1, 2, 3)]
    assert torch.equal(torch.stack(alone), chain[0])
    assert not torch.equal(tree[0, 1], tree[0, 2]), "nodes at the same depth differ"


@needed
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, 0, 1.0)], ids=["greedy", "sampled"])
def test_drafted_bf16_texts_equal_plain_decoding(instructions, sampling):
    """The logits are bitwise equal, so not even ties differ."""
    target = load_target("builtin", device="cpu", dtype="bf16")
    prompts = [
        target.render([{"role": "user", "content": text}]) for text in ("Count to ten.", "Write SQL that counts users.")
    ]
    options = {"sampling": sampling, "max_new_tokens": 48, "seeds": [1, 2]}
    plain = [one.output_ids for one in decode(target, prompts, **options)]
    drafted = decode(target, prompts, drafter=Lookup(), **options)
    assert [one.output_ids for one in drafted] == plain
    assert sum(len(one.output_ids) - one.target_passes for one in drafted) > 0


@needed
def test_a_prompt_has_the_same_bits_after_a_cached_prefix(instructions):
    target, taps = load_target("builtin", device="cpu", dtype="bf16"), (2, 5)
    prompt = [token % target.vocab_size for token in range(7, 7 * 151, 7)]
    prefix_cache, expected, store = PrefixCache(), target.new_cache(1, 200), target.new_cache(1, 200)
    logits, _, states = target.prefill([prompt], expected, taps)
    while prefix_cache.read_ahead(target, prompt, taps, 37):
        pass
    last, tapped, _ = prefix_cache.prefill(target, [prompt], store, taps, [0])
    assert prefix_cache.read == len(prompt) == 150
    assert torch.equal(last, logits) and torch.equal(tapped, states) and torch.equal(store.store, expected.store)


@needed
@pytest.mark.parametrize("vocabulary", [5, 256, 300, 4096])
def test_tokens_of_bf16_logits(instructions, vocabulary):
    """Equal the reference's: maxima, rows that are no distribution, and samples away from the bounds of a token."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(64, vocabulary, generator=generator)).bfloat16()
    logits[1], logits[2, -1], logits[3, :2], logits[4, 0] = -torch.inf, torch.nan, -torch.inf, torch.inf
    logits[5, [1, 3]] = 40.0  # ties
    assert torch.equal(native.argmax(logits), reference.argmax(logits))
    assert native.finite(logits).tolist() == reference.finite_rows(logits).tolist()
    assert native.finite(logits).tolist() == [row not in (1, 2, 4) for row in range(64)]
    fill = torch.ones(64)
    for temperature in (0.7, 1.0):
        rows = reference.row_params(logits, fill * temperature, fill.long() * 0, fill)
        for u in torch.rand(9, generator=generator).tolist():
            near = [reference.sample_rows(rows, fill * min(max(u + step, 0.0), 1.0)) for step in (-1e-5, 0.0, 1e-5)]
            for row in range(64):
                found, expected = native.sample(logits[row], temperature, u), {int(one[row]) for one in near}
                assert found is None if row in (1, 4) else found in expected
    strided = logits.t().contiguous().t()[7]
    assert native.sample(strided, 1.0, 0.5) == native.sample(logits[7], 1.0, 0.5)
    assert native.argmax(logits.float()) is native.sample(logits[0].float(), 1.0, 0.5) is None


@needed
def test_samples_have_the_probabilities_of_the_tokens(instructions):
    """The share of a grid of uniforms that draws a token equals its probability."""
    logits = torch.randn(600, generator=torch.Generator().manual_seed(0)).bfloat16()
    grid = [(i + 0.5) / 20000 for i in range(20000)]
    drawn = torch.tensor([native.sample(logits, 0.8, u) for u in grid])
    shares = torch.bincount(drawn, minlength=600) / len(grid)
    assert (shares - (logits.float() / 0.8).softmax(-1)).abs().max() <= 1.01 / len(grid)


@needed
@pytest.mark.parametrize("outputs", [16, 48, 83, 112])
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_fp32_products(instructions, outputs, biased):
    generator = torch.Generator().manual_seed(outputs)
    weight, x = (torch.randn(n, 96, generator=generator).bfloat16() for n in (outputs, 40))
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    call = native.NativeProduct(weight, bias, native.library())
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    for rows in (*range(1, 15), 24, 25, 40):
        torch.testing.assert_close(call(x[:rows]).float(), exact[:rows], rtol=2**-7, atol=1e-2)
        assert torch.equal(call(x[:rows]), call(x)[:rows])
    assert call(x[0]).shape == (outputs,)


@needed
def test_pages_and_long_prompts_use_pytorch(three):
    target, *_ = three
    cache = target.new_cache(1, 200)
    plans = [plan_rows([0], rows, device=target.device, dtype=target.dtype) for rows in (64, 65)]
    assert [target.model._native.supports(cache, plan) for plan in plans] == [True, False]
    assert type(cache) is KVCache


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Provide an empty cache directory, an instruction set, and no loaded library."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "instructions", lambda: SUPPORTED or ["avx2"])
    native.library_for.cache_clear()
    yield tmp_path
    native.library_for.cache_clear()


def test_without_a_compiler_pytorch_is_used(fresh, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with warnings.catch_warnings(action="error"):
        assert native.library() is None
    assert list(fresh.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exec sleep 60", "broken was stopped after 0.5 s$"),
        ("kill -9 $$", "broken was ended by signal 9$"),
        ("exit 3", "broken failed with code 3$"),
        (
            "echo 'a.cpp:1: error: no such thing' >&2; seq 999 >&2; exit 1",
            "broken failed: a.cpp:1: error: no such thing$",
        ),
    ],
)
def test_the_warning_about_a_compiler_names_its_end(fresh, monkeypatch, script, said):
    """The last 300 characters were shown: of a time-out the end of the command line, of an error the last notes."""
    compiler = fresh / "broken"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo 1 && exit\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native, "TIMEOUT_S", 0.5 if "sleep" in script else 60)
    with pytest.warns(UserWarning, match=said):
        assert native.library() is None


def test_a_failing_compiler_is_reported_once(fresh, monkeypatch):
    compiler = fresh / "broken"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && echo 1 && exit\necho 'no such option' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.warns(UserWarning, match=r"runs on PyTorch: .*broken failed: no such option"):
        assert native.library() is None
    assert native.library() is None
    assert not list(fresh.rglob("*.so"))


def test_a_cache_that_cannot_be_written_is_named(fresh, monkeypatch):
    """The warning used to say that the compiler had failed."""
    (fresh / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    with pytest.warns(UserWarning, match=r"runs on PyTorch: .*Not a directory: '.*file.*XDG_CACHE_HOME=DIR"):
        assert native.library() is None


def test_a_user_without_a_home_has_a_cache_that_cannot_be_made(monkeypatch):
    """Without HOME and without an account, as in many containers, every command used to end as unexpected."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cache.Path, "home", homeless)
    assert cache.directory() == Path("/nonexistent/.cache/specctl")


def test_processes_that_start_together_compile_once(fresh, monkeypatch):
    """Each of them used to compile, for five seconds or more.

    Threads stand for processes here, because each thread takes its own lock.
    """
    compiler = fresh / "slow"
    said = '#!/bin/sh\n[ $1 = --version ] && echo 1 && exit\necho >> "$0.calls"\nsleep 0.3\n: > "$7"\n'
    compiler.write_text(said)
    compiler.chmod(0o755)
    together = threading.Barrier(3)

    def start(_):
        together.wait()
        return native._compiled(str(compiler), ("-1", "-2", "-3", "-4"))

    with ThreadPoolExecutor(3) as pool:
        (path,) = {*pool.map(start, range(3))}
    assert path.is_file() and (fresh / "slow.calls").read_text() == "\n"


@needed
@pytest.mark.slow
def test_the_library_is_compiled_once(fresh, monkeypatch):
    """The next process loads the file from the cache; other source code gets another file name."""
    assert native.library() is not None
    (made,) = fresh.rglob("*.so")
    assert made.parent.stat().st_mode & 0o777 == 0o700
    native.library_for.cache_clear()
    commands, run = [], subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: commands.append(command) or run(command, **options)
    )
    assert native.library() is not None
    assert [command[1:] for command in commands] == [["--version"]]


@pytest.mark.parametrize(
    ("kind", "has", "flag"),
    [("avx2", "avx_vnni", "-mavxvnni"), ("avx512", "avx512_vnni", "-mavx512vnni"), ("avx2", "avx512_vnni", None)],
)
def test_vnni_is_used_where_the_processor_has_it(monkeypatch, kind, has, flag):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {has: True})
    assert [one for one in native.flags_of(kind) if "vnni" in one] == ([flag] if flag else [])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("vnni", [False, True])
@pytest.mark.parametrize("kind", native.INSTRUCTIONS)
def test_the_step_compiles_for_every_instruction_set(monkeypatch, kind, vnni):
    """Also for instructions that this processor lacks."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(native.VNNI, vnni))
    command = ["g++", *native.flags_of(kind), "-fsyntax-only", str(native.SOURCE)]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@needed
def test_the_environment_selects_the_instruction_set(monkeypatch):
    monkeypatch.setattr(native, "instructions", lambda: SUPPORTED)
    assert native.library() is native.library_for(SUPPORTED[0])
    monkeypatch.setenv("SPECCTL_STEP", SUPPORTED[-1])
    assert native.library() is native.library_for(SUPPORTED[-1])


def test_the_environment_disables_the_cpp_step(fresh, monkeypatch):
    monkeypatch.setenv("SPECCTL_STEP", "torch")
    assert native.library() is None and list(fresh.iterdir()) == []


@needed
def test_a_target_without_layers_has_no_step(tmp_path):
    """A learner process loads only embedding and vocabulary head, and used to fail here."""
    place = write_tiny(tmp_path / "llama", *KINDS["llama"])
    whole, part = (load_target(str(place), device="cpu", dtype="bf16", whole=whole) for whole in (True, False))
    assert whole.model._native is not None and torch.equal(whole.head_weight, part.head_weight)


@needed
def test_gathered_products_stay_the_same(monkeypatch):
    """Small panels move once, together; large ones stay."""
    monkeypatch.setattr(native, "LARGE", 2**21)
    generator, found = torch.Generator().manual_seed(1), native.library()
    shapes = (48, 64), (83, 96), (4096, 512)
    products = [native.NativeProduct(torch.randn(s, generator=generator).bfloat16(), None, found) for s in shapes]
    rows = [torch.randn(3, product.inputs, generator=generator).bfloat16() for product in products]
    before = [product(x) for product, x in zip(products, rows, strict=True)]
    large = products[2].panels.data_ptr()
    native.NativeProduct.gather(products)
    places = [product.panels.data_ptr() for product in products]
    assert places[1] - places[0] == products[0].nbytes and places[2] == large
    native.NativeProduct.gather(products)
    assert places == [product.panels.data_ptr() for product in products]
    assert all(torch.equal(product(x), y) for product, x, y in zip(products, rows, before, strict=True))


@needed
def test_int8_products_equal_products_of_the_rounded_weights(instructions):
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 64, generator=generator).bfloat16() for n in (83, 13))
    call = native.NativeProduct(weight, None, native.library(), int8=True)
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    rounded = (weight.float() / scale).round() * scale
    torch.testing.assert_close(call(x).float(), native.in_bytes(x, 32) @ rounded.T, rtol=2**-7, atol=0.05)
    logits, gains, index = call.candidates(x, 5)
    torch.testing.assert_close(logits, native.in_bytes(x, 32) @ rounded.T, rtol=2**-7, atol=0.05)
    expected = logits.log_softmax(-1).topk(5)
    assert torch.equal(index, expected.indices)
    torch.testing.assert_close(gains, expected.values, rtol=1e-5, atol=1e-5)


def grouped(outputs, inputs, group, bits, seed=0):
    """Return random quantized weights that use all code values."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8)
    scale, shift = (torch.randn(2, outputs, inputs // group, generator=generator) / high).half().float()
    return native.GroupedWeights(codes, scale, shift, bits)


@needed
@pytest.mark.parametrize("outputs", [16, 83, 112])
@pytest.mark.parametrize(("group", "bits"), [(32, 4), (16, 4), (32, 8), (16, 8)])
def test_quantized_products_are_exact_to_bf16(instructions, outputs, group, bits):
    """Inputs are rounded to bytes first. Includes outliers, tiny inputs and large codes.
    The bits of a row do not depend on other rows."""
    weight = grouped(outputs, 96, group, bits)
    weight.codes[5] = 15 if bits == 4 else 127
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[:, ::7] *= 300
    x[3], x[4], x[5], x[6] = 0, 3, -3, 1e-38
    call = native.NativeProduct(weight, torch.ones(outputs).bfloat16(), native.library())
    rounded = native.in_bytes(x, group)
    tops = x.float().unflatten(1, (-1, group)).abs().amax(-1).repeat_interleave(group, 1)
    assert ((rounded - x.float()).abs() <= tops / 253 + 1e-30).all()
    exact = F.linear(rounded, weight.dequantized(), torch.ones(outputs))
    sizes = F.linear(x.float().abs(), weight.dequantized().abs())  # sum of magnitudes
    for rows in (*range(1, 15), 24, 25, 40):
        found = call(x[:rows])
        assert ((found.float() - exact[:rows]).abs() <= 2**-8 * exact[:rows].abs() + 2**-13 * sizes[:rows]).all()
        assert torch.equal(found, call(x)[:rows])


@needed
def test_weights_of_different_quantization_are_stacked(instructions):
    parts = [grouped(32, 64, 32, 4), grouped(16, 64, 16, 8, seed=1)]
    whole = native.GroupedWeights.stacked(parts)
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))
    assert (whole.group, whole.bits) == (16, 8)


@needed
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_products_keep_nan_and_inf_in_their_row(instructions, bits, bad):
    x = torch.ones(2, 64).bfloat16()
    x[1, 40] = bad
    found = native.NativeProduct(grouped(16, 64, 32, bits), None, native.library())(x)
    assert found[0].isfinite().all() and not found[1].isfinite().any()


@needed
def test_nan_survives_rounding_to_bf16(instructions):
    """A broken model must be refused, not decoded."""
    weight = torch.eye(16).bfloat16()
    x = torch.ones(16).bfloat16()
    x[0] = float("nan")
    assert native.NativeProduct(weight, None, native.library())(x[None]).isnan().all()


@needed
def test_auto_dtype_is_bf16_if_the_cpp_step_runs(tmp_path, monkeypatch):
    """This holds without bf16 instructions too; without the step, `auto` is fp32 on such a CPU."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    fitting = write_tiny(tmp_path / "fitting", *KINDS["qwen3"])
    other = write_tiny(tmp_path / "other", "Qwen3Config", KINDS["qwen3"][1] | {"intermediate_size": 152})
    assert load_target(str(fitting), device="cpu").dtype == torch.bfloat16
    assert load_target(str(fitting), device="cpu", path="transformers").dtype == torch.float32
    assert load_target(str(other), device="cpu").dtype == torch.float32
    monkeypatch.setenv("SPECCTL_STEP", "torch")
    assert load_target(str(fitting), device="cpu").dtype == torch.float32
