"""The part of publishing that happens inside vLLM: a worker extension that exchanges the weights of its draft model.

    VLLM_SERVER_DEV_MODE=1 vllm serve … --worker-extension-cls specctl.engines.vllm_worker.DrafterSwap

It is loaded where vLLM is installed (`pip install --no-deps specctl` there is enough), so nothing but the standard
library is imported before it is called. vLLM calls it between two steps: requests in flight wait for the exchange, and
go on.
Keys and values that the old weights have left in the draft model's cache stay; they cost some acceptance, no text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

UNTOLD = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
"""Keys of a configuration that say nothing about what is computed."""


class DrafterSwap:
    """Methods that vLLM adds to its worker. What they return can be said in JSON; a failure is {"error": words}."""

    def publish_drafter(self, directory: str, version: str) -> dict[str, Any]:
        """Draft with the weights in a directory from now on, or, where they do not fit, with those that are there."""
        try:
            return swap(self, Path(directory), version)
        except Exception as error:  # an exception may end the engine, and with it all requests
            return {"error": f"{type(error).__name__}: {error}"}

    def published_drafter(self) -> dict[str, Any]:
        """The version that is drafted with, and a fingerprint of its file; None = what the engine was started with."""
        return getattr(self, "_published", None) or {"version": None, "fingerprint": None}


def swap(worker: Any, directory: Path, version: str) -> dict[str, Any]:
    """Give a worker the draft weights in a directory, after a look at whether they fit."""
    model = worker.get_draft_model()
    if model is None:
        return {"error": "the engine drafts with no model: start it with --speculative-config"}
    before = Path((getattr(worker, "_published", None) or {}).get("directory") or first(worker))
    try:
        problem = difference(outline(before), outline(directory))
    except OSError as error:
        return {"error": f"cannot read {directory} ({error.strerror or error}): it has to be where the engine is, too"}
    if problem is not None:
        return {"error": f"{directory} does not fit the drafter that runs: {problem}"}
    began = time.perf_counter()
    try:
        load(worker, model, directory)
    except Exception as error:
        load(worker, model, before)
        return {"error": f"{type(error).__name__}: {error}; the drafter before it is back"}
    worker._published = {"version": version, "fingerprint": fingerprint(directory), "directory": str(directory)}
    return {**worker._published, "seconds": time.perf_counter() - began}


def first(worker: Any) -> str:
    """The directory that the engine was started with. OSError for a drafter of the Hub that is not on this disk."""
    name = str(worker.vllm_config.speculative_config.draft_model_config.model)
    if Path(name).is_dir():
        return name
    from huggingface_hub import snapshot_download

    return str(snapshot_download(name, local_files_only=True))


def load(worker: Any, model: Any, directory: Path) -> None:
    """Load the weights in a directory into a draft model that runs."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    tensors = {name: tensor for path in weights(directory) for name, tensor in load_file(path).items()}
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)  # kernels may have packed the weights
        model.load_weights(iter(tensors.items()))
        finalize_layerwise_reload(model, worker.vllm_config.speculative_config.draft_model_config)


def weights(directory: Path) -> list[Path]:
    """The safetensors files of a directory. FileNotFoundError where there are none."""
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(2, "no safetensors there")
    return found


def outline(directory: Path) -> dict[str, Any]:
    """Configuration and shapes of a drafter, without its weights. OSError where it cannot be read."""
    config = json.loads((directory / "config.json").read_text())
    shapes: dict[str, Any] = {}
    for path in weights(directory):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    return {"config": {key: value for key, value in config.items() if key not in UNTOLD}, "shapes": shapes}


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """The first reason why a drafter cannot take the place of another, in words; None where there is none."""
    for key in sorted(one["config"].keys() | other["config"].keys()):
        before, now = one["config"].get(key), other["config"].get(key)
        if before != now:
            return f"{key} is {str(now)[:100]} in its config.json, the engine was started with {str(before)[:100]}"
    for name in sorted(one["shapes"].keys() | other["shapes"].keys()):
        before, now = one["shapes"].get(name), other["shapes"].get(name)
        if before != now:
            return f"{name} has the shape {now}, in the engine {before}"
    return None


def fingerprint(directory: Path) -> str:
    """sha256 over the weights of a directory, 16 hex digits."""
    digest = hashlib.sha256()
    for path in weights(directory):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
