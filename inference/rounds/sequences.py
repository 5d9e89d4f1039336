"""Per-sequence host state: emitted tokens, stopping, streaming, and text across calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.streamers import BaseStreamer

from ...heads.layers.constants import upload
from ..cache.kv_cache import TreeCache
from ..drafters.base import BatchDrafter, DraftContext, PrefillChunk
from ..drafters.round import Round
from ..trees.stats import RoundRecord, Stats


class Sequences:
    """The sequences of a call.

    Per-row lists hold every row of the call; `active` are those being decoded.
    """

    def __init__(
        self,
        prompts: list[Tensor],
        new_tokens: int,
        eos_token_ids: frozenset[int],
        criteria: Sequence[Callable[..., Any]] = (),
        streamer: BaseStreamer | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
        max_batch_size: int | None = None,
    ) -> None:
        """Begin with unpadded prompts [T], each to be continued by `new_tokens` at most.

        Stopping criteria are called after each token with one row's unpadded tokens [1, T]. Rows
        beyond `max_batch_size` wait.
        """
        self.prompts = prompts
        self.criteria = criteria
        self.streamer = streamer
        self.new_tokens = new_tokens
        self.eos_token_ids = eos_token_ids
        self.rows: list[list[int]] = [[] for _ in prompts]
        """New tokens of each row."""
        self.active = list(range(len(prompts)))[:max_batch_size]
        """Rows of the batch that is being decoded, by their number in the call."""
        self.waiting = deque(range(len(self.active), len(prompts)))
        """Rows that have not begun."""
        self.ended: set[int] = set()
        """Rows of the call that have ended."""
        self.idle: set[int] = set()
        """Rows that have ended and keep their slots in the batch, so that its size stays. What is
        computed for them is dropped."""
        self.live_B: Tensor | None = None
        """1 in the slots of rows that are being decoded, 0 in those of idle rows; None if no row
        is idle."""
        self.scores: list[list[Tensor]] | None = [[] for _ in prompts] if keep_scores else None
        """For each row, [tokens, V] per round."""
        self.logits: list[list[Tensor]] | None = [[] for _ in prompts] if keep_logits else None
        self._answers: dict[int, list[bool]] = {}
        """By row: whether it ends with each token that `ends` was asked about and that is not
        appended yet."""
        self._shown_scores: list[tuple[Tensor, ...]] = [() for _ in prompts]
        """For each row, the scores [1, V] of its new tokens, as stopping criteria see them."""

    @property
    def leaving(self) -> set[int]:
        """Rows that have ended and are still decoded in the batch."""
        return (self.ended & {*self.active}) - self.idle

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return sum(map(len, self.rows))

    @property
    def lengths(self) -> list[int]:
        """Length in tokens of each row that is being decoded, its prompt included.

        The newest token, the root, counts too.
        """
        return [
            len(self.prompts[row]) + len(self.rows[row])
            for row in self.active
            if row not in self.idle
        ]

    @property
    def decoded(self) -> list[int | None]:
        """The row in each slot of the batch; None in the slots of idle rows."""
        return [None if row in self.idle else row for row in self.active]

    @property
    def in_last_round(self) -> bool:
        """Whether the next token is the last one of every row that is being decoded."""
        decoded = [row for row in self.decoded if row is not None]
        return all(len(self.rows[row]) + 1 >= self.new_tokens for row in decoded)

    def text(self, row: int, more: Sequence[int] = ()) -> Tensor:
        """A row's prompt and new tokens, and `more` after them, [T]."""
        prompt = self.prompts[row]
        new_T = upload([*self.rows[row], *more], prompt.device, prompt.dtype)
        return torch.cat([prompt, new_T])

    def ends(self, row: int, tokens: list[int], scores_of: Callable[[int], Tensor]) -> bool:
        """Whether the row ends with the last of `tokens`, which follow its new tokens.

        scores_of(i) returns the scores [V] of the i-th token.

        Ask about one token after the other: [a], [a, b], [a, b, c]. The same question may be
        repeated, since a criterion, which may keep a state, is called once for each token.
        """
        answers = self._answers.setdefault(row, [])
        if len(answers) < len(tokens):
            ended = (
                tokens[-1] in self.eos_token_ids
                or len(self.rows[row]) + len(tokens) == self.new_tokens
            )
            if self.criteria:
                scores = None
                # As transformers passes them: of all new tokens so far, in float32.
                if self.scores is not None:
                    self._shown_scores[row] += (scores_of(len(tokens) - 1)[None].float(),)
                    scores = self._shown_scores[row]
                text_1T = self.text(row, tokens)[None]
                # As in transformers, every criterion is called, also after one has said yes.
                says_stop = [bool(criterion(text_1T, scores)) for criterion in self.criteria]
                ended = ended or any(says_stop)
            answers.append(ended)
        return answers[len(tokens) - 1]

    def add(self, rows: Sequence[int | None], finished: Round, stats: Stats | None = None) -> None:
        """Append the tokens that a round emitted in `rows`.

        An idle row is None. Without `stats`, the tokens are those that follow the prompts.

        Raises:
            ValueError: the target's scores after the newest token are invalid, and why.
        """
        path_BA = finished.verdict.path_BA
        scores_BNV = finished.scores_BNV
        logits_BNV = finished.output.logits_BNV
        tree = finished.verified

        def score(slot: int, i: int) -> Tensor:
            return scores_BNV[slot, path_BA[slot, i]]

        for slot, (row, tokens) in enumerate(zip(rows, finished.tokens, strict=True)):
            if row is None:
                continue
            # A row that is decoded emits at least one token, unless its scores are invalid.
            if not tokens:
                root = path_BA[slot, 0]
                self._refuse(row, logits_BNV[slot, root], scores_BNV[slot, root])
            # A round may accept more than the row may get: `count` tokens are returned. The scores
            # of token i are those at node i of the path, which precedes it.
            count = self._append(row, tokens, partial(score, slot))
            if self.scores is not None:
                self.scores[row].append(scores_BNV[slot, path_BA[slot, :count]])
            if self.logits is not None:
                self.logits[row].append(logits_BNV[slot, path_BA[slot, :count]])
            if stats is not None:
                record = RoundRecord(
                    accepted=len(tokens) - 1,
                    returned=count,
                    drafted=tree.max_depth,
                    number=len(stats.round_seconds),
                    fallback=tree.fallback,
                    nodes=tree.tokens_BN.shape[1],
                )
                stats.rows[row].append(record)

    def _append(self, row: int, tokens: list[int], scores_of: Callable[[int], Tensor]) -> int:
        """Append tokens up to where the row ends; return how many.

        scores_of(i) returns the scores of the i-th token.
        """
        count = 0
        for count in range(1, len(tokens) + 1):
            if self.ends(row, tokens[:count], scores_of):
                self.ended.add(row)
                break
        self.rows[row] += tokens[:count]
        self._answers.pop(row, None)
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens[:count]))
        return count

    def _refuse(self, row: int, logits_V: Tensor, scores_V: Tensor) -> None:
        """Say why no token can be chosen by a row's scores."""
        where = f"new token {len(self.rows[row])} of row {row}"
        # The target's logits first: where they are broken, no processor is to blame.
        for values_V, whose, broken in (
            (logits_V, "the target's logits", "the model's weights or its number format are"),
            (scores_V, "the logits processors' scores", "a processor is"),
        ):
            if values_V.isnan().any():
                raise ValueError(
                    f"{whose} for {where} contain NaN: {broken} broken, so nothing can be drawn"
                    " from them"
                )
            if values_V.isposinf().any():
                hint = "" if values_V is logits_V else ", or the temperature too low for float32"
                raise ValueError(
                    f"{whose} for {where} are infinite: {broken} broken{hint}; there are no"
                    " probabilities to sample from"
                )
        # Every score is -inf.
        raise ValueError(
            f"the logits processors forbid every token at {where}; leave at least one allowed"
        )


