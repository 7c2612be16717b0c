"""Hydra and Medusa compute the same logits in training and in drafting, alone and in a batch."""

from dataclasses import replace

import pytest
import torch

from specctl.decoding.protocols import Drafter
from specctl.decoding.records import topology
from specctl.decoding.sampling import GREEDY
from specctl.drafters import pool
from specctl.errors import CheckpointError
from specctl.recipe import DrafterRecipe, DraftingRecipe, TrainRecipe
from specctl.training.features import FeatureStore, slot_batch
from tests.drafters.documents import documents
from tests.drafters.recorded import recorded_logits
from tests.lossless.drafters import ragged
from tests.toys.decoding import decode


@pytest.fixture(scope="module")
def target(builtin_target):
    """The whole built-in target: ten layers, and it emits end-of-text."""
    return builtin_target


HEADS = 3
FAMILIES = ("hydra", "medusa")


@pytest.fixture(scope="module", params=[(name, size) for name in FAMILIES for size in (None, 512)], ids=str)
def family(request):
    """Parametrize by (family, draft vocabulary size)."""
    return request.param


def built(target, name, vocab_size=None, **options):
    """Build heads with random offsets.

    Blocks start at zero, so without the offsets an omitted block would go unnoticed.
    """
    recipe = TrainRecipe(arch=name, drafter=DrafterRecipe(draft_heads=HEADS, vocab_size=vocab_size, **options))
    torch.manual_seed(0)
    module = pool.load_family(name).build(recipe, target, lambda size: list(range(2, 2 + 3 * size, 3)))
    pool.load_family(name).set_training_options(module, recipe)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * (1.0 if parameter.dim() == 1 else 0.3)
    return module.eval()


@pytest.fixture(scope="module")
def module(target, family):
    return built(target, *family)


@pytest.fixture(scope="module")
def drafter(target, family, module):
    return pool.load_family(family[0]).make_drafter(module, target, DraftingRecipe(stop_below=0.0))


@pytest.fixture(scope="module")
def examples(target, prompts):
    return documents(target, prompts[1:], (14, 9))


def packed(module, target, examples, stride=1):
    store = FeatureStore(target, module.taps)
    batch = slot_batch(examples, store.get(examples), module.steps, module.t2d, stride)
    return batch, target.model.embedding, target.head_weight[module.draft_ids]


@pytest.fixture(scope="module")
def seen(target, module, examples):
    """Return {response slot: logits} per head, and the first slot of each example, as training computes them."""
    batch, *others = packed(module, target, examples)
    with recorded_logits(module) as outputs:
        module(batch, *others)
    rows = [list(range(len(batch.query_rows)))] + [batch.later_rows.tolist()] * (HEADS - 1)
    return [dict(zip(part, logits, strict=True)) for part, logits in zip(rows, outputs, strict=True)]


def test_drafting_computes_what_training_computes(target, drafter, examples, seen):
    """Compare after every round, with rounds that commit different numbers of tokens.

    Catches an off-by-one in features or tokens, and a stale cache of the prefix attention.
    """
    texts = [example.tokens for example in examples]
    firsts = [0, examples[0].response_length - 1]
    compared, steps = [0] * HEADS, set()

    def ask(state, draft, verdict):
        drafter.advance(state)
        steps.update(map(len, verdict.committed))
        for b, row in enumerate(state.rows):
            text, known = texts[row.index], len(row.ids)
            assert row.ids == text[:known]
            at = firsts[row.index] + known - 1 - row.prompt_length
            for k in range(min(HEADS, len(text) - known)):
                tokens = torch.tensor([text[known - 1 : known + k]])
                logits = drafter.logits(k, drafter.last(state)[b : b + 1], tokens)[0]
                torch.testing.assert_close(logits, seen[k][at], atol=1e-4, rtol=1e-4)
                compared[k] += 1

    decode(
        target, [e.tokens[: e.prompt_length] for e in examples], sampling=GREEDY, seeds=[0, 0], taps=drafter.taps,
        max_new_tokens=[e.response_length for e in examples], on_round=ask,
        drafter=ragged(texts, 1, target.vocab_size, taps=drafter.taps),
    )  # fmt: skip
    assert min(compared) >= 5 and len(steps) > 2


