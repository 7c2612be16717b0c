"""Helpers for tests of `specctl online`: untrained heads, a short stream, and runs over it."""

import dataclasses
import json
import pkgutil
from types import SimpleNamespace

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specctl import api
from specctl.decoding.device import graphs
from specctl.decoding.device.rounds import DeviceRounds
from specctl.decoding.target import load_target
from specctl.drafters import checkpoint, pool
from specctl.drafters.hybrid import costs
from specctl.drafters.lm.drafter import FAMILY as lm
from specctl.drafters.lm.model import LM
from specctl.recipe import (
    DataRecipe,
    DrafterRecipe,
    OnlineRecipe,
    SamplingRecipe,
    TargetRecipe,
    TrainRecipe,
)
from specctl.recipe.resolve import command_for
from specctl.runs import Run
from tests.toys import mtp

QUESTIONS = ["Name a colour.", "What is 3 + 4?", "Count to nine.", "Table: singer\nColumns: name", "Say hi."]
TIMES = {"elapsed_s", "tokens_per_s", "decode_s", "learn_s", "swap_s", "store_s", "prefill_s"}


def sure_target(place, path):
    """Copy the random target at `path` with sharper logits, so that draft trees grow deep."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.get_output_embeddings().weight.data *= 8
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(path).save_pretrained(place)
    return load_target(str(place), device="cpu", dtype="fp32")


def free_hybrids(monkeypatch):
    """Set the costs of hybrids near zero, so that a head always drafts."""
    free = costs.Costs(tuple(1 + 0.001 * rows for rows in costs.ROWS), first=0.001, level=0.001)
    monkeypatch.setattr("specctl.drafters.pool.costs_of", lambda *_: free)


def play_graphs(monkeypatch):
    """Replace CUDA graph capture by running the function again; return the list of captures."""
    captured = []

    def capture(run, *_):
        captured.append(run)
        return SimpleNamespace(replay=run, pool=lambda: "pool")

    monkeypatch.setattr(graphs, "may_capture", lambda device, shape: True)
    monkeypatch.setattr(graphs, "WARM_UP", 1)
    monkeypatch.setattr(graphs, "capture", capture)
    return captured


def watch_device_rounds(monkeypatch):
    """Run device rounds without graphs; return a list that collects their drafters."""
    drafters, run = [], DeviceRounds.round
    monkeypatch.setattr(DeviceRounds, "round", lambda *args: (drafters.append(args[0].active_drafter), run(*args)))
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    return drafters


def write_head(place, target, family, seed=0, **sizes):
    """Save a drafter directory with a new, untrained head."""
    torch.manual_seed(seed)
    own = pool.load_family(family)
    if family == "mtp":  # the target has no MTP layer
        return save(place, target, own, mtp.head(target))
    recipe = TrainRecipe(arch=family, drafter=DrafterRecipe(vocab_size=target.vocab_size, **sizes))
    return save(place, target, own, own.build(recipe, target, lambda size: list(range(size))))


def write_copy(place, target, path, noise):
    """Save the target at `path` with disturbed weights as an `lm` drafter that is often right."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data += noise * weight.std(correction=0) * torch.randn_like(weight)
    return save(place, target, lm, LM(model))


def save(place, target, family, head):
    tensors = family.stored_state(head.state_dict())
    config = family.checkpoint_config(head, target.identity)
    return checkpoint.save(place, config=config, tensors=tensors, info={"domain": ["sql"], "mat": {"sql": 2.0}})


def write_prompts(place, questions=QUESTIONS, name="prompts.jsonl"):
    path = place / name
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    return path


def recipe(prompts, init, target, model=OnlineRecipe, **fields):
    """Return a recipe with two prompts per chunk and six tokens per answer.

    Learning time is unlimited, so that equal runs are equal.
    """
    if model is OnlineRecipe:
        fields = {"beside": "none", "baselines": ["vanilla", "static", "lookup"], **fields}
    learner = {"budget": None, **fields.pop("learner", {})}
    sampling = {"max_new_tokens": 6, **fields.pop("sampling", {})}
    stream = {"chunk": 2, **fields.pop("stream", {})}
    data = {"domain": ["sql"], "prompts": str(prompts), **fields.pop("data", {})}
    found = {"arch": checkpoint.family(init), "target": TargetRecipe(name=target.name, dtype="fp32", device="cpu")}
    return model(
        **found
        | {"data": DataRecipe(**data), "sampling": SamplingRecipe(**sampling), "stream": stream, "init": init}
        | {"learner": learner}
        | fields
    )


def learnt(place, made, target):
    """Run a recipe in `place`; return (result, document)."""
    command = command_for(made)
    run = Run.create(command, made, place)
    found = pkgutil.resolve_name(api.FUNCTIONS[command])(made, run, target=target)
    return found, run.result(dataclasses.asdict(found))


def contents(place):
    """Return name, modification time and content of every file of a run."""
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    return [(str(path), path.stat().st_mtime_ns, path.read_bytes()) for path in files]


def lines(place):
    """Return the rows of chunks.jsonl."""
    return [json.loads(line) for line in (place / "chunks.jsonl").read_text().splitlines()]


def metrics(place):
    """Return the rows of metrics.jsonl."""
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


def answers(place):
    """Return the rows of records.parquet."""
    return pq.read_table(place / "records.parquet").to_pylist()


def timeless(rows):
    """Return rows without their timings."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def weights(place, name):
    """Return the weights of a drafter saved by a run."""
    return checkpoint.load(place / "drafters" / name).tensors


def same_runs(one, other, names):
    """Check that two runs are equal bit for bit except for timings."""
    assert timeless(lines(one)) == timeless(lines(other))
    assert timeless(metrics(one)) == timeless(metrics(other))
    assert timeless(answers(one)) == timeless(answers(other))
    for name in names:
        ours, theirs = weights(one, name), weights(other, name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), name
