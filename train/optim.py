"""The optimizer and its schedule: AdamW for all parameters, or Muon for a head's inner matrices.

Muon (arXiv:2502.16982) replaces each update by the nearest matrix whose singular values are 1.
"""

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

    Torch's iterates in bfloat16, which is a hundred times slower on a CPU that emulates its
    products.
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
                # 1. Momentum: mean = m * mean + (1 - m) * gradient.
                mean.lerp_(gradient, 1 - group["momentum"])
                # Nesterov's looks one step ahead: (1 - m) * gradient + m * mean.
                update = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
                # 2. Make it orthogonal, so that all directions of the matrix move equally fast.
                update = orthogonal(
                    update.float(), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                # 3. Scale to the size of AdamW's updates, whose root mean square is about 0.2. An
                # orthogonal [R, C] has 1 / sqrt(max(R, C)); torch calls this match_rms_adamw.
                rate = 0.2 * max(matrix.shape) ** 0.5
                # 4. Decoupled weight decay, then the step.
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update.to(matrix.dtype), alpha=-group["lr"] * rate)


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Move a matrix's singular values towards 1 by Newton-Schulz iteration in its own dtype.

    With X the matrix, an iteration computes (a + b X X' + c (X X')^2) X, which changes each
    singular value s to a s + b s^3 + c s^5.
    """
    first, second, third = coefficients
    # The smaller of the two Gram matrices, X X' of a wide X, costs least.
    tall = len(matrix) > matrix.shape[1]
    wide = matrix.T if tall else matrix
    # The Frobenius norm bounds the largest singular value: all are now at most 1.
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=second, alpha=third)  # b G + c G^2
        wide = torch.addmm(wide, polynomial, wide, beta=first)  # a X + (b G + c G^2) X
    return wide.T if tall else wide


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
            muon = Float32Muon if in_float32 else Muon
            self.parts["muon"] = muon(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        if others:
            self.parts["adamw"] = _adamw(others, others, config)
        groups = [group for part in self.parts.values() for group in part.param_groups]
        super().__init__(groups, {})
        # The parts' own groups, not copies: a schedule writes its learning rate into them.
        self.param_groups = groups

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
        # Loading gave the parts new groups.
        self.param_groups = [group for part in self.parts.values() for group in part.param_groups]


def build_optimizer(
    module: nn.Module, config: OptimConfig, steps: int, slower: dict[int, float]
) -> tuple[Optimizer, LRScheduler]:
    """Build the optimizer and its learning-rate schedule over all steps of the run.

    Args:
        module: what is trained; its parameters that require gradients are optimized.
        steps: optimizer steps of the whole run.
        slower: what a parameter's learning rate is divided by, by its id (AdamW only).
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer: Optimizer
    if config.name == "muon":
        inner = matrices_of(module)
        # By identity: `in` would compare tensors element by element.
        others = [p for p in parameters if all(p is not matrix for matrix in inner)]
        optimizer = MuonAdamW(inner, others, config)
    else:
        # One group for each ratio, the full learning rate first.
        groups = []
        for ratio in dict.fromkeys([1.0, *slower.values()]):
            members = [p for p in parameters if slower.get(id(p), 1.0) == ratio]
            groups.append({"params": members, "lr": config.lr / ratio})
        optimizer = _adamw(groups, parameters, config)
    warmup = round(config.warmup * steps)
    schedule: LRScheduler = get_scheduler(config.schedule, optimizer, warmup, steps)
    return optimizer, schedule


SETTINGS = ("initial_lr", "weight_decay", "betas")
"""What a group of parameters holds of the options, besides the learning rate that a schedule
computes from them."""


def settings_of(schedule: LRScheduler) -> list[dict[str, Any]]:
    """Return the options in the groups of a schedule's optimizer, before a checkpoint is loaded."""
    groups = schedule.optimizer.param_groups
    return [{name: group[name] for name in SETTINGS if name in group} for group in groups]


def apply_settings(schedule: LRScheduler, settings: list[dict[str, Any]]) -> None:
    """Replace a checkpoint's optimizer options by this start's, and recompute the learning rate.

    They are the same, unless the run resumes with others.
    """
    groups = schedule.optimizer.param_groups
    shapes: Any = schedule  # a LambdaLR, as all of transformers' schedules are
    for group, options, shape in zip(groups, settings, shapes.lr_lambdas, strict=True):
        group.update(options)
        # The schedule has computed the rate of this step from the checkpoint's options.
        group["lr"] = group["initial_lr"] * shape(schedule.last_epoch)
    schedule.base_lrs = [group["initial_lr"] for group in groups]
    schedule._last_lr = [group["lr"] for group in groups]


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
