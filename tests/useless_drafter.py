"""A drafter of somebody else's that is always wrong, for tests of what guards and of what adapts."""

from __future__ import annotations

import torch

from headstart.inference import Drafter, DraftTree


class Useless(Drafter):
    """The same wrong token, again and again: the last of a small vocabulary."""

    max_nodes, vocab_size = 8, 20

    def propose(self, roots_B):
        tokens = torch.full((len(roots_B), 8), self.vocab_size - 1)
        tokens[:, 0] = roots_B
        parents = torch.arange(-1, 7).expand(len(roots_B), -1)
        return DraftTree(tokens, parents, torch.full_like(roots_B, 8), max_depth=7)
