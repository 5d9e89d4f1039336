"""Files that appear whole or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tokenize import TokenError
from typing import Any

BROKEN = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TokenError,
    TypeError,
    ValueError,
)
"""What is raised where values are not those that were written; numpy parses headers as Python."""
CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # ANSI: colours, moves of the cursor
    # OSC and others with a text: titles, links, the clipboard
    r"|\x1b[\]PX^_][^\x1b\x07]*(?:\x07|\x1b\\)"
    # the same in one byte
    r"|\x9b[0-?]*[ -/]*[@-~]|[\x90\x98\x9d-\x9f][^\x1b\x07\x9c]*(?:\x07|\x9c|\x1b\\)"
    r"|\x1b[ -/]+[0-~]|\x1b.?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]",  # the direction of writing, and line breaks
    re.DOTALL,
)
"""Characters that control a terminal, except tabs and line feeds."""
DEEPEST = 100
"""Lists and objects within one another in JSON of others."""
LONGEST_REASON = 300
"""Characters of an error that another one repeats."""
EXAMPLES = "examples"
"""Folder of a head for SmolLM2 and prompts to try it on, in a clone and in the wheel."""
TEXT_SHARD = "recorded-"
"""Begin of the names of files that each hold one text with its states."""


def printable(text: str) -> str:
    """A text of a server, a model or a file without what would control the terminal."""
    return CONTROLS.sub("", text.replace("\r\n", "\n"))


def one_line(text: object, longest: int = LONGEST_REASON) -> str:
    """Return the words of others for an error: one line that can be printed, cut where it is long.

    Characters that no font has, such as halves of surrogate pairs, are shown as their numbers.
    """
    line = " ".join(printable(str(text)).split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    return line if len(line) <= longest else f"{line[:longest]} ..."


def at_home(path: str | Path) -> str:
    """Return a path with the home folder in the place of a leading ~, or of ~USER.

    Shells do so for an argument of their own, and nobody for a config file or a Python string.

    Raises:
        ValueError: nothing says where the home folder is.
    """
    expanded = os.path.expanduser(str(path))
    if expanded == "~" or expanded.startswith("~/"):
        raise ValueError(f"{str(path)!r} is in the home folder, which is unknown; set HOME")
    return expanded


def example(path: str | Path) -> str:
    """Return where the package keeps a path such as examples/prompts.jsonl that is not here.

    So the documentation's commands work in any folder. Any other path is returned with the home
    folder in it, see `at_home`.
    """
    here = Path(at_home(path))
    if here.parts[:1] != (EXAMPLES,) or here.exists():
        return str(here)
    installed = Path(__file__).resolve().parent
    clone = installed.parent
    found = [folder / here for folder in (installed, clone) if (folder / here).exists()]
    return str(found[0] if found else here)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file or folder whose writing fails: Python names only those that do not open."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write {path}: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to, which takes its place as the block ends.

    If the block raises, what was written is removed and `path` is as it was. Every call yields
    another path: processes of several machines, which may have one number, write to one folder.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def cache_folder() -> Path:
    """Return the folder for what is kept between processes.

    It is `$HEADSTART_CACHE`, or headstart in the user's cache folder.

    Raises:
        RuntimeError: the user has no home.
    """
    chosen = os.environ.get("HEADSTART_CACHE")
    if chosen:
        return Path(at_home(chosen))
    return Path(at_home(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")) / "headstart"


def write_whole(path: Path, text: str, mode: int = 0o666) -> Path:
    """Write a text file that no reader finds half-written, and return its path.

    `mode` holds the permissions of the file, less the umask.

    Raises:
        OSError: with the file's name; an older file is as it was.
    """
    path = Path(at_home(path))
    with naming(path), replacing(path) as partial:
        partial.touch(mode=mode)
        with partial.open("w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    return path


def flush_to_disk(folder: Path) -> None:
    """Let what is written in a folder, and its names, survive a crash of the machine."""
    for path in (*folder.rglob("*"), folder):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def refuse_pipes(folder: Path) -> None:
    """Refuse a folder with named pipes or devices: opening one blocks forever.

    Paths that are not folders are ignored.

    Raises:
        ValueError: the first of them.
    """
    try:
        is_folder = folder.is_dir()
    except OSError:  # a text that no file can be called
        return
    if is_folder:
        for path in sorted(folder.iterdir()):
            require_regular(path)


def require_regular(path: Path) -> Path:
    """Return a path at which there is neither a named pipe nor a device.

    Raises:
        ValueError: there is.
    """
    with suppress(OSError):  # whoever opens it will say what is wrong
        mode = path.stat().st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise ValueError(f"{path} is a named pipe or a device, not a regular file; remove it")
    return path


def read_bytes(path: Path) -> bytes:
    """Read a file.

    Raises:
        ValueError: a file that is not regular.
        OSError: a file that cannot be read; named, which Python leaves out where a disk fails.
    """
    try:
        return require_regular(path).read_bytes()
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be read: {error.strerror}") from error


def parse_json(text: str | bytes, where: str | Path) -> Any:
    """Parse JSON of others, in UTF-8.

    Raises:
        ValueError: whatever is wrong with it, with `where` it stands.
    """
    try:
        if not isinstance(text, str):
            text = text.decode("utf-8")
        value = json.loads(text)
        # Deeper lists and objects would end copies and comparisons by a RecursionError. Few
        # brackets cannot be deep, and most rows have few.
        if text.count("[") + text.count("{") > DEEPEST and _deeper_than(DEEPEST, value):
            raise ValueError(f"it is nested more than {DEEPEST} deep")
    # RecursionError: lists within lists, thousands deep
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    return value


def _deeper_than(depth: int, value: Any) -> bool:
    """Whether something lies within more than `depth` lists and objects, one within another."""
    level = [value]
    for _ in range(depth):
        containers = [each for each in level if isinstance(each, (dict, list))]
        level = []
        for container in containers:
            level += container.values() if isinstance(container, dict) else container
    return bool(level)


def read_json(path: Path) -> Any:
    """Read a file of JSON.

    Raises:
        ValueError: a file that is not regular, or not JSON.
        OSError: a file that cannot be read.
    """
    return parse_json(read_bytes(path), path)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file with a JSON object in each line.

    Raises:
        ValueError: a file that is not regular, or the first line of something else.
        OSError: a file that cannot be read.
    """
    rows = []
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        row = parse_json(line, where)
        if not isinstance(row, dict):
            raise ValueError(f"{where} is not a JSON object")
        rows.append(row)
    return rows


@contextmanager
def reading_back(path: str | Path, advice: str) -> Iterator[None]:
    """Report in one line a file, or a folder, that does not hold what was written there.

    `path` may name a place in the file too.

    Raises:
        ValueError: what went wrong in the block, with `advice`.
    """
    try:
        yield
    except BROKEN as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{path} cannot be read ({reason}); {advice}") from error


def free_bytes(folder: Path) -> int:
    """Bytes that are free on the disk of a folder, which need not exist yet."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def require_free(folder: Path, size: int, what: str) -> None:
    """Refuse to begin to write what would not fit.

    Raises:
        OSError: what it takes, and what is free.
    """
    free = free_bytes(folder)
    if size > free:
        raise OSError(
            errno.ENOSPC,
            f"{what} takes about {size / 2**30:.2f} GiB, and {folder} has {free / 2**30:.2f} GiB"
            " free; make room, or choose another folder",
        )


def file_sizes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 if there is none."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def text_shards(folder: str | Path) -> list[Path]:
    """Return the files of a states folder that each hold one text with its tokens, oldest first."""
    return sorted(Path(at_home(folder)).glob(f"{TEXT_SHARD}*.safetensors"))
