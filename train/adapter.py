"""Medusa-2 (arXiv:2401.10774, section 2.2.2): heads trained with a LoRA adapter of the target.

The heads are trained first, on the unchanged target. Then both are: the heads' loss reaches the
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
        """Inject the adapter into the target's model.

        Raises:
            ValueError: the model lacks a module that `adapter.modules` names.
        """
        super().__init__()
        # The base model has no LM head: the losses read its weight, which must not be adapted.
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
        # In lists, which torch does not search for submodules: the engine and the checkpoints get
        # what is trained, and not the frozen target.
        self._target = [target]
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
        # The target's forward keeps tensors for a backward only once the adapter is trained.
        with torch.set_grad_enabled(joint and torch.is_grad_enabled()):
            features_BTF, last_BTD = target.states(
                tokens_BT, self.head.feature_layers, batch.positions_BT
            )
        features = target_features(target, batch, features_BTF, last_BTD)
        output: HeadOutput = self.head(features, self.objective)
        loss = output.loss
        if joint:
            loss = loss + self.keep_base * self._distance(features, batch.positions_BT)
        else:
            # A gradient of zeros: engines need one for every parameter on every rank.
            total = torch.stack([weight.sum() for weight in self.adapter.values()]).sum()
            loss = loss + 0.0 * total
        return HeadOutput(loss, output.losses_K, output.counts_K, output.hits_KI)

    def _distance(self, features: TargetFeatures, positions_BT: Tensor | None) -> Tensor:
        """Sum the KL divergence from the model without its adapter over all answer tokens.

        `positions_BT` is the batch's tensor on the host.
        """
        target = self._target[0]
        with self.peft.disable_adapter():  # type: ignore[operator]
            _, base_BTD = target.read(features.tokens_BT, (), positions_BT)
        # The KL term is a draft loss: the adapted model's states "draft", through the LM head, the
        # distribution of the model without its adapter. N answer positions, of B * T.
        anchors = DraftPositions.of_answers(features)
        base = replace(features, last_BTD=base_BTD)
        states_ND = features.last_BTD.flatten(0, 1)[anchors.index_N]
        return draft_loss(
            [states_ND], [target.modules.lm_head.weight], None, base, anchors, KEEP_BASE
        ).loss
