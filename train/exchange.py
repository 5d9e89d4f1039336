"""Heads that leave and heads that come: `headstart push`, `import` and `export`."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ..heads import DraftHead, TruncatedHead
from ..heads.checkpoints.conversion import import_head
from ..heads.checkpoints.export_formats import PROJECTS, export_head
from ..heads.checkpoints.files import read_json, read_weights
from ..heads.checkpoints.hub import local_folder, push_folder
from ..heads.checkpoints.model_card import Listing
from ..heads.checkpoints.quantized import quantize, unread_by
from ..heads.checkpoints.save_load import CheckpointMetadata, adapter_of, load_head, new_folder, publishable, save_head
from ..inference import Target, TreeShape, load_tokenizer
from ..inference.models.dtypes import own_dtype
from ..inference.models.loading import default_device
from .checkup import PROMPTS
from .commands import ExportConfig, ImportConfig, PushConfig
from .console import log
from .data.chat_template import prompt_ids
from .evaluate import real_acceptance

NEW_TOKENS = 48
"""Tokens of each answer by which an int8 head is compared."""


def original(source: str, dtype: torch.dtype | None = None) -> Target:
    """A target in its checkpoint's own format, or in this one: what is written does not depend on this machine."""
    return Target.load(source, dtype or own_dtype(source)[0], default_device())


def push_head(config: PushConfig) -> None:
    """Upload a head's checkpoint, or show what would be.

    Raises:
        ValueError: no head there, or the Hub refuses.
    """
    run = Path(config.run)
    folder = run / "best" if (run / "best").is_dir() else run
    if not folder.is_dir():
        raise ValueError(f"no run and no head at {config.run!r}")
    head, _ = load_head(folder)
    shared = {}
    if head.served_names:
        target = original(config.target or head.target.name)
        head.target.check(target.info)
        shared = dict.fromkeys(head.served_names, target.modules.lm_head.weight.detach())
    with tempfile.TemporaryDirectory() as scratch:
        ready = Path(scratch) / "head"
        publishable(folder, ready, Listing(config.repo, config.base_model, config.license), shared)
        for path in sorted(path for path in ready.rglob("*") if path.is_file()):
            log.info(f"{path.stat().st_size:>14,} bytes  {path.relative_to(ready)}")
        for server, reason in unread_by(head).items():
            log.info(f"{server} does not read this head: {reason}")
        if config.dry_run:
            log.info((ready / "README.md").read_text(encoding="utf-8"))
            log.info("nothing was uploaded")
            return
        log.info(push_folder(ready, config.repo, config.private or None, config.token, config.branch, config.create_pr))


def import_foreign(config: ImportConfig) -> None:
    """Read another project's head and save it as ours.

    Raises:
        ValueError: anything in it that cannot be read for certain; named.
    """
    folder = local_folder(config.head, config.revision, config.token)
    found = read_json(folder / "config.json")
    if "headstart" in found:
        raise ValueError(f"{config.head!r} was written by headstart: it needs no import")
    tensors = read_weights(folder)
    target = original(config.target)
    imported = import_head(found, tensors, target.info, embedding_of(target))
    source = {"from": config.head, "revision": config.revision, "format": imported.form, "remarks": imported.remarks}
    save_head(imported.head, config.output, CheckpointMetadata(training={"imported": source}))
    for remark in imported.remarks:
        log.info(f"- {remark}")
    name, size = type(imported.head).__name__, sum(weight.numel() for weight in imported.head.parameters())
    log.info(
        f"{config.output}: {name} of {size:,} parameters, read as {imported.form}. Whether it was read right shows "
        f"`headstart verify {config.output} --target {config.target}`"
    )


def export_foreign(config: ExportConfig) -> None:
    """Write a head for another project.

    Raises:
        ValueError: no head there, or one that the project cannot have.
    """
    own = {"merged": export_merged, "int8": export_int8, "model": export_model}
    if config.to not in (*PROJECTS, *own):
        raise ValueError(f"unknown project {config.to!r}; choose from {', '.join((*PROJECTS, *own))}")
    head, metadata = load_head(config.head)
    if config.to in own:
        own[config.to](head, metadata, config)
        return
    embedding_VD, architectures = None, ("LlamaForCausalLM",)
    if config.to != "fasterdecoding":
        target = original(config.target or head.target.name)
        head.target.check(target.info)
        embedding_VD, architectures = embedding_of(target), tuple(target.model.config.architectures or ())
    export_head(head, metadata, config.to, config.output, embedding_VD, architectures)
    log.info(f"{config.output}: written for {config.to}")


