"""The target: an unmodified, frozen Hugging Face causal LM, and what is known of it.

Its forwards over trees of tokens are run by its `engine`.

Letters in tensor names: B batch, T time, N nodes, M nodes that are attended to, K chosen nodes, D
hidden size, F width of the chosen layers side by side.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...extras import require_extra
from ...files import at_home, read_json
from ...heads.base import TargetModules, dtype_name
from ...heads.layers.tree_slots import has_tree_kernel
from ..targets.adapters import active_adapters, check_adapters, unwrapped
from ..targets.as_loaded import as_loaded
from ..targets.changes import WeightWatch, code_of, has_hooks
from ..targets.dtypes import chosen_dtype
from ..targets.fork_lock import ForkLock
from ..targets.info import fingerprint
from ..targets.loading import (
    MAPS,
    default_device,
    downloaded_commit,
    hub_options,
    load_model,
    load_tokenizer,
    model_options,
    reading,
    refuse_loading_options,
)
from ..targets.target_model import TargetModel
from . import cpu_kernels
from .base import Engine, kernels_without_plans
from .counting import CountingEngine
from .cpu_decoder import cpu_engine
from .cuda_graph import GRAPHS, GraphRunner
from .fused_decoder import RowReader, row_reader
from .model_engine import ModelEngine
from .stateful import StatefulEngine
from .trial import ROUNDING_IN_16_BITS, check_architecture, relative_difference, tolerance

SIMILAR = 0.75
"""Sequences of packed rows that are read together are at least this share of the longest."""
MERGED_ADAPTER = "_headstart_merged_adapter"
"""Attribute of a model into which an adapter was merged, which must not be merged twice: the
adapter's folder, and the provenance of the model without it."""


