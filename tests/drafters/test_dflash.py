"""Block-parallel heads compute the same logits in training, drafting and scoring, alone and in a batch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from specctl.decoding.cache import CatchUp
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import first_chain
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.drafters.dflash import drafter as dflash
from specctl.drafters.dflash.drafter import BlockDrafter
from specctl.drafters.dflash.head import BlockHead, convolve
from specctl.drafters.tree import TreeShape
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import DrafterRecipe, DraftingRecipe
from specctl.training.example import Example
from specctl.training.features import FeatureStore, slot_batch
from tests.drafters.recorded import recorded_logits
from tests.toys.decoding import decode

CHAIN = TreeShape(8, 1, 8, 1, 0.0)
KINDS = {
    "dspark": {},
    "confident": {"confidence": True, "num_layers": 1},
    "dflash": {"markov_rank": 0, "block_size": 5},
    "pruned": {"vocab_size": 700, "block_size": 4, "num_layers": 1},
    "dflash2": {"conv_kernel_size": 2, "selector_rank": 8, "block_size": 5},
    "convolved": {"conv_kernel_size": 3, "vocab_size": 700},
}


def block_head(target, **sizes):
    """Return a random head in which every part affects the logits.

    Fresh Markov heads add zero and fresh convolutions are the identity, so both get random offsets.
    """
    torch.manual_seed(1)
    shape = dflash.FAMILY.architecture(DrafterRecipe(**sizes), target)
    pruned = shape.draft_vocab_size < target.vocab_size
    ids = torch.randperm(target.vocab_size)[: shape.draft_vocab_size].sort().values if pruned else None
    head = BlockHead(shape, ids)
    head.initialise(target)
    for name, parameter in head.named_parameters():
        if any(part in name for part in ("norm", "markov", "mask", "confidence", "conv", "selector")):
            parameter.data += (0.1 if "conv" in name or "selector" in name else 0.3) * torch.randn_like(parameter)
    return head


@pytest.fixture(scope="module", params=KINDS)
def head(request, target):
    return block_head(target, **KINDS[request.param])


@pytest.fixture(scope="module")
def examples(target, prompts):
    """Two documents of different lengths, which exercise packing and padding."""
    sizes = zip(prompts, (9, 14), strict=False)
    texts = [decode(target, [p], sampling=GREEDY, max_new_tokens=n, seeds=[0])[0] for p, n in sizes]
    return [Example(i, str(i), t.prompt_ids + t.output_ids, len(t.prompt_ids)) for i, t in enumerate(texts)]


def training_logits(head, target, examples, stride=1):
    """Return [{response slot: logits [Vd]} for each step of a block], and the batch."""
    batch = slot_batch(examples, FeatureStore(target, head.taps).get(examples), head.steps, head.t2d, stride)
    with recorded_logits(head) as seen, torch.no_grad():
        head(batch, target.model.embedding, target.head_weight[head.draft_ids])
    parts = seen[0].unflatten(0, (head.steps, -1))
    return [dict(zip(batch.later_rows.tolist(), logits, strict=True)) for logits in parts], batch


class Watched(BlockDrafter):
    """A drafter that records each draft with the text before it and its logits."""

    def propose(self, state, budget):
        draft = super().propose(state, budget)
        for b, row in enumerate(state.rows):
            chain = first_chain(draft.parents[b].tolist())
            if chain and row.stop is None:
                rows = draft.q.of(b, len(chain))
                self.seen.append((list(row.ids), draft.tokens[b, chain].tolist(), rows))
        return draft


def watched(head, target, shape=CHAIN):
    drafter = Watched(head, target, shape)
    drafter.seen = []
    return drafter


def test_drafting_logits_equal_training_logits(target, head, examples):
    """Catches an off-by-one in layers, tokens, positions or the anchor."""
    seen, _ = training_logits(head, target, examples)
    offset = compared = 0
    for example in examples:
        drafter = watched(head, target)
        prompt = example.tokens[: example.prompt_length]
        decode(target, [prompt], sampling=GREEDY, max_new_tokens=example.response_length, seeds=[0], drafter=drafter)
        for ids, chain, rows in drafter.seen:
            slot = len(ids) - 1 - example.prompt_length
            for step, (token, logits) in enumerate(zip(chain, rows, strict=True)):
                place = len(ids) + step
                if place >= len(example.tokens):
                    break
                torch.testing.assert_close(logits, seen[step][offset + slot], atol=1e-4, rtol=1e-4)
                compared += 1
                if token != example.tokens[place]:  # training continues with the token of the text
                    break
        offset += example.response_length - 1
    assert compared > 15


def test_a_block_does_not_depend_on_other_blocks(target, head, examples):
    every, some = (training_logits(head, target, examples, stride)[0] for stride in (1, 3))
    assert 0 < len(some[0]) < len(every[0])
    for step, rows in enumerate(some):
        for row, logits in rows.items():
            torch.testing.assert_close(logits, every[step][row], atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_no_loss_or_gradient(target, head, examples):
    batch = slot_batch(examples, FeatureStore(target, head.taps).get(examples), head.steps, head.t2d)
    found = []
    for on in (False, True):
        head.gradient_checkpointing = on
        head.zero_grad()
        total, weight, _ = head(batch, target.model.embedding, target.head_weight[head.draft_ids])
        total.backward()
        found.append((total.detach(), weight, {name: p.grad.clone() for name, p in head.named_parameters()}))
    head.gradient_checkpointing = False
    (one, weight, gradients), (two, _, again) = found
    assert torch.equal(one, two) and weight > 0
    for name in gradients:
        torch.testing.assert_close(gradients[name], again[name])
        assert gradients[name].any(), f"{name} learns nothing"
    head.zero_grad()


@pytest.mark.parametrize("objective", ["soft_ce", "tv"])
def test_confidence_learns_the_acceptance_probability(target, examples, objective):
    """The confidence loss is the cross-entropy with Σ min(p, q), and only the confidence head gets its gradient."""
    head = block_head(target, confidence=True)
    plain = BlockHead(replace(head.config, confidence=False))
    plain.load_state_dict({name: t for name, t in head.state_dict().items() if "confidence" not in name})
    read = []
    head.confidence_head.register_forward_hook(lambda module, inputs, output: read.append(output.detach()))
    batch = slot_batch(examples, FeatureStore(target, head.taps).get(examples), head.steps, head.t2d)
    totals, gradients = [], []
    with recorded_logits(head) as seen:
        for one in (head, plain):
            one.decay, one.objective = 0.8, objective
            total, *_ = one(batch, target.model.embedding, target.head_weight)
            total.backward()
            totals.append(total.detach())
            gradients.append({name: p.grad for name, p in one.named_parameters()})
    expected = 0.0
    pairs = zip(seen[0].unflatten(0, (head.steps, -1)), read[0].unflatten(0, (head.steps, -1)), strict=True)
    for k, (logits, said) in enumerate(pairs):
        for place, row in enumerate(batch.later_rows.tolist()):
            if batch.valid_steps[row] > k:
                p = (batch.teacher[row + k].float() @ target.head_weight.float().T).softmax(-1)
                kept = torch.minimum(p, logits[place].detach().softmax(-1)).sum()
                chances = F.logsigmoid(said[place]), F.logsigmoid(-said[place])
                expected -= 0.8**k * (kept * chances[0] + (1 - kept) * chances[1])
    torch.testing.assert_close(totals[0] - totals[1], expected, atol=1e-2, rtol=1e-4)
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient)
    assert all(gradients[0][f"confidence_head.proj.{part}"].any() for part in ("weight", "bias"))


def test_a_selector_replaces_the_markov_head(target):
    for also in ({"markov_rank": 8}, {"confidence": True}):
        with pytest.raises(ValueError, match="selector_rank"):
            DrafterRecipe(selector_rank=8, **also)
    shape = dflash.FAMILY.architecture(DrafterRecipe(selector_rank=8), target)
    assert (shape.markov_rank, shape.sample_from_anchor) == (0, False)
    for wrong, says in (
        ({"conv_kernel_size": 9}, "9 taps"),
        ({"conv_kernel_size": 2, "conv_group_size": 48}, "48"),
        ({"markov_rank": 8}, "replaces the Markov head"),
    ):
        with pytest.raises(ValueError, match=says):
            replace(shape, **wrong)


def test_a_fresh_convolution_and_selector_change_nothing(target, examples):
    """A fresh DFlash 2 head computes the logits of a DFlash head."""
    heads = []
    for parts in ({}, {"conv_kernel_size": 2}):
        torch.manual_seed(1)
        head = BlockHead(dflash.FAMILY.architecture(DrafterRecipe(markov_rank=0, **parts), target))
        heads.append(head)
    heads[1].load_state_dict(heads[0].state_dict(), strict=False)
    (one, _), (two, _) = (training_logits(head, target, examples) for head in heads)
    for rows, others in zip(one, two, strict=True):
        for slot, logits in rows.items():
            torch.testing.assert_close(logits, others[slot])


def test_a_convolution_reads_only_earlier_slots_of_its_block():
    """Compare with y_i = Σ_t k_{i,t} ∘ x_{i−t}, computed by hand for each block."""
    torch.manual_seed(0)
    x, kernel = torch.randn(2, 4, 8), torch.randn(2, 4, 3, 8)
    for block in range(2):
        for slot in range(4):
            by_hand = sum(kernel[block, slot, tap] * x[block, slot - tap] for tap in range(min(3, slot + 1)))
            torch.testing.assert_close(convolve(x, kernel)[block, slot], by_hand)


def test_a_convolution_longer_than_the_block_is_refused(target):
    with pytest.raises(UsageError, match="conv_kernel_size=5 exceeds the 4 slots of a block"):
        dflash.FAMILY.architecture(DrafterRecipe(conv_kernel_size=5, block_size=4), target)
    assert dflash.FAMILY.architecture(DrafterRecipe(conv_kernel_size=4, block_size=4), target).conv_kernel_size == 4


def test_confidence_needs_a_markov_head():
    with pytest.raises(ValueError, match="markov_rank=0"):
        DrafterRecipe(confidence=True, markov_rank=0)


def drafts(target, head, prompts, shape, **options):
    drafter = watched(head, target, shape)
    options = dict(sampling=GREEDY, max_new_tokens=12, seeds=[0] * len(prompts)) | options
    decode(target, prompts, drafter=drafter, **options)
    return {tuple(ids): (chain, rows) for ids, chain, rows in drafter.seen}


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        pytest.param(
            kind, shape, id=f"{kind}-{name}", marks=() if name == "tree" or kind == "dspark" else pytest.mark.slow
        )
        for kind in KINDS
        for name, shape in (("chain", CHAIN), ("tree", TreeShape(6, 2, 12, 3, 0.0)))
    ],
    indirect=["head"],
)
def test_drafts_in_a_batch_equal_drafts_of_each_text_alone(target, head, prompts, shape):
    together = drafts(target, head, prompts, shape)
    alone = {}
    for prompt in prompts:
        alone |= drafts(target, head, [prompt], shape)
    assert together.keys() == alone.keys()
    for place, (chain, rows) in together.items():
        both = min(len(chain), len(alone[place][0]))  # in a batch, each text has fewer nodes
        assert both > 0 and chain[:both] == alone[place][0][:both]
        torch.testing.assert_close(rows[:both], alone[place][1][:both], atol=1e-4, rtol=1e-4)


def test_the_markov_head_chooses_among_the_likeliest(target, prompts, monkeypatch):
    """If every token is a candidate, a chain is the greedy walk over full rows."""
    head = block_head(target, vocab_size=300)
    monkeypatch.setattr(dflash, "CANDIDATES", 300)
    for chain, rows in drafts(target, head, prompts[:1], CHAIN).values():
        assert chain == head.draft_ids[rows.argmax(-1)].tolist()


def test_candidate_probabilities_are_the_softmax_of_the_draft_logits(target, monkeypatch, prompts):
    monkeypatch.setattr(dflash, "CANDIDATES", 300)
    head = block_head(target, vocab_size=300)
    drafter, seen = BlockDrafter(head, target, CHAIN), []

    class Spy(Drafter):
        taps = drafter.taps

        def propose(self, state, budget):
            (tree,) = drafter.propose_candidates(state, budget, lambda joint: True)
            draft = drafter.propose(state, budget)
            if draft.size:
                rows = draft.q.of(0, draft.size).softmax(-1)
                places = torch.searchsorted(head.draft_ids, draft.tokens[0])
                seen.append((torch.tensor(tree.probabilities), rows.gather(1, places[:, None])[:, 0]))
            return draft

    decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=6, seeds=[0], drafter=Spy())
    assert len(seen) > 2
    for found, expected in seen:
        torch.testing.assert_close(found, expected.float(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("depths", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_score_equals_training(target, head, examples, depths):
    """At depth k + 1, the row of position j is step k of the block anchored at position j − 1 − k."""
    seen, _ = training_logits(head, target, examples)
    drafter, offset = BlockDrafter(head, target, CHAIN), 0
    for example in examples:
        found = []

        def ask(state, draft, verdict, found=found, example=example):
            text = state.rows[0].ids
            for span in (range(example.prompt_length + 1, len(text) // 2), range(len(text) // 2, len(text))):
                found.append(drafter.score(state, [span], depths)[0])

        prompt, new = example.tokens[: example.prompt_length], example.response_length
        options = dict(sampling=GREEDY, seeds=[0], max_new_tokens=new, taps=drafter.taps)
        decode(target, [prompt], on_round=ask, **options)
        compared = 0
        for score in found:
            for k in range(score.logits.shape[0] if len(score.positions) else 0):
                for place, position in enumerate(score.positions):
                    slot = position - 2 - k - (example.prompt_length - 1)
                    if slot >= 0 and offset + slot in seen[k]:
                        expected = seen[k][offset + slot]
                        torch.testing.assert_close(score.logits[k, place], expected, atol=1e-4, rtol=1e-4)
                        compared += 1
        assert compared > 10
        offset += new - 1


def test_skipped_catch_up_tokens_are_not_attended(target, prompts):
    """With a catch-up window, the drafter reads only the sinks and the last tokens; the text stays the same."""
    head = block_head(target)
    window = CatchUp(2, 4)
    drafter = BlockDrafter(head, target, CHAIN)
    counted = []

    class Late(Drafter):
        taps = drafter.taps

        def propose(self, state, budget):
            counted.append(drafter.lag(state)[0])
            return drafter.propose(state, budget)

    options = dict(sampling=GREEDY, max_new_tokens=8, seeds=[0])
    (text,) = decode(target, prompts[:1], drafter=Late(), catch_up=window, **options)
    (plain,) = decode(target, prompts[:1], **options)
    assert text.output_ids == plain.output_ids and counted[0] == 6 < len(prompts[0])


def test_a_drafter_with_another_shape_shares_the_memory(target, prompts):
    drafter = BlockDrafter(block_head(target), target, CHAIN)
    twin = drafter.shaped(DraftingRecipe(depth=2))
    assert twin.shape.depth == 2 and twin.key is drafter.key


def test_a_checkpoint_restores_the_head(target, head):
    shape, tensors = (
        dflash.FAMILY.checkpoint_config(head, target.identity),
        dflash.FAMILY.stored_state(head.state_dict()),
    )
    back = dflash.FAMILY.restore(shape, tensors)
    assert back.config == head.config and back.steps == head.steps
    assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("block_size", 1, "block_size"),
        ("block_size", 65, "block_size"),
        ("mask_token_id", 4096, "mask_token_id: is 4096, but the vocabulary has 4096 tokens"),
        ("markov_rank", 7, "markov"),
        ("num_layers", 3, "layers.2"),
        ("confidence", True, "confidence_head"),
        ("causal", True, "causal"),
    ],
)
def test_an_architecture_that_does_not_fit_is_named(target, key, value, says):
    head = block_head(target)
    shape = dflash.FAMILY.checkpoint_config(head, target.identity)
    shape["architecture"] |= {key: value}
    with pytest.raises(CheckpointError, match=says):
        dflash.FAMILY.restore(shape, head.state_dict()).check(target)


@pytest.mark.parametrize(("pad", "mask"), [(7, 7), (None, 4095), (0, 4095), (-1, 4095), (4096, 4095)])
def test_the_mask_token_is_in_the_vocabulary(target, monkeypatch, pad, mask):
    """`transformers` configurations also use −1 for no padding; token 0 ends a text here."""
    monkeypatch.setattr(target.config, "pad_token_id", pad)
    monkeypatch.setattr(target, "eos_ids", frozenset({0}))
    assert dflash.FAMILY.architecture(DrafterRecipe(), target).mask_token_id == mask


@pytest.fixture(scope="module")
def in_bf16():
    return load_target("builtin", device="cpu", dtype="bf16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [CHAIN, TreeShape(4, 3, 12, 3, 0.0)])
def test_blocks_are_drafted_in_bf16(in_bf16, prompts, kind, shape):
    """Some products take the row-wise kernels that read 8-bit weights."""
    target = in_bf16
    drafter = BlockDrafter(block_head(target, **KINDS[kind]), target, shape)
    plain, drafted = (
        decode(target, prompts[:1], sampling=GREEDY, max_new_tokens=12, seeds=[0], **options)[0]
        for options in ({}, {"drafter": drafter, "taps": drafter.taps})
    )
    assert drafted.output_ids[:4] == plain.output_ids[:4] and len(drafted.output_ids) == len(plain.output_ids)


def test_the_order_of_the_weights_stays(target):
    """A learner saves all weights of a head as one vector in this order."""
    head = block_head(target)
    names = [name.removeprefix("layers.0.self_attn.") for name, _ in head.named_parameters() if "layers.0.self" in name]
    assert names == [f"{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
