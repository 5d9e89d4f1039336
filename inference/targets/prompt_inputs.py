"""Inputs besides token ids, such as images: the target reads a prompt with them by its own forward.

Masks and positions of the prompt are the model's: tokens of an image may attend to each other, and
positions may have three dimensions. What later tokens need of this is one number for each
dimension, to add to a token's index. An image of 64 tokens that takes 8 positions: -56.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .target_model import TargetModel

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Inputs [batch, time] that say which tokens stand for images."""
ENCODED = "mm_encoder_outputs"
"""Input with the encoded images, which `model.generate` computes before it starts decoding."""
SEEN_ONCE = (
    "pixel_",
    "image_",
    "images",
    "video_",
    "spatial_shapes",
    "high_res_pixel_values",
    "num_local_patches",
    "second_per_grid",
    "input_features",
    "feature_attention_mask",
    "input_values",
    "audio_",
)
"""Beginnings of the names of inputs that a model reads once, with the prompt."""
IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Names in a config of the token that stands for an image, or a part of one."""


def is_prompt_input(target: TargetModel, name: str) -> bool:
    """Whether the target's forward takes this input and reads it only with the prompt."""
    taken = inspect.signature(target.model.forward).parameters
    if name == ENCODED:
        return True
    if name not in taken:
        return False
    # Token types mark images in the prompt. In a text model each new token would need one as well.
    if name in TOKEN_TYPES:
        return any(other.startswith(("pixel_values", "input_features")) for other in taken)
    return name.startswith(SEEN_ONCE)


def check_prompt_inputs(
    target: TargetModel, input_ids: Tensor, mask: Tensor | None, given: Mapping[str, Any]
) -> None:
    """Refuse images without image tokens, image tokens without images, and unreadable combinations.

    Raises:
        ValueError: says what was given and what is valid.
    """
    _check_image_tokens(target, input_ids, given)
    if not given:
        return
    what = "images or the like" if ENCODED in given else sorted(given)[0]
    if target.counted:
        raise ValueError(
            f"{target.name!r} {target.counted}, and {what} cannot be read with its prompt; give"
            " text alone"
        )
    if target.stateful is not None:
        raise ValueError(
            f"{target.name!r} keeps a state in addition to keys and values, with which {what}"
            " cannot be read here; give text alone"
        )
    if len(input_ids) > 1:
        raise ValueError(
            f"{what} came with {len(input_ids)} rows: which image belongs to which row is not known"
            " here; call generate for each prompt"
        )
    if mask is not None and not bool(mask.bool().all()):  # sync: once a call
        raise ValueError(
            f"a prompt with {what} must not be padded; let the processor return one row alone"
        )


def _check_image_tokens(target: TargetModel, input_ids: Tensor, given: Mapping[str, Any]) -> None:
    """Refuse image tokens without images, and images without tokens, by a ValueError."""
    config = target.model.config
    token = None
    for name in IMAGE_TOKENS:
        token = getattr(config, name, None)
        if token is not None:
            break
    if not isinstance(token, int):
        return
    if "pixel_values" not in inspect.signature(target.model.forward).parameters:
        return
    images = [name for name in given if name.startswith(("pixel_values", "image_embeds", ENCODED))]
    count = int((input_ids == token).sum())  # sync: once a call
    if count and not images:
        raise ValueError(
            f"the prompt has {count} image tokens ({token}) and no images came with it; give all"
            " that the processor returns: generate(**processor(...))"
        )
    if images in (["pixel_values"], [ENCODED]) and not count:
        raise ValueError(
            f"images were given, and the prompt has no image token ({token}) for them; let the"
            " processor write the prompt, or apply its chat template"
        )


def position_offsets(positions: Tensor | None, length: int) -> Tensor | None:
    """Return what to add to the index of a token after a prompt to get its position.

    There is one number for each dimension of the prompt's `positions` [..., T]. None where
    positions are indices, in one dimension.
    """
    if positions is None:
        return None
    # A prompt of 100 tokens whose last position is 43: 43 - 99 = -56.
    last = positions[..., 0, -1] - (length - 1)
    if last.ndim == 0 and int(last) == 0:  # sync: once a call
        return None
    return last


def in_one_dimension(positions_BN: Tensor, offsets: Tensor | None) -> Tensor:
    """Return rotary positions of text from its indices [B, N], equal in all rotating dimensions.

    Of four dimensions the first is the token's index, which no rotary embedding uses.
    """
    if offsets is None:
        return positions_BN
    rotating = offsets.flatten()[1:] if offsets.numel() == 4 else offsets.flatten()
    if bool((rotating != rotating[0]).any()):  # sync: on a CPU alone
        raise ValueError(
            "a prompt that ends within an image has other positions in each dimension, which our"
            " CPU kernels do not know; end it with text, or load the target with compile=False"
        )
    return positions_BN + rotating[0]


def offset(positions_BN: Tensor, offsets: Tensor | None) -> Tensor:
    """Return the positions of tokens from their indices [B, N].

    They have as many dimensions as the prompt's, [..., B, N].
    """
    if offsets is None:
        return positions_BN
    return positions_BN + offsets.to(positions_BN.device)[..., None, None]  # as [..., B, N]
