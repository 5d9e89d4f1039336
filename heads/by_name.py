"""The table of draft heads, and a head from its name and options."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import torch

from ..options import check_type, shown
from .base import DraftHead, TargetInfo
from .dflash import DFlashHead
from .dspark import DSparkHead
from .eagle import EagleHead
from .eagle3 import Eagle3Head
from .hydra import HydraHead, HydraPlusPlusHead
from .medusa import MedusaHead
from .mtp import MtpHead
from .objective import Objective

HEADS: dict[str, type[DraftHead]] = {
    "dflash": DFlashHead,
    "dspark": DSparkHead,
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "hydra": HydraHead,
    "hydra++": HydraPlusPlusHead,
    "medusa": MedusaHead,
    "mtp": MtpHead,
}
"""Name in a YAML file or a checkpoint to class; a row that a user adds works everywhere."""


OBJECTIVE_OPTIONS = tuple(option.name for option in dataclasses.fields(Objective))


def head_config(name: str, options: dict[str, Any]) -> Any:
    """Return a head's config from its options.

    A ValueError refuses an unknown head, an unknown option, and a value that the head does not
    take.
    """
    if name not in HEADS:
        raise ValueError(f"unknown head {shown(name)}; choose from {', '.join(sorted(HEADS))}")
    config_class = HEADS[name].config_class
    known = sorted(field.name for field in dataclasses.fields(config_class))
    unknown = sorted(options.keys() - set(known))
    if unknown and unknown[0] in OBJECTIVE_OPTIONS:
        raise ValueError(
            f"{unknown[0]} is not an option of a head but of its training: objective.{unknown[0]}"
        )
    if unknown:
        raise ValueError(
            f"unknown {name} head option {unknown[0]!r}; choose from {', '.join(known)}"
        )
    hints = typing.get_type_hints(config_class)
    for option, value in options.items():
        check_type(f"{name} head option {option!r}", value, hints[option])
    return config_class(**options)


def build_objective(name: str, options: dict[str, Any], changes: dict[str, Any]) -> Objective:
    """The objective with which a head is trained.

    Args:
        name: key in `HEADS`.
        options: the head's own.
        changes: values of `Objective`; those that are None keep the default of this head.

    Raises:
        ValueError: an objective that the head cannot be trained on.
    """
    config = head_config(name, options)
    set_changes = {option: value for option, value in changes.items() if value is not None}
    objective = dataclasses.replace(HEADS[name].default_objective(config), **set_changes)
    objective.check(name, HEADS[name].extra_losses(config))
    return objective


def build_head(name: str, options: dict[str, Any], target: TargetInfo) -> DraftHead:
    """A new head; see `head_config` for its name and options.

    Raises:
        ValueError: as `head_config`, or options that do not fit the target.
    """
    config = head_config(name, options)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # of parameters, whatever the program has set
    try:
        return HEADS[name](config, target)
    finally:
        torch.set_default_dtype(default)


def head_name(head: DraftHead) -> str:
    """A head's key in `HEADS`, with a ValueError if its class is not in the table."""
    for name, head_class in HEADS.items():
        if type(head) is head_class:
            return name
    raise ValueError(
        f"{type(head).__name__} is not in the table HEADS: add it with HEADS['name'] = its class"
    )
