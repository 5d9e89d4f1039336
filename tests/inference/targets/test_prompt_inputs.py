"""Prompts with images: the target reads them itself, and drafts follow as `generate` would place
them."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from families import family_model
from helpers import Oracle, head_for

from headstart.inference import Conversation, SpeculativeLM, Target, TreeShape, custom_generate
from headstart.inference.engines import cpu_kernels
from headstart.inference.engines.cpu_decoder import CpuEngine
from headstart.inference.targets.prompt_inputs import check_prompt_inputs

VOCAB = 60
IMAGE, VIDEO, START, END = 51, 52, 53, 54
"""Tokens that stand for an image, a video, and mark a vision block's beginning and end."""
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
SETTINGS = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.3}
SETTINGS["no_repeat_ngram_size"] = 2


def llava():
    config = tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**VISION, projection_dim=16),
        text_config=tf.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    return (
        tf.LlavaForConditionalGeneration(config),
        lambda count: {"pixel_values": pixels(count, 3, 16, 16)},
        16,
    )


def gemma3():
    config = tf.Gemma3Config(
        vision_config=tf.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=tf.Gemma3TextConfig(
            **TEXT,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )
    return (
        tf.Gemma3ForConditionalGeneration(config),
        lambda count: {"pixel_values": pixels(count, 3, 16, 16)},
        4,
    )


def grids(count):
    """Images of 4 x 8 patches, of which 2 x 2 become a token."""
    return torch.tensor([[1, 4, 8]] * count)


def qwen2_vl():
    vision = {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": TEXT["hidden_size"],
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
    }
    config = tf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config={**vision, "spatial_merge_size": 2},
        **QWEN,
    )

    def images(count):
        return {"pixel_values": pixels(count * 32, 3 * 2 * 4 * 4), "image_grid_thw": grids(count)}

    return tf.Qwen2VLForConditionalGeneration(config), images, 8


def qwen3_vl():
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 4,
    }
    vision |= {
        "out_hidden_size": TEXT["hidden_size"],
        "deepstack_visual_indexes": [0, 1],
        "num_position_embeddings": 64,
    }
    vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    rope = {**MROPE, "mrope_interleaved": True}
    config = tf.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **QWEN
    )

    def images(count):
        return {"pixel_values": pixels(count * 32, 3 * 2 * 4 * 4), "image_grid_thw": grids(count)}

    return tf.Qwen3VLForConditionalGeneration(config), images, 8


MODELS = {
    "llava": llava,
    "gemma 3": gemma3,
    "qwen2-vl": qwen2_vl,
    "qwen3-vl": qwen3_vl,
}


def pixels(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def build(name, dtype=torch.float64):
    torch.manual_seed(0)
    model, images, tokens = MODELS[name]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    model = model.to(dtype).eval().requires_grad_(False)
    model.generation_config = tf.GenerationConfig(pad_token_id=0)

    def prompt(count, seed=0):
        """Text with images, as a processor returns it."""
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for _ in range(count):
            parts += [torch.randint(1, 50, (5,), generator=generator), torch.tensor([START])]
            parts += [torch.full((tokens,), IMAGE), torch.tensor([END])]
        parts.append(torch.randint(1, 50, (7,), generator=generator))
        ids_1T = torch.cat(parts)[None]
        inputs = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T), **images(count)}
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        if name.startswith("qwen"):
            inputs["mm_token_type_ids"] = (ids_1T == IMAGE).long()
        if name == "gemma 3":
            inputs["token_type_ids"] = (ids_1T == IMAGE).long()
        return inputs

    return model, prompt


TREE = TreeShape.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 0, 0, 0)])


def check(lm, inputs):
    """Decode a prompt as `generate` does; returns the text, prompt and all, and the statistics."""
    expected = lm.target.model.generate(**inputs, **SETTINGS)
    output = lm.generate(**inputs, **SETTINGS)
    assert torch.equal(output.sequences, expected)
    return expected, output.stats


