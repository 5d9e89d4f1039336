"""Drafters by name: sources of guesses that need no trained head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..models.encoder_decoder import Seq2SeqTarget, is_encoder_decoder
from ..models.loading import load_tokenizer, tokenizer_origin
from ..target import Target
from ..tuning.tree_spec import SampledShape, TreePolicy, tree_policy
from .adaptive import chosen_from
from .base import Drafter
from .draft_model import AssistantModel
from .lookahead import Lookahead
from .ngram_index import Datastore
from .ngram_model import NgramModel
from .on_host import HostDrafter
from .prompt_lookup import PromptLookupDrafter

WORDS = {
    "prompt-lookup": "prompt-lookup[:NODES[:LENGTH[:NGRAM]]]",
    "retrieval": "retrieval:FOLDER[:NODES[:LENGTH[:NGRAM]]]",
    "lookahead": "lookahead[:WIDTH[:NGRAM[:CANDIDATES]]]",
    "ngram": "ngram[:ORDER[:FOLDER]]",
    "random": "random",
    "model": "model:NAME",
}
"""How each is written; FOLDER is what `headstart datastore` made, NAME a smaller model."""
MODEL_CHAIN, COUNTED_CHAIN = 4, 3
"""Tokens that a second model, and an n-gram model, guess if no tree is asked for."""
RETRIEVED_GRAM = 8
"""Longest n-gram that is looked for in a datastore, whose texts are others than the one that is written."""


def drafter_from(word: str, target: Target, tree: str | Sequence[Sequence[int]] | TreePolicy = "auto") -> Drafter:
    """A drafter from what a user writes.

    Args:
        word: see `WORDS`.
        target: whose tokens are guessed.
        tree: what is drafted by the sources that have probabilities (ngram, random, model); the others choose by what
            they find.

    Raises:
        ValueError: an unknown word, options that it does not take, or a model or datastore of another tokenizer.
    """
    kind, _, rest = word.partition(":")
    if kind not in _MAKERS:
        raise ValueError(f"unknown drafter {word!r}; choose from {', '.join(WORDS.values())}")
    if kind in ("prompt-lookup", "retrieval", "lookahead") and tree != "auto":
        raise ValueError(f"the drafter {word!r} takes no tree {tree!r}: its own options limit what it guesses")
    return _MAKERS[kind](rest, target, tree)


def draft_model(model: Target, target: Target, tree: str | Sequence[Sequence[int]] | TreePolicy = "auto") -> Drafter:
    """A second model as a drafter.

    Raises:
        ValueError: a model with other tokens, or of another kind.
    """
    if isinstance(model, Seq2SeqTarget) != isinstance(target, Seq2SeqTarget):
        raise ValueError(f"{model.name!r} cannot draft for {target.name!r}: one of them is an encoder-decoder")
    _check_tokenizers(model, target)
    chosen = f"chain:{MODEL_CHAIN}" if tree == "auto" else tree
    return chosen_from(AssistantModel(model, target.info, _depth(chosen)), chosen, target.modules)


def _model(name: str, target: Target, tree: Any) -> Drafter:
    if not name:
        raise ValueError(f"the drafter model needs a model: {WORDS['model']}")
    kind = Seq2SeqTarget if is_encoder_decoder(name) else Target
    return draft_model(kind.load(name, target.dtype, target.device), target, tree)


def _ngram(options: str, target: Target, tree: Any) -> Drafter:
    order, _, folder = options.partition(":")
    corpus = _datastore(folder, target) if folder else None
    return _counted(_numbers("ngram", order, (3,))[0], corpus, target, tree)


def _random(options: str, target: Target, tree: Any) -> Drafter:
    _numbers("random", options, ())
    return _counted(0, None, target, tree)


def _counted(order: int, corpus: Datastore | None, target: Target, tree: Any) -> Drafter:
    chosen = f"chain:{COUNTED_CHAIN}" if tree == "auto" else tree
    drafter = chosen_from(NgramModel(target.info, order, _depth(chosen), corpus), chosen, target.modules)
    return drafter if target.device.type == "cpu" else HostDrafter(drafter)


def _prompt_lookup(options: str, target: Target, tree: Any) -> Drafter:
    nodes, length, gram = _numbers("prompt-lookup", options, (12, 10, 3))
    return PromptLookupDrafter(nodes, length, gram)


def _retrieval(options: str, target: Target, tree: Any) -> Drafter:
    folder, _, numbers = options.partition(":")
    if not folder:
        raise ValueError(f"the drafter retrieval needs a datastore: {WORDS['retrieval']}")
    nodes, length, gram = _numbers("retrieval", numbers, (12, 10, RETRIEVED_GRAM))
    return PromptLookupDrafter(nodes, length, gram, shortest=min(2, gram), corpus=_datastore(folder, target))


def _lookahead(options: str, target: Target, tree: Any) -> Drafter:
    return Lookahead(*_numbers("lookahead", options, (5, 4, 5)))


_MAKERS: dict[str, Callable[[str, Target, Any], Drafter]] = {
    "prompt-lookup": _prompt_lookup,
    "retrieval": _retrieval,
    "lookahead": _lookahead,
    "ngram": _ngram,
    "random": _random,
    "model": _model,
}


def _numbers(kind: str, options: str, defaults: tuple[int, ...]) -> list[int]:
    """What was given, the rest as it is if nothing is said."""
    given = options.split(":") if options else []
    if len(given) > len(defaults) or not all(number.isdigit() for number in given):
        raise ValueError(f"the drafter {kind}:{options} is not understood; it is written {WORDS[kind]}")
    return [*map(int, given), *defaults[len(given) :]]


def _depth(tree: Any) -> int:
    """Tokens on the longest path of any of the trees."""
    policies = [tree_policy(word) for word in (tree.split("|") if isinstance(tree, str) else [tree])]
    return max(policy.shape.depth if isinstance(policy, SampledShape) else policy.depth for policy in policies)


def _datastore(folder: str, target: Target) -> Datastore:
    store = Datastore.load(folder)
    store.check(tokenizer_origin(load_tokenizer(target.name))["tokenizer"], folder)
    if store.vocab_size > target.info.vocab_size:
        raise ValueError(
            f"the datastore {folder!r} holds token {store.vocab_size - 1}; the target has {target.info.vocab_size}"
        )
    return store


def _check_tokenizers(model: Target, target: Target) -> None:
    """The same ids must mean the same tokens: re-encoding a draft's text would lose the probabilities of its tokens."""
    try:
        ours, theirs = (tokenizer_origin(load_tokenizer(each.name))["tokenizer"] for each in (target, model))
    except ValueError:  # models that were made here have no files: their sizes must do
        ours, theirs = str(target.info.vocab_size), str(model.info.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"the draft model {model.name!r} has another vocabulary ({theirs}) than the target {target.name!r} "
            f"({ours}). Guesses are not re-encoded from one tokenizer to another (universal assisted generation): "
            "their probabilities would not be those of the tokens that are checked, and the output not exact"
        )
