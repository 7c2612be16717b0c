"""EAGLE-3 heads compute the same logits in training, drafting and scoring, at every step."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specctl.decoding.models.linear import DraftLinear, Linear
from specctl.decoding.models.loading import cpu_has_bf16
from specctl.decoding.plan import plan_rows
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import DraftTree
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.eagle3.head import Eagle3Head
from specctl.drafters.feature import fusion
from specctl.drafters.tree import TreeShape
from specctl.kernels import native
from specctl.recipe import DrafterRecipe
from specctl.training.example import Example
from specctl.training.features import FeatureStore, slot_batch
from tests.drafters.recorded import recorded_logits
from tests.toys.decoding import decode

STEPS = 3


@pytest.fixture(scope="module", params=[1, 3], ids=["one layer", "three layers"])
def head(request, target):
    torch.manual_seed(1)
    architecture = eagle3.architecture(DrafterRecipe(vocab_size=512, num_layers=request.param), target)
    ids = torch.randperm(target.vocab_size)[:512].sort().values
    head = Eagle3Head(architecture, ids)
    head.steps, head.decay = STEPS, 0.8
    head.initialise(target)
    return head


@pytest.fixture(scope="module")
def examples(target, prompts):
    """Two documents of different lengths, which exercise packing and padding."""
    texts = [
        decode(target, [p], sampling=GREEDY, max_new_tokens=n, seeds=[0])[0]
        for p, n in zip(prompts, (9, 14), strict=False)
    ]
    return [Example(i, str(i), t.prompt_ids + t.output_ids, len(t.prompt_ids)) for i, t in enumerate(texts)]


def training_logits(head, target, examples, stride=1):
    """Return {response slot: logits [Vd]} for each step of the training-time test."""
    store = FeatureStore(target, head.config.taps)
    batch = slot_batch(examples, store.get(examples), STEPS, head.t2d, stride)
    with recorded_logits(head) as seen:
        head(batch, target.model.embedding, target.head_weight[head.draft_ids])
    rows = [list(range(len(batch.query_rows)))] + [batch.later_rows.tolist()] * (STEPS - 1)
    parts = seen[0].split([len(part) for part in rows])
    return [dict(zip(part, logits, strict=True)) for part, logits in zip(rows, parts, strict=True)]


def test_training_logits_equal_drafting_logits_at_every_step(target, head, examples):
    """Catches an off-by-one in layers, tokens, positions or the diagonal keys of later steps."""
    seen = training_logits(head, target, examples)
    drafter = Eagle3Drafter(head, target, TreeShape(STEPS, 1, STEPS, 1, 0.0))
    offset = 0
    for example in examples:
        asked = example.response_length - 1
        for slot in range(asked):
            committed = example.tokens[: example.prompt_length + slot + 1]
            for step, logits in enumerate(forced(drafter, target, committed, example.tokens[len(committed) :])):
                torch.testing.assert_close(logits, seen[step][offset + slot], atol=1e-4, rtol=1e-4)
        offset += asked


def test_strided_rows_are_chosen_per_example(target, head, examples):
    """The choice does not depend on the batch, and over all phases every row is chosen once."""
    store = FeatureStore(target, head.config.taps)

    def later(examples, phase):
        return slot_batch(examples, store.get(examples), STEPS, head.t2d, 3, phase).later_rows.tolist()

    first = examples[0].response_length - 1
    assert later(examples, 1) == later(examples[:1], 1) + [first + row for row in later(examples[1:], 1)]
    turns = [row for phase in range(3) for row in later(examples[:1], phase)]
    assert sorted(turns) == list(range(first - 1))


def test_a_batch_without_later_steps_trains_step_zero(target, head, examples):
    """Responses of two tokens have no later steps; the loss of step 0 must still give gradients."""
    short = [Example(0, "0", examples[0].tokens[: examples[0].prompt_length + 2], examples[0].prompt_length)]
    store = FeatureStore(target, head.config.taps)
    batch = slot_batch(short, store.get(short), STEPS, head.t2d)
    batch.in_draft_vocab[0] = True
    total, weight, steps = head(batch, target.model.embedding, target.head_weight[head.draft_ids])
    total.backward()
    assert len(batch.later_rows) == 0 and weight == 1 and steps[:, 1].tolist() == [1.0] + [0.0] * (STEPS - 1)
    assert head.fc.weight.grad.isfinite().all() and head.fc.weight.grad.any()
    head.zero_grad()


def test_strided_rows_get_the_logits_of_unstrided_training(target, head, examples):
    """With a stride, step 0 and the rows chosen for later steps keep their logits."""
    every, some = (training_logits(head, target, examples, stride) for stride in (1, 3))
    assert 0 < len(some[1]) < len(every[1]) and len(some[0]) == len(every[0])
    for step in range(STEPS):
        for row, logits in some[step].items():
            torch.testing.assert_close(logits, every[step][row], atol=1e-5, rtol=1e-5)


def forced(drafter, target, committed, following):
    """Return the logits of the drafting steps after `committed`, with the drafter fed the true `following` tokens."""
    taken = []

    class Spy(Drafter):
        taps = drafter.taps

        def propose(self, state, budget):
            drafter.advance(state)
            memory = state.memory[drafter.key]
            hidden, logits = memory.hidden, drafter.logits(memory.hidden)
            taken.append(logits[0])
            for step, token in enumerate(following[: STEPS - 1]):
                if len(following) <= step + 1:  # training has no target after the last token
                    break
                plan = plan_rows([memory.cached[0] + step], 1, device=state.device, dtype=state.dtype)
                hidden = drafter._layer(
                    torch.tensor([[token]]), hidden, memory.cache, plan, drafter._tables(memory, STEPS)[step]
                )
                taken.append(drafter.logits(hidden)[0])
            return DraftTree.from_chains([[]], state.device)

    # The decoding loop draws the last committed token itself, so the prompt ends before it.
    prompt = committed[:-1]
    drawn = decode(target, [prompt], sampling=GREEDY, max_new_tokens=1, seeds=[0])[0].output_ids
    assert drawn == committed[-1:], "the response is greedy, so the target repeats it"
    if following:
        decode(target, [prompt], sampling=GREEDY, max_new_tokens=2, seeds=[0], drafter=Spy())
    return taken


def scored(drafter, target, example, depths):
    """Score a whole plainly decoded response, in two calls that share the cache."""
    found = []

    def ask(state, draft, verdict):
        text = state.rows[0].ids
        for span in (range(example.prompt_length + 1, len(text) // 2), range(len(text) // 2, len(text))):
            found.append(drafter.score(state, [span], depths)[0])

    fixed = dict(sampling=GREEDY, seeds=[0], max_new_tokens=example.response_length, taps=drafter.taps)
    decode(target, [example.tokens[: example.prompt_length]], on_round=ask, **fixed)
    return found


def test_score_equals_training(target, head, examples):
    """Compare every committed position and depth, with a second span that starts in the middle of the response."""
    seen = training_logits(head, target, examples[1:])
    drafter = Eagle3Drafter(head, target, TreeShape(STEPS, 1, STEPS, 1, 0.0))
    compared = 0
    for score in scored(drafter, target, examples[1], STEPS):
        assert torch.equal(score.ids, head.draft_ids)
        for k in range(STEPS):
            for place, position in enumerate(score.positions):
                row = position - 2 - k - (examples[1].prompt_length - 1)
                if row >= 0 and row in seen[k]:
                    torch.testing.assert_close(score.logits[k, place], seen[k][row], atol=1e-4, rtol=1e-4)
                    compared += 1
    assert compared > 5 * len(seen[0])


def test_scores_of_a_batch_equal_scores_of_each_text(target, head, prompts):
    """Prompts and spans have different lengths, and one span is empty."""
    drafter = Eagle3Drafter(head, target, TreeShape(STEPS, 1, STEPS, 1, 0.0))
    found = {}

    def ask(state, draft, verdict):
        spans = [
            range(len(row.ids) - min(n, len(row.ids) - 3), len(row.ids))
            for row, n in zip(state.rows, sizes, strict=True)
        ]
        for row, score in zip(state.rows, drafter.score(state, spans, 2), strict=True):
            found[len(state.rows), row.index if len(sizes) > 1 else alone, len(row.ids)] = score.logits

    fixed = dict(sampling=GREEDY, max_new_tokens=6, taps=drafter.taps, on_round=ask)
    sizes = [4, 0, 9]
    decode(target, prompts, seeds=[0] * 3, **fixed)
    for alone, size in enumerate([4, 0, 9]):
        sizes = [size]
        decode(target, [prompts[alone]], seeds=[0], **fixed)
    pairs = [(logits, found[1, row, length]) for (count, row, length), logits in found.items() if count == 3]
    assert len(pairs) >= 9
    for batched, single in pairs:
        if single is None or single.shape[1] == 0:
            assert batched is None or batched.shape[1] == 0
        else:
            torch.testing.assert_close(batched, single, atol=1e-4, rtol=1e-4)


def test_cached_keys_and_values_do_not_depend_on_when_they_were_computed(target, head, prompts):
    """Compare caches updated every round, after several idle rounds, and from scratch after `invalidate`."""
    steady, idle, anew = (Eagle3Drafter(head, target, TreeShape(STEPS, 1, STEPS, 1, 0.0)) for _ in range(3))
    rounds = []

    def ask(state, draft, verdict):
        steady.propose(state, STEPS)  # proposing writes rows after the committed slots, which later rounds overwrite
        rounds.append(steady.lag(state))
        if len(rounds) < 5:
            return
        anew.invalidate(state)
        for drafter in (idle, anew):
            assert max(drafter.lag(state)) > 4 * (drafter is anew or len(rounds) == 5)
            drafter.advance(state)
        expected = steady.current(state)
        assert len(expected.cache.keys) == head.config.num_layers
        for found in (idle.current(state), anew.current(state)):
            torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
            for b, end in enumerate(state.cached):
                ours, theirs = found.cache.store[:, b, :end], expected.cache.store[:, b, :end]
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

    decode(target, prompts, sampling=GREEDY, max_new_tokens=9, seeds=[0] * 3, taps=steady.taps, on_round=ask)
    assert len(rounds) > 6 and rounds == [[0] * 3] * len(rounds)


@pytest.mark.parametrize("count", [1, 3])
def test_a_single_row_sees_the_window_of_a_whole_pass(target, head, prompts, count):
    """To read a prompt, a head computes one row of its last layer, with a mask of that row alone."""
    windowed, whole = (Eagle3Drafter(head, target, TreeShape(STEPS, 1, STEPS, 1, 0.0)) for _ in range(2))
    windowed.window = 8
    compared = []

    def ask(state, draft, verdict):
        windowed.advance(state)
        whole.advance(state)
        width, rows = max(state.cached), torch.arange(state.batch)
        assert min(state.cached) > 8
        single = windowed.last(state).clone()
        every, starts = windowed.read(state, width, every=True)
        last = torch.tensor(state.cached) - torch.tensor(starts) - 1
        torch.testing.assert_close(single, every.view(state.batch, width, -1)[rows, last], atol=1e-4, rtol=1e-4)
        compared.append(float((single - whole.last(state)).abs().amax()))

    fixed = dict(sampling=GREEDY, max_new_tokens=4, taps=windowed.taps, on_round=ask)
    decode(target, prompts[:count], seeds=[0] * count, **fixed)
    assert compared and min(compared) > 0.01  # negative control: the window changes the rows


def test_loss_is_normalized_and_masked(target, head, examples):
    """The weight counts (slot, step) pairs, without slots that have a target token outside the draft vocabulary."""
    store = FeatureStore(target, head.config.taps)
    batch = slot_batch(examples, store.get(examples), STEPS, head.t2d)
    total, weight, steps = head(batch, target.model.embedding, target.head_weight[head.draft_ids])
    asked = [example.response_length - 1 for example in examples]
    best = [f.best for f in store.get(examples)]
    for k in range(STEPS):
        valid = sum(int(head.t2d[b[k:].long()].sum()) for b in best)
        assert steps[k, 1] == valid <= sum(max(n - k, 0) for n in asked)
    assert float(weight) == pytest.approx(sum(0.8**k * float(steps[k, 1]) for k in range(STEPS)))
    assert float(total.detach()) == pytest.approx(sum(0.8**k * float(steps[k, 0]) for k in range(STEPS)), rel=1e-5)


def test_drafts_stay_in_the_draft_vocabulary(target, head, prompts):
    allowed = set(head.draft_ids.tolist())
    proposed = []
    decode(
        target, prompts, sampling=GREEDY, max_new_tokens=8, seeds=[0] * 3,
        drafter=Eagle3Drafter(head, target, TreeShape(4, 2, 6, 2, 0.0)),
        on_round=lambda state, draft, verdict: proposed.extend(draft.tokens[draft.parents != -2].tolist()),
    )  # fmt: skip
    assert proposed and set(proposed) <= allowed


GREEDILY = dict(sampling=GREEDY, max_new_tokens=24)


class Sizes(TorchDispatchMode):
    """Records the number of elements of every tensor that an operation returns, views excepted."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.sizes.append(result.numel())
        return result


