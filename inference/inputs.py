"""Prompts and settings of a `generate` call: checked, and in the form that the loop takes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from ..options import did_you_mean
from .cache.kv_cache import free_memory
from .drafters.base import BatchDrafter
from .drafters.by_name import assistants
from .drafters.draft_model import within
from .drafters.tree_policies import model_states
from .engines.encoder_decoder import Seq2SeqTarget
from .engines.target import Target
from .rounds.sequences import Conversation
from .targets.as_loaded import as_loaded
from .targets.interface import CACHE_NAMES, filled_cache
from .targets.prompt_inputs import ENCODED, TOKEN_TYPES, check_prompt_inputs, is_prompt_input

CONFIG_SETTINGS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))
"""Settings that `SpeculativeLM.generate` passes to `model.generate`, which documents them."""
ARGUMENTS = frozenset(("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"))
"""Arguments of `model.generate` that `SpeculativeLM.generate` has, too, and passes on."""
INSTEAD = {
    "assistant_model": "; a smaller model drafts as from_pretrained(target, drafter=...)",
    "cache": (
        "; give the whole text, and past_key_values=Conversation() so that later calls read only"
        " what is new"
    ),
    "custom_generate": "; this is one",
    "synced_gpus": "; each process decodes its own rows",
}
"""Hints for arguments that somebody may expect from transformers."""
ASSISTED = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "prompt_lookup_num_tokens",
)
"""Settings of transformers' own assisted generation, which decide nothing here."""
OF_OURS = (
    'Here from_pretrained(target, drafter="prompt-lookup") looks up the prompt, and tree="chain:4"'
    " drafts four tokens a round"
)
"""What takes their place."""


@dataclass(frozen=True)
class Prompts:
    """Token ids [batch, time] and their mask, as they are given to `model.generate`."""

    input_ids: Tensor
    attention_mask: Tensor | None = None


def prompts_of(inputs: Any, input_ids: Any, attention_mask: Any) -> Prompts:
    """The prompts of a call, under either of their names.

    Raises:
        ValueError: both names, or anything but a batch of token ids and a mask for it.
    """
    if inputs is not None and input_ids is not None:
        raise ValueError(
            "the prompts were given twice, as inputs and as input_ids; give one of them"
        )
    prompts = input_ids if inputs is None else inputs
    check_inputs(prompts, attention_mask)
    return Prompts(prompts, attention_mask)


def check_inputs(input_ids: Any, attention_mask: Any = None) -> None:
    """Refuse anything but a batch of token ids, and a mask for it.

    Raises:
        ValueError: says what was given and what is valid.
    """
    # 1. The token ids.
    wanted = (
        "input_ids must be a tensor [batch, time] of token ids, int64 or int32, with at least one"
        " token"
    )
    if not isinstance(input_ids, Tensor):
        hint = ""
        if hasattr(input_ids, "input_ids"):
            hint = "; unpack it: generate(**inputs)"
        elif isinstance(input_ids, str) or (
            isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], str)
        ):
            hint = (
                '; tokenize a text first: generate(**tokenizer(text, return_tensors="pt")), or talk'
                " with a chat: lm.chat(tokenizer).say(text)"
            )
        raise ValueError(f"{wanted}, not a {type(input_ids).__name__}{hint}")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        hint = ""
        if input_ids.ndim == 1 and len(input_ids):
            hint = "; for one prompt give input_ids[None]"
        raise ValueError(f"{wanted}, not one of shape {list(input_ids.shape)}{hint}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{wanted}, not of {input_ids.dtype}")
    if input_ids.device.type == "meta":
        raise ValueError(f"{wanted}, not on the device meta, which holds no values")
    # 2. Their mask, which may have any dtype.
    if attention_mask is None:
        return
    wanted = (
        "attention_mask must be a tensor [batch, time] like input_ids, 1 for tokens and 0 for"
        " padding"
    )
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"{wanted}, not a {type(attention_mask).__name__}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids"
            f" {list(input_ids.shape)}; {wanted}"
        )
    other = attention_mask[(attention_mask != 0) & (attention_mask != 1)]  # sync: once a call
    if len(other):
        raise ValueError(f"{wanted}; it holds {other[0].item()}")


