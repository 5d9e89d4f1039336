"""What a head trains on: one batch, seen by the frozen target on the way."""

from __future__ import annotations

import torch

from ..heads import DraftHead, TargetFeatures
from ..inference import Target
from .data import Batch


def online_features(
    target: Target, head: DraftHead, batch: Batch, dtype: torch.dtype = torch.float32
) -> TargetFeatures:
    """Run the target over a batch.

    Args:
        target: the frozen model.
        head: says which layers it wants.
        batch: right-padded conversations.
        dtype: of the features, as the head's weights.
    """
    tokens_BT = batch.tokens_BT.to(target.device)
    features_BTF, last_BTD = target.read(tokens_BT, head.feature_layers)
    return TargetFeatures(
        features_BTF=features_BTF.to(dtype),
        last_BTD=last_BTD.to(dtype),
        tokens_BT=tokens_BT,
        loss_mask_BT=batch.loss_mask_BT.to(target.device),
        ends=target.ends,
    )