def test_only_the_finished_table_of_tokens_is_in_memory_whole(target, head, monkeypatch):
    """The norm of the whole table took 2 GB with 151,936 tokens of 896 numbers."""
    whole = Eagle3Drafter(head, target, TreeShape(4, 2, 6, 2, 0.0)).token_input
    monkeypatch.setattr(fusion, "TABLE_ROWS", 1000)
    with Sizes() as found:
        drafter = Eagle3Drafter(head, target, TreeShape(4, 2, 6, 2, 0.0))
    assert torch.equal(drafter.token_input, whole)
    assert sum(size >= whole.numel() for size in found.sizes) == 1


@pytest.fixture(scope="module")
def plain(target, prompts):
    return [decode(target, [p], seeds=[0], **GREEDILY)[0].output_ids for p in prompts]


@pytest.mark.parametrize("shape", [TreeShape(5, 1, 7, 3, 0.0), TreeShape(4, 3, 9, 2, 0.0), TreeShape(6, 1, 6, 1, 0.3)])
def test_lossless(target, head, prompts, plain, shape):
    """Chains, trees with leaf siblings, and wide trees give the text of plain decoding (fp32)."""
    drafter = Eagle3Drafter(head, target, shape)
    assert plain == [d.output_ids for d in decode(target, prompts, seeds=[0] * 3, drafter=drafter, **GREEDILY)]


