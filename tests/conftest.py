"""Targets shared by all tests: the built-in target, and tiny random targets of other architectures."""

import atexit
import errno
import functools
import gc
import inspect
import os
import random
import threading
import zlib
from contextlib import suppress
from pathlib import Path

import httpx
import hypothesis
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specctl.decoding.models import supported
from specctl.decoding.models.loading import builtin_path
from specctl.decoding.protocols import Drafter
from specctl.decoding.records import DraftTree
from specctl.decoding.target import load_target
from specctl.decoding.target_text import load_target_text
from specctl.drafters.hybrid.costs import ROWS, Costs
from tests.toys.shallow import write_shallow

torch.set_num_threads(1)

# The same examples in every run, and no limit of seconds: a busy machine would fail it.
hypothesis.settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")

PROMPTS = [
    "List the names of all students.",
    "Table: pets\nColumns: name, age, owner\n\nQuestion: how many pets are older than 3? Write one SQL query.",
    "What is 12 + 30?",
]

# Small, and with everything that sets an architecture apart.
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ARCHITECTURES = {
    "llama": ("LlamaConfig", SIZES),
    "llama-bias-tied": ("LlamaConfig", SIZES | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3-rope": ("LlamaConfig", SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralConfig", SIZES | {"sliding_window": None}),
    "mistral-window": ("MistralConfig", SIZES | {"sliding_window": 16}),
    "qwen2": ("Qwen2Config", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 16}),
    "gemma2": ("Gemma2Config", SIZES | {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
    "olmo2": ("Olmo2Config", SIZES),
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}),
}


class LargestTensor(TorchDispatchMode):
    """A context. `elements` is the size of the largest tensor that an operation makes inside: quadratic memory shows
    at any size."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for item in made if isinstance(made, tuple | list) else (made,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return made


LONGEST = ("test_triton.py", "test_golden.py", "test_main_job.py")


def pytest_collection_modifyitems(items):
    """Start the longest tests first, so that no worker still has one when the others are done."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without garbage collection, which takes a third less time. Later searches skip the modules'
    objects: DeepSpeed asks for many searches. Searches are also rarer than by default: most would find little."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # later than pytest's own searches at the end
        gc.set_threshold(20_000)
        gc.enable()


def seed_generators(name):
    """Seed the generators of `random`, NumPy and torch. `torch.manual_seed` would take ten times as long: it also seeds
    the generators of GPUs."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """A fixture draws the same numbers after any other tests. Two fixtures draw different numbers."""
    seed_generators(fixturedef.argname)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    """A test draws the same numbers after any other tests, and with old or new fixtures."""
    seed_generators("test")


@pytest.fixture
def largest_tensor():
    return LargestTensor


@pytest.fixture(autouse=True)
def one_thread():
    """Small products gain nothing from a second thread, and lose much when something else runs on its core.

    Set again after every test: a command that a test calls in this process chooses a number of its own.
    """
    yield
    torch.set_num_threads(1)


def even_costs(target, head, name):
    """Costs of rounds that are the same on every machine, so that drafts are."""
    return Costs(tuple(1 + 0.02 * (rows - 1) for rows in ROWS), *((0.0, 0.0) if head is None else (0.2, 0.15)))


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory):
    """Give the tests a cache apart from the user's. A cache holds the compiled C++ step and measured costs for later
    runs. The compiled step alone is shared with the user: a hash of its source names its file.

    All processes of a test run share the cache. Costs are medians of few repeats here, and answers of three tokens
    warm up a run: no test depends on the seconds. A failed request is sent again at once.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    users, ours = (Path(place) / "specctl" / "native" for place in (home, shared / "cache"))
    with suppress(OSError):  # another process of the run has linked it, or the user's cannot be written
        users.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours.parent.mkdir(parents=True, exist_ok=True)
        ours.symlink_to(users)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        patch.setattr("specctl.drafters.hybrid.costs.REPEATS", 1)
        patch.setattr("specctl.drafters.hybrid.costs.WARM_UP", 1)
        patch.setattr("specctl.drafters.pool.costs_of", even_costs)
        patch.setattr("specctl.selection.assembly.REPEATS", 1)
        patch.setattr("specctl.decoding.timing.WARM_UP", 1)
        patch.setattr("specctl.measuring.contenders.WARMUP_TOKENS", 3)
        patch.setattr("specctl.lab.reasoning.modes.WARMUP_TOKENS", 3)
        patch.setattr("specctl.engines.client.FIRST_PAUSE_S", 0.01)
        yield


