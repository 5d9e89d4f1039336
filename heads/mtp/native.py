"""MTP heads in models' own checkpoints: read, and written back under their family's names.

    mtp.fc.weight, mtp.layers.0.*                     Qwen3-Next, Qwen3.5, Mellum
    model.layers.{L}.eh_proj.weight, ...              DeepSeek, GLM: layers after the model's own L
    model.mtp_layers.0.input_proj.weight, ...         MiMo
    model.mtp_linear_proj.0.weight, ...               ERNIE 4.5
    mtp.layers.0.eh_proj.weight, mtp.layers.1.*       Nemotron-H: the blocks of one layer
    mtp_layers.0.input_proj.weight, ...               the package speculators

transformers drops these tensors on loading; here only the files that hold them are opened.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...files import one_line
from ..base import TargetInfo
from ..by_name import build_head
from ..checkpoints.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Contents,
    files_of_tensors,
    new_folder,
    open_safetensors,
)
from ..checkpoints.hub import local_folder
from ..checkpoints.save_load import FLOATS, build_unloaded, take_dtypes, tensor_problem
from .head import MtpHead

NATIVE = "mtp"
"""The head of a target that brings its own, where a command or a program names a head."""
RECURRENT_DEPTH = 8
"""Most tokens that one layer drafts, used again and again."""
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
MTP_FILE = "model-mtp.safetensors"
"""The file that a written MTP head gets in its model's checkpoint."""
MODELS = ("model.", "model.language_model.", "language_model.model.")
"""How the names of a decoder's tensors begin, of multimodal models too."""
REST_FILE = "model-rest.safetensors"
"""The file of all other tensors of a checkpoint that had one: beside an index, its own name would
be read alone."""
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
"""One expert's matrix, which transformers keeps in one tensor for all."""
IN_BLOCK = re.compile(r"mtp_layers\.\d+\.blocks\.(\d+)\.")
"""Names here of a layer that is several blocks of its model."""


@dataclass(frozen=True)
class Family:
    """How a family of models names the tensors of its MTP layers, and what these compute."""

    names: dict[str, str]
    """Beginnings of names to those here. {l} counts layers, {n} too, from the number of the model's
    own blocks on, and {b} the blocks of the only layer."""
    copies: tuple[str, ...] = ()
    """Ends of names of copies of the model's embedding and LM head, which are not read."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `MtpConfig`."""
    mark: str = ""
    """Text that at least one name must contain, for a family whose names begin as another's do."""
    shared: dict[str, str] = field(default_factory=dict)
    """Maps names of the model's own tensors that its MTP layers use too to names here."""


def _deepseek(model: str) -> Family:
    layer = f"{model}layers.{{n}}."
    return Family(
        {
            f"{layer}enorm.": "mtp_layers.{l}.token_layernorm.",
            f"{layer}hnorm.": "mtp_layers.{l}.hidden_layernorm.",
            f"{layer}eh_proj.": "mtp_layers.{l}.input_proj.",
            f"{layer}shared_head.norm.": "mtp_layers.{l}.final_layernorm.",
            layer: "mtp_layers.{l}.",
        },
        (".embed_tokens.weight", ".shared_head.head.weight"),
    )


def _nemotron(model: str) -> Family:
    first = f"{model}mtp.layers.0."
    return Family(
        {
            f"{first}enorm.": "mtp_layers.0.token_layernorm.",
            f"{first}hnorm.": "mtp_layers.0.hidden_layernorm.",
            f"{first}eh_proj.": "mtp_layers.0.input_proj.",
            f"{model}mtp.layers.{{b}}.final_layernorm.": "mtp_layers.0.final_layernorm.",
            f"{model}mtp.layers.{{b}}.": "mtp_layers.0.blocks.{b}.",
        },
        mark=".mixer.",
    )


