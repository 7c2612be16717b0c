"""A server that returns a target's hidden states like vLLM's connector (in a file) or like SGLang (in its answer)."""

import copy
import fcntl
import os
import threading
import time

import torch
from safetensors.torch import save_file

from specctl.decoding.plan import plan_rows
from tests.toys.engine import FakeEngine


def raw_states(target, ids, layers, *, normed=False):
    """[tokens, layers, H] of a lean target, bitwise equal to its forward; the last layer's states are before its norm,
    or after it if `normed`."""
    model, before = copy.copy(target.model), []
    model.norm = lambda x: (before.append(x), target.model.norm(x))[1]
    plan = plan_rows([0], len(ids), device=target.device, dtype=target.dtype)
    with torch.inference_mode():
        _, tapped = model.forward(torch.tensor([ids]), model.new_cache(1, len(ids)), plan, tuple(layers))
    states = tapped.view(len(ids), len(layers), -1).clone()
    if not normed:
        states[:, -1] = before[0]
    return states


def raw_logprobs(target, ids):
    """Log probabilities of all ids except the first."""
    model = target.model
    plan = plan_rows([0], len(ids) - 1, device=target.device, dtype=target.dtype)
    with torch.inference_mode():
        hidden, _ = model.forward(torch.tensor([ids[:-1]]), model.new_cache(1, len(ids) - 1), plan, ())
        rows = model.logits(hidden[0]).float().log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


class CapturingEngine(FakeEngine):
    """A `FakeEngine` that also returns hidden states.

    Attributes:
        states: ids → [tokens, layers, H], or None for an engine without hidden states.
        by_model: the same by the name of a model, for those with other states than the first model.
        place: directory of the files.
        told: path of a file → the path in the answer.
        spoil: changes {"hidden_states", "token_ids"} before they are returned.
        delay_s: seconds between the answer and its file.
        spoiled: number of files, from the first, that are written by half.
        cached: number of prompt tokens reported as cached.
        logprobs: vLLM only: ids → log probabilities of all ids except the first, or None for invented ones.
    """

    def __init__(self, tokenizer, engine, place, states, **options):
        super().__init__(tokenizer, engine, **options)
        self.place, self.states, self.by_model = place, states, {}
        self.told = str
        self.logprobs = None
        self.spoil = dict
        self.delay_s, self.spoiled, self.cached = 0.0, 0, 0
        self.written = 0

    def generated(self, body):
        answer = super().generated(body)
        ids = body.get("prompt") or body.get("input_ids")
        if self.logprobs is not None and "prompt_logprobs" in body:
            own = self.logprobs(ids)
            rows = own and [None, *({str(id): {"logprob": x}} for id, x in zip(ids[1:], own, strict=True))]
            answer["choices"][0]["prompt_logprobs"] = rows
        if "prompt_logprobs" in body or body.get("return_logprob") or self.states is None:
            return answer
        states = self.by_model.get(body.get("model"), self.states)
        tensors = self.spoil({"hidden_states": states(ids), "token_ids": torch.tensor(ids)})
        if self.engine == "sglang":
            rows = tensors["hidden_states"].flatten(1).tolist()
            half = len(rows) // 2
            answer["meta_info"] |= {"hidden_states": [rows[:half], rows[half:]], "cached_tokens": self.cached}
            return answer
        with self.lock:
            self.written += 1
            number = self.written
        path = self.place / f"{number}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self.write, args=(path, lock, tensors, number <= self.spoiled), daemon=True).start()
        return answer | {"kv_transfer_params": {"hidden_states_path": self.told(path)}}

    def write(self, path, lock, tensors, half):
        time.sleep(self.delay_s)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        if half:
            os.truncate(path, path.stat().st_size // 2)
        os.close(lock)
