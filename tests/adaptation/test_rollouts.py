"""Rollouts for trl: GRPO trains the same policy with and without a drafter, and the drafter follows the policy."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from specctl.adaptation.rollouts import DraftedRollouts
from specctl.decoding.engine import Engine
from specctl.decoding.logprobs import filtered
from specctl.decoding.offline import decode
from specctl.decoding.sampling import Sampling
from specctl.decoding.target import Target, load_target
from specctl.drafters import checkpoint
from specctl.errors import CheckpointError, UsageError
from specctl.recipe.online import DrafterStreamRecipe
from tests.measuring.streams import QUESTIONS, write_copy, write_head

TEMPERATURE = 0.6
LEARNS = DrafterStreamRecipe(learner={"budget": None, "holdout": 0.0})


def different_tokens(completion_ids, **_):
    """A reward that usually differs between two texts."""
    return [float(len(set(ids))) for ids in completion_ids]


def trainer_of(place, target, rollouts, peft_config=None, **options):
    """Return a trainer of two steps, with two texts for each of four prompts, on a new copy of the target."""
    args = GRPOConfig(
        str(place),
        **dict(max_steps=2, per_device_train_batch_size=8, num_generations=2, max_completion_length=12)
        | dict(learning_rate=0.02, lr_scheduler_type="constant", temperature=TEMPERATURE, seed=3)
        | dict(
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
        )
        | options,
    )
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.float32),
        different_tokens,
        args,
        Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]),
        processing_class=target.tokenizer,
        peft_config=peft_config,
        rollout_func=rollouts,
    )


class Watched(DraftedRollouts):
    """Rollouts that record their results, and the log probabilities that the trainer computes at that moment."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.returned, self.recomputed, self.targets = [], [], []
        self.asked, self.weights = [], []

    def __call__(self, prompts, trainer):
        self.trainer = trainer
        made = super().__call__(prompts, trainer)
        self.returned.append(made)
        self.recomputed.append(
            [recomputed(trainer, *ids) for ids in zip(made["prompt_ids"], made["completion_ids"], strict=True)]
        )
        if self.learner is not None and self.learner.target.path == "lean":
            weight = self.learner.target.model.layers[0].qkv.weight
            self.targets.append((weight, weight.clone()))
        return made

    def _write(self, target, requests, pupil):
        self.asked.append(requests)
        self.weights.append({name: weight.clone() for name, weight in self.trainer.model.state_dict().items()})
        return super()._write(target, requests, pupil)


def recomputed(trainer, prompt, completion):
    """Return the log probabilities of a completion from one forward pass of the model in training."""
    ids = torch.tensor([prompt + completion])
    logps, _, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, torch.ones_like(ids), len(completion), batch_size=1
    )
    return logps[0].detach()


@pytest.fixture(scope="module")
def copy(tmp_path_factory, tiny):
    """A drafter that is often right: a slightly disturbed copy of the target."""
    return write_copy(tmp_path_factory.mktemp("drafter") / "lm", tiny, tiny.name, 0.02)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny):
    """The training without a drafter: (rollouts, trained weights, trainer)."""
    return run(tmp_path_factory.mktemp("plain"), tiny, Watched(None))


@pytest.fixture(scope="module")
def learning(tmp_path_factory, tiny, copy):
    """The training of `plain` with a learning drafter."""
    return run(tmp_path_factory.mktemp("learning"), tiny, Watched(copy, LEARNS))


def run(place, target, rollouts, **options):
    trainer = trainer_of(place, target, rollouts, **options)
    trainer.train()
    return rollouts, {name: weight.clone() for name, weight in trainer.model.state_dict().items()}, trainer


