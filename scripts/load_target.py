"""Targets as their checkpoints store them, independent of this machine.

What is published or converted must not depend on it.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from headstart.heads import DraftHead
from headstart.heads.checkpoints.model_card import hub_id
from headstart.inference import Target
from headstart.inference.targets.dtypes import own_dtype
from headstart.inference.targets.loading import default_device


def original_target(
    source: str, dtype: torch.dtype | None = None, token: str | None = None
) -> Target:
    """Load a target in this dtype, or in that of its checkpoint."""
    hub = {"token": token}
    own, _ = own_dtype(source, options=hub)
    return Target.load(source, dtype or own, default_device(), options=hub)


def given_target(head: DraftHead, source: str | None) -> str:
    """Return the target that the user names.

    Raises:
        ValueError: none. The head's config names one, but anybody may have written that.
    """
    if not source:
        raise ValueError(
            "the head's target is needed, and is not opened just because a checkpoint names it;"
            f" give --target, if you trust what its config.json says: {head.target.name!r}"
        )
    return source


def published_name(head: DraftHead, base_model: str | None) -> str:
    """Return the name of a head's target for files that are published, its id on the Hub.

    Warn where neither `base_model`, which the user gives, nor the head's own name of its target is
    an id; the name is returned as it is then.
    """
    name = base_model or head.target.name
    known = hub_id(head.target.name, base_model)
    if known is None:
        warnings.warn(
            f"no base_model is written: the target is called {name!r}, which is not a model of the"
            " Hub; give its id (--base_model ORG/NAME)",
            stacklevel=2,
        )
    return known or name


def target_of(head: DraftHead, source: str | None, token: str | None = None) -> Target:
    """Load the target that the user names for a head, and check that they fit."""
    target = original_target(given_target(head, source), token=token)
    head.target.check(target.info)
    return target


def embedding_of(target: Target) -> Tensor:
    """Return the target's embedding [V, D], on the CPU."""
    # By a lookup of every token, since a target may scale its embedding.
    return target.modules.embed(torch.arange(target.info.vocab_size, device=target.device)).cpu()
