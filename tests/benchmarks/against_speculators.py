"""The `speculators` side of `python -m tests.benchmarks.training --against-speculators`: its Eagle-3 or DFlash class.

    PYTHON against_speculators.py FILE packed|single        (started by tests.benchmarks.comparison)

It runs under an interpreter with `speculators` 0.9 and without specctl, so it imports nothing of specctl.
The class's `forward` is unmodified, with SDPA attention and eager losses. The loop around it follows
`speculators.train.trainer`: autocast, backward, clip, AdamW. Remaining differences from our side:

- Eagle-3 runs every position through every step, prompts included, and the loss mask drops them afterwards. Its mask
  belongs to the predicted token, so step k also trains the last k prompt positions, which our side does not.
- DFlash also starts blocks at the last two tokens of a response, which have one token to predict and none.
- Its residual stream is bf16 under autocast, ours fp32.
- The features come after the target's final norm, so `verifier_norm` is the identity here.
- Its argmax and accuracy per step are part of its forward and of the time.
- A dense mask over a packed row makes attention quadratic in all documents together (on CUDA it would be block-sparse
  flex attention). `single` therefore runs one document per forward and accumulates the gradients of a step.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor


class Side(NamedTuple):
    """One side of the comparison: mean loss per step before any update, and a function that runs one optimizer step."""

    losses: Callable[[], list[float]]
    step: Callable[[], int]


def serve(make: Callable[[], Side]) -> None:
    """Answer in lines of JSON: once when ready, then after each line of stdin, which is a number of steps to run."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout
    side = make()
    ready = {"threads": torch.get_num_threads(), "before": peak_memory(), "losses": side.losses()}
    print(json.dumps(ready), file=replies, flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        tokens = sum(side.step() for _ in range(int(line)))
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "tokens": tokens, "peak": peak_memory()}), file=replies, flush=True)


def peak_memory() -> int:
    """Return the peak resident memory in bytes. On Linux it includes the parent's peak before the fork."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def read(file: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the settings and tensors written by `comparison.write`, which documents them."""
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["settings"]), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def slot_rows(settings: dict[str, Any], tensors: dict[str, Tensor], batch: list[int]) -> dict[str, Tensor]:
    """Pack the documents of `batch` into one row for `Eagle3DraftModel.forward`.

    Prompt positions have no teacher: they get zeros, and the loss mask excludes them.
    """
    documents: dict[str, list[Tensor]] = {}
    for place, document in enumerate(batch):
        (s0, s1), (q0, q1) = settings["slots"][document], settings["queries"][document]
        prompt = s1 - s0 - (q1 - q0)
        width = tensors["teacher"].shape[1]
        parts = {
            "input_ids": tensors["tokens"][s0:s1],
            "hidden_states": tensors["taps"][s0:s1],
            "document_ids": torch.full((s1 - s0,), place),
            "position_ids": torch.arange(s1 - s0) + 1,
            "verifier_last_hidden_states": torch.cat(
                (tensors["teacher"].new_zeros(prompt, width), tensors["teacher"][q0:q1])
            ),
            "loss_mask": torch.cat((torch.zeros(prompt, dtype=torch.bool), tensors["inside"][q0:q1])),
        }
        for name, part in parts.items():
            documents.setdefault(name, []).append(part)
    return {name: torch.cat(parts).unsqueeze(0) for name, parts in documents.items()}


def token_rows(settings: dict[str, Any], tensors: dict[str, Tensor], batch: list[int]) -> dict[str, Any]:
    """Pack the documents of `batch` into one row for `DFlashDraftModel.forward`.

    Position i holds token i, while `slot_rows` hold token i + 1. The first and last token of a document are unknown and
    unused: the first is never an anchor, and the block of the last has nothing to predict. A block of padding follows
    all documents, and no block starts there.
    """
    documents: dict[str, list[Tensor]] = {}
    for place, document in enumerate(batch):
        (s0, s1), (q0, q1) = settings["slots"][document], settings["queries"][document]
        slots, responses = s1 - s0, q1 - q0
        tokens, taps, teacher = tensors["tokens"], tensors["taps"], tensors["teacher"]
        parts = {
            "input_ids": F.pad(tokens[s0:s1], (1, 1)),
            "hidden_states": F.pad(taps[s0:s1], (0, 0, 0, 2)),
            "document_ids": torch.full((slots + 2,), place),
            "position_ids": torch.arange(slots + 2),
            "verifier_last_hidden_states": F.pad(teacher[q0:q1], (0, 0, slots + 1 - responses, 1)),
            "loss_mask": torch.arange(slots + 2) > slots - responses,
        }
        for name, part in parts.items():
            documents.setdefault(name, []).append(part)
    size = settings["architecture"]["block_size"]
    row = {name: torch.cat(parts) for name, parts in documents.items()}
    padded = {name: torch.cat((part, part.new_zeros(size, *part.shape[1:]))) for name, part in row.items()}
    padded["document_ids"][-size:] = -1
    return {name: part.unsqueeze(0) for name, part in padded.items()} | {"max_anchors": int(row["loss_mask"].sum())}


