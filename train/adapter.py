"""Medusa-2 (arXiv:2401.10774, section 2.2.2): heads trained with a LoRA adapter of the target.

The heads are trained first, on the target as it is. Then both are: the heads' loss reaches the
adapter through the target's states, and a KL term ties the adapted model to the same model with its
adapter disabled. The result is a head and a peft adapter; decoding is lossless with respect to the
adapted model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ..heads.base import DraftHead, HeadOutput, TargetFeatures
from ..heads.draft_positions import DraftPositions
from ..heads.losses import draft_loss
from ..heads.objective import Objective
from ..inference.engines.target import Target
from .config import AdapterConfig
from .data.batches import Batch
from .features.online import target_features

KEEP_BASE = Objective({"kl": 1.0}, "decay", 1.0)


class JointModule(nn.Module):
    """A head and the adapter's weights as one module, for one engine.

    The target is not registered as a submodule.
    """

    def __init__(
        self, target: Target, head: DraftHead, objective: Objective, config: AdapterConfig
    ) -> None:
        """Inject the adapter into the target's model; a ValueError if that lacks a named module."""
        super().__init__()
        # Without the LM head, whose own weight the losses read.
        parts = target.model.base_model.named_modules()
        names = {name.rsplit(".", 1)[-1] for name, part in parts if isinstance(part, nn.Linear)}
        missing = sorted(set(config.modules) - names)
        if missing:
            raise ValueError(
                f"adapter.modules {missing[0]!r} is not a linear layer of {target.name!r}; choose"
                f" from {', '.join(sorted(names))}"
            )
        lora = LoraConfig(
            r=config.rank, lora_alpha=config.alpha, target_modules=list(config.modules)
        )
        self.head = head
        self.objective = objective
        self.keep_base = config.keep_base
        self._target = [target]  # in lists: not submodules
        self._peft = [get_peft_model(target.model, lora)]
        trained = {
            name: weight for name, weight in self.peft.named_parameters() if weight.requires_grad
        }
        # ParameterDict takes no dots in names.
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): weight for name, weight in trained.items()}
        )

    @property
    def peft(self) -> nn.Module:
        """The target with its adapter."""
        return self._peft[0]

    def forward(self, batch: Batch, joint: bool) -> HeadOutput:
        """Compute the heads' loss on right-padded conversations.

        With `joint` the adapter is trained too, and the KL term is added.
        """
        target = self._target[0]
        tokens_BT = batch.tokens_BT.to(target.device)
        with torch.set_grad_enabled(joint and torch.is_grad_enabled()):
            features_BTF, last_BTD = target.states(
                tokens_BT, self.head.feature_layers, batch.positions_BT
            )
        features = target_features(target, batch, features_BTF, last_BTD)
        output: HeadOutput = self.head(features, self.objective)
        loss = output.loss
        if joint:
            loss = loss + self.keep_base * self._distance(features, batch.positions_BT)
        else:  # every parameter must have a gradient on every rank
            loss = (
                loss + 0.0 * torch.stack([weight.sum() for weight in self.adapter.values()]).sum()
            )
        return HeadOutput(loss, output.losses_K, output.counts_K, output.hits_KI)

    def _distance(self, features: TargetFeatures, positions_BT: Tensor | None) -> Tensor:
        """Sum the KL divergence from the model without its adapter over all answer tokens.

        `positions_BT` is the batch's tensor on the host.
        """
        target = self._target[0]
        with self.peft.disable_adapter():  # type: ignore[operator]
            _, base_BTD = target.read(features.tokens_BT, (), positions_BT)
        anchors = DraftPositions.of_answers(features)
        base = replace(features, last_BTD=base_BTD)
        states_ND = features.last_BTD.flatten(0, 1)[anchors.index_N]
        return draft_loss(
            [states_ND], [target.modules.lm_head.weight], None, base, anchors, KEEP_BASE
        ).loss
