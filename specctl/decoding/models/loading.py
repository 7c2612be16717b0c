"""Loading of `transformers` models by Hugging Face id, directory, GGUF file or `builtin`: config, weights, tokenizer,
device and dtype."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specctl import hub, regular_files, threads
from specctl.decoding.models import gguf_target, supported
from specctl.decoding.models.supported import check_decodable, check_ropes, context_limit, window_size
from specctl.errors import CheckpointError, UsageError, brief, near_path

ATTENTION = (None, "eager", "sdpa")
"""Attention implementations that a configuration may choose: built into transformers, with support for any mask."""
ORIGINAL = "ORIGINAL-MODEL"
"""Placeholder in commands for the model from which a GGUF file was made."""
ORIGINAL_NOTE = f"vLLM and SGLang serve no GGUF files: give them the directory or hub id of its original as {ORIGINAL}"
FILES = (".gguf", ".json", ".jsonl", ".csv", ".parquet", ".txt", ".yaml", ".yml", ".safetensors", ".bin", ".pt", ".pth")
"""Endings of files. A name with one of them is no hub id."""
MOST_LAYERS = 1000
LONGEST_LINE = 300  # characters of another library's message
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def builtin_path() -> Path:
    """Directory of the built-in target."""
    return Path(str(resources.files("specctl") / "assets" / "builtin"))


def pick_device(device: str) -> torch.device:
    """Resolve a device name. `auto` and `cuda` are this process' GPU; `auto` without a GPU is the CPU.

    All code that computes on a GPU calls this first, so it also switches off cuDNN attention. torch prefers cuDNN on
    Hopper and later, but it plans every new shape for about 0.4 s, and decoding has new shapes in every round.
    """
    available = torch.cuda.is_available()
    if device.startswith("cuda") and not available:
        raise UsageError(
            f"device {device} was requested, but torch {torch.__version__} sees no CUDA device", "use --device cpu"
        )
    if device != "cpu" and available:
        torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "cuda" or (device == "auto" and available):
        return torch.device("cuda", own_gpus(torch.cuda.device_count(), os.environ)[0])
    return torch.device("cpu" if device == "auto" else device)


def own_gpus(count: int, environ: Mapping[str, str]) -> list[int]:
    """GPUs of this process among `count` visible ones: all, or every n-th if a launcher started n processes here.

    The first GPU is number LOCAL_RANK, as in DeepSpeed. UsageError if there are more processes than GPUs.
    """
    rank = int(environ.get("LOCAL_RANK", 0))
    if rank >= count:
        raise UsageError(
            f"the process with LOCAL_RANK={rank} has no GPU: only {count} visible",
            "start one process per GPU (or set LOCAL_RANK=0 if each process sees only one GPU)",
        )
    return list(range(rank, count, threads.processes_here(environ)))


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Resolve a dtype name. `auto` is bf16 on GPUs and on CPUs with AVX512-BF16 or AMX, otherwise fp32."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}", f"use one of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if cpu_has_bf16() else torch.float32


def cpu_has_bf16() -> bool:
    """Whether the CPU has native bf16 dot products (without them bf16 is slower than fp32)."""
    check = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(check and check())


def with_fast_products(weight: torch.Tensor) -> torch.Tensor:
    """The weight in a dtype with fast products in torch: fp32 instead of bf16 on a CPU without bf16 instructions."""
    slow = weight.dtype == torch.bfloat16 and pick_dtype("auto", weight.device) != torch.bfloat16
    return weight.float() if slow else weight


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False):
    """Load the configuration of a target that an engine can run: a decoder-only causal LM, possibly with vision or
    speech. Our own loop runs fewer of them: `supported.check_decodable`."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    check_within_reach(name, revision)
    where = location(name)
    if Path(where).is_dir() and not (Path(where) / "config.json").is_file():
        hint = "give the directory that contains config.json"
        if (Path(where) / supported.ADAPTER).is_file():
            hint = f"it is an adapter: --target BASE --target-adapter {name}"
        elif files := sorted(Path(where).glob("*.gguf")):
            hint = f"--target {files[0]}"
        raise CheckpointError(f"{name} is not a model directory: it has no config.json", hint)
    try:
        config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        kind = text.model_type
        for ask in (check_ropes, context_limit, window_size):
            ask(text)  # fail here rather than later, when these values are used
    except Exception as error:  # files can make transformers raise anything
        telling = error.__cause__ if isinstance(error, StrictDataclassError) else error
        raise CheckpointError(
            f"cannot read the configuration of target {name} (config.json): {first_line(telling or error)}",
            "give a Hugging Face id, a directory with config.json, or 'builtin'",
        ) from error
    supported.check_adapter(f"target {name}", model_directory(name, revision))
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise CheckpointError(f"target {name}: config.json: architectures is {names!r:.60}, not a list of names")
    for key, value in vars(text).items():
        if isinstance(value, float) and math.isnan(value):
            raise CheckpointError(f"target {name}: config.json: {key} is {value}", "copy the file again")
    for key in ("_attn_implementation", "_experts_implementation"):
        for value in (getattr(part, key, None) for part in (config, text)):
            if value not in ATTENTION and not trust_remote_code:
                raise CheckpointError(
                    f"target {name}: config.json: {key[1:]} is {value!r:.60}, which may be code from a repository",
                    f"delete the key: specctl chooses one of {', '.join(filter(None, ATTENTION))}",
                )
    multimodal = config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    if config.is_encoder_decoder or (
        names
        and not multimodal
        and not any("CausalLM" in n or "LMHead" in n or "ConditionalGeneration" in n for n in names)
    ):
        raise CheckpointError(
            f"target {name} is not a decoder-only causal LM (architecture {', '.join(names):.200})",
            "choose a causal LM such as Llama, Qwen or Mistral",
        )
    known = multimodal or {config.model_type, kind} <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if not (trust_remote_code or known):
        raise CheckpointError(
            f"transformers has no causal LM for model type {config.model_type!r} of target {name}",
            "choose a causal LM such as Llama, Qwen or Gemma, or save the language model of this model separately",
        )
    layers = getattr(text, "num_hidden_layers", 1)
    if not (type(layers) is int and 0 < layers <= MOST_LAYERS):
        raise CheckpointError(f"target {name}: config.json: num_hidden_layers is {layers!r:.60}, not 1 … {MOST_LAYERS}")
    return config


