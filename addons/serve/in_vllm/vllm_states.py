r"""A vLLM connector for hidden states on a CPU; on a GPU, vLLM's own connector does the same.

    PYTHONPATH=addons/serve/in_vllm python -m vllm.entrypoints.openai.api_server --model TARGET \
        --speculative-config '{
        "method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]}}}'
        --kv-transfer-config '{"kv_connector": "CPUHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "vllm_states",
        "kv_connector_extra_config": {"shared_storage_path": "states"}}'

It runs in vLLM's environment and imports nothing of headstart. Tried with vLLM 0.32, whose own
connector copies states by a CUDA stream.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Done:
    """An event of a copy that is over."""

    def query(self) -> bool:
        """Whether the copy is over."""
        return True


class CPUHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes the states of each finished request to a file, at once."""

    def _submit_async_write(self, pending: Any) -> None:
        """Copy a request's states from the cache, before its blocks are freed, and write them."""
        # Slots of the request's blocks in the cache: blocks 3 and 1 of 4 slots are 12 13 14 15 and
        # 4 5 6 7.
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offsets).flatten()
        states_TLD = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states_TLD.contiguous(), "token_ids": pending.token_ids.clone()}
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        try:
            save_file(tensors, pending.filename)
        finally:
            if lock is not None:
                os.close(lock)  # which releases the lock that readers wait for
        self._req_copy_events[pending.req_id] = Done()
