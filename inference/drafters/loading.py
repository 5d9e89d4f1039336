"""What `SpeculativeLM.from_pretrained` loads besides the target: a head that fits, its tree, another source."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ...heads import DraftHead
from ...heads.checkpoints.save_load import CheckpointMetadata, adapter_of, differences, load_head
from ..models.encoder_decoder import Seq2SeqTarget
from ..target import Target
from ..tuning.tree_spec import TreePolicy, tree_policy
from .adaptive import AdaptiveDrafter, RoundCosts, candidate_trees
from .base import Drafter
from .by_name import drafter_from
from .draft_model import AssistantModel
from .head_and_lookup import HeadAndLookup
from .head_drafter import DraftModel, HeadDrafter, NoDraft
from .on_host import HostDrafter
from .prompt_lookup import NgramDrafter
from .validated import ValidatedDrafter


def draft_models(drafter: Drafter) -> list[Seq2SeqTarget]:
    """The encoder-decoders that a drafter asks."""
    guesser = guesser_of(drafter)
    model = guesser.model if isinstance(guesser, AssistantModel) else None
    return [model] if isinstance(model, Seq2SeqTarget) else []


def guesser_of(drafter: Drafter) -> DraftModel | None:
    """The head, or what is asked like one, that a drafter grows its trees from."""
    if isinstance(drafter, AdaptiveDrafter):
        return guesser_of(drafter.trees[0])
    if isinstance(drafter, HeadAndLookup):
        return guesser_of(drafter.head)
    return drafter.head if isinstance(drafter, HeadDrafter) else None


def adaptive_of(drafter: Drafter) -> list[AdaptiveDrafter]:
    """All that choose in a drafter, itself too."""
    if isinstance(drafter, AdaptiveDrafter):
        return [drafter, *(inner for tree in drafter.trees for inner in adaptive_of(tree))]
    return adaptive_of(drafter.head) if isinstance(drafter, HeadAndLookup) else []


def source_of(drafter: str | Drafter | None, target: Target, tree: Any) -> Drafter | None:
    """A drafter by name, or as it is; one that is not ours is watched.

    Raises:
        ValueError: see `drafter_from`, or a tree for a drafter that is made already.
    """
    if isinstance(drafter, str):
        return drafter_from(drafter, target, tree)
    if drafter is None:
        return None
    if tree != "auto":
        raise ValueError(f"tree {tree!r} was given with a drafter that is made already; make it with that tree")
    ours = isinstance(drafter, HeadDrafter | AdaptiveDrafter | NgramDrafter | HeadAndLookup | HostDrafter | NoDraft)
    return drafter if ours else ValidatedDrafter(drafter, target.info.vocab_size)


def loaded(
    head: str | Path | DraftHead, target: Target, revision: str | None, loaded_here: bool, auto: bool = False
) -> tuple[DraftHead, CheckpointMetadata]:
    """A head that fits the target, and what travelled with it.

    Args:
        head: a checkpoint folder, a Hub id, or a head.
        target: that it is to draft for.
        revision: of the head's Hub id.
        loaded_here: whether the target was given by name, and may get the head's adapter.
        auto: whether its dtype was nobody's wish, so that nobody is told that the head was trained in another.

    Raises:
        ValueError: a head that cannot be loaded or does not fit.
    """
    if isinstance(head, DraftHead):
        head.target.check(target.info)
        dtypes = {parameter.dtype for parameter in head.parameters()} - {target.dtype}
        if dtypes:
            raise ValueError(f"the head's parameters are {dtypes.pop()}, the target's {target.dtype}; convert the head")
        return head, CheckpointMetadata()
    loaded, metadata = load_head(head, target.info, target.dtype, revision)
    unasked = ("dtype",) if loaded_here and auto else ()
    origin = {name: value for name, value in target.origin.items() if name not in unasked}
    for difference in differences(metadata.origin, origin):
        warnings.warn(f"the head {str(head)!r} may accept less here: {difference}", stacklevel=3)
    if metadata.adapted:
        _adapt(target, adapter_of(head, revision), loaded_here)
    return loaded, metadata


def auto_trees(head: DraftHead, metadata: CheckpointMetadata, machine_word: str, costs: RoundCosts) -> list[TreePolicy]:
    """The tree that was fastest on this machine, or else those to choose from; one of another machine is a hint."""
    here = metadata.measured.get("fastest", {}).get(machine_word)
    if here is not None:
        return [tree_policy(here)]
    return candidate_trees(head, None if metadata.tree is None else tree_policy(metadata.tree), costs)


def _adapt(target: Target, adapter: Path, loaded_here: bool) -> None:
    """Give the target the adapter that the head was trained with; a model of the user's is never changed."""
    if target.adapter == str(adapter.resolve()):
        return
    if not loaded_here:
        raise ValueError(
            f"the head drafts for the target with the adapter {str(adapter)!r}; call target.merge_adapter with it, or "
            "give the target by name"
        )
    target.merge_adapter(adapter)
