"""Models that compute all tokens of a forward in a way that depends on where the forward lies.

Their positions fall into segments, and a forward must not cross a border between two of them.

    longrope (Phi-3)    two sets of rotary frequencies. A forward takes one for all of its tokens:
                        the second if its last position lies beyond the length of the original
                        training. Keys in the cache keep the frequencies they were computed with.
    Llama 4             scales the queries of some layers by a factor that grows in steps, and
                        counts tokens from the cache's length instead of taking their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.kv_cache import StateShape, TreeCache


@dataclass(frozen=True)
class Segments:
    """Segments of a text's positions, one of which must hold all tokens of a tree forward."""

    first: int
    """Positions of the first segment."""
    others: int | None
    """Positions of each later one; None for a second one without an end."""
    by_last: bool
    """Whether the last position of a forward decides for all of its tokens, in prompts, too. False
    if each token's index after those in the cache decides for itself."""

    def of(self, position: int) -> int:
        """The number of the segment that holds a position."""
        # With first = 10 and others = 20: 0 for positions 0 to 9, 1 for 10 to 29, 2 for 30 to 49.
        if position < self.first:
            return 0
        return 1 if self.others is None else 1 + (position - self.first) // self.others

    def together(self, lengths: Sequence[int], new_tokens: int) -> bool:
        """Whether texts with prompts of these lengths all stay in one and the same segment."""
        # The newest prompt token is the first that a round reads.
        begin = {self.of(length - 1) for length in lengths}
        end = {self.of(length + new_tokens - 1) for length in lengths}
        return len(begin | end) == 1

    def reads_whole(self, length: int) -> bool:
        """Whether a prompt must be read by one forward."""
        return self.by_last and self.of(length - 1) > 0


def segments_of(config: Any) -> Segments | None:
    """Return the segments of a text model's positions, by its config.

    None where a forward may lie anywhere.

    Rotary embeddings of type "dynamic" change only beyond the model's positions, where no text is
    decoded.
    """
    # 1. Llama 4: layers without rotary embedding (0 in the list) scale their queries in steps.
    without_rope = 0 in (getattr(config, "no_rope_layers", None) or ())
    if without_rope and getattr(config, "attn_temperature_tuning", False):
        # The factor is a function of floor((position + 1) / floor_scale), so the first step comes
        # one position early.
        every = int(config.floor_scale)
        return Segments(every - 1, every, by_last=False)

    # 2. longrope, in one embedding for all layers, or in that of some kind of layer.
    rope = getattr(config, "rope_parameters", None) or {}
    borders = set()
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            borders.add(int(part["original_max_position_embeddings"]))
    if len(borders) > 1:
        raise ValueError(
            "the layers' longrope rotary embeddings change at different positions"
            f" ({sorted(borders)}); all must change at one"
        )
    return Segments(borders.pop(), None, by_last=True) if borders else None


def tokens_read_at_border(model: Any, cache_name: str, border: int) -> int | None:
    """Return how many tokens `model.generate` reads anew where a text crosses a segment border.

    None if it keeps its cache there. Phi-3 drops its cache and reads the whole text again; before
    transformers 5.20 it read the newest token alone.
    """
    # Ask the model to prepare a step with a cache that is as long as the first segment, under the
    # name by which its forward takes one. Without the cache in the answer it was dropped.
    cache = TreeCache([StateShape(1, 1, model.dtype, model.device)] * 2, 1, model.device)
    cache.start = border
    text_1T = torch.zeros(1, border + 1, dtype=torch.int64, device=model.device)
    options = {cache_name: cache, "attention_mask": torch.ones_like(text_1T), "use_cache": True}
    prepared = model.prepare_inputs_for_generation(text_1T, next_sequence_length=1, **options)
    return None if prepared.get(cache_name) is not None else int(prepared["input_ids"].shape[1])


def has_changing_angles(config: Any) -> bool:
    """Whether the rotary angles depend on how far a forward reaches.

    The model reads this from its tensors in every forward.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    return any(part.get("rope_type") in ("dynamic", "longrope") for part in parts)
