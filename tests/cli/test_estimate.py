"""The estimate of `train-drafter --dry-run` for the targets of papers, offline from their configurations."""

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from transformers import AutoConfig

from specctl.drafters.pool import FAMILIES
from specctl.engines import vllm
from specctl.engines.records import HiddenStatesSpec
from specctl.recipe.resolve import command_of, resolve, shipped
from tests.conftest import write_tiny
from tests.toys.gguf import write

LLAMA2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA31 = LLAMA2 | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "meta-llama/Llama-3.1-8B-Instruct": (LLAMA31, 8.03e9),
    "meta-llama/Llama-2-7b-chat-hf": (LLAMA2, 6.74e9),
    "lmsys/vicuna-7b-v1.3": (LLAMA2 | {"max_position_embeddings": 2048}, 6.74e9),
    "Qwen/Qwen3-8B": (QWEN3, 8.19e9),
    "Qwen/Qwen3-32B": (
        QWEN3 | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
        32.76e9,
    ),
}
"""Hugging Face id → its configuration and its published number of parameters."""
PAPERS = [
    name for name in shipped() if name.startswith("train-drafter/") and name.count("-") > 1 and "llama-cpp" not in name
]


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A Hugging Face cache with only the targets' configurations; the hub is offline."""
    cache = tmp_path / "hub"
    for name, (config, _) in CONFIGS.items():
        model = cache / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs/main").write_text("0" * 40)
        (snapshot / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", PAPERS)
def test_paper_recipes_are_estimated_from_the_cache(specctl, hub_cache, name):
    done = specctl.ok("train-drafter", "--recipe", name, "--dry-run", "--json")
    found, recipe = done.json["estimate"], done.json["recipe"]
    assert (found is not None) == (recipe["arch"] in FAMILIES)
    if found is not None:
        assert found["target_parameters"] == pytest.approx(CONFIGS[recipe["target"]["name"]][1], rel=0.002)
        assert found["fits"], "a recipe that does not fit the machine it names"
        assert (found["gpu"], found["gpus"]) == ("h100-80g", 8)
        assert sum(line.startswith("estimate:") for line in done.json["steps"]) == 4
        assert any("assumption" in line for line in done.json["steps"])
    assert "lean step" in done.json["steps"][0], "the configuration in the cache was not looked at"


@pytest.mark.parametrize("name", ["llama-3.1-8b-instruct-eagle3", "llama-3.1-8b-instruct-eagle3-stream"])
def test_a_plan_does_not_ask_the_hub(specctl, hub_cache, monkeypatch, name):
    """A recipe with sizes of its drafter, and a training on served features, looked the target up there."""
    asked, real = [], AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda where, **more: asked.append(where) or real(where, **more))
    specctl.ok("train-drafter", "--recipe", f"train-drafter/{name}", "--dry-run", "features.whole_target=null")
    assert asked and all(Path(where).is_dir() for where in asked)


def test_the_plan_of_several_heads_names_them_and_the_launcher(specctl, hub_cache):
    """The same four lines stood there three times, and a plain command runs one process on a machine of eight GPUs."""
    machine = ["resources.gpu=h100-80g", "resources.gpus=8", "--features-from", "http://127.0.0.1:9"]
    target = ["--target", "meta-llama/Llama-3.1-8B-Instruct", "epochs=1"]
    steps = specctl.ok(
        "train-drafter", *target, "--domain", "sql,math", "--each", *machine, "--dry-run", "--json"
    ).json["steps"]
    assert sum("with torchrun --nproc-per-node 8 -m specctl" in step for step in steps) == 1
    assert sum(step.startswith("start a server with: vllm") for step in steps) == 1
    for name in ("sql-eagle3", "math-eagle3"):
        assert sum(step.startswith(f"estimate for {name}: ") for step in steps) == 4
    assert steps[-1].startswith("estimate for all 2 drafters, one after the other: ")
    assert any("train eagle3 for 1 epoch with" in step for step in steps)


