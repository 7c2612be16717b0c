"""Block-parallel heads with windows and causal layers see the same rows in training, drafting and scoring."""

import pytest
import torch
import torch.nn.functional as F

from specctl.decoding.device.rounds import DeviceRounds
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.drafters.dflash import drafter as dflash
from specctl.drafters.dflash.drafter import BlockDrafter
from specctl.drafters.feature import ttt_attention
from specctl.drafters.feature.ttt_attention import Layout, block_attention
from specctl.drafters.tree import TreeShape
from specctl.errors import UsageError
from specctl.recipe import DrafterRecipe
from specctl.training.example import Example
from specctl.training.features import FeatureStore, slot_batch
from tests.drafters.recorded import recorded_logits
from tests.drafters.test_dflash import CHAIN, block_head, training_logits, watched
from tests.toys.decoding import decode

SLIDING, FULL = "sliding_attention", "full_attention"
SIGHTS = {
    "windows": {"sliding_window": 64},
    "mixed": {"sliding_window": 66, "layer_types": [SLIDING, FULL]},
    "open windows": {"sliding_window": 64, "is_causal": False, "markov_rank": 0},
    "causal": {"is_causal": True, "conv_kernel_size": 2, "selector_rank": 4},
    "causal mixed": {"sliding_window": 64, "layer_types": [FULL, SLIDING], "is_causal": True},
}


@pytest.fixture(scope="module", params=SIGHTS)
def head(request, target):
    return block_head(target, block_size=5, **SIGHTS[request.param])


@pytest.fixture(scope="module")
def long_prompt(prompts):
    """A prompt longer than a window of 66 tokens."""
    return [*prompts[1], *prompts[0], *prompts[1]]


@pytest.fixture(scope="module")
def examples(target, prompts, long_prompt):
    """Two documents, one longer than every window."""
    texts = [decode(target, [p], sampling=GREEDY, max_new_tokens=9, seeds=[0])[0] for p in (prompts[0], long_prompt)]
    assert len(long_prompt) > 80
    return [Example(i, str(i), t.prompt_ids + t.output_ids, len(t.prompt_ids)) for i, t in enumerate(texts)]


