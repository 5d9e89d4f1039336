"""The vLLM side of ../comparison.py: `python vllm_worker.py REQUEST.json ANSWER.json`.

It runs in an environment that has vLLM.

The request holds `target` (a folder), `max_new_tokens`, `prompts` as token ids, and `runs`: for
each `head` (a folder, null for none), `method` and `draft_length`. The answer holds vLLM's
`version`, and for each run the new tokens of each prompt, drafts made, and drafts accepted by
position, or the `error` with which vLLM refused the head.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

DRAFTS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    """Generate greedily, in float32, with each head as draft model."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    # One process, so that several runs import once.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    answers = []
    for run in request["runs"]:
        try:
            answers.append(answer(vllm, request, run))
        # Whatever vLLM raises is its answer.
        except Exception as error:
            answers.append({"error": f"{type(error).__name__}: {error}"})
        # Written after each run: the next one may end the process.
        so_far = {"version": vllm.__version__, "runs": answers}
        Path(sys.argv[2]).write_text(json.dumps(so_far), encoding="utf-8")
        # The next engine needs the memory.
        gc.collect()
        cleanup_dist_env_and_memory()


def answer(vllm: Any, request: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Answer the prompts of one run."""
    speculative = None
    if run["head"] is not None:
        speculative = {
            "model": run["head"],
            "num_speculative_tokens": run["draft_length"],
            "method": run["method"],
        }
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
    # Metrics count over the whole process, not over one engine: take differences.
    drafts_before, accepted_before = counts(llm)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling)
    drafts, accepted = counts(llm)
    accepted_before = accepted_before or [0] * len(accepted)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": drafts - drafts_before,
        "accepted": [
            count - before for count, before in zip(accepted, accepted_before, strict=True)
        ],
    }


def counts(llm: Any) -> tuple[int, list[int]]:
    """Return the drafts made, and the drafts accepted by position, since the process began."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics[DRAFTS].value if DRAFTS in metrics else 0
    accepted = list(metrics[ACCEPTED].values) if ACCEPTED in metrics else []
    return drafts, accepted


if __name__ == "__main__":
    main()
