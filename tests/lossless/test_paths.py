"""The lean and the `transformers` step equal the model's own forward, for every feature of an architecture.

Catches grouped heads in the wrong order, dropped biases, missing or misplaced norms, RoPE variants, tied heads, windows
that count slots instead of positions, soft caps, learned positions.
"""

import pytest
import torch

from specctl.decoding import prefill
from specctl.decoding.models import lean
from specctl.decoding.models.loading import load_config, load_model
from specctl.decoding.plan import plan_rows
from specctl.decoding.records import topology
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.errors import UsageError
from tests.conftest import ARCHITECTURES
from tests.lossless.drafters import constant
from tests.toys.decoding import decode

LEAN = {"llama", "llama-bias-tied", "llama3-rope", "mistral", "qwen2", "qwen3", "olmo2"}
PROMPT = [(37 * i) % 500 + 10 for i in range(40)]  # longer than the windows and than the scaled RoPE's first range
STEP = [4, 99, 23, 7, 7]
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name, tiny_directory):
    return load_model(tiny_directory(name), device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module", params=["auto", "transformers"])
def target(request, name, tiny_directory):
    return load_target(tiny_directory(name), device="cpu", dtype="fp32", path=request.param)


@torch.inference_mode()
def truth(model, ids):
    """Logits [T, V] and all hidden states of a plain forward."""
    output = model(torch.tensor([ids]), output_hidden_states=True)
    return output.logits[0], [state[0] for state in output.hidden_states]


def test_each_architecture_takes_the_expected_path(name, tiny_directory):
    reason = lean.unsupported_reason(load_config(tiny_directory(name)))
    assert (reason is None) == (name in LEAN), reason
    if reason:
        with pytest.raises(UsageError, match="lean step cannot run"):
            load_target(tiny_directory(name), device="cpu", path="lean")


def test_prefill_and_step_equal_the_models_forward(model, target):
    taps = (0, 2, 3)
    logits, states = truth(model, PROMPT + STEP)
    cache = target.model.new_cache(1, 64)
    last, hidden, tapped = target.prefill([PROMPT], cache, taps)
    n = len(PROMPT)
    torch.testing.assert_close(last[0], logits[n - 1], **CLOSE)
    torch.testing.assert_close(tapped[0], torch.cat([states[tap][:n] for tap in taps], -1), **CLOSE)
    torch.testing.assert_close(hidden[0], states[-1][:n], **CLOSE)
    plan = plan_rows([n], len(STEP), device=CPU, dtype=torch.float32)
    rows, _, tapped = target.step(torch.tensor([STEP]), cache, plan, taps)
    torch.testing.assert_close(rows[0], logits[n:], **CLOSE)
    torch.testing.assert_close(tapped[0], torch.cat([states[tap][n:] for tap in taps], -1), **CLOSE)


def test_a_ragged_batch_equals_single_forwards(model, target):
    prompts = [PROMPT, PROMPT[:3], PROMPT[5:30]]
    cache = target.model.new_cache(3, 64)
    last, _, _ = target.prefill(prompts, cache)
    plan = plan_rows([len(p) for p in prompts], len(STEP), device=CPU, dtype=torch.float32)
    rows, _, _ = target.step(torch.tensor([STEP] * 3), cache, plan)
    for b, prompt in enumerate(prompts):
        logits, _ = truth(model, prompt + STEP)
        torch.testing.assert_close(last[b], logits[len(prompt) - 1], **CLOSE)
        torch.testing.assert_close(rows[b], logits[len(prompt) :], **CLOSE)


@pytest.mark.parametrize("rows", [7, 16, 70])
def test_prompts_are_read_in_groups_and_parts_of_limited_rows(model, target, rows, monkeypatch):
    """Neighboring prompts are grouped, and a long prompt is read in parts, each after the cached ones."""
    monkeypatch.setattr(target.model, "prefill_rows", rows)
    grouped = prefill.groups
    monkeypatch.setattr(
        prefill, "groups", lambda lengths, slots, _, at: grouped(lengths, slots, rows, at)
    )  # as on a GPU
    forward, seen, taps = target.model.forward, [], (0, 2, 3)

    def counted(tokens, *others):
        seen.append(tokens.numel())
        return forward(tokens, *others)

    monkeypatch.setattr(target.model, "forward", counted)
    prompts = [PROMPT, PROMPT[:3], PROMPT[5:9], PROMPT[2:5]]
    slots = [4, 1, 2, 0]
    cache = target.model.new_cache(5, 64)
    last, hidden, tapped = target.prefill(prompts, cache, taps, slots)
    assert max(seen) <= rows and len(seen) < sum(map(len, prompts))
    plan = plan_rows(
        [0 if b == 3 else len(prompts[slots.index(b)]) for b in range(5)], len(STEP), device=CPU, dtype=torch.float32
    )
    after, _, _ = target.step(torch.tensor([STEP] * 5), cache, plan)
    for place, prompt in enumerate(prompts):
        logits, states = truth(model, prompt + STEP)
        n = len(prompt)
        torch.testing.assert_close(last[place], logits[n - 1], **CLOSE)
        torch.testing.assert_close(hidden[place, :n], states[-1][:n], **CLOSE)
        torch.testing.assert_close(tapped[place, :n], torch.cat([states[tap][:n] for tap in taps], -1), **CLOSE)
        assert not tapped[place, n:].any()
        torch.testing.assert_close(after[slots[place]], logits[n:], **CLOSE)


def test_prompts_are_grouped_in_order_within_the_row_limit():
    """Padding counts, and groups keep the order of the prompts."""
    assert prefill.groups([4, 3, 4, 5], [0, 1, 2, 3], 12) == [range(0, 3), range(3, 4)]
    assert prefill.groups([2, 2, 6, 2], [0, 1, 2, 3], 12) == [range(0, 2), range(2, 4)]
    assert prefill.groups([1, 1, 1], [0, 2, 3], 12) == [range(0, 1), range(1, 3)]
    assert prefill.groups([50, 1, 1], [0, 1, 2], 12) == [range(0, 1), range(1, 3)]
    assert prefill.groups([9, 9, 9, 9], [0, 1, 2, 3], 99, [0, 4, 4, 8]) == [range(0, 1), range(1, 3), range(3, 4)]
    assert prefill.groups([1, 1], [0, 1], 0) == [range(0, 1), range(1, 2)]


def test_tree_nodes_see_only_their_ancestors(model, target):
    """Each node's logits equal a forward of its own branch."""
    tokens, parents = [4, 99, 23, 7, 7, 300], [-1, -1, 0, 1, 2, 2]
    depth, ancestors = topology(parents)
    cache = target.model.new_cache(1, 64)
    target.prefill([PROMPT], cache)
    visible = torch.tensor([[[bits >> i & 1 for i in range(6)] for bits in ancestors]]).bool()
    steps = torch.tensor([[d - 1 for d in depth]])
    plan = plan_rows([len(PROMPT)], 6, device=CPU, dtype=torch.float32, visible=visible, depth=steps)
    rows, _, _ = target.step(torch.tensor([tokens]), cache, plan)
    for node, bits in enumerate(ancestors):
        branch = [tokens[i] for i in range(6) if bits >> i & 1]
        torch.testing.assert_close(rows[0, node], truth(model, PROMPT + branch)[0][-1], **CLOSE)


def test_text_equals_transformers_generate(model, target):
    """Greedy, with a drafter that is always wrong."""
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0].tolist()
    found = decode(target, [PROMPT], sampling=GREEDY, max_new_tokens=12, seeds=[0], drafter=constant([1, 1, 1]))[0]
    assert found.prompt_ids + found.output_ids == expected


@pytest.mark.parametrize("exact", [False, True])
def test_decoding_reaches_the_last_position_of_the_context(target, exact):
    """Rows after the last position (padding, drafts without room) must not fail, also with learned positions."""
    prompts = [PROMPT * 6 + PROMPT[:12], PROMPT[:4]]
    found = decode(
        target, prompts, sampling=GREEDY, max_new_tokens=[9, 7], seeds=[0, 0], drafter=constant([1] * 7), exact=exact
    )
    assert len(found[0].prompt_ids + found[0].output_ids) == target.context_length or found[0].stop == "eos"
