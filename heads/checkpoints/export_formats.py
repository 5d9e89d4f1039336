"""Writes a head in another project's format, by the tables of `formats.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..base import DraftHead, dtype_name
from ..dflash import DFlashHead
from ..dflash.formats import DFLASH
from ..dspark import DSparkHead
from ..dspark.formats import DSPARK
from ..eagle import EagleHead
from ..eagle3 import Eagle3Head
from ..eagle3.formats import EAGLE3
from ..medusa import MedusaHead
from ..mtp import MtpHead
from .files import CONFIG_FILE, WEIGHTS_FILE, Contents, new_folder, read_json
from .formats import FORMATS
from .public import public
from .tables import LLAMA, places, speculators_keys

PROJECTS: dict[str, dict[type[DraftHead], str]] = {
    "speculators": {
        Eagle3Head: "speculators",
        EagleHead: "speculators-eagle",
        DFlashHead: "speculators-dflash",
        DSparkHead: "speculators-dspark",
    },
    "fasterdecoding": {MedusaHead: "fasterdecoding"},
    "safeailab": {Eagle3Head: "eagle3", EagleHead: "eagle"},
}
"""By the name in `--to`: the heads that a project has, and the row of `FORMATS` in which it writes
them."""
PICKLES = {"safeailab": "pytorch_model.bin", "fasterdecoding": "medusa_lm_head.pt"}
"""Weight files of the projects whose code reads no safetensors."""
SAFEAILAB_LACKS = (
    "fc_norm",
    "norm_output",
    "norm_before_fc",
    "norm_before_residual",
    "qk_norm",
    "attention_bias",
    "sliding_window",
)
"""Options of EAGLE-3 that its authors' code does not have."""


