"""What "fastest" takes: the fastest of the dtypes that are exact, by a probe that runs once a
machine."""

from __future__ import annotations

import json
import warnings
from functools import partial

import pytest
import torch
from helpers import build_model, build_t5, build_tokenizer, saved_head, warnings_of
from messages import lacking, refused
from transformers import AutoModelForCausalLM

from headstart.heads import CheckpointMetadata
from headstart.inference import SpeculativeLM, Target, custom_generate
from headstart.inference.engines.encoder_decoder import Seq2SeqTarget
from headstart.inference.targets import dtypes
from headstart.inference.targets.dtypes import chosen_dtype, dtype_named, fits, own_dtype

CPU, GPU, MPS = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))
TIME_OVER_FLOAT32 = dtypes.time_over_float32
"""As it is; a fixture of all tests replaces it."""
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


pytestmark = pytest.mark.usefixtures("nothing_measured")


@pytest.fixture
def taken(monkeypatch):
    """Says how long formats take over float32: `taken({torch.bfloat16: 0.5})`; the list of what was
    timed."""
    timed = []

    def say(ratios):
        monkeypatch.setattr(
            dtypes, "time_over_float32", lambda dtype: timed.append(dtype) or ratios[dtype]
        )
        return timed

    return say


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model's folder, by its format; some configs say nothing of it, or more."""

    def save(weights, **changes):
        folder = tmp_path_factory.mktemp("checkpoint")
        build_model(dtype=weights).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        path = folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps(config))
        return folder

    folders = {dtype: save(dtype) for dtype in (F32, F64, BF16, F16)}
    folders["silent"] = save(F32, dtype=None)
    folders["silent bfloat16"] = save(BF16, dtype=None)
    folders["quantized"] = save(BF16, quantization_config={"quant_method": "x"})
    folders["gguf"] = folders[F32] / "model.gguf"
    folders["gguf"].write_bytes(b"")
    return folders


def dtype_of_loaded(folder, **options):
    """The dtype of a target on the CPU, loaded by itself and by a decoder."""
    target = Target.from_pretrained(folder, device_map="cpu", **options)
    lm = SpeculativeLM.from_pretrained(folder, device_map="cpu", **options)
    assert lm.target.dtype == target.dtype
    return target.dtype


@pytest.mark.parametrize(
    ("own", "ratios", "expected"),
    [
        (BF16, {BF16: 0.5}, BF16),
        (BF16, {BF16: 1.0}, F32),  # as fast: without rounding
        (BF16, {BF16: 2.7}, F32),
        (F16, {F16: 0.9}, F16),
        (F16, {F16: 1.1}, F32),
        (F32, {}, F32),  # no other is right
        (F64, {}, F64),
        ("silent", {}, F32),
    ],
)
def test_the_fastest_that_is_right_is_taken(checkpoint, taken, own, ratios, expected):
    timed = taken(ratios)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert chosen_dtype("fastest", checkpoint[own], CPU) == expected
            assert dtype_of_loaded(checkpoint[own]) == expected
    assert timed == list(ratios)  # once


@pytest.mark.parametrize("name", [F32, F64, BF16, F16, "silent", "silent bfloat16"])
def test_auto_is_what_transformers_takes(checkpoint, taken, name):
    timed = taken({BF16: 9.0, F16: 9.0})
    expected = AutoModelForCausalLM.from_pretrained(checkpoint[name], dtype="auto").dtype
    assert dtype_of_loaded(checkpoint[name], dtype="auto") == expected
    assert expected == {"silent": F32, "silent bfloat16": BF16}.get(name, name) and timed == []


@pytest.mark.parametrize(("own", "ratio", "lines"), [(BF16, 1.0, 1), (BF16, 0.5, 0), (F32, 1.0, 0)])
def test_a_dtype_that_is_not_the_checkpoints_is_told_in_one_line(
    checkpoint, taken, caplog, own, ratio, lines
):
    taken({BF16: ratio})
    dtypes.log_once.cache_clear()
    for _ in range(2):
        Target.from_pretrained(checkpoint[own], device_map="cpu")
    ours = [record for record in caplog.records if record.name == "headstart.inference"]
    assert len(ours) == lines
    for record in ours:
        assert not lacking(record.getMessage(), "float32 bfloat16 dtype='auto'")


@pytest.mark.parametrize(
    ("own", "device", "expected"),
    [
        *((own, place, own) for own in (F32, F64, BF16, F16) for place in (GPU, MPS, None)),
        ("gguf", CPU, F32),  # the format whose numbers are right
        ("gguf", GPU, F32),
        ("quantized", CPU, BF16),  # for which the weights were quantized
    ],
)
def test_where_there_is_no_choice_nothing_is_timed(checkpoint, taken, own, device, expected):
    timed = taken({BF16: 0.5, F16: 1.0})
    assert chosen_dtype("fastest", checkpoint[own], device) == expected and timed == []
    assert chosen_dtype("float16", checkpoint[own], device) == F16  # whoever names one gets it


def test_an_encoder_decoder_is_asked_too(tmp_path, taken):
    build_t5(30).to(BF16).save_pretrained(tmp_path)
    taken({BF16: 2.0})
    target = SpeculativeLM.from_pretrained(tmp_path, device_map="cpu").target
    assert isinstance(target, Seq2SeqTarget) and target.dtype == F32


