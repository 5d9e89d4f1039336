"""Import another project's head: `headstart import FOLDER_OR_ID --target MODEL --output FOLDER`.

FasterDecoding/Medusa, SafeAILab/EAGLE (1, 2 and 3), Hydra, SpecForge, speculators, ModelOpt, and
what vLLM reads, recognised by their files. The tensors decide: each must have its place, and a key
of config.json that contradicts them, or that changes what a layer computes in a way that no head
here supports, is an error that names it. Other keys, which configs inherit from their target, are
kept and named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.console import log
from headstart.options import CommandOptions
from headstart.scripts.command_line import options


@dataclass(frozen=True)
class ImportConfig(CommandOptions):
    """A head of another project, converted to ours."""

    required = ("head", "target", "output")
    most_used = ("head", "target", "output")

    head: str = ""
    """The other project's checkpoint folder or Hub id."""
    target: str = ""
    """The model that the head drafts for: a folder, a Hub id, a GGUF file, or package:NAME."""
    output: str = ""
    """Folder to write."""
    revision: str | None = None
    """Revision of the Hub id."""
    token: str | None = None
    """Access token of the Hub; null for the one that is logged in."""


def main(arguments: list[str]) -> None:
    """Run `headstart import` with these command-line arguments."""
    import_foreign(options(ImportConfig, "import", __doc__, arguments, first="head"))


def import_foreign(config: ImportConfig) -> None:
    """Read another project's head and save it as ours."""
    from headstart.files import BROKEN, LONGEST_REASON, one_line
    from headstart.heads import CheckpointMetadata
    from headstart.heads.checkpoints.files import HEAD, read_json, read_weights, refuse_foreign
    from headstart.heads.checkpoints.hub import local_folder
    from headstart.heads.checkpoints.import_formats import import_head
    from headstart.heads.checkpoints.reading import TargetParts
    from headstart.heads.checkpoints.save_load import save_head
    from headstart.scripts.load_target import embedding_of, original_target

    # 1. Read the other project's files.
    refuse_foreign(config.output, HEAD)
    folder = local_folder(config.head, config.revision, token=config.token)
    foreign_config = read_json(folder / "config.json")
    if "headstart" in foreign_config:
        raise ValueError(f"{config.head!r} was written by headstart: it needs no import")
    tensors = read_weights(folder)

    # 2. Convert them. What a project leaves out of its files is the target's.
    target = original_target(config.target, token=config.token)
    lm_head_VD = target.modules.lm_head_rows(None).cpu()
    parts = TargetParts(embedding_of(target), lm_head_VD, target.config.to_dict())
    try:
        head, read = import_head(foreign_config, tensors, target.info, parts)
    # others' options have any type, and their tensors any shape: torch's errors are RuntimeError
    except (RuntimeError, *BROKEN) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        reason = one_line(reason, 5 * LONGEST_REASON)
        raise ValueError(f"no head can be imported from {config.head!r}: {reason}") from error

    # 3. Save the head, with what it was made from.
    source: dict[str, Any] = {"from": config.head, "revision": config.revision, "format": read.form}
    source |= {"remarks": read.remarks, "unread": read.unread}
    save_head(head, config.output, CheckpointMetadata(training={"imported": source}))
    for remark in read.remarks:
        log.info(f"- {remark}")
    name = type(head).__name__
    size = sum(weight.numel() for weight in head.parameters())
    log.info(
        f"{config.output}: {name} of {size:,} parameters, read as {read.form}. Check it with "
        f"`headstart verify {config.output} --target {config.target}`"
    )