def shared_length(texts: Sequence[Sequence[int] | str]) -> int:
    """Length of the longest common prefix."""
    # Column i holds the i-th token of each text; zip ends with the shortest one.
    for length, tokens in enumerate(zip(*texts, strict=False)):
        if len(set(tokens)) > 1:
            return length
    return min(map(len, texts))


class Conversation:
    """The KV cache and drafter state of one text, updated in place by calls that continue it.

        past = Conversation()
        first = lm.generate(prompt, past_key_values=past)
        second = lm.generate(first_and_more, past_key_values=past)

    The second call returns the tokens of a fresh call, faster.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """The text: the last call's prompt and its new tokens."""
        self.cache: TreeCache | None = None
        self.draft_state: Any = None
        self.segment = 0
        """The segment of positions by which the cache's entries were computed, see `Segments`."""
        self.owner: Hashable = None
        """The decoder that filled the cache, and the version of its weights; no other can continue
        it."""

    def __repr__(self) -> str:
        return f"Conversation({len(self.tokens)} tokens)"

    def get_seq_length(self) -> int:
        """Tokens of the text in the KV cache: all but the newest one."""
        return max(len(self.tokens) - 1, 0) if self.cache is not None else 0

    def stay_in(self, segment: int) -> None:
        """Drop the text if a prompt that is read in this segment would get other entries."""
        if segment != self.segment:
            self.forget()
        self.segment = segment

    def forget(self) -> None:
        """Drop the text and its state."""
        self.tokens = []
        self.cache = None
        self.draft_state = None

    def resume(
        self, context: DraftContext, drafter: BatchDrafter, prompt_T: Tensor
    ) -> tuple[TreeCache | None, int]:
        """Crop the state to the prefix shared with the prompt, and resume the drafter from it.

        For example, the conversation's text is [5, 7, 9, 4] and the prompt [5, 7, 9, 8, 2]: the
        cache holds 5, 7 and 9, of which 5 and 7 stay, and the drafter has read the pairs (5, 7) and
        (7, 9).

        Returns:
            The target's KV cache and its length in tokens; None and 0 if the prompt must be read
            from its start.
        """
        prompt: list[int] = prompt_T.tolist()  # sync: once a call
        # 1. How many tokens stay. One less than are shared: a head has read each together with its
        #    successor, which must be the same in both texts.
        length = shared_length([self.tokens, prompt]) - 1
        if self.cache is None or length < 1 or not drafter.can_resume(self.draft_state):
            self.forget()
            return None, 0
        # 2. Crop the cache. A recurrent state may have to go back further than keys and values.
        length = self.cache.rewind(length)
        if length < 1:
            self.forget()
            return None, 0
        # 3. Resume the drafter. The features of the old text are gone, hence F = 0.
        device = self.cache.lengths_B.device
        tokens_1T = torch.tensor([prompt[: length + 1]], device=device)
        length_B = torch.tensor([length], device=device)
        empty_1TF = torch.empty(1, length, 0, dtype=torch.float32, device=device)
        chunk = PrefillChunk(tokens_1T[:, :-1], tokens_1T[:, 1:], empty_1TF, length_B)
        drafter.resume(context, chunk, self.draft_state, length == len(self.tokens) - 1)
        # 4. Room for the longer text.
        self.cache.ensure_capacity(context.capacity)
        return self.cache, length


def left_padded(prompts: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return prompts [T] as one batch of token ids [B, T] with its attention mask.

    The ids are padded on the left with 0.
    """
    # Prompts [5, 7, 9] and [4]: ids [[5, 7, 9], [0, 0, 4]], mask [[1, 1, 1], [0, 0, 1]].
    input_ids = pad_sequence(prompts, batch_first=True, padding_side="left").to(device)
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    mask_BT = torch.arange(input_ids.shape[1], device=device) >= input_ids.shape[1] - lengths_B1
    return input_ids, mask_BT.long()