def check_ids(input_ids: Tensor, mask: Tensor | None, target: Target) -> None:
    """Refuse token ids that the model does not have; those of padding are not read."""
    known = len(target.model.get_input_embeddings().weight)
    wrong_BT = (input_ids < 0) | (input_ids >= known)
    if mask is not None:
        wrong_BT &= mask.to(wrong_BT.device).bool()
    # An unknown id would read past the embedding, which on a GPU breaks the whole process.
    if wrong_BT.any():  # sync: once a call
        row, position = wrong_BT.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {position}] is {int(input_ids[row, position])}; {target.name!r} has"
            f" the tokens 0 to {known - 1}. Where it marks padding (as -100 does in labels), give"
            " attention_mask 0 there"
        )


def without_padding(input_ids: Tensor, mask: Tensor | None, target: Target) -> list[Tensor]:
    """The prompts of a batch [batch, time] without their padding, [length] each.

    Raises:
        ValueError: a prompt without a token, or with an unknown one.
    """
    check_inputs(input_ids, mask)
    check_ids(input_ids, mask, target)
    if mask is None:
        return list(input_ids)
    mask = mask.to(input_ids.device).bool()
    prompts = [row[attended] for row, attended in zip(input_ids, mask, strict=True)]
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} of the batch is all padding")
    return prompts


def check_settings(settings: dict[str, Any], config: Any) -> None:
    """Refuse unknown options of `SpeculativeLM.generate`, or a config of another class.

    The options are those of transformers, and the config must be a `GenerationConfig`.
    """
    if config is not None and not isinstance(config, GenerationConfig):
        # A mask by its position, as the second argument.
        hint = ""
        if isinstance(config, Tensor):
            hint = "; give the mask by its name: attention_mask=..."
        raise ValueError(
            f"generation_config must be a GenerationConfig, not a {type(config).__name__}{hint}"
        )
    unknown = sorted(settings.keys() - CONFIG_SETTINGS)
    if unknown:
        hint = INSTEAD.get(unknown[0]) or did_you_mean(unknown[0], CONFIG_SETTINGS | ARGUMENTS)
        raise ValueError(f"generate option {unknown[0]!r} is not supported{hint}")

    for name in ASSISTED:
        if settings.get(name, getattr(config, name, None)) is not None:
            raise ValueError(
                f"{name} is a setting of transformers' own assisted generation; leave it out."
                f" {OF_OURS}"
            )


def check_conversation(past: Any, rows: int, target: Target) -> None:
    """Refuse a `past_key_values` that cannot be continued, and say what can."""
    if past is None:
        return
    if not isinstance(past, Conversation):
        whose = " of transformers" if isinstance(past, Cache) else ""
        raise ValueError(
            f"past_key_values is a {type(past).__name__}{whose}, which drafts cannot continue. Give"
            " a headstart.inference.Conversation() instead, the same one in each call, with the"
            " whole text so far as inputs: it keeps the KV cache and what the drafter has read,"
            " and only new tokens are read again"
        )
    if rows > 1:
        raise ValueError(f"past_key_values takes one row, not a batch of {rows}")
    if isinstance(target, Seq2SeqTarget):
        raise ValueError("past_key_values of an encoder-decoder cannot be continued; leave it out")


def check_prepared(
    config: GenerationConfig, inputs: dict[str, Any], streamer: BaseStreamer | None, rows: int
) -> None:
    """Refuse inputs and settings that `model.generate` accepts and this loop does not support."""
    cached = filled_cache(inputs)
    if cached is not None:
        raise ValueError(
            f"a KV cache with {cached.get_seq_length()} tokens cannot be continued here; give the"
            " whole text, or call SpeculativeLM.generate with past_key_values=Conversation()"
        )
    if inputs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds are not supported: drafts are made from tokens; give input_ids"
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        hint = f". {OF_OURS}" if mode == GenerationMode.ASSISTED_GENERATION else ""
        raise ValueError(
            f"{mode.value.replace('_', ' ')} is not supported; choose from greedy search,"
            f" sampling{hint}"
        )
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name, None):
                raise ValueError(
                    f"{name} is not supported; the output holds sequences, scores, logits and stats"
                )
    if streamer is not None and rows > 1:
        raise ValueError(f"a streamer takes one row, not a batch of {rows}")


PREPARED = frozenset(
    (
        "attention_mask",
        "position_ids",
        "cache_position",
        "use_cache",
        "logits_to_keep",
        "return_dict",
        *CACHE_NAMES,
    )
)
"""Inputs of a forward that `model.generate` prepares for text."""


