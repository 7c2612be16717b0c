"""Learning from rejected steps: the training pairs, the effect on the draft LM, and resuming."""

import copy
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM, TrainingArguments

from specctl.drafters.lm.model import architecture
from specctl.errors import CheckpointError, Interrupted
from specctl.lab.reasoning.lookahead import Mismatch
from specctl.lab.reasoning.options import LookaheadRecipe
from specctl.lab.reasoning.preferences import PreferenceLearner, pairs_dataset
from specctl.progress import interrupts
from specctl.recipe import DrafterRecipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
BETTER, WORSE = [40, 41, 42], [50, 51, 52]
PAIRS = [
    Mismatch(f"p{n}", [60 + n, 61, 62], [*BETTER, 43 + n], [*WORSE, 53 + n], f"better {n}", f"worse {n}")
    for n in range(4)
]


@pytest.fixture(scope="module")
def tiny(target):
    torch.manual_seed(0)
    recipe = DrafterRecipe(preset="tiny", hidden_size=16, num_heads=2, intermediate_size=16, num_layers=1)
    return LlamaForCausalLM(architecture(recipe, target))


def learner(tiny, target, mode="online-lr", **learning):
    recipe = LookaheadRecipe(learning={"lr": 1e-2, "batch": 2, "epochs": 2} | learning).resolved("builtin")
    return PreferenceLearner(copy.deepcopy(tiny), target.tokenizer, recipe, mode)


@torch.inference_mode()
def likelihood(model, context, step):
    rows = model(torch.tensor([context + step])).logits[0, len(context) - 1 : -1].log_softmax(-1)
    return float(rows.gather(1, torch.tensor(step).unsqueeze(1)).sum())


def preference(model):
    """Mean log-ratio of the better step to the worse one."""
    return sum(
        likelihood(model, one.context, one.chosen) - likelihood(model, one.context, one.rejected) for one in PAIRS
    ) / len(PAIRS)


def test_the_dataset_has_each_pair_once_with_truncated_contexts():
    found = pairs_dataset([*PAIRS, PAIRS[0]], max_length=6)
    assert found["prompt_id"] == ["p0", "p1", "p2", "p3"]
    assert found["prompt_ids"][0] == [61, 62] and found["chosen_ids"][0] == [*BETTER, 43]
    assert found["rejected"][1] == "worse 1"
    assert pairs_dataset(PAIRS, max_length=1)["prompt_ids"][0] == [62], "at least one token of context stays"


@pytest.mark.parametrize("lora", [False, True])
def test_dpo_raises_the_preference_for_the_targets_steps(tiny, target, lora, capsys):
    learning = learner(tiny, target, lora=lora)
    first, second = learning.learn(PAIRS), learning.learn(PAIRS)
    played = learning.played()
    assert preference(played) > preference(tiny)
    assert (first.pairs, first.steps, first.refused) == (4, 4, False)
    assert first.margin > 0 and second.margin > 0
    assert "forward" not in vars(played), "TRL's patched forward is bound to the model it patched"
    assert capsys.readouterr().out == "", "stdout is only for the result"
    assert all(("lora" in name) == lora for name in learning.state() if name.startswith("weight."))


@pytest.mark.parametrize("lora", [False, True])
def test_the_dpo_reference_is_the_model_before_the_chunk(tiny, target, lora):
    """With the initial weights as reference, the second chunk's loss would begin below ln 2."""
    learning = learner(tiny, target, epochs=1, batch=4, lora=lora)
    assert learning.learn(PAIRS).loss == pytest.approx(0.6931, abs=1e-3)
    assert learning.learn(PAIRS).loss == pytest.approx(0.6931, abs=1e-3)


def test_no_end_of_text_is_learned_after_a_step(tiny, target):
    """TRL ends every text by default: the draft LM would stop after each step."""
    (eos,) = target.eos_ids
    learning = learner(tiny, target, "osd-lr", epochs=8)
    one = PAIRS[0]
    before = likelihood(tiny, one.context + one.chosen, [eos])
    learning.learn(PAIRS)
    assert likelihood(learning.played(), one.context + one.chosen, [eos]) < before + 0.5


def test_sft_learns_only_from_the_targets_step(tiny, target):
    learning = learner(tiny, target, "osd-lr")
    lesson = learning.learn(PAIRS)
    one = PAIRS[0]
    assert likelihood(learning.played(), one.context, one.chosen) > likelihood(tiny, one.context, one.chosen) + 0.1
    assert (lesson.steps, lesson.margin) == (4, None)
    other = learner(tiny, target, "osd-lr")
    other.learn([Mismatch(p.prompt_id, p.context, p.chosen, [99], "", "") for p in PAIRS])
    assert all(map(torch.equal, other.played().parameters(), learning.played().parameters()))


