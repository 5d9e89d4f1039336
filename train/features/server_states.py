"""Import of the target's states that a vLLM server computed, in the files of the package speculators, into a cache.

hs_NUMBER.safetensors holds one sequence of T tokens; NUMBER is its index in the data:

    token_ids      [T]        the tokens
    hidden_states  [T, L, D]  the residual stream at each layer that the server was asked for; the last one is after
                              the last block, before the final norm

speculators numbers a layer by the block whose input it is: its k is our feature layer k - 1, and the number of blocks
stands for the stream after the last one. The trainer still loads the target, for its own modules and the evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...inference.target import Target
from ..data.chat_template import Example
from .cached import FeatureCache, key_of


def take_server_states(
    cache: FeatureCache,
    target: Target,
    examples: Sequence[Example],
    folder: Path,
    server_layers: Sequence[int],
) -> int:
    """Add the states of every example to the cache; return the number of sequences that were added.

    The files hold `server_layers`, in their order and by speculators' numbers. An invalid file, or an example without
    states, raises a ValueError.
    """
    blocks = target.info.num_layers
    wanted = [blocks if layer == -1 else layer + 1 for layer in cache.layers]
    if lacking := [layer for layer in wanted if layer not in server_layers]:
        raise ValueError(
            f"features.server_layers {list(server_layers)} lack {lacking}: the head reads {wanted} in the server's "
            f"count (the input of a block; {blocks} is what leaves the last one)"
        )
    columns = [list(server_layers).index(layer) for layer in wanted]
    files = sorted(folder.glob("hs_*.safetensors"))
    if not files:
        raise ValueError(f"features.from_server {str(folder)!r} holds no file named hs_NUMBER.safetensors")
    missing = {key_of(torch.tensor(example.tokens)): example for example in examples}
    missing = {key: example for key, example in missing.items() if key not in cache}
    added = 0
    for path in files:
        tokens_T, states_TLD = _read(path, target, len(server_layers))
        key = key_of(tokens_T)
        if key in missing:
            cache.add(key, _selected(states_TLD, target, cache.layers, columns))
            del missing[key]
            added += 1
    if missing:
        raise ValueError(_missing_states(list(missing.values()), len(examples), folder))
    return added


def _read(path: Path, target: Target, count: int) -> tuple[Tensor, Tensor]:
    """Read and check the tokens and the states of a file."""
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if lacking := {"token_ids", "hidden_states"} - tensors.keys():
        raise ValueError(
            f"{path} lacks {', '.join(sorted(lacking))}; it holds {', '.join(sorted(tensors)) or 'nothing'}"
        )
    tokens_T, states_TLD = tensors["token_ids"], tensors["hidden_states"]
    wanted = (len(tokens_T), count, target.info.hidden_size)
    if tuple(states_TLD.shape) != wanted:
        raise ValueError(
            f"{path} has hidden_states of {list(states_TLD.shape)}, not {list(wanted)}: tokens, "
            f"features.server_layers, hidden size of {target.name!r}"
        )
    if len(tokens_T) and not 0 <= int(tokens_T.min()) <= int(tokens_T.max()) < target.info.vocab_size:
        raise ValueError(
            f"{path} has tokens from {int(tokens_T.min())} to {int(tokens_T.max())}, outside the vocabulary of "
            f"{target.info.vocab_size}: it was made with another tokenizer"
        )
    if not states_TLD.isfinite().all():
        raise ValueError(f"{path} has hidden_states that are no numbers")
    return tokens_T, states_TLD


@torch.no_grad()
def _selected(states_TLD: Tensor, target: Target, layers: Sequence[int], columns: Sequence[int]) -> Tensor:
    """Select the states that the cache holds, and apply the final norm to the one that heads know as -1."""
    parts = []
    for layer, column in zip(layers, columns, strict=True):
        states_TD = states_TLD[:, column].to(target.device, target.dtype)
        parts.append(target.modules.norm(states_TD) if layer == -1 else states_TD)
    return torch.stack(parts, dim=1)


def _missing_states(missing: list[Example], count: int, folder: Path) -> str:
    """Tell how many sequences have no states, and how the first one differs from the file of its number."""
    first = missing[0]
    summary = f"{len(missing)} of {count} sequences to train on have no states in {str(folder)!r}"
    path = folder / f"hs_{first.conversation}.safetensors"
    if not path.exists():
        return f"{summary}; the first is of conversation {first.conversation}, for which there is no {path.name}"
    theirs = load_file(path)["token_ids"].tolist()
    place = next((i for i, pair in enumerate(zip(first.tokens, theirs, strict=False)) if pair[0] != pair[1]), None)
    how = (
        f"{len(first.tokens)} tokens here and {len(theirs)} there (data.max_length?)"
        if place is None
        else f"token {place} is {first.tokens[place]} here and {theirs[place]} there (tokenizer or chat template?)"
    )
    return f"{summary}; the first is of conversation {first.conversation}, where {path.name} differs: {how}"