def layer_config(kind: type, shape: dict[str, Any], layers: int) -> Any:
    """Return a `transformers` configuration for the decoder layers of our head."""
    config = kind(
        num_hidden_layers=layers,
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        pad_token_id=None,
        **{
            name: shape[name]
            for name in (
                "hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings"
            )
        },
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return config


def eagle3_model(settings: dict[str, Any], tensors: dict[str, Tensor]) -> torch.nn.Module:
    """Return `Eagle3DraftModel` with our head's weights in fp32, and a frozen vocabulary head as in `speculators`."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    shape = settings["architecture"]
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(LlamaConfig, shape, 1),
        draft_vocab_size=shape["draft_vocab_size"],
        eagle_aux_hidden_state_layer_ids=shape["taps"],
        **{name: shape.get(name, False) for name in ("fc_norm", "norm_before_residual", "norm_output")},
    )
    head = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in own(tensors).items()}
    return loaded(Eagle3DraftModel(config), head, tensors)


def dflash_model(settings: dict[str, Any], tensors: dict[str, Tensor]) -> torch.nn.Module:
    """Return `DFlashDraftModel` with our head's weights in fp32.

    Its masks are the embedding of the mask token, which our side uses here too.
    """
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from transformers import Qwen3Config

    shape = settings["architecture"]
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer_config(Qwen3Config, shape, shape["num_layers"]),
        draft_vocab_size=shape["draft_vocab_size"],
        block_size=shape["block_size"],
        aux_hidden_state_layer_ids=shape["taps"],
        mask_token_id=shape["mask_token_id"],
        sample_from_anchor=shape["sample_from_anchor"],
    )
    head = {name: tensor for name, tensor in own(tensors).items() if name != "mask_embedding"}
    return loaded(DFlashDraftModel(config), head | {"lm_head.weight": tensors["target_head"]}, tensors)


def own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of our head."""
    return {name.removeprefix("head."): tensor for name, tensor in tensors.items() if name.startswith("head.")}


def loaded(model: Any, head: dict[str, Tensor], tensors: dict[str, Tensor]) -> torch.nn.Module:
    """Load the weights of a head and of the target into `model`."""
    model.verifier_norm = torch.nn.Identity()
    model.load_state_dict(
        head | {"embed_tokens.weight": tensors["embedding"], "verifier_lm_head.weight": tensors["target_head"]}
    )
    return model.float()


Loss = Callable[[Tensor, Tensor], Tensor]
Forward = Callable[[dict[str, Any], Loss], Tensor]


def make(file: str, packed: bool) -> Side:
    """Build the model with its data and optimizer."""
    from speculators.losses import eager

    settings, tensors = read(file)
    blocks = settings["arch"] == "dflash"
    model = (dflash_model if blocks else eagle3_model)(settings, tensors)
    rows = token_rows if blocks else slot_rows
    decay = settings["ttt_decay"]
    weights = (
        {"gamma": -1 / math.log(decay)}
        if blocks
        else {"ttt_steps": settings["ttt_steps"], "ttt_step_loss_decay": decay}
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=settings["lr"], betas=settings["betas"], weight_decay=settings["weight_decay"]
    )
    batches = iter(settings["batches"])

    def forward(batch: dict[str, Any], loss: Loss) -> Tensor:
        with torch.autocast("cpu", getattr(torch, settings["dtype"]), enabled=settings["dtype"] != "float32"):
            _, total, _ = model(**batch, **weights, loss_config={"kl_div": (loss, 1.0)})
        return total

    def losses() -> list[float]:
        batch = rows(settings, tensors, settings["batches"][0])
        with torch.no_grad():
            return (block_losses if blocks else step_losses)(forward, batch, settings)

    def step() -> int:
        batch = next(batches)
        tokens = sum(settings["responses"][document] for document in batch)
        optimizer.zero_grad()
        for part in [batch] if packed else [[document] for document in batch]:
            share = sum(settings["responses"][document] for document in part) / tokens
            (share * forward(rows(settings, tensors, part), eager.kl_div_loss)).backward()
        torch.nn.utils.clip_grad_norm_(trained, settings["clip"])
        optimizer.step()
        return tokens

    return Side(losses, step)


def cross_entropies(forward: Forward, batch: dict[str, Any]) -> list[Tensor]:
    """Return the soft cross-entropies [n] at every position for each call of the loss."""
    found: list[Tensor] = []

    def record(logits: Tensor, targets: Tensor) -> Tensor:
        each = -(targets.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
        found.append(each[0])
        return each

    forward(batch, record)
    return found


def step_losses(forward: Forward, batch: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    """Return the mean loss of each step of the training-time test over the slots that our side trains."""
    document, inside = batch["document_ids"][0], batch["loss_mask"][0]
    response = batch["verifier_last_hidden_states"][0].any(-1)
    means = []
    for k, loss in enumerate(cross_entropies(forward, batch)):
        asked = slice(len(loss))
        used = response[asked] & inside[k:] & (document[asked] == document[k:])
        means.append(loss[used].mean().item())
    return means


def block_losses(forward: Forward, batch: dict[str, Any], settings: dict[str, Any]) -> list[float]:
    """Return the mean loss at each position after the anchor, over the blocks that our side trains (two tokens or
    more)."""
    (each,) = cross_entropies(forward, batch)
    size = settings["architecture"]["block_size"]
    inside, document = batch["loss_mask"][0], batch["document_ids"][0]
    anchors = inside.nonzero()[:, 0]  # each of them starts a block, in this order
    places = anchors[:, None] + torch.arange(size)
    used = inside[places] & (document[places] == document[anchors][:, None])
    used &= used[:, 2:3]
    each = each.unflatten(0, (-1, size))
    return [each[:, k][used[:, k]].mean().item() for k in range(1, size)]


if __name__ == "__main__":
    serve(lambda: make(sys.argv[1], sys.argv[2] == "packed"))
