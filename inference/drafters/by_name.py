"""From what a user names to a drafter: a head, a source of drafts that needs no head, a tree, or some of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from ...heads import CheckpointMetadata, DraftHead, TargetModules
from ...heads.checkpoints.hub import local_folder
from ...heads.checkpoints.save_load import ADAPTER_FOLDER, differences, load_head
from ..models.encoder_decoder import Seq2SeqTarget, is_encoder_decoder
from ..models.loading import load_tokenizer, tokenizer_provenance
from ..target import Target
from ..tuning.costs import measured_costs
from ..tuning.machine import machine_key
from ..tuning.round_costs import RoundCosts
from ..tuning.tree_search import batch_budget
from ..tuning.tree_spec import DynamicShape, EarlyExitShape, TreePolicy, TreeSpec, stored_tree, tree_policy
from .adaptive import AdaptiveDrafter, candidate_trees
from .base import Drafter, HostDrafter, NoDraft, ValidatedDrafter
from .draft_model import AssistantModel
from .early_exit import EarlyExitChain
from .head_and_lookup import HeadAndLookup
from .lookahead import Lookahead
from .ngram_index import Datastore
from .ngram_model import NgramModel
from .prompt_lookup import NgramDrafter, PromptLookupDrafter
from .tree_policies import DraftModel, DynamicTree, HeadDrafter, StaticTree

SPECS = {
    "prompt-lookup": "prompt-lookup[:NODES[:LENGTH[:NGRAM]]]",
    "retrieval": "retrieval:FOLDER[:NODES[:LENGTH[:NGRAM]]]",
    "lookahead": "lookahead[:WIDTH[:NGRAM[:CANDIDATES]]]",
    "ngram": "ngram[:ORDER[:FOLDER]]",
    "random": "random",
    "model": "model:NAME",
}
"""Drafters without a head, and their options; FOLDER is what `headstart datastore` made, NAME a smaller model."""
MODEL_CHAIN, NGRAM_CHAIN = "chain:4", "chain:3"
"""Trees that a second model, and an n-gram model, draft if none is named."""
RETRIEVAL_NGRAM = 8
"""Longest n-gram that is looked up in a datastore."""


def make_drafter(
    target: Target,
    source: str | Drafter | Target | None = None,
    tree: TreeSpec = "auto",
    head: DraftHead | None = None,
    metadata: CheckpointMetadata | None = None,
    adaptive: bool = False,
) -> Drafter:
    """The drafter that a user names; `NoDraft` if nothing is.

    Args:
        target: the model whose tokens are drafted.
        source: a spec (see `SPECS`), a smaller model, or a drafter, which may be the user's own. Beside a head, what it
            looks up is joined with the head's tree.
        tree: what the head drafts, or, without one, the source if it has probabilities (ngram, random, model). "auto"
            for the head's fastest tree on this machine, or trees to choose from.
        head: a head that fits the target.
        metadata: what its checkpoint says of trees.
        adaptive: whether autoregressive steps replace drafts where they are faster.
    """
    drafter = None if source is None else _from_source(source, target, tree if head is None else "auto")
    if head is not None:
        if tree == "auto":
            trees = _auto_drafter(head, metadata or CheckpointMetadata(), target, adaptive)
        else:
            trees = tree_drafter(head, tree, target.draft_modules)
        drafter = trees if drafter is None else HeadAndLookup(trees, drafter)
    if drafter is None or isinstance(drafter, NoDraft):
        return NoDraft()
    if not adaptive or (isinstance(drafter, AdaptiveDrafter) and drafter.plain):
        return drafter
    if isinstance(drafter, AdaptiveDrafter):
        return AdaptiveDrafter(drafter.trees, True, drafter.costs, drafter.clock)
    return AdaptiveDrafter([drafter])


def tree_drafter(
    head: DraftModel, tree: TreeSpec, modules: TargetModules, budget: int | None = None
) -> HeadDrafter | AdaptiveDrafter:
    """A draft model with the tree that `tree_policy` parses; with | between several specs, each step takes one."""
    if isinstance(tree, str) and "|" in tree:
        trees = [tree_drafter(head, spec, modules, budget) for spec in tree.split("|")]
        return AdaptiveDrafter(trees, plain=False)
    policy = tree_policy(tree)
    if isinstance(policy, DynamicShape):
        return DynamicTree(head, policy, modules, budget)
    if isinstance(policy, EarlyExitShape):
        return EarlyExitChain(head, policy, modules, budget)
    return StaticTree(head, policy, modules, budget)


def load_fitting_head(
    head: str | Path | DraftHead,
    target: Target,
    revision: str | None,
    allow_adapter: bool = False,
    auto_dtype: bool = False,
) -> tuple[DraftHead, CheckpointMetadata]:
    """A head that fits the target, and its checkpoint's metadata; a head object is checked as its folder would be.

    `auto_dtype` says that the target's dtype was chosen for the user, so that another than the head's is no warning.

    Raises:
        ValueError: a head for another target, or one for the target with an adapter, unless `allow_adapter` says that
            it may be merged.
    """
    if isinstance(head, DraftHead):
        head.target.check(target.info)
        dtypes = {parameter.dtype for parameter in head.parameters()} - {target.dtype}
        if dtypes:
            raise ValueError(f"the head's parameters are {dtypes.pop()}, the target's {target.dtype}; convert the head")
        loaded, metadata = head, head.metadata or CheckpointMetadata()
        folder, name = head.folder, type(head).__name__
    else:
        folder, name = local_folder(head, revision), repr(str(head))
        loaded, metadata = load_head(folder, target.info, target.dtype)
    unchecked = ("dtype",) if auto_dtype else ()
    provenance = {key: value for key, value in target.provenance.items() if key not in unchecked}
    for difference in differences(metadata.provenance, provenance):
        warnings.warn(f"the head {name} may accept less here: {difference}", stacklevel=3)
    if metadata.adapted:
        _merge_adapter(target, folder, name, allow_adapter)
    return loaded, metadata


def _merge_adapter(target: Target, folder: Path | None, name: str, allowed: bool) -> None:
    """Merge the adapter that lies in a head's folder into the target, unless that was done or is not allowed."""
    adapter = None if folder is None else folder / ADAPTER_FOLDER
    if adapter is not None and target.adapter == str(adapter.resolve()):
        return
    which = f"the adapter {str(adapter)!r}" if adapter else "an adapter, whose folder the head does not know"
    if target.adapter is not None:
        raise ValueError(
            f"the head {name} drafts for {target.name!r} with {which}; into this target {target.adapter!r} is merged "
            "already: load it anew"
        )
    if adapter is None or not allowed:
        merged = ", --allow-adapter for a command" if adapter is not None else ""
        raise ValueError(
            f"the head {name} drafts for {target.name!r} with {which}: merged into the model, it changes what the "
            f"model itself writes. allow_adapter=True{merged} merges it; or call target.merge_adapter with its folder"
        )
    target.merge_adapter(adapter)


