"""Publish a head: `headstart push RUN --repo USER/NAME`, or write the files: `--output FOLDER`.

The folder that training wrote is what vLLM and SGLang load; its model card is written for the
repository. A head that shares the target's LM head gets a copy of it in the file, for servers. Only
a head's own files are uploaded, and local paths in card and config become names.
"""

from __future__ import annotations

import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from headstart.console import log
from headstart.options import CommandOptions
from headstart.scripts.command_line import options


@dataclass(frozen=True)
class PushConfig(CommandOptions):
    """A trained head, published on the Hugging Face Hub."""

    required = ("run",)
    most_used = ("run", "repo", "output", "dry_run", "base_model")

    run: str = ""
    """A run's folder, whose best head is taken, or a head's checkpoint folder."""
    repo: str = ""
    """The repository, USER/NAME; created if it does not exist."""
    output: str | None = None
    """Folder to write what would be uploaded to, for another place than the Hub; nothing is
    uploaded then."""
    private: bool = False
    """Make it private."""
    dry_run: bool = False
    """Show what would be uploaded, the card too, and upload nothing."""
    base_model: str | None = None
    """The target's id on the Hub, where the head was trained with a folder or a package."""
    license: str | None = None
    """The head's licence by the Hub's name, such as apache-2.0; the target's and the data's must
    allow it."""
    target: str | None = None
    """The target of a head that shares its LM head, which servers need in the file; what the head's
    own config names is not opened."""
    branch: str | None = None
    """Branch of the repository; null for main."""
    create_pr: bool = False
    """Open a pull request instead of committing."""
    token: str | None = None
    """Access token of the Hub; null for the one that is logged in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.repo and self.output is None:
            raise ValueError("option 'repo' or 'output' is required, and neither was given")


def main(arguments: list[str]) -> None:
    """Run `headstart push` with these command-line arguments."""
    push_head(options(PushConfig, "push", __doc__, arguments, first="run"))


def push_head(config: PushConfig) -> None:
    """Upload a head's checkpoint, or show what would be uploaded."""
    from headstart.heads.checkpoints.files import HEAD, new_folder
    from headstart.heads.checkpoints.hub import push_folder
    from headstart.heads.checkpoints.model_card import SELF, Listing
    from headstart.heads.checkpoints.save_load import load_head, publishable
    from headstart.scripts.load_target import published_name, target_of

    # 1. The head, and the target's LM head where servers expect it in the file.
    run = Path(config.run)
    folder = run / "best" if (run / "best").is_dir() else run
    if not folder.is_dir():
        raise ValueError(f"no run and no head at {config.run!r}")
    head, _ = load_head(folder)
    shared = {}
    if head.served_names:
        target = target_of(head, config.target, token=config.token)
        shared = dict.fromkeys(head.served_names, target.modules.lm_head.weight.detach())

    # 2. Write what would be uploaded into a folder of its own, and list it.
    with ExitStack() as until_uploaded:
        if config.output is not None:
            ready = until_uploaded.enter_context(new_folder(Path(config.output), HEAD))
        else:
            ready = Path(until_uploaded.enter_context(tempfile.TemporaryDirectory())) / "head"
        listing = Listing(config.repo or SELF, config.base_model, config.license)
        left_out = publishable(folder, ready, listing, shared)
        for path in sorted(path for path in ready.rglob("*") if path.is_file()):
            log.info(f"{path.stat().st_size:>14,} bytes  {path.relative_to(ready)}")
        if left_out:
            warnings.warn(f"not uploaded: {'; '.join(left_out)}", stacklevel=2)
        for server, reason in head.unread_by.items():
            log.info(f"{server} does not read this head: {reason}")

        card = (ready / "README.md").read_text(encoding="utf-8")
        published_name(head, config.base_model)  # called for its warning

        # 3. Upload it.
        if config.dry_run:
            log.info(card)
        if config.output is not None:
            log.info(f"{config.output}: written; nothing was uploaded")
            return
        if config.dry_run:
            log.info("nothing was uploaded")
            return
        log.info(
            push_folder(
                ready,
                config.repo,
                config.private or None,
                config.token,
                config.branch,
                config.create_pr,
            )
        )
