"""Certificates of headstart, of transformers' `generate`, and of vLLM with and without speculation,
in two dtypes.

    python benchmarks/certify.py --vllm .venv-vllm/bin/python

Each engine gets the same prompts and a file in --folder, which `headstart certify` wrote; an engine
whose file is there is not judged again. vLLM lives in an environment of its own: `make peers`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import HEAD, TARGET, arguments, save

from headstart.addons.certify.page import verdict_words
from headstart.heads.checkpoints.hub import local_folder
from headstart.heads.checkpoints.model_card import Listing
from headstart.heads.checkpoints.save_load import publishable
from headstart.inference import Target, load_tokenizer
from headstart.scripts.certify import CertifyConfig, certify

DTYPES = ("float32", "bfloat16")
PORT = 8123
SECONDS = 600
"""Longest time that vLLM may take to start."""


def main() -> None:
    """Judge every engine, and print a row for each."""
    parser = arguments(__doc__, "certify.md")
    parser.add_argument("--folder", default="certificates", help="of the engines' reports")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument("--prompts", nargs="+", default=["examples/prompts.jsonl"])
    parser.add_argument("--limit", type=int, default=10, help="prompts of each file")
    parser.add_argument("--sample-prompts", type=int, default=3)
    parser.add_argument("--vllm", help="Python of vLLM's environment; left out, vLLM is not judged")
    args = parser.parse_args()
    folder = Path(args.folder)
    reports: dict[str, dict[str, Any]] = {}

    def judge(name: str, dtype: str, **options: Any) -> None:
        path = folder / f"{name}-{dtype}.json"
        if not path.exists():
            config = CertifyConfig(
                target=args.target,
                prompts=args.prompts,
                limit=args.limit,
                sample_prompts=args.sample_prompts,
                dtype=dtype,  # type: ignore[arg-type]
                output=str(path),
                **options,
            )
            certify(config)
        reports[f"{name}, {dtype}"] = json.loads(path.read_text(encoding="utf-8"))

    for dtype in DTYPES:
        judge("transformers", dtype, samples=0)
        judge("headstart", dtype, head=args.head)
    judge("headstart-typical", "float32", head=args.head, acceptance="typical", lossy=True)
    if args.vllm:
        write_parts(folder, args.target, args.head)
        for dtype in DTYPES:
            for name, head in (("vllm-plain", None), ("vllm-head", folder / "head")):
                with served(args.vllm, folder / "target", head, dtype) as url:
                    judge(name, dtype, server=url, model="target")
    save(args.output, table(reports))


def write_parts(folder: Path, target: str, head: str) -> None:
    """The target and the head as folders that vLLM reads."""
    if not (folder / "target").exists():
        whole = Target.from_pretrained(target, torch.float32, "cpu")
        whole.model.save_pretrained(folder / "target")
        load_tokenizer(target).save_pretrained(folder / "target")
        publishable(local_folder(head), folder / "head", Listing(), {})


@contextmanager
def served(python: str, target: Path, head: Path | None, dtype: str) -> Iterator[str]:
    """URL of a vLLM server that runs while the block does."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += [
        "--served-model-name",
        "target",
        "--dtype",
        dtype,
        "--max-model-len",
        "1024",
        "--enforce-eager",
    ]
    command += ["--host", "127.0.0.1", "--port", str(PORT)]
    if head is not None:
        speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
        command += ["--speculative-config", json.dumps(speculative)]
    process = subprocess.Popen(command, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"})
    try:
        deadline = time.monotonic() + SECONDS
        while not answers(f"http://127.0.0.1:{PORT}/health"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("vLLM did not start; its own messages say why")
            time.sleep(1)
        yield f"http://127.0.0.1:{PORT}/v1"
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    """Whether a server answers at this URL."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def table(reports: dict[str, dict[str, Any]]) -> list[str]:
    """A row for each engine."""
    lines = [
        (
            "| engine | verdict | exact answers | tokens not best | margins: median, largest | e |"
            " one-token forwards | rejected tests of draws | p | surprise | detectable |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        greedy = report["greedy"]
        margins = greedy["margins"]
        spread = f"{margins[len(margins) // 2]:.2g}, {margins[-1]:.2g}" if margins else "-"
        cells = [
            name,
            verdict_words(report),
            f"{greedy['exact_answers']} of {greedy['answers']}",
            f"{greedy['not_best']} of {greedy['tokens']}",
            spread,
            f"{greedy['tie']:.2g}",
            greedy["rounding"]["one_token_forwards_not_best"],
            *draws(report["sampling"]),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def draws(sampling: dict[str, Any] | None) -> tuple[str, str, str, str]:
    """Rejected tests, the smallest p of a position, the surprise that is furthest from 0, and what
    is detectable."""
    if sampling is None:
        return "-", "-", "-", "-"
    positions = sampling["positions"]
    tested = [row for row in positions if row["p"] is not None]
    rejected = sum(row["rejected"] for row in positions)
    smallest = min((row["p"] for row in tested), default=1.0)
    detectable = max((row["detectable_everywhere"] for row in tested), default=1.0)
    furthest = max(
        positions, key=lambda row: abs(row["nats_less_likely"]) / max(row["standard_error"], 1e-9)
    )
    surprise = f"{furthest['nats_less_likely']:+.2f} ± {furthest['standard_error']:.2f}"
    return f"{rejected} of {sampling['tests']}", f"{smallest:.2g}", surprise, f"{detectable:.2f}"


if __name__ == "__main__":
    main()
