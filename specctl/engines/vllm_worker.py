"""Worker extension for vLLM that replaces the draft weights of a running engine.

Start it with `vllm serve … --worker-extension-cls specctl.engines.vllm_worker.DrafterSwap`, and call it through
`/collective_rpc`.

vLLM loads this file in its own environment (`pip install --no-deps CHECKOUT`). So the file imports only the standard
library at the top, and so does its specctl import.

A swap happens between two steps of the engine. It is refused before anything changes if the directory does not have the
form of the running drafter. It is undone if vLLM fails to load the weights. Running texts and cached prefixes keep the
keys and values of the previous drafter: their drafts may get worse, but the texts stay the same.
"""

import hashlib
import io
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl import regular_files

METHODS = ("eagle3", "eagle", "medusa", "dflash", "dspark")
"""vLLM's speculative methods with heads that can be swapped."""
MASK = "mask_embedding.pt"
"""File of a DFlash head that has a separate embedding for mask tokens."""
IGNORED_CONFIG_KEYS = frozenset({"torch_dtype", "dtype", "transformers_version", "_name_or_path"})  # by modules
SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "draft_vocab_size", "num_heads"),
)
"""Keys of config.json that must match the model in memory too."""
MAX_NAMED_DIFFERENCES = 3  # number of differences that a message names
LONGEST_CONFIG, LONGEST_HEADER, LONGEST_MASK = 2**24, 10**8, 2**26  # bytes; LONGEST_HEADER is the limit of safetensors
WIDEST = 8  # bytes per number in a tensor

log = logging.getLogger("vllm.specctl")  # a child of vLLM's logger, so vLLM's handlers write it


class DrafterMismatch(Exception):
    """A directory that cannot replace the running drafter, with the reason. The running drafter is unchanged."""


@dataclass(frozen=True)
class DrafterLayout:
    """The form of an exported drafter, which decides whether it fits a running engine: its configuration, and the kind
    and shape of every tensor."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class RunningDrafter:
    """The drafter in memory. `version` is None for the drafter that vLLM was started with."""

    version: str | None
    directory: str
    fingerprint: str
    outline: DrafterLayout


def fingerprint(contents: Mapping[str, bytes]) -> str:
    """SHA-256 over the names and contents of a drafter's files."""
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(f"{name}\0{len(contents[name])}\0".encode())
        digest.update(contents[name])
    return digest.hexdigest()


def contents(directory: Path) -> dict[str, bytes]:
    """The files of an exported drafter: config.json, weights, and the mask embedding if any.

    Raises DrafterMismatch if they cannot be read.
    """
    try:
        weights = sorted(directory.glob("*.safetensors"))
        most = {directory / "config.json": LONGEST_CONFIG, **dict.fromkeys(directory.glob(MASK), LONGEST_MASK)}
        found = {file.name: regular_files.read_bytes(file, most.get(file)) for file in [*most, *weights]}
    except OSError as error:
        raise DrafterMismatch(f"{directory} cannot be read: {error.strerror or type(error).__name__}") from error
    if not weights:
        raise DrafterMismatch(f"{directory} contains no *.safetensors")
    return found


def read_layout(directory: Path) -> DrafterLayout:
    """The form of a drafter, read from its config.json and the headers of its weight files. Raises DrafterMismatch."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    try:
        config = regular_files.parse_json(regular_files.read_bytes(directory / "config.json", LONGEST_CONFIG))
        for file in sorted(directory.glob("*.safetensors")):
            tensors |= _in_header(file)
        if (directory / MASK).exists():
            regular_files.check(directory / MASK)
            tensors[MASK] = ("real", ())  # its shape is not read: the embedding in the model defines it
    except OSError as error:
        raise DrafterMismatch(f"{directory} cannot be read: {error.strerror or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # not quoted: it may hold file content
        raise DrafterMismatch(
            f"{directory} is not an exported drafter: config.json or a *.safetensors is damaged"
        ) from error
    if not tensors or not isinstance(config, dict):
        raise DrafterMismatch(f"{directory} is not an exported drafter: it needs config.json and *.safetensors")
    return DrafterLayout(config, tensors)


def _in_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kind and shape of every tensor in a safetensors file. The file may not be larger than its tensors need.

    Raises OSError; ValueError, KeyError, TypeError, AttributeError if it is not a safetensors file.
    """
    with regular_files.open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size, LONGEST_HEADER):
            raise ValueError("not the header of a safetensors file")
        header = regular_files.parse_json(opened.read(length))
    found = {}
    for name, about in header.items():
        if name != "__metadata__":
            real = about["dtype"].startswith(("F", "BF"))  # any precision counts as "real": loading converts it
            found[name] = ("real" if real else about["dtype"], tuple(about["shape"]))
    if size > 8 + length + WIDEST * sum(math.prod(shape) for _, shape in found.values()):
        raise ValueError("more bytes than its tensors have")  # a sparse file would fill the memory
    return found