def rotated(x, positions, theta):
    """Apply rotary embedding in half-split layout to [n, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def dense(head, kinds, features, anchor, embedding):
    """Return the states [S, H] of one block, computed with one dense mask per layer.

    A mask allows distances below the window and, if causal, no later row. `kinds` gives (window or None, causal) per
    layer. `features` [P, taps·H] belong to the positions before the anchor.
    """
    config = head.config
    size, place = config.block_size, len(features)
    at = torch.arange(place + size)
    context = F.rms_norm(
        features @ head.fc.weight.T, (config.hidden_size,), head.hidden_norm.weight, config.rms_norm_eps
    )
    x = torch.stack([embedding[anchor], *[head.mask(embedding)] * (size - 1)])
    for layer, (window, causal) in zip(head.layers, kinds, strict=True):
        attention = layer.self_attn

        def split(linear, inputs, norm=None):
            out = linear(inputs).unflatten(-1, (-1, config.head_dim))
            return out if norm is None else rotated(norm(out), at[-len(out) :], config.rope_theta)

        inputs = layer.input_layernorm(x)
        kernel = None if layer.attention_conv is None else layer.attention_conv(inputs)
        inputs = inputs if kernel is None else convolved(inputs, kernel[:, 0])
        both = torch.cat((context, inputs))
        query, key = split(attention.q_proj, inputs, attention.q_norm), split(attention.k_proj, both, attention.k_norm)
        value = split(attention.v_proj, both)
        distance = at[place:, None] - at[None]
        seen = torch.ones_like(distance, dtype=torch.bool)
        if window is not None:
            seen &= distance < window
        if causal:
            seen &= distance >= 0
        groups = config.num_heads // config.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) / config.head_dim**0.5
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1).transpose(0, 1)
        out = attention.o_proj(mixed.transpose(0, 1).flatten(1))
        x = x + (out if kernel is None else convolved(out, kernel[:, 1]))
        inputs = layer.post_attention_layernorm(x)
        kernel = None if layer.mlp_conv is None else layer.mlp_conv(inputs)
        out = layer.mlp(inputs if kernel is None else convolved(inputs, kernel[:, 0]))
        x = x + (out if kernel is None else convolved(out, kernel[:, 1]))
    return head.norm(x)


def convolved(x, kernel):
    """Convolve rows [S, H] with the rows before them by kernels [S, T, H]."""
    rows = [sum(kernel[s, t] * x[s - t] for t in range(min(kernel.shape[1], s + 1))) for s in range(len(x))]
    return torch.stack(rows)


def kinds_of(name):
    """Return (window, causal) per layer. By default, only layers with a window are causal."""
    options = SIGHTS[name]
    types = options.get("layer_types") or ([SLIDING] if "sliding_window" in options else [FULL]) * 2
    causal = options.get("is_causal")
    return [
        (options["sliding_window"] if t == SLIDING else None, causal if causal is not None else t == SLIDING)
        for t in types
    ]


@pytest.mark.parametrize("name", SIGHTS)
def test_a_block_equals_the_dense_reference(target, examples, name):
    """Catches an off-by-one in the window, a window that does not move with the slots, and a mask on the wrong
    layer."""
    head = block_head(target, block_size=5, **SIGHTS[name])
    store, embedding, weight = FeatureStore(target, head.taps), target.model.embedding.float(), target.head_weight
    (seen, _), kinds, first, compared = training_logits(head, target, examples), kinds_of(name), 0, 0
    for example, features in zip(examples, store.get(examples), strict=True):
        for row in range(0, example.response_length - 2, 3):
            slot = example.prompt_length - 1 + row
            with torch.no_grad():
                states = dense(head, kinds, features.taps[: slot + 1].float(), example.tokens[slot + 1], embedding)
                for step, token in enumerate(example.tokens[slot + 1 : -1][: head.steps]):
                    hidden = states[step + head.config.first]
                    logits, edges = weight.float() @ hidden, head.token_dependency
                    if edges is not None:
                        logits = logits + edges.successors @ edges(hidden[None], torch.tensor([token]))[0]
                    torch.testing.assert_close(seen[step][first + row], logits, atol=2e-4, rtol=1e-4)
                    compared += 1
        first += example.response_length - 1
    assert compared > 15


@pytest.mark.parametrize("name", SIGHTS)
def test_the_options_change_the_logits(target, examples, name):
    """Negative control: without window and causal mask, the logits of the long document differ."""
    own = SIGHTS[name]
    plain = {key: value for key, value in own.items() if key not in ("sliding_window", "layer_types", "is_causal")}
    rows = []
    for options in (own, plain):
        seen, _ = training_logits(block_head(target, block_size=5, **options), target, examples[1:])
        rows.append(seen[-1][0])
    assert (rows[0] - rows[1]).abs().max() > 0.01


def test_drafting_logits_equal_training_logits(target, head, examples):
    """Catches a mask applied only in training or only in drafting, on the host path with one text."""
    seen, _ = training_logits(head, target, examples)
    first = compared = 0
    for example in examples:
        drafter, prompt = watched(head, target), example.tokens[: example.prompt_length]
        decode(target, [prompt], sampling=GREEDY, max_new_tokens=example.response_length, seeds=[0], drafter=drafter)
        for ids, chain, rows in drafter.seen:
            for step, (token, logits) in enumerate(zip(chain, rows, strict=True)):
                place = len(ids) + step
                if place >= len(example.tokens):
                    break
                expected = seen[step][first + len(ids) - 1 - example.prompt_length]
                torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
                compared += 1
                if token != example.tokens[place]:
                    break
        first += example.response_length - 1
    assert compared > 10


def test_score_equals_training(target, head, examples):
    """Catches a scoring window that starts at the block's slot instead of the row's own position."""
    example, drafter, found = examples[1], BlockDrafter(head, target, CHAIN), []
    seen, _ = training_logits(head, target, [example])

    def ask(state, draft, verdict):
        found.append(drafter.score(state, [range(example.prompt_length + 1, len(state.rows[0].ids))], 3)[0])

    prompt, options = example.tokens[: example.prompt_length], dict(sampling=GREEDY, seeds=[0], taps=drafter.taps)
    decode(target, [prompt], max_new_tokens=example.response_length, on_round=ask, **options)
    score, compared = found[-1], 0
    for k in range(score.logits.shape[0]):
        for place, position in enumerate(score.positions):
            row = position - 2 - k - (example.prompt_length - 1)
            if row in seen[k]:
                torch.testing.assert_close(score.logits[k, place], seen[k][row], atol=2e-4, rtol=1e-4)
                compared += 1
    assert compared > 8


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize(
    "head",
    [pytest.param(name, marks=() if name == "mixed" else pytest.mark.slow) for name in SIGHTS],
    indirect=True,
)
def test_lossless_past_the_window(target, head, prompts, long_prompt, monkeypatch, sampling, batch, place):
    """Some texts start longer than the window and some grow past it. Seeded sampling equals plain decoding."""
    texts, seeds = [long_prompt, long_prompt[30:], prompts[0]][:batch], [11, 12, 13][:batch]
    options, shapes = dict(sampling=sampling, max_new_tokens=12, seeds=seeds), (TreeShape(4, 3, 9, 2, 0.0), CHAIN)
    plain, rounds, whole = decode(target, texts, **options), [], DeviceRounds.round
    if place == "device":
        monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
        monkeypatch.setattr(DeviceRounds, "round", lambda self, span: (rounds.append(span), whole(self, span))[1])
    drafted = decode(target, texts, drafter=BlockDrafter(head, target, shapes[batch == 3]), **options)
    assert [one.output_ids for one in drafted] == [one.output_ids for one in plain]
    assert bool(rounds) == (place == "device")


def test_drafts_in_a_batch_equal_drafts_of_each_text_alone(target, head, prompts, long_prompt):
    """Catches a mask of the ragged batch that differs from the mask of one text."""

    def drafts(texts):
        drafter = watched(head, target)
        decode(target, texts, sampling=GREEDY, max_new_tokens=6, seeds=[0] * len(texts), drafter=drafter)
        return {tuple(ids): (chain, rows) for ids, chain, rows in drafter.seen}

    texts = [long_prompt, prompts[0], long_prompt[9:]]
    alone = {place: rows for text in texts for place, rows in drafts([text]).items()}
    together = drafts(texts)
    assert together.keys() == alone.keys()
    for place, (chain, rows) in together.items():
        both = min(len(chain), len(alone[place][0]))
        assert both > 0 and chain[:both] == alone[place][0][:both]
        torch.testing.assert_close(rows[:both], alone[place][1][:both], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_with_a_window_equal_masked_attention(monkeypatch, causal, by_kernel):
    """Compare output and gradients for documents cut into parts.

    Also checks that the spans of each part ascend, as the GPU kernel requires.
    """
    monkeypatch.setattr(ttt_attention, "BLOCK", {"cpu": 40})
    monkeypatch.setattr(ttt_attention, "ROWS", 2)
    monkeypatch.setattr(ttt_attention, "_by_kernel", lambda q: by_kernel)
    torch.manual_seed(0)
    anchors = Layout([(0, 12), (12, 17), (17, 40)], [(0, 2), (2, 3), (3, 6)], [8, 11, 4, 5, 7, 22])
    layout = ttt_attention.replace(anchors.blockwise(3).within(8, 1), causal=causal)
    assert layout.window == 8
    for part, low, high in layout.ascending:
        assert (low.diff() >= 0).all() and (high.diff() >= 0).all() and len(layout.at[part]) == 6
    leaves = [torch.randn(*shape, 8, requires_grad=True) for shape in ((6, 3, 4), (40, 2), (40, 2), (2, 6, 3, 2))]
    query, key, value, own = leaves
    masked = torch.stack([_masked(query, key, value, own, n, anchors, causal) for n in range(6)])
    weight = torch.randn_like(masked)
    found = block_attention(query, key, value, own, layout)
    torch.testing.assert_close(found, masked, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), leaves) for out in (found, masked))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def _masked(query, key, value, own, n, anchors, causal):
    """Attention of block n with one softmax over the document's slots and the block's rows, and a window of 8."""
    start, end = next(s for s, (first, last) in zip(anchors.slots, anchors.rows, strict=True) if first <= n < last)
    slot = anchors.at[n]
    at = torch.cat((torch.arange(end - start), slot + 1 + torch.arange(3)))
    distance = (slot + 1 + torch.arange(3))[:, None] - at
    seen = distance < 8
    seen[:, : end - start] &= at[: end - start] <= slot
    if causal:
        seen[:, end - start :] &= distance[:, end - start :] >= 0
    keys, values = (torch.cat((x[start:end], own[k, n])).repeat_interleave(2, 1) for k, x in enumerate((key, value)))
    scores = torch.einsum("rhd,khd->hrk", query[n], keys) / 8**0.5
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def test_gradient_checkpointing_recomputes_with_the_same_masks(target, examples):
    """Catches a layer recomputed with another layer's mask."""
    head = block_head(target, block_size=5, **SIGHTS["mixed"])
    batch = slot_batch(examples, FeatureStore(target, head.taps).get(examples), head.steps, head.t2d)
    losses = []
    for head.gradient_checkpointing in (False, True):
        with recorded_logits(head) as seen:
            head(batch, target.model.embedding, target.head_weight)[0].backward()
        losses.append((seen[0], head.fc.weight.grad.clone()))
        head.zero_grad()
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layer_types": [SLIDING], "num_layers": 2, "sliding_window": 64}, "names 1 layers, but drafter.num_layers=2"),
        ({"layer_types": [SLIDING, FULL]}, "needs the size of the window"),
        ({"layer_types": [FULL], "sliding_window": 64}, "no layer has the window"),
        ({"sliding_window": 64, "block_size": 64}, "must exceed the 64 slots"),
    ],
)
def test_contradictory_attention_is_refused(target, options, says):
    """Catches a window that no layer uses, and a sliding layer without a window size."""
    with pytest.raises(UsageError, match=says.replace("[", r"\[")):
        dflash.FAMILY.architecture(DrafterRecipe(**options), target)


def test_layer_types_set_the_number_of_layers(target):
    shape = dflash.FAMILY.architecture(DrafterRecipe(layer_types=[SLIDING, SLIDING, FULL], sliding_window=64), target)
    assert [sight.window for sight in shape.sights] == [64, 64, None] and shape.num_layers == 3
    assert [sight.causal for sight in shape.sights] == [True, True, False]


def test_default_attention_options_add_no_keys_to_the_config(target):
    """New keys would change the fingerprints of old heads; a window must be stored."""
    plain, windowed = (
        dflash.FAMILY.checkpoint_config(block_head(target, **options), target.identity)["architecture"]
        for options in ({}, SIGHTS["mixed"])
    )
    assert windowed.keys() - plain.keys() == {"sliding_window", "layer_types"}
    assert (windowed["sliding_window"], windowed["layer_types"]) == (66, [SLIDING, FULL])
