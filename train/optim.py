"""The optimizer and its schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from .config import OptimConfig

Muon: Any = getattr(torch.optim, "Muon", Optimizer)
"""Torch's Muon, since torch 2.9; `check_muon` refuses it before that."""


def check_muon() -> None:
    """Refuse Muon with a torch that has none.

    Raises:
        ValueError: naming the version that is needed and the one that is installed.
    """
    if Muon is Optimizer:
        raise ValueError(
            f"optim.name muon needs torch 2.9 or newer, and {torch.__version__} is installed;"
            " choose optim.name adamw"
        )


class Float32Muon(Muon):
    """Torch's Muon, iterated in float32.

    It is a hundred times faster on a CPU that emulates bfloat16 products.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            matrices: list[Tensor] = []
            gradients: list[Tensor] = []
            means: list[Tensor] = []
            self._init_group(group, matrices, gradients, means)
            for matrix, gradient, mean in zip(matrices, gradients, means, strict=True):
                mean.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
                update = orthogonal(
                    update.float(), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                rate = 0.2 * max(matrix.shape) ** 0.5  # match_rms_adamw
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update.to(matrix.dtype), alpha=-group["lr"] * rate)


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Move a matrix's singular values towards 1 by Newton-Schulz iteration in its own dtype."""
    first, second, third = coefficients
    wide = matrix.T if len(matrix) > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(
            wide, torch.addmm(gram, gram, gram, beta=second, alpha=third), wide, beta=first
        )
    return wide.T if len(matrix) > matrix.shape[1] else wide


class MuonAdamW(Optimizer):
    """Muon for the matrices inside a head and AdamW for all else, as one optimizer.

    Muon's steps are scaled to AdamW's size (`match_rms_adamw`, arXiv:2502.16982), so both take one
    learning rate.
    """

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], config: OptimConfig
    ) -> None:
        self.parts: dict[str, Optimizer] = {}
        if matrices:
            check_muon()
            emulated = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
            in_float32 = emulated and all(matrix.device.type == "cpu" for matrix in matrices)
            self.parts["muon"] = (Float32Muon if in_float32 else Muon)(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        if others:
            self.parts["adamw"] = _adamw(others, others, config)
        groups = [group for part in self.parts.values() for group in part.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups  # the parts' own, not copies: a schedule changes them

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state_dict[name])
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]


def build_optimizer(
    module: nn.Module, config: OptimConfig, steps: int, slower: dict[int, float]
) -> tuple[Optimizer, LRScheduler]:
    """Build the optimizer and its learning-rate schedule over all steps of the run.

    The optimizer takes the parameters that require gradients.

    `slower` gives divisors of the learning rate, by a parameter's id (AdamW only).
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer: Optimizer
    if config.name == "muon":
        inner = matrices_of(module)
        others = [p for p in parameters if all(p is not matrix for matrix in inner)]
        optimizer = MuonAdamW(inner, others, config)
    else:
        groups = [
            {
                "params": [p for p in parameters if slower.get(id(p), 1.0) == ratio],
                "lr": config.lr / ratio,
            }
            for ratio in dict.fromkeys([1.0, *slower.values()])
        ]
        optimizer = _adamw(groups, parameters, config)
    warmup = round(config.warmup * steps)
    schedule: LRScheduler = get_scheduler(config.schedule, optimizer, warmup, steps)
    return optimizer, schedule


SETTINGS = ("initial_lr", "weight_decay", "betas")
"""What a group of parameters holds of the options, besides the learning rate that a schedule
computes from them."""


def settings_of(schedule: LRScheduler) -> list[dict[str, Any]]:
    """The options in the groups of a schedule's optimizer, before a checkpoint is loaded."""
    groups = schedule.optimizer.param_groups
    return [{name: group[name] for name in SETTINGS if name in group} for group in groups]


def apply_settings(schedule: LRScheduler, settings: list[dict[str, Any]]) -> None:
    """Replace a checkpoint's optimizer options by this start's, and recompute the learning rate.

    They are the same, unless the run resumes with others.
    """
    groups = schedule.optimizer.param_groups
    schedule.base_lrs = [own["initial_lr"] for own in settings]
    for group, own in zip(groups, settings, strict=True):
        group.update(own)
    shapes: Any = schedule  # a LambdaLR, as all of transformers' schedules are
    rates = [
        base * shape(schedule.last_epoch)
        for base, shape in zip(schedule.base_lrs, shapes.lr_lambdas, strict=True)
    ]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


TABLES = ("lm_head", "embed", "markov_w")
"""Parts of the names of embeddings and LM heads, whose rows stand for tokens."""


def matrices_of(module: nn.Module) -> list[nn.Parameter]:
    """Select the matrices that Muon trains: all but `TABLES`."""
    return [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        and parameter.ndim == 2
        and not any(table in name for table in TABLES)
    ]


def _adamw(groups: Any, parameters: list[nn.Parameter], config: OptimConfig) -> AdamW:
    """Build AdamW for parameters or groups of them, with fused kernels where torch has them."""
    fused = all(parameter.device.type in ("cuda", "cpu") for parameter in parameters)
    return AdamW(
        groups, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=fused
    )
