"""A decoder's drafter with all that belongs to it, as one record that is replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ..heads.base import DraftHead
from .drafters.base import BatchDrafter
from .drafters.by_name import DrafterSource, make_drafter
from .drafters.history import EARLIER_TOKENS
from .drafters.text_index import TextIndex
from .drafters.tree_policies import model_states
from .engines.target import Target
from .trees.tree_spec import TreeSpec
from .trees.verify import AcceptanceRule, choose_rule


@dataclass(frozen=True, eq=False)
class Drafting:
    """A drafter, and the acceptance rule of its drafts in sampling; see `SpeculativeLM`."""

    drafter: BatchDrafter
    acceptance: str
    """Name of the rule, or "auto"."""
    lossy: bool
    head: DraftHead | None = None
    """The head that drafts, as it was given; None if there is none."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """The target that the head was trained against, from the head's checkpoint."""
    with_tree: Callable[[TreeSpec], BatchDrafter] | None = None
    """Makes a drafter of the same head or source with another tree."""

    def __post_init__(self) -> None:
        """Refuse a rule that is not known, or does not fit the drafter's trees, by a ValueError."""
        self.sampling_rule  # noqa: B018 - chosen now

    @cached_property
    def sampling_rule(self) -> AcceptanceRule:
        """The rule itself."""
        return choose_rule(self.acceptance, self.drafter.kind, self.lossy)

    def for_call(self, tree: TreeSpec | None, acceptance: str | None) -> Drafting:
        """The same with another tree or rule; None keeps the present one."""
        drafter = self.drafter
        if tree is not None:
            if self.with_tree is None:
                raise ValueError(
                    f"tree {tree!r} was given with a drafter object; make the drafter with that"
                    " tree"
                )
            drafter = self.with_tree(tree)
        # A rule for sampled trees does not fit top-k trees, and the other way round.
        same_kind = drafter.kind == self.drafter.kind
        name = acceptance or (self.acceptance if same_kind else "auto")
        return replace(self, drafter=drafter, acceptance=name)

    @property
    def head_in_engine(self) -> DraftHead | None:
        """The head as it drafts, which may be a copy in the target's engine; None without one."""
        for state in model_states(self.drafter):
            if isinstance(state.model, DraftHead):
                return state.model
        return None


def drafting_for(
    target: Target,
    source: DrafterSource | None,
    tree: TreeSpec,
    adaptive: bool,
    compiled: bool,
    acceptance: str,
    lossy: bool,
    head: DraftHead | None,
) -> Drafting:
    """A decoder's drafter and rule, by a head or by the source alone.

    The arguments are those of `SpeculativeLM.from_pretrained`; `compiled` heads run in the target's
    engine.

    Raises:
        ValueError: a tree or a rule that does not fit.
    """
    provenance: dict[str, Any] = {}
    if head is not None and head.metadata is not None:
        provenance = head.metadata.provenance
    # 1. The head as it runs: itself, or its copy in the target's engine (C++ kernels).
    running_head = head
    if head is not None and compiled:
        running_head = target.engine.draft_head(head)
    # 2. Its drafter. Single calls may make another one, with another tree, that searches the same
    #    earlier answers. A lossy rule lets drafts change the text: there, none are kept.
    with_tree = partial(
        make_drafter,
        target,
        source,
        head=running_head,
        adaptive=adaptive,
        earlier=None if lossy else TextIndex(EARLIER_TOKENS),
    )
    drafter = with_tree(tree)
    target.check_layers(drafter.feature_layers)
    for state in model_states(drafter):
        state.use(target.engine)
    # 3. The rule, which must fit the drafter's trees.
    return Drafting(drafter, acceptance, lossy, head, provenance, with_tree)
