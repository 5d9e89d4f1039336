"""What `SpeculativeLM.from_pretrained` loads besides the target: a head that fits, its tree, another source."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ..heads import DraftHead
from ..heads.checkpoint import HeadFacts, adapter_of, differences, load_head
from .choosing import Bandit, Fallback
from .draft_model import DraftModel
from .drafters import drafter_from
from .guarded import Guarded
from .guessing import HeadDrafter, RootOnly
from .hybrid import Hybrid
from .planning import default_tree
from .rounds import Drafter
from .seq2seq import Seq2SeqTarget
from .target import Target
from .texts import TextDrafter
from .tree import TreePolicy, tree_policy


def draft_models(drafter: Drafter) -> list[Seq2SeqTarget]:
    """The encoder-decoders that a drafter asks."""
    if isinstance(drafter, Fallback):
        return draft_models(drafter.drafter)
    if isinstance(drafter, Bandit):
        return draft_models(drafter.arms[0])
    model = drafter.head.model if isinstance(drafter, HeadDrafter) and isinstance(drafter.head, DraftModel) else None
    return [model] if isinstance(model, Seq2SeqTarget) else []


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
    ours = isinstance(drafter, HeadDrafter | Bandit | TextDrafter | Hybrid | Fallback | RootOnly)
    return drafter if ours else Guarded(drafter, target.info.vocab_size)


def loaded(
    head: str | Path | DraftHead, target: Target, revision: str | None, loaded_here: bool
) -> tuple[DraftHead, HeadFacts]:
    """A head that fits the target, and what travelled with it.

    Raises:
        ValueError: a head that cannot be loaded or does not fit.
    """
    if isinstance(head, DraftHead):
        head.target.check(target.info)
        dtypes = {parameter.dtype for parameter in head.parameters()} - {target.dtype}
        if dtypes:
            raise ValueError(f"the head's parameters are {dtypes.pop()}, the target's {target.dtype}; convert the head")
        return head, HeadFacts()
    loaded, facts = load_head(head, target.info, target.dtype, revision)
    for difference in differences(facts.origin, target.origin):
        warnings.warn(f"the head {str(head)!r} may accept less here: {difference}", stacklevel=3)
    if facts.adapted:
        _adapt(target, adapter_of(head, revision), loaded_here)
    return loaded, facts


def saved_tree(head: DraftHead, facts: HeadFacts, machine_word: str) -> TreePolicy:
    """The tree that was fastest on this machine, or else the last that was found anywhere, or else a default one."""
    saved = facts.measured.get("fastest", {}).get(machine_word, facts.tree)
    return default_tree(head.max_depth, head.draft_vocab_size) if saved is None else tree_policy(saved)


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
