"""Exported drafters in vLLM: its counters show whether it drafts the same tokens as our own loop.

Both answer twelve prompts greedily in fp32. The texts must be equal, and so must the numbers of rounds, of drafted
tokens, and of accepted tokens at each position. A head that is read wrongly (a layer, a token or a norm off) would
still give the same text, so the counts are compared.
"""

import copy
import json
import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from specctl.commands import export as exporting
from specctl.decoding.models import linear
from specctl.decoding.models.loading import builtin_path
from specctl.decoding.sampling import GREEDY
from specctl.decoding.target import load_target
from specctl.distillation.generate import distill
from specctl.distillation.prompts import read_prompts
from specctl.drafters import checkpoint, pool
from specctl.drafters.dflash.drafter import CANDIDATES
from specctl.engines.vllm_proposer import KEY, TextProposer
from specctl.recipe import (
    DataRecipe,
    DistillRecipe,
    DrafterRecipe,
    DraftingRecipe,
    ExportRecipe,
    HeldOutRecipe,
    SamplingRecipe,
    TargetRecipe,
    TrainRecipe,
)
from specctl.runs import Run
from specctl.training import loop
from tests.lossless.drafters import own_weights
from tests.toys import mtp
from tests.toys.decoding import decode

ROOT = Path(__file__).parents[2]
PLACE = Path(os.environ.get("SPECCTL_VLLM") or ROOT / ".venv-vllm")
PYTHON = PLACE / "bin/python"
SCRIPT = Path(__file__).with_name("vllm_served.py")
PROMPTS, NEW, STEPS = 12, 40, 60
MEASURED = TargetRecipe(dtype="fp32", device="cpu")
TRITON, INTERPRETED = PLACE / "triton", Path(__file__).with_name("interpreted")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.is_file(), reason=f"no vLLM in {PLACE}: `make engines`, or name one by SPECCTL_VLLM"),
]


@dataclass
class Counts:
    """Rounds, drafted tokens, and how often the token at each position was accepted."""

    texts: list[list[int]]
    drafts: int = 0
    drafted: int = 0
    accepted_at: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def prompts(target):
    lines = read_prompts(DataRecipe(domain=["sql"], limit=PROMPTS), "sql", split="test")
    return [target.render(prompt.messages) for prompt in lines]


@pytest.fixture(scope="module")
def responses(target, tmp_path_factory):
    return distilled(target, MEASURED, tmp_path_factory.mktemp("distilled"))


def distilled(target, named, place):
    """A directory of short responses of a loaded target with the recipe `named`."""
    recipe = DistillRecipe(
        target=named,
        data=DataRecipe(domain=["sql"], limit=120),
        sampling=SamplingRecipe(max_new_tokens=32),
        batch_size=120,
        output_dir=place / "sql",
    )
    (place / "run").mkdir()
    distill(recipe, Run(place / "run"), target=target)
    return place / "sql"


def trained(family, responses, place, target=MEASURED, **options):
    """A drafter after a few training steps: some of its drafts are accepted, many are not."""
    recipe = TrainRecipe(
        target=target,
        arch=family,
        distilled=responses,
        drafter=DrafterRecipe(**options),
        max_steps=STEPS,
        eval=HeldOutRecipe(every=STEPS, prompts=1, max_new_tokens=8, fraction=0.1),
        output_dir=place,
    )
    loop.train_drafter(recipe, Run.create("train-drafter", recipe, place.with_suffix(".run")))
    return place


def disturbed(target, place):
    """The target itself as a draft LM, with noise on its weights."""
    module, kind = own_weights(target, 0.1), pool.load_family("lm")
    tensors = kind.stored_state(module.state_dict())
    return checkpoint.save(place, config=kind.checkpoint_config(module, target.identity), tensors=tensors, info={})


def loaded(directory, target, tokens):
    """A drafter of chains of `tokens` that computes in fp32, as engines do.

    On some CPUs ours rounds fp32 weights to fp16, and then chooses another of two draft tokens that are nearly equal.
    """
    drafting = DraftingRecipe(width=1, children=1, depth=tokens, nodes=tokens, stop_below=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "fits_half", lambda weight, rough: False)
        return pool.load_drafter(str(directory), target, drafting)


