"""Plain `model.generate` with a head: a function for its `custom_generate`, and what a checkpoint's generate.py calls.

model.generate(**inputs, custom_generate=custom_generate(head="examples/smollm2-135m-eagle3"))
model.generate(**inputs, custom_generate="user/head", trust_remote_code=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..heads import DraftHead
from .decode import GenerateOutput, SpeculativeLM, with_stop_strings
from .rounds import Drafter
from .sampling import RandomDraw
from .tree import TreePolicy
from .written import Streamer


def custom_generate(
    head: str | Path | DraftHead | None = None,
    tree: str | Sequence[Sequence[int]] | TreePolicy = "auto",
    verifier: str = "auto",
    lossy: bool = False,
    generator: torch.Generator | None = None,
    streamer: Streamer | None = None,
    head_revision: str | None = None,
    drafter: str | Drafter | None = None,
    fallback: bool = False,
) -> Callable[..., Tensor | GenerateOutput]:
    """What drafts for plain `model.generate(..., custom_generate=custom_generate(head))` on an unmodified model.

    Args:
        head: a checkpoint folder, a Hub id, or a head; None for a drafter that needs none.
        tree: see `SpeculativeLM.from_pretrained`.
        verifier: see `SpeculativeLM`.
        lossy: see `SpeculativeLM`.
        generator: of the random draws; None for torch's global one.
        streamer: transformers hands its own on to no decoding method but its own, so it is given here.
        head_revision: of the head's Hub id.
        drafter: see `SpeculativeLM.from_pretrained`.
        fallback: decode plainly where guesses cost more time than they save.

    Returns:
        A function that keeps what it loaded for the last model. It returns the sequences, or with
        `return_dict_in_generate` a `GenerateOutput`. transformers keeps the tokenizer from it: give stop strings as a
        `StopStringCriteria`.
    """
    engine: SpeculativeLM | None = None

    def decode(model: PreTrainedModel, *args: Any, **inputs: Any) -> Tensor | GenerateOutput:
        nonlocal engine
        if engine is None or engine.target.model is not model:
            engine = SpeculativeLM.from_pretrained(
                model,
                head,
                tree=tree,
                verifier=verifier,
                lossy=lossy,
                head_revision=head_revision,
                drafter=drafter,
                fallback=fallback,
            )
        return _method(engine, generator, streamer)(model, *args, **inputs)

    return decode


def generate_from(
    head: str,
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    streamer: Streamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> Tensor | GenerateOutput:
    """`model.generate(..., custom_generate=HEAD, trust_remote_code=True)`: what a checkpoint's generate.py calls.

    Args:
        head: a checkpoint folder or Hub id.
        model: the target.
        generation_config: as given by the user, unprepared; so are the rest.
        streamer: see `SpeculativeLM.generate`.
        tokenizer: needed for `stop_strings`.
        settings: all other arguments of `model.generate`.
    """
    generate = cast(Any, model).generate  # mixed into the model's class, which no annotation says
    return generate(
        generation_config=generation_config,
        streamer=streamer,
        custom_generate=_method(_engine(model, head), None, streamer),
        **with_stop_strings(settings, generation_config, tokenizer),
    )


@lru_cache(maxsize=1)
def _engine(model: PreTrainedModel, head: str) -> SpeculativeLM:
    """The last one stays loaded: a folder's `generate.py` is called anew for every text."""
    return SpeculativeLM.from_pretrained(model, head)


def _method(
    lm: SpeculativeLM, generator: torch.Generator | None, streamer: Streamer | None
) -> Callable[..., Tensor | GenerateOutput]:
    """A decoding method that returns what transformers' own return."""
    method = lm.decoding_method(RandomDraw(generator), streamer)

    def decode(model: PreTrainedModel, *args: Any, generation_config: GenerationConfig, **inputs: Any) -> Any:
        output = method(model, *args, generation_config=generation_config, **inputs)
        return output if generation_config.return_dict_in_generate else output.sequences

    return decode