def same_training(one, other):
    (rollouts, weights, _), (reference, expected, _) = one, other
    for made, wanted in zip(rollouts.returned, reference.returned, strict=True):
        assert (made["prompt_ids"], made["completion_ids"]) == (wanted["prompt_ids"], wanted["completion_ids"])
    return all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_training_with_a_learning_drafter_is_identical(learning, plain):
    """Texts, rewards and weights equal those without a drafter bit for bit, while policy and drafter change."""
    assert same_training(learning, plain)
    rollouts = learning[0]
    assert [batch.lesson for batch in rollouts.batches] == ["updated", "updated"]
    assert rollouts.batches[0].mat > 1.5 and {batch.mat for batch in plain[0].batches} == {1.0}
    first, second = ([row[name] for row in learning[2].state.log_history[:2]] for name in ("reward", "rollout/mat"))
    assert first == [row["reward"] for row in plain[2].state.log_history[:2]]
    assert second == [batch.mat for batch in rollouts.batches]


def test_a_head_reads_the_current_policy_without_a_copy(tmp_path, tiny, plain):
    """The learner's target changes at every step and shares its memory with the policy."""
    followed = run(tmp_path, tiny, Watched(write_head(tmp_path / "eagle3", tiny, "eagle3"), LEARNS))
    assert same_training(followed, plain)
    rollouts, _, trainer = followed
    (first, before), (second, after) = rollouts.targets
    assert not torch.equal(before, after)
    attention = trainer.model.model.layers[0].self_attn
    stacked = torch.cat([product.weight for product in (attention.q_proj, attention.k_proj, attention.v_proj)])
    assert second.data_ptr() == first.data_ptr() == attention.q_proj.weight.data_ptr()
    assert torch.equal(second, stacked) and not torch.equal(stacked, after), "the last optimizer step is in it, too"


def test_logprobs_equal_those_of_the_trainer(learning, plain):
    """In fp32 the importance ratio of on-policy text is 1, for first tokens from the prefill and for verified drafts.

    Negative control: without the temperature the log probabilities differ.
    """
    for rollouts in (learning[0], plain[0]):
        for made, expected in zip(rollouts.returned, rollouts.recomputed, strict=True):
            for logprobs, completion, wanted in zip(made["logprobs"], made["completion_ids"], expected, strict=True):
                assert len(logprobs) == len(completion)
                assert torch.allclose((wanted - torch.tensor(logprobs)).exp(), torch.ones(len(logprobs)), atol=1e-4)
    made = learning[0].returned[-1]
    prompt, ids = made["prompt_ids"][0], torch.tensor(made["completion_ids"][0])
    model = AutoModelForCausalLM.from_pretrained(plain[2].model.config._name_or_path, dtype=torch.float32)
    model.load_state_dict(learning[0].weights[-1])
    at_one = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    logprobs = torch.tensor(made["logprobs"][0])
    assert not torch.allclose(at_one.gather(1, ids[:, None])[:, 0], logprobs, atol=0.01)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_roll_outs_without_log_probabilities_train_alike(tmp_path, tiny, copy, plain, monkeypatch, device):
    """Nothing else may depend on them. Rounds can run on a device, and the drafter learns from these texts, too."""
    if device:
        monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    found = run(tmp_path, tiny, Watched(copy, LEARNS, logprobs=False))
    assert same_training(found, plain)
    assert [made["logprobs"] for made in found[0].returned] == [None, None]
    assert [batch.lesson for batch in found[0].batches] == ["updated", "updated"]


def test_texts_are_samples_of_the_current_policy(learning, tiny):
    """Each batch equals plain decoding with the same seeds and the weights of that step, and differs from the step
    before."""
    rollouts = learning[0]
    texts = [[plain_texts(tiny, weights, asked) for weights in rollouts.weights] for asked in rollouts.asked]
    made = [batch["completion_ids"] for batch in rollouts.returned]
    assert [texts[0][0], texts[1][1]] == made
    assert texts[1][0] != made[1]


def plain_texts(target, weights, asked):
    model = AutoModelForCausalLM.from_pretrained(target.name, dtype=torch.float32)
    model.load_state_dict(weights)
    return [text.output_ids for text in decode(Engine(Target("policy", model, target.tokenizer)), asked)]