def differences(new: DrafterLayout, running: DrafterLayout) -> list[str]:
    """All differences in form between a drafter and the running one, as phrases."""
    wrong = [
        f"{key} is {_shown(new.config.get(key))} in its config.json, but {running.config.get(key)!s:.200} in the "
        "running drafter"
        for key in sorted((new.config.keys() | running.config.keys()) - IGNORED_CONFIG_KEYS)
        if new.config.get(key) != running.config.get(key)
    ]
    for name in sorted(new.tensors.keys() | running.tensors.keys()):
        one, other = new.tensors.get(name), running.tensors.get(name)
        if one is None or other is None:
            wrong.append(f"the tensor {name} is only in {'the running drafter' if one is None else 'the new drafter'}")
        elif one[1] != other[1]:
            wrong.append(f"{name} has shape {list(one[1])}, but {list(other[1])} in the running drafter")
        elif one[0] != other[0]:
            wrong.append(f"{name} has a different dtype")
    return wrong


def _shown(value: Any) -> str:
    """A value of a config.json for a message. Clients choose the directory, so only numbers are quoted."""
    plain = value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 2**63)
    return str(value) if plain else "something else"


class DrafterSwap:
    """Methods that vLLM adds to its workers. Every rank runs them and answers with a dictionary.

    The dictionary holds the drafter in use (`version`, None before the first publication, `directory`, `fingerprint`),
    or `refused` with the reason.
    """

    vllm_config: Any
    get_model: Any
    get_draft_model: Any

    def drafter_loaded(self) -> dict[str, Any]:
        """The drafter in memory. `drafts` is False on a rank without one, such as an earlier pipeline stage."""
        try:
            _drafts(self)
            if self.get_draft_model() is None:
                return {"drafts": False}
            running = _running(self)
        except DrafterMismatch as error:
            return {"refused": str(error)}
        return {"version": running.version, "directory": running.directory, "fingerprint": running.fingerprint}

    def drafter_fits(self, directory: str) -> dict[str, Any]:
        """Check whether the drafter in `directory` has the form of the running drafter. Reads no weights."""
        if self.get_draft_model() is None:
            return self.drafter_loaded()
        try:
            _fitting(self, Path(directory))
        except DrafterMismatch as error:
            return {"refused": str(error)}
        return self.drafter_loaded()

    def drafter_swap(self, directory: str, version: str | None, expected: str) -> dict[str, Any]:
        """Replace the running drafter by the drafter in `directory`, if its fingerprint is `expected`.

        The answer includes the `seconds` that the engine stood still.
        """
        started = time.perf_counter()
        if self.get_draft_model() is None:
            return self.drafter_loaded()
        try:
            form, files = _fitting(self, Path(directory)), contents(Path(directory))
            if fingerprint(files) != expected:
                raise DrafterMismatch(f"{directory} differs from the published files, or has changed since then")
            _load(self, _tensors(files, self.vllm_config.model_config.get_vocab_size()))
        except DrafterMismatch as error:
            return {"refused": str(error)}
        except Exception as error:  # a model's loader may raise anything; the old weights are back by now
            log.exception("the drafter in %s was not loaded; the previous drafter stays active", directory)
            why = f"vLLM failed to load {directory} ({type(error).__name__}: {str(error)[:300]})"
            return {"refused": f"{why}; the previous drafter is active again"}
        self._specctl_running = RunningDrafter(version, directory, expected, form)
        seconds = time.perf_counter() - started
        log.info("drafting with %s, version %s, after %.2f s", directory, version, seconds)
        return self.drafter_loaded() | {"seconds": seconds}


