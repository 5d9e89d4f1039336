"""Download and upload of checkpoints by the Hugging Face Hub's client.

The client's cache and offline mode are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ...files import at_home, example
from .files import CONFIG_FILE

FILES = ["*.json", "*.safetensors", "*.bin", "*.pt", "README.md", "adapter/*"]
"""Patterns of the files that are downloaded: all files of a head."""
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token")
"""Options of the Hub's client for where files are and how they are asked for."""
REASONS: dict[type[Exception], str] = {
    HFValidationError: "it is neither a folder nor a Hub id: {error}",
    GatedRepoError: "its repository is gated; ask for access, then give a token",
    RepositoryNotFoundError: (
        "neither a folder nor a repository of the Hub, unless it is private: give a token"
    ),
    RevisionNotFoundError: "the repository has no such revision",
    OfflineModeIsEnabled: "neither a folder, nor in the cache, nor can the Hub be asked",
    LocalEntryNotFoundError: "neither a folder, nor in the cache, nor can the Hub be asked",
    Exception: "the Hub cannot be read: {error}",
}
"""Messages of errors, the first matching class counting; the client's network library has errors of
its own."""


def local_folder(
    source: str | Path,
    revision: str | None = None,
    files: Sequence[str] = FILES,
    **hub: Any,
) -> Path:
    """Return the folder of a head: a folder itself, or where the files of a Hub id are.

    A run's folder stands for its best head, `best` in it. Only files of a Hub id that match the
    patterns in `files` are downloaded, unless they are in the cache. `hub` holds options of
    `HUB_OPTIONS`. Where the download fails, a ValueError has the Hub's reason.
    """
    assert hub.keys() <= set(HUB_OPTIONS)
    # A folder wins over a repository of the same name.
    folder = Path(example(source))
    if folder.is_dir():
        best = folder / "best"
        is_run = not (folder / CONFIG_FILE).is_file() and (best / CONFIG_FILE).is_file()
        return best if is_run else folder
    if hub.get("cache_dir") is not None:
        hub["cache_dir"] = at_home(hub["cache_dir"])
    where = f"{str(source)!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        return Path(
            snapshot_download(str(source), revision=revision, allow_patterns=list(files), **hub)
        )
    except Exception as error:
        reason = next(reason for kind, reason in REASONS.items() if isinstance(error, kind))
        raise ValueError(f"no head at {where}: {reason.format(error=error)}") from error


def push_folder(
    folder: Path,
    repo_id: str,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool = False,
    message: str = "A draft head",
) -> str:
    """Upload a folder as one commit, creating the repository if needed; returns the commit's URL.

    An upload that is interrupted or refused, with a ValueError, leaves the repository as it was.
    """
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if branch is not None:
            api.create_branch(repo, branch=branch, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=branch,
            create_pr=create_pr,
            commit_message=message,
        )
    except Exception as error:  # of any class: its network library differs between versions
        raise ValueError(f"{repo_id!r} cannot be pushed to: {error}") from error
    return str(commit.commit_url)