def first_line(error: BaseException) -> str:
    """First line of a library's error, cut to `LONGEST_LINE` characters. The exception's type comes first if the line
    alone may not explain the error."""
    lines = str(error).strip().splitlines()[:1]
    telling = isinstance(error, OSError | ValueError | RuntimeError | CheckpointError)
    kind = [] if lines and telling else [type(error).__name__]
    return ": ".join(kind + lines)[:LONGEST_LINE]


def is_gguf(name: str) -> bool:
    """Whether a target's name is the name of a GGUF file. The file need not exist."""
    return name.lower().endswith(".gguf") and not os.path.isdir(os.path.expanduser(name))


def servable(name: str) -> str:
    """Name of a target in commands of vLLM and SGLang. These serve no GGUF file, so its name becomes `ORIGINAL`."""
    return ORIGINAL if is_gguf(name) else name


def is_hub_id(name: str) -> bool:
    """Whether a target's name is looked up on the Hugging Face hub: not `builtin`, and neither the name of a file or
    directory that exists, nor a path or the name of a file."""
    path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith(FILES)
    return name != "builtin" and not path and not os.path.exists(name)


def check_within_reach(name: str, revision: str | None = None) -> None:
    """Raise CheckpointError for an id that is not cached while the hub cannot be reached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if not is_hub_id(name):
        return
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return
        hub.connect()
    except HFValidationError:
        return  # not a valid id; transformers reports it
    except ConnectionError as error:
        raise CheckpointError(
            f"{name} is neither a directory nor in the Hugging Face cache, and {error}",
            f"give a directory, or run `hf download {name}` on a machine with network access",
        ) from error


def location(name: str) -> str:
    """Location for `transformers` to load a target from: a directory or a Hugging Face id. For a GGUF file it is a
    directory in the cache, without weights.

    CheckpointError if `name` is a path that does not exist, or if the directory has a file on which `transformers`
    would block (such as a pipe).
    """
    if name == "builtin":
        return str(builtin_path())
    if is_gguf(name):
        return str(gguf_target.directory(name))
    directory = Path(name).expanduser()
    if not is_hub_id(name) and not os.path.isdir(directory):
        hint = f"{near_path(name)}give a Hugging Face id, a directory with config.json, a .gguf file, or 'builtin'"
        if os.path.isfile(directory):
            whole = (directory.parent / "config.json").is_file()
            hint = f"--target {directory.parent}" if whole else hint
            raise CheckpointError(f"target {name} is a file, not a directory", hint)
        raise CheckpointError(f"model directory {name} {regular_files.directory_fault(directory)}", hint)
    if not os.path.isdir(directory):  # returns False, without an error, for a name that is too long
        return name
    for file in sorted(directory.iterdir()):
        try:
            if file.exists() and not file.is_dir():
                regular_files.check(file)
        except OSError as error:
            hint = "copy it again, or delete it"
            raise CheckpointError(f"target {name}: {file} is {error.strerror}", hint) from error
    return str(directory)


def model_directory(name: str, revision: str | None) -> Path | None:
    """Local directory of a target, possibly in the Hugging Face cache, or None if it is not on this machine."""
    from huggingface_hub import try_to_load_from_cache

    if not is_hub_id(name):
        return Path(location(name))
    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


class Source(NamedTuple):
    """Origin of a target's weights, and their devices.

    Attributes:
        device_map: how `accelerate` spreads them over the GPUs of this process, or None for one device.
        max_memory: upper limit per GPU, such as 60GiB.
        stored: the weights to take of a GGUF file; None = all of them, dequantized.
    """

    device_map: str | None = None
    max_memory: str | None = None
    stored: Mapping[str, gguf_target.Weight] | None = None


DEFAULT_SOURCE = Source()


def load_model(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    revision=None,
    trust_remote_code=False,
    source: Source = DEFAULT_SOURCE,
):
    """Load the plain `transformers` model of a target, in evaluation mode, on `device` or spread over several.

    For a GPU, the weights go straight from memory-mapped files to the device. Eight processes on a node then share the
    pages of the files and hold no copies in CPU memory.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one short bar per load says nothing; our own progress goes to stderr
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    check_decodable(name, config)
    with load_errors(name):
        if not trust_remote_code:
            supported.check_headers(f"target {name}", model_directory(name, revision), config)
        loaded: Any = from_pretrained_of(name, config, dtype, source.stored)(
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            **_placement(device, source),
            **supported.REPORT,
        )
        model, info = loaded
        supported.check_loaded(f"target {name}", model, info)
        if supported.quantisation(config) is not None and supported.quantisation(model.config) is None:
            model.to(dtype)  # dequantized weights are in bf16
        if source.device_map is None:
            model.to(device)
        if is_gguf(name):
            model.generation_config = load_generation_config(name, config)
    places = set(map(str, getattr(model, "hf_device_map", {}).values()))
    if len(places) > 1 and places & {"cpu", "disk"}:
        raise CheckpointError(
            f"target {name} does not fit in the memory of the GPUs of this process",
            "use more GPUs, or raise target.max_memory",
        )
    return model.eval()


