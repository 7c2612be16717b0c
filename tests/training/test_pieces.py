"""Texts in pieces: the loss of the whole text where the attention window allows it, with the memory of a piece."""

import json

import pytest
import torch

from specctl.errors import RecipeError
from specctl.recipe import DrafterRecipe, FeatureRecipe, TrainRecipe
from specctl.runs import Run
from specctl.training import features, loop
from specctl.training.data import Corpus, load_distilled
from specctl.training.example import Example
from specctl.training.features import FeatureStore
from specctl.training.pieces import Cut
from specctl.training.trainable import make_trainable
from tests.training.small import metrics
from tests.training.small import recipe as small

WINDOW = 64
PIECE = 160
TAPS = (1, 2, 3)
WINDOWED = {
    "eagle3": DrafterRecipe(vocab_size=256, sliding_window=WINDOW),
    "peagle": DrafterRecipe(vocab_size=256, sliding_window=WINDOW, num_layers=2),
    "dflash": DrafterRecipe(vocab_size=256, sliding_window=WINDOW, block_size=4),
    "medusa": DrafterRecipe(vocab_size=256),
}


@pytest.fixture(scope="module")
def texts():
    random = torch.Generator().manual_seed(0)
    shape = [(230, 110), (60, 20), (200, 5), (320, 310)]  # (tokens, prompt tokens)
    return [
        Example(i, f"p{i}", torch.randint(5, 500, (size,), generator=random).tolist(), prompt)
        for i, (size, prompt) in enumerate(shape)
    ]


def made(arch, target, **changes):
    recipe = TrainRecipe(**{"arch": arch, "precision": "fp32", "drafter": WINDOWED.get(arch), **changes})
    torch.manual_seed(0)
    found = make_trainable(recipe, target, Corpus([Example(0, "", list(range(600)), 1)], [], "", []))
    with torch.no_grad():  # away from the start, where the target's own state is passed through
        for parameter in found.module.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return found


def sums(trainable, examples, batches):
    """Sum loss, weight, losses by step, and gradients over batches of examples."""
    trainable.module.zero_grad()
    total = torch.zeros(2, dtype=torch.float64)
    steps = 0
    for batch in batches:
        loss, weight, pairs = trainable.loss(trainable.module, trainable.batch(batch, 5))
        loss.backward()
        total += torch.tensor([loss.item(), float(weight)], dtype=torch.float64)
        steps = steps + torch.tensor([[float(a), float(b)] for a, b in pairs], dtype=torch.float64)
    return total, steps, [p.grad.clone() for p in trainable.module.parameters() if p.grad is not None]


