"""A target that reinforcement learning moves: python -m tests.benchmarks.drifting PROMPTS OUT [STEPS [EVERY]]

GRPO (trl) on the built-in target; the reward of an answer is the F1 of its words with those of the reference
(`response` beside every `prompt` of PROMPTS, a JSONL file). OUT/checkpoint-N are targets for `specctl online
--target-schedule` (OnlineSpec, appendix C.4), one after EVERY steps.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from specctl.decoding.models.loading import builtin_path

TOKENS = 64  # of an answer, at most
RATE = 2e-4
ANSWERS, PROMPTS = 4, 4  # of each prompt; a step


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the words."""
    words, wanted = answer.lower().split(), reference.lower().split()
    both = sum((Counter(words) & Counter(wanted)).values())
    return 2 * both / (len(words) + len(wanted)) if both else 0.0


def reward(completions, response, **_):
    """Of every answer."""
    return [f1(answer[0]["content"], wanted) for answer, wanted in zip(completions, response, strict=True)]


def main() -> None:
    path, out, *counts = sys.argv[1:]
    steps, every = [*map(int, counts), *(60, 20)[len(counts) :]]
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "response": row["response"]} for row in rows]
    )
    options = GRPOConfig(
        output_dir=out,
        max_steps=steps,
        save_strategy="steps",
        save_steps=every,
        save_only_model=True,
        per_device_train_batch_size=ANSWERS * PROMPTS,
        num_generations=ANSWERS,
        max_completion_length=TOKENS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=10,
        seed=0,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(builtin_path(), dtype=torch.float32),
        reward_funcs=reward,
        args=options,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(builtin_path()),
    )
    trainer.train()


if __name__ == "__main__":
    main()