def test_score_equals_training(target, drafter, module, examples, seen):
    """Score spans of different lengths in a batch, in the prompt and in the response; one span is empty."""
    firsts, compared = [0, examples[0].response_length - 1], 0
    found = []

    def ask(state, draft, verdict):
        if not found:
            spans = [
                range(6, len(state.rows[0].ids)),
                range(8, 8),
                range(len(state.rows[2].ids) - 2, len(state.rows[2].ids)),
            ]
            found.extend(drafter.score(state, spans, 9))

    batch = [examples[0], examples[1], examples[1]]
    length = {example.index: example.prompt_length + 6 for example in examples}
    decode(
        target, [e.tokens[: length[e.index]] for e in batch], sampling=GREEDY, seeds=[0] * 3, taps=drafter.taps,
        max_new_tokens=4, on_round=ask,
    )  # fmt: skip
    assert found[1].logits.shape[:2] == (HEADS, 0)
    for example, score in zip(batch, found, strict=True):
        assert score.logits.shape == (HEADS, len(score.positions), module.config.draft_vocab_size)
        assert (score.ids is None) == (module.config.draft_vocab_size == target.vocab_size)
        for k in range(HEADS):
            for place, position in enumerate(score.positions):
                row = position - 2 - k - (example.prompt_length - 1)
                if row >= 0:
                    expected = seen[k][firsts[example.index] + row]
                    torch.testing.assert_close(score.logits[k, place], expected, atol=1e-4, rtol=1e-4)
                    compared += 1
    assert compared > 15


@pytest.mark.parametrize("shape", [{}, {"width": 3, "nodes": 20, "children": 3}, {"nodes": 3, "children": 1}], ids=str)
def test_drafts_are_lossless_and_in_the_draft_vocabulary(target, prompts, module, family, shape):
    drafter = pool.load_family(family[0]).make_drafter(module, target, DraftingRecipe(stop_below=0.0, **shape))
    options = dict(sampling=GREEDY, max_new_tokens=[12, 3, 8], seeds=[0] * 3)
    proposed = []
    found = decode(
        target, prompts, drafter=drafter, **options,
        on_round=lambda state, draft, verdict: proposed.extend(draft.tokens.flatten().tolist()),
    )  # fmt: skip
    assert [d.output_ids for d in found] == [d.output_ids for d in decode(target, prompts, **options)]
    assert proposed and set(proposed) <= set(module.draft_ids.tolist())


def test_draft_depth_is_limited_by_the_room_of_each_text(target, prompts, module, family):
    """The room of other texts in the batch does not matter, also when a hybrid asks for candidates."""
    drafter = pool.load_family(family[0]).make_drafter(
        module, target, DraftingRecipe(stop_below=0.0, nodes=9, children=3)
    )
    depths, new = [], [12, 3, 8]

    class Asked(Drafter):
        taps = drafter.taps

        def propose(self, state, budget):
            trees = drafter.propose_candidates(state, budget, lambda joint: True)
            for tree, row in zip(trees, state.rows, strict=True):
                depths.append((max(topology(tree.parents)[0], default=0), row.draft_room))
            return drafter.propose(state, budget)

    def counts(prompts, new):
        options = dict(sampling=GREEDY, max_new_tokens=new, seeds=[0] * len(new), share_rows=False)
        found = decode(target, prompts, drafter=Asked(), **options)
        return [replace(one, index=0, prefill_s=0, decode_s=0) for one in found]

    alone = [counts([prompt], [limit])[0] for prompt, limit in zip(prompts, new, strict=True)]
    depths.clear()
    assert counts(prompts, new) == alone
    assert {depth for depth, _ in depths} == {0, 1, 2, 3} and all(depth == min(HEADS, room) for depth, room in depths)


