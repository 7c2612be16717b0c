"""Learning from rejected steps: what is learnt from, that it works, and that it goes on where it stopped."""

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


def test_the_table_has_every_pair_once_and_the_end_of_long_contexts():
    found = pairs_dataset([*PAIRS, PAIRS[0]], max_length=6)
    assert found["prompt_id"] == ["p0", "p1", "p2", "p3"]
    assert found["prompt_ids"][0] == [61, 62] and found["chosen_ids"][0] == [*BETTER, 43]
    assert found["rejected"][1] == "worse 1"
    assert pairs_dataset(PAIRS, max_length=1)["prompt_ids"][0] == [62], "a step without context is no preference"


@pytest.mark.parametrize("lora", [False, True])
def test_dpo_prefers_the_targets_steps(tiny, target, lora, capsys):
    learning = learner(tiny, target, lora=lora)
    first, second = learning.learn(PAIRS), learning.learn(PAIRS)
    played = learning.played()
    assert preference(played) > preference(tiny)
    assert (first.pairs, first.steps, first.refused) == (4, 4, False)
    assert first.margin > 0 and second.margin > 0
    assert "forward" not in vars(played), "TRL's patched forward is bound to the model it patched"
    assert capsys.readouterr().out == "", "stdout is for the result"
    assert all(("lora" in name) == lora for name in learning.state() if name.startswith("weight."))


@pytest.mark.parametrize("lora", [False, True])
def test_the_reference_is_the_model_as_the_chunk_began(tiny, target, lora):
    """Against the very first weights the second chunk's loss would begin below ln 2."""
    learning = learner(tiny, target, epochs=1, batch=4, lora=lora)
    assert learning.learn(PAIRS).loss == pytest.approx(0.6931, abs=1e-3)
    assert learning.learn(PAIRS).loss == pytest.approx(0.6931, abs=1e-3)


def test_no_end_of_text_is_learnt_behind_a_step(tiny, target):
    """TRL ends every text by default: the draft LM would stop after each step."""
    (eos,) = target.eos_ids
    learning = learner(tiny, target, "osd-lr", epochs=8)
    one = PAIRS[0]
    before = likelihood(tiny, one.context + one.chosen, [eos])
    learning.learn(PAIRS)
    assert likelihood(learning.played(), one.context + one.chosen, [eos]) < before + 0.5


def test_sft_learns_the_targets_step_and_nothing_of_the_drafts(tiny, target):
    learning = learner(tiny, target, "osd-lr")
    lesson = learning.learn(PAIRS)
    one = PAIRS[0]
    assert likelihood(learning.played(), one.context, one.chosen) > likelihood(tiny, one.context, one.chosen) + 0.1
    assert (lesson.steps, lesson.margin) == (4, None)
    other = learner(tiny, target, "osd-lr")
    other.learn([Mismatch(p.prompt_id, p.context, p.chosen, [99], "", "") for p in PAIRS])
    assert all(map(torch.equal, other.played().parameters(), learning.played().parameters()))


@pytest.mark.parametrize("lora", [False, True])
def test_a_learner_goes_on_where_its_state_was_taken(tiny, target, lora):
    """Bit for bit: weights, moments and the shuffle of the next chunk."""
    one, other = learner(tiny, target, lora=lora), learner(tiny, target, lora=lora)
    one.learn(PAIRS)
    state = one.state()
    before = {name: value.clone() for name, value in state.items()}
    one.learn(PAIRS[:3])
    assert all(torch.equal(state[name], before[name]) for name in state), "a state that was taken changed"
    other.restore(state)
    other.learn(PAIRS[:3])
    assert one.state().keys() == other.state().keys()
    assert all(torch.equal(one.state()[name], value) for name, value in other.state().items())


def test_another_models_state_is_refused(tiny, target):
    full, adapter = learner(tiny, target), learner(tiny, target, lora=True)
    with pytest.raises(CheckpointError, match="another draft model"):
        full.restore(adapter.state())


