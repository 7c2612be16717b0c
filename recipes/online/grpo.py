#!/usr/bin/env python3
# RL with trl: GRPO with roll-outs from a drafter that keeps learning, against a fixed drafter and none
"""Train a policy three times with the same seed, and compare its roll-outs.

    specctl distill --target builtin --domain math sampling.temperature=1.0
    specctl train-drafter --target builtin --domain math
    specctl recipes cp online/grpo . && python grpo.py --drafter drafters/math-eagle3

The reward checks the arithmetic of answers to word problems. For your own training, replace `reward` and the prompts.
The rest is `rollout_func=DraftedRollouts(...)`.
"""

import argparse
import math
import operator
import re
from statistics import mean

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from specctl import data_prep
from specctl.adaptation.rollouts import DraftedRollouts
from specctl.decoding.models.loading import builtin_path
from specctl.recipe.online import DrafterStreamRecipe

NUMBER = r"(\d+(?:\.\d+)?)"
EQUATION = re.compile(rf"{NUMBER}\s*([-+*/])\s*{NUMBER}\s*=\s*{NUMBER}")
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": lambda a, b: a / b if b else math.nan}


def reward(completions, **_):
    """Grade of each text from 0 to 1: half for the share of its equations that are right, half for a final answer
    (`#### c`) that is the result of its last equation."""
    return [grade(completion[0]["content"]) for completion in completions]


def grade(text):
    found = EQUATION.findall(text)
    if not found:
        return 0.0
    right = [abs(OPERATIONS[sign](float(a), float(b)) - float(c)) < 0.01 for a, sign, b, c in found]
    return sum(right) / len(found) / 2 + (f"#### {found[-1][3]}" in text) / 2


def train(options, rollouts):
    """Train the policy with these roll-outs. Returns its reward at every step."""
    model = builtin_path() if options.model == "builtin" else options.model
    prompts = data_prep.get("math").generate(options.steps * options.prompts, seed=options.seed)
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward,
        GRPOConfig(
            options.output,
            max_steps=options.steps,
            per_device_train_batch_size=options.prompts * options.generations,
            num_generations=options.generations,
            max_completion_length=options.tokens,
            temperature=options.temperature,
            learning_rate=options.lr,
            seed=options.seed,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in prompts]),
        processing_class=AutoTokenizer.from_pretrained(model),
        rollout_func=rollouts,
    )
    trainer.train()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def total(batches, name):
    """Sum of a field of all batches."""
    return sum(getattr(batch, name) for batch in batches)


def report(name, batches, plain, rewards):
    """Print a line of the table: the first and the last quarter of the steps, and the speed of all, over `plain`."""
    part = max(len(rewards) // 4, 1)
    first, last = (total(some, "tokens") / total(some, "passes") for some in (batches[:part], batches[-part:]))
    learned = sum(batch.lesson == "updated" for batch in batches)
    tokens, decode_s, learn_s = (total(batches, field) for field in ("tokens", "decode_s", "learn_s"))
    plain_speed = total(plain, "tokens") / total(plain, "decode_s")
    gross, net = (tokens / seconds / plain_speed for seconds in (decode_s, decode_s + learn_s))
    print(
        f"{name:6}  reward {mean(rewards[:part]):.4f} → {mean(rewards[-part:]):.4f}   {tokens:,} tokens"
        f"   mat {first:.3f} → {last:.3f}   {learned} lessons   {gross:.2f} × plain, net of learning {net:.2f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", required=True, help="drafter directory with weights, made for the model")
    parser.add_argument("--model", default="builtin", help="policy to start from: builtin, a directory, or an id")
    parser.add_argument("--output", default="grpo", help="directory of the trainer, and of the learned drafter")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=5, help="prompts per step")
    parser.add_argument("--generations", type=int, default=8, help="texts per prompt")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of a text")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate of the policy")
    parser.add_argument("--budget", type=float, help="share of the time of the roll-outs for learning (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    learner = {"budget": options.budget}
    contenders = {
        "plain": DraftedRollouts(None),
        "static": DraftedRollouts(options.drafter, DrafterStreamRecipe(algo=["static"])),
        "ogd": DraftedRollouts(options.drafter, DrafterStreamRecipe(algo=["ogd"], learner=learner)),
    }
    rewards = {}
    for name, rollouts in contenders.items():
        rewards[name] = train(options, rollouts)
        report(name, rollouts.batches, contenders["plain"].batches, rewards[name])
    steps = zip(*rewards.values(), strict=True)
    same = next((step for step, row in enumerate(steps) if len({*row}) > 1), options.steps)
    print(f"rewards are equal in the first {same} of {options.steps} steps")  # up to a draw that rounding moves
    print("learned drafter:", contenders["ogd"].save(f"{options.output}/drafter"))


if __name__ == "__main__":
    main()
