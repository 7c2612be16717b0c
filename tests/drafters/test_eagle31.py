"""EAGLE-3.1 options: training, drafting and scoring agree, and checkpoints store only the options that are set."""

import pytest
import torch

from specctl.decoding.sampling import GREEDY
from specctl.drafters.eagle3.drafter import FAMILY as eagle3
from specctl.drafters.eagle3.drafter import Eagle3Drafter
from specctl.drafters.eagle3.head import Eagle3Config, Eagle3Head
from specctl.drafters.tree import TreeShape
from specctl.errors import CheckpointError, UsageError
from specctl.recipe import DrafterRecipe, TrainRecipe
from specctl.training.example import Example
from specctl.training.features import FeatureStore, slot_batch
from tests.drafters.heads import disturbed
from tests.drafters.test_eagle3 import STEPS, forced, scored, training_logits
from tests.drafters.test_eagle3_head import run
from tests.drafters.variants import NORMS, TRAINED, VARIANTS
from tests.toys.decoding import decode

OPTIONS = {*TRAINED, "fc_norm", "num_layers"}
SHAPE = TreeShape(STEPS, 1, STEPS, 1, 0.0)


def eagle31(target, seed=1, **options):
    """Return a random head with norm weights that differ from 1."""
    torch.manual_seed(seed)
    config = eagle3.architecture(DrafterRecipe(vocab_size=512, **dict.fromkeys(NORMS, False) | options), target)
    head = Eagle3Head(config, torch.randperm(target.vocab_size)[:512].sort().values)
    head.steps, head.decay = STEPS, 0.8
    head.initialise(target)
    return disturbed(head)


@pytest.fixture(scope="module", params=VARIANTS)
def options(request):
    return VARIANTS[request.param]


@pytest.fixture(scope="module")
def head(target, options):
    return eagle31(target, **options)


@pytest.fixture(scope="module")
def long_prompt(prompts):
    """A prompt longer than a window of 64 tokens."""
    return [*prompts[1], *prompts[0], *prompts[1]]


@pytest.fixture(scope="module")
def examples(target, prompts, long_prompt):
    """Two documents, one longer than the window."""
    texts = [decode(target, [p], sampling=GREEDY, max_new_tokens=7, seeds=[0])[0] for p in (prompts[0], long_prompt)]
    return [Example(i, str(i), t.prompt_ids + t.output_ids, len(t.prompt_ids)) for i, t in enumerate(texts)]


def test_training_logits_equal_drafting_logits_at_every_step(target, head, examples):
    """Catches a norm omitted in training or in drafting, and a window with the wrong size or a fixed position."""
    seen = training_logits(head, target, examples)
    drafter = Eagle3Drafter(head, target, SHAPE)
    offset = 0
    for example in examples:
        for slot in range(example.response_length - 1):
            committed = example.tokens[: example.prompt_length + slot + 1]
            for step, logits in enumerate(forced(drafter, target, committed, example.tokens[len(committed) :])):
                torch.testing.assert_close(logits, seen[step][offset + slot], atol=2e-4, rtol=1e-4)
        offset += example.response_length - 1


def test_every_option_changes_the_training_logits(target, options, examples):
    """Negative control, at the last step of the longer document."""
    (plain, with_options) = (training_logits(eagle31(target, **some), target, examples)[-1] for some in ({}, options))
    row = max(plain)
    assert (plain[row] - with_options[row]).abs().max() > 0.01


def test_score_equals_training(target, head, examples):
    example = examples[1]
    seen = training_logits(head, target, [example])
    compared = 0
    for score in scored(Eagle3Drafter(head, target, SHAPE), target, example, STEPS):
        for k in range(STEPS):
            for place, position in enumerate(score.positions):
                row = position - 2 - k - (example.prompt_length - 1)
                if row >= 0 and row in seen[k]:
                    torch.testing.assert_close(score.logits[k, place], seen[k][row], atol=2e-4, rtol=1e-4)
                    compared += 1
    assert compared > 8


@pytest.fixture(scope="module")
def ragged(target, prompts, long_prompt):
    """Return (prompts, options, outputs of plain decoding, one prompt at a time)."""
    texts, fixed = [long_prompt, prompts[1], prompts[0]], dict(sampling=GREEDY, max_new_tokens=30)
    return texts, fixed, [decode(target, [text], seeds=[0], **fixed)[0].output_ids for text in texts]


@pytest.mark.parametrize(
    "options",
    [pytest.param(name, marks=() if name in ("window", "layers") else pytest.mark.slow) for name in VARIANTS],
    indirect=True,
)
def test_lossless_in_ragged_batches(target, head, ragged):
    """Some texts start longer than the window and others grow past it.

    Options that change neither masks nor caches run in the slow tests only.
    """
    drafter, (texts, fixed, plain) = Eagle3Drafter(head, target, TreeShape(4, 3, 9, 2, 0.0)), ragged
    assert plain == [one.output_ids for one in decode(target, texts, seeds=[0] * 3, drafter=drafter, **fixed)]