def auto_trees(head: DraftHead, metadata: CheckpointMetadata, machine: str, costs: RoundCosts) -> list[TreePolicy]:
    """The tree that was fastest on this machine, or else those to choose from; one of another machine is a hint."""
    fastest = metadata.measured.get("fastest", {}).get(machine)
    if fastest is not None:
        return [stored_tree(fastest)]
    return candidate_trees(head, None if metadata.tree is None else stored_tree(metadata.tree), costs)


def _auto_drafter(head: DraftHead, metadata: CheckpointMetadata, target: Target, adaptive: bool) -> Drafter:
    costs = measured_costs(target, head) if adaptive else RoundCosts.assumed(target.device)
    policies = auto_trees(head, metadata, machine_key(target.device, target.compiled), costs)
    if not adaptive:
        policies = policies[:1]
    trees = [tree_drafter(head, each, target.draft_modules, batch_budget(each, target.device)) for each in policies]
    return AdaptiveDrafter(trees, adaptive, costs) if len(trees) > 1 else trees[0]


def assistants(drafter: Drafter) -> list[Target]:
    """The smaller models that draft in a drafter."""
    heads = [each.head for each in drafter.nested() if isinstance(each, HeadDrafter)]
    return [head.model for head in heads if isinstance(head, AssistantModel)]


