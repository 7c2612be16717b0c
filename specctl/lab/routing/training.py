"""Training a router: labels of prompts, the fit, and the accuracy on held-out prompts."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from specctl.decoding.target import Target
from specctl.errors import DataError, SpecctlError
from specctl.lab.recorded.hindsight import round_starts
from specctl.lab.recorded.trace import Table, of_arms
from specctl.lab.routing.perturb import perturb
from specctl.lab.routing.router import Router
from specctl.lab.train_router.recipe import Perturbation, RouterRecipe
from specctl.progress import Progress, interrupts, warn

CLIP = 1.0
WEIGHT_DECAY = 0.01  # usual for fine-tuning BERT, like the rate that rises and falls linearly
TIMED = 20  # prompts in the median latency


@dataclass(frozen=True)
class RouterExample:
    """A prompt, and the right arm for it."""

    text: str
    domain: str
    arm: int


@dataclass(frozen=True)
class RouterReport:
    """The accuracy of a router on the held-out prompts.

    Attributes:
        arms: names, in the order of the pool.
        trained, held_out: numbers of prompts.
        accuracy, per_domain: share of the held-out prompts routed to their arm, in all and per domain.
        confusion: domain → arm → number of the domain's held-out prompts that were routed there.
        perturbed: kind of perturbation → accuracy on the perturbed held-out prompts, at the recipe's strength.
        seconds: of the fit.
        ms_per_prompt: median time to classify one prompt, which a query pays once.
    """

    arms: list[str]
    trained: int
    held_out: int
    accuracy: float
    per_domain: dict[str, float]
    confusion: dict[str, dict[str, int]]
    perturbed: dict[Perturbation, float]
    seconds: float
    ms_per_prompt: float


def label_by_domain(domains: Sequence[str], made_for: Sequence[Sequence[str]]) -> dict[str, int]:
    """Domain → the arm made for it, given the domains of each arm (`domains_of`).

    Among several arms, it is the one made for the fewest domains, then the first. A domain that no arm was made for
    goes to the arm made for the most domains, if this is a generalist (more than one domain). Otherwise it has no
    label, and a warning says so.
    """
    labels, left_out = {}, []
    arms = range(len(made_for))
    generalist = max(arms, key=lambda arm: len(made_for[arm]), default=None)
    for domain in dict.fromkeys(domains):
        candidates = [arm for arm in arms if domain in made_for[arm]]
        if candidates:
            labels[domain] = min(candidates, key=lambda arm: len(made_for[arm]))
        elif generalist is not None and len(made_for[generalist]) > 1:
            labels[domain] = generalist
        else:
            left_out.append(domain)
    if left_out:
        warn(f"no drafter was made for {', '.join(left_out)}: the router is trained without these prompts")
    return labels


def label_by_hindsight(table: Table, arms: Sequence[str]) -> dict[str, int]:
    """Query → the arm that would have needed the fewest rounds for this query alone, the first one in a tie.

    Other arms of the table are left out. Raises CheckpointError if the table lacks one of `arms`.
    """
    return {
        trace.query: int(round_starts(trace.accepted).sum(axis=1).argmin()) for trace in of_arms(table, arms).traces
    }


def train_router(
    recipe: RouterRecipe, examples: Sequence[RouterExample], arms: list[str], target: Target
) -> tuple[Router, RouterReport]:
    """Fit a router for the pool with these arm names on a share of the examples, and measure it on the rest.

    On a CPU the same recipe and examples give the same router. Raises DataError (a split without prompts),
    CheckpointError (`recipe.model` cannot be used), SpecctlError (the loss is not finite).
    """
    train, held_out = split(examples, recipe)
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        router = Router.new(recipe, arms, target)
        router.model.to(target.device)
        _fit(router, train, recipe)
    seconds = time.perf_counter() - started
    return router, measure(router, held_out, recipe, trained=len(train), seconds=seconds)


def split(examples: Sequence[RouterExample], recipe: RouterRecipe) -> tuple[list[RouterExample], list[RouterExample]]:
    """Split examples into (for training, held out). A share of each domain is held out, drawn with the recipe's seed.
    Raises DataError if either part is empty."""
    train: list[RouterExample] = []
    held_out: list[RouterExample] = []
    for domain in dict.fromkeys(example.domain for example in examples):
        mine = [example for example in examples if example.domain == domain]
        Random(f"{recipe.seed}/{domain}").shuffle(mine)
        count = max(round(recipe.held_out * len(mine)), 1) if len(mine) > 1 else 0
        held_out += mine[:count]
        train += mine[count:]
    if not train or not held_out:
        raise DataError(
            f"{len(examples)} labeled prompts are too few to train a router on some and evaluate it on the others",
            hint="give at least two prompts of one domain; a few hundred per domain work well",
        )
    return train, held_out


def measure(
    router: Router, held_out: Sequence[RouterExample], recipe: RouterRecipe, *, trained: int, seconds: float
) -> RouterReport:
    """The accuracy of a router on these prompts, both unchanged and perturbed by the recipe."""
    right = np.array([example.arm for example in held_out])
    domains = np.array([example.domain for example in held_out])
    texts = [example.text for example in held_out]
    chosen = router.probabilities(texts).argmax(1)
    names = [str(name) for name in np.unique(domains)]
    routed = {name: Counter(router.arms[arm] for arm in chosen[domains == name]) for name in names}
    perturbed = {}
    for kind, strength in recipe.perturbations.items():
        changed = perturb_all(held_out, kind, strength, recipe.seed)
        perturbed[kind] = float((router.probabilities(changed).argmax(1) == right).mean())
    return RouterReport(
        arms=router.arms,
        trained=trained,
        held_out=len(held_out),
        accuracy=float((chosen == right).mean()),
        per_domain={name: float((chosen == right)[domains == name].mean()) for name in names},
        confusion={name: dict(counts.most_common()) for name, counts in routed.items()},
        perturbed=perturbed,
        seconds=seconds,
        ms_per_prompt=_latency_ms(router, texts[:TIMED]),
    )


def perturb_all(examples: Sequence[RouterExample], kind: Perturbation, strength: float, seed: int) -> list[str]:
    """Perturb every prompt with a separate generator; its foreign texts are the prompts of the other domains."""
    foreign = {
        domain: [example.text for example in examples if example.domain != domain]
        for domain in {example.domain for example in examples}
    }
    return [
        perturb(example.text, kind, strength, Random(f"{seed}/{kind}/{index}"), foreign[example.domain])
        for index, example in enumerate(examples)
    ]


def _fit(router: Router, examples: Sequence[RouterExample], recipe: RouterRecipe) -> None:
    """AdamW on the cross-entropy of the arms, in batches; their order is drawn with the recipe's seed."""
    from transformers import get_linear_schedule_with_warmup

    rows = router.encode([example.text for example in examples])
    arms = torch.tensor([example.arm for example in examples])
    steps = recipe.passes * math.ceil(len(rows) / recipe.batch_size)
    parameters = list(router.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=WEIGHT_DECAY)
    schedule = get_linear_schedule_with_warmup(optimizer, round(recipe.warmup * steps), steps)
    order = torch.Generator().manual_seed(recipe.seed)
    router.model.train()
    with Progress("train the router", steps, "steps") as bar:
        for _ in range(recipe.passes):
            for batch in torch.randperm(len(rows), generator=order).split(recipe.batch_size):
                interrupts.check()
                logits = router.logits([rows[i] for i in batch])
                loss = cross_entropy(logits, arms[batch].to(logits.device))
                if not loss.isfinite():
                    raise SpecctlError("the loss of the router is not finite", hint="lower router.lr")
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, CLIP)
                optimizer.step()
                schedule.step()
                bar.update(loss=loss.item())
    router.model.eval()


def _latency_ms(router: Router, texts: Sequence[str]) -> float:
    """Median milliseconds to classify a prompt, one at a time."""
    taken = []
    for text in texts:
        started = time.perf_counter()
        router.probabilities([text])
        taken.append(1000 * (time.perf_counter() - started))
    return median(taken)
