"""Plain `model.generate` with a head: a function for its `custom_generate`, and what a checkpoint's generate.py calls.

model.generate(**inputs, custom_generate=custom_generate(head="examples/smollm2-135m-eagle3"))
model.generate(**inputs, custom_generate="user/head", trust_remote_code=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..heads import DraftHead
from .drafters.base import Drafter
from .logits import RandomSampler
from .speculative_lm import GenerateOutput, Prompts, SpeculativeLM, with_tokenizer
from .tuning.tree_spec import TreePolicy


def custom_generate(
    head: str | Path | DraftHead | None = None,
    tree: str | Sequence[Sequence[int]] | TreePolicy = "auto",
    acceptance: str = "auto",
    lossy: bool = False,
    generator: torch.Generator | None = None,
    streamer: BaseStreamer | None = None,
    head_revision: str | None = None,
    drafter: str | Drafter | None = None,
    fallback: bool = True,
    compile: bool | str = "auto",
    dtype: torch.dtype | str = "auto",
    allow_adapter: bool = False,
) -> Callable[..., Tensor | GenerateOutput]:
    """A decoding method for plain `model.generate(..., custom_generate=custom_generate(head))` on an unmodified model.

    Args, where they differ from `SpeculativeLM.from_pretrained`:
        generator: source of randomness; None for torch's global one.
        streamer: gets the tokens of every round; transformers does not pass its own to a custom decoding method.
        dtype: required dtype of the loaded model; "auto" accepts any.
        allow_adapter: merge the adapter of a head that brings one into the model itself, once.

    Returns:
        A function that caches the loaded head of a model while both live. It returns the sequences, or with
        `return_dict_in_generate` a `GenerateOutput`. transformers keeps the tokenizer from such functions: give stop
        strings, also those of the model's generation config, as a `StopStringCriteria`, and `stop_strings=None`.
    """

    def decode(model: PreTrainedModel, *args: Any, **inputs: Any) -> Tensor | GenerateOutput:
        engine = _engine(
            decode,
            model,
            head=head,
            dtype=dtype,
            tree=tree,
            acceptance=acceptance,
            lossy=lossy,
            head_revision=head_revision,
            compile=compile,
            drafter=drafter,
            fallback=fallback,
            allow_adapter=allow_adapter,
        )
        method = engine.decoding_method(RandomSampler(generator), streamer, always_output=False)
        return method(model, *args, **inputs)

    return decode


def generate_from(
    head: str,
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    compile: bool | str = "auto",
    dtype: torch.dtype | str = "auto",
    allow_adapter: bool = False,
    **settings: Any,
) -> Tensor | GenerateOutput:
    """`model.generate(..., custom_generate=HEAD, trust_remote_code=True)`: a checkpoint's generate.py calls this.

    Takes the user's arguments as they were given to `model.generate`, and `compile`, `dtype` and `allow_adapter` of
    `custom_generate`.
    """
    engine = _engine(generate_from, model, head=head, compile=compile, dtype=dtype, allow_adapter=allow_adapter)
    inputs = settings.pop("inputs", None)
    prompts = Prompts(
        settings.pop("input_ids", None) if inputs is None else inputs, settings.pop("attention_mask", None)
    )
    prompts, settings = with_tokenizer(engine.target, prompts, settings, generation_config, tokenizer)
    generate = cast(Any, model).generate  # mixed into the model's class, which no annotation says
    return generate(
        prompts.input_ids,
        attention_mask=prompts.attention_mask,
        generation_config=generation_config,
        streamer=streamer,
        custom_generate=engine.decoding_method(RandomSampler(), streamer, always_output=False),
        **settings,
    )


class _Engines(WeakKeyDictionary[Callable[..., Any], tuple[dict[str, Any], SpeculativeLM]]):
    """The latest `SpeculativeLM` of a model for each caller, with its options.

    An engine holds its model, so whatever holds the engine keeps the model alive; the model itself may. Copies of the
    model, and files that it is pickled to, get None in its place.
    """

    NAME = "_headstart_engines"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def refresh(model: PreTrainedModel) -> None:
    """`SpeculativeLM.refresh` for all that `custom_generate` keeps of a model."""
    for _, engine in (vars(model).get(_Engines.NAME) or {}).values():
        engine.refresh()


def _engine(caller: Callable[..., Any], model: PreTrainedModel, **options: Any) -> SpeculativeLM:
    """The engine that was loaded for this caller, model and options; a new one if there is none."""
    engines = vars(model).get(_Engines.NAME)
    if engines is None:
        engines = vars(model)[_Engines.NAME] = _Engines()
    if caller in engines:
        before, engine = engines[caller]
        if before == options and engine.target.model is model:
            return engine
    engine = SpeculativeLM.from_pretrained(model, **options)
    engines[caller] = options, engine
    return engine
