"""A target without its blocks: embedding, final norm and LM head, read by name from files.

The files are those of the target's checkpoint.

A head trains on states that something else computed, and needs of the target only these modules.
The other weights stay on torch's meta device, which takes no memory. A block can still be read for
itself, for a head that starts from one.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from ..extras import require_extra
from ..heads.base import dtype_name
from ..heads.checkpoints.files import files_of_tensors, open_safetensors
from .engines.target import Target
from .targets.info import FINGERPRINTED, before_lm_head, target_modules
from .targets.interface import fitting_logits
from .targets.loading import (
    downloaded_commit,
    generation_config_of,
    load_config,
    locate,
    model_loader,
    unloaded_model,
)

SMALL_VOCABULARY, SMALL_WIDTH = 64, 64
"""Tokens, and width of the MLP, of the small model with which the scale of logits is tried."""
LOAD_ALL = "or load the whole target (features.mode online, cached or auto)"
"""The way out of every error: what a checkpoint lacks here, loading the model finds or makes."""


class CheckpointTensors:
    """The tensors of a checkpoint in safetensors files, each read when it is asked for."""

    def __init__(self, source: str | Path, revision: str | None = None) -> None:
        """Find the files of a folder or a Hub id.

        From the Hub, only the files with tensors that are read are downloaded.

        Raises:
            ValueError: a GGUF file, or a checkpoint without safetensors files.
        """
        self.source = str(source)
        self._folder, gguf = locate(source)
        self._revision = revision
        self._renamed: dict[str, str] = {}
        if gguf is not None:
            raise ValueError(
                f"{self.source!r} is a GGUF file, whose tensors are not read by name; save the"
                " model once with transformers' save_pretrained and give that folder as target,"
                f" {LOAD_ALL}"
            )
        # A checkpoint in several files has an index of its tensors, one in a single file has none.
        index = self._path(SAFE_WEIGHTS_INDEX_NAME)
        if index is not None:
            self.files = files_of_tensors(index)
            """The file of each tensor."""
            return
        whole = self._path(SAFE_WEIGHTS_NAME)
        if whole is None:
            raise ValueError(
                f"{self.source!r} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME},"
                " from which single tensors are read; save the model in safetensors files,"
                f" {LOAD_ALL}"
            )
        self.files = files_of_tensors(whole)

    def rename_for(self, model: PreTrainedModel) -> None:
        """Learn how transformers renames this model's tensors as it loads them."""
        # Other conversions join or split tensors, which then cannot be read by one name.
        renamings = [
            conversion
            for conversion in get_model_conversion_mapping(model)
            if isinstance(conversion, WeightRenaming)
        ]
        for name in self.files:
            renamed = name
            for renaming in renamings:
                renamed, _ = renaming.rename_source_key(renamed)
            self._renamed.setdefault(renamed, name)

    def name_of(self, parameter: str, shape: torch.Size, base: str) -> str | None:
        """The checkpoint's name of a model's parameter; None if it has none.

        Checkpoints may lack the prefix `base` of the model's body, or put others before it.
        """
        # 1. As it is, without the prefix and with it: model.norm.weight, norm.weight.
        for name in (parameter, parameter.removeprefix(f"{base}."), f"{base}.{parameter}"):
            if name in self.files:
                return name
            if name in self._renamed:
                return self._renamed[name]
        # 2. With other prefixes: the only tensor of this shape that ends like the parameter. The
        #    ending gets shorter, from model.norm.weight to norm.weight; "weight" would fit any.
        ending = parameter
        while "." in ending:
            fitting = [
                name
                for name in self.files
                if name.endswith(f".{ending}") and self._shape(name) == shape
            ]
            if len(fitting) == 1:
                return fitting[0]
            ending = ending.partition(".")[2]
        return None

    def read(self, name: str) -> Tensor:
        """A tensor, in the checkpoint's dtype.

        Raises:
            ValueError: a file that is missing or cut, or a tensor that is not made of 16-bit or
                longer floats.
        """
        with open_safetensors(self._file(name)) as file:
            tensor = cast(Tensor, file.get_tensor(name))
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ValueError(
                f"{self.source!r} keeps {name} as {dtype_name(tensor.dtype)}, packed or scaled,"
                " which is not read without its quantizer; take a checkpoint that keeps it in 16"
                f" bits, {LOAD_ALL}"
            )
        return tensor

    def first_values(self, name: str, count: int) -> Tensor | None:
        """The first values of a tensor; None if its file is on the Hub and not here."""
        path = self._path(self.files[name], here=True)
        if path is None:
            return None
        with open_safetensors(path) as file:
            part = file.get_slice(name)
            shape = part.get_shape()
            if not shape:
                return cast(Tensor, file.get_tensor(name)).flatten()
            # As many whole rows as hold `count` values: 100 of [49152, 64] are in 2 rows.
            row = 1
            for size in shape[1:]:
                row *= size
            return cast(Tensor, part[: -(-count // max(row, 1))]).flatten()[:count]

    def _shape(self, name: str) -> torch.Size:
        with open_safetensors(self._file(name)) as file:
            return torch.Size(file.get_slice(name).get_shape())

    def _file(self, name: str) -> Path:
        path = self._path(self.files[name])
        if path is None:
            raise ValueError(
                f"{self.source!r} lacks the file {self.files[name]}, which holds {name}: copy it"
                " again"
            )
        return path

    def _path(self, file: str, here: bool = False) -> Path | None:
        """Return the path of a checkpoint file; None if there is no such file.

        The file is downloaded unless it must be `here` already.
        """
        if Path(self._folder).is_dir():
            path = Path(self._folder) / file
            return path if path.is_file() else None
        try:
            path_in_cache = cached_file(
                self._folder,
                file,
                revision=self._revision,
                local_files_only=here,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=not here,
            )
        except OSError as error:
            if here:
                return None
            raise ValueError(f"no target model at {self.source!r}: {error}") from error
        return None if path_in_cache is None else Path(path_in_cache)


class BlocksInFiles(Sequence[nn.Module]):
    """A model's blocks on the meta device, each read from the checkpoint at every access."""

    def __init__(self, target: OuterTarget) -> None:
        self._target = target
        self._empty = target.empty_blocks

    def __len__(self) -> int:
        return len(self._empty)

    def __getitem__(self, index: int) -> nn.Module:  # type: ignore[override]  # no slices
        return self._target.read_block(self._empty[index])


class OuterTarget(Target):
    """A target with only embedding, final norm and LM head in memory, which runs no forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        commit: str | None,
        checkpoint: CheckpointTensors,
        device: torch.device,
    ) -> None:
        """Read the outer modules of a model on the meta device; `load` makes one.

        Raises:
            ValueError: a tensor that the checkpoint lacks or keeps packed, or an architecture that
                cannot be a target.
        """
        super().__init__(model, name, commit)
        self.checkpoint = checkpoint
        self.device = device
        # 1. While every parameter still is on the meta device, note its names by its `id`.
        self._names: dict[int, list[str]] = {}
        """The names of each parameter on the meta device; a shared one has several."""
        for name, weight in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(weight), []).append(name)
        modules = self.modules
        tied = modules.lm_head.weight is cast(Any, modules.embed).weight
        self._fingerprint = self._read_fingerprint()
        # 2. Read the modules. A tied LM head shares the embedding, unless the checkpoint stores
        #    another one.
        for module in (modules.embed, modules.norm):
            self._fill(cast(nn.Module, module))
        if tied:
            head_weight = self._own_head_weight()
            if head_weight is None:
                head_weight = cast(Any, modules.embed).weight
            modules.lm_head.weight = head_weight
        self._fill(modules.lm_head)
        # 3. Blocks are read one by one, when a head asks for one.
        self.empty_blocks: Sequence[nn.Module] = modules.blocks
        self.modules = replace(modules, blocks=BlocksInFiles(self))

    @classmethod
    def load(
        cls,
        source: str | Path,
        dtype: torch.dtype | str,
        device: str | torch.device | dict[str, Any],
        revision: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> OuterTarget:
        """Read the outer modules of a target.

        The arguments are those of `Target.load`, but `dtype` must be a `torch.dtype`.
        """
        require_extra("accelerate", "a target without its blocks")
        # 1. What can be refused.
        options = dict(options or {})
        if options.pop("quantization_config", None) is not None:
            raise ValueError(
                "target_quantization packs weights as a whole model is loaded, and here only the"
                f" embedding, the final norm and the LM head are read; leave it out, {LOAD_ALL}"
            )
        assert isinstance(dtype, torch.dtype) and isinstance(device, (str, torch.device))
        # 2. The model without its weights. Buffers, such as rotary frequencies, are computed.
        checkpoint = CheckpointTensors(source, revision)
        config = load_config(source, revision)
        model = unloaded_model(source, config, dtype, **options)
        model.eval().requires_grad_(False)
        generation = generation_config_of(source, revision)
        if generation is not None:
            model.generation_config = generation
        # 3. The outer modules' weights.
        checkpoint.rename_for(model)
        commit = downloaded_commit(source, revision)
        return cls(model, str(source), commit, checkpoint, torch.device(device))

    def read_block(self, empty: nn.Module) -> nn.Module:
        """A copy of a block with its weights."""
        # The copy's parameters are other objects: they get the names of the originals until they
        # are read.
        block = copy.deepcopy(empty)
        copied_ids = []
        for weight, copied in zip(empty.parameters(), block.parameters(), strict=True):
            self._names[id(copied)] = self._names[id(weight)]
            copied_ids.append(id(copied))
        self._fill(block)
        for copied_id in copied_ids:
            del self._names[copied_id]
        return block.to(self.device)

    def states(
        self, tokens_BT: Tensor, layers: tuple[int, ...], positions_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError(f"{self.name!r} has no blocks in memory, and computes no states")

    read = states

    def check_decoding(self) -> None:
        """Nothing to try: it runs no forward."""

    def check_states_returned(self) -> None:
        """Nothing to try: it runs no forward."""

    @cached_property
    def computes_logits(self) -> bool:
        """Whether the modules make the model's logits.

        This is tried on a small random model of its class.
        """
        small = self._small_model()
        tokens_12 = torch.tensor([[SMALL_VOCABULARY // 2, SMALL_VOCABULARY // 3]])
        fitting = fitting_logits(small, target_modules(small), before_lm_head(small), tokens_12)
        # Layers between the final norm and the LM head would have to be read as well.
        if fitting is None or self.before_lm_head is not None:
            return False
        self.modules = replace(
            self.modules, logit_scale=fitting.logit_scale, logit_cap=fitting.logit_cap
        )
        return True

    def _small_model(self) -> PreTrainedModel:
        """A random model of the same class with one small block and a small vocabulary."""
        config = copy.deepcopy(self.model.config)
        text_config = config.get_text_config()
        layers = text_config.num_hidden_layers
        # Lists of one value a layer, such as `layer_types`, must have one value, too.
        for name, value in vars(text_config).items():
            if isinstance(value, list) and len(value) == layers:
                setattr(text_config, name, value[:1])
        text_config.num_hidden_layers = 1
        text_config.vocab_size = SMALL_VOCABULARY
        # One block of a large model would take gigabytes.
        for name in ("intermediate_size", "moe_intermediate_size"):
            if isinstance(getattr(text_config, name, None), int):
                setattr(text_config, name, SMALL_WIDTH)
        # The padding token may lie outside the small vocabulary.
        for part in (config, text_config):
            part.pad_token_id = None
        model = model_loader(config).from_config(config, dtype=torch.float32)
        return cast(PreTrainedModel, model.eval().requires_grad_(False))

    def _own_head_weight(self) -> nn.Parameter | None:
        """Return the LM head that a checkpoint stores with values other than the tied embedding's.

        None if no LM head is stored, or one with equal values. With other values the model is not
        tied, whatever its config says; transformers does not tie it either.
        """
        modules = self.modules
        name = next(
            name for name, module in self.model.named_modules() if module is modules.lm_head
        )
        if f"{name}.weight" not in self.checkpoint.files:
            return None
        embedding = cast(Any, modules.embed).weight
        stored = self.checkpoint.read(f"{name}.weight").to(embedding)
        if torch.equal(stored, embedding):
            return None
        return nn.Parameter(stored, requires_grad=False)

    def _fill(self, module: nn.Module) -> None:
        """Replace a module's parameters on the meta device by those of the checkpoint."""
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                if weight.device.type != "meta":  # read already, as a tied LM head
                    continue
                tensor = self.checkpoint.read(self._required_name(weight))
                if tensor.shape != weight.shape:
                    raise ValueError(
                        f"{self.name!r} keeps {self._names[id(weight)][0]} as {list(tensor.shape)},"
                        f" and its config asks for {list(weight.shape)}: config.json and weights"
                        " are of different models"
                    )
                values = tensor.to(self.device, weight.dtype).contiguous()
                part.register_parameter(name, nn.Parameter(values, requires_grad=False))
            for name, buffer in list(part.named_buffers(recurse=False)):
                if buffer is not None:
                    part._buffers[name] = buffer.to(self.device)

    def _required_name(self, weight: Tensor) -> str:
        """The checkpoint's name of a parameter, by any of its names in the model."""
        for parameter in self._names[id(weight)]:
            name = self.checkpoint.name_of(parameter, weight.shape, self.model.base_model_prefix)
            if name is not None:
                return name
        # Packed weights of the module have other names: lm_head.qweight, lm_head.scales ...
        wanted = self._names[id(weight)][0]
        stem = wanted.rpartition(".")[0]
        packed = sorted(name for name in self.checkpoint.files if stem in name)
        hint = f"; it keeps {', '.join(packed[:4])}, packed" if packed else ""
        raise ValueError(
            f"{self.name!r} holds no tensor {wanted}{hint}. A head needs the embedding, the final"
            " norm and the LM head, which only a tied LM head may lack; take a checkpoint that has"
            f" it, {LOAD_ALL}"
        )

    def fingerprint(self) -> str | None:
        """The loaded model's fingerprint; None where the files do not tell it."""
        return self._fingerprint

    def _read_fingerprint(self) -> str | None:
        """The fingerprint of the whole model; None where files keep weights by other names.

        Experts that transformers joins as it loads them, and packed weights, have other names.
        """
        digest = hashlib.sha256()
        for name, weight in self.model.named_parameters():
            stored = self.checkpoint.name_of(name, weight.shape, self.model.base_model_prefix)
            values = None
            if stored is not None:
                values = self.checkpoint.first_values(stored, FINGERPRINTED)
            if values is None or not values.dtype.is_floating_point or values.dtype.itemsize < 2:
                return None
            # In the model's dtype and then bfloat16, as `info.fingerprint` does.
            rounded = values.to(weight.dtype).to(torch.bfloat16).float()
            digest.update(name.encode() + rounded.numpy().tobytes())
        return digest.hexdigest()[:16]