FAMILIES: dict[str, Family] = {
    "nemotron": _nemotron(""),
    "nemotron (language_model)": _nemotron("language_model."),
    "qwen": Family(
        {
            "mtp.fc.": "mtp_layers.{l}.input_proj.",
            "mtp.norm.": "mtp_layers.{l}.final_layernorm.",
            "mtp.pre_fc_norm_hidden.": "mtp_layers.{l}.hidden_layernorm.",
            "mtp.pre_fc_norm_embedding.": "mtp_layers.{l}.token_layernorm.",
            "mtp.layers.{l}.": "mtp_layers.{l}.",
        },
        ("mtp.embed_tokens.weight", "mtp.lm_head.weight"),
    ),
    **{f"deepseek ({model})": _deepseek(model) for model in MODELS},
    "mimo": Family(
        {"model.mtp_layers.{l}.": "mtp_layers.{l}."},
        options={"hidden_first": True, "zero_first": True},
    ),
    "ernie": Family(
        {
            "model.mtp_emb_norm.{l}.": "mtp_layers.{l}.token_layernorm.",
            "model.mtp_hidden_norm.{l}.": "mtp_layers.{l}.hidden_layernorm.",
            "model.mtp_linear_proj.{l}.": "mtp_layers.{l}.input_proj.",
            "model.mtp_block.{l}.": "mtp_layers.{l}.",
        },
        shared={"model.norm.weight": "mtp_layers.{l}.final_layernorm.weight"},
    ),
    "speculators": Family(
        {"mtp_layers.{l}.": "mtp_layers.{l}."},
        ("embed_tokens.weight", "lm_head.weight"),
    ),
}
"""By name."""
REFUSED = {
    re.compile(r"model\.mtp\.layers\.\d+\.pre_mlp_layernorm\."): (
        "MiMo-V2's MTP layers attend to a sliding window with "
        "attention sinks, which a draft layer does not"
    ),
}
"""Names of MTP tensors that are known, and why no head is made of them."""
OTHERS = re.compile(r"(^|\.)mtp[._]|eh_proj|(^|\.)nextn")
"""Names that MTP tensors of other families have."""


class Found(NamedTuple):
    """MTP tensors of a checkpoint, by the names that it gives them."""

    family: Family
    names: dict[str, str]
    """Maps names in the checkpoint to names here."""
    copies: tuple[str, ...]
    """Names of copies of the model's embedding and LM head."""

    @property
    def read(self) -> set[str]:
        """Names of all tensors that the head is made of."""
        return self.names.keys() | self.family.shared.keys()


def find(names: Iterable[str], blocks: int, where: str) -> Found:
    """The MTP tensors among a checkpoint's names, of a model with so many blocks of its own.

    Raises:
        ValueError: there are none, or they are named as no family here names them, or of a kind
            that no head has.
    """
    names = sorted(names)
    # 1. Heads that are known and cannot be read.
    for pattern, reason in REFUSED.items():
        if any(pattern.match(name) for name in names):
            raise ValueError(
                f"the MTP head of {where} is not read: {reason}. Train one: `headstart train`"
            )
    # 2. The first family that names any of the tensors. With a mark "", any name counts.
    for family in FAMILIES.values():
        found = _found(family, names, blocks)
        if any(family.mark in name for name in found.names):
            return found
    # 3. None, or one that looks like another family's.
    others = [name for name in names if OTHERS.search(name)]
    if others:
        raise ValueError(
            f"{where} brings an MTP head whose tensors are named as in no family here:"
            f" {', '.join(others[:3])}, ...; known are {', '.join(FAMILIES)}"
        )
    raise ValueError(
        f"{where} brings no MTP head: none of its {len(names)} tensors is called as in the families"
        f" {', '.join(FAMILIES)}. Train one: `headstart train --head.type mtp`"
    )


def _found(family: Family, names: list[str], blocks: int) -> Found:
    # "mtp.layers.{l}." becomes the pattern mtp\.layers\.(?P<l>\d+)\.
    patterns: dict[re.Pattern[str], str] = {}
    for theirs, ours in family.names.items():
        patterns[re.compile(re.sub(r"\\{(\w)\\}", r"(?P<\1>\\d+)", re.escape(theirs)))] = ours
    ours_by_name: dict[str, str] = {}
    copies = []
    for name in names:
        for pattern, ours in patterns.items():
            match = pattern.match(name)
            if match is None:
                continue
            # DeepSeek's layers follow the model's own blocks: model.layers.61 of a model with 61
            # blocks is layer 0, and model.layers.60 is not an MTP layer.
            numbers = {letter: int(digits) for letter, digits in match.groupdict().items()}
            layer = numbers["n"] - blocks if "n" in numbers else numbers.get("l", 0)
            if layer < 0:
                continue
            if name.endswith(family.copies):
                copies.append(name)
            else:
                beginning = ours.format(l=layer, b=numbers.get("b"))
                ours_by_name[name] = beginning + name[match.end() :]
            break
    return Found(family, ours_by_name, tuple(copies))


