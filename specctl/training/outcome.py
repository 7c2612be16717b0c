"""Outcome of `train-drafter`: acceptance on held-out prompts, drafter.json, and the result document."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

from specctl.decoding import metrics
from specctl.decoding.controllers import Fixed
from specctl.decoding.engine import Engine, EngineOptions
from specctl.decoding.offline import decode
from specctl.decoding.prompt_features import cluster_of, features_at
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import Decoded, Request
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import Target
from specctl.drafters import checkpoint
from specctl.progress import log
from specctl.recipe import TrainRecipe
from specctl.runs import to_json
from specctl.training.data import Corpus, PromptIds


@dataclass(frozen=True)
class TrainResult:
    """Result document of `train-drafter`.

    `tokens_per_s` counts response tokens over the time spent in training steps (or in collecting). `mat` and
    `acceptance_by_position` are measured with the kept drafter on held-out prompts that had no part in choosing it.
    `choosing_mat` is its mat on the prompts that chose it, the best of all checks. Each is NaN (null in JSON) if there
    are no such prompts. If the target's layers were not loaded, `expected_mat` and `choosing_expected_mat` take their
    place. These two are not measured, see `expected_length.py`.
    """

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
    recipe: TrainRecipe, target: Target, prompts: list[PromptIds], drafter: Drafter
) -> tuple[float, list[float]]:
    """Decode held-out prompts greedily, each with its adapter. Return mat and acceptance by position; (NaN, []) without
    prompts. With several adapters, the mat of each is logged."""
    decoded: list[Decoded] = []
    by_adapter = group_by_adapter(target, prompts)
    for adapter, texts in by_adapter.items():
        target.use_adapter(adapter)
        here = decode_greedily(target, texts, recipe.eval.max_new_tokens, drafter)
        if len(by_adapter) > 1:
            log(f"mat with {adapter or 'no adapter'}: {metrics.mat(here) or 1.0:.2f}")
        decoded += here
    if not decoded:
        return math.nan, []
    mat = metrics.mat(decoded)
    return 1.0 if mat is None else mat, [share or 0.0 for share in metrics.acceptance_by_position(decoded)]


def group_by_adapter(target: Target, prompts: list[PromptIds]) -> dict[str | None, list[list[int]]]:
    """Ids of prompts by adapter. The target's present adapter comes first."""
    found: dict[str | None, list[list[int]]] = {}
    for prompt in sorted(prompts, key=lambda prompt: prompt.adapter != target.adapter):
        found.setdefault(prompt.adapter, []).append(prompt.ids)
    return found


def decode_greedily(target: Target, texts: list[list[int]], max_new_tokens: int, drafter: Drafter) -> list[Decoded]:
    """Decode texts greedily. Up to rounding, each is decoded as if it were alone. A signal does not stop it: training
    saves a checkpoint after it."""
    engine = Engine(target, Fixed.of(drafter), EngineOptions(share_rows=False))
    return decode(engine, [Request(text, GREEDY, max_new_tokens) for text in texts], stoppable=False)


def drafter_info(
    recipe: TrainRecipe,
    corpus: Corpus,
    *,
    steps: int,
    tokens: int,
    mat: dict[str, float],
    expected: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Contents of drafter.json: where the drafter comes from, and its measured or expected mat."""
    return {
        "domain": corpus.domains,
        "data_fingerprint": corpus.fingerprint,
        "recipe": recipe_hash(recipe),
        "steps": steps,
        "train_tokens": tokens,
        **({"texts": corpus.counts} if corpus.counts else {}),
        "mat": mat,
        **({"expected_mat": expected} if expected else {}),
        "licence": "same as the target",
    }


def kinds_of(target: Target, corpus: Corpus, drafter: Drafter) -> dict[str, Any]:
    """Kinds of prompts that a drafter was trained on, for drafter.json: per domain, the mean features of its prompts
    and the error of this mean. The features are made of the target's states at `taps`. `select` learns nothing else
    about the prompts."""
    taps = drafter.taps or (target.num_layers,)
    kinds = {}
    for domain, prompts in corpus.prompts.items():
        features = []
        for adapter, texts in group_by_adapter(target, prompts).items():
            target.use_adapter(adapter)
            features += features_at(target, texts, taps)
        mean, error = cluster_of(features)
        kinds[domain] = {"mean": [float(f"{value:.4g}") for value in mean], "error": round(error, 4)}
    return {"taps": list(taps), "kinds": kinds}


def mat_by_prompts(corpus: Corpus, *, reported: float = math.nan, choosing: float = math.nan) -> dict[str, float]:
    """mat by the prompts on which it was measured, in the form that cards show. Missing measurements are left out."""
    name = "held-out " + "+".join(corpus.domains)
    measured = {name: reported, f"{name}, prompts that chose it": choosing}
    return {key: round(value, 3) for key, value in measured.items() if not math.isnan(value)}


def input_digests(recipe: TrainRecipe, target: Target, corpus: Corpus) -> dict[str, str]:
    """Digests of the data, target and init that a recipe only names; new contents under an old name change them."""
    digests = {"data": corpus.fingerprint, "target": target.identity["weights"] or ""}
    return digests | ({"init": checkpoint.fingerprint(recipe.init)} if recipe.init else {})


def deciding(recipe: TrainRecipe) -> dict[str, Any]:
    """All settings that decide the weights. Settings for recording, continuing, resources and the storage of features
    are left out."""
    return recipe.model_dump(mode="json", exclude={"resume", "overwrite", "output_dir", "log", "resources", "features"})


def recipe_hash(recipe: TrainRecipe) -> str:
    """16 hex digits over all settings that decide the weights."""
    return hashlib.sha256(to_json(deciding(recipe)).encode()).hexdigest()[:16]
