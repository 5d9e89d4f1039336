"""One run of vLLM, in an environment of its own: `python vllm_worker.py REQUEST.json ANSWER.json`; see serve_check.py.

The request holds `target` and `head` (folders), `method`, `draft_length`, `max_new_tokens`, and `prompts` as token ids;
the answer the new tokens of each prompt, drafts made, and drafts accepted by position.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    """Generate greedily, in float32, with the head as draft model; without one if the request has none."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    import vllm

    speculative = None
    if request["head"] is not None:
        speculative = {"model": request["head"], "num_speculative_tokens": request["draft_length"]}
        speculative["method"] = request["method"]
    longest = max(map(len, request["prompts"])) + request["max_new_tokens"]
    llm = vllm.LLM(
        request["target"],
        dtype="float32",
        max_model_len=longest + 64,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculative,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    answer = {
        "version": vllm.__version__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": metrics[DRAFTS].value if DRAFTS in metrics else 0,
        "accepted": list(metrics[ACCEPTED].values) if ACCEPTED in metrics else [],
    }
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
