"""Scores that a certificate judges by: in one forward, token by token, and after short paths."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import logits_process as known

from ...inference.trees.logits import PREFIX_FREE
from .certificate import BestScores, NextToken, TokenPath, counts_by_path

ROWS = 32
"""Paths that one forward reads."""


def greedy_processors(repetition_penalty: float) -> LogitsProcessorList:
    """Logits processors of greedy decoding, in transformers' order."""
    processors = LogitsProcessorList()
    if repetition_penalty != 1.0:
        processors.append(known.RepetitionPenaltyLogitsProcessor(repetition_penalty))
    return processors


def sampling_processors(
    temperature: float, top_k: int, top_p: float, repetition_penalty: float
) -> LogitsProcessorList:
    """Logits processors of sampling, in transformers' order."""
    processors = greedy_processors(repetition_penalty)
    if temperature != 1.0:
        processors.append(known.TemperatureLogitsWarper(temperature))
    if top_k > 0:
        processors.append(known.TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(known.TopPLogitsWarper(top_p))
    return processors


def processed(processors: LogitsProcessorList, text_T: Tensor, logits_NV: Tensor) -> Tensor:
    """Apply the processors to the logits after each of a text's last N tokens.

    The scores are in at least float32.
    """
    scores_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    # Processors that read no text score all positions at once.
    if all(isinstance(processor, PREFIX_FREE) for processor in processors):
        nothing: Any = text_T[:0].expand(len(scores_NV), -1)
        return processors(nothing, scores_NV.clone()) if processors else scores_NV
    # The others are called with the text up to each position: with 10 tokens and N = 3, with the
    # first 8, 9 and 10.
    first = len(text_T) - len(logits_NV)
    rows: list[Any] = []
    for i, scores_V in enumerate(scores_NV):
        before_1T: Any = text_T[None, : first + i + 1]
        rows.append(processors(before_1T, scores_V[None].clone()))
    return torch.cat(rows)


@torch.inference_mode()
def whole_logits(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Logits [T, V] before each token of an answer, by one forward over prompt and answer."""
    # The last token is not read: nothing is judged after it.
    text_1T = torch.tensor([[*prompt, *answer[:-1]]], device=model.device)
    logits_1TV: Tensor = model(
        input_ids=text_1T, use_cache=False, logits_to_keep=len(answer)
    ).logits
    return logits_1TV[0]


@torch.inference_mode()
def one_token_scores(
    model: PreTrainedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    processors: LogitsProcessorList,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[list[int], BestScores]:
    """The best scores before each token of an answer, by forwards over one token after another.

    With a tokenizer, only the answer's text is certain, and it may have been generated as other
    tokens. Where the model's own choice is the next piece of the text, it is taken, and the rest of
    the text is split anew. Returns the tokens, too.
    """
    tokens = list(answer)
    text = list(prompt)
    cache = None
    unread = list(prompt)  # the whole prompt first, then one token at a time
    scores = []
    position = 0
    while position < len(tokens):
        ids_1T = torch.tensor([unread], device=model.device)
        output = model(input_ids=ids_1T, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        scores_1V = processed(processors, torch.tensor(text, device=model.device), output.logits[0])
        scores.append(BestScores.of(scores_1V))
        if tokenizer is not None:
            tokens = _split_anew(tokenizer, tokens, position, int(scores_1V.argmax()))
        unread = [tokens[position]]
        text.append(tokens[position])
        position += 1
    together = BestScores(
        torch.cat([best.tokens_TK for best in scores]),
        torch.cat([best.scores_TK for best in scores]),
    )
    return tokens, together


def _split_anew(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], position: int, choice: int
) -> list[int]:
    """Return the tokens with `choice` at `position`, if the text from there on begins with it.

    The text after it is tokenized anew. Otherwise the tokens are returned unchanged. For example,
    the text " unlikely" may be [" unlikely"], or " un" and then "likely".
    """
    if choice == tokens[position]:
        return tokens
    rest = str(tokenizer.decode(tokens[position:]))
    piece = str(tokenizer.decode([choice]))
    if not piece or "\ufffd" in piece or not rest.startswith(piece):
        return tokens
    return [
        *tokens[:position],
        choice,
        *tokenizer.encode(rest[len(piece) :], add_special_tokens=False),
    ]


@torch.inference_mode()
def next_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    continuations: Sequence[TokenPath],
    processors: LogitsProcessorList,
    positions: int,
) -> dict[TokenPath, NextToken]:
    """Return the next-token distribution after every prefix of a prompt's continuations."""
    # 1. The tokens that were drawn after each path, and the longest paths: a forward over a path
    #    reads all shorter ones as well.
    drawn: dict[TokenPath, list[int]] = {}
    for position in range(positions):
        for path, counts in counts_by_path(continuations, position).items():
            drawn[path] = list(counts)
    ends = set(drawn)
    for path in drawn:
        if path:
            ends.discard(path[:-1])
    rows = sorted(ends, key=len)
    # Less likely tokens cannot be expected often enough to be bins.
    keep = max(1, len(continuations) // 4)
    # 2. Read the prompt once, all but its last token, which begins every row.
    cache = None
    if len(prompt) > 1:
        read_1T = torch.tensor([prompt[:-1]], device=model.device)
        cache = model(input_ids=read_1T, use_cache=True, logits_to_keep=1).past_key_values
    # 3. Read the paths in batches, padded on the right, where nothing sees the padding.
    distributions: dict[TokenPath, NextToken] = {}
    for start in range(0, len(rows), ROWS):
        batch = rows[start : start + ROWS]
        longest = max(map(len, batch))
        padded = [[prompt[-1], *row, *[0] * (longest - len(row))] for row in batch]
        ids_BT = torch.tensor(padded, device=model.device)
        copied = copy.deepcopy(cache)
        if copied is not None:
            copied.batch_repeat_interleave(len(batch))
        logits_BTV = model(
            input_ids=ids_BT, past_key_values=copied, use_cache=copied is not None
        ).logits
        # 4. Of each row the prefixes that no row before it had.
        for row, logits_TV in zip(batch, logits_BTV, strict=True):
            new = [n for n in range(len(row) + 1) if row[:n] not in distributions]
            text_T = torch.tensor([*prompt, *row], device=model.device)
            scores_TV = processed(processors, text_T, logits_TV[: len(row) + 1])
            tokens = [drawn[row[:length]] for length in new]
            after_prefixes = NextToken.after_paths(scores_TV[new], logits_TV[new], tokens, keep)
            for length, distribution in zip(new, after_prefixes, strict=True):
                distributions[row[:length]] = distribution
    return distributions