def from_pretrained_of(
    name: str, config: Any, dtype: torch.dtype, stored: Mapping[str, gguf_target.Weight] | None = None
) -> Callable[..., Any]:
    """A `from_pretrained` function for a target, which needs only the options; `config` is the target's
    configuration, `stored` as in `Source`."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not is_gguf(name):
        return partial(AutoModelForCausalLM.from_pretrained, location(name))
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return partial(model.from_pretrained, None, config=config, state_dict=stored or gguf_target.weights(name, dtype))


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """Turn any exception of `transformers` about files, a refused pickle included, into a CheckpointError."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:  # safetensors does not name the file
        hint = f"run `specctl doctor --target {name}`: it names the damaged file"
        raise CheckpointError(f"cannot load target {name}: its weights are damaged: {error}", hint) from error
    except (UsageError, CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        hint = f"run `specctl doctor --target {name}`: it checks the files"
        raise CheckpointError(f"cannot load target {name}: {first_line(error)}", hint) from error


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False):
    """Load the tokenizer of a model. CheckpointError if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        where = location(name)
        if is_gguf(name):  # for some model types AutoTokenizer replaces the splits and ends that the file requires
            tokenizer = PreTrainedTokenizerFast.from_pretrained(where)
        else:
            tokenizer = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
        vocabulary = tokenizer.encode("a", add_special_tokens=False)
    except Exception as error:  # files can make the libraries raise anything
        reason = brief(" ".join(str(error).split()) or type(error).__name__, LONGEST_LINE)  # of many short lines
        hint = "put tokenizer.json and tokenizer_config.json next to config.json"
        held = [file.name for file in Path(location(name)).glob("*")]  # none of a hub id
        if "tokenizer.model" in held:
            hint = "pip install sentencepiece protobuf, which read tokenizer.model; or put tokenizer.json next to it"
            if find_spec("sentencepiece") is None:
                reason = "sentencepiece, which reads tokenizer.model, is not installed"
        elif held and not any(word in file for file in held for word in ("tok", "vocab", ".model")):
            reason = "its directory has no file of a tokenizer"
        raise CheckpointError(f"cannot load the tokenizer of {name}: {reason}", hint) from error
    if not vocabulary:  # transformers makes an empty vocabulary if the files are missing
        raise CheckpointError(f"the tokenizer of {name} has no vocabulary", "put tokenizer.json next to config.json")
    return tokenizer


def load_generation_config(name: str, config: Any, *, revision: str | None = None) -> Any:
    """Load the generation settings of a target. If there is no such file, as for most targets, they follow from
    `config`."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(location(name), revision=revision or "main")
    except OSError:
        return GenerationConfig.from_model_config(config)
    except Exception as error:  # files can make transformers raise anything
        raise CheckpointError(
            f"cannot read generation_config.json of target {name}: {first_line(error)}",
            "copy the file again, or delete it",
        ) from error


def _placement(device: torch.device, source: Source) -> dict[str, Any]:
    """Placement arguments for `from_pretrained`. A device map uses only this process' GPUs, up to their free memory or
    the limit of `source`."""
    if device.type == "cpu":
        return {"device_map": source.device_map}
    if source.device_map is None:
        return {"device_map": {"": device}}
    gpus = own_gpus(torch.cuda.device_count(), os.environ)
    return {
        "device_map": source.device_map,
        "max_memory": {gpu: source.max_memory or torch.cuda.mem_get_info(gpu)[0] for gpu in gpus},
    }


def settle_memory() -> None:
    """Make glibc return the memory that is free now, and from now on reuse freed blocks instead of returning them.

    By default every tensor of some megabytes is a fresh mapping with page faults for each page, which cost a quarter of
    the time of a training step. Does nothing with another C library.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):
        return
    trim(0)
    trim_threshold, mmap_threshold = -1, -3  # malloc.h
    if not mallopt(mmap_threshold, 2**30):
        mallopt(mmap_threshold, 2**25)  # limit of older versions
    mallopt(trim_threshold, 2**31 - 1)
