"""What the tests of `specctl online` share: heads that nobody has trained, a short stream, and runs over it."""

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
    command_for,
)
from specctl.runs import Run
from tests.toys import mtp

QUESTIONS = ["Name a colour.", "What is 3 + 4?", "Count to nine.", "Table: singer\nColumns: name", "Say hi."]
TIMES = {"elapsed_s", "tokens_per_s", "decode_s", "learn_s", "swap_s", "store_s", "prefill_s"}


def sure_target(place, path):
    """The random target at `path`, which has no preferences, made to have some: its drafters' trees grow deep."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.get_output_embeddings().weight.data *= 8
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(path).save_pretrained(place)
    return load_target(str(place), device="cpu", dtype="fp32")


def free_hybrids(monkeypatch):
    """Let rows and levels of hybrids cost next to nothing, so that a head always drafts."""
    free = costs.Costs(tuple(1 + 0.001 * rows for rows in costs.ROWS), first=0.001, level=0.001)
    monkeypatch.setattr("specctl.drafters.pool.costs_of", lambda *_: free)


def play_graphs(monkeypatch):
    """Let the CPU pretend to capture graphs: to play one runs its rounds. Returns the list of captured runs."""
    captured = []

    def capture(run, *_):
        captured.append(run)
        return SimpleNamespace(replay=run, pool=lambda: "pool")

    monkeypatch.setattr(graphs, "may_capture", lambda device, shape: True)
    monkeypatch.setattr(graphs, "WARM_UP", 1)
    monkeypatch.setattr(graphs, "capture", capture)
    return captured


def watch_device_rounds(monkeypatch):
    """Returns the list of the drafters that draft in rounds of the device, which run without graphs."""
    drafters, run = [], DeviceRounds.round
    monkeypatch.setattr(DeviceRounds, "round", lambda *args: (drafters.append(args[0].active_drafter), run(*args)))
    monkeypatch.setenv("SPECCTL_GRAPHS", "eager")
    return drafters


def write_head(place, target, family, seed=0, **sizes):
    """A drafter directory with a new head of a family, as training would begin with it."""
    torch.manual_seed(seed)
    own = pool.load_family(family)
    recipe = TrainRecipe(arch=family, drafter=DrafterRecipe(vocab_size=target.vocab_size, **sizes))
    random_layer = family == "mtp"  # the target has none
    head = mtp.head(target) if random_layer else own.build(recipe, target, lambda size: list(range(size)))
    return save(place, target, own, head)


def write_copy(place, target, path, noise):
    """The target at `path` itself as a drafter of family lm, its weights disturbed: one that is often right."""
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
    """Two prompts a chunk, six tokens an answer. Learning may take as long as it does, so that equal runs are equal."""
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
    """(result, document) of a run in `place`."""
    command = command_for(made)
    run = Run.create(command, made, place)
    found = pkgutil.resolve_name(api.FUNCTIONS[command])(made, run, target=target)
    return found, run.result(dataclasses.asdict(found))


def contents(place):
    """Of all files of a run, with the time of their last change."""
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    return [(str(path), path.stat().st_mtime_ns, path.read_bytes()) for path in files]


def lines(place):
    """chunks.jsonl."""
    return [json.loads(line) for line in (place / "chunks.jsonl").read_text().splitlines()]


def metrics(place):
    """metrics.jsonl."""
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


def answers(place):
    """records.parquet."""
    return pq.read_table(place / "records.parquet").to_pylist()


def timeless(rows):
    """What two equal runs have in common."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def weights(place, name):
    """Of the drafter that a run has left."""
    return checkpoint.load(place / "drafters" / name).tensors


def same_runs(one, other, names):
    """Bit for bit, but for the time that was needed."""
    assert timeless(lines(one)) == timeless(lines(other))
    assert timeless(metrics(one)) == timeless(metrics(other))
    assert timeless(answers(one)) == timeless(answers(other))
    for name in names:
        ours, theirs = weights(one, name), weights(other, name)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours), name
