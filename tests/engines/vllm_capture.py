"""vLLM's connector for hidden states, without the CUDA streams and pinned memory that the stock connector copies with.

Loaded by vLLM itself: --kv-transfer-config '{"kv_connector": "HostCapture", "kv_connector_module_path":
"vllm_capture", …}' with this directory in PYTHONPATH. Names, locks and files are the stock connector's.
"""

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class Copied:
    """Replaces a CUDA event: the copy is already finished."""

    def query(self) -> bool:
        return True


class HostCapture(ExampleHiddenStatesConnector):
    """Writes the stock connector's files before the step continues."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        starts = torch.tensor(pending.block_ids).unsqueeze(1) * self._block_size
        slots = (starts + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = Copied()