@pytest.mark.versions
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 2])
def test_drafts_after_images_are_those_of_generate(name, count, monkeypatch):
    # an image is never cut
    monkeypatch.setattr("headstart.inference.rounds.prefill.PREFILL_TOKENS", 9)
    model, prompt = build(name)
    inputs = prompt(count)
    text = model.generate(**inputs, **SETTINGS)
    others = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1) + 1}
    assert not torch.equal(model.generate(**others, **SETTINGS), text)  # the image matters
    truth = text[0, inputs["input_ids"].shape[1] :].tolist()
    lm = SpeculativeLM(Target(model), Oracle(TREE, [truth], VOCAB, wrong=0.1))
    for _ in range(2):
        _, stats = check(lm, inputs)
        assert stats.acceptance_length > 2


@pytest.mark.isa
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_the_engine_and_drafters_that_a_user_gets(name, dtype, monkeypatch):
    """With widths that a decoder in the kernels has, in float32; by plain `generate`, too."""
    widths = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    monkeypatch.setitem(MROPE, "mrope_section", [4, 6, 6])
    for key, value in {**widths, "num_attention_heads": 2, "num_key_value_heads": 1}.items():
        monkeypatch.setitem(TEXT, key, value)
    model, prompt = build(name, dtype)
    lm = SpeculativeLM.from_pretrained(model, drafter="prompt-lookup", adaptive=False)
    if dtype == torch.float32 and name != "gemma 3" and cpu_kernels.library() is not None:
        assert isinstance(lm.target.engine, CpuEngine)
    head = head_for(lm.target, "eagle3", depth=3)
    with_head = SpeculativeLM.from_pretrained(lm.target, head, tree="dynamic:8:3:3", adaptive=False)
    plain = {name: prompt(0)[name] for name in ("input_ids", "attention_mask")}
    for inputs in (prompt(1), plain, prompt(2, seed=3), plain):
        check(with_head, inputs)
        check(lm, inputs)
    method = custom_generate(drafter="prompt-lookup", adaptive=False)
    inputs = prompt(1)
    expected, _ = check(lm, inputs)
    assert torch.equal(model.generate(**inputs, **SETTINGS, custom_generate=method), expected)


@pytest.mark.parametrize(
    ("build_text_model", "reason"),
    [
        (lambda: family_model("lfm2"), "keeps a state in addition to keys and values"),
        (
            lambda: tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_head=2)),
            "takes no",
        ),
    ],
)
def test_targets_with_states_or_without_position_ids_read_text_alone(build_text_model, reason):
    target = Target(build_text_model())
    ids_1T = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{reason}.* pixel_values cannot be read"):
        check_prompt_inputs(target, ids_1T, None, {"pixel_values": pixels(1, 3, 16, 16)})


def test_what_does_not_fit_a_prompt_is_refused():
    model, prompt = build("llava")
    lm = SpeculativeLM.from_pretrained(
        model, drafter="prompt-lookup", adaptive=False, compile=False
    )
    inputs = prompt(1)
    alone = {name: value for name, value in inputs.items() if name != "pixel_values"}
    with pytest.raises(ValueError, match=r"16 image tokens \(51\) and no images came with it"):
        lm.generate(**alone, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"the prompt has no image token \(51\)"):
        lm.generate(**prompt(0) | {"pixel_values": inputs["pixel_values"]}, max_new_tokens=3)
    two = {
        "input_ids": inputs["input_ids"].expand(2, -1),
        "attention_mask": inputs["attention_mask"].expand(2, -1),
    }
    with pytest.raises(ValueError, match=r"(pixel_values|images or the like) came with 2 rows"):
        lm.generate(
            **two, pixel_values=inputs["pixel_values"].expand(2, -1, -1, -1), max_new_tokens=3
        )
    padded = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    padded["attention_mask"][0, 0] = 0
    with pytest.raises(ValueError, match="must not be padded"):
        lm.generate(**padded, max_new_tokens=3)
    with pytest.raises(ValueError, match="past_key_values was given with images"):
        lm.generate(**inputs, past_key_values=Conversation(), max_new_tokens=3)
    with pytest.raises(ValueError, match="generate option 'pixel_valves' is not supported"):
        lm.generate(**alone, pixel_valves=inputs["pixel_values"], max_new_tokens=3)
