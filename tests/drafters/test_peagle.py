"""P-EAGLE heads compute the same rows in training, drafting and scoring, alone and in a batch."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from specctl.decoding.cache import CatchUp
from specctl.decoding.records import first_chain
from specctl.decoding.sampling import GREEDY
from specctl.drafters.peagle.drafter import FAMILY as peagle
from specctl.drafters.peagle.drafter import PEagleDrafter
from specctl.drafters.peagle.head import PEagleHead, Rollouts
from specctl.drafters.tree import TreeShape
from specctl.errors import CheckpointError
from specctl.recipe import TrainRecipe
from specctl.training.features import FeatureStore, slot_batch
from tests.drafters.recorded import recorded_logits
from tests.toys.decoding import decode

DEPTHS = 5
CHAIN = TreeShape(DEPTHS, 1, DEPTHS, 1, 0.0)
KINDS = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "norms": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True, "num_layers": 2},
    "window": {"sliding_window": 64, "num_layers": 2},
}


def peagle_head(target, depths=DEPTHS, **sizes):
    """Return a random head in which every part affects the logits.

    The mask state that replaces tapped states starts at zero, so it gets a random offset.
    """
    torch.manual_seed(1)
    recipe = TrainRecipe(arch="peagle", ttt_steps=depths, drafter=sizes)
    shape = peagle.architecture(recipe.drafter, target, recipe.ttt_steps)
    head = PEagleHead(shape, torch.randperm(target.vocab_size)[: shape.draft_vocab_size].sort().values)
    head.initialise(target)
    for name, parameter in head.named_parameters():
        if "norm" in name or "mask" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return head


@pytest.fixture(scope="module", params=KINDS)
def head(request, target):
    return peagle_head(target, **KINDS[request.param])


def training_batch(head, target, examples, phase=0):
    features = FeatureStore(target, head.taps).get(examples)
    return slot_batch(examples, features, head.steps, head.t2d, phase=phase)


def training_logits(head, target, examples):
    """Return {response slot: logits [Vd]} for each depth."""
    batch = training_batch(head, target, examples)
    with recorded_logits(head) as seen, torch.no_grad():
        head(batch, target.model.embedding, target.head_weight[head.draft_ids])
    asked = Rollouts(batch, head.shares()[1:], [batch.layout] * head.steps).trained_slots
    parts = seen[0].split([len(rows) for rows in asked])
    return [dict(zip(rows.tolist(), part, strict=True)) for rows, part in zip(asked, parts, strict=True)]


class Watched(PEagleDrafter):
    """A drafter that records the logits of every draft with the text before it."""

    def propose(self, state, budget):
        draft = super().propose(state, budget)
        for b, row in enumerate(state.rows):
            chain = first_chain(draft.parents[b].tolist())
            if chain and row.stop is None:
                self.seen.append((list(row.ids), draft.q.of(b, len(chain))))
        return draft


def watched(head, target, shape=CHAIN):
    drafter = Watched(head, target, shape)
    drafter.seen = []
    return drafter


def test_training_logits_equal_drafting_logits(target, head, examples):
    """Catches an off-by-one in layers, tokens, positions or anchors, and attention to a masked row."""
    seen = training_logits(head, target, examples)
    offset = compared = 0
    for example in examples:
        drafter = watched(head, target)
        prompt = example.tokens[: example.prompt_length]
        decode(target, [prompt], sampling=GREEDY, max_new_tokens=example.response_length, seeds=[0], drafter=drafter)
        for ids, rows in drafter.seen:
            slot = offset + len(ids) - 1 - example.prompt_length
            for depth, logits in enumerate(rows):  # rows do not read drafted tokens, so all can be compared
                if slot in seen[depth]:
                    torch.testing.assert_close(logits, seen[depth][slot], atol=1e-4, rtol=1e-4)
                    compared += depth > 0
        offset += example.response_length - 1
    assert compared > 15


def test_training_logits_equal_an_independent_forward(target, head, examples):
    """One draft computed with an explicit mask over all its rows, as vLLM and speculators define it."""
    seen = training_logits(head, target, examples)
    example, config, first = examples[0], head.config, head.midlayer
    features = FeatureStore(target, head.taps).get([example])[0].taps.float()
    anchor = example.prompt_length - 1  # the first response slot
    tapped = torch.cat((features[: anchor + 1], head.mask_hidden.view(1, -1).expand(DEPTHS - 1, -1)))
    tokens = torch.tensor(example.tokens[1 : anchor + 2] + [config.mask_token_id] * (DEPTHS - 1))
    embedded = target.model.embedding[tokens].float()
    norms = head.tapped_norms
    if norms:
        tapped = torch.cat([norm(part) for norm, part in zip(norms, tapped.chunk(len(norms), -1), strict=True)], -1)
    x = head.fc(tapped)
    normed = first.hidden_norm(x)
    inputs = torch.cat((first.input_layernorm(embedded), normed), -1)
    x = normed if config.norm_before_residual else x
    places = torch.arange(len(tokens))
    apart = places[:, None] - places
    visible = (apart >= 0) & (apart < (config.sliding_window or len(tokens)))
    for layer in [first, *head.upper]:
        attention = layer.self_attn
        inputs = inputs if layer is first else layer.input_layernorm(x)
        shape = (len(tokens), -1, config.head_dim)
        query, key = (layer.rope(proj(inputs).view(shape), places) for proj in (attention.q_proj, attention.k_proj))
        value = attention.v_proj(inputs).view(shape)
        out = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in (query, key, value)), attn_mask=visible, enable_gqa=True
        )
        x = x + attention.o_proj(out[0].transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    expected = head.lm_head(head.norm(x))[anchor:]
    compared = 0
    for depth, rows in enumerate(seen):
        if 0 in rows:
            torch.testing.assert_close(rows[0], expected[depth], atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared >= 2


def test_scores_equal_drafts(target, head, prompts):
    """Every depth, in a batch, after partly accepted drafts."""

    class Scored(Watched):
        def propose(self, state, budget):
            for b, row in enumerate(state.rows):
                first = next(len(p) for p in prompts if row.ids[: len(p)] == p)
                if len(row.ids) >= first + DEPTHS + 2 and row.stop is None:
                    spans = [range(0)] * state.batch
                    spans[b] = range(len(row.ids) - 2, len(row.ids))
                    self.scores.append((list(row.ids), spans[b], self.score(state, spans, DEPTHS)[b]))
            return super().propose(state, budget)

    drafter = Scored(head, target, CHAIN)
    drafter.seen, drafter.scores = [], []
    decode(target, prompts[:2], sampling=GREEDY, max_new_tokens=14, seeds=[0, 1], drafter=drafter)
    drafts = {tuple(ids): rows for ids, rows in drafter.seen}
    compared = 0
    for ids, span, score in drafter.scores:
        for place, position in enumerate(span):
            for depth in range(DEPTHS):
                rows = drafts.get(tuple(ids[: position - depth]))
                if rows is not None and depth < len(rows):
                    torch.testing.assert_close(score.logits[depth][place], rows[depth], atol=1e-4, rtol=1e-4)
                    compared += 1
    assert compared > 10


def test_each_depth_trains_a_nested_share_of_the_anchors(target, head, examples):
    """COD: a rollout has no gaps, and other steps train other anchors."""
    batch = training_batch(head, target, examples)
    asked = Rollouts(batch, head.shares()[1:], [batch.layout] * head.steps).trained_slots
    assert [len(asked[0]), head.shares()[:3]] == [21, [1.0, 0.7, pytest.approx(0.49)]]
    for shallow, deep in pairwise(asked):
        assert set(deep.tolist()) <= set(shallow.tolist())
    deepest = {
        row
        for phase in range(12)
        for row in Rollouts(
            training_batch(head, target, examples, phase), head.shares()[1:], [batch.layout] * head.steps
        )
        .trained_slots[-1]
        .tolist()
    }
    assert len(asked[-1]) < len(deepest) >= 15


def test_gradient_checkpointing_changes_no_loss_or_gradient(target, head, examples):
    batch = training_batch(head, target, examples)
    found = []
    for on in (False, True):
        head.gradient_checkpointing = on
        head.zero_grad()
        total, weight, _ = head(batch, target.model.embedding, target.head_weight[head.draft_ids])
        total.backward()
        assert float(weight) > 0
        found.append([total.detach(), *(p.grad.clone() for p in head.parameters())])
    head.gradient_checkpointing = False
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert all(float(grad.abs().sum()) > 0 for grad in found[0])


def test_drafts_in_a_batch_equal_drafts_of_each_text_alone(target, head, prompts):
    texts = [prompts[0], prompts[1], prompts[2]]
    alone = []
    for i, text in enumerate(texts):
        drafter = watched(head, target)
        decode(target, [text], sampling=GREEDY, max_new_tokens=8 + 5 * i, seeds=[i], drafter=drafter)
        alone.append({tuple(ids): rows for ids, rows in drafter.seen})
    drafter = watched(head, target)
    decode(target, texts, sampling=GREEDY, max_new_tokens=18, seeds=[0, 1, 2], drafter=drafter)
    compared = 0
    for ids, rows in drafter.seen:
        for known in alone:
            if tuple(ids) in known:
                count = min(len(rows), len(known[tuple(ids)]))
                torch.testing.assert_close(rows[:count], known[tuple(ids)][:count], atol=1e-4, rtol=1e-4)
                compared += 1
    assert compared > 10


def test_skipped_catch_up_tokens_leave_finite_logits(target, head, prompts):
    """With a catch-up window, the mask rows of earlier drafts lie in cache slots that are never read."""
    text = (prompts[0] * 6)[:120]
    options = dict(sampling=GREEDY, max_new_tokens=6, seeds=[0])
    plain = decode(target, [text], **options)[0]
    drafter = watched(head, target)
    found = decode(target, [text], drafter=drafter, catch_up=CatchUp(4, 32), **options)[0]
    assert found.output_ids == plain.output_ids
    assert all(torch.isfinite(rows).all() for _, rows in drafter.seen)


def test_a_mask_token_outside_the_vocabulary_is_refused(target, head):
    drafter = peagle.checkpoint_config(head, target.identity)
    drafter["architecture"]["mask_token_id"] = target.vocab_size
    made = peagle.restore(drafter, head.state_dict())
    with pytest.raises(CheckpointError, match=f"mask_token_id: is {target.vocab_size}, but the vocabulary has"):
        made.check(target)
