"""Files that appear whole or not at all, whatever happens to the process that writes them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write to, which takes its place as the block ends.

    If the block raises, what was written is removed and `path` is as it was. Every call yields another path: processes
    of several machines, which may have one number, write to one folder.
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
        raise OSError(error.errno, f"cannot write the {size} of {path}: {error.strerror}") from error
    return path
