"""Prompts with images: the target reads them itself, and drafts follow as `generate` would place
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import family_model
from helpers import Oracle, head_for, random_ids
from messages import refused
from tiny_models import tiny_config, tiny_model
from torch import Tensor

from headstart.inference import Conversation, SpeculativeLM, Target, TreeShape, custom_generate
from headstart.inference.engines import cpu_kernels
from headstart.inference.engines.cpu_decoder import CpuEngine
from headstart.inference.rounds import prefill
from headstart.inference.targets.prompt_inputs import check_prompt_inputs

VOCAB = 112
IMAGE, VIDEO, START, END = 101, 102, 103, 104
"""Tokens that stand for an image, a video, and mark a vision block's beginning and end."""
IMAGE_TOKENS = 4
"""Of 2 x 2 patches, or of 4 x 4 of which 2 x 2 become a token."""
QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
GEMMA = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
MODELS: dict[str, dict[str, Any]] = {
    "llava": {"image_token_index": IMAGE, "vision_feature_layer": -1},
    "gemma3": {**GEMMA, "mm_tokens_per_image": IMAGE_TOKENS},
    "qwen2_vl": QWEN,
    "qwen3_vl": QWEN,
}
"""Types, and options of their configs."""
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 6, 6]}
SETTINGS: dict[str, Any] = {
    "max_new_tokens": 24,
    "do_sample": False,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
}


def pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def multimodal(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Callable[..., Any]]:
    """A model with widths that the kernels know, and what makes prompts for it."""
    config = tiny_config(name)
    text = config.text_config
    text.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32})
    if name.startswith("qwen"):
        text.rope_parameters = {**MROPE, "mrope_interleaved": name == "qwen3_vl"}
    if name == "qwen3_vl":
        config.vision_config.deepstack_visual_indexes = [0, 1]
    parts = {"text_config": text, "vision_config": config.vision_config}
    model = tiny_model(name, 1.0, **parts, **MODELS[name]).to(dtype)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.15)

    def prompt(count: int, seed: int = 0) -> dict[str, Tensor]:
        """Text with images, as a processor returns it."""
        words = random_ids(100, count + 1, 7, seed=seed, first=1)
        image = torch.tensor([START, *[IMAGE] * IMAGE_TOKENS, END])
        parts = [words[0]]
        for number in range(count):
            parts += [image, words[number + 1]]
        ids_1T = torch.cat(parts)[None]
        inputs = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
        if name.startswith("qwen"):
            inputs["pixel_values"] = pixels(count * 16, 3 * 2 * 16 * 16).to(dtype)
            inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]] * count)
            inputs["mm_token_type_ids"] = (ids_1T == IMAGE).long()
        else:
            inputs["pixel_values"] = pixels(count, 3, 32, 32).to(dtype)
        if name == "gemma3":
            inputs["token_type_ids"] = (ids_1T == IMAGE).long()
        return inputs

    return model, prompt


TREE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 0, 0, 0)])


def check_prompt(lm, inputs):
    """Decode a prompt as `generate` does; returns the text, prompt and all, and the statistics."""
    expected = lm.target.model.generate(**inputs, **SETTINGS)
    output = lm.generate(**inputs, **SETTINGS)
    assert torch.equal(output.sequences, expected)
    return expected, output.stats


@pytest.mark.versions
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 2])
def test_drafts_after_images_are_those_of_generate(name, count, monkeypatch):
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 3)  # an image is never cut
    model, prompt = multimodal(name)
    inputs = prompt(count)
    text = model.generate(**inputs, **SETTINGS)
    others = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1) + 1}
    assert not torch.equal(model.generate(**others, **SETTINGS), text)  # the image matters
    truth = text[0, inputs["input_ids"].shape[1] :].tolist()
    lm = SpeculativeLM(Target(model), Oracle(TREE, [truth], VOCAB, wrong=0.1))
    for _ in range(2):
        _, stats = check_prompt(lm, inputs)
        assert stats.acceptance_length > 2


@pytest.mark.isa
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_the_engine_and_drafters_that_a_user_gets(name, dtype):
    """Of the kernels, in float32; by plain `generate`, too."""
    model, prompt = multimodal(name, dtype)
    lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup", adaptive=False)
    if dtype == torch.float32 and name != "gemma3" and cpu_kernels.library() is not None:
        assert isinstance(lm.target.engine, CpuEngine)
    head = head_for(lm.target, "eagle3", depth=3)
    with_head = SpeculativeLM.from_pretrained(lm.target, head, tree="dynamic:8:3:3", adaptive=False)
    plain = {name: prompt(0)[name] for name in ("input_ids", "attention_mask")}
    for inputs in (prompt(1), plain, prompt(2, seed=3), plain):
        check_prompt(with_head, inputs)
        check_prompt(lm, inputs)
    method = custom_generate(drafter="prompt-lookup", adaptive=False)
    inputs = prompt(1)
    expected, _ = check_prompt(lm, inputs)
    assert torch.equal(model.generate(**inputs, **SETTINGS, custom_generate=method), expected)


@pytest.mark.parametrize(
    ("model", "words"),
    [(lambda: family_model("lfm2"), "state"), (lambda: tiny_model("bloom", 1.0), "position_ids")],
)
def test_targets_with_states_or_without_position_ids_read_text_alone(model, words):
    target = Target(model())
    ids_1T = torch.ones(1, 5, dtype=torch.int64)
    with refused(words, "pixel_values text"):
        check_prompt_inputs(target, ids_1T, None, {"pixel_values": pixels(1, 3, 16, 16)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pixel_values": None}, f"{IMAGE_TOKENS} image tokens ({IMAGE})"),
        ({"input_ids": torch.ones(1, 20, dtype=torch.int64)}, f"image token ({IMAGE})"),
        ({"rows": 2}, "2 rows"),
        ({"attention_mask": torch.arange(20)[None].clamp(max=1)}, "padded"),
        ({"past_key_values": Conversation()}, "past_key_values images"),
        ({"pixel_values": None, "pixel_valves": pixels(1, 3, 32, 32)}, "'pixel_valves'"),
    ],
)
def test_what_does_not_fit_a_prompt_is_refused(changes, words):
    model, prompt = multimodal("llava")
    lm = SpeculativeLM.from_pretrained(model, compile=False)
    inputs = prompt(1) | changes
    rows = inputs.pop("rows", 1)
    given = {name: value for name, value in inputs.items() if value is not None}
    if rows > 1:
        given = {name: torch.cat([value] * rows) for name, value in given.items()}
    with refused(words):
        lm.generate(**given, max_new_tokens=3)