def test_without_the_configuration_the_plan_says_it_is_missing(specctl, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    done = specctl.ok("train-drafter", "--recipe", "train-drafter/qwen3-8b-eagle3", "--dry-run", "--json")
    assert done.json["estimate"] is None
    assert "config.json" in done.json["steps"][-1]


def test_a_target_that_is_neither_path_nor_id_is_refused(specctl):
    done = specctl("train-drafter", "--target", "a/b/c", "--dry-run")
    assert done.code == 4
    assert "a/b/c" in done.err


def test_existing_data_is_counted(specctl, distilled, tmp_path):
    distilled(tmp_path / "distilled/sql")
    found = specctl("train-drafter", "--dry-run", "--json").json["estimate"]
    assert (found["responses"], found["response_tokens"], found["texts_counted"]) == (1, 1, True)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["zero_stage=1", "deepspeed=deepspeed/zero2"], "contradicts"),
        (["deepspeed=deepspeed/zero2", "optimizer.type=muon", "deepspeed.gradient_clipping=1.0"], "optimizer.clip"),
        (['deepspeed={"zero_optimization": {"stage": 5}}'], "from 0 to 3"),
        (['deepspeed={"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}'], "cannot be nvme"),
        (['deepspeed={"bf16": {"enabled": true}}'], "precision"),
    ],
)
def test_contradictory_engine_options_are_recipe_errors(specctl, argv, says):
    done = specctl("train-drafter", "--dry-run", *argv)
    assert done.code == 2
    assert says in done.err


def stand_ins(place, **programs):
    """Return the environment of a two-node job, with stand-ins for Slurm and for `programs` (name, shell body).

    As in Slurm, a task has one core unless srun is told, and a number of tasks in the job's environment wins over
    --ntasks-per-node. A signal goes to all processes of a task.
    """
    programs = {
        "srun": 'tasks=$SLURM_NTASKS\nwhile [ "${1#--}" != "$1" ]; do\n'
        '[ "${1%=*}" = --ntasks ] && tasks=${1#*=}\nshift\ndone\n'
        "export SLURM_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-1} SLURM_STEP_NUM_TASKS=$tasks SLURM_NTASKS=$tasks\n"
        'set -m\nSLURM_PROCID=3 SLURM_LOCALID=3 "$@" &\n'
        'task=$!\ntrap "kill -- -$task" TERM\nwait $task\nwait $task',
        "scontrol": f'[ "$1" = show ] && printf "node1\\nnode2\\n" || echo "$@" >> {place}/requeued',
    } | programs
    for name, body in programs.items():
        program = place / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{body}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NTASKS": "16", "SLURM_NNODES": "2"}
    slurm |= {"SLURM_CPUS_PER_TASK": "8"}
    return os.environ | slurm | {"PATH": f"{place}/bin:{os.environ['PATH']}"}


def test_the_slurm_script_runs_and_its_commands_parse(specctl, distilled, hub_cache, tmp_path):
    """Run the script with stand-ins for Slurm and specctl, then dry-run each specctl command it called."""
    script = shipped()["slurm/train-drafter"]
    work = tmp_path / "work"
    work.mkdir()
    called = f"printf '%s\\0' \"$@\" end >> {tmp_path}/calls\nexit $(cat {tmp_path}/code)"
    environment = stand_ins(tmp_path, specctl=called) | {"WORK": str(work)}

    def run(code: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / "code").write_text(str(code))
        return subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, cwd=tmp_path)

    assert run(75).returncode == 75
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    (tmp_path / "calls").unlink()
    done = run(0)
    assert done.returncode == 0, done.stderr
    distilled(work / "distilled")
    calls = [call.strip("\0").split("\0") for call in (tmp_path / "calls").read_text().split("end\0") if call]
    assert [call[0] for call in calls] == ["distill", "train-drafter", "train-drafter"]
    for call in calls:
        planned = specctl.ok(*(word for word in call if word != "--dry-run"), "--dry-run", "--json")
        assert planned.json["recipe"]["target"]["name"] == "meta-llama/Llama-3.1-8B-Instruct"

    environment |= {"DOMAIN": "sql", "DATA": "of-a-log"}  # data of one's own used to need changes in the script
    (tmp_path / "calls").unlink()
    assert run(0).returncode == 0
    calls = [call.strip("\0").split("\0") for call in (tmp_path / "calls").read_text().split("end\0") if call]
    assert [call[0] for call in calls] == ["train-drafter", "train-drafter"]
    assert all(f"distilled={tmp_path}/of-a-log" in call and call[call.index("--domain") + 1] == "sql" for call in calls)
    environment |= {"PROMPTS": "my prompts.jsonl", "DATA": "", "WORK": str(tmp_path / "new")}
    (tmp_path / "calls").unlink()
    assert run(0).returncode == 0
    first = (tmp_path / "calls").read_text().split("end\0")[0].split("\0")
    assert first[0] == "distill" and f"--prompts={tmp_path}/my prompts.jsonl" in first
    assert "data.source=public" not in first