def export_merged(head: DraftHead, metadata: CheckpointMetadata, config: ExportConfig) -> None:
    """Write a target with its head's adapter merged in, in transformers' format, and the head without the adapter.

    Raises:
        ValueError: a head without an adapter.
    """
    if not metadata.adapted:
        raise ValueError(f"{config.head!r} has no adapter: its target is the original model, there is nothing to merge")
    source = config.target or head.target.name
    target, tokenizer = original(source), load_tokenizer(source)
    head.target.check(target.info)
    target.merge_adapter(adapter_of(config.head))
    final = Path(config.output)
    with new_folder(final) as partial:
        save_model(target, partial / "target")
        tokenizer.save_pretrained(partial / "target")
        origin = metadata.origin | Target(target.model, str(final / "target")).origin
        head.target = dataclasses.replace(head.target, name=str(final / "target"))
        save_head(head, partial / "head", dataclasses.replace(metadata, adapted=False, origin=origin))
    log.info(f"{final / 'target'}: the model with the adapter merged in; {final / 'head'}: the head for it")


def export_int8(head: DraftHead, metadata: CheckpointMetadata, config: ExportConfig) -> None:
    """Write a head with int8 weights, and say what they change.

    Raises:
        ValueError: a head with an adapter, which stays in its own folder; torchao is not installed.
    """
    if metadata.adapted:
        raise ValueError(f"{config.head!r} has an adapter: export it as merged first, then its head as int8")
    source, dtype = config.target or head.target.name, next(head.parameters()).dtype
    target, tokenizer = original(source, dtype), load_tokenizer(source)
    head.target.check(target.info)
    head = head.to(target.device).eval()
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}])[0] for text in PROMPTS]

    def accepted() -> float:
        return real_acceptance(target, head, TreeShape.chain(head.max_depth), prompts, NEW_TOKENS).acceptance_length

    before = accepted()
    quantize(head)
    after = accepted()
    save_head(head, config.output, metadata)
    log.info(
        f"{config.output}: int8 weights; acceptance length on a chain of {head.max_depth}, {len(prompts)} built-in "
        f"prompts: {before:.3f} in {str(dtype).removeprefix('torch.')}, {after:.3f} in int8 ({after / before - 1:+.1%})"
    )


def export_model(head: DraftHead, metadata: CheckpointMetadata, config: ExportConfig) -> None:
    """Write a model that was cut out of its target as one by itself, in transformers' format.

    Raises:
        ValueError: a head that is no model.
    """
    if not isinstance(head, TruncatedHead):
        raise ValueError(f"{config.head!r} holds a {type(head).__name__}, which reads its target's features: no model")
    source, dtype = config.target or head.target.name, next(head.parameters()).dtype
    target, tokenizer = original(source, dtype), load_tokenizer(source)
    head.target.check(target.info)
    keys = {key: value for key, value in head.server_config().items() if not key.startswith("rope_")}
    embedding_VD, lm_head_VD = embedding_of(target), target.modules.lm_head.weight.cpu()
    # A target may scale what its embedding gives: then the two are no longer one.
    tied = bool(target.config.tie_word_embeddings) and torch.equal(embedding_VD, lm_head_VD)
    whole = LlamaConfig(**keys | {"tie_word_embeddings": tied, "rope_parameters": head.target.rope_parameters})
    model: Any = LlamaForCausalLM._from_config(whole, dtype=dtype)
    ours = {f"model.{name}": tensor for name, tensor in head.state_dict().items()}
    ours |= {"model.embed_tokens.weight": embedding_VD, "lm_head.weight": lm_head_VD}
    model.load_state_dict(ours)
    model.generation_config = target.model.generation_config
    with new_folder(Path(config.output)) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    size = sum(weight.numel() for weight in model.parameters())
    log.info(f"{config.output}: a model of {size:,} parameters, for transformers, vLLM and SGLang")


def save_model(target: Target, folder: Path) -> None:
    """In transformers' format; a model that came out of a GGUF file is no longer packed and must not say so."""
    model = target.model
    if getattr(model, "hf_quantizer", None) is not None and target.origin["quantization"] in (None, "gguf"):
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
    model.save_pretrained(folder)


def embedding_of(target: Target) -> Tensor:
    """The target's embedding [V, D], on the CPU."""
    return target.modules.embed(torch.arange(target.info.vocab_size, device=target.device)).cpu()