def _drafts(worker: Any) -> None:
    """Raise DrafterMismatch if the engine does not draft, or drafts with a head that cannot be swapped."""
    speculative = worker.vllm_config.speculative_config
    if speculative is None:
        raise DrafterMismatch("this engine does not draft: it was started without --speculative-config")
    if speculative.method not in METHODS:
        raise DrafterMismatch(
            f"this engine drafts by {speculative.method!r}; only heads of {', '.join(METHODS)} can be swapped"
        )


def _running(worker: Any) -> RunningDrafter:
    found = getattr(worker, "_specctl_running", None)
    if found is None:
        config = worker.vllm_config.speculative_config.draft_model_config
        place = Path(config.model)
        if not place.is_dir():  # an id of the Hugging Face hub, which vLLM has downloaded
            from huggingface_hub import snapshot_download

            try:
                place = Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))
            except Exception as error:
                raise DrafterMismatch(
                    f"{config.model}, which vLLM was started with, is gone: the form of the running drafter is unknown"
                ) from error
        found = RunningDrafter(None, str(place), fingerprint(contents(place)), read_layout(place))
        worker._specctl_running = found
    return found


def _fitting(worker: Any, directory: Path) -> DrafterLayout:
    """The form of a drafter that may be swapped in. Raises DrafterMismatch."""
    _drafts(worker)
    form = read_layout(directory)
    wrong = differences(form, _running(worker).outline)
    config = worker.vllm_config.speculative_config.draft_model_config.hf_config
    for key in SHAPE_KEYS:
        there, here = getattr(config, key, None), form.config.get(key)
        if there is not None and here is not None and there != here and not any(key in one for one in wrong):
            wrong.append(f"{key} is {_shown(here)} in its config.json, but {there} in the loaded model")
    if wrong:
        more = f" (and {len(wrong) - MAX_NAMED_DIFFERENCES} more)" if len(wrong) > MAX_NAMED_DIFFERENCES else ""
        raise DrafterMismatch(f"{directory} differs in form: {'; '.join(wrong[:MAX_NAMED_DIFFERENCES])}{more}")
    return form


def _tensors(files: Mapping[str, bytes], vocab_size: int) -> dict[str, Any]:
    """The tensors of a drafter. Raises DrafterMismatch if a value is not finite or a draft token exceeds the
    vocabulary."""
    import torch
    from safetensors.torch import load

    found = {
        name: tensor
        for file, data in files.items()
        if file.endswith(".safetensors")
        for name, tensor in load(data).items()
    }
    if MASK in files:
        found[MASK] = _mask(files[MASK])
    for name, tensor in found.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise DrafterMismatch(f"{name} contains values that are not finite")
    if "d2t" in found:
        ids = found["d2t"] + torch.arange(len(found["d2t"]))
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise DrafterMismatch(f"d2t contains tokens outside the target's vocabulary of {vocab_size}")
    return found


def _mask(data: bytes) -> Any:
    """The mask embedding of a DFlash head, from its file. Raises DrafterMismatch."""
    import torch

    try:
        held = torch.load(io.BytesIO(data), weights_only=True)
        return (held["embedding"] if isinstance(held, dict) else held).reshape(-1)
    except Exception as error:  # torch.load may raise anything for an invalid file
        raise DrafterMismatch(f"{MASK} does not contain an embedding ({type(error).__name__})") from error