def export_head(
    head: DraftHead,
    project: str,
    folder: str | Path,
    embedding_VD: Tensor | None = None,
    architectures: tuple[str, ...] = ("LlamaForCausalLM",),
) -> None:
    """Write a head for another project; `folder` appears whole or not at all.

    speculators and SafeAILab keep the target's embedding in the file; speculators also names its
    architectures.

    Raises:
        ValueError: the project has no such head, or no way to express one of its options; named.
    """
    # 1. What the project has no words for.
    if project not in PROJECTS:
        raise ValueError(f"unknown project {project!r}; choose from {', '.join(PROJECTS)}")
    if project == "speculators" and isinstance(head, MtpHead):
        raise ValueError(
            "speculators reads an MTP head's folder as it is: nothing is exported for it"
        )
    name = PROJECTS[project].get(type(head))
    if name is None:
        names = ", ".join(kind.__name__ for kind in PROJECTS[project])
        raise ValueError(f"{project} has no {type(head).__name__}; it has {names}")
    if -1 in head.feature_layers and isinstance(head, Eagle3Head):
        raise ValueError(f"{project} has no feature layer -1, the state after the final norm")
    if project == "speculators" and getattr(head.config, "attention_bias", False):
        raise ValueError(
            "speculators has no biases of queries, keys and values without one of attention's"
            " output"
        )

    # 2. The config, in its words.
    if project == "speculators":
        config = _speculators_config(head, architectures)
    elif project == "safeailab":
        config = _safeailab_config(head)
    else:
        config = _fasterdecoding_config(head)

    # 3. The tensors, each under its name there.
    form = FORMATS[name]
    tensor_places = list(places(form, head))
    missing = head.state_dict().keys() - {place.ours for place in tensor_places}
    if missing:
        raise ValueError(f"{project} has no place for {', '.join(sorted(missing))}")
    tensors = {place.theirs: place.tensor.cpu().contiguous() for place in tensor_places}
    if "embed_tokens.weight" not in tensors and name in ("speculators", "eagle3", "eagle"):
        if embedding_VD is None:
            raise ValueError(f"{project} keeps the target's embedding in the file: it is needed")
        tensors["embed_tokens.weight"] = (
            embedding_VD.to(next(head.parameters()).dtype).cpu().contiguous()
        )
    # What is written here must be readable by `import_formats`, which knows these keys.
    unknown = config.keys() - form.keys.keys()
    assert not unknown, unknown

    # 4. The files, in the place of an earlier export, which is recognised by the keys of its
    #    config.json: a model's own, beside weights of the same names, has others.
    config = public(config)

    def written_here(earlier: Path) -> bool:
        try:
            return read_json(earlier / CONFIG_FILE).keys() == config.keys()
        except ValueError:
            return False

    names_of_files = (CONFIG_FILE, WEIGHTS_FILE, *PICKLES.values())
    contents = Contents(f"a head for {project}", names_of_files, written_here)
    with new_folder(folder, contents) as partial:
        (partial / CONFIG_FILE).write_text(
            json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8"
        )
        if project == "speculators":
            save_file(tensors, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        else:  # the files of their own code
            torch.save(tensors, partial / PICKLES[project])


def _safeailab_config(head: DraftHead) -> dict[str, Any]:
    """SafeAILab's keys, which are those that servers read."""
    config = head.server_config()
    if isinstance(head, EagleHead):
        return config
    assert isinstance(head, Eagle3Head)
    lacks = [name for name in SAFEAILAB_LACKS if getattr(head.config, name)]
    if head.config.num_layers > 1:
        lacks.append("num_layers above 1")
    # Its code computes the feature layers from the number of blocks and reads none.
    blocks = head.target.num_layers
    layers = list(head.feature_layers)
    if layers != [1, blocks // 2 - 1, blocks - 4]:
        lacks.append(f"feature_layers {layers}")
    if lacks:
        raise ValueError(f"SafeAILab's code has no {lacks[0]}")
    return config


def _fasterdecoding_config(head: DraftHead) -> dict[str, Any]:
    assert isinstance(head, MedusaHead)
    if head.config.draft_vocab_size is not None:
        raise ValueError(
            "FasterDecoding's heads have the target's whole vocabulary, no draft_vocab_size"
        )
    if not head.config.bias:
        raise ValueError(
            "FasterDecoding's blocks have a bias: heads with bias: false cannot be written"
        )
    config = {
        "medusa_num_heads": head.config.num_heads,
        "medusa_num_layers": head.config.num_layers,
        "base_model_name_or_path": head.target.name,
    }
    return config if head.config.lm_head == "own" else config | {"version": "2"}


def _speculators_config(head: DraftHead, architectures: tuple[str, ...]) -> dict[str, Any]:
    native = head.server_config()
    layer = {
        name: value for name, value in native.items() if name in LLAMA.keys() - {"architectures"}
    }
    layer["model_type"] = "qwen3" if head.shape.qk_norm else "llama"

    # 1. What differs by head.
    if isinstance(head, Eagle3Head):
        kind = "eagle3"
        version = "0.3.0"
        classes = ["Eagle3DraftModel"]
        head_keys = {name: native[name] for name in EAGLE3}
    elif isinstance(head, DFlashHead):
        kind = "dflash"
        version = "0.9.0"
        classes = ["DFlashSpeculator"]
        if isinstance(head, DSparkHead):
            kind = "dspark"
            classes = ["DSparkSpeculator"]
        head_keys = {name: native[name] for name in DFLASH | DSPARK if name in native} | {
            # counted by a block's input
            "aux_hidden_state_layer_ids": [layer + 1 for layer in head.feature_layers],
            "mask_token_id": head.mask_token,
            # Without windows it means nothing in speculators, and vLLM would take a false for
            # causal blocks.
            "sliding_window_non_causal": not (any(head.sliding) and head.config.sliding_causal),
        }
    else:
        kind = "eagle"
        version = "0.3.0"
        classes = ["EagleSpeculator", "LlamaDecoderLayer"]
        head_keys = {
            "layernorms": False,
            "fusion_bias": native["bias"],
            "transformer_layer_architecture": classes[1],
        }

    # 2. What all have.
    return {
        **speculators_keys(kind, version, classes, head, list(architectures)),
        "transformer_layer_config": layer,
        "torch_dtype": dtype_name(next(head.parameters()).dtype),
        **head_keys,
    }