def here(directory, target, prompts, tokens):
    """Counts of our own loop for rounds that begin before token `NEW`. Texts end only by length, and the last draft has
    full length, as in vLLM."""
    endless = copy.copy(target)
    endless.eos_ids = frozenset()
    drafter = loaded(directory, endless, tokens)
    counts = Counts([], accepted_at=[0] * tokens)

    def see(state, draft, verdict):
        for row, path, committed, depth in zip(
            state.rows, verdict.paths, verdict.committed, verdict.depths, strict=True
        ):
            if len(row.output) - len(committed) < NEW:
                counts.drafts += 1
                counts.drafted += depth
                for place in range(len(path)):
                    counts.accepted_at[place] += 1

    taps = {"taps": drafter.taps} if drafter.taps else {}
    decoded = decode(
        endless, prompts, sampling=GREEDY, max_new_tokens=NEW + tokens + 1, seeds=[0] * len(prompts), drafter=drafter,
        share_rows=False, on_round=see, **taps,
    )  # fmt: skip
    counts.texts = [one.output_ids[:NEW] for one in decoded]
    return counts


def served(commands, prompts, place):
    """vLLM's counts with the configuration from the export's command line."""
    command = commands[0]
    words = shlex.split(command)
    model, speculative = words[words.index("serve") + 1], json.loads(words[-1])
    if speculative["method"] == "dspark":  # our Markov head chooses only among the likeliest tokens
        speculative["dspark_draft_topk"] = CANDIDATES
    job = {"target": model, "speculative": speculative, "prompts": prompts, "max_tokens": NEW}
    runner = {}
    if command.startswith("VLLM_USE_V2_MODEL_RUNNER=1 "):
        if not TRITON.is_dir():
            pytest.skip(f"no Triton in {TRITON}, which vLLM's V2 runner needs: `make engines`")
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": f"{INTERPRETED}{os.pathsep}{TRITON}"}
    return answered(job, place, **runner)