def agree(ours, theirs):
    """Check losses and weights within fp32 rounding, and gradients within the rounding of a thousand summands."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[1].flatten().tolist() == pytest.approx(theirs[1].flatten().tolist(), rel=1e-5)
    for one, other in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize(
    ("arch", "stride"),
    [
        *((arch, 1) for arch in WINDOWED),
        ("eagle3", 3),
        *(pytest.param(arch, 3, marks=pytest.mark.slow) for arch in WINDOWED if arch != "eagle3"),
    ],
)
def test_pieces_have_the_loss_and_gradient_of_the_whole_text(shallow, texts, arch, stride):
    """Pieces train the same slots at every draft step, and each slot sees all positions its loss depends on.

    Pieces may share a training step or take one each.
    """
    own = made(arch, shallow, ttt_stride=stride, ttt_steps=3, piece_length=PIECE)
    cut = Cut.of(own.recipe.model_copy(update={"piece_prefix": own.module.sight}), own.module)
    assert cut.exact
    parts = cut(texts)
    assert len(parts) >= 5 and max(len(part.tokens) for part in parts) <= PIECE
    assert [part for part in parts if not part.is_piece] == texts[1:2]
    assert sum(part.trained_tokens for part in parts) == sum(text.response_length for text in texts)
    whole = sums(own, texts, [[text] for text in texts])
    agree(sums(own, parts, [[part] for part in parts]), whole)
    agree(sums(own, parts, [parts]), whole)


@pytest.mark.parametrize("arch", ["eagle3", "peagle", "dflash", "eagle", "hydra", "lm"])
def test_without_a_window_a_piece_sees_only_itself(shallow, texts, arch):
    """Pieces have the same losses together or in separate steps, and every response token counts once.

    The loss differs from the whole text, because a slot does not see the text before its piece.
    """
    own, texts = made(arch, shallow, drafter=DrafterRecipe(), piece_length=PIECE, ttt_steps=2), texts[:2]
    own.module.eval()  # eagle draws new noise in every step
    cut = Cut.of(own.recipe, own.module)
    assert not cut.exact and cut.prefix == 40
    parts = cut(texts)
    assert all(part.start == 0 or part.prompt_length >= 40 for part in parts)
    alone = sums(own, parts, [[part] for part in parts])
    agree(sums(own, parts, [parts]), alone)
    whole = sums(own, texts, [[text] for text in texts])
    assert float(alone[0][1]) == pytest.approx(float(whole[0][1]))
    assert float(alone[0][0]) != pytest.approx(float(whole[0][0]), rel=2e-5)


def test_positions_are_counted_from_the_start_of_the_text(shallow, texts):
    own = made("eagle3", shallow, piece_length=PIECE)
    part = Cut.of(own.recipe, own.module)(texts)[1]
    batch = own.batch([part], 0)
    assert part.start > 0 and list(part.tokens) == texts[0].tokens[part.start : part.stop]
    assert batch.key_positions.tolist() == list(range(part.start, part.stop - 2))


def test_a_short_response_gets_as_much_context_as_fits(shallow, texts):
    """A head with a window gets the window; other heads get what fits into a piece."""
    for arch, drafter, size in (("eagle3", None, WINDOW + 10), ("hydra", DrafterRecipe(vocab_size=256), PIECE)):
        own = made(arch, shallow, piece_length=PIECE, **({"drafter": drafter} if drafter else {}))
        changed = own.recipe.model_copy(update={"piece_prefix": WINDOW})
        (part,) = Cut.of(changed, own.module)([texts[3]])
        assert (len(part.tokens), part.response_length, part.stop) == (size, 10, 320)


def test_a_piece_too_short_for_its_prefix_is_refused(shallow):
    own = made("eagle3", shallow, piece_length=64, piece_prefix=55)
    with pytest.raises(RecipeError, match="no room for 55 tokens before the trained ones and 6 draft steps"):
        Cut.of(own.recipe, own.module)
    with pytest.raises(ValueError, match="piece_prefix is a part of a piece"):
        TrainRecipe(piece_prefix=64)


@pytest.mark.parametrize("chunk", [1, 64, 400])
def test_features_of_pieces_equal_those_of_the_text(shallow, texts, monkeypatch, chunk):
    """Chunks do not depend on the pieces, so a piece has the same features alone and in a batch."""
    store = FeatureStore(shallow, TAPS)
    whole = store.compute([texts[0]])[0]
    monkeypatch.setattr(features, "CHUNK_TOKENS", {"cpu": chunk})
    own = made("eagle3", shallow, piece_length=PIECE)
    parts = Cut.of(own.recipe, own.module)([texts[0]])
    together = store.get(parts)
    for part, found in zip(parts, together, strict=True):
        (alone,) = store.get([part])
        assert all(map(torch.equal, vars(found).values(), vars(alone).values()))
        slots, asked = len(part.tokens) - 2, part.response_length - 1
        first = part.start + part.prompt_length - texts[0].prompt_length
        torch.testing.assert_close(found.taps, whole.taps[part.start : part.start + slots], rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(found.teacher, whole.teacher[first : first + asked], rtol=1e-3, atol=2e-3)
        assert (found.best == whole.best[first : first + asked]).float().mean() > 0.98
    long = store.compute([texts[0]])[0]  # long texts run in chunks too, without pieces
    torch.testing.assert_close(long.taps, whole.taps, rtol=1e-3, atol=2e-3)


class Peak:
    """Peak tensor memory in bytes above the start, from torch's profiler."""

    def __enter__(self):
        self.profile = torch.profiler.profile(profile_memory=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *error):
        self.profile.__exit__(*error)
        changes = [event for event in self.profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = self.bytes = 0
        for event in sorted(changes, key=lambda event: event.start_ns()):
            now += event.nbytes()
            self.bytes = max(self.bytes, now)


def test_a_step_needs_the_memory_of_one_piece(shallow):
    """With pieces, doubling the text keeps the peak; without pieces it about doubles."""
    own = made("eagle3", shallow, piece_length=256, ttt_steps=2)
    cut = Cut.of(own.recipe, own.module)
    random = torch.Generator().manual_seed(0)
    texts = [Example(0, "", torch.randint(5, 500, (size,), generator=random).tolist(), 100) for size in (800, 1600)]

    def peaks(examples):
        found = []
        for example in examples:
            batch = own.batch([example], 0)
            with Peak() as peak:
                loss, *_ = own.loss(own.module, batch)
                loss.backward()
            found.append(peak.bytes)
        return max(found)

    pieces_of = [cut([text]) for text in texts]
    assert [len(found) for found in pieces_of] == [4, 8]
    short, long = (peaks(found[1:3]) for found in pieces_of)
    assert long <= 1.05 * short
    assert peaks([texts[1]]) > 1.8 * peaks([texts[0]]) > 2 * short


def test_the_target_pass_needs_only_the_memory_of_its_cache(shallow, monkeypatch):
    """Doubling the text adds its keys and values; no tensor grows with the square of the length."""
    monkeypatch.setattr(features, "CHUNK_TOKENS", {"cpu": 64})
    store, found = FeatureStore(shallow, TAPS), []
    for size in (1000, 2000):
        text = Example(0, "", torch.randint(5, 500, (size,)).tolist(), size - 50)
        (part,) = Cut(128, 64, True, 6)([text])
        store.get([part])
        with Peak() as peak:
            store.get([part])
        found.append(peak.bytes)
    config = shallow.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * shallow.dtype.itemsize
    assert found[1] - found[0] < 1.5 * 1000 * row


def test_a_run_in_pieces_learns_and_counts_its_texts(distilled, target, tmp_path, monkeypatch):
    """Cached and recomputed features give the same losses, and the card has the counts."""
    monkeypatch.setattr(loop, "load_target", lambda **_: target)
    losses = []
    for mode in ("online", "cached"):
        place = tmp_path / mode
        place.mkdir()
        made = small(
            distilled, place, max_steps=2, piece_length=40, max_length=100,
            features=FeatureRecipe(mode=mode, dir=tmp_path),
        )  # fmt: skip
        loop.train_drafter(made, Run(place))
        losses.append([line["loss"] for line in metrics(place) if "loss" in line])
        info = json.loads((place / "drafter" / "drafter.json").read_text())
        assert info["texts"]["in_pieces"] > 0 and info["texts"]["trained"] > info["texts"]["in_pieces"]
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def test_cut_texts_are_counted(distilled, target, capsys):
    lengths = [len(e.tokens) for e in load_distilled([distilled], target, 2048, 0.1, 2).train]
    shortest = min(lengths)
    found = load_distilled([distilled], target, shortest, 0.1, 2).counts
    assert found["cut"] + found["too_long"] > 0 and found["trained"] + found["too_long"] <= len(lengths)
    assert "raise max_length, and set piece_length" in capsys.readouterr().err


@pytest.mark.parametrize("drafter", [DrafterRecipe(), DrafterRecipe(vocab_size=256, sliding_window=WINDOW)])
def test_responses_too_short_for_a_block_change_no_other_loss(target, texts, drafter):
    """A batch of answers such as "yes" has no dflash block, a loss of 0, and must not fail the run."""
    own = made("dflash", target, drafter=drafter)
    short = [Example(0, "a", texts[1].tokens[:20], 18), Example(1, "b", texts[1].tokens[:30], 28)]
    nothing = sums(own, short, [short])
    assert nothing[0].tolist() == [0, 0] and not any(gradient.any() for gradient in nothing[2])
    agree(sums(own, [*short, texts[0]], [short, texts[:1]]), sums(own, texts[:1], [texts[:1]]))