def test_a_policy_without_a_lean_step_works(tmp_path, tiny_directory):
    """Gemma 2 runs in `transformers`. Learning used to fail because its vocabulary head requires gradients."""
    gemma = load_target(str(tiny_directory("gemma2")), device="cpu", dtype="fp32")
    rollouts, _, _ = run(tmp_path, gemma, Watched(write_head(tmp_path / "head", gemma, "eagle3"), LEARNS), max_steps=1)
    assert (gemma.path, rollouts.batches[0].lesson) == ("transformers", "updated")
    for logprobs, wanted in zip(rollouts.returned[0]["logprobs"], rollouts.recomputed[0], strict=True):
        assert torch.allclose(wanted, torch.tensor(logprobs), atol=1e-4)


def test_an_adapter_is_merged_only_for_rollouts(tmp_path, tiny, copy):
    """Texts come from base plus adapter; the trainer keeps the two separate."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    rollouts, weights, _ = run(tmp_path, tiny, Watched(copy, LEARNS), peft_config=lora)
    for made, expected in zip(rollouts.returned, rollouts.recomputed, strict=True):
        for logprobs, wanted in zip(made["logprobs"], expected, strict=True):
            assert torch.allclose(wanted, torch.tensor(logprobs), atol=1e-3)
    base = AutoModelForCausalLM.from_pretrained(tiny.name, dtype=torch.float32).state_dict()
    kept = weights["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"]
    assert torch.allclose(kept, base["model.layers.0.self_attn.q_proj.weight"], atol=1e-5)
    assert any(weight.abs().sum() > 0 for name, weight in weights.items() if "lora_B" in name)
    (_, before), (_, after) = rollouts.targets
    assert not torch.equal(before, after)


def test_policy_and_drafter_can_be_saved(tmp_path, learning, copy):
    """Policy weights share memory, which safetensors refuses to save without a copy."""
    rollouts, weights, trainer = learning
    trainer.save_model(tmp_path / "policy")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32).state_dict()
    assert saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name]) for name in saved)
    learnt = checkpoint.load(rollouts.save(tmp_path / "learnt"))
    assert not torch.equal(learnt.tensors["lm_head.weight"], checkpoint.load(copy).tensors["lm_head.weight"])


def test_a_missing_drafter_is_refused_at_once(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        DraftedRollouts(tmp_path / "nothing")


def test_evaluation_teaches_nothing(tmp_path, tiny, copy):
    """Evaluation texts are drafted, but must not be learned from."""
    rollouts = Watched(copy, LEARNS)
    trainer = trainer_of(tmp_path, tiny, rollouts, max_steps=1, per_device_eval_batch_size=8)
    trainer.train()
    played = rollouts.learner.played().clone()
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    batch = rollouts.batches[-1]
    assert (batch.training, batch.lesson) == (False, None) and batch.mat > 1
    assert torch.equal(rollouts.learner.played(), played) and not rollouts.learner.buffer.texts


def test_a_fixed_drafter_stores_no_texts(tmp_path, tiny, copy):
    """A fixed drafter is the baseline; storing states and building batches used to slow it down."""
    fixed = DrafterStreamRecipe(algo=["static"])
    rollouts, _, _ = run(tmp_path, tiny, Watched(copy, fixed), max_steps=1)
    assert rollouts.batches[0].mat > 1.5 and rollouts.batches[0].lesson is None
    assert rollouts.batches[0].learn_s == 0.0 and not rollouts.learner.buffer.texts


def test_filtered_logits_exclude_tokens_in_the_order_of_transformers():
    """Excluded tokens have probability 0; the order is temperature, top-k, top-p."""
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]])
    three = torch.tensor([3.0, 1.0, 2.0, -torch.inf]) / 0.5
    assert torch.allclose(filtered(logits, Sampling(0.5, 3, 1.0)).softmax(-1)[0], three.softmax(-1))
    assert filtered(logits, Sampling(0.5, 0, 0.5)).softmax(-1).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert torch.equal(filtered(logits, Sampling(0.5, 0, 1.0)), logits * 2)


@pytest.mark.parametrize("option", [{"min_p": 0.1}, {"repetition_penalty": 1.1}])
def test_unsupported_sampling_options_are_refused(tmp_path, tiny, option):
    """Otherwise the texts would come from another distribution than the trainer assumes."""
    with pytest.raises(UsageError, match=next(iter(option))):
        trainer_of(tmp_path, tiny, DraftedRollouts(None), **option).train()
