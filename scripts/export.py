"""Convert a head for another project: `headstart export HEAD --to speculators --output FOLDER`.

vLLM, SGLang and llama.cpp's converter read a head as it is: for them nothing needs to be exported,
and its card has their commands.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.console import log
from headstart.options import CommandOptions
from headstart.scripts.command_line import options

if TYPE_CHECKING:
    from headstart.heads import CheckpointMetadata, DraftHead

READERS = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llama.cpp": "llama.cpp",
    "llama_cpp": "llama.cpp",
    "gguf": "llama.cpp",
}
"""Servers that read a head as it is, by what users type for them in `--to`."""
NAMING = ("speculators", "fasterdecoding")
"""Projects whose config names the target."""
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
)
"""Patterns of what transformers writes for a model and its tokenizer."""


@dataclass(frozen=True)
class ExportConfig(CommandOptions):
    """A head, converted to another project's format."""

    required = ("head", "to", "output")
    most_used = ("head", "to", "output", "target")

    head: str = ""
    """The head's checkpoint folder or Hub id."""
    to: str = ""
    """The project: speculators, fasterdecoding or safeailab; servers read a head as it is. Or
    merged: the target with the head's adapter (Medusa-2) merged in, and the head for it. Or
    checkpoint: the target's own checkpoint with an MTP head in the place of the one that it
    brings."""
    output: str = ""
    """Folder to write."""
    target: str | None = None
    """The head's target, which fasterdecoding alone does not need; what the head's own config names
    is not opened."""
    base_model: str | None = None
    """The target's id on the Hub, which speculators and fasterdecoding have in their config, where
    the head was trained with a folder or a package."""


def main(arguments: list[str]) -> None:
    """Run `headstart export` with these command-line arguments."""
    export_foreign(options(ExportConfig, "export", __doc__, arguments, first="head"))


def export_foreign(config: ExportConfig) -> None:
    """Write a head for another project."""
    from headstart.heads.checkpoints.export_formats import PROJECTS, export_head
    from headstart.heads.checkpoints.save_load import load_head
    from headstart.scripts.load_target import embedding_of, published_name, target_of

    # Results that are not another project's format have functions of their own.
    ours = {"merged": export_merged, "checkpoint": export_checkpoint}
    if config.to not in (*PROJECTS, *ours, *READERS):
        raise ValueError(
            f"unknown project {config.to!r}; choose from {', '.join((*PROJECTS, *ours))}"
        )
    if config.base_model and config.to not in NAMING:
        raise ValueError(f"only {' and '.join(NAMING)} write a base_model, not {config.to!r}")
    head, metadata = load_head(config.head)
    if config.to in READERS:
        raise ValueError(reason_for_no_export(head, config))
    if config.to in ours:
        ours[config.to](head, metadata, config)
        return
    # The others' files hold the target's embedding, and speculators names its architecture.
    embedding_VD = None
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    if config.to != "fasterdecoding":
        target = target_of(head, config.target)
        embedding_VD = embedding_of(target)
        architectures = tuple(target.model.config.architectures or ())
    if config.to in NAMING:
        name = published_name(head, config.base_model)
        head.target = dataclasses.replace(head.target, name=name)
    export_head(head, config.to, config.output, embedding_VD, architectures)
    embedding = "" if embedding_VD is None else ", with the target's embedding, which it expects"
    log.info(
        f"{config.output}: written for {config.to}{embedding}; `headstart import` reads it again"
    )


def reason_for_no_export(head: DraftHead, config: ExportConfig) -> str:
    """Say why nothing is exported for a server, and what to do instead."""
    server = READERS[config.to]
    if server in head.unread_by:
        return f"{server} does not read this head: {head.unread_by[server]}"
    if head.served_names:
        return (
            f"{server} reads a head as it is, with the target's LM head, which this one shares:"
            f" `headstart push {config.head} --output FOLDER --target MODEL` writes both"
        )
    return (
        f"{server} reads this head as it is, nothing needs to be exported: the command is in its"
        " model card, README.md, and `headstart push` publishes it"
    )


def export_checkpoint(head: DraftHead, metadata: CheckpointMetadata, config: ExportConfig) -> None:
    """Write a copy of the target's checkpoint with an MTP head in place of its own."""
    from headstart.heads import MtpHead
    from headstart.heads.mtp.native import MTP_FILE, write_native_mtp
    from headstart.scripts.load_target import given_target

    if not isinstance(head, MtpHead):
        raise ValueError(
            f"{config.head!r} holds a {type(head).__name__}: a model's own checkpoint has MTP heads"
            " alone"
        )
    write_native_mtp(head, given_target(head, config.target), config.output)
    log.info(f"{config.output}: the model, with this MTP head in {MTP_FILE}")


def export_merged(head: DraftHead, metadata: CheckpointMetadata, config: ExportConfig) -> None:
    """Write the target with the head's adapter merged in, and the head without the adapter.

    The target is in transformers' format.
    """
    from headstart.heads.checkpoints.files import HEAD, Contents, new_folder, refuse_foreign
    from headstart.heads.checkpoints.hub import local_folder
    from headstart.heads.checkpoints.save_load import ADAPTER_FOLDER, save_head
    from headstart.inference import Target, load_tokenizer
    from headstart.scripts.load_target import given_target, target_of

    if not metadata.adapted:
        raise ValueError(
            f"{config.head!r} has no adapter: its target is the original model, there is nothing to"
            " merge"
        )

    # 1. Refuse a folder with other files than these before the target is loaded.
    model_files = tuple(f"target/{pattern}" for pattern in MODEL_FILES)
    head_files = tuple(f"head/{pattern}" for pattern in HEAD.files)
    both = Contents(
        "a merged model and its head",
        model_files + head_files,
        lambda out: HEAD.written_here(out / "head"),
    )
    refuse_foreign(config.output, both)

    # 2. Merge. The weights of a GGUF file are no longer packed, and must not say so.
    target = target_of(head, config.target)
    tokenizer = load_tokenizer(given_target(head, config.target))
    target.merge_adapter(local_folder(config.head) / ADAPTER_FOLDER)
    model = target.model
    final = Path(config.output)
    unpacked = target.provenance["quantization"] in (None, "gguf")
    if getattr(model, "hf_quantizer", None) is not None and unpacked:
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config

    # 3. Write both. The head's target is now the merged model, in its final place.
    with new_folder(final, both) as partial:
        model.save_pretrained(partial / "target")
        tokenizer.save_pretrained(partial / "target")
        provenance = metadata.provenance | Target(model, str(final / "target")).current_provenance()
        head.target = dataclasses.replace(head.target, name=str(final / "target"))
        save_head(
            head,
            partial / "head",
            dataclasses.replace(metadata, adapted=False, provenance=provenance),
        )
    log.info(
        f"{final / 'target'}: the model with the adapter merged in; {final / 'head'}: the head"
        " for it"
    )