def _from_source(source: str | Drafter | Target, target: Target, tree: TreeSpec) -> Drafter:
    if isinstance(source, Target):
        return _assistant(source, target, tree)
    if not isinstance(source, str):
        if tree != "auto":
            raise ValueError(f"tree {tree!r} was given with a drafter that is made already; make it with that tree")
        ours = HeadDrafter | NgramDrafter | NoDraft | HostDrafter | ValidatedDrafter | AdaptiveDrafter | HeadAndLookup
        return source if isinstance(source, ours) else ValidatedDrafter(source, target.info.vocab_size)
    name, _, options = source.partition(":")
    if name in ("prompt-lookup", "retrieval", "lookahead") and tree != "auto":
        raise ValueError(f"the drafter {source!r} takes no tree {tree!r}: its own options limit what it drafts")
    if name == "prompt-lookup":
        nodes, length, ngram = _numbers(name, options, (12, 10, 3))
        return PromptLookupDrafter(nodes, length, ngram)
    if name == "retrieval":
        folder, limits = _path_and_numbers(options, most=3)
        if not folder:
            raise ValueError(f"the drafter retrieval needs a datastore: {SPECS[name]}")
        nodes, length, ngram = _numbers(name, limits, (12, 10, RETRIEVAL_NGRAM))
        return PromptLookupDrafter(nodes, length, ngram, shortest=min(2, ngram), corpus=_datastore(folder, target))
    if name == "lookahead":
        return Lookahead(*_numbers(name, options, (5, 4, 5)))
    if name in ("ngram", "random"):
        number, _, folder = options.partition(":") if name == "ngram" else (options, "", "")
        (order,) = _numbers(name, number, (3,) if name == "ngram" else ()) or [0]
        corpus = _datastore(folder, target) if folder else None
        tree = NGRAM_CHAIN if tree == "auto" else tree
        drafter = _grown(lambda depth: NgramModel(target.info, order, depth, corpus), tree, target)
        return drafter if target.device.type == "cpu" else HostDrafter(drafter)
    if name == "model":
        if not options:
            raise ValueError(f"the drafter model needs a model: {SPECS[name]}")
        kind = Seq2SeqTarget if is_encoder_decoder(options) else Target
        return _assistant(kind.load(options, target.dtype, target.device), target, tree)
    raise ValueError(f"unknown drafter {source!r}; choose from {', '.join(SPECS.values())}")


def _assistant(model: Target, target: Target, tree: TreeSpec) -> Drafter:
    if isinstance(model, Seq2SeqTarget) != isinstance(target, Seq2SeqTarget):
        raise ValueError(f"{model.name!r} cannot draft for {target.name!r}: one of them is an encoder-decoder")
    try:  # the same ids must mean the same tokens
        ours, theirs = (tokenizer_provenance(load_tokenizer(each.name))["tokenizer"] for each in (target, model))
    except ValueError:  # models that were made in memory have no files: compare their sizes
        ours, theirs = str(target.info.vocab_size), str(model.info.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"the draft model {model.name!r} has another vocabulary ({theirs}) than the target {target.name!r} "
            f"({ours}). Drafts are not re-encoded from one tokenizer to another (universal assisted generation): "
            "their probabilities would not be those of the tokens that are verified, and the output not exact"
        )
    tree = MODEL_CHAIN if tree == "auto" else tree
    return _grown(lambda depth: AssistantModel(model, target.info, depth), tree, target)


def _grown(make: Callable[[int], DraftModel], tree: TreeSpec, target: Target) -> Drafter:
    """Trees of a draft model that is made for the deepest of them."""
    specs = tree.split("|") if isinstance(tree, str) else [tree]
    depth = max(tree_policy(spec).depth for spec in specs)
    return tree_drafter(make(depth), tree, target.draft_modules)


def _path_and_numbers(options: str, most: int) -> tuple[str, str]:
    """Split PATH[:NUMBER...]; a path may hold colons itself, and is taken whole if it exists."""
    numbers: list[str] = []
    path = options
    while len(numbers) < most and ":" in path and not Path(path).exists():
        before, _, last = path.rpartition(":")
        if not last.isdigit():
            break
        path = before
        numbers.insert(0, last)
    return path, ":".join(numbers)


def _numbers(name: str, options: str, defaults: tuple[int, ...]) -> list[int]:
    """A spec's numbers, with defaults for those that are left out."""
    given = options.split(":") if options else []
    if len(given) > len(defaults) or not all(number.isdigit() for number in given):
        raise ValueError(f"the drafter {name}:{options} is not understood; it is written {SPECS[name]}")
    return [*map(int, given), *defaults[len(given) :]]


def _datastore(folder: str, target: Target) -> Datastore:
    store = Datastore.load(folder)
    tokenizer = tokenizer_provenance(load_tokenizer(target.name))["tokenizer"]
    if store.tokenizer != tokenizer:
        raise ValueError(
            f"the datastore {folder!r} was made with tokenizer {store.tokenizer}, the target has {tokenizer}: make it "
            "again for this target"
        )
    largest = int(store.tokens[store.order[-1]])
    if largest >= target.info.vocab_size:
        raise ValueError(f"the datastore {folder!r} holds token {largest}; the target has {target.info.vocab_size}")
    return store
