"""One side of `python -m tests.benchmarks.training --against-speculators`: `speculators`' Eagle-3 class, trained.

    PYTHON against_speculators.py FILE packed|single        (started by tests.benchmarks.comparison)

Runs under an interpreter with `speculators` 0.9 and without specctl, so it imports nothing of specctl.
`Eagle3DraftModel.forward` is called as it is, with SDPA attention and the eager losses; the loop around it does what
`speculators.train.trainer` does: autocast, backward, clip, AdamW. What stays different from our side:

- It runs every position through every step, prompts included; the loss mask drops them afterwards. Its mask belongs to
  the predicted token, so at step k the last k prompt positions are trained on too, which ours are not.
- Its residual stream is bf16 under autocast, ours fp32.
- The features come after the target's final norm, so `verifier_norm` is the identity here.
- Its argmaxes, and accuracies per step, are part of its forward and of the time.
- A dense mask over a packed row makes attention quadratic in all documents together (on CUDA it would be block-sparse
  flex attention). `single` therefore gives it one document a forward and adds up the gradients of a step.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor


class Side(NamedTuple):
    """One side of the comparison: mean loss per TTT step before any update, and an optimizer step → response tokens."""

    losses: Callable[[], list[float]]
    step: Callable[[], int]


def serve(make: Callable[[], Side]) -> None:
    """Answer in lines of JSON: once when ready, then for every line of stdin, a number of steps, until it closes."""
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
    """Bytes this process has been resident with at most; on Linux no less than its parent had been when it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def read(file: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and tensors that `comparison.write` wrote (described there)."""
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["settings"]), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def rows(settings: dict[str, Any], tensors: dict[str, Tensor], batch: list[int]) -> dict[str, Tensor]:
    """The documents of `batch` packed into one row, as `Eagle3DraftModel.forward` takes it.

    Prompt positions have no teacher: zeros stand there, and the loss mask leaves them out.
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


def make_model(settings: dict[str, Any], tensors: dict[str, Tensor]) -> torch.nn.Module:
    """`Eagle3DraftModel` with our head's weights, in fp32, its vocabulary head frozen as `speculators` trains it."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    shape = settings["architecture"]
    layer = LlamaConfig(
        num_hidden_layers=1,
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
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape["draft_vocab_size"],
        eagle_aux_hidden_state_layer_ids=shape["taps"],
    )
    model = Eagle3DraftModel(config)
    model.verifier_norm = torch.nn.Identity()
    head = {
        name.removeprefix("head.").replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
        if name.startswith("head.")
    }
    head |= {"embed_tokens.weight": tensors["embedding"], "verifier_lm_head.weight": tensors["target_head"]}
    model.load_state_dict(head)
    return model.float()


def make(file: str, packed: bool) -> Side:
    """The model with its data and optimizer."""
    from speculators.losses import eager

    settings, tensors = read(file)
    model = make_model(settings, tensors)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=settings["lr"], betas=settings["betas"], weight_decay=settings["weight_decay"]
    )
    batches = iter(settings["batches"])

    def forward(batch: dict[str, Tensor], loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        with torch.autocast("cpu", getattr(torch, settings["dtype"]), enabled=settings["dtype"] != "float32"):
            _, total, _ = model(
                **batch,
                ttt_steps=settings["ttt_steps"],
                ttt_step_loss_decay=settings["ttt_decay"],
                loss_config={"kl_div": (loss, 1.0)},
            )
        return total

    def losses() -> list[float]:
        """Soft cross-entropies on the slots that our side trains on, from the logits of the first batch."""
        found: list[Tensor] = []

        def record(logits: Tensor, targets: Tensor) -> Tensor:
            p = targets.float().softmax(-1)
            found.append(-(p * logits.float().log_softmax(-1)).sum(-1)[0])
            return eager.kl_div_loss(logits, targets)

        batch = rows(settings, tensors, settings["batches"][0])
        with torch.no_grad():
            forward(batch, record)
        document, inside = batch["document_ids"][0], batch["loss_mask"][0]
        response = batch["verifier_last_hidden_states"][0].any(-1)
        means = []
        for k, loss in enumerate(found):
            asked = slice(len(loss))
            used = response[asked] & inside[k:] & (document[asked] == document[k:])
            means.append(loss[used].mean().item())
        return means

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


if __name__ == "__main__":
    serve(lambda: make(sys.argv[1], sys.argv[2] == "packed"))
