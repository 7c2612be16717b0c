"""The baseline `transformers.generate`: same text, and times and passes with the same meaning as ours."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.decoding.sampling import GREEDY, Sampling
from specctl.drafters import checkpoint
from specctl.drafters.lm.drafter import FAMILY as lm
from specctl.drafters.lm.model import LM, architecture
from specctl.errors import CheckpointError
from specctl.measuring import lossless, transformers_baseline
from specctl.measuring.transformers_baseline import in_fastest_dtype, load_assistant, load_generator
from specctl.recipe import DrafterRecipe, TargetRecipe
from tests.drafters.test_lora import SETTINGS, random_adapter
from tests.toys.decoding import decode

PROMPT = [5, 6, 7, 8] * 4


@pytest.fixture(scope="module")
def generator(target):
    recipe = TargetRecipe()
    assistant = load_generator(recipe, target, GREEDY, {}).model
    return load_generator(recipe, target, GREEDY, {"tiny": assistant})


def test_all_modes_give_the_greedy_text(target, generator):
    (ours,) = decode(target, [PROMPT], sampling=GREEDY, max_new_tokens=16, seeds=[0])
    answers = generator.decode(PROMPT, 16, 0)
    assert list(answers) == ["transformers", "transformers+lookup", "transformers+tiny"]
    for decoded in answers.values():
        assert lossless.compare(target, PROMPT, ours.output_ids, decoded.output_ids, 1e-3) != "mismatch"
        assert decoded.stop == ours.stop
        assert decoded.prompt_ids == PROMPT


def test_a_class_with_recurrent_layers_is_measured_without_drafts(target, monkeypatch):
    """Granite 4 has models without recurrent layers of such a class. `generate` refused prompt lookup, and `eval` ended
    with its ValueError."""
    monkeypatch.setattr(LlamaForCausalLM, "_is_stateful", True)
    assert list(load_generator(TargetRecipe(), target, GREEDY, {}).decode(PROMPT, 4, 0)) == ["transformers"]


def test_the_conversion_to_fp32_returns_the_memory_that_it_frees(monkeypatch):
    """With Qwen2.5-Coder-0.5B, 0.56 GB of free blocks stayed in the process."""
    settled = []
    monkeypatch.setattr(transformers_baseline, "settle_memory", lambda: settled.append(model.dtype))
    monkeypatch.setattr(transformers_baseline, "with_fast_products", torch.Tensor.float)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 8,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16()
    assert in_fastest_dtype(in_fastest_dtype(model)).dtype == torch.float32
    assert settled == [torch.float32]


def test_only_language_models_of_a_pool_become_assistants(tmp_path, target):
    """A head cannot assist `generate`, and a damaged drafter must not be skipped silently."""
    assert load_assistant("lookup", target) is None
    model = LM(LlamaForCausalLM(architecture(DrafterRecipe(preset="tiny"), target)))
    for name, config in (
        ("small", lm.checkpoint_config(model, target.identity)),
        ("head", {"family": "eagle3", "target": target.identity}),
    ):
        checkpoint.save(tmp_path / name, config=config, tensors=lm.stored_state(model.state_dict()), info={})
    assistant = load_assistant(str(tmp_path / "small"), target)
    assert assistant is not None and assistant.dtype == target.dtype
    assert load_assistant(str(tmp_path / "head"), target) is None

    base = lm.checkpoint_config(model, target.identity)
    origin = {"path": "../small", "sha256": checkpoint.weights_digest(tmp_path / "small")}
    changes = random_adapter(model.model, torch.Generator().manual_seed(0), ["q_proj"])
    config = base | {"lora": {**SETTINGS, "base": origin}}
    checkpoint.save(tmp_path / "adapter", config=config, tensors=changes, info={})
    adapted = load_assistant(str(tmp_path / "adapter"), target)
    assert adapted is not None
    differ = [name for name, x in adapted.state_dict().items() if not torch.equal(x, assistant.state_dict()[name])]
    assert differ and all("q_proj" in name for name in differ)

    (tmp_path / "small" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        load_assistant(str(tmp_path / "small"), target)


def test_passes_and_times_are_counted(generator):
    answers = generator.decode(PROMPT, 16, 0)
    plain, assisted = answers["transformers"], answers["transformers+tiny"]
    assert plain.target_passes == plain.decoded_tokens
    assert assisted.target_passes < assisted.decoded_tokens / 2  # the target as its own assistant is always right
    for decoded in answers.values():
        assert decoded.prefill_s > 0 and decoded.decode_s > 0


def test_a_batch_gives_the_texts_of_its_prompts_alone(target, generator):
    """Prompts and texts have different lengths; tokens after an end are dropped."""
    prompts = [PROMPT, PROMPT[:5], [9, 8, 7]]
    free = [generator.decode(prompt, 8, 0)["transformers"] for prompt in prompts]
    generator.eos_ids, kept = frozenset({free[1].output_ids[3]}), generator.eos_ids  # makes one text end early
    generator.model.generation_config.eos_token_id = sorted(generator.eos_ids)
    try:
        alone = [generator.decode(p, n, 0)["transformers"] for p, n in zip(prompts, (8, 8, 6), strict=True)]
        batch = generator.decode_batch(prompts, [8, 8, 6], 0)
    finally:
        generator.eos_ids = kept
        generator.model.generation_config.eos_token_id = sorted(kept)
    assert [one.output_ids for one in batch] == [one.output_ids for one in alone]
    assert [one.stop for one in batch] == [one.stop for one in alone]
    assert len(batch[1].output_ids) <= 4 and len(batch[2].output_ids) <= 6
    assert {one.decode_s for one in batch} == {batch[0].decode_s} and batch[0].decode_s > 0 < batch[0].prefill_s
    assert [one.target_passes for one in batch] == [one.decoded_tokens for one in batch]


def test_one_token_needs_no_decoding_pass(generator):
    plain = generator.decode(PROMPT, 1, 0)["transformers"]
    assert (len(plain.output_ids), plain.decoded_tokens, plain.target_passes) == (1, 0, 0)


def test_sampling_follows_the_recipe_and_the_seed(target):
    generator = load_generator(TargetRecipe(), target, Sampling(1.0, 0, 1.0), {})
    texts = [generator.decode(PROMPT, 12, seed)["transformers"].output_ids for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_temperature_that_overflows_is_greedy(target, generator):
    """Our decoding treats it as greedy, too; dividing the logits used to give infinity."""
    cold = load_generator(TargetRecipe(), target, Sampling(1e-45, 0, 1.0), {})
    texts = [one.decode(PROMPT, 12, 1)["transformers"].output_ids for one in (cold, generator)]
    assert texts[0] == texts[1]


def test_the_generation_config_of_the_model_is_ignored(target, generator):
    """A repetition penalty in the model's files would silently change the baseline."""
    used = generator.model.generation_config
    assert not used.do_sample and used.repetition_penalty in (None, 1.0)
    assert used.eos_token_id == sorted(target.eos_ids)
