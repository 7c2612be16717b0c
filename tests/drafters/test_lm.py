"""The `lm` family: sizes, loss, storage, and drafts equal to the plain model run from scratch every round."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from specctl import kernels
from specctl.decoding.protocols import Controller
from specctl.decoding.sampling import DRAFT, GREEDY, Sampling
from specctl.decoding.state import READ_ALONE_ROWS
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint
from specctl.drafters.lm import drafter as lm
from specctl.drafters.lm import model as lm_model
from specctl.drafters.lm.drafter import ChainShape
from specctl.drafters.lm.model import LM, AcceptanceHead, LMBatch, architecture, cast
from specctl.drafters.lora import Adapter
from specctl.errors import CheckpointError, RecipeError
from specctl.formats import hf
from specctl.formats.head import Head
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe
from tests.lossless.drafters import Rotate, Scripted, own_weights, ragged
from tests.toys.decoding import decode


@pytest.fixture(scope="module")
def target(builtin_target):
    """The whole built-in target: ten layers, and it emits end-of-text."""
    return builtin_target


HOT = Sampling(0.9, 50, 0.95)


def lm_of(config):
    return LM(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def model(target):
    """Return a random model with logits far enough apart that rounding cannot change the best token."""
    torch.manual_seed(0)
    model = lm_of(architecture(DrafterRecipe(preset="tiny", num_kv_heads=2), target))
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


@pytest.fixture(scope="module")
def with_head(model):
    """Return the model with an acceptance head that gives both high and low probabilities."""
    torch.manual_seed(1)
    head = AcceptanceHead(model.model.config.hidden_size)
    head.out.weight.data *= 4
    return LM(model.model, head)


@torch.inference_mode()
def next_logits(model, ids):
    return model.model(torch.tensor([ids])).logits[0, -1]


@torch.no_grad()
def acceptance(model, ids):
    """Return the acceptance logit after a text."""
    return model.confidence_head(model.model.base_model(torch.tensor([ids])).last_hidden_state[0, -1:])[0]


class Big:
    """The attributes of a target that `build` reads."""

    hidden_size, vocab_size, context_length, eos_ids, identity = 4096, 32000, 4096, frozenset({2}), {}

    class tokenizer:
        bos_token_id, pad_token_id = 1, None


def test_the_68m_preset_has_68m():
    with torch.device("meta"):
        model = lm_of(architecture(DrafterRecipe(), Big()))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(68e6, rel=0.01)


def test_a_small_target_gets_a_small_drafter(target):
    shape = architecture(DrafterRecipe(), target)
    assert (shape.hidden_size, shape.vocab_size) == (192, target.vocab_size)
    assert shape.max_position_embeddings == target.context_length


def test_the_recipe_overrides_the_preset(target):
    recipe = DrafterRecipe(
        preset="tiny", hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=96
    )
    found = architecture(recipe, target)
    sizes = (found.hidden_size, found.num_hidden_layers, found.num_attention_heads, found.num_key_value_heads)
    assert (*sizes, found.intermediate_size, found.head_dim) == (64, 1, 2, 1, 96, 32)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"preset": "huge"}, "unknown preset"),
        ({"hidden_size": 100}, "do not fit"),
        ({"num_heads": 4, "num_kv_heads": 3, "hidden_size": 128}, "do not fit"),
        ({"vocab_size": 100}, "target's vocabulary"),
    ],
)
def test_bad_sizes_are_refused(target, wrong, says):
    with pytest.raises(RecipeError, match=says):
        lm_of(architecture(DrafterRecipe(**wrong), target))


def batch(tokens, mask):
    return LMBatch(torch.tensor(tokens), torch.tensor(mask).bool())


def test_the_loss_sums_over_the_response_tokens(model):
    tokens = [[5, 6, 7, 8, 9], [40, 41, 42, 43, 0]]
    mask = [[0, 0, 1, 0, 1], [0, 1, 1, 1, 0]]
    loss, count = model(batch(tokens, mask))
    expected = 0.0
    for row, wanted in zip(tokens, mask, strict=True):
        for i, one in enumerate(wanted):
            if one:
                expected += F.cross_entropy(next_logits(model, row[:i])[None], torch.tensor([row[i]])).item()
    assert count == 5
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_acceptance_head_learns_which_tokens_are_right(model, with_head, monkeypatch):
    """Its cross-entropy is added to the loss and gives the model no gradient. `HEAD_ROWS` splits the logits in two."""
    monkeypatch.setattr(lm_model, "HEAD_ROWS", 2)
    ids = [5, 6, 7]
    ids += [next_logits(model, ids).argmax().item(), 8, 9]  # the model predicts one of three tokens correctly
    data = batch([ids], [[0, 0, 0, 1, 1, 1]])
    right = [float(next_logits(model, ids[:i]).argmax() == ids[i]) for i in (3, 4, 5)]
    assert right == [1.0, 0.0, 0.0]
    said = torch.stack([acceptance(with_head, ids[:i]) for i in (3, 4, 5)])
    expected = F.binary_cross_entropy_with_logits(said, torch.tensor(right), reduction="sum").item()
    gradients = []
    for one in (model, with_head):
        one.zero_grad()
        loss, count = one(data)
        loss.backward()
        gradients.append((loss.item(), [p.grad.clone() for p in one.model.parameters() if p.grad is not None]))
        assert count == 3
    assert gradients[1][0] - gradients[0][0] == pytest.approx(expected, rel=1e-4)
    assert all(map(torch.equal, gradients[0][1], gradients[1][1]))
    assert all(p.grad.any() for p in with_head.confidence_head.parameters())
    with_head.zero_grad()


def test_padding_does_not_change_the_loss(model):
    short, _ = model(batch([[5, 6, 7]], [[0, 1, 1]]))
    padded, _ = model(batch([[5, 6, 7, 0, 99]], [[0, 1, 1, 0, 0]]))
    torch.testing.assert_close(short, padded)


def test_a_batch_without_responses_has_zero_gradients(model):
    """Every rank must call backward, even when its documents were cut before their responses."""
    loss, count = model(batch([[5, 6, 7]], [[1, 0, 0]]))  # the first token has no prediction
    loss.backward()
    assert (loss.item(), count.item()) == (0, 0)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    model.zero_grad()


def test_casting_keeps_the_rotary_frequencies(target):
    model = lm_of(architecture(DrafterRecipe(preset="tiny"), target))
    exact = model.model.model.rotary_emb.inv_freq.clone()
    cast(model.model, torch.device("cpu"), torch.bfloat16)
    assert model.model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.model.rotary_emb.inv_freq, exact)


def test_a_saved_lm_loads_unchanged(target, model, prompts, tmp_path):
    checkpoint.save(
        tmp_path / "d",
        config=lm.FAMILY.checkpoint_config(model, target.identity),
        tensors=lm.FAMILY.stored_state(model.state_dict()),
        info={},
    )
    found = checkpoint.load(tmp_path / "d")
    checkpoint.check_target(found.config, target)
    again = lm.FAMILY.restore(found.config, found.tensors)
    assert torch.equal(next_logits(again, prompts[0]), next_logits(model, prompts[0]))
    drafter = lm.FAMILY.make_drafter(again, target, DraftingRecipe(depth=2, proposal="sampled"))
    assert (drafter.shape.depth, drafter.shape.sampled) == (2, True)


def test_the_acceptance_head_is_stored_but_not_exported(target, prompts):
    recipe = TrainRecipe(arch="lm", drafter={"preset": "tiny", "confidence": True})
    made = lm.FAMILY.build(recipe, target, lambda size: list(range(size)))
    config, tensors = lm.FAMILY.checkpoint_config(made, target.identity), lm.FAMILY.stored_state(made.state_dict())
    again = lm.FAMILY.restore(config, tensors)
    assert torch.equal(acceptance(again, prompts[0]), acceptance(made, prompts[0]))
    facts = SimpleNamespace(vocab_size=target.vocab_size)
    files = hf.write(Head("lm", config["architecture"], tensors), facts, 0, "hf")
    assert files.held.tensors.keys() == files.tensors.keys()
    assert tensors.keys() - files.tensors.keys() == {
        f"confidence_head.{part}" for part in ("linear.weight", "linear.bias", "out.weight", "out.bias")
    }
    with pytest.raises(CheckpointError, match=r"out\.weight"):
        lm.FAMILY.restore(config, tensors | {"confidence_head.out.weight": torch.zeros(1, 3)})


def test_weights_of_another_size_are_refused(target, model):
    other = lm_of(architecture(DrafterRecipe(preset="tiny", hidden_size=64), target))
    with pytest.raises(CheckpointError, match="do not match"):
        lm.FAMILY.restore(
            lm.FAMILY.checkpoint_config(model, target.identity), lm.FAMILY.stored_state(other.state_dict())
        )


class Watched(lm.LMDrafter):
    """A drafter that compares every draft with the plain model run on the committed text."""

    def __init__(self, model, target, shape):
        super().__init__(model, target, shape)
        self.plain, self.drafts, self.uniforms = model, 0, []

    def propose(self, state, budget):
        draft = super().propose(state, budget)
        n = draft.size
        for b, row in enumerate(state.rows):
            chain = [t for t, p in zip(draft.tokens[b].tolist(), draft.parents[b].tolist(), strict=True) if p >= -1]
            assert len(chain) <= min(self.shape.depth, budget, row.draft_room)
            ids, joint = list(row.ids), 1.0
            for i, token in enumerate(chain):
                assert joint >= self.shape.stop_below
                logits = next_logits(self.plain, ids)
                if self.plain.confidence_head is not None:
                    assert token == logits.argmax()
                    joint *= acceptance(self.plain, ids).sigmoid().item()
                elif draft.rows is None:
                    assert token == logits.argmax()
                    joint *= logits.softmax(-1)[token].item()
                else:
                    self.check_row(state, b, draft.rows.take(torch.tensor([b * n + i])), logits, token, i)
                    joint *= kernels.probabilities(draft.rows)[b * n + i, token].item()
                ids.append(token)
                self.drafts += 1
            assert len(chain) == min(self.shape.depth, budget, row.draft_room) or joint < self.shape.stop_below
        return draft

    def check_row(self, state, b, row, logits, token, depth):
        """Check that `row` is the filtered distribution and `token` its sample."""
        sampling, position = state.draws.samplings[b], torch.tensor([[len(state.rows[b].ids) + depth]])
        setting = [torch.tensor([x]) for x in (sampling.temperature, sampling.top_k, sampling.top_p)]
        expected = kernels.row_params(logits[None], *setting)
        torch.testing.assert_close(kernels.probabilities(row), kernels.probabilities(expected), rtol=1e-3, atol=1e-5)
        self.uniforms.append((int(state.draws.seeds[b]), int(position), DRAFT + depth))
        if sampling.temperature > 0:
            u = kernels.uniform(state.draws.seeds[b : b + 1], position, DRAFT + depth)[0]
            assert kernels.sample_rows(row, u).item() == token


def truth(target, prompts, sampling, seeds):
    found = decode(target, prompts, sampling=sampling, max_new_tokens=20, seeds=seeds)
    return [one.prompt_ids + one.output_ids for one in found]


@pytest.mark.parametrize(("stop_below", "name"), [(0.0, "model"), (0.3, "model"), (0.3, "with_head")])
def test_drafts_equal_those_of_the_plain_model(target, request, prompts, stop_below, name):
    """Idle rounds in a ragged, shrinking batch: a stale or misplaced cache row would change a draft."""
    drafter = Watched(request.getfixturevalue(name), target, ChainShape(4, stop_below, False))
    texts = truth(target, prompts, GREEDY, [0, 0, 0])
    others = ragged(texts, 0, target.vocab_size)
    decode(
        target,
        prompts,
        sampling=GREEDY,
        max_new_tokens=[14, 4, 11],
        seeds=[0, 0, 0],
        controller=Rotate([drafter, drafter, others, others, drafter]),
    )
    assert drafter.drafts > 5


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0)])
def test_an_acceptance_head_replaces_the_vocabulary_softmax(target, with_head, prompts, monkeypatch, sampling):
    """A softmax would take a pass over the vocabulary for every drafted token."""
    shape = ChainShape(4, 0.3, sampling.temperature > 0)
    drafter, asked = lm.LMDrafter(with_head, target, shape), []
    monkeypatch.setattr(
        drafter, "_best", lambda logits, best=drafter._best: (asked.append(found := best(logits)), found)[1]
    )
    monkeypatch.setattr(
        drafter, "_sample", lambda *given, of=drafter._sample: (asked.append(found := of(*given)), found)[1]
    )
    decode(target, prompts, sampling=sampling, max_new_tokens=8, seeds=[0, 0, 0], drafter=drafter)
    assert {gain for _, gains in asked for gain in gains} == {1.0}


def test_accepted_draft_tokens_are_not_read_again(target, prompts):
    """A drafter that is often right reuses the cache rows of its accepted tokens."""
    close = own_weights(target, 0.1)
    drafter = Watched(close, target, ChainShape(4, 0.0, False))
    read, forward = [], drafter.model.forward

    def counted(tokens, *rest):
        read.append(tokens.shape[1])
        return forward(tokens, *rest)

    drafter.model.forward = counted
    found = decode(target, prompts, sampling=GREEDY, max_new_tokens=14, seeds=[0] * 3, drafter=drafter)
    assert sum(one.accepted for one in found) > 10 and sum(one.rejections for one in found) > 2
    lengths = [len(prompt) + 1 for prompt in prompts]
    alone = [length for length in lengths if length > READ_ALONE_ROWS]
    first = len(alone) + (len(alone) < len(lengths))
    assert read[:first] == alone + [max(length for length in lengths if length <= READ_ALONE_ROWS)] * (
        first - len(alone)
    )
    assert set(read[first:]) == {1, 2}  # the bonus token, and the last draft token if it was never fed


def test_sampled_proposals_report_the_distribution_they_were_drawn_from(target, model, prompts):
    drafter = Watched(model, target, ChainShape(4, 0.01, True))
    decode(
        target,
        prompts,
        sampling=[HOT, Sampling(1.0, 0, 1.0), GREEDY],
        max_new_tokens=[12, 5, 9],
        seeds=[1, 2, 3],
        drafter=drafter,
    )
    assert drafter.drafts > 10
    assert len(set(drafter.uniforms)) == len(drafter.uniforms)  # no random number is used twice


def test_sampled_proposals_are_greedy_for_a_greedy_target(target, model, prompts):
    """One-hot rows would accept the same tokens, but would run the ratio rule."""
    drafter = Watched(model, target, ChainShape(3, 0.0, True))
    decode(
        target,
        prompts[:1],
        sampling=GREEDY,
        max_new_tokens=6,
        seeds=[0],
        drafter=drafter,
        on_round=lambda state, draft, verdict: _is(draft.rows, None),
    )


def _is(found, expected):
    assert found is expected


def test_invalidate_recomputes(target, model, prompts):
    drafter = Watched(model, target, ChainShape(3, 0.0, False))
    decode(
        target,
        prompts,
        sampling=GREEDY,
        max_new_tokens=8,
        seeds=[0] * 3,
        drafter=drafter,
        on_round=lambda state, draft, verdict: drafter.invalidate(state),
    )
    assert drafter.drafts > 10


def test_further_training_does_not_change_a_drafter(target, prompts):
    """The drafter measured during training holds a copy of its weights."""
    model = lm_of(architecture(DrafterRecipe(preset="tiny"), target))
    drafter = lm.LMDrafter(model, target, ChainShape(3, 0.0, False))
    options = {"sampling": GREEDY, "max_new_tokens": 4, "seeds": [0]}
    drafts = []
    for _ in range(2):
        decode(
            target, prompts[:1], drafter=drafter, on_round=lambda s, d, v: drafts.append(d.tokens.tolist()), **options
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight.neg_()
    assert drafts[: len(drafts) // 2] == drafts[len(drafts) // 2 :]


def test_catching_up_after_many_idle_rounds_in_a_full_batch(target, model, prompts, monkeypatch):
    """A finished text with a long prompt waits while the other texts grow past the spare room of the cache."""
    monkeypatch.setattr(target, "eos_ids", frozenset())  # no other text may finish, because the batch would shrink
    drafter = Watched(model, target, ChainShape(2, 0.0, False))
    nobody = Scripted(lambda row, budget: ([], []))
    rounds = iter(range(1000))

    class Sleep(Controller):
        def choose(self, state):
            return drafter if next(rounds) % 80 == 0 else nobody

        def observe(self, state, result):
            pass

    ids = [prompts[0] * 12, *([prompts[2]] * 4)]
    decode(target, ids, sampling=HOT, max_new_tokens=[2, 90, 90, 90, 90], seeds=[1, 2, 3, 4, 5], controller=Sleep())
    assert drafter.drafts >= 2


def test_a_text_that_lags_is_read_with_a_mask_in_the_dtype_of_the_keys(target, model, prompts, monkeypatch):
    """On a GPU the logits of a bf16 model are fp32. The mask had their dtype, and attention there refuses such masks.
    Here fp64 stands for this fp32."""
    monkeypatch.setattr(target, "eos_ids", frozenset())  # no text may finish
    logits, plan_rows, dtypes = lm.LMDrafter.logits, lm.plan_rows, []

    def planned(*args, dtype, **more):
        dtypes.append(dtype)
        return plan_rows(*args, dtype=dtype, **more)

    monkeypatch.setattr(lm.LMDrafter, "logits", lambda drafter, hidden: logits(drafter, hidden).double())
    monkeypatch.setattr(lm, "plan_rows", planned)
    drafter, nobody = Watched(model, target, ChainShape(1, 0.0, False)), Scripted(lambda row, budget: ([], []))
    turns = [drafter, drafter, *[nobody] * 20, drafter]  # an idle drafter lags by as many tokens as it reads alone

    class InTurn(Controller):
        def choose(self, state):
            return turns.pop(0) if turns else nobody

        def observe(self, state, result):
            pass

    decode(target, [prompts[0], prompts[2]], sampling=GREEDY, max_new_tokens=30, seeds=[1, 2], controller=InTurn())
    assert drafter.drafts == 3 * 2 and {*dtypes} == {target.dtype}


def test_rounds_on_a_device_draft_from_logits_that_are_not_rounded():
    """On a GPU the logits of a bf16 model are fp32. The first token of a draft came from logits in bf16, where the
    two likeliest tokens are often equal."""
    drafter = lm.LMDrafter.__new__(lm.LMDrafter)
    drafter.shape, drafter.vocab_size, drafter.advance = ChainShape(3, 0.0, False), 3, lambda state: None
    memory = SimpleNamespace(logits=torch.tensor([[20.0, 20.04, 19.0]]), cache=SimpleNamespace(captured_tensor=None))
    state = SimpleNamespace(batch=1, dtype=torch.bfloat16, device="cpu", memory={drafter: memory})
    rounds = lm.LMRounds(drafter, state, 3)
    rounds.load(state)
    assert kernels.argmax(rounds.following).tolist() == [1]


@pytest.mark.parametrize("objective", ["soft_ce", "tv"])
def test_the_distribution_objectives_learn_the_target_distribution(target, model, prompts, objective):
    """All objectives except `ce` compare draft and target distributions at the same tokens."""
    tokens = torch.tensor([prompts[0]])
    hidden = target.prefill([prompts[0]], target.model.new_cache(1, len(prompts[0])))[1][0]
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, -3:] = True
    model.objective = objective
    loss, count = model(LMBatch(tokens, mask, hidden[-4:-1]), target.head_weight)
    model.objective = "ce"
    p = (hidden[-4:-1] @ target.head_weight.T).softmax(-1)
    q = torch.stack([next_logits(model, prompts[0][: len(prompts[0]) - n]) for n in (3, 2, 1)]).softmax(-1)
    expected = -(p * q.log()).sum() if objective == "soft_ce" else 0.5 * (p - q).abs().sum()
    assert count == 3
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.fixture
def published_model(target, tiny_directory, tmp_path):
    """Return `make(name, rows)`, which saves a random model with `rows` extra embedding rows."""

    def make(name, rows):
        model = AutoModelForCausalLM.from_pretrained(tiny_directory(name))
        model.resize_token_embeddings(model.config.vocab_size + rows)
        model.save_pretrained(tmp_path / name)
        target.tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize(("name", "rows"), [("mistral", 8), ("gemma2", 0), ("llama", -4)])
def test_any_published_causal_lm_can_be_the_base(target, published_model, prompts, tmp_path, name, rows):
    """The base may pad its embedding differently, and runs on either kind of step."""
    recipe = TrainRecipe(arch="lm", drafter=DrafterRecipe(base=published_model(name, rows)))
    model = lm.FAMILY.build(recipe, target, None)
    checkpoint.save(
        tmp_path / "d",
        config=lm.FAMILY.checkpoint_config(model, target.identity),
        tensors=lm.FAMILY.stored_state(model.state_dict()),
        info={},
    )
    found = checkpoint.load(tmp_path / "d")
    drafter = lm.FAMILY.make_drafter(lm.FAMILY.restore(found.config, found.tensors), target, DraftingRecipe(depth=3))
    options = dict(sampling=HOT, max_new_tokens=12, seeds=[1])
    plain = decode(target, prompts[:1], **options)[0].output_ids
    assert plain == decode(target, prompts[:1], drafter=drafter, **options)[0].output_ids


def test_a_base_with_another_vocabulary_is_refused(target, published_model):
    path = published_model("llama", 0)
    other = AutoTokenizer.from_pretrained(path)
    other.add_tokens(["<something else>"])
    other.save_pretrained(path)
    with pytest.raises(CheckpointError, match="different vocabularies"):
        lm.FAMILY.build(TrainRecipe(arch="lm", drafter=DrafterRecipe(base=path)), target, None)
    with pytest.raises(RecipeError, match="leave out hidden_size"):
        lm.FAMILY.build(TrainRecipe(arch="lm", drafter=DrafterRecipe(base=path, hidden_size=8)), target, None)


@pytest.mark.parametrize(("dtype", "rounding"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_an_adapter_drafts_like_its_merged_weights(model, prompts, dtype, rounding):
    """Covers every product of the decoding step, over a prompt and a drafted chain. In bf16 on a CPU, the C++ step used
    to ignore the adapter."""
    target = load_target("builtin", device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for name, weight in lm.FAMILY.stored_state(model.state_dict()).items():
        if "_proj" in name:
            rows, columns = weight.shape
            down, up = torch.randn(2, columns, generator=generator), torch.randn(rows, 2, generator=generator)
            pairs[name.removesuffix(".weight")] = (0.1 * down, 0.1 * up)
    merged = lm_of(model.model.config)
    merged.model.load_state_dict(Adapter(pairs).merge(lm.FAMILY.stored_state(model.state_dict())))
    base = lm.LMDrafter(model, target, ChainShape(3, 0.0, False))
    adapted, whole = (base.adapted(Adapter(pairs)), lm.LMDrafter(merged, target, ChainShape(3, 0.0, False)))
    assert adapted.model.layers[0].qkv.base is base.model.layers[0].qkv
    options = dict(sampling=GREEDY, max_new_tokens=4, seeds=[0])
    seen = {}
    for drafter in (adapted, whole, base):
        decode(
            target, prompts[:1], drafter=drafter, **options,
            on_round=lambda state, draft, verdict, d=drafter: seen.setdefault(d, state.memory[d].logits.clone()),
        )  # fmt: skip
    off = {drafter: ((seen[drafter] - seen[whole]).norm() / seen[whole].norm()).item() for drafter in (adapted, base)}
    assert off[adapted] < rounding < 4 * rounding < off[base]
