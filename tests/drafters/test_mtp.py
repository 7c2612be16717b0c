"""MTP layers of targets: loaded from their files, with the arithmetic of engines, in drafting and in training."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.drafters.mtp import drafter as mtp
from specctl.drafters.mtp import layouts
from specctl.drafters.mtp.drafter import MtpDrafter
from specctl.drafters.tree import TreeShape
from specctl.errors import CheckpointError
from specctl.recipe import DrafterRecipe, TargetRecipe, TrainRecipe
from tests.drafters.documents import documents
from tests.drafters.test_eagle3 import STEPS, forced, scored, training_logits
from tests.drafters.test_eagle3_head import run as checkpointed
from tests.toys import mtp as toys
from tests.toys.decoding import decode

CHAIN = TreeShape(STEPS, 1, STEPS, 1, 0.0)
KINDS = {
    "mimo": ("qwen2", "mimo", {"bias": True}),
    "mimo as sglang": ("qwen2", "mimo", {"bias": True}),
    "qwen": ("qwen3", "qwen", {"qk_norm": True}),
    "plain": ("llama", "qwen", {}),
}
NORMED = {"mimo as sglang": True}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def native(kind, tiny_directory, tmp_path_factory):
    """Return the directory of a tiny target with an MTP layer, the target, and the layer as a head."""
    model, layout, options = KINDS[kind]
    place = toys.write(
        tmp_path_factory.mktemp("native"), layout, tiny_directory(model), shards=kind == "qwen", **options
    )
    target = load_target(place, device="cpu", dtype="fp32")
    return place, target, built(target, place, normed_features=NORMED.get(kind))


def built(target, place, **drafter):
    recipe = TrainRecipe(arch="mtp", target=TargetRecipe(name=place), drafter=DrafterRecipe(**drafter))
    head = mtp.FAMILY.build(recipe, target, None)
    mtp.FAMILY.set_training_options(head, recipe)
    return head


@pytest.fixture(scope="module")
def examples(native, prompts):
    return documents(native[1], prompts, (7, 11))


def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x, positions, theta):
    """Apply neox rotary embedding to [n, heads, D]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    low, high = x.split(half, -1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def engine(place, target, layout, ids, following, *, before_norm):
    """Compute an engine's draft logits after `ids`, fed `following`, from the tensors in the target's files alone.

    Written after vLLM's mimo_mtp.py (`layout` mimo) and qwen3_next_mtp.py: a token is placed at the position of its
    state. The first pass runs over the whole text; each later pass runs over one token and reads the previous output.
    """
    config = json.loads((Path(place) / "config.json").read_text())
    files = [load_file(file) for file in Path(place).glob("*.safetensors")]
    weights = {name: tensor.float() for part in files for name, tensor in part.items()}
    token, hidden, fc, final, first, inside = toys.NAMES[layout]
    eps, theta = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    embedding = weights["model.embed_tokens.weight"]
    head = weights.get("lm_head.weight", embedding)

    def weight(name):
        return weights[f"{first}{name}.weight"]

    def linear(x, name):
        return F.linear(x, weight(inside + name), weights.get(f"{first}{inside}{name}.bias"))

    def split(x, name, positions, norms):
        x = linear(x, f"self_attn.{name}_proj").view(
            len(x), -1, config.get("head_dim") or config["hidden_size"] // heads
        )
        if norms and f"{first}{inside}self_attn.{name}_norm.weight" in weights:
            x = norm(x, weight(f"{inside}self_attn.{name}_norm"), eps)
        return rotated(x, positions, theta) if norms else x

    keys, values = [], []

    def layer(tokens, states, positions):
        embedded = embedding[tokens]
        if layout == "mimo":
            embedded = torch.where((positions == 0)[:, None], 0, embedded)
        parts = [norm(embedded, weight(token), eps), norm(states, weight(hidden), eps)]
        x = F.linear(torch.cat(parts[::-1] if layout == "mimo" else parts, -1), weight(fc))
        inputs = norm(x, weight(inside + "input_layernorm"), eps)
        query = split(inputs, "q", positions, True)
        keys.append(split(inputs, "k", positions, True))
        values.append(split(inputs, "v", positions, False))
        key, value = (torch.cat(one).repeat_interleave(heads // kv, 1) for one in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.arange(len(key)) > positions[:, None], float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        x = x + linear(out, "self_attn.o_proj")
        inner = norm(x, weight(inside + "post_attention_layernorm"), eps)
        x = x + linear(F.silu(linear(inner, "mlp.gate_proj")) * linear(inner, "mlp.up_proj"), "mlp.down_proj")
        return norm(x, weight(final), eps)

    states = states_of(place, ids, before_norm)[: len(ids) - 1]
    output = layer(torch.tensor(ids[1:]), states, torch.arange(len(ids) - 1))
    found = [output[-1] @ head.T]
    for step, one in enumerate(following):
        output = layer(torch.tensor([one]), output[-1:], torch.tensor([len(ids) - 1 + step]))
        found.append(output[-1] @ head.T)
    return found


def states_of(place, ids, before_norm):
    """Return the target's last states computed by `transformers`, before or after its final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    kept = []
    model.model.norm.register_forward_hook(lambda module, inputs, output: kept.extend((inputs[0], output)))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return kept[0 if before_norm else 1][0]


def test_draft_steps_equal_those_of_engines(kind, native, examples):
    """Catches swapped halves of the projection, an omitted norm or bias, a wrong position, a state from the wrong side
    of the final norm, and a nonzero embedding at position 0."""
    place, target, head = native
    drafter = MtpDrafter(head, target, CHAIN)
    for example in examples:
        committed = example.tokens[: example.prompt_length + 2]
        following = example.tokens[len(committed) :]
        theirs = engine(
            place, target, KINDS[kind][1], committed, following[: STEPS - 1], before_norm=kind == "mimo"
        )  # fmt: skip
        found = forced(drafter, target, committed, following)
        assert len(found) == STEPS == len(theirs)
        for step in range(STEPS):
            torch.testing.assert_close(found[step], theirs[step], atol=2e-3, rtol=1e-3)
        assert (found[0] - found[1]).abs().max() > 0.1


def test_states_from_the_other_side_of_the_norm_change_the_logits(native, kind, examples):
    """Negative control of the previous test."""
    place, target, head = native
    committed = examples[0].tokens[: examples[0].prompt_length + 2]
    first = forced(MtpDrafter(head, target, CHAIN), target, committed, examples[0].tokens[len(committed) :])[0]
    other = engine(place, target, KINDS[kind][1], committed, [], before_norm=kind != "mimo")[0]
    assert (first - other).abs().max() > 0.05


def test_training_logits_equal_drafting_logits_at_every_step(native, examples):
    _, target, head = native
    seen = training_logits(head, target, examples)
    drafter = MtpDrafter(head, target, CHAIN)
    offset = 0
    for example in examples:
        for slot in range(example.response_length - 1):
            committed = example.tokens[: example.prompt_length + slot + 1]
            for step, logits in enumerate(forced(drafter, target, committed, example.tokens[len(committed) :])):
                torch.testing.assert_close(logits, seen[step][offset + slot], atol=1e-3, rtol=1e-3)
        offset += example.response_length - 1


def test_score_equals_training(native, examples):
    """Compare every committed position and depth, as `select` and `online` request them."""
    _, target, head = native
    seen = training_logits(head, target, examples[1:])
    compared = 0
    for score in scored(MtpDrafter(head, target, CHAIN), target, examples[1], STEPS):
        for k in range(STEPS):
            for place, position in enumerate(score.positions):
                row = position - 2 - k - (examples[1].prompt_length - 1)
                if row >= 0 and row in seen[k]:
                    torch.testing.assert_close(score.logits[k, place], seen[k][row], atol=1e-3, rtol=1e-3)
                    compared += 1
    assert compared > 3 * len(seen[0]) // 2


def test_lossless_in_ragged_batches(native, prompts):
    _, target, head = native
    drafter, fixed = MtpDrafter(head, target, TreeShape(4, 3, 9, 2, 0.0)), dict(sampling=GREEDY, max_new_tokens=20)
    plain = [decode(target, [text], seeds=[0], **fixed)[0].output_ids for text in prompts]
    assert plain == [one.output_ids for one in decode(target, prompts, seeds=[0] * 3, drafter=drafter, **fixed)]


def test_drafting_after_a_one_token_prompt_is_lossless(native):
    """Slot 0 is then the first slot that a round fills, and the first that drafts."""
    _, target, head = native
    drafter, fixed = MtpDrafter(head, target, CHAIN), dict(sampling=GREEDY, max_new_tokens=12, seeds=[0])
    plain = decode(target, [[7]], **fixed)[0].output_ids
    assert decode(target, [[7]], drafter=drafter, **fixed)[0].output_ids == plain


def test_gradient_checkpointing_changes_no_loss_or_gradient(native, examples):
    from specctl.training.features import FeatureStore, slot_batch

    _, target, head = native
    store = FeatureStore(target, head.taps)
    batch = slot_batch(examples, store.get(examples), STEPS, head.t2d, 2)
    inputs = batch, target.model.embedding, target.head_weight
    (losses, gradients, kept), (theirs, expected, more) = (checkpointed(head, inputs, on) for on in (True, False))
    head.gradient_checkpointing = False
    head.zero_grad(set_to_none=True)
    torch.testing.assert_close(losses[0], theirs[0])
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-4, atol=1e-6)
    assert kept < more and gradients.keys() >= {"fc.weight", "norm.weight", "layer.self_attn.q_proj.weight"}


def test_a_checkpoint_restores_the_layer(native, tmp_path):
    _, target, head = native
    back = mtp.FAMILY.restore(
        mtp.FAMILY.checkpoint_config(head, target.identity), mtp.FAMILY.stored_state(head.state_dict())
    )
    assert back.config == head.config
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), head.state_dict().values(), strict=True))


def test_tensors_convert_to_target_names_unchanged(native, kind):
    place, _, head = native
    layout = layouts.LAYOUTS[head.config.layout]
    files = map(load_file, Path(place).glob("*.safetensors"))
    held = {name: x for file in files for name, x in file.items() if name.startswith(layout.prefix)}
    written = layouts.to_target_names(layout, head.state_dict())
    assert written.keys() == held.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, held[name].float()), name


def test_mtp_has_the_training_defaults_of_fastmtp():
    """Three steps with weights 0.6^k. Values set in a recipe win, and other families keep their own defaults."""
    recipe = TrainRecipe(arch="mtp")
    assert (recipe.ttt_steps, recipe.ttt_decay, recipe.resolved_objective) == (3, 0.6, "soft_ce")
    assert TrainRecipe(arch="mtp", ttt_steps=5).ttt_steps == 5
    assert TrainRecipe().ttt_steps == 6 == TrainRecipe(arch="mtp").set_family("eagle3").ttt_steps
    assert TrainRecipe(ttt_decay=0.9).set_family("mtp").ttt_decay == 0.9
    assert "ttt_steps" not in recipe.model_fields_set


def rewritten(place, to, change):
    """Copy a directory with its tensors changed."""
    import shutil

    shutil.copytree(place, to)
    file = to / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return str(to)


REFUSED = {
    "no MTP layer (tensors mtp.* or model.mtp_layers.*)": lambda t: {n: x for n, x in t.items() if "mtp" not in n},
    "DeepSeek's layout": lambda t: (
        {n: x for n, x in t.items() if "mtp" not in n} | {"model.layers.3.eh_proj.weight": torch.zeros(2)}
    ),
    "a mixture of experts": lambda t: t | {"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(2)},
    "multi-head latent attention": lambda t: t | {"mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2)},
    "more than one MTP layer": lambda t: t | {"mtp.layers.1.mlp.up_proj.weight": torch.zeros(2)},
    "gated attention": lambda t: {
        n: torch.cat((x, x)) if n.startswith("mtp") and "q_proj" in n else x for n, x in t.items()
    },
    "layer.mlp.up_proj.weight is": lambda t: {
        n: x[1:] if n.startswith("mtp") and "up_" in n else x for n, x in t.items()
    },
    "layer.self_attn.sinks is": lambda t: t | {"mtp.layers.0.self_attn.sinks": torch.zeros(4)},
    "norm.weight is missing": lambda t: {n: x for n, x in t.items() if n != "mtp.norm.weight"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_mtp_layers_are_refused_by_name(what, tiny_directory, tmp_path):
    place = toys.write(tmp_path / "whole", "qwen", tiny_directory("llama"))
    target = load_target(place, device="cpu", dtype="fp32")
    built(target, place)
    broken = rewritten(place, tmp_path / "broken", REFUSED[what])
    with pytest.raises(CheckpointError) as caught:
        built(target, broken)
    assert what in caught.value.message and str(broken) in caught.value.message


def test_scaled_rope_is_refused(tiny_directory, tmp_path):
    place = toys.write(tmp_path / "scaled", "qwen", tiny_directory("llama3-rope"))
    with pytest.raises(CheckpointError, match="scaled or partial RoPE \\(llama3\\)"):
        layouts.check(TargetRecipe(name=place))


def test_checking_a_cached_target_does_not_ask_the_hub(tiny_directory, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    toys.write(tmp_path / "models--a--b/snapshots" / ("0" * 40), "qwen", tiny_directory("llama"))
    (tmp_path / "models--a--b/refs").mkdir()
    (tmp_path / "models--a--b/refs/main").write_text("0" * 40)
    asked, real = [], AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda where, **more: asked.append(where) or real(where, **more))
    layouts.check(TargetRecipe(name="a/b"))
    assert asked and all(Path(where).is_dir() for where in asked)
