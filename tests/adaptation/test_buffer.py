"""Feedback collected during decoding equals the result of running the target again."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from specctl.adaptation.buffer import ReplayBuffer
from specctl.decoding.device.rounds import DeviceRounds
from specctl.decoding.records import Label
from specctl.decoding.sampling import GREEDY, Sampling
from specctl.distillation.generate import distill
from specctl.drafters import pool
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.lm.drafter import ChainShape, LMDrafter
from specctl.drafters.tree import TreeShape
from specctl.recipe import (
    DataRecipe,
    DistillRecipe,
    DrafterRecipe,
    DraftingRecipe,
    SamplingRecipe,
    TargetRecipe,
    TrainRecipe,
)
from specctl.runs import Run
from specctl.training.data import Corpus, load_distilled
from specctl.training.example import Example
from specctl.training.features import FeatureStore
from specctl.training.trainable import make_trainable
from tests.lossless.drafters import bushes, own_weights, perfect, ragged
from tests.toys.decoding import decode, filling, stream

TAPS = (1, 2, 3)
HOT = Sampling(1.0, 0, 1.0)
ROOM = 2**30


@pytest.fixture(scope="module")
def five(prompts):
    """More prompts than slots; repeated prompts get other seeds."""
    return [*prompts, prompts[0], prompts[2]]


@pytest.fixture(scope="module")
def plain(target, five):
    """Return `texts(sampling)`, which gives whole texts of plain decoding."""
    known = {}

    def texts(sampling):
        if sampling not in known:
            found = decode(target, five, sampling=sampling, max_new_tokens=LENGTHS, seeds=SEEDS)
            known[sampling] = [one.prompt_ids + one.output_ids for one in found]
        return known[sampling]

    return texts


LENGTHS = [40, 17, 90, 26, 2]  # the third ends by itself
SEEDS = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def trainables(target):
    """Return `make(arch)`, which gives an untrained trainable."""
    known = {}

    def make(arch):
        if arch not in known:
            torch.manual_seed(0)
            sizes = {"eagle3": DrafterRecipe(vocab_size=512, taps=list(TAPS)), "lm": DrafterRecipe(preset="tiny")}
            recipe = TrainRecipe(
                arch=arch, objective="soft_ce", ttt_steps=3, ttt_stride=2, drafter=sizes.get(arch, DrafterRecipe())
            )
            known[arch] = make_trainable(recipe, target, Corpus([Example(0, "", list(range(600)), 1)], [], "", []))
        return known[arch]

    return make


def run(
    target,
    prompts,
    buffer,
    *,
    sampling=GREEDY,
    drafter=None,
    slots=3,
    lengths=LENGTHS,
    taps=TAPS,
    exact=False,
    watch=None,
):
    """Decode, and fill the buffer."""
    return decode(
        target, prompts, sampling=sampling, max_new_tokens=lengths, seeds=SEEDS[: len(prompts)], drafter=drafter,
        slots=slots, taps=taps, exact=exact, on_round=watch,
        labels=[Label(f"prompt {n}") for n in range(len(prompts))], **filling(buffer),
    )  # fmt: skip


def drafter_of(name, target, texts, head):
    if name == "eagle3":
        return Eagle3Drafter(head, target, TreeShape(3, 2, 8, 2, 0.0))
    if name == "ratio rule":
        return LMDrafter(own_weights(target, 0.1), target, ChainShape(4, 0.0, True))
    script = {"chain": ragged, "tree": bushes}.get(name)
    return script(texts, 0, target.vocab_size) if script else None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("chain", {}),
        ("chain", {"exact": True}),
        ("tree", {}),
        ("tree", {"sampling": HOT}),
        ("eagle3", {}),
        ("ratio rule", {"sampling": HOT, "taps": ()}),
        ("plain", {"device": True}),
        ("eagle3", {"device": True}),
        ("eagle3", {"device": True, "sampling": HOT}),
        ("ratio rule", {"device": True, "sampling": HOT, "taps": ()}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_feedback_equals_a_fresh_prefill(target, five, plain, trainables, monkeypatch, name, options):
    """Five texts run in three slots. Catches rows of rejected nodes, an off-by-one between states and tokens, rows of
    an earlier text in the slot, and taps of another drafter."""
    options, rounds = dict(options), []
    if options.pop("device", False):  # the host reads each device round one round late
        monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
        whole = DeviceRounds.round
        monkeypatch.setattr(DeviceRounds, "round", lambda *args: (rounds.append(args), whole(*args)))
    else:
        rounds.append(None)
    taps = () if "taps" in options else (1, 3)  # fewer taps than the loop stores
    buffer = ReplayBuffer(target, taps, max_bytes=ROOM)
    drafter = drafter_of(name, target, plain(options.get("sampling", GREEDY)), trainables("eagle3").module)
    decoded = run(target, five, buffer, drafter=drafter, **options)
    examples = buffer.examples()
    assert buffer.target_tokens == 0 == buffer.dropped and rounds
    assert sorted(example.prompt_id for example in examples) == [f"prompt {n}" for n in range(5)]
    for example, found in zip(examples, buffer.get(examples), strict=True):
        one = decoded[int(example.prompt_id[-1])]
        assert (example.tokens, example.prompt_length) == (one.prompt_ids + one.output_ids, len(one.prompt_ids))
        (again,) = FeatureStore(target, taps).get([example])
        for ours, theirs in zip(vars(found).values(), vars(again).values(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        copies = vars(buffer.kept[example.index]).values()
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in copies), "holds the decoding's own tensors"
    assert buffer.target_tokens == 0


def test_accepted_tokens_after_the_end_are_dropped(target, five, plain, monkeypatch):
    """The drafter continues correctly past the end-of-sequence token."""
    ids, start = plain(GREEDY)[0], len(five[0])
    text = ids[: ids.index(ids[start + 6], start) + 1]
    beyond = decode(target, [text], sampling=GREEDY, max_new_tokens=12, seeds=[0])[0]
    monkeypatch.setattr(target, "eos_ids", frozenset(text[-1:]))
    buffer = ReplayBuffer(target, TAPS, max_bytes=ROOM)
    rounds = []
    run(
        target, five[:1], buffer, drafter=perfect([text + beyond.output_ids]), slots=1, lengths=120,
        watch=lambda state, draft, verdict: rounds.append(len(verdict.committed[0])),
    )  # fmt: skip
    (example,) = buffer.examples()
    assert example.tokens == text and sum(rounds) > example.response_length - 1
    (found,), (again,) = buffer.get([example]), FeatureStore(target, TAPS).get([example])
    torch.testing.assert_close(found.teacher, again.teacher, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def offline(target, tmp_path_factory):
    """Training examples from `distill`, loaded as by `train-drafter`."""
    place = tmp_path_factory.mktemp("distilled")
    (place / "run").mkdir()
    recipe = DistillRecipe(
        target=TargetRecipe(dtype="fp32", device="cpu"),
        data=DataRecipe(domain=["sql"], limit=4),
        sampling=SamplingRecipe(max_new_tokens=24),
        temperatures=[0.0],
        output_dir=place / "sql",
    )
    distill(recipe, Run(place / "run"), target=target)
    return load_distilled([place / "sql"], target, 2048, 1e-9, 1).train


@pytest.fixture(scope="module")
def online(target, offline):
    """Return `make(feedback)`: a buffer with the texts of `offline`, decoded with drafts."""
    known = {}

    def make(feedback):
        if feedback not in known:
            known[feedback] = buffer = ReplayBuffer(target, TAPS, max_bytes=ROOM, feedback=feedback)
            texts = [[*example.tokens] for example in offline]
            prompts = [[*example.tokens[: example.prompt_length]] for example in offline]
            run(target, prompts, buffer, drafter=ragged(texts, 0, target.vocab_size), slots=2, lengths=24)
        return known[feedback]

    return make


def learn(trainable, store, examples, step=1, only=None):
    """Return (loss, weight, losses and weights by draft step, gradient) of a training step."""
    trainable.store = store
    batch = trainable.batch(examples, step)
    if only is not None:
        batch = only(batch, examples)
    trainable.module.zero_grad()
    total, weight, steps = trainable.loss(trainable.module, batch)
    total.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainable.module.parameters() if p.grad is not None])
    return total.detach(), weight, [pair for step in steps for pair in step], gradient


@pytest.mark.parametrize("arch", ["eagle3", "lm"])
@pytest.mark.parametrize("feedback", ["verdict", "rerun"])
def test_a_step_on_feedback_equals_a_step_on_distilled_data(target, trainables, offline, online, arch, feedback):
    """Compare loss, weights and gradient. Examples get equal indices, because they seed the sample of later rows."""
    trainable, buffer = trainables(arch), online(feedback)
    mine = buffer.examples()
    places = {tuple(example.tokens): example for example in offline}
    distilled = [replace(places[tuple(example.tokens)], index=example.index) for example in mine]
    assert len(distilled) == 4 and [e.prompt_length for e in mine] == [e.prompt_length for e in distilled]
    ours = learn(trainable, buffer, mine)
    theirs = learn(trainable, FeatureStore(target, TAPS), distilled)
    assert ours[1] > 0
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_rerun_feedback_runs_the_target_once_per_text(offline, online, target):
    buffer = online("rerun")
    examples = buffer.examples()
    first, second = buffer.get(examples), buffer.get(examples)
    assert buffer.target_tokens == sum(len(example.tokens) - 1 for example in examples)
    fresh = FeatureStore(target, TAPS).get(examples)
    for other in (second, fresh):
        for a, b in zip(first, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@pytest.mark.parametrize("draw", [ragged, bushes])
def test_rejected_positions_are_those_where_the_draft_was_wrong(target, five, plain, draw):
    """A round fully accepted, without a draft, or cut off by the end of the text has none."""
    buffer = ReplayBuffer(target, TAPS, max_bytes=ROOM)
    lengths: dict[int, int] = {}
    expected: dict[int, list[int]] = {n: [] for n in range(len(five))}

    def watch(state, draft, verdict):
        for b, row in enumerate(state.rows):
            new = len(row.ids) - lengths.get(row.index, row.prompt_length + 1)
            lengths[row.index] = len(row.ids)
            path = verdict.paths[b]
            if new == len(path) + 1 and (path[-1] if path else -1) in draft.parents[b].tolist():
                expected[row.index].append(len(row.ids) - 1)

    run(target, five, buffer, drafter=draw(plain(GREEDY), 0, target.vocab_size, right=0.4), watch=watch)
    found = {
        int(text.example.prompt_id[-1]): [text.example.prompt_length + 1 + place for place in text.rejected]
        for text in buffer.texts.values()
    }
    assert found == expected and sum(map(len, found.values())) > 10
    assert [text.example for text in buffer.texts.values() if text.rejected] == buffer.examples("rejected")


def test_a_perfect_draft_leaves_nothing_for_osd(target, five, plain):
    buffer = ReplayBuffer(target, TAPS, max_bytes=ROOM)
    run(target, five, buffer, drafter=perfect(plain(GREEDY)))
    assert len(buffer.examples()) == 5 and buffer.examples("rejected") == []


def test_lm_learns_from_rejected_tokens_only(target, trainables, online):
    """Compare with cross-entropies computed token by token."""
    trainable, buffer = trainables("lm"), online("verdict")
    examples = buffer.examples()
    total, weight, _, _ = learn(trainable, buffer, examples, only=buffer.only_rejected)
    wanted = []
    for example, features in zip(examples, buffer.get(examples), strict=True):
        logits = trainable.module.model(torch.tensor([example.tokens])).logits[0]
        for place in buffer.texts[example.index].rejected:
            teacher = target.model.logits(features.teacher[place : place + 1])[0].softmax(-1)
            wanted.append(F.cross_entropy(logits[example.prompt_length + place], teacher))
    assert 0 < weight == len(wanted) < sum(example.response_length - 1 for example in examples)
    torch.testing.assert_close(total, torch.stack(wanted).sum().detach(), atol=1e-2, rtol=1e-4)


def test_heads_learn_from_rejected_tokens_only(target, trainables, online):
    """At every draft depth, only rows with a rejected token as label count."""
    trainable, buffer = trainables("eagle3"), online("verdict")
    examples = buffer.examples()
    trainable.store = buffer
    whole = trainable.batch(examples, 0)
    only = buffer.only_rejected(whole, examples)
    places, start = [], 0
    for example in examples:
        places += [start + place for place in buffer.texts[example.index].rejected]
        start += example.response_length - 1
    assert (
        only.in_draft_vocab.nonzero()[:, 0].tolist() == [place for place in places if whole.in_draft_vocab[place]] != []
    )
    rows, later = torch.arange(len(only.valid_steps)), only.later_rows
    expected = [
        (only.in_draft_vocab[at + k] & (only.valid_steps[at] > k)).sum().item()
        for k, at in enumerate([rows, later, later])
    ]
    _, _, steps, _ = learn(trainable, buffer, examples, step=0, only=buffer.only_rejected)
    assert [int(count) for count in steps[1::2]] == expected
    assert torch.equal(whole.in_draft_vocab, trainable.batch(examples, 0).in_draft_vocab), (
        "the batch itself is left as it was"
    )


def test_the_oldest_texts_are_dropped_at_the_size_limit(target, five, plain):
    """The size counts the bytes of the tensors and never exceeds the limit, also during decoding."""
    fast = perfect(plain(GREEDY))
    sizes = ReplayBuffer(target, TAPS, max_bytes=ROOM)
    run(target, five, sizes, drafter=fast)
    order = list(sizes.texts)
    real = {
        n: sum(x.nbytes for x in vars(sizes.kept[n]).values()) + 8 * len(sizes.texts[n].example.tokens) for n in order
    }
    assert sizes.bytes == sum(real.values())
    cap = real[order[-1]] + real[order[-2]] + 1
    seen = []
    buffer = ReplayBuffer(target, TAPS, max_bytes=cap)
    run(target, five, buffer, drafter=fast, watch=lambda *round: seen.append(buffer.bytes))
    assert list(buffer.texts) == order[-2:] == list(buffer.kept)
    assert buffer.dropped == 3 and max(seen) <= cap and buffer.bytes == cap - 1
    (gone,) = buffer.get([sizes.texts[order[0]].example])  # features of a dropped text are computed again
    torch.testing.assert_close(gone.teacher, sizes.kept[order[0]].teacher, atol=1e-4, rtol=1e-4)
    assert list(buffer.kept) == order[-2:]
    small = ReplayBuffer(target, TAPS, max_bytes=max(real.values()) - 1)
    run(target, five, small, drafter=fast)
    large = max(real, key=real.__getitem__)
    assert large not in small.texts and small.texts, "a text that is too large drives out no other"


def test_an_aborted_decoding_keeps_finished_texts_only(target, five, plain):
    """SIGTERM in the middle of a chunk aborts like this; the next decoding starts fresh."""
    buffer = ReplayBuffer(target, TAPS, max_bytes=ROOM)
    options = dict(sampling=GREEDY, max_new_tokens=LENGTHS, seeds=SEEDS, taps=TAPS)
    options |= filling(buffer)
    decoding = stream(target, five, slots=3, **options)
    first = next(decoding)
    decoding.close()
    assert [example.tokens for example in buffer.examples()] == [first.prompt_ids + first.output_ids]
    run(target, five, buffer, drafter=perfect(plain(GREEDY)))
    assert len(buffer.examples()) == 6
    buffer.clear()
    assert (buffer.bytes, buffer.examples(), buffer.kept) == (0, [], {})


def test_one_token_responses_are_not_stored(target, five):
    """A response that ends with its prefill has no round and nothing to predict."""
    buffer = ReplayBuffer(target, TAPS, max_bytes=ROOM)
    run(target, five, buffer, lengths=[1, 9, 1, 7, 1], slots=2)
    assert sorted(example.response_length for example in buffer.examples()) == [7, 9]


@pytest.mark.parametrize("name", ["plain", "eagle3", "dflash"])
def test_device_rounds_give_the_feedback_of_host_rounds(target, five, trainables, monkeypatch, name):
    """Compare texts, rejected positions and features, in the order in which texts end."""
    drafting, drafter, taps = (
        DraftingRecipe(depth=3, width=2, nodes=8, children=2, stop_below=0.0, keep_above=0.0),
        None,
        TAPS,
    )
    if name != "plain":
        drafter = pool.load_family(name).make_drafter(trainables(name).module, target, drafting)
        taps = tuple(sorted({*TAPS, *drafter.taps}))
    buffers, rounds, whole = [], [], DeviceRounds.round
    monkeypatch.setattr(DeviceRounds, "round", lambda *args: (rounds.append(args), whole(*args)))
    for mode in ("0", "eager"):
        assert not rounds
        monkeypatch.setenv("SPECCTL_GRAPHS", mode)
        buffers.append(ReplayBuffer(target, TAPS, max_bytes=ROOM))
        run(target, five, buffers[-1], drafter=drafter, taps=taps)
    assert rounds
    host, device = buffers
    assert [text.to_json() for text in host.texts.values()] == [text.to_json() for text in device.texts.values()]
    assert any(text.rejected for text in host.texts.values()) or name == "plain"
    for ours, theirs in zip(host.get(host.examples()), device.get(device.examples()), strict=True):
        for left, right in zip(vars(ours).values(), vars(theirs).values(), strict=True):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("feedback", ["verdict", "rerun"])
def test_a_restored_buffer_equals_the_saved_one(target, five, online, feedback, tmp_path):
    buffer = online(feedback)
    facts, tensors = buffer.state()
    save_file(tensors, tmp_path / "buffer.safetensors")
    again = ReplayBuffer(target, TAPS, max_bytes=ROOM, feedback=feedback)
    again.restore(json.loads(json.dumps(facts)), load_file(tmp_path / "buffer.safetensors"))
    assert (again.texts, again.bytes, again.dropped) == (buffer.texts, buffer.bytes, buffer.dropped)
    for ours, theirs in zip(again.get(again.examples()), buffer.get(buffer.examples()), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(vars(ours).values(), vars(theirs).values(), strict=True))
    run(target, five[:1], again, slots=1, lengths=[3])
    assert [example.index for example in again.examples()] == [0, 1, 2, 3, 4]
