"""What runs leave in their folders, and files of rows that they are given."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from headstart.heads.checkpoints.files import json_ready
from headstart.train.data.chat_template import Example

ROOT = Path(__file__).parents[1]


class Killed(BaseException):
    """Stands for SIGKILL where the moment must be exact."""


def changed(config: Any, **changes: Any) -> Any:
    """A config with other values: `changed(config, output=..., loop={"keep": 1})`."""
    for name, value in changes.items():
        group = getattr(config, name)
        if dataclasses.is_dataclass(group) and isinstance(value, dict):
            changes[name] = dataclasses.replace(group, **value)
    return dataclasses.replace(config, **changes)


def launched(script: str | Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script in two processes of `accelerate launch`."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "configs/accelerate/ddp.yaml", "--num_processes", "2"]
    command += ["--main_process_port", "0", str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550
    )


def log_of(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's log."""
    return rows_of(Path(folder) / "log.jsonl")


def losses_of(folder: str | Path) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """The losses of a run's steps, and the rows of its evaluations."""
    rows = log_of(folder)
    return [row["loss"] for row in rows if "loss" in row], evaluations_of(folder)


def assert_same_losses(
    folder: str | Path, expected: str | Path, atol: float = 1e-6
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two runs have the same losses, and their one evaluation the same held-out loss; returns both
    evaluations."""
    found, (row,) = losses_of(folder)
    wanted, (other,) = losses_of(expected)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=atol, rtol=0)
    held_out = row["held_out_loss"], other["held_out_loss"]
    torch.testing.assert_close(*held_out, atol=atol, rtol=0)
    return row, other


def curve_of(folder: str | Path) -> dict[int, list[float]]:
    """Losses and the gradient's norm of a run's steps, by step."""
    return {
        row["step"]: [*row["loss"], row["gradient_norm"]] for row in log_of(folder) if "loss" in row
    }


def assert_same_curve(folder: str | Path, expected: str | Path, apart: float = 1e-4) -> None:
    """Two runs have the same steps, losses and gradients, but for a relative difference."""
    found = curve_of(folder)
    wanted = curve_of(expected)
    assert found.keys() == wanted.keys()
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=apart), f"step {step}"


def evaluations_of(folder: str | Path) -> list[dict[str, Any]]:
    return [row for row in log_of(folder) if "eval" in row]


def write_config(config: Any, path: str | Path) -> str:
    """Write the options of a command as a file that it takes; returns the file's name."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(yaml.safe_dump(json_ready(dataclasses.asdict(config))), encoding="utf-8")
    return str(path)


def saved_options(folder: str | Path) -> dict[str, Any]:
    """The options that a run has written down."""
    return yaml.safe_load((Path(folder) / "config.yaml").read_text(encoding="utf-8"))


def save_options(folder: str | Path, options: dict[str, Any]) -> None:
    """Write the options of a run down, as a user who edits them."""
    path = Path(folder) / "config.yaml"
    path.write_text(yaml.safe_dump(json_ready(options)), encoding="utf-8")


def last_weights(folder: str | Path) -> dict[str, Tensor]:
    """The tensors of a run's last head."""
    return load_file(Path(folder) / "last" / "model.safetensors")


def last_bytes(folder: str | Path, name: str = "last") -> bytes:
    """The file of a run's last head, or its best one."""
    return (Path(folder) / name / "model.safetensors").read_bytes()


def random_examples(count: int, vocab: int) -> list[Example]:
    """Conversations of random tokens, each longer than the one before, answers after three."""
    random = torch.Generator().manual_seed(2)
    rows = [torch.randint(vocab, (8 + 3 * i,), generator=random).tolist() for i in range(count)]
    return [
        Example(row, [place > 2 for place in range(len(row))], number)
        for number, row in enumerate(rows)
    ]


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states have the same names and bits."""
    return one.keys() == other.keys() and all(
        torch.equal(one[name], tensor) for name, tensor in other.items()
    )


def assert_same_weights(folder: str | Path, expected: str | Path, atol: float = 0.0) -> None:
    """The last heads of two runs have the same tensors, but for a difference."""
    torch.testing.assert_close(last_weights(folder), last_weights(expected), atol=atol, rtol=0)


def checkpoints_of(folder: str | Path) -> list[str]:
    """Names of the checkpoints in a run's folder, the newest last."""
    return sorted(path.name for path in (Path(folder) / "checkpoints").glob("*"))


def rows_of(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file takes more bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_rows(path: Path, rows: list[Any]) -> str:
    """Write rows as JSON lines, texts as they are; returns the file's name."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def write_prompts(path: Path, texts: list[str]) -> str:
    """Write a file of prompts; returns its name."""
    return write_rows(path, [{"prompt": text} for text in texts])