def answered(job, place, **environment):
    """vLLM's counts for a job of `vllm_served.py`."""
    (place / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [str(PYTHON), str(SCRIPT), str(place / "job.json"), str(place / "counts.json")],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((place / "counts.json").read_text())
    assert found["accepted"] == sum(found["accepted_at"])
    return Counts(found["texts"], found["drafts"], found["drafted"], found["accepted_at"])


def earlier(directory, place):
    """A copy of a drafter that reads the layers before its own taps."""
    shutil.copytree(directory, place)
    found = checkpoint.load(place)
    shape = found.config["architecture"]
    config = found.config | {"architecture": shape | {"taps": [tap - 1 for tap in shape["taps"]]}}
    return checkpoint.save(place, config=config, tensors=found.tensors, info={}, overwrite=True)


def with_one_key_norm(directory):
    """Give all layers of a block drafter the first layer's key norm, because vLLM 0.32 does so on a CPU: its `rms_norm`
    there reads one row of weights, but `_normalize_context_k` passes a row per layer."""
    found = checkpoint.load(directory)
    first = found.tensors["layers.0.self_attn.k_norm.weight"]
    tensors = {name: first if name.endswith("k_norm.weight") else one for name, one in found.tensors.items()}
    return checkpoint.save(directory, config=found.config, tensors=tensors, info={}, overwrite=True)


HEADS = {
    "eagle3": {},
    "eagle3 pruned": {"vocab_size": 1024},
    "eagle3 layers": {"vocab_size": 1024, "num_layers": 2},
    "eagle": {},
    "medusa": {"draft_heads": 3},
    "peagle": {"vocab_size": 1024, "num_layers": 2},
    "dflash": {"markov_rank": 0},
    "dflash pruned": {"markov_rank": 0, "vocab_size": 1024},
    "dspark": {},
    "dspark pruned": {"vocab_size": 1024},
    "dspark confident": {"confidence": True},
    "dflash2": {"conv_kernel_size": 4, "selector_rank": 32},
    "lm": {},
}


@pytest.mark.parametrize("name", HEADS)
def test_vllms_counts_equal_our_own(name, target, prompts, responses, tmp_path, capsys):
    family = {"dspark": "dflash", "dflash2": "dflash"}.get(name.split()[0], name.split()[0])
    if family == "lm":
        drafter = disturbed(target, tmp_path / "drafter")
    else:
        drafter = trained(family, responses, tmp_path / "drafter", **HEADS[name])
    if family == "dflash":
        with_one_key_norm(drafter)
    result = exporting.export(ExportRecipe(drafter=drafter, to="vllm", output_dir=tmp_path / "out", check=True))
    theirs = served(result.commands, prompts, tmp_path)
    ours = here(drafter, target, prompts, result.tokens)
    with capsys.disabled():
        print(
            f"\n{name}: {theirs.drafts} rounds, {theirs.drafted} drafted, accepted {theirs.accepted_at}; here", end=" "
        )
        print(f"{ours.drafts}, {ours.drafted}, {ours.accepted_at}")
    assert ours == theirs
    assert 0 < sum(ours.accepted_at) < ours.drafted
    if family in ("eagle3", "peagle", "dflash"):  # negative control: other taps give other counts
        assert here(earlier(drafter, tmp_path / "earlier"), target, prompts, result.tokens) != theirs


def test_vllms_counts_with_a_fine_tuned_mtp_layer_equal_our_own(prompts, tmp_path):
    """vLLM finds the layer in the exported directory of the target. Negative control: reading features after the final
    norm gives other counts."""
    native = TargetRecipe(name=mtp.as_mimo(tmp_path / "native"), dtype="fp32", device="cpu")
    target = load_target(**native.loading)
    # Another tokenizer class loads it, so it needs its own data.
    data = distilled(target, native, tmp_path)
    drafter = trained("mtp", data, tmp_path / "drafter", target=native)
    result = exporting.export(ExportRecipe(drafter=drafter, to="vllm", output_dir=tmp_path / "out", check=True))
    theirs = served(result.commands, prompts, tmp_path)
    assert here(drafter, target, prompts, result.tokens) == theirs
    assert 0 < sum(theirs.accepted_at) < theirs.drafted
    found = checkpoint.load(drafter)
    other = found.config | {"architecture": found.config["architecture"] | {"normed_features": True}}
    tensors = {name: tensor for name, tensor in found.tensors.items() if name != "target_norm"}
    behind = checkpoint.save(tmp_path / "behind", config=other, tensors=tensors, info={})
    assert here(behind, target, prompts, result.tokens) != theirs


TEXT = ["lookup", "suffix", "store", "store and lookup"]


@pytest.mark.parametrize("name", TEXT)
def test_text_drafters_in_vllm_keep_the_text_and_our_counts(name, target, prompts, responses, tmp_path, capsys):
    """Our proposer runs in vLLM's worker. The counts of `lookup` equal our own."""
    store = tmp_path / "store"
    if "store" in name:
        recipe = TrainRecipe(target=MEASURED, arch="retrieval", distilled=responses, output_dir=store)
        loop.train_drafter(recipe, Run.create("train-drafter", recipe, tmp_path / "run"))
    named = [str(store) if one == "store" else one for one in name.split(" and ")]
    spec = {"method": "custom_class", "model": f"{TextProposer.__module__}.TextProposer", "num_speculative_tokens": 7}
    job = {"target": str(builtin_path()), "speculative": spec, "prompts": prompts, "max_tokens": NEW}
    more = {"additional_config": {KEY: named}}
    theirs = answered(job | more, tmp_path, PYTHONPATH=str(ROOT))
    plain = here("none", target, prompts, 7)
    assert theirs.texts == plain.texts and 0 < sum(theirs.accepted_at) < theirs.drafted
    with capsys.disabled():
        print(f"\n{name}: {theirs.drafts} rounds, {theirs.drafted} drafted, accepted {theirs.accepted_at}")
    if name == "lookup":
        ours = here("lookup", target, prompts, 7)
        assert replace(ours, drafts=theirs.drafts) == theirs  # vLLM does not count rounds without a draft