def read_native_mtp(
    source: str | Path,
    target: TargetInfo,
    layer: dict[str, Any],
    revision: str | None = None,
    **hub: Any,
) -> MtpHead:
    """The MTP head in a model's own checkpoint.

    Args:
        source: the model's folder or Hub id.
        target: its dimensions.
        layer: its text config, see `layers.target_layer.described`.
        revision: revision of the Hub id.
        hub: options of `hub.HUB_OPTIONS`.

    Raises:
        ValueError: a checkpoint without an MTP head or in another format than safetensors, or
            tensors that are missing, unknown or of another shape; each named.
    """
    # 1. The names of all tensors, from an index if there is one: nothing large is downloaded.
    folder = local_folder(source, revision, [CONFIG_FILE, INDEX_FILE], **hub)
    if not (folder / INDEX_FILE).is_file() and not (folder / WEIGHTS_FILE).is_file():
        folder = local_folder(source, revision, [CONFIG_FILE, WEIGHTS_FILE], **hub)
    files = _files_of_tensors(folder, source)
    found = find(files, target.num_layers, repr(str(source)))

    # 2. The files that hold the MTP tensors, and only those.
    names = found.read & files.keys()
    wanted = sorted({files[name] for name in names})
    if not all((folder / file).is_file() for file in wanted):
        folder = local_folder(source, revision, wanted, **hub)
    return head_of_tensors(found, _read_all(folder, files, names), target, layer, repr(str(source)))


def head_of_tensors(
    found: Found,
    tensors: dict[str, Tensor],
    target: TargetInfo,
    layer: dict[str, Any] | None,
    where: str,
    options: dict[str, Any] | None = None,
) -> MtpHead:
    """A head of MTP tensors by their names in a checkpoint; see `read_native_mtp`."""
    # 1. The tensors by their names here.
    state: dict[str, Tensor] = {}
    theirs: dict[str, str] = {}
    try:
        tensors = _dequantized(tensors)
        for name in found.names.keys() & tensors.keys():
            state[found.names[name]] = tensors[name]
            theirs[found.names[name]] = name
        state = _joined_experts(state)
    except (RuntimeError, ValueError) as error:  # shapes that do not belong together
        raise ValueError(f"{where}: its MTP head cannot be read: {one_line(error)}") from error
    numbers = {int(name.split(".")[1]) for name in state}
    layers = max(numbers) + 1
    for name in found.family.shared.keys() & tensors.keys():
        for number in range(layers):
            state[found.family.shared[name].format(l=number)] = tensors[name]

    # 2. The head's options. Several layers draft one depth each.
    depth = layers if layers > 1 else RECURRENT_DEPTH
    chosen = {
        "num_layers": layers,
        "depth": depth,
        "layer": layer,
        **found.family.options,
        **(options or {}),
    }
    try:
        expected = build_unloaded("mtp", chosen, target, len(state)).state_dict()
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error

    # 3. Names, shapes and values, in the checkpoint's own names.
    named = _names_there(found.family, expected, target.num_layers)
    problems = [f"missing tensor {named[name]!r}" for name in expected if name not in state]
    problems += [
        f"unknown tensor {theirs.get(name, name)!r}" for name in state if name not in expected
    ]
    for name in expected.keys() & state.keys():
        dtypes = (*FLOATS, torch.float64)
        problem = tensor_problem(named[name], state[name], expected[name], dtypes)
        if problem:
            problems.append(problem)
    if problems:
        raise ValueError(f"{where}: its MTP head cannot be read: " + "; ".join(sorted(problems)))

    # 4. The head itself, in the dtypes of the checkpoint.
    head = build_head("mtp", chosen, target)
    assert isinstance(head, MtpHead)
    take_dtypes(head, state)
    head.load_state_dict(state)
    return head


