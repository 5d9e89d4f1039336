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
    # one process, so that several runs import once
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    answers = []
    for run in request["runs"]:
        try:
            answers.append(answer(vllm, request, run))
        except Exception as error:  # whatever vLLM raises is its answer
            answers.append({"error": f"{type(error).__name__}: {error}"})
        found = {"version": vllm.__version__, "runs": answers}
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
        gc.collect()
        cleanup_dist_env_and_memory()


def answer(vllm: Any, request: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The answer of one run."""
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
    before = counts(llm)  # metrics are the process's, not the engine's
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling)
    drafts, accepted = counts(llm)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": drafts - before[0],
        "accepted": [
            count - old
            for count, old in zip(accepted, before[1] or [0] * len(accepted), strict=True)
        ],
    }


def counts(llm: Any) -> tuple[int, list[int]]:
    """Drafts made, and drafts accepted by position."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    return (
        metrics[DRAFTS].value if DRAFTS in metrics else 0,
        list(metrics[ACCEPTED].values) if ACCEPTED in metrics else [],
    )


if __name__ == "__main__":
    main()