def _load(worker: Any, tensors: dict[str, Any]) -> None:
    """Load a checkpoint's tensors into the draft model. After an error the model is restored and the error raised."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import reload

    model = worker.get_draft_model()
    config = worker.vllm_config.speculative_config.draft_model_config
    with set_current_vllm_config(worker.vllm_config), _without_shared_modules(model, worker.get_model()) as shared:
        mask = tensors.pop(MASK, None)
        own = {name: tensor for name, tensor in tensors.items() if not _of_target(name, tensor, shared)}
        kept = _snapshot(model)
        try:
            reload.initialize_layerwise_reload(model)
            with _dflash_loading(model, mask):
                model.load_weights(iter(own.items()))
            reload.finalize_layerwise_reload(model, config)
            _rebuild_fused_buffers(model, own)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # raise errors of asynchronous copies here, not in the next step
        except BaseException:
            _restore(kept)
            raise


STACK, READ_MASK = "_build_fused_kv_buffers", "_read_mask_embedding"  # methods of vLLM's DFlash models


@contextmanager
def _dflash_loading(model: Any, mask: Any) -> Iterator[None]:
    """Disable two methods of vLLM's DFlash models while their weights are loaded.

    vLLM would fuse the key and value weights at once, before they are in memory. It would also read the mask embedding
    from the directory of its start; `mask` replaces that embedding.
    """
    inner = getattr(model, "model", None)
    if hasattr(inner, STACK):
        vars(inner)[STACK] = lambda: None
        vars(model)[READ_MASK] = lambda: mask
    try:
        yield
    finally:
        if hasattr(inner, STACK):
            del vars(inner)[STACK], vars(model)[READ_MASK]


def _rebuild_fused_buffers(model: Any, tensors: Mapping[str, Any]) -> None:
    """Rebuild the fused weights that vLLM's DFlash models read the context with, in place.

    They stack the keys, values and key norms of all layers.
    """
    import torch

    inner: Any = getattr(model, "model", None)
    if not hasattr(inner, STACK):
        return
    keys = [f"layers.{place}.self_attn" for place in range(len(inner.layers))]
    made = [(inner._k_norm_weights, torch.stack([tensors[f"{key}.k_norm.weight"] for key in keys]))]
    for there, kind in ((inner._fused_kv_weight, "weight"), (inner._fused_kv_bias, "bias")):
        if there is not None:
            parts = []
            for key, layer in zip(keys, inner.layers, strict=True):
                attention = layer.self_attn
                own = attention.qkv_proj.tp_rank // attention.qkv_proj.num_kv_head_replicas * attention.kv_size
                parts += [tensors[f"{key}.{name}_proj.{kind}"][own:][: attention.kv_size] for name in "kv"]
            made.append((there, torch.cat(parts)))
    for there, new in made:
        there.copy_(new.view_as(there))


@contextmanager
def _without_shared_modules(model: Any, target: Any) -> Iterator[dict[str, Any]]:
    """Detach the modules that the draft model shares with the target, so that nothing is loaded into them.

    Yields the detached modules by name.
    """
    known = {id(module) for module in target.modules()}
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        if id(parent) not in known
        for name, child in parent._modules.items()
        if child is not None and id(child) in known
    ]
    for parent, name, _ in places:
        parent._modules[name] = None
    try:
        yield {name: child for _, name, child in places}
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _of_target(name: str, tensor: Any, shared: Mapping[str, Any]) -> bool:
    """Whether a tensor belongs to a module shared with the target.

    Raises DrafterMismatch if its values differ from the target's.
    """
    part = next((part for part in name.split(".") if part in shared), None)
    if part is None:
        return False
    # With tensor parallelism each worker has a part of the rows.
    slice_of = getattr(shared[part], "shard_indices", None)
    first = slice_of.org_vocab_start_index if slice_of is not None else 0
    own = tensor[first:][: len(shared[part].weight)]
    rows = shared[part].weight[: len(own)].cpu()  # engines pad vocabularies
    if rows.shape != own.shape or not bool((rows == own.to(rows.dtype)).all()):
        raise DrafterMismatch(
            f"it contains a different {name}, but this engine drafts with the target's: export it without {name}"
        )
    return True


def _snapshot(model: Any) -> list[tuple[Any, dict[str, Any], list[tuple[Any, Any]]]]:
    """Attributes of each module, and copies of its tensors on the host.

    Attributes matter because on a CPU they do the multiplication. Tensors are copied because a captured CUDA graph
    knows them by address, so a restore has to write into them in place.
    """
    parts = []
    for module in model.modules():
        attributes = {
            name: dict(value) if name in ("_parameters", "_buffers") else value for name, value in vars(module).items()
        }
        attributes["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
        tensors = [*module._parameters.values(), *module._buffers.values()]
        parts.append(
            (module, attributes, [(one, one.detach().to("cpu", copy=True)) for one in tensors if one is not None])
        )
    return parts


def _restore(kept: list[tuple[Any, dict[str, Any], list[tuple[Any, Any]]]]) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module, attributes, tensors in kept:
        vars(module).clear()
        vars(module).update(attributes)
        for tensor, copy in tensors:
            tensor.data.copy_(copy)
        get_layerwise_info(module).reset()