def _names_there(family: Family, ours: Iterable[str], blocks: int) -> dict[str, str]:
    """Map the names of a head's tensors here to those in a checkpoint of a family."""
    named: dict[str, str] = {}
    # A layer's last block has the layer's last norm.
    last = max((int(match[1]) for name in ours if (match := IN_BLOCK.match(name))), default=None)
    for name in ours:
        layer = int(name.split(".")[1])
        in_block = IN_BLOCK.match(name)
        block = last if in_block is None else int(in_block[1])
        # The first prefix that fits: a family's special names stand before its general ones.
        for theirs, prefix in (family.shared | family.names).items():
            beginning = prefix.format(l=layer, b=block)
            if name.startswith(beginning):
                their_beginning = theirs.format(l=layer, n=blocks + layer, b=block)
                named[name] = their_beginning + name[len(beginning) :]
                break
    return named


def _files_of_tensors(folder: Path, source: str | Path) -> dict[str, str]:
    """The file of each of a checkpoint's tensors."""
    for name in (INDEX_FILE, WEIGHTS_FILE):
        if (folder / name).is_file():
            return files_of_tensors(folder / name)
    raise ValueError(
        f"{str(source)!r} has no {WEIGHTS_FILE} and no {INDEX_FILE}, in which an MTP head is"
        " looked for"
    )


def _read_all(folder: Path, files: dict[str, str], names: Collection[str]) -> dict[str, Tensor]:
    """Some of the tensors of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for file in sorted({files[name] for name in names}):
        tensors |= _read(folder / file, [name for name in names if files[name] == file])
    return tensors


def _read(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Some of the tensors of a file."""
    with open_safetensors(path) as file:
        held = set(file.keys())
        missing = [name for name in names if name not in held]
        if missing:
            raise ValueError(f"{path} lacks tensor {missing[0]!r}, which the index has there")
        return {name: file.get_tensor(name) for name in names}


def _dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, those in fp8 multiplied by their blocks' scales (DeepSeek's format)."""
    dequantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scales = tensors.get(f"{name}_scale_inv")
        if scales is not None:
            rows, columns = tensor.shape
            tall = -(-rows // scales.shape[0])
            wide = -(-columns // scales.shape[1])
            # A block's side is a power of two; the last block may be cut off. 576 rows with 5
            # scales: at least 116 rows a block, so 128.
            side = 1 << (max(tall, wide) - 1).bit_length()
            factor = (
                scales.float()
                .repeat_interleave(side, 0)
                .repeat_interleave(side, 1)[:rows, :columns]
            )
            tensor = (tensor.float() * factor).to(torch.bfloat16)
        dequantized[name] = tensor
    return dequantized


def _joined_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state in which the matrices of all experts are one tensor, as transformers has them."""
    # 1. The matrices of experts, by layer, number and kind.
    joined: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in state.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            joined[name] = tensor
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
    # 2. [experts, out, in] of each layer; gate and up lie in one tensor, the gate's rows first.
    for name, matrices in experts.items():
        numbers = range(1 + max(number for number, _ in matrices))
        gated = any(kind == "gate_proj" for _, kind in matrices)  # Nemotron-H's experts are not
        kinds = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
        for number in numbers:
            for kind in kinds:
                if (number, kind) not in matrices:
                    raise ValueError(
                        f"the MTP head lacks tensor {f'{name}.{number}.{kind}.weight'!r}"
                    )
        up = [matrices[number, "up_proj"] for number in numbers]
        if gated:
            gate_up = [torch.cat([matrices[number, "gate_proj"], up[number]]) for number in numbers]
            joined[f"{name}.gate_up_proj"] = torch.stack(gate_up)
        else:
            joined[f"{name}.up_proj"] = torch.stack(up)
        joined[f"{name}.down_proj"] = torch.stack(
            [matrices[number, "down_proj"] for number in numbers]
        )
    return joined


