"""A target that repeats its earlier answers: a head's acceptance at the cost of drafts alone.

Greedy decoding accepts a draft where it is the target's next token, and for a known answer these
tokens are known. So the target answers each prompt once, without drafts, and reads prompt and
answer once for the features. From then on the decoding loop, the acceptance rule and the statistics
run as usual, and every forward is a look-up. For each head and tree the result is that of real
decoding, except for near ties in the features' last bits.

The entries of the KV cache are the tokens themselves, by which a forward finds the answer that each
row is part of. For example, the stored text is [5, 7, 9, 4, 8] and the cache holds [5, 7]: the node
9, at position 2, is right, and its logits have a 1 at 4; a node 6 is wrong, and its logits are 0.

Letters in tensor names: B batch, N nodes, T time, R known texts, F width of the chosen layers side
by side, V vocabulary, K chosen positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..heads.base import DraftHead
from .cache.kv_cache import StateShape, TreeCache, free_memory
from .engines.base import Engine, TargetOutput
from .engines.target import Target
from .rounds.observers import RoundObserver
from .rounds.sequences import left_padded
from .speculative_lm import SpeculativeLM
from .trees.tree import DraftTree

BEYOND = 16
"""Tokens that are known beyond an answer, so that the drafts of its last round are judged, too."""
TOKENS_AT_ONCE = 8192
"""Tokens of the texts that the target answers, or reads, at once; one text may be longer."""
SHARE_OF_FREE = 0.5
"""Share of the free memory that the KV cache of prompts that are answered at once may take."""
UNKNOWN = -1
"""Padding after a text, equal to no token."""


class ReplayTarget(Target):
    """Greedy decoding with a copy of `target` that looks up what `target` would compute.

    `learn` must have been called for every prompt. The target must not change afterwards.
    """

    shares_prompts = False

    def __init__(self, target: Target) -> None:
        super().__init__(target.model, target.name, target.commit, target.hub)
        self.original = target
        self.computes_logits = target.computes_logits  # tried now: later there is no forward
        self.lock = target.lock
        self.engine = ReplayEngine(self)
        self.texts: dict[tuple[int, ...], Tensor] = {}
        """By prompt, the text [T] that begins with it."""
        self._tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        """By layers, texts_RT with padding, and their features_RTF, which stay in host memory."""

    def check_decoding(self) -> None:
        self.original.check_decoding()

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """The bytes of the tokens, which are all that the cache holds."""
        return sum(rows * tokens * shape.dtype.itemsize for shape in self.engine.state_shapes)

    def compile(self, mode: bool = True) -> None:
        """Keep the engine: nothing is computed here, in whatever mode."""

    def current_provenance(self) -> dict[str, Any]:
        return self.original.current_provenance()

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The original's provenance.

        It may have been found before the weights were divided among processes.
        """
        return self.original.provenance

    def unknown(self, prompts: Sequence[Tensor], new_tokens: int) -> list[Tensor]:
        """Those of the prompts [T] for which no answer of `new_tokens` is known yet, each once."""
        different = {tuple(prompt.tolist()): prompt for prompt in prompts}
        unknown = []
        for key, prompt in different.items():
            needed = min(len(key) + new_tokens, self.max_positions)
            if len(self.texts.get(key, ())) < needed:
                unknown.append(prompt)
        return unknown

    def learn(
        self,
        prompts: Sequence[Tensor],
        new_tokens: int,
        observers: Sequence[RoundObserver] = (),
    ) -> None:
        """Let the target answer the prompts [T] with no known answer of `new_tokens` yet."""
        unknown = self.unknown(prompts, new_tokens)
        if not unknown:
            return
        # Plain greedy decoding without an end token: an answer goes on after it, as drafts may.
        room = self.max_positions - max(map(len, unknown))
        input_ids, mask = left_padded(unknown, self.device)
        lm = SpeculativeLM(self.original)
        lm.observers += observers
        settings: dict[str, Any] = {
            "do_sample": False,
            "eos_token_id": [],
            "pad_token_id": 0,
            "stop_strings": None,
        }
        output = lm.generate(
            input_ids,
            attention_mask=mask,
            max_new_tokens=min(new_tokens + BEYOND, room),
            max_batch_size=rows_at_once(self.original, unknown, new_tokens + BEYOND),
            **settings,
        )
        # Training goes on beside this target: the cache is not kept for another generation.
        self.original.pool.blocks.clear()
        answers_RT = output.sequences[:, input_ids.shape[1] :]
        for prompt, answer_T in zip(unknown, answers_RT, strict=True):
            self.keep(prompt, torch.cat([prompt.to(self.device), answer_T]))

    def table(self, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return all texts [R, T], padded with `UNKNOWN`, and their features [R, T, F].

        The target reads them when they are first requested.
        """
        # A table of more layers serves, too, if it begins with these: prefill asks for one layer
        # more than rounds do.
        for table_layers, (texts_RT, features_RTF) in self._tables.items():
            if table_layers[: len(layers)] == layers:
                return texts_RT, features_RTF[..., : len(layers) * self.info.hidden_size]
        # By the length of their prompts: `_looked_up` takes the first of equally good texts.
        texts = [self.texts[prompt] for prompt in sorted(self.texts, key=len)]
        texts_RT = pad_sequence(texts, batch_first=True, padding_value=UNKNOWN)
        self._tables[layers] = texts_RT, self.features_of(texts_RT, layers)
        return self._tables[layers]

    def features_of(self, texts_RT: Tensor, layers: tuple[int, ...]) -> Tensor:
        """Features [R, T, F], in host memory, of texts that are padded by `UNKNOWN`.

        The target reads them.
        """
        width = len(layers) * self.info.hidden_size
        features_RTF = torch.empty(*texts_RT.shape, width, dtype=self.dtype)
        rows = max(1, TOKENS_AT_ONCE // texts_RT.shape[1])
        for texts, features in zip(texts_RT.split(rows), features_RTF.split(rows), strict=True):
            features.copy_(self.original.read(texts.clamp(min=0), layers)[0])
        return features_RTF

    def keep(self, prompt_T: Tensor, text_T: Tensor) -> None:
        """Know a text that begins with a prompt."""
        self.texts[tuple(prompt_T.tolist())] = text_T.to(self.device)
        self._tables.clear()


def rows_at_once(
    target: Target,
    prompts: Sequence[Tensor],
    new_tokens: int,
    nodes: int = 1,
    head: DraftHead | None = None,
) -> int:
    """Prompts [T] to answer at the same time, by their tokens and by what memory is free.

    `nodes` are those of a tree of drafts, and `head` is what drafts them. Processes over which a
    target is divided get the same number if they have as many prompts.
    """
    tokens = max(map(len, prompts)) + new_tokens + nodes
    row_bytes = target.cache_bytes(1, target.engine.cache_slots(tokens))
    if head is not None:
        row_bytes += head.cache_bytes(1, tokens)
    fitting = SHARE_OF_FREE * free_memory(target.device) // max(row_bytes, 1)
    rows = max(1, int(min(len(prompts), TOKENS_AT_ONCE // tokens, fitting)))
    groups = target.forwards(-(-len(prompts) // rows))
    return -(-len(prompts) // groups)


class ReplayEngine(Engine):
    """Looks up what the target's forwards would return."""

    name = "replay"
    target: ReplayTarget

    @property
    def state_shapes(self) -> list[StateShape]:
        return [StateShape(1, 1, torch.int64, self.target.device)] * 2

    @property
    def lm_head(self) -> nn.Module:
        return self.target.original.engine.lm_head

    def logits(self, states: Tensor) -> Tensor:
        return self.target.original.engine.logits(states)

    def forward_nodes(self, *given: Any, **named: Any) -> TargetOutput:
        raise AssertionError("only whole trees are looked up")

    def read_chunk(
        self,
        tokens_BT: Tensor,
        longest: int,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
    ) -> TargetOutput:
        """Prefill: the tokens are committed, and their features come from the table."""
        size = tokens_BT.shape[1]
        cache.reserve(size, max(longest - size, 0))
        # A prompt is a chain of nodes, each of which has all before it and itself as ancestors.
        chain_TT = torch.ones(size, size, dtype=torch.bool, device=self.target.device).tril()
        chain_BTT = chain_TT.expand(len(tokens_BT), -1, -1)
        depths_BT = torch.arange(size, device=self.target.device).expand_as(tokens_BT)
        output = self._looked_up(tokens_BT, chain_BTT, depths_BT, cache, layers, kept, size)
        cache.advance_prompt(size)
        return output

    def forward_tree(
        self, tree: DraftTree, longest: int, cache: TreeCache, layers: tuple[int, ...]
    ) -> TargetOutput:
        """Next tokens and features of all nodes; the cache gets the nodes' tokens."""
        structure = tree.structure
        nodes = tree.tokens_BN.shape[1]
        cache.reserve(nodes, longest)
        # Of the tree's tokens only the root is certainly part of the text.
        return self._looked_up(
            tree.tokens_BN,
            structure.ancestors_BNN,
            structure.depths_BN,
            cache,
            layers,
            list(range(nodes)),
            certain=1,
        )

    def _looked_up(
        self,
        tokens_BN: Tensor,
        ancestors_BNN: Tensor,
        depths_BN: Tensor,
        cache: TreeCache,
        layers: tuple[int, ...],
        kept: list[int],
        certain: int,
    ) -> TargetOutput:
        """Look up logits [B, K, V], 1 for the next token, and features [B, N, F].

        Both are 0 at nodes whose path is not part of the known answer.
        """
        # 1. Store the nodes' tokens as their keys, and find their positions in the text.
        texts_RT, features_RTF = self.target.table(layers)
        batch = len(tokens_BN)
        longest = texts_RT.shape[1]
        rows_B1 = torch.arange(batch, device=self.target.device)[:, None]
        committed_BT = cache.keys[0][:, 0, :, 0]
        committed_BT[rows_B1, cache.slots_BN] = tokens_BN
        positions_BN = (cache.lengths_B[:, None] + depths_BN).clamp(max=longest - 1)
        # 2. A row's text is the stored one whose prefix matches the committed tokens and the
        #    certain ones after them. Where a prompt is the beginning of another, several match, and
        #    argmax takes the first: the text with the shortest prompt. The score of a text is the
        #    number of tokens that match before the first that does not.
        width = min(committed_BT.shape[1], longest)
        so_far_B1T = (
            torch.arange(width, device=self.target.device)
            < cache.lengths_B[:, None, None] + certain
        )
        same_BRT = (committed_BT[:, None, :width] == texts_RT[:, :width]) & so_far_B1T
        text_B1 = same_BRT.int().cumprod(-1).sum(-1).argmax(-1, keepdim=True)
        # 3. A node is on the text's path if no ancestor, itself included, has a wrong token.
        right_BN = texts_RT[text_B1, positions_BN] == tokens_BN
        on_path_BN = ~(ancestors_BNN & ~right_BN[:, None]).any(-1)
        # 4. Its features, and the logits of the next token; `UNKNOWN` becomes token 0.
        next_BN = texts_RT[text_B1, (positions_BN + 1).clamp(max=longest - 1)].clamp(min=0)
        # sync: the features of all texts would take more of the device than training leaves free
        features_BNF = features_RTF[text_B1.cpu(), positions_BN.cpu()].to(on_path_BN.device)
        features_BNF = features_BNF.masked_fill(~on_path_BN[..., None], 0)
        logits_BKV = torch.zeros(
            batch,
            len(kept),
            self.target.info.vocab_size,
            dtype=torch.float32,
            device=self.target.device,
        )
        logits_BKV.scatter_(2, next_BN[:, kept, None], on_path_BN[:, kept, None].float())
        return TargetOutput(logits_BKV, features_BNF)
