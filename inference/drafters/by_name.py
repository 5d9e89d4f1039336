"""Drafters by a user's names: a head, a source of drafts without a head, a tree, or several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from ...heads.base import CheckpointMetadata, DraftHead, TargetModules
from ..engines.encoder_decoder import Seq2SeqTarget, is_encoder_decoder
from ..engines.target import Target
from ..targets.loading import tokenizer_provenance
from ..trees.tree_spec import (
    DynamicShape,
    EarlyExitShape,
    SampledShape,
    TreePolicy,
    TreeShape,
    TreeSpec,
    stored_tree,
    tree_policies,
)
from ..tuning.machine import machine_key
from ..tuning.round_costs import RoundCosts
from ..tuning.tree_search import batch_budget
from .adaptive import AdaptiveDrafter
from .base import BatchDrafter, Drafter, NoDraft
from .candidate_trees import candidate_chains, candidate_trees
from .costs import measured_costs
from .datastore import read_datastore
from .draft_model import AssistantModel, mask_token
from .draft_model_state import DraftModel, DraftModelState
from .history import HistoryDrafter
from .specs import DrafterSpec, History, SmallerModel, drafter_spec
from .text_index import SEPARATOR, TextIndex
from .tree_policies import DynamicTree, EarlyExitChain, HeadDrafter, StaticTree, model_states
from .validated import validated

DrafterSource = str | DrafterSpec | Drafter | Target | PreTrainedModel
"""A drafter as a user gives it: a spec or its text (see `SPECS`), one that is made already, or a
smaller model."""
MODEL_TREE = "chain:4"
"""What a second model drafts if no tree is named."""
PARALLEL_TREE = "chain:8"
"""What a parallel draft model drafts if no tree is named: as many tokens as PARD trains."""


def make_drafter(
    target: Target,
    source: DrafterSource | None = None,
    tree: TreeSpec = "auto",
    head: DraftHead | None = None,
    adaptive: bool = False,
    earlier: TextIndex | None = None,
) -> BatchDrafter:
    """The drafter that a user names; `NoDraft` if nothing is named.

    Args:
        target: the model whose tokens are drafted.
        source: a drafter without a head; with a head, a history that takes turns with it. None
            with a head and `adaptive` is such a history, too.
        tree: what the head drafts, or, without one, a smaller model. "auto" for the head's fastest
            tree on this machine, or trees to choose from, for which the cost of rounds is measured
            if it is not known.
        head: a head that fits the target.
        adaptive: whether autoregressive steps replace drafts where they are faster.
        earlier: the answers that histories search and add to; None for none.
    """
    check_chains(target, tree)
    spec = drafter_spec(source) if isinstance(source, str) else source
    # 1. What does not go together.
    if head is not None and spec is not None and not isinstance(spec, History):
        raise ValueError("with a head, drafter must be history, prompt-lookup or retrieval")
    if head is None and isinstance(spec, History) and tree != "auto":
        raise ValueError(
            f"the drafter {source!r} takes no tree {tree!r}: its own options limit what it drafts"
        )
    # 2. A head or a source, and plain steps as another choice of each round.
    drafter: BatchDrafter = NoDraft()
    if head is not None:
        drafter = _with_plain_steps(_head_drafter(target, head, tree, adaptive), adaptive)
    elif spec is not None and not isinstance(spec, History):
        drafter = _with_plain_steps(_from_source(spec, target, tree), adaptive)
    # 3. A history that takes turns with it, beside a head also where none is named.
    if head is not None and spec is None and adaptive and drafter.kind == "top_k":
        spec = History()
    if not isinstance(spec, History):
        return drafter
    return HistoryDrafter(
        spec.nodes,
        spec.length,
        earlier if spec.earlier else None,
        None if spec.folder is None else TextIndex.of(_corpus(spec.folder, target)),
        drafter,
        measured_costs(target, head) if adaptive else None,
        path_only=chains_alone(target),
    )


def _with_plain_steps(drafter: BatchDrafter, adaptive: bool) -> BatchDrafter:
    """The drafter, or whichever is faster of it and plain steps."""
    if not adaptive:
        return drafter
    if not isinstance(drafter, AdaptiveDrafter):
        return AdaptiveDrafter([drafter])
    if drafter.plain:
        return drafter
    # Several trees were named: the same choice, with plain steps.
    return AdaptiveDrafter(drafter.trees, True, drafter.costs, drafter.clock)


def check_chains(target: Target, tree: TreeSpec) -> None:
    """Refuse a tree that is named for a target that checks chains only.

    Raises:
        ValueError: says why, and what is valid.
    """
    if not target.engine.chains_only or tree == "auto":
        return
    for policy in tree_policies(tree):
        shape = policy.shape if isinstance(policy, SampledShape) else policy
        is_chain = isinstance(shape, EarlyExitShape) or (
            isinstance(shape, TreeShape) and shape.is_chain
        )
        if not is_chain:
            raise ValueError(
                f"tree {tree!r} was given for {target.name!r}, which"
                f" {target.counted or 'checks chains alone'}, so the nodes of a tree cannot be"
                " placed; choose chain:LENGTH or drawn:chain:LENGTH, or name no tree"
            )


def chains_alone(target: Target) -> bool:
    """Whether "auto" chooses between chains only: trees cannot be checked, or do not pay."""
    # A state follows one path of a tree at a time, from the row's pending tokens on.
    return target.stateful is not None or target.engine.chains_only


def tree_drafter(
    head: DraftModel, tree: TreeSpec, modules: TargetModules
) -> HeadDrafter | AdaptiveDrafter:
    """A draft model with the tree that is given; of several, each round takes one."""
    state = DraftModelState(head, modules)
    drafters = [_policy_drafter(state, policy, None) for policy in tree_policies(tree)]
    return drafters[0] if len(drafters) == 1 else AdaptiveDrafter(drafters, plain=False)


def _policy_drafter(state: DraftModelState, policy: TreePolicy, budget: int | None) -> HeadDrafter:
    if isinstance(policy, DynamicShape):
        return DynamicTree(state, policy, budget)
    if isinstance(policy, EarlyExitShape):
        return EarlyExitChain(state, policy, budget)
    return StaticTree(state, policy, budget)


def auto_trees(
    head: DraftHead,
    metadata: CheckpointMetadata,
    machine: str,
    costs: RoundCosts,
    chains: bool = False,
) -> list[TreePolicy]:
    """Return the tree that was fastest on this machine, else the trees to choose from.

    A tree that was fastest on another machine is a hint. With `chains`, all of them are chains.
    """
    fastest = metadata.measured.get("fastest", {}).get(machine)
    if fastest is not None:
        return [stored_tree(fastest)]
    if chains:
        return candidate_chains(head, costs)
    hint = None if metadata.tree is None else stored_tree(metadata.tree)
    return candidate_trees(head, hint, costs)


def _head_drafter(target: Target, head: DraftHead, tree: TreeSpec, adaptive: bool) -> BatchDrafter:
    if tree != "auto":
        return tree_drafter(head, tree, target.draft_modules)
    # Without a choice in each round only the first tree is made, by costs that are assumed.
    costs = measured_costs(target, head) if adaptive else RoundCosts.assumed(target.device)
    machine = machine_key(target.device, target.compiled)
    metadata = head.metadata or CheckpointMetadata()
    policies = auto_trees(head, metadata, machine, costs, chains_alone(target))
    if not adaptive:
        policies = policies[:1]
    state = DraftModelState(head, target.draft_modules)
    trees = []
    for policy in policies:
        trees.append(_policy_drafter(state, policy, batch_budget(policy, target.device)))
    return AdaptiveDrafter(trees, adaptive, costs) if len(trees) > 1 else trees[0]


def assistants(drafter: BatchDrafter) -> list[Target]:
    """The smaller models that draft in a drafter."""
    models = [state.model for state in model_states(drafter)]
    return [model.model for model in models if isinstance(model, AssistantModel)]


def _from_source(
    spec: SmallerModel | Drafter | Target | PreTrainedModel,
    target: Target,
    tree: TreeSpec,
) -> BatchDrafter:
    """A drafter without a head, whose tree is `tree` if it is a smaller model."""
    # 1. A smaller model, loaded or by its name, in the target's dtype and on its device.
    if isinstance(spec, PreTrainedModel):
        spec = Seq2SeqTarget(spec) if is_encoder_decoder(spec) else Target(spec)
    if isinstance(spec, SmallerModel):
        hub = target.hub
        kind = Seq2SeqTarget if is_encoder_decoder(spec.name, options=hub) else Target
        spec = kind.load(spec.name, target.dtype, target.device, options=hub)
    if isinstance(spec, Target):
        return _assistant(spec, target, tree)
    # 2. A drafter of the user's own.
    if tree != "auto":
        raise ValueError(
            f"tree {tree!r} was given with a drafter object; make the drafter with that tree"
        )
    return validated(spec, target.info.vocab_size)


def _assistant(model: Target, target: Target, tree: TreeSpec) -> BatchDrafter:
    """A smaller model that drafts for the target; equal ids must mean equal tokens."""
    if model.stateful is not None:
        raise ValueError(
            f"{model.name!r} cannot draft: its layers keep a convolution or recurrent state, which"
            " would follow every draft, accepted or not; choose a draft model whose layers are all"
            " attention"
        )
    if isinstance(model, Seq2SeqTarget) != isinstance(target, Seq2SeqTarget):
        raise ValueError(
            f"{model.name!r} cannot draft for {target.name!r}: one of them is an encoder-decoder"
        )
    try:
        ours = tokenizer_provenance(target.tokenizer)["tokenizer"]
        theirs = tokenizer_provenance(model.tokenizer)["tokenizer"]
    except ValueError:  # models that were made in memory have no files: compare their sizes
        ours = str(target.info.vocab_size)
        theirs = str(model.info.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"the draft model {model.name!r} has another vocabulary ({theirs}) than the target"
            f" {target.name!r} ({ours}). Drafts are not re-encoded from one tokenizer to another"
            " (universal assisted generation): their probabilities would not be those of the"
            " tokens that are verified, and the output not exact"
        )
    if tree == "auto":
        tree = MODEL_TREE if mask_token(model) is None else PARALLEL_TREE
    deepest = max(policy.depth for policy in tree_policies(tree))
    assistant = AssistantModel(model, target.info, deepest)
    return tree_drafter(assistant, tree, target.draft_modules)


def _corpus(folder: str | Path, target: Target) -> np.ndarray:
    """The tokens of a datastore, which must be the target's."""
    tokens, theirs = read_datastore(folder)
    tokenizer = tokenizer_provenance(target.tokenizer)["tokenizer"]
    if theirs != tokenizer:
        raise ValueError(
            f"the datastore {str(folder)!r} was made with tokenizer {theirs}, the target has"
            f" {tokenizer}: make it again for this target"
        )
    for token in (int(tokens.min()), int(tokens.max())):
        if not SEPARATOR <= token < target.info.vocab_size:
            raise ValueError(
                f"the datastore {str(folder)!r} holds token {token}; the target has"
                f" {target.info.vocab_size}"
            )
    return tokens