def _split_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state with a tensor for each matrix of an expert, as checkpoints have them."""
    split: dict[str, Tensor] = {}
    for name, tensor in state.items():
        beginning, _, last = name.rpartition(".")
        if not beginning.endswith(".experts"):
            split[name] = tensor
            continue
        for number, matrix in enumerate(tensor):
            if last == "gate_up_proj":
                gate, up = matrix.chunk(2)
                split[f"{beginning}.{number}.gate_proj.weight"] = gate
                split[f"{beginning}.{number}.up_proj.weight"] = up
            else:
                split[f"{beginning}.{number}.{last}.weight"] = matrix
    return split


def write_native_mtp(
    head: MtpHead, source: str | Path, output: str | Path, revision: str | None = None
) -> None:
    """Write a copy of a model's checkpoint in which this head replaces the model's MTP head.

    The tensors get the names and dtypes that they have there. Files without any of them are copied
    as they are.

    Args:
        head: an MTP head for this model.
        source: the model's folder or Hub id.
        output: folder to write, which appears whole or not at all.
        revision: revision of the Hub id.

    Raises:
        ValueError: a model that brings none, so that its family has no names for it, or one of
            another shape.
    """
    # 1. The model's MTP head, which this one must resemble.
    folder = local_folder(source, revision, ["*"])
    where = repr(str(source))
    files = _files_of_tensors(folder, source)
    found = find(files, head.target.num_layers, where)
    old = _read_all(folder, files, found.read & files.keys())
    if any(name.endswith("_scale_inv") for name in old):
        raise ValueError(
            f"{where} holds its MTP head in fp8, which is not written: export it as a folder of"
            " its own"
        )
    before = head_of_tensors(found, old, head.target, head.config.layer, where)
    for option in ("num_layers", "hidden_first", "zero_first"):
        if getattr(before.config, option) != getattr(head.config, option):
            raise ValueError(
                f"{where} brings an MTP head with {option} {getattr(before.config, option)}, and"
                f" this one has {getattr(head.config, option)}"
            )
    # 2. Tensors that the MTP layers share with the model cannot change.
    state = head.state_dict()
    for ours in found.family.shared.values():
        for number in range(head.config.num_layers):
            name = ours.format(l=number)
            if not torch.equal(state[name].cpu(), before.state_dict()[name].to(state[name].dtype)):
                raise ValueError(
                    f"{where} has no place for {name!r}, which was trained here: its MTP head uses"
                    " the model's own norm; export it as a folder of its own"
                )

    # 3. The tensors by the checkpoint's names, in its dtypes.
    if any(EXPERT.fullmatch(ours) for ours in found.names.values()):
        state = _split_experts(state)
    new = {}
    for name, ours in found.names.items():
        new[name] = state[ours].detach().to("cpu", old[name].dtype).contiguous()

    # 4. The copy, with a new index: the MTP head is in a file of its own.
    contents = Contents(
        "a model with an MTP head", ("*",), lambda written: (written / MTP_FILE).is_file()
    )
    with new_folder(output, contents) as partial:
        rest = _copy_rest(folder, partial, files, set(new))
        save_file(new, partial / MTP_FILE, metadata={"format": "pt"})
        index = {
            "metadata": {},
            "weight_map": dict(sorted((rest | dict.fromkeys(new, MTP_FILE)).items())),
        }
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_rest(
    folder: Path, output: Path, files: dict[str, str], replaced: set[str]
) -> dict[str, str]:
    """Copy a model's files without the replaced tensors; return the files of the other tensors."""
    touched = {files[name] for name in replaced}
    rest = {name: file for name, file in files.items() if name not in replaced}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name == INDEX_FILE or name.startswith("."):
            continue
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        if name not in touched:
            shutil.copyfile(path, output / name)
            continue
        # A file with some of the replaced tensors is written again without them, or dropped if it
        # has no others.
        tensors = [tensor for tensor, file in rest.items() if file == name]
        if not tensors:
            continue
        new_name = REST_FILE if name == WEIGHTS_FILE else name
        rest |= dict.fromkeys(tensors, new_name)
        save_file(_read(path, tensors), output / new_name, metadata={"format": "pt"})
    return rest