@pytest.mark.parametrize("lora", [False, True])
def test_a_restored_learner_continues_bit_for_bit(tiny, target, lora):
    """Weights, optimizer moments, and the order of the next chunk."""
    one, other = learner(tiny, target, lora=lora), learner(tiny, target, lora=lora)
    one.learn(PAIRS)
    state = one.state()
    before = {name: value.clone() for name, value in state.items()}
    one.learn(PAIRS[:3])
    assert all(torch.equal(state[name], before[name]) for name in state), "learning must not change a saved state"
    other.restore(state)
    other.learn(PAIRS[:3])
    assert one.state().keys() == other.state().keys()
    assert all(torch.equal(one.state()[name], value) for name, value in other.state().items())


def test_the_state_of_another_draft_model_is_refused(tiny, target):
    full, adapter = learner(tiny, target), learner(tiny, target, lora=True)
    with pytest.raises(CheckpointError, match="another draft model"):
        full.restore(adapter.state())


def test_a_chunk_without_mismatches_changes_nothing(tiny, target):
    learning = learner(tiny, target)
    lesson = learning.learn([])
    assert (lesson.pairs, lesson.steps, lesson.loss) == (0, 0, None)
    assert all(map(torch.equal, learning.played().parameters(), tiny.parameters()))


def test_an_update_with_nan_is_reverted(tiny, target):
    learning = learner(tiny, target)
    next(learning.model.parameters()).data[60] = float("nan")
    with torch.no_grad():
        weights = [weight.clone() for weight in learning.model.parameters()]
    assert learning.learn(PAIRS).refused
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(learning.model.parameters(), weights, strict=True)
    )


def test_small_models_have_a_larger_default_learning_rate():
    recipe = LookaheadRecipe()
    assert recipe.rate_of("online-lr", 600_000_000) == recipe.rate_of("online-lr", 8_000_000_000) == 5e-7
    assert recipe.rate_of("online-lr", 2_500_000) > 5e-6
    assert LookaheadRecipe(learning={"lr": 1e-3}).rate_of("osd-lr", 1) == 1e-3


@pytest.mark.parametrize("name", ["replicate/lookahead", "online/qwen3-8b-0.6b-online-lr"])
def test_replication_recipes_have_the_papers_rate_and_epochs(name):
    """OnlineSpec, appendix B.6: rate 5e-7 for both modes, one epoch of SFT."""
    recipe = LookaheadRecipe(**yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["reasoning"])
    assert recipe.rate_of("osd-lr", 2_500_000) == recipe.rate_of("online-lr", 2_500_000) == 5e-7
    assert (recipe.epochs_of("osd-lr"), recipe.epochs_of("online-lr")) == (1, 3)


def test_given_epochs_apply_to_both_modes():
    recipe = LookaheadRecipe(learning={"epochs": 2})
    assert recipe.epochs_of("osd-lr") == recipe.epochs_of("online-lr") == 2


@pytest.mark.parametrize(("mode", "steps"), [("osd-lr", 2), ("online-lr", 6)])
def test_the_default_epochs_are_from_the_paper(tiny, target, mode, steps):
    """An epoch has two steps. SFT once used three epochs, like DPO."""
    default, named = (learner(tiny, target, mode, epochs=epochs).learn(PAIRS) for epochs in (None, steps // 2))
    assert default.steps == steps and default == named


def test_a_signal_interrupts_learning_between_steps(tiny, target, monkeypatch, tmp_path):
    """One chunk of a large draft LM takes longer than the grace period of a batch system. No files remain in the
    directory."""
    monkeypatch.chdir(tmp_path)
    learning = learner(tiny, target, epochs=50)
    state, checks = learning.state(), []

    def check():
        checks.append(None)
        if len(checks) == 4:
            raise Interrupted("stopped")

    monkeypatch.setattr(interrupts, "check", check)
    with pytest.raises(Interrupted):
        learning.learn(PAIRS)
    assert "forward" not in vars(learning.model)
    assert not list(tmp_path.iterdir())
    learning.restore(state)
    assert all(map(torch.equal, learning.played().parameters(), tiny.parameters()))


def test_learning_does_not_change_global_random_generators(tiny, target):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    learner(tiny, target, epochs=1).learn(PAIRS[:1])
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("mode", ["osd-lr", "online-lr"])
def test_learning_works_with_several_visible_gpus(tiny, target, mode, monkeypatch):
    """TRL refuses to learn with several GPUs, so the run would end after its first chunk."""
    made = TrainingArguments.__post_init__

    def two(arguments):
        made(arguments)
        arguments._n_gpu = 2

    monkeypatch.setattr(TrainingArguments, "__post_init__", two)
    assert learner(tiny, target, mode).learn(PAIRS).steps == 4


@pytest.mark.parametrize("lora", [False, True])
def test_gradient_checkpointing_leaves_no_hooks(tiny, target, lora, monkeypatch):
    """It is used on a GPU. Otherwise each chunk would add hooks to the model and to its copies."""
    options = PreferenceLearner._options
    monkeypatch.setattr(PreferenceLearner, "_options", lambda *args: options(*args) | {"gradient_checkpointing": True})
    learning = learner(tiny, target, lora=lora)
    learning.learn(PAIRS)
    assert not learning.played().get_input_embeddings()._forward_hooks
