"""A head in vLLM, from Python, without a server: `python vllm_offline.py MODEL HEAD`.

Runs in an environment with vLLM: on a CPU, `make peers` makes one, and this prints how often drafts
were accepted. MODEL is the target's Hub id or folder, HEAD that of a head which reads "vLLM: reads
this folder as it is" in its card.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROMPTS = [
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that reverses a string.",
]
METHODS = {"LlamaForCausalLMEagle3": "eagle3", "LlamaForCausalLM": "eagle", "MedusaModel": "medusa"}
METHODS |= {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def main(model: str, head: str) -> None:
    """Answer two prompts greedily, and print the answers and the acceptance length."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; read on a CPU alone
    from vllm import LLM, SamplingParams

    config = (
        json.loads(Path(head, "config.json").read_text(encoding="utf-8"))
        if Path(head).is_dir()
        else {}
    )
    method = METHODS[config["architectures"][0]] if config else "eagle3"
    drafts = (
        config["block_size"] - (not config["sample_from_anchor"]) if "block_size" in config else 3
    )
    llm = LLM(
        model,
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,  # without it drafts are not counted
        speculative_config={"method": method, "model": head, "num_speculative_tokens": drafts},
    )
    messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    for output in llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=64)):
        print(output.outputs[0].text, end="\n\n")
    counts = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if metric.name in (DRAFTS, ACCEPTED)
    }
    print(f"{counts[DRAFTS]} rounds, acceptance length {1 + counts[ACCEPTED] / counts[DRAFTS]:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