def test_a_model_whose_float32_does_not_fit_keeps_its_own(checkpoint, taken, monkeypatch):
    taken({BF16: 2.0})
    config = own_dtype(checkpoint[BF16])[1]
    weights = 4 * sum(weight.numel() for weight in build_model().parameters())
    for free, expected in ((weights / dtypes.ROOM + 1, F32), (weights / dtypes.ROOM, BF16)):
        monkeypatch.setattr(dtypes, "free_memory", lambda device, free=free: free)
        assert fits(config) == (expected == F32)
        assert chosen_dtype("fastest", checkpoint[BF16], CPU) == expected


@pytest.mark.parametrize(
    ("own", "named", "ratios", "words"),
    [
        (BF16, BF16, {BF16: 1.25}, "1.2 bfloat16 float32"),
        (BF16, BF16, {BF16: 1.24}, None),
        (BF16, F32, {BF16: 0.5}, "2.0 float32 bfloat16"),
        (BF16, F32, {BF16: 0.9}, None),
        (F32, BF16, {BF16: 2.7}, "2.7 bfloat16 float32"),
        (F32, F32, {}, None),
        (F32, F64, {}, None),  # nobody asks for it to be fast
        (BF16, F16, {F16: 2.0, BF16: 0.5}, "4.0 float16 bfloat16"),
    ],
)
def test_whoever_names_a_format_gets_it_with_one_warning_if_it_is_slow(
    checkpoint, taken, own, named, ratios, words
):
    timed = taken(ratios)

    def load():
        for asked in (named, str(named).removeprefix("torch.")):
            assert Target.from_pretrained(checkpoint[own], asked, "cpu").dtype == named

    missing = [lacking(message, words or "") for message in warnings_of(load)]
    assert missing == ([] if words is None else [[]])
    assert sorted(map(str, timed)) == sorted(map(str, ratios))


def test_a_slow_format_that_nobody_named_is_not_told(checkpoint, taken, tmp_path):
    """A model that is loaded already, and what drafts for it in its format."""
    taken({BF16: 3.0})
    model = build_model(dtype=BF16)
    assert warnings_of(lambda: SpeculativeLM.from_pretrained(model)) == []
    draft = f"model:{checkpoint[F32]}"
    build_tokenizer().save_pretrained(tmp_path)
    target = Target(model, str(tmp_path))
    assert warnings_of(lambda: SpeculativeLM.from_pretrained(target, drafter=draft)) == []


@pytest.mark.parametrize("name", ["float8", "bf16", "int8", "Tensor", torch.int8])
def test_an_unknown_format_is_named_with_the_valid_ones(checkpoint, name):
    with refused(str(name), "fastest auto float64 float32 bfloat16 float16"):
        Target.from_pretrained(checkpoint[F32], name)
    assert dtype_named("float64") == F64


def test_a_loaded_model_keeps_its_format_and_another_is_refused_with_both(tiny_target):
    model = tiny_target(dtype=BF16).model
    for asked in ("fastest", "auto", "bfloat16", BF16):
        assert SpeculativeLM.from_pretrained(model, dtype=asked).target.dtype == BF16
    method = custom_generate(drafter="prompt-lookup", dtype="float32")
    ids = torch.ones(1, 2, dtype=torch.int64)
    for call in (
        lambda: SpeculativeLM.from_pretrained(model, dtype="float32"),
        lambda: SpeculativeLM.from_pretrained(Target(model), dtype="float32"),
        lambda: model.generate(ids, custom_generate=method, max_new_tokens=2),
    ):
        with refused("float32 torch.bfloat16"):
            call()


def test_only_a_format_that_was_asked_for_is_another_than_the_heads(checkpoint, taken, tmp_path):
    taken({BF16: 0.5})
    target = Target.from_pretrained(checkpoint[BF16], device_map="cpu")
    folder = tmp_path / "head"
    saved_head(
        folder,
        target,
        metadata=CheckpointMetadata(provenance={**target.provenance, "dtype": "float32"}),
        num_heads=2,
    )
    load = partial(SpeculativeLM.from_pretrained, checkpoint[BF16], folder, device_map="cpu")
    assert warnings_of(load) == []
    (found,) = warnings_of(lambda: SpeculativeLM.from_pretrained(target.model, folder))
    assert not lacking(found, "'float32' 'bfloat16'")


def test_the_probe_says_which_products_take_longer(monkeypatch, moved_clock):
    """By a clock that the products move."""
    seen = []

    def linear(rows, weight):
        assert rows.dtype == weight.dtype and rows.shape[1] == weight.shape[1]
        seen.append((weight.dtype, len(rows)))
        # In bfloat16 one row is twice as fast, and eight are four times as slow.
        moved_clock[0] += {(F32, 1): 1.0, (F32, 8): 2.0, (BF16, 1): 0.5, (BF16, 8): 8.0}[seen[-1]]
        return torch.ones(len(rows), len(weight), dtype=rows.dtype)

    monkeypatch.setattr(dtypes.F, "linear", linear)
    assert TIME_OVER_FLOAT32(BF16) == pytest.approx(8.5 / 3)
    assert set(seen) == {(dtype, rows) for dtype in (F32, BF16) for rows in (1, 8)}