def test_a_chunk_without_mismatches_changes_nothing(tiny, target):
    learning = learner(tiny, target)
    lesson = learning.learn([])
    assert (lesson.pairs, lesson.steps, lesson.loss) == (0, 0, None)
    assert all(map(torch.equal, learning.played().parameters(), tiny.parameters()))


def test_an_update_that_is_not_finite_is_taken_back(tiny, target):
    learning = learner(tiny, target)
    next(learning.model.parameters()).data[60] = float("nan")
    with torch.no_grad():
        weights = [weight.clone() for weight in learning.model.parameters()]
    assert learning.learn(PAIRS).refused
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(learning.model.parameters(), weights, strict=True)
    )


def test_small_models_take_larger_steps_unless_told():
    recipe = LookaheadRecipe()
    assert recipe.rate_of("online-lr", 600_000_000) == recipe.rate_of("online-lr", 8_000_000_000) == 5e-7
    assert recipe.rate_of("online-lr", 2_500_000) > 5e-6
    assert LookaheadRecipe(learning={"lr": 1e-3}).rate_of("osd-lr", 1) == 1e-3


@pytest.mark.parametrize("name", ["replicate/lookahead", "online/qwen3-8b-0.6b-online-lr"])
def test_recipes_that_replicate_have_the_papers_rate_and_epochs(name):
    """OnlineSpec, appendix B.6: 5e-7 for both, one epoch of SFT."""
    recipe = LookaheadRecipe(**yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["reasoning"])
    assert recipe.rate_of("osd-lr", 2_500_000) == recipe.rate_of("online-lr", 2_500_000) == 5e-7
    assert (recipe.epochs_of("osd-lr"), recipe.epochs_of("online-lr")) == (1, 3)


def test_epochs_are_those_of_both_modes_where_they_are_given():
    recipe = LookaheadRecipe(learning={"epochs": 2})
    assert recipe.epochs_of("osd-lr") == recipe.epochs_of("online-lr") == 2


@pytest.mark.parametrize(("mode", "steps"), [("osd-lr", 2), ("online-lr", 6)])
def test_without_a_number_of_epochs_a_chunk_is_seen_as_often_as_in_the_paper(tiny, target, mode, steps):
    """Two steps an epoch. SFT learnt from each chunk three times, as DPO does."""
    default, named = (learner(tiny, target, mode, epochs=epochs).learn(PAIRS) for epochs in (None, steps // 2))
    assert default.steps == steps and default == named


def test_a_signal_ends_learning_between_two_steps(tiny, target, monkeypatch, tmp_path):
    """A chunk of a large draft LM takes longer than a batch system waits. And nothing is left in the directory."""
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


def test_the_generators_of_the_process_are_left_alone(tiny, target):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    learner(tiny, target, epochs=1).learn(PAIRS[:1])
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("mode", ["osd-lr", "online-lr"])
def test_on_a_machine_with_several_gpus(tiny, target, mode, monkeypatch):
    """TRL refuses to learn where it sees them: the run would end behind its first chunk."""
    made = TrainingArguments.__post_init__

    def two(arguments):
        made(arguments)
        arguments._n_gpu = 2

    monkeypatch.setattr(TrainingArguments, "__post_init__", two)
    assert learner(tiny, target, mode).learn(PAIRS).steps == 4


@pytest.mark.parametrize("lora", [False, True])
def test_checkpointed_layers_leave_nothing_behind(tiny, target, lora, monkeypatch):
    """As on a GPU: hooks of every chunk would add up, in the model and in all that is made of it."""
    options = PreferenceLearner._options
    monkeypatch.setattr(PreferenceLearner, "_options", lambda *args: options(*args) | {"gradient_checkpointing": True})
    learning = learner(tiny, target, lora=lora)
    learning.learn(PAIRS)
    assert not learning.played().get_input_embeddings()._forward_hooks
