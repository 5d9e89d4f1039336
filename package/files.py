"""Files that appear whole or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


def write_whole(path: Path, text: str, mode: int = 0o666) -> Path:
    """Write a text file that no reader finds half-written, and return its path.

    `mode` holds the permissions of the file, less the umask.

    Raises:
        OSError: with the file's name and size; an older file is as it was.
    """
    try:
        with replacing(path) as partial:
            partial.touch(mode=mode)
            with partial.open("w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        size = f"{len(text) / 1e6:.1f} MB"
        raise OSError(
            error.errno, f"cannot write the {size} of {path}: {error.strerror}"
        ) from error
    return path


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
    return sorted(Path(folder).glob("recorded-*.safetensors"))