@pytest.mark.parametrize("variant", ["paper", "speculators", "layers"])
def test_gradient_checkpointing_changes_no_loss_or_gradient(target, examples, variant):
    head = eagle31(target, **VARIANTS[variant])
    batch = slot_batch(examples, FeatureStore(target, head.taps).get(examples), STEPS, head.t2d)
    inputs = batch, target.model.embedding, target.head_weight[head.draft_ids]
    (losses, gradients, _), (theirs, expected, _) = (run(head, inputs, on) for on in (True, False))
    assert losses[0] == theirs[0]
    for name, gradient in gradients.items():
        assert gradient.any(), name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


def test_config_stores_only_the_options_that_are_set(target, head, options):
    shape = eagle3.checkpoint_config(head, target.identity)
    assert {key: value for key, value in shape["architecture"].items() if key in OPTIONS} == options
    assert eagle3.restore(shape, head.state_dict()).config == head.config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"norm_output": 1}, "architecture.norm_output"),
        ({"sliding_window": 63}, "architecture.sliding_window"),
        ({"norm_input": True}, "architecture.norm_input"),
        ({"fc_norm": True}, "fc_norm.0.weight: is missing"),
    ],
)
def test_an_inconsistent_config_is_refused(target, changes, says):
    head = eagle31(target)
    shape = eagle3.checkpoint_config(head, target.identity)
    with pytest.raises(CheckpointError, match=says):
        eagle3.restore({**shape, "architecture": shape["architecture"] | changes}, head.state_dict())
    assert isinstance(eagle3.restore(shape, head.state_dict()).config, Eagle3Config)


@pytest.mark.parametrize("arch", ["eagle", "hydra", "medusa", "lm"])
@pytest.mark.parametrize("key", ["fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "sliding_window"])
def test_other_families_refuse_eagle31_options(arch, key):
    value = 64 if key == "sliding_window" else True
    with pytest.raises(ValueError, match=rf"drafter\.{key}: an option of eagle3[\w, ]* drafters, not of {arch}"):
        TrainRecipe(arch=arch, drafter=DrafterRecipe(**{key: value}))
    assert getattr(TrainRecipe(drafter=DrafterRecipe(**{key: value})).drafter, key) == value


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [
        *(("eagle3", key, False) for key in ("is_causal", "normed_features")),
        *(("eagle3", key, 0) for key in ("markov_rank", "conv_kernel_size", "selector_rank")),
        *(("dflash", key, False) for key in ("fc_norm", "norm_output")),
        *(("eagle3", "hidden_size", 64), ("hydra", "preset", "small"), ("peagle", "base", "builtin")),
        *(("eagle", "num_layers", 2), ("dflash", "draft_heads", 2), ("medusa", "num_layers", 2)),
        *(("medusa", "num_heads", 2), ("medusa", "intermediate_size", 64), ("retrieval", "num_kv_heads", 2)),
        *((arch, "taps", [1]) for arch in ("eagle", "hydra", "medusa", "lm", "mtp", "retrieval")),
        *(("mtp", "num_heads", 2), ("mtp", "vocab_size", 64), ("retrieval", "vocab_size", 64)),
    ],
)
def test_an_option_of_another_family_is_refused(arch, key, value):
    """Setting such an option to False or 0 is refused too."""
    with pytest.raises(ValueError, match=rf"drafter\.{key}: an option of [\w, ]* drafters, not of {arch}"):
        TrainRecipe(arch=arch, drafter=DrafterRecipe(**{key: value}))


@pytest.mark.parametrize(("heads", "kv_heads"), [(5, 5), (2, 4), (8, 3), (256, 4), (512, 4)])
def test_numbers_of_heads_that_do_not_fit_are_refused(target, heads, kv_heads):
    """The training would stop at its first step, with an error of torch."""
    with pytest.raises(UsageError, match=f"drafter.num_heads={heads} with drafter.num_kv_heads={kv_heads} gives"):
        eagle3.architecture(DrafterRecipe(num_heads=heads, num_kv_heads=kv_heads), target)
    found = eagle3.architecture(DrafterRecipe(num_heads=16, num_kv_heads=1), target)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (16, 1, target.hidden_size // 16)


@pytest.mark.parametrize("count", [0, 65, 1.5])
def test_the_number_of_layers_has_limits(count):
    with pytest.raises(ValueError, match="num_layers"):
        DrafterRecipe(num_layers=count)


@pytest.mark.parametrize(
    ("given", "fc_norm", "norm_output"),
    [
        ({}, True, True),
        ({"norm_before_fc": True}, False, True),
        ({"fc_norm": False, "norm_output": False}, False, False),
    ],
)
def test_new_heads_default_to_norms_that_both_engines_support(target, given, fc_norm, norm_output):
    config = eagle3.architecture(DrafterRecipe(**given), target)
    assert (config.fc_norm, config.norm_output, config.norm_before_residual) == (fc_norm, norm_output, False)


def test_fc_norm_and_norm_before_fc_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        DrafterRecipe(fc_norm=True, norm_before_fc=True)