@pytest.fixture(scope="session", autouse=True)
def builtin_headers_read_once():
    """Read the headers of the built-in target's file once per process. It is loaded hundreds of times, and the headers
    take a fifth of that."""
    read, seen = supported.check_headers, set()

    def read_once(what, directory, config):
        if directory not in seen:
            read(what, directory, config)
        seen.update({directory} & {builtin_path()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supported, "check_headers", read_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_power_cut():
    """Let the system choose when files reach the disk: thousands of files would wait for it in turn. The tests kill
    processes, which loses no file; they never cut the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients():
    """Give requests of tests three minutes unless they say otherwise. httpx gives them five seconds, but on a busy
    machine a process that imports torch has taken more than one minute to answer."""
    default = inspect.signature(httpx.Client).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for part in ("connect", "read", "write", "pool"):
            patch.setattr(default, part, 180.0)
        yield


PATIENCE_S = 60  # before a wait at a pipe is ended


@pytest.fixture
def pipe():
    """`pipe(path)`: a named pipe. Code that waits at one end is released, and the test fails."""
    made, waited, ended = [], [], threading.Event()

    def make(path):
        os.mkfifo(path)
        made.append(path)
        return path

    def release(path):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # fails without a reader
            waited.append(path)
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            assert error.errno in (errno.ENXIO, errno.ENOENT)

    def watch():
        while not ended.wait(PATIENCE_S):
            for path in made:
                release(path)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield make
    ended.set()
    thread.join()
    assert not waited, "it was opened as a file, and waited for"


def holding(directory, secret):
    """Names of the files below `directory` that contain the text `secret`."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [str(path.relative_to(directory)) for path in files if secret.encode() in path.read_bytes()]


@pytest.fixture(scope="session")
def builtin_target():
    """The built-in target in fp32, where one row and many agree to the last few bits."""
    return load_target("builtin", device="cpu", dtype="fp32")


@pytest.fixture(scope="session")
def target(builtin_target):
    """The target of most tests. Packages of tests that need only a fast target override this fixture with `shallow`."""
    return builtin_target


@pytest.fixture(scope="session")
def shallow(tmp_path_factory):
    """A target of the first three of the built-in target's ten layers: as sure of its tokens, in a third of the time.
    It repeats itself less, and ends its texts less often."""
    place = write_shallow(tmp_path_factory.mktemp("shallow") / "target", layers=3)
    return load_target(str(place), device="cpu", dtype="fp32")


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory):
    """Cut the built-in target to its first four layers, for tests that load it by its name many times."""
    place = write_shallow(tmp_path_factory.mktemp("four") / "target", layers=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specctl.decoding.models.loading.builtin_path", lambda: place)
        yield


@pytest.fixture(scope="module")
def text():
    """The built-in target without its layers: its tokenizer and chat template."""
    return load_target_text("builtin")


@pytest.fixture(scope="session")
def prompts(builtin_target):
    """Three prompts of different lengths, as ids."""
    return [builtin_target.render([{"role": "user", "content": text}]) for text in PROMPTS]


def write_tiny(directory, kind, sizes):
    """A random model of a configuration class of `transformers`, with the built-in tokenizer, in `directory`."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_path())
    torch.manual_seed(0)
    common = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**common | sizes))
    for parameter in model.parameters():  # biases and norms start at 0 and 1: an ignored one would not show
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory):
    """`tiny_directory(name)`: directory of a random model of `ARCHITECTURES[name]` with the built-in tokenizer."""

    @functools.cache
    def make(name):
        return write_tiny(tmp_path_factory.mktemp(name), *ARCHITECTURES[name])

    return make


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny target that is sure of its tokens. Its texts have hardly any line breaks. It is narrow: streams write many
    states with several copies of drafters of its size."""
    from tests.measuring.streams import sure_target

    sizes = SIZES | {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = write_tiny(tmp_path_factory.mktemp("narrow"), "LlamaConfig", sizes)
    return sure_target(tmp_path_factory.mktemp("sure"), path)


@pytest.fixture(scope="module")
def copy(tmp_path_factory, tiny):
    """A drafter that is right half of the time: a disturbed copy of the tiny target."""
    from tests.measuring.streams import write_copy

    return write_copy(tmp_path_factory.mktemp("copy") / "lm", tiny, tiny.name, 0.03)


@pytest.fixture(scope="session")
def scripted():
    return Script


class Script(Drafter):
    """Drafts `depth` tokens of the text that is given for each prompt: the plain answer makes a perfect drafter."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], depth: int):
        self.answers, self.depth = answers, depth

    def propose(self, state, budget):
        chains = []
        for row in state.rows:
            answer = self.answers.get(tuple(row.ids[: row.prompt_length]), [])
            chains.append(answer[len(row.output) :][: min(self.depth, budget)])
        return DraftTree.from_chains(chains, state.device)
