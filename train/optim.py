"""The optimizer and its schedule."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_cosine_schedule_with_warmup

from .config import OptimConfig


def build_optimizer(module: nn.Module, config: OptimConfig, steps: int) -> tuple[Optimizer, LRScheduler]:
    """AdamW, and linear warm-up followed by a cosine to 0 over `steps` optimizer steps."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    fused = all(parameter.device.type in ("cuda", "cpu") for parameter in parameters)
    optimizer = AdamW(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=fused)
    warmup = round(config.warmup * steps)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, warmup, steps)
