"""Acceptance rules: pure functions of a draft tree and the target's scores at its nodes.

Both rules here choose one token y_n at every node n and then follow the tree as long as it holds the chosen child:

    greedy       y_n = argmax of the scores                      what greedy decoding would have written
    point mass   y_n drawn from softmax(scores)                  the target's distribution exactly

The second is exact for every tree that was made without looking at these draws: given the path so far, the next
token is y_n whether or not the tree holds it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .rounds import Verdict
from .sampling import Draw
from .tree import DraftTree

Verifier = Callable[[DraftTree, Tensor, Draw], Verdict]


def greedy(tree: DraftTree, scores_BNV: Tensor, draw: Draw) -> Verdict:
    """Accept what equals the target's best token; lossless with respect to greedy decoding. `draw` is not used."""
    return follow(tree, scores_BNV.argmax(-1))


def point_mass(tree: DraftTree, scores_BNV: Tensor, draw: Draw) -> Verdict:
    """Accept what equals a token drawn from the target; lossless for any tree made independently of the draws."""
    return follow(tree, draw.categorical(scores_BNV.softmax(-1)))


def follow(tree: DraftTree, choices_BN: Tensor) -> Verdict:
    """Walk from the root to the child that was chosen at each node, until there is none.

    Args:
        tree: the guesses.
        choices_BN: the token that follows each node.
    """
    nodes = tree.tokens_BN.shape[1]
    index_N = torch.arange(nodes, device=choices_BN.device)
    chosen_BN = tree.tokens_BN == choices_BN.gather(1, tree.parents_BN.clamp(min=0))
    chosen_BN = (chosen_BN | (index_N == 0)) & (index_N < tree.sizes_B[:, None])
    # A node is accepted if it and all its ancestors were chosen. Siblings differ, so one path at most is.
    accepted_BN = ~(tree.ancestors_BNN & ~chosen_BN[:, None, :]).any(-1)
    reached_BN = tree.depths_BN * accepted_BN
    lengths_B = 1 + reached_BN.amax(-1)
    last_B = reached_BN.argmax(-1, keepdim=True)  # the first of equals: the root, where nothing was accepted
    on_path_BN = tree.ancestors_BNN.gather(1, last_B[:, :, None].expand(-1, -1, nodes))[:, 0]
    path_BA = _in_order(on_path_BN, tree.depths_BN, tree.max_depth + 1)
    return Verdict(path_BA, lengths_B, choices_BN.gather(1, last_B)[:, 0])


VERIFIERS: dict[str, Verifier] = {"greedy": greedy, "exact": point_mass}
"""The words that `SpeculativeLM` takes, and their rules."""


def _in_order(on_path_BN: Tensor, depths_BN: Tensor, places: int) -> Tensor:
    """The indices of one path's nodes by depth, padded with the root to `places`."""
    index_BN = torch.arange(on_path_BN.shape[1], device=on_path_BN.device).expand_as(depths_BN)
    # Nodes off the path all go to one place behind the others, which is cut off.
    places_BN = torch.where(on_path_BN, depths_BN, places)
    return index_BN.new_zeros(len(index_BN), places + 1).scatter(1, places_BN, index_BN)[:, :places]
