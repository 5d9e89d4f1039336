"""Random numbers fixed for each position of a text, so that drafts can be drawn with them too.

Letters in tensor names: B batch, K positions, N nodes, P positions that one round decides at most,
R rows of the call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...heads.layers.constants import constants, counting, upload
from ..engines import cpu_kernels
from ..trees.sampling import PositionSampler, RandomSampler, finest
from ..trees.tree import DraftTree

SPLITMIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
"""SplitMix64 (Steele, Lea, Flood 2014): the increment of its counter, and the two factors that mix
it."""
GOLDEN, MIX_1, MIX_2 = SPLITMIX
SIGNED_GOLDEN, *SIGNED_MIX = SPLITMIX.view(np.int64).tolist()
"""The same bits as torch's int64."""


class PositionNoise:
    """Independent exponential numbers E_v of rate 1, for each token v at each position of a row.

    The token at a position is the v with the least E_v / p_v: it has the distribution p, whatever
    was drawn elsewhere, and depends on no draft. A draft that takes the least E_v / q_v, by the
    same numbers, agrees with it with a probability of at least (1 - TV) / (1 + TV) (Daliri, Musco,
    Suresh, arXiv:2408.07978).

    The numbers are computed from one seed a row and not stored: they are the same on every device.
    """

    def __init__(
        self,
        sampler: RandomSampler,
        texts: list[list[int]],
        positions: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """Draw a seed for each row.

        `texts` are the rows' new tokens, of which one step decides at most `positions`.
        """
        # The user's generator may be on another device than the model.
        source = device if sampler.generator is None else sampler.generator.device
        bounds = -(2**63), 2**63 - 1  # any int64
        seeds_R = torch.randint(*bounds, (len(texts),), generator=sampler.generator, device=source)
        self._seeds_R = seeds_R.cpu().numpy().astype(np.uint64)  # sync: once a call
        self._ahead_P = np.arange(positions, dtype=np.uint64)
        self._texts = texts
        self._vocab_size = vocab_size
        self._device = device

    def move_to(self, rows: Sequence[int]) -> None:
        """Move to the next position of each row of the batch."""
        # A key for each position: SplitMix64's output number n + p from the row's seed, for a row
        # with n new tokens. uint64 wraps around. On the host: P keys a row are few.
        next_B = np.array([len(self._texts[row]) for row in rows], dtype=np.uint64)
        z_BP = self._seeds_R[np.array(rows), None] + (next_B[:, None] + self._ahead_P) * GOLDEN
        z_BP = (z_BP ^ (z_BP >> 30)) * MIX_1
        z_BP = (z_BP ^ (z_BP >> 27)) * MIX_2
        keys_BP = (z_BP ^ (z_BP >> 31)).astype(np.int64)
        self._keys_BP = upload(keys_BP, self._device)
        self._ready_BKV = torch.empty(
            len(rows), 0, self._vocab_size, dtype=torch.float32, device=self._device
        )

    def next(self, count: int) -> Tensor:
        """E_BKV of the next K = `count` positions of each row; float32."""
        # The drafter and then the rule ask for the same positions: each is computed once a round.
        ready = self._ready_BKV.shape[1]
        if ready < count:
            more_BKV = exponential(self._keys_BP[:, ready:count], self._vocab_size)
            if ready == 0:
                self._ready_BKV = more_BKV
            else:
                self._ready_BKV = torch.cat([self._ready_BKV, more_BKV], dim=1)
        return self._ready_BKV[:, :count]

    def sampler(self, tree: DraftTree) -> PositionSampler:
        """Return the sampler of a tree's nodes.

        A node at depth d of a row with n new tokens decides the token at n + d.
        """
        numbers_BKV = self.next(tree.max_depth + 1)
        if tree.in_order:
            return PositionSampler(exponential_BNV=numbers_BKV)
        # [B, K, V] at [rows_B1, depths_BN] gives [B, N, V]: nodes of equal depth decide the same
        # position, and get the same numbers.
        depths_BN = tree.structure.depths_BN
        rows_B1 = counting(len(depths_BN), depths_BN.device, column=True)
        return PositionSampler(exponential_BNV=numbers_BKV[rows_B1, depths_BN])


@constants
def _steps(width: int, device: torch.device) -> Tensor:
    """Offsets of SplitMix64's counter for `width` numbers."""
    return torch.arange(width, device=device) * SIGNED_GOLDEN


def exponential(keys_BK: Tensor, width: int) -> Tensor:
    """Return exponential numbers of rate 1, float32 [B, K, width].

    They are -log(1 - u), where SplitMix64, started at each key, gives u in (0, 1).
    """
    if cpu_kernels.in_use(keys_BK.device):
        minus_u = cpu_kernels.minus_uniform(keys_BK.flatten(), width).reshape(*keys_BK.shape, width)
    else:
        # SplitMix64's output function in int64, which wraps around like uint64. z is [B, K, width].
        z = keys_BK[..., None] + _steps(width, keys_BK.device)
        for shift, factor in zip((30, 27), SIGNED_MIX, strict=True):
            # >> copies the sign bit into the top `shift` bits; the mask clears them.
            z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor
        # Of the last step the upper 53 bits, k; u = (k + 0.5) / 2**53.
        z = (((z ^ ((z >> 31) & (2**33 - 1))) >> 11) & (2**53 - 1)).to(finest(z.device))
        minus_u = ((z + 0.5) * -(2.0**-53)).float()
    # u that rounds to 1 would be infinite, and all tokens alike
    return minus_u.clamp_(min=-(1 - 2.0**-24)).log1p_().neg_()