def test_exact_mode_draws_the_tokens_of_plain_decoding(target, head, prompts):
    """A speculative chain and plain decoding with one seed, at temperature 1."""
    drafter = Eagle3Drafter(head, target, TreeShape(5, 1, 5, 1, 0.0))
    options = dict(sampling=Sampling(1.0, 0, 1.0), max_new_tokens=24, seeds=[3], exact=True)
    for prompt in prompts:
        plain = decode(target, [prompt], **options)[0]
        assert plain.output_ids == decode(target, [prompt], drafter=drafter, **options)[0].output_ids


@pytest.mark.skipif(
    native.library() is None and not cpu_has_bf16(), reason="no fast bf16 products: none in int8, either"
)
@pytest.mark.parametrize("outputs,inputs", [(96, 64), (33, 16), (7, 17), (48, 100), (2047, 48)])
def test_few_rows_are_multiplied_in_int8(outputs, inputs):
    """A few rows use int8 and stay close to the exact product; more rows use the packed bf16 product.

    Widths that are not a multiple of 16 stay in bf16, because torch's int8 kernel would read past their weights.
    """
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).mul_(torch.rand(outputs, 1)).to(torch.bfloat16)
    weight[5] = 0
    linear, exact = DraftLinear(weight), Linear(weight)
    assert (linear.int8 is None) == (inputs % 16 != 0)
    for rows in (1, linear.few):
        x = torch.randn(rows, inputs).to(torch.bfloat16)
        expected = x.float() @ weight.float().T
        assert (linear(x) - expected).norm() < 0.02 * expected.norm()
        assert (linear(x)[:, 5] == 0).all()
    many = torch.randn(linear.few + 1, inputs).to(torch.bfloat16)
    assert torch.equal(linear(many), exact(many))