def test_the_tasks_of_a_slurm_step(tmp_path):
    """With fewer tasks than GPUs all of a node's GPUs got tasks, and each computed with eight threads on one core. The
    token of `hf auth login` was looked for beside the weights. The plan was made for another ZeRO stage."""
    said = 'echo $1 $WORLD_SIZE $LOCAL_WORLD_SIZE $SLURM_CPUS_PER_TASK $OMP_NUM_THREADS $HF_TOKEN_PATH "$@" >> '
    environment = stand_ins(tmp_path, specctl=f"{said}{tmp_path}/calls")
    environment = {name: value for name, value in environment.items() if not name.startswith(("HF_", "XDG_"))}
    environment |= {"WORK": str(tmp_path / "work"), "TASKS": "4", "HOME": "/home/me", "WORLD_SIZE": "-"}
    script = shipped()["slurm/train-drafter"]
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    distil, plan, train = (tmp_path / "calls").read_text().splitlines()
    token = "/home/me/.cache/huggingface/token"
    assert distil.startswith(f"distill - 4 8 8 {token} ") and "--shard 3/8 " in distil
    assert train.startswith(f"train-drafter 8 4 8 8 {token} ")
    assert "zero_stage=2" in plan.split() and "zero_stage=2" in train.split()


@pytest.mark.parametrize("code", [1, 75])
def test_a_failed_process_ends_the_training_step(tmp_path, code):
    """The others of a process that failed waited for it for half an hour. A process that has saved still ends alone."""
    srun = """while [ "${1#--}" != "$1" ]; do [ "${1%=*}" = --kill-on-bad-exit ] && bad=${1#*=}; shift; done
set -m
export SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=2
SLURM_PROCID=0 "$@" &
SLURM_PROCID=1 "$@"
code=$?
[ $code -ne 0 ] && [ $bad -eq 1 ] && kill -KILL -- -$!
wait $!
other=$?
exit $((code > other ? code : other))"""
    waits = "sleep 100" if code == 1 else f"sleep 0.5; touch {tmp_path}/saved; exit 75"
    specctl = f'[[ "$1" = distill || "$*" = *--dry-run* ]] && exit\n[ $RANK = 1 ] && exit {code}\n{waits}'
    environment = stand_ins(tmp_path, srun=srun, specctl=specctl) | {"WORK": str(tmp_path / "work")}
    script = shipped()["slurm/train-drafter"]
    done = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True, timeout=90)
    assert (done.returncode == 75) == (code == 75) and done.returncode, done.stderr
    assert (tmp_path / "requeued").exists() == (tmp_path / "saved").exists() == (code == 75)


