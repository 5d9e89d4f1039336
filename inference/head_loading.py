"""A head for a target: loaded, compared with the target, and the adapter that it may bring.

A head object is checked as its folder would be.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..heads.base import CheckpointMetadata, DraftHead
from ..heads.checkpoints.files import CONFIG_FILE
from ..heads.checkpoints.save_load import (
    ADAPTER_FOLDER,
    differences,
    load_head,
    trained_for,
)
from ..heads.layers.target_layer import described
from ..heads.mtp.native import NATIVE, read_native_mtp
from .engines.encoder_decoder import Seq2SeqTarget
from .engines.target import Target
from .targets.loading import config_of, hub_options, locate


def check_configs(
    head: str | Path,
    head_revision: str | None,
    source: str | Path,
    revision: str | None,
    options: dict[str, Any],
) -> None:
    """Refuse a head that does not fit a target by their config files, before weights are read.

    `options` are those of the target. The config of a GGUF file is read with its weights.

    Raises:
        ValueError: no head at `head`, or one for a model of another width.
    """
    if head == NATIVE:
        return
    trained = trained_for(head, head_revision, **hub_options(options))
    config = config_of(source, revision, options)
    if config is None:
        return
    # A config may count blocks and tokens otherwise than the model that is built from it: the rest
    # is compared when it is there.
    width = getattr(config.get_text_config(), "hidden_size", trained.hidden_size)
    target = replace(trained, name=str(source), hidden_size=width)
    trained.check(target, f"the head at {str(head)!r}")


def load_fitting_head(
    head: str | Path | DraftHead,
    target: Target,
    revision: str | None = None,
    dtype_was_named: bool = True,
) -> DraftHead:
    """A head that fits the target, in its dtype; nothing is changed and nothing measured.

    The head "mtp" is the one in the target's own checkpoint. A Hub id is asked for with the
    target's options of the Hub. A warning names what differs between the target that the head was
    trained against and this one; the dtype only if it `was_named`.

    Raises:
        ValueError: a head for another target or for an encoder-decoder, or a head object in
            another dtype.
    """
    if isinstance(target, Seq2SeqTarget):
        raise ValueError(
            f"{target.name!r} is an encoder-decoder, which has no draft heads; give a drafter"
        )
    # 1. A head object, the target's own head, or a folder or Hub id.
    if isinstance(head, DraftHead):
        head.target.check(target.info)
        for parameter in head.parameters():
            if parameter.dtype != target.dtype:
                raise ValueError(
                    f"the head's parameters are {parameter.dtype}, the target's {target.dtype};"
                    " convert the head"
                )
        loaded = head
    elif head == NATIVE:
        if revision is not None:
            raise ValueError(
                f"the target's own MTP head has no revision of its own, {revision!r}; give the"
                " target's"
            )
        return native_head(target)
    else:
        loaded, _ = load_head(head, target.info, target.dtype, revision, **target.hub)
    # 2. The target that it was trained against, compared with this one. A dtype that nobody chose
    #    causes no warning.
    metadata = loaded.metadata or CheckpointMetadata()
    used = dict(target.provenance)
    if not dtype_was_named:
        used.pop("dtype")
    for difference in differences(metadata.provenance, used):
        warnings.warn(f"the head {_name_of(head)} may accept less here: {difference}", stacklevel=3)
    return loaded


def native_head(target: Target) -> DraftHead:
    """The MTP head in a target's own checkpoint, in its dtype.

    Raises:
        ValueError: a target that brings none, or was loaded from files without one.
    """
    if Path(NATIVE, CONFIG_FILE).is_file():
        raise ValueError(
            f"the head {NATIVE!r} is the target's own MTP head, and there is a folder of this name:"
            f" write './{NATIVE}' for that"
        )
    _, gguf = locate(target.name)
    if gguf is not None:
        raise ValueError(
            f"an MTP head is read from safetensors, and {target.name!r} is a GGUF file"
        )
    layer = described(target.config)
    head = read_native_mtp(target.name, target.info, layer, target.commit, **target.hub)
    head.metadata = CheckpointMetadata(provenance=dict(target.provenance))
    return head.to(target.dtype)


def merge_adapter_of(head: DraftHead, target: Target, allowed: bool) -> None:
    """Merge the adapter in a head's folder into the target.

    A head without an adapter, or a target that has this one already, stays unchanged.

    Raises:
        ValueError: an adapter without `allowed`, of an unknown folder, or for a target that has
            another one.
    """
    if head.metadata is None or not head.metadata.adapted:
        return
    # Loading the same head twice merges its adapter once.
    adapter = None if head.folder is None else head.folder / ADAPTER_FOLDER
    if adapter is not None and target.adapter == str(adapter.resolve()):
        return
    which = "an adapter, whose folder the head does not know"
    if adapter:
        which = f"the adapter {str(adapter)!r}"
    name = _name_of(head.folder or head)
    if target.adapter is not None:
        raise ValueError(
            f"the head {name} drafts for {target.name!r} with {which}; into this target"
            f" {target.adapter!r} is merged already: load it anew"
        )
    if adapter is None or not allowed:
        option = ", --allow-adapter for a command" if adapter is not None else ""
        raise ValueError(
            f"the head {name} drafts for {target.name!r} with {which}: merged into the model, it"
            f" changes what the model itself writes. allow_adapter=True{option} merges it; or call"
            " target.merge_adapter with its folder"
        )
    target.merge_adapter(adapter)


def _name_of(head: str | Path | DraftHead) -> str:
    return type(head).__name__ if isinstance(head, DraftHead) else repr(str(head))
