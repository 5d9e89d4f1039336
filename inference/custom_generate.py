"""Plain `model.generate` with a head, by `custom_generate` or from a checkpoint's generate.py.

model.generate(**inputs, custom_generate=custom_generate(head="examples/smollm2-135m-eagle3"))
model.generate(**inputs, custom_generate="user/head", trust_remote_code=True)

The model stays untouched: the decoder of each model is kept here, and freed with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..heads.base import DraftHead
from ..heads.checkpoints.hub import HUB_OPTIONS
from ..options import by_new_names
from .drafters.by_name import DrafterSource
from .inputs import Prompts, with_tokenizer
from .output import GenerateDictOutput, GenerateOutput
from .speculative_lm import Call, SpeculativeLM
from .trees.sampling import RandomSampler
from .trees.tree_spec import TreeSpec


def custom_generate(
    head: str | Path | DraftHead | None = None,
    tree: TreeSpec = "auto",
    acceptance: str = "auto",
    lossy: bool = False,
    generator: torch.Generator | None = None,
    streamer: BaseStreamer | None = None,
    head_revision: str | None = None,
    drafter: DrafterSource | None = None,
    adaptive: bool = True,
    compile: bool = True,
    dtype: torch.dtype | str = "auto",
    allow_adapter: bool = False,
    **others: Any,
) -> DecodingMethod:
    """Return a decoding method for the `custom_generate` argument of plain `model.generate`.

    `model.generate(..., custom_generate=custom_generate(head))` works on an unmodified model.

    Takes arguments of `SpeculativeLM.from_pretrained`, with these differences.

    Args:
        generator: source of randomness; None for torch's global one.
        streamer: gets the tokens of every round; transformers does not pass its own to a custom
            decoding method.
        dtype: required dtype of the loaded model; "auto" accepts any.
        allow_adapter: merge the adapter of a head that brings one into the model itself, once.
        others: options by old names, see `options.RENAMED`.

    Returns:
        A function that keeps what it loads for a model as long as both live. It returns the
        sequences, or with `return_dict_in_generate` a `GenerateDictOutput`. transformers does not
        pass the tokenizer to such functions: give stop strings, also those of the model's
        generation config, as a `StopStringCriteria`, and `stop_strings=None`.
    """
    others = by_new_names(others)
    adaptive = others.pop("adaptive", adaptive)
    if others:
        raise ValueError(f"unknown option {next(iter(others))!r} of custom_generate")
    options = {
        "head": head,
        "tree": tree,
        "acceptance": acceptance,
        "lossy": lossy,
        "head_revision": head_revision,
        "drafter": drafter,
        "adaptive": adaptive,
        "compile": compile,
        "dtype": dtype,
        "allow_adapter": allow_adapter,
    }
    return DecodingMethod(options, generator, streamer)


@dataclass(eq=False)
class DecodingMethod:
    """The decoding method that `custom_generate` returns.

    `model.generate` calls it with what it has prepared.
    """

    options: dict[str, Any]
    """Of `SpeculativeLM.from_pretrained`."""
    generator: torch.Generator | None
    streamer: BaseStreamer | None

    def __call__(
        self, model: PreTrainedModel, *args: Any, **inputs: Any
    ) -> Tensor | GenerateDictOutput:
        call = Call(RandomSampler(self.generator), self.streamer, as_transformers=True)
        method = decoder_of(model, self, self.options).decoding_method(call)
        return cast(Tensor | GenerateDictOutput, method(model, *args, **inputs))


def generate_from(
    head: str,
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    compile: bool = True,
    dtype: torch.dtype | str = "auto",
    allow_adapter: bool = False,
    revision: str | None = None,
    **settings: Any,
) -> Tensor | GenerateOutput | GenerateDictOutput:
    """Serve `model.generate(..., custom_generate=HEAD, trust_remote_code=True)`.

    A checkpoint's generate.py calls this function.

    Takes the user's arguments as they were given to `model.generate`, `compile`, `dtype` and
    `allow_adapter` of `custom_generate`, and the revision and the options of the Hub by which
    transformers has found the file. `head` is the place that the file names.

    Raises:
        ValueError: the head is not where it was saved.
    """
    if Path(head).is_absolute() and not Path(head).is_dir():
        raise ValueError(
            f"the head's custom_generate/generate.py names the folder {head!r}, in which it was"
            " saved and is gone. Give"
            " custom_generate=headstart.inference.custom_generate(FOLDER), or write the new place"
            " into that file; `headstart push` writes the repository's name"
        )
    # 1. The decoder for this model, kept since the last call.
    options = {"head": head, "compile": compile, "dtype": dtype, "allow_adapter": allow_adapter}
    options |= {"head_revision": revision}
    options |= {name: settings.pop(name) for name in HUB_OPTIONS if name in settings}
    lm = decoder_of(model, generate_from, options)
    # 2. What needs the tokenizer, which `model.generate` passes to this function but not to a
    #    decoding method.
    inputs = settings.pop("inputs", None)
    input_ids = settings.pop("input_ids", None)
    mask = settings.pop("attention_mask", None)
    prompts = Prompts(input_ids if inputs is None else inputs, mask)
    prompts, settings = with_tokenizer(lm.target, prompts, settings, generation_config, tokenizer)
    # 3. The same call again, with a decoding method in place of the folder.
    generate = cast(Any, model).generate  # mixed into the model's class, which no annotation says
    return generate(
        prompts.input_ids,
        attention_mask=prompts.attention_mask,
        generation_config=generation_config,
        streamer=streamer,
        custom_generate=lm.decoding_method(Call(RandomSampler(), streamer, as_transformers=True)),
        **settings,
    )


Decoders = WeakKeyDictionary[Callable[..., Any], tuple[dict[str, Any], SpeculativeLM]]
"""The latest decoder for each caller, with its options."""
_DECODERS: WeakKeyDictionary[PreTrainedModel, Decoders] = WeakKeyDictionary()
"""The decoders of each model. They hold the model weakly, so that they are freed with it."""


def decoder_of(
    model: PreTrainedModel, caller: Callable[..., Any], options: dict[str, Any]
) -> SpeculativeLM:
    """The decoder that was loaded for this model, caller and options; else a new one."""
    decoders = _DECODERS.setdefault(model, WeakKeyDictionary())
    if caller in decoders:
        # A model that has been moved or converted since needs a new one.
        old_options, lm = decoders[caller]
        same_model = (model.dtype, model.device) == (lm.target.dtype, lm.target.device)
        if old_options == options and same_model:
            return lm
    lm = SpeculativeLM.from_pretrained(model, **options)
    lm.target.hold_weakly()  # else the table's value would keep its own key alive
    decoders[caller] = options, lm
    return lm


def refresh(model: PreTrainedModel) -> None:
    """Call `SpeculativeLM.refresh` of every decoder that is kept for a model."""
    for _, lm in _DECODERS.get(model, {}).values():
        lm.refresh()