def test_the_slurm_stream_script_starts_engines_and_trainers(specctl, hub_cache, distilled, tmp_path):
    """Each task of the first node starts an engine with the plan's command and a shared directory; then the trainers
    start.

    After a signal, the script waits for the trainers and requeues the job.
    """
    states = HiddenStatesSpec("meta-llama/Llama-3.1-8B-Instruct", None, (2, 16, 29, 32), 4096)
    plan = {"steps": ["first", f"start a server with: {vllm.capture_command(states)}"]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    called = f"""printf '%s\\0' "$@" end >> {tmp_path}/calls
[[ "$*" = *--dry-run* ]] && exec cat {tmp_path}/plan.json
trap 'exit 75' TERM
touch {tmp_path}/trains
[ "$RANK/$WORLD_SIZE/$MASTER_ADDR" = 3/8/node2 ] || exit 1
for ((i = 0; i < 500; i++)); do sleep 0.1; done"""
    engine = f'printf \'%s\\0\' "$CUDA_VISIBLE_DEVICES" "$@" > {tmp_path}/engine.part\n'
    engine += f"mv {tmp_path}/engine.part {tmp_path}/engine"
    work = tmp_path / "work"
    programs = {"specctl": called, "vllm": engine, "sleep": "exec /bin/sleep 0.1"}
    environment = stand_ins(tmp_path, **programs) | {"WORK": str(work)}
    script = tmp_path / "stream.sbatch"
    script.write_text(shipped()["slurm/stream"])
    running = subprocess.Popen(["bash", script], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not all((tmp_path / name).exists() for name in ("engine", "trains")):
        assert running.poll() is None and time.monotonic() < end, running.communicate(timeout=10)[1]
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    said = running.communicate(timeout=120)[1]
    assert running.returncode == 75 and "start a server with" in said
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    assert (work / "servers.txt").read_text().split() == [f"http://node1:{8000 + task}" for task in range(8)]

    gpu, *words = (tmp_path / "engine").read_text().strip("\0").split("\0")
    storage = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert gpu == "3" and words[:2] == ["serve", states.target] and words[-2:] == ["--port", "8003"]
    assert storage["shared_storage_path"].startswith(f"{work}/states/3/")
    distilled(work / "distilled")
    calls = [call.strip("\0").split("\0") for call in (tmp_path / "calls").read_text().split("end\0") if call]
    assert [call[0] for call in calls] == ["train-drafter", "train-drafter"]
    for call in calls:
        planned = specctl.ok(*(word for word in call if word not in ("--dry-run", "--json")), "--dry-run", "--json")
        assert planned.json["recipe"]["features"]["mode"] == "stream"
        assert any('"eagle_aux_hidden_state_layer_ids": [2, 16, 29, 32]' in step for step in planned.json["steps"])


def test_the_slurm_script_is_copied_with_its_suffix(specctl, tmp_path):
    specctl.ok("recipes", "cp", "slurm/train-drafter", str(tmp_path))
    assert (tmp_path / "train-drafter.sbatch").read_text().startswith("#!/bin/bash")
    listed = {row["name"]: row["about"] for row in specctl("recipes", "ls", "--json").json["recipes"]}
    assert "Slurm" in listed["slurm/train-drafter"]


def test_recipes_set_the_zero_stage_consistently():
    for name in (name for name in shipped() if name.startswith("train-drafter/")):
        recipe = resolve(command_of(name), name, environ={})
        assert recipe.deepspeed.get("zero_optimization", {}).get("stage", recipe.zero_stage) == recipe.zero_stage


def test_a_gguf_target_is_counted_as_it_is_stored(specctl, tmp_path, monkeypatch):
    """It stays quantized on a CPU, but was counted in bf16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    write(write_tiny(tmp_path / "model", "LlamaConfig", sizes), tmp_path / "m.gguf", GGMLQuantizationType.Q8_0)
    options = ("--target", "m.gguf", "--domain", "sql", "--device", "cpu", "--dtype", "bf16", "--dry-run", "--json")
    found = {}
    for switch in ("dequantized", "quantized"):
        monkeypatch.setenv("SPECCTL_GGUF", switch)
        found[switch] = specctl.ok("train-drafter", *options).json["estimate"]["memory_gb"]["target"]
    assert 0.5 < found["quantized"] / found["dequantized"] < 0.9