def inputs_of_prompt(
    inputs: dict[str, Any], input_ids: Tensor, mask: Tensor | None, past: Any, target: Target
) -> dict[str, Any] | None:
    """All that `model.generate` prepared for a prompt with images; None for text alone.

    Raises:
        ValueError: an input that is not read here, or does not fit the prompt.
    """
    # 1. The tensors that text alone does not need.
    tensors = {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and name not in PREPARED
    }
    # Newer versions of transformers have run the encoders of images by now.
    if inputs.get(ENCODED):
        tensors[ENCODED] = inputs[ENCODED]
    for name in tensors:
        if not is_prompt_input(target, name):
            raise ValueError(
                f"{name} is not read here: {target.name!r} would need it for every token, or does"
                " not take it; give token ids, their mask, and images as the model's processor"
                " returns them"
            )
    # 2. Token types that are all 0 mark text, which a processor returns without images, too.
    images = {}
    for name, value in tensors.items():
        if name not in TOKEN_TYPES or bool(value.any()):
            images[name] = value
    check_prompt_inputs(target, input_ids, mask, images)
    if not images:
        return None
    if past is not None:
        raise ValueError(
            "past_key_values was given with images or the like: a Conversation goes on with text"
            " alone; leave it out"
        )
    return inputs


def warn_of_equal_answers(acceptance: str, prompts: list[Tensor]) -> None:
    """Warn if one prompt is to get several answers by a rule that draws nothing."""
    different = len({tuple(prompt.tolist()) for prompt in prompts})
    if different < len(prompts):
        warnings.warn(
            f"the acceptance rule {acceptance!r} draws no random numbers: equal prompts get equal"
            f" answers ({different} different prompts in {len(prompts)} rows); for samples that"
            " differ, choose the acceptance rule 'auto'",
            stacklevel=2,
        )


def with_tokenizer(
    target: Target,
    prompts: Prompts,
    settings: dict[str, Any],
    config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[Prompts, dict[str, Any]]:
    """Do what needs the tokenizer, which `model.generate` hides from decoding methods of our own.

    Stop strings become a criterion, and tokens are healed. Both may be set in the call, in the
    config that was given, or in the model's own.

    Returns:
        the prompts and settings for `model.generate`.

    Raises:
        ValueError: no tokenizer was given, and none can be loaded.
    """
    # 1. Stop strings, as `model.generate` would make a criterion of them. None in the call
    #    overrides a config that names some.
    settings = dict(settings)
    strings = _resolved("stop_strings", settings, config, target)
    settings["stop_strings"] = None
    if strings:
        tokenizer = _tokenizer_for(f"the setting stop_strings={strings!r}", tokenizer, target)
        criteria = StoppingCriteriaList(settings.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(tokenizer, strings))
        settings["stopping_criteria"] = criteria
    # 2. Token healing: the last token of each prompt is replaced by one that what follows may
    #    continue.
    if _resolved("token_healing", settings, config, target):
        tokenizer = _tokenizer_for("the setting token_healing=True", tokenizer, target)
        healed = target.model.heal_tokens(prompts.input_ids, tokenizer)
        mask = prompts.attention_mask
        if mask is not None and healed.shape != prompts.input_ids.shape:
            raise ValueError(
                f"token_healing made prompts of {healed.shape[1]} tokens out of"
                f" {prompts.input_ids.shape[1]}, which attention_mask does not fit: it strips"
                " spaces at the ends of a prompt; leave them out"
            )
        prompts = Prompts(healed, mask)
        settings["token_healing"] = False
    return prompts, settings


def _resolved(
    name: str, settings: dict[str, Any], config: GenerationConfig | None, target: Target
) -> Any:
    """Resolve a setting as `model.generate` does.

    It is the call's, else the passed config's, else that of the model's own config.
    """
    if name in settings:
        return settings[name]
    value = getattr(config, name, None)
    if value is not None:
        return value
    return getattr(target.model.generation_config, name, None)


def _tokenizer_for(
    what: str, tokenizer: PreTrainedTokenizerBase | None, target: Target
) -> PreTrainedTokenizerBase:
    """The tokenizer that was given, else the target's own."""
    if tokenizer is not None:
        return tokenizer
    try:
        return target.tokenizer
    except ValueError as error:
        raise ValueError(
            f"{what} needs the tokenizer; give generate(..., tokenizer=...)"
        ) from error


def padding_token(config: GenerationConfig) -> int:
    """Return the token after a row's end, as `generate` chooses it.

    It is the padding token, else the first end token, else 0.
    """
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    ends = config.eos_token_id
    if isinstance(ends, Tensor):
        ends = ends.tolist()
    if isinstance(ends, list | tuple):
        return int(ends[0]) if ends else 0
    return 0 if ends is None else int(ends)


@dataclass(frozen=True)
class Stopping:
    """Where rows end."""

    end_tokens: frozenset[int]
    max_length: int
    """Padded prompt and new tokens, at most."""
    criteria: list[Callable[..., Any]]
    """All other stopping criteria."""

    @classmethod
    def of(cls, criteria: StoppingCriteriaList, max_length: float) -> Stopping:
        """Sort the criteria that `model.generate` prepared.

        A length of 10.5 ends a row of 11 tokens, as there.

        Raises:
            ValueError: a length that no row reaches.
        """
        # End tokens and the length are checked on the host without a call, the others are called.
        end_tokens: set[int] = set()
        others: list[Callable[..., Any]] = []
        for criterion in criteria:
            if isinstance(criterion, EosTokenCriteria):
                end_tokens.update(criterion.eos_token_id.tolist())
            elif isinstance(criterion, MaxLengthCriteria):
                max_length = min(max_length, criterion.max_length)
            else:
                others.append(criterion)
        if not math.isfinite(max_length):
            raise ValueError(
                "max_length, the prompt's tokens and max_new_tokens together, is"
                f" {max_length}; give a finite number"
            )
        return cls(frozenset(end_tokens), math.ceil(max_length), others)


def check_size(
    target: Target,
    drafter: BatchDrafter,
    prompts: list[Tensor],
    new_tokens: int,
    max_batch_size: int | None,
) -> None:
    """Refuse a batch that does not fit in the model's positions or in memory.

    If free memory is too small, the pool is emptied first.
    """
    longest = max(len(prompt) for prompt in prompts)
    if longest + new_tokens > target.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {new_tokens} new ones do not fit the"
            f" {target.max_positions} positions of {target.name!r}"
        )
    rows = min(len(prompts), max_batch_size or len(prompts))
    tokens = longest + new_tokens + drafter.max_nodes
    scores = rows * drafter.max_nodes * target.info.vocab_size
    # Of each a raw logit in the target's dtype; a score, a probability and a random number in at
    # least float32.
    bytes_of_score = target.dtype.itemsize + 3 * max(target.dtype.itemsize, 4)
    needed = {
        "the target's cache": target.cache_bytes(rows, target.engine.cache_slots(tokens)),
        "the drafts'": sum(model.cache_bytes(rows, tokens) for model in model_states(drafter)),
        "logits": scores * bytes_of_score,
    }
    total = sum(needed.values())
    free = free_memory(target.device)
    # Memory of earlier caches that is kept for the next one counts as used.
    if total > free and target.pool.blocks:
        target.pool.blocks.clear()
        free = free_memory(target.device)
    if total > free:
        parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needed.items())
        raise ValueError(
            f"to decode {rows} rows of {tokens} tokens takes {total / 2**30:.1f} GiB ({parts}), and"
            f" {target.device} has {free / 2**30:.1f} GiB free; ask for fewer new tokens, or decode"
            " fewer rows at once (max_batch_size)"
        )


@contextmanager
def shown_to_encoders(
    target: Target, drafter: BatchDrafter, prompts: Prompts
) -> Iterator[dict[str, Any]]:
    """Let the encoders of an encoder-decoder and its draft model read a prompt.

    The yielded dict holds `generate`'s argument for it, and is empty for other targets.
    """
    if not isinstance(target, Seq2SeqTarget):
        yield {}
        return
    check_ids(prompts.input_ids, prompts.attention_mask, target)
    # What a generation that calls this one has encoded, if there is one, is put back at the end.
    with ExitStack() as stack:
        stack.enter_context(target.encoder_outputs_kept())
        encoded = target.encode(prompts.input_ids, prompts.attention_mask)
        for model in assistants(drafter):
            if isinstance(model, Seq2SeqTarget):
                stack.enter_context(model.encoder_outputs_kept())
                with as_loaded(model.model):
                    model.encode(within(model, prompts.input_ids), prompts.attention_mask)
        yield {"encoder_outputs": encoded}