def test_features_past_the_end_of_a_row_are_not_read(target, prompts, module, family):
    """Features after the last slot of a sequence are uninitialized: a NaN there must not reach other keys."""
    drafter = pool.load_family(family[0]).make_drafter(module, target, DraftingRecipe())
    options = dict(sampling=GREEDY, max_new_tokens=6, seeds=[0] * 3)

    class Late(Drafter):
        taps = drafter.taps

        def propose(self, state, budget):
            for b, row in enumerate(state.rows):
                state.features[b, len(row.ids) - 1 :] = float("nan")
            drafter.advance(state)
            assert drafter.last(state).isfinite().all()
            return drafter.propose(state, budget)

    decode(target, prompts, drafter=Late(), **options)


def test_loss_weights_and_counts_per_head(target, module, examples):
    """Head 0 counts all valid slots; with a stride, later heads count only the slots selected for them."""
    inputs = packed(module, target, examples, stride=2)
    batch = inputs[0]
    total, weight, steps = module(*inputs)
    for k in range(HEADS):
        rows = batch.later_rows if k else torch.arange(len(batch.query_rows))
        assert steps[k, 1] == int(((batch.valid_steps[rows] > k) & batch.in_draft_vocab[rows + k]).sum()) > 0
    shares = 0.8 ** torch.arange(HEADS)
    torch.testing.assert_close(weight, (shares * steps[:, 1]).sum())
    torch.testing.assert_close(total.detach(), (shares * steps[:, 0]).sum())


def test_gradients_flow_only_where_valid(target, module, examples):
    """A document without valid slots gives no gradient, and a head without valid slots learns nothing."""
    batch, *others = packed(module, target, examples)
    batch.features = batch.features.clone().requires_grad_()
    (_, _), (start, stop) = batch.layout.slots
    batch.valid_steps[batch.layout.rows[1][0] :] = 0
    batch.valid_steps.clamp_(max=HEADS - 1)
    module.zero_grad()
    module(batch, *others)[0].backward()
    assert batch.features.grad[start:stop].abs().max() == 0
    assert batch.features.grad[:start].abs().max() > 0
    for k in range(HEADS):
        heads = getattr(module, "hydra_lm_head", None) or module.lm_head
        learnt = max(float(p.grad.abs().max()) for p in heads[k].parameters())
        assert (learnt > 0) == (k < HEADS - 1)


def test_short_training_lowers_the_loss_of_every_head(target, family, examples):
    name, vocab_size = family
    module = built(target, name, vocab_size)
    inputs = packed(module, target, examples)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        total, weight, steps = module(*inputs)
        (total / weight).backward()
        optimizer.step()
        losses.append(steps[:, 0] / steps[:, 1])
    assert (losses[-1] < 0.8 * losses[0]).all()


def test_a_checkpoint_restores_the_head_and_wrong_tensors_are_refused(target, family, module):
    kind = pool.load_family(family[0])
    config, tensors = kind.checkpoint_config(module, target.identity), kind.stored_state(module.state_dict())
    back = kind.restore(config, tensors)
    assert back.config == module.config and torch.equal(back.draft_ids, module.draft_ids)
    for name, tensor in module.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    some = sorted(tensors)[-1]
    for wrong in (
        {name: tensor for name, tensor in tensors.items() if name != some},
        tensors | {some: tensors[some][:-1]},
        tensors | {"9.0.linear.weight": torch.zeros(1)},
    ):
        with pytest.raises(CheckpointError, match="do not match"):
            kind.restore(config, wrong)
    with pytest.raises(CheckpointError, match="draft_heads"):
        shape = {key: value for key, value in config["architecture"].items() if key != "draft_heads"}
        kind.restore({**config, "architecture": shape}, tensors)
