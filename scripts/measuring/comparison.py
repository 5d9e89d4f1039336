"""Comparisons of decoders on the same prompts: interleaved by prompt, quartiles over prompts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.console import ProgressBar, counted
from headstart.inference import SpeculativeLM, Stats, Target
from headstart.inference.drafters.acceptance import Answered
from headstart.inference.engines.encoder_decoder import Seq2SeqTarget
from headstart.inference.text.chat_template import check_lengths, prompt_ids
from headstart.inference.text.messages import Messages
from headstart.inference.text.prompt_files import read_prompts
from headstart.inference.tuning.machine import turns
from headstart.scripts.command_line import DecodingOptions

Key = TypeVar("Key")


def read_prompt_files(paths: Sequence[str], limit: int | None) -> dict[str, list[Messages]]:
    """Read the first `limit` prompts of each file."""
    prompts = {path: read_prompts(path, limit) for path in paths}
    for path, rows in prompts.items():
        if not rows:
            raise ValueError(f"{path} holds no prompts")
    return prompts


def load_with_prompts(
    config: DecodingOptions, prompts: dict[str, list[Messages]]
) -> tuple[SpeculativeLM, PreTrainedTokenizerBase, dict[str, list[Tensor]]]:
    """Load a model that drafts, and encode the prompts of every file as token ids [1, time].

    The ids are on the model's device.
    """
    lm, tokenizer = config.load()
    encoded: dict[str, list[Tensor]] = {}
    for path, rows in prompts.items():
        encoded[path] = []
        for messages in rows:
            ids_1T = encoded_prompt(lm.target, tokenizer, messages, config)
            encoded[path].append(ids_1T.to(lm.target.device))
        new_tokens = 0 if isinstance(lm.target, Seq2SeqTarget) else config.max_new_tokens
        check_lengths(encoded[path], new_tokens, lm.target.max_positions, path)
    return lm, tokenizer, encoded


def encoded_prompt(
    target: Target, tokenizer: PreTrainedTokenizerBase, messages: Messages, config: DecodingOptions
) -> Tensor:
    """Return the token ids [1, time] of a prompt.

    A conversation is rendered by the chat template; for an encoder-decoder the text is encoded
    alone.
    """
    if not isinstance(target, Seq2SeqTarget):
        return prompt_ids(tokenizer, messages, config.thinking, config.template_kwargs)
    if len(messages) != 1 or not isinstance(messages[0]["content"], str):
        raise ValueError(
            f"{target.name!r} is an encoder-decoder, which reads one text; a prompt of"
            f" {len(messages)} messages was given: let each prompt be one message of a user"
        )
    ids: Tensor = tokenizer(messages[0]["content"], return_tensors="pt")["input_ids"]
    return ids


def answer_begin(target: Target, input_ids: Tensor) -> int:
    """Index of the first new token in what `generate` returns for a prompt [1, time]."""
    return 1 if isinstance(target, Seq2SeqTarget) else input_ids.shape[1]


def answer_settings(
    new_tokens: int, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> dict[str, Any]:
    """Arguments of `generate`: greedy, or sampled, by default from the whole distribution."""
    if temperature == 0:
        return {"max_new_tokens": new_tokens, "do_sample": False}
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return {"max_new_tokens": new_tokens, "do_sample": True, **sampling}


def stock_settings(
    target: Target, tokenizer: PreTrainedTokenizerBase | None = None
) -> dict[str, Any]:
    """Return the arguments that only stock `model.generate` needs: a tokenizer for stop strings.

    They are empty if the model's generation config has no stop strings. Our `generate` finds its
    tokenizer itself.
    """
    if not target.model.generation_config.stop_strings:
        return {}
    return {"tokenizer": tokenizer or target.tokenizer}


def answered(
    lm: SpeculativeLM, prompts: Sequence[Tensor], settings: dict[str, Any]
) -> list[Answered]:
    """Answer prompts [1, time], one after the other."""
    answers = []
    for ids_1T in counted(prompts, "answers"):
        sequences_1T = lm.generate(ids_1T, **settings).sequences
        answers.append(Answered(sequences_1T[0], ids_1T.shape[1]))
    return answers


def in_turns(
    engines: Mapping[Key, SpeculativeLM], prompts: list[Tensor], settings: dict[str, Any]
) -> dict[Key, Stats]:
    """Answer each prompt with every engine before the next prompt.

    A machine whose speed drifts then treats all engines alike.
    """
    stats: dict[Key, list[Stats]] = {key: [] for key in engines}
    with ProgressBar("answers", len(engines) * (1 + len(prompts))) as bar:
        for lm in engines.values():  # the first answer of each is slow
            lm.generate(prompts[0], **settings)
            bar.update(bar.done + 1)
        for number, ids_1T in enumerate(prompts):
            for key in turns(list(engines), number):
                stats[key].append(engines[key].generate(ids_1T, **settings).stats)
                bar.update(bar.done + 1)
    return {key: Stats.merged(parts) for key, parts in stats.items()}


@torch.inference_mode()
def first_difference(
    target: Target, stock_1T: Tensor, ours_1T: Tensor, prompt: int, read_1T: Tensor | None = None
) -> dict[str, float] | None:
    """Find where two answers to a prompt of `prompt` tokens differ first; None if they are equal.

    `token` counts from the first new one; `logit_gap` lies between the two tokens there, by a
    forward of the target, whose encoder reads `read_1T` if it has one.
    """
    shorter = min(stock_1T.shape[1], ours_1T.shape[1])
    differing = (stock_1T[0, :shorter] != ours_1T[0, :shorter]).nonzero()
    if len(differing) == 0:
        if stock_1T.shape == ours_1T.shape:
            return None
        return {"token": shorter - prompt, "logit_gap": float("inf")}
    place = int(differing[0])
    if isinstance(target, Seq2SeqTarget):
        output = target.model(input_ids=read_1T, decoder_input_ids=stock_1T[:, :place])
    else:
        output = target.model(stock_1T[:, :place], logits_to_keep=1)
    logits_V = output.logits[0, -1].float()
    gap = logits_V[stock_1T[0, place]] - logits_V[ours_1T[0, place]]
    return {"token": place - prompt, "logit_gap": float(gap)}


def quartiles(values: list[float]) -> dict[str, float]:
    """Median and quartiles over prompts."""
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": median, "lower_quartile": low, "upper_quartile": high}


def spread(row: dict[str, float]) -> str:
    """Format the result of `quartiles` for a table."""
    return f"{row['median']:.2f} ({row['lower_quartile']:.2f}-{row['upper_quartile']:.2f})"