class Target(TargetModel):
    """A causal LM that is neither trained nor changed.

    `from_pretrained` loads it frozen, in eval mode.
    """

    shares_prompts = True
    """Whether rows with the same prompt may be read once."""
    engine_kind: type[ModelEngine] = ModelEngine
    """The engine for models of its kind."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str = "",
        commit: str | None = None,
        hub: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a loaded model, with the name and the Hub's commit that it was loaded by.

        `hub` holds the options of `HUB_OPTIONS` for what else it needs from there.

        Raises:
            ValueError: an architecture that cannot run draft trees, with the reason.
        """
        super().__init__(model, name)
        self.commit: str | None = commit or getattr(model.config, "_commit_hash", None)
        """Commit of the Hub's repository; None for files that are not the Hub's, or unknown."""
        self.hub = dict(hub or {})
        """Options of `HUB_OPTIONS`, by which its head, draft model and tokenizer are found too."""
        merged = vars(model).get(MERGED_ADAPTER)
        self.adapter: str | None = None if merged is None else merged[0]
        """Folder of the peft adapter that was merged into the weights, by this target or another of
        the same model."""
        self._weights = WeightWatch()
        self._refreshed = 0
        self._row_reader_of: tuple[Hashable, RowReader | None] = ((), None)
        """The model's version, and what reads its rows."""
        self._tried = False
        self.lock = ForkLock(repr(self.name))
        """Held by the running generation: kernels, drafters and their measurements are shared."""
        # A subclass such as Seq2SeqTarget has chosen already.
        if self.engine_kind is ModelEngine:
            if self.stateful is not None:
                self.engine_kind = StatefulEngine
            elif self.counted:
                self.engine_kind = CountingEngine
        self.engine: Engine = self.engine_kind(self)
        """Runs the forwards; `compile` chooses another."""
        self._version_before = self.version
        """The model's version when the engine was chosen."""

    def __repr__(self) -> str:
        compiled = ", compiled" if self.compiled else ""
        return (
            f"{type(self).__name__}({self.name!r}, {dtype_name(self.dtype)},"
            f" {self.device}{compiled})"
        )

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path | PreTrainedModel,
        dtype: torch.dtype | str = "fastest",
        device_map: str | int | torch.device | dict[str, Any] | None = None,
        revision: str | None = None,
        **model_kwargs: Any,
    ) -> Target:
        """Load a target.

        Args:
            source: a folder, a Hub id, a GGUF file, `package:NAME` for the GGUF file of an
                installed package, or a loaded model, a `PeftModel` too, which runs with its active
                adapter.
            dtype: dtype of the weights; "auto" for the checkpoint's own, "fastest" for the fastest
                one here that is as exact, see `dtypes`.
            device_map: a device, accelerate's map of modules to devices, or the name of one of its
                strategies ("auto"); None for the first GPU, or the CPU.
            revision: revision of a Hub id.
            model_kwargs: quantization_config, attn_implementation, trust_remote_code, token,
                cache_dir and others of `loading.MODEL_OPTIONS`, for transformers'
                `from_pretrained`. A head, a draft model and the tokenizer are looked for by those
                of the Hub too, also where the target is a loaded model.

        Raises:
            ValueError: nothing to load at `source`, an unknown option, or an architecture that
                cannot run draft trees.
        """
        # 1. A loaded model is taken as it is, and options for loading it are refused.
        model_kwargs = model_options(model_kwargs)
        source = unwrapped(source)
        if isinstance(source, PreTrainedModel):
            hub = hub_options(model_kwargs)
            others = {name: model_kwargs[name] for name in model_kwargs.keys() - hub.keys()}
            refuse_loading_options(source.dtype, dtype, device_map, revision, others)
            return cls(source, hub=hub)

        # 2. Where it goes, and in which dtype. None for the device: several of them.
        where = default_device() if device_map is None else device_map
        if isinstance(where, dict) or where in MAPS:
            chosen = chosen_dtype(dtype, source, None, revision, model_kwargs)
        else:
            where = torch.device(where)
            chosen = chosen_dtype(dtype, source, where, revision, model_kwargs)
        return cls.load(source, chosen, where, revision, model_kwargs)

    @classmethod
    def load(
        cls,
        source: str | Path,
        dtype: torch.dtype | str,
        device: str | torch.device | dict[str, Any],
        revision: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Target:
        """`from_pretrained` with a given dtype (or "auto", as in transformers) and device."""
        model = load_model(source, dtype, device, revision, options)
        commit = downloaded_commit(source, revision, options)
        return cls(model, at_home(source), commit, hub_options(options or {}))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that lies beside the model, loaded when it is first needed.

        Raises:
            ValueError: a model without files. The Hub is not asked for one that has no name.
        """
        if self.name == type(self.model).__name__ and not Path(self.name).exists():
            raise ValueError(
                f"{self.name!r} was made in memory and has no tokenizer files; give a tokenizer"
            )
        return load_tokenizer(self.name, self.commit, **self.hub)

    def compile(self, mode: bool = True) -> None:
        """Choose the engine that runs the forwards, see `chosen_engine`.

        Called again with the same mode, nothing changes unless the model has: see `version`.

        Raises:
            ValueError: the model has another dtype, or lies on another device, than when the target
                was made.
        """
        model = self.model
        if (model.dtype, model.device) != (self.dtype, self.device):
            raise ValueError(
                f"{self.name!r} was loaded as {dtype_name(self.dtype)} on {self.device} and is now"
                f" of dtype {dtype_name(model.dtype)} on {model.device}: make the Target or"
                " SpeculativeLM anew from the converted model"
            )
        # A change of the model's code, adapters or weights makes copies and recordings stale.
        version = self.version
        # Other layers or another config: what was read off the model is read again.
        if self._version_before[:2] != version[:2]:
            self.read_off(model)
        if self.engine.mode != mode or self._version_before != version:
            self.engine = chosen_engine(self, mode, self.engine_kind)
            self.engine.mode = mode
        self._version_before = version

    @property
    def compiled(self) -> bool:
        """Whether forwards run in kernels or recordings, not operation by operation."""
        return self.engine.name != ModelEngine.name

    def renew(self) -> None:
        """Choose the engine anew if the model has changed; called before each generation.

        Raises:
            ValueError: it has been converted; see `compile`.
        """
        self.compile(self.engine.mode)

    @property
    def draft_modules(self) -> TargetModules:
        """The target's parts that heads draft with, the LM head as the present engine runs it."""
        return replace(self.modules, lm_head=cast(Any, self.engine.lm_head))

    @property
    def version(self) -> tuple[Hashable, ...]:
        """A value that changes with the model: its code, its configs, its adapters, its weights.

        See `targets.changes` for what it sees of code and weights.
        """
        model = self.model
        return (
            id(model),
            code_of(model),
            active_adapters(model),
            self._refreshed,
            self._weights.version(model),
        )

    def refresh(self) -> None:
        """Treat the weights as changed, for instance after a write that `version` cannot see.

        Copies are made again.
        """
        self._refreshed += 1
        self.renew()

    def merge_adapter(self, folder: str | Path) -> None:
        """Merge a peft adapter into the weights, as a jointly trained head needs."""
        require_extra("peft", "a head with an adapter for its target")
        from peft import PeftModel  # here: its import takes a second

        # Taken before the model changes: a head names the base model that it was trained for.
        provenance = self.provenance
        folder = Path(at_home(folder)).resolve()
        with reading("adapter", folder):
            kind = read_json(folder / "adapter_config.json")["peft_type"]
            if kind != "LORA":  # others name adapters elsewhere, which peft would open
                raise ValueError(f"it is of peft's type {kind!r}, and a head's is LORA")
            merged = PeftModel.from_pretrained(self.model, str(folder)).merge_and_unload()
        self.model = merged.eval().requires_grad_(False)
        self.read_off(self.model)
        self.adapter = str(folder)
        setattr(self.model, MERGED_ADAPTER, (self.adapter, provenance))
        self.refresh()  # peft changes weights in a way that their version does not show

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Identity of the model without a merged adapter.

        It is saved in the checkpoint of a head that is trained against the model.
        """
        merged = vars(self.model).get(MERGED_ADAPTER)
        return self.current_provenance() if merged is None else merged[1]

    def current_provenance(self) -> dict[str, Any]:
        """Identity of the model with its weights as they are now, an adapter merged in or not."""
        # A quantization config is an object, or the dict that config.json holds.
        quantization = getattr(self.model.config, "quantization_config", None)
        method = None
        if quantization:
            method = getattr(quantization, "quant_method", None)
            method = method or quantization.get("quant_method")
        provenance = {
            "target": self.name,
            "revision": self.commit,
            "dtype": dtype_name(self.dtype),
            "quantization": None if method is None else str(getattr(method, "value", method)),
        }
        weights = self.fingerprint()
        return provenance if weights is None else {**provenance, "weights": weights}

    def fingerprint(self) -> str | None:
        """The model's `info.fingerprint`; None if it is not known."""
        return fingerprint(self.model)

    def check_decoding(self) -> None:
        """Try whether trees yield the model's own logits.

        The trial runs once for each architecture and version on this machine.

        Called before the first token; see `engines.trial`.

        Raises:
            ValueError: they do not, and how far off they are; a forward fails in the model; or an
                adapter that is active now cannot be decoded with, see `check_adapters`.
        """
        check_adapters(self.model)
        if self._tried:
            return
        with self.lock, as_loaded(self.model):
            check_architecture(self, self._plain_engine)
            if self.modules.logit_scale != 1 or self.modules.logit_cap is not None:
                # A config has a scale or a cap that the model may not apply.
                self.computes_logits  # noqa: B018
        self._tried = True

    def was_tried(self) -> None:
        """Leave out the trial: another target of the same model has passed it."""
        self._tried = True

    def check_features(self) -> None:
        super().check_features()
        # A model without weights: its features come from elsewhere.
        if any(weight.is_meta for weight in self.model.parameters()):
            return

        # 1. Read a short text as training does, and as decoding does.
        vocab_size = self.info.vocab_size
        length = min(6, self.max_positions)
        tokens = [(7 * index + vocab_size // 2) % vocab_size for index in range(length)]
        tokens_1T = torch.tensor([tokens]).to(self.device)
        with self.lock, as_loaded(self.model), torch.inference_mode():
            self.renew()  # weights may have changed since the last generation
            trained_BTD, _ = self.states(tokens_1T, (-1,))
            decoded = self.engine.read_chunk(
                tokens_1T, length, self.engine.new_cache(1), (-1,), [length - 1]
            )

        # 2. A head must find the features that it was trained on.
        by_median = tolerance(self.model) == ROUNDING_IN_16_BITS
        different = relative_difference(decoded.features_BNF[0], trained_BTD[0], by_median)
        if different is not None and different > tolerance(self.model):
            raise ValueError(
                f"{type(self.model).__name__} ({self.name!r}) computes other states for a whole"
                f" text than generate does: the last ones differ by {different:.2g} of their spread"
                " (positions or a mask that it makes only while it generates), so a head would"
                " learn from other features than it drafts with; train for a target of another"
                " family, or another version of transformers"
            )

    def _plain_engine(self, model: PreTrainedModel) -> Engine:
        """The engine that runs a model, which shares this one's weights, unchanged."""
        other = type(self)(model, self.name, self.commit)
        # A target and its engine refer to each other, so the garbage collector would free the model
        # long after its owner had dropped it.
        other.hold_weakly()
        return other.engine

    def states(
        self, tokens_BT: Tensor, layers: tuple[int, ...], positions_BT: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features of whole right-padded sequences, without a cache.

        Returns features_BTF of `layers`, and last_BTD, those of layer -1. In packed rows
        `positions_BT`, best given on the host, is 0 at the start of every sequence, which attends
        to no other: sequences of similar length are read together, each as a row of its own. A mask
        would be quadratic in the row, and not every model and attention kernel takes one.
        """
        # 1. Each row is one sequence: a single forward.
        if positions_BT is None:
            self._keep_step(layers, 1)
            return self._rows(tokens_BT, layers)

        # 2. Packed rows. Positions [0, 1, 2, 0, 1] hold the sequences 0:3 and 3:5; those of similar
        # length, from any row, are read together.
        sequences = sequences_in(positions_BT.cpu())
        lengths = [span.stop - span.start for _, span in sequences]
        groups = of_similar_length(lengths, tokens_BT.shape[1])
        self._keep_step(layers, len(groups))
        packed: list[Tensor] = []  # features_BTF and last_BTD, in the places of their tokens
        for group in groups:
            texts = []
            for i in group:
                row, span = sequences[i]
                texts.append(tokens_BT[row, span])
            states = self._rows(pad_sequence(texts, batch_first=True), layers)
            if not packed:  # the first forward tells widths, dtype and device
                packed = [part.new_zeros(*tokens_BT.shape, part.shape[-1]) for part in states]
            # Put each sequence, without its padding, back where it came from.
            for whole, part in zip(packed, states, strict=True):
                for number, i in enumerate(group):
                    row, span = sequences[i]
                    whole[row, span] = part[number, : lengths[i]]
        features_BTF, last_BTD = packed
        return features_BTF, last_BTD

    def forwards(self, needed: int) -> int:
        """Return how many forwards to make for a read that needs `needed` of them.

        More where all processes must make each forward together, as with sharded weights.
        """
        return needed

    def _keep_step(self, layers: tuple[int, ...], needed: int) -> None:
        """Make the forwards that only other processes need, on one token."""
        for _ in range(self.forwards(needed) - needed):
            self._rows(torch.zeros(1, 1, dtype=torch.int64, device=self.device), layers)

    def _rows(self, tokens_BT: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """`states` of rows that each hold one sequence."""
        # 1. Without gradients, by fused kernels on a GPU.
        reader = None if torch.is_grad_enabled() else self._row_reader()
        if reader is not None:
            width = self.info.hidden_size
            features_BTF = reader(tokens_BT, (*layers, -1))
            return features_BTF[..., :-width], features_BTF[..., -width:]

        # 2. The model.
        indices = self.hidden_state_indices(layers)
        (last,) = self.hidden_state_indices((-1,))
        # No logits: an empty list of indices keeps none.
        with kernels_without_plans():  # the lengths of training rows keep changing
            output = self.model(
                input_ids=tokens_BT,
                use_cache=False,
                logits_to_keep=torch.empty(0, dtype=torch.int64, device=self.device),
                output_hidden_states=sorted({*indices, last}),
            )
        last_BTD = self.last_features(output.hidden_states[last]).to(self.device)
        states = []
        for layer, index in zip(layers, indices, strict=True):
            states.append(last_BTD if layer == -1 else output.hidden_states[index].to(self.device))
        return torch.cat(states, dim=-1) if states else last_BTD[..., :0], last_BTD

    def _row_reader(self) -> RowReader | None:
        """`row_reader` of the model as it is now."""
        if not has_tree_kernel(self.device, self.dtype, self.info.head_dim):
            return None  # before looking through the model for changes
        version = self.version
        if self._row_reader_of[0] != version:
            self._row_reader_of = (version, row_reader(self))
        return self._row_reader_of[1]

    read = torch.no_grad()(states)
    """`states` without gradients, for training on a frozen model."""


def chosen_engine(target: TargetModel, mode: bool, kind: type[ModelEngine]) -> Engine:
    """Choose the engine for a target on its device.

        device  mode   engine              its runner   what runs the target's layers
        CPU     True   CpuEngine           Runner       PackedLayers (C++), for Llama-like layers
        CPU     True   packed ModelEngine  Runner       the model, its linear layers in our kernels
        CUDA    True   ModelEngine         GraphRunner  FusedDecoder, for Llama-like layers, or the
                                                        model
        any     False  ModelEngine         Runner       the model

    A `Runner` calls functions; a `GraphRunner` records and replays them. Models whose layers keep a
    state, that count positions by their cache, or that have an encoder bring engines of their own
    in place of `ModelEngine`.

    Args:
        target: the target, whose weights are read where they lie, or copied.
        mode: False to run the model operation by operation. True for our kernels on a CPU, and for
            CUDA graphs on a GPU, which are recorded within the first rounds. Other accelerators run
            the model operation by operation in either mode.
        kind: the engine for models of its kind.
    """
    # 1. Operation by operation, or recorded.
    if not mode:
        return kind(target)
    if target.device.type != "cpu":
        recorded = target.device.type in GRAPHS
        return kind(target, GraphRunner(target.device) if recorded else None)
    # 2. Our kernels, which need a compiler and would not call the user's hooks.
    if cpu_kernels.library() is None or has_hooks(target.model):
        return kind(target)
    # 3. All layers in the kernels, or linear layers alone: subclasses of `ModelEngine` read texts
    #    in another way than the kernels' decoder.
    engine = cpu_engine(target) if kind is ModelEngine else None
    return engine or kind(target, packed=True)


def sequences_in(positions_BT: Tensor) -> list[tuple[int, slice]]:
    """Return the row and the slice of each sequence in packed rows.

    A sequence's positions begin at 0, and the padding after it belongs to it.
    """
    sequences: list[tuple[int, slice]] = []
    for row, positions_T in enumerate(positions_BT):
        # Positions [0, 1, 2, 0, 1]: starts [0, 3], stops [3, 5].
        starts = torch.nonzero(positions_T == 0).flatten().tolist()
        stops = [*starts[1:], len(positions_T)]
        sequences += [(row, slice(start, stop)) for start, stop in zip(starts, stops, strict=True)]
    return sequences


def of_similar_length(lengths: list[int], budget: int) -> list[list[int]]:
    """Divide texts into groups, longest first, that a forward reads as padded rows.

    A group has at most `budget` tokens, padding included, or a single text, and no text in it is
    shorter than SIMILAR of its longest.
    """
    groups: list[list[int]] = []
    # Lengths [4, 9, 10] and a budget of 20: [[2, 1], [0]], since 4 is shorter than 0.75 * 10.
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[i] >= SIMILAR * longest and (len(groups[-1]) + 1) * longest <= budget:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups
