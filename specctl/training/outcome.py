"""The report of `train-drafter` on the drafter it made: acceptance on held-out prompts, drafter.json, the result."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

from specctl.decoding import metrics
from specctl.decoding.loop import decode
from specctl.decoding.prompt_features import kind_of
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import Target
from specctl.drafters import checkpoint
from specctl.recipe import TrainRecipe
from specctl.runs import to_json
from specctl.training.data import Corpus


@dataclass(frozen=True)
class TrainResult:
    """The result document. `tokens_per_s` counts response tokens over the time spent in training steps (or collecting);
    `mat` and `acceptance_by_position` are those of the kept drafter on held-out prompts that had no part in choosing
    it, `choosing_mat` its mat on those that had, the best of all checks; NaN (null in JSON) without any. Where the
    target's layers were not loaded, `expected_mat` and `choosing_expected_mat` are there instead: no measurement, see
    `expected.py`."""

    arch: str
    domain: str
    params: int
    steps: int
    train_tokens: int
    tokens_per_s: float
    final_loss: float
    mat: float
    acceptance_by_position: list[float]
    drafter: str
    choosing_mat: float = math.nan
    expected_mat: float = math.nan
    choosing_expected_mat: float = math.nan


def held_out_acceptance(
    recipe: TrainRecipe, target: Target, prompts: list[list[int]], drafter: Drafter
) -> tuple[float, list[float]]:
    """mat and acceptance by position of `drafter` on held-out prompts, decoded greedily; (NaN, []) without any."""
    if not prompts:
        return math.nan, []
    decoded = greedily(target, prompts, recipe.eval.max_new_tokens, drafter)
    mat = metrics.mat(decoded)
    return 1.0 if mat is None else mat, [share or 0.0 for share in metrics.acceptance_by_position(decoded)]


def greedily(target: Target, texts: list[list[int]], max_new_tokens: int, drafter: Drafter) -> list[Decoded]:
    """Greedy answers to texts, each decoded by itself as far as rounding goes."""
    return decode(
        target,
        texts,
        sampling=GREEDY,
        max_new_tokens=max_new_tokens,
        seeds=[0] * len(texts),
        drafter=drafter,
        share_rows=False,
    )


def facts(
    recipe: TrainRecipe,
    corpus: Corpus,
    *,
    steps: int,
    tokens: int,
    mat: dict[str, float],
    expected: dict[str, float] | None = None,
) -> dict[str, Any]:
    """drafter.json: where the drafter comes from, and how well it drafts, or is expected to."""
    told = {"expected_mat": expected} if expected else {}
    return {
        "domain": corpus.domains,
        "data_fingerprint": corpus.fingerprint,
        "recipe": recipe_hash(recipe),
        "steps": steps,
        "train_tokens": tokens,
        "mat": mat,
        **told,
        "licence": "that of the target",
    }


def kinds_of(target: Target, corpus: Corpus, drafter: Drafter) -> dict[str, Any]:
    """The kinds of prompts that a drafter was trained on, as drafter.json has them: for every domain the mean of their
    features, by the target's states of `taps`, and its error. `select` learns no more of the prompts."""
    taps = drafter.taps or (target.num_layers,)
    kinds = {}
    for domain, prompts in corpus.prompts.items():
        mean, error = kind_of(target, prompts, taps)
        kinds[domain] = {"mean": [float(f"{value:.4g}") for value in mean], "error": round(error, 4)}
    return {"taps": list(taps), "kinds": kinds}


def mats(corpus: Corpus, *, reported: float = math.nan, choosing: float = math.nan) -> dict[str, float]:
    """mat by the prompts it was measured on, as cards have it; what was not measured is left out."""
    name = "held-out " + "+".join(corpus.domains)
    measured = {name: reported, f"{name}, prompts that chose it": choosing}
    return {key: round(value, 3) for key, value in measured.items() if not math.isnan(value)}


def made_of(recipe: TrainRecipe, target: Target, corpus: Corpus) -> dict[str, str]:
    """Digests of what a recipe only names: another one behind the same name makes another drafter."""
    digests = {"data": corpus.fingerprint, "target": target.identity["weights"] or ""}
    return digests | ({"init": checkpoint.fingerprint(recipe.init)} if recipe.init else {})


def recipe_hash(recipe: TrainRecipe) -> str:
    """16 hex digits over what decides the weights: everything but where and how the run is recorded or continued, and
    where features are kept."""
    values: dict[str, Any] = recipe.model_dump(
        mode="json", exclude={"resume", "overwrite", "output_dir", "log", "resources", "features"}
    )
    return hashlib.sha256(to_json(values).encode()).hexdigest()[:16]
