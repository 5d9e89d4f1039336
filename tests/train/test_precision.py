"""What "fastest" and "auto" mean for a run: one answer for target and head, kept whatever a later
machine finds."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from accelerate import Accelerator
from helpers import SIZES, calls_of, head_for, warnings_of
from messages import lacking, refused
from runs import changed, last_bytes, saved_options, write_prompts

from headstart.heads import HEADS
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference.tuning import machine
from headstart.train import engines, loop
from headstart.train.config import DataConfig, LoopConfig, SelfMadeConfig, TrainConfig
from headstart.train.data.batches import Batch
from headstart.train.data.self_made import make_conversations
from headstart.train.engines import formats, resolved, state_dtype, with_formats
from headstart.train.features.online import online_features
from headstart.train.loop import train
from headstart.train.run_folder import as_begun

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WORDS = ("fastest", "auto", "float32", "bfloat16", "float16")
ARITHMETIC = ("auto", "float32", "bfloat16")


pytestmark = pytest.mark.usefixtures("nothing_measured")


@pytest.fixture
def run_on(tmp_path):
    """A run on a checkpoint of a format: `run_on("bfloat16", "fastest", "auto")`."""

    def build(own, target, head):
        folder = tmp_path / own
        folder.mkdir(exist_ok=True)
        llama = {"model_type": "llama", "dtype": own, "num_hidden_layers": 1, **SIZES}
        (folder / "config.json").write_text(json.dumps(llama))
        return TrainConfig(
            target=str(folder),
            output=str(tmp_path / "run"),
            dtype=target,
            data=DataConfig(sources=["none.jsonl"]),
            loop=LoopConfig(precision=head),
        )

    return build


@pytest.fixture
def bfloat16_takes(monkeypatch):
    """Sets how long a step in bfloat16 takes, over one in float32: `bfloat16_takes(2.7)`."""

    def patch(ratio):
        monkeypatch.setattr(engines, "bfloat16_step_ratio", lambda: ratio)

    return patch


def is_possible(own, target, head):
    named = own if target == "auto" else target
    return not (head == "float32" and named not in ("fastest", "float32"))


POSSIBLE = [
    case
    for case in itertools.product(("float32", "bfloat16", "float16"), WORDS, ARITHMETIC)
    if is_possible(*case)
]


@pytest.mark.filterwarnings("ignore:on this machine training steps take")
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.7])
@pytest.mark.parametrize(("own", "target", "head"), POSSIBLE)
def test_formats_fit_each_other_and_what_was_named(
    run_on, bfloat16_takes, own, target, head, ratio
):
    bfloat16_takes(ratio)
    asked = run_on(own, target, head)
    words = formats(asked, CPU)
    assert "auto" not in words
    with_formats(asked, *words)  # refuses what does not go together
    named = own if target == "auto" else target
    assert named in ("fastest", words[0]) and head in ("auto", words[1])
    if head == "auto":
        faster = ratio < 1 or named in ("bfloat16", "float16")
        assert words[1] == ("bfloat16" if faster else "float32")
    if target == "fastest":
        rounded = own == "bfloat16" and words[1] != "float32"
        assert words[0] == ("bfloat16" if rounded else "float32")


@pytest.mark.parametrize(("own", "target", "head"), POSSIBLE)
def test_on_an_accelerator_nothing_is_measured(run_on, monkeypatch, own, target, head):
    monkeypatch.setattr(engines, "bfloat16_step_ratio", lambda: pytest.fail("measured a CPU"))
    words = formats(run_on(own, target, head), GPU)
    assert words[1] == ("bfloat16" if head == "auto" else head)
    if target == "auto":
        assert words[0] == own
    if target == "fastest":
        assert words[0] == ("float32" if head == "float32" else own)


def test_float32_arithmetic_on_a_rounded_checkpoint_is_refused(run_on):
    with refused("float32 needs dtype bfloat16"):
        formats(run_on("bfloat16", "auto", "float32"), CPU)


def test_heads_are_not_trained_in_float16(run_on):
    with refused("loop.precision float32 bfloat16 'float16'"):
        run_on("float16", "float16", "float16")


def test_a_gpu_without_bfloat16_trains_in_float32(run_on, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert formats(run_on("float16", "fastest", "auto"), GPU) == ("float32", "float32")


@pytest.mark.parametrize(
    ("head", "ratio", "words"),
    [
        ("bfloat16", 2.7, "2.7 bfloat16 float32"),
        ("bfloat16", 1.2, None),
        ("float32", 0.5, "2.0 float32 bfloat16"),
        ("float32", 2.7, None),
        ("auto", 2.7, None),
        ("auto", 0.3, None),
    ],
)
def test_arithmetic_that_is_named_and_slow_is_told_once(run_on, bfloat16_takes, head, ratio, words):
    bfloat16_takes(ratio)
    config = run_on("float32", "float32", head)
    told = warnings_of(lambda: formats(config, CPU)) + warnings_of(lambda: formats(config, CPU))
    assert [lacking(message, words) for message in told] == ([] if words is None else [[]])


def test_the_probe_times_steps_with_autocast_and_without(monkeypatch):
    monkeypatch.undo()
    clock, linear = [0.0], engines.F.linear

    def counted(rows_RD, weight_OI):
        clock[0] += 3.0 if torch.is_autocast_enabled("cpu") else 2.0
        return linear(rows_RD, weight_OI)

    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(engines.F, "linear", counted)
    assert engines.bfloat16_step_ratio() == pytest.approx(1.5)


@pytest.fixture
def automatic(short):
    """A short run that names no format."""
    return with_formats(short, "fastest", "auto")


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_a_run_logs_and_saves_what_auto_became(automatic, bfloat16_takes, monkeypatch, ratio):
    bfloat16_takes(ratio)
    begun = calls_of(monkeypatch, loop.RunFolder, "claim")
    folder = train(automatic)
    expected = ("float32", "bfloat16" if ratio < 1 else "float32")  # the checkpoint is in float32
    _, metadata = load_head(folder / "last")
    _, config = begun[0]
    for options in (
        dataclasses.asdict(config),
        saved_options(folder),
        metadata.training["config"],
    ):
        assert (options["dtype"], options["loop"]["precision"]) == expected
    assert metadata.provenance["dtype"] == expected[0]


def test_a_run_goes_on_as_it_began_on_a_machine_that_would_choose_otherwise(
    automatic, bfloat16_takes, monkeypatch
):
    bfloat16_takes(2.0)
    folder = train(automatic)
    assert formats(automatic, CPU)[1] == "float32"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)  # another machine
    bfloat16_takes(0.5)
    assert formats(automatic, CPU)[1] == "bfloat16"
    assert as_begun(automatic).loop.precision == "float32"
    assert train(automatic) == folder  # not refused
    with refused("loop.precision = 'float32' 'bfloat16'"):
        train(with_formats(automatic, "float32", "bfloat16"))  # a name counts for more


def test_a_folder_without_a_checkpoint_says_nothing(automatic, tmp_path):
    folder = tmp_path / "begun"
    folder.mkdir()
    asked = dataclasses.replace(automatic, output=str(folder))
    (folder / "config.yaml").write_text("target_dtype: float16\n")
    assert as_begun(asked) == asked
    assert resolved(asked, Accelerator()).dtype == "float32"


def test_conversations_go_on_in_the_format_they_were_begun_in(taught, tmp_path):
    config = SelfMadeConfig(
        target=str(taught),
        output=str(tmp_path / "made.jsonl"),
        conversations=2,
        batch_size=2,
        max_new_tokens=4,
        prompts=write_prompts(tmp_path / "prompts.jsonl", [f"count to {i}" for i in range(3, 9)]),
        min_distinct=0.0,
    )
    make_conversations(changed(config, dtype="float16"))
    state = tmp_path / "made.jsonl.state.json"
    assert json.loads(state.read_text())["options"]["dtype"] == "float16"
    make_conversations(config)  # not refused
    with refused("dtype = 'float16' 'bfloat16'"):
        make_conversations(changed(config, dtype="bfloat16"))
    state.unlink()
    (tmp_path / "made.jsonl").unlink()
    make_conversations(config)
    # and not "fastest"
    assert json.loads(state.read_text())["options"]["dtype"] == "float32"


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_states_stay_in_the_targets_own_format_where_the_head_computes_in_it(kind, tiny_target):
    """Copied to float32 they would take twice the memory, and be rounded again by the first
    product."""
    target = tiny_target(layers=8, dtype=torch.bfloat16)
    tokens_BT = torch.randint(250, (2, 24), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), ((24,), (24,)))
    found = {}
    for word in ("bfloat16", "float32"):
        dtype = state_dtype(word, target.dtype)
        assert dtype == getattr(torch, word)
        head = head_for(target, kind).float().train()
        features = online_features(target, head, batch, dtype)
        assert features.features_BTF.dtype == features.last_BTD.dtype == dtype
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            output = head(features, head.default_objective(head.config))
        output.loss.backward()
        gradients = [weight.grad for weight in head.parameters() if weight.grad is not None]
        for number in (output.loss, *gradients):
            assert number.dtype == torch.float32
        found[word] = float(output.loss.detach()), torch.cat([part.flatten() for part in gradients])
    (loss, gradient), (expected, other) = found["bfloat16"], found["float32"]
    assert loss == pytest.approx(expected, rel=0.01)
    assert torch.nn.functional.cosine_similarity(gradient, other, dim=0) > 0.99
    assert state_dtype("float32", torch.float32) == torch.float32
    assert state_dtype("bfloat16", torch.float16) == torch.float32  # which bfloat16 would round


@pytest.mark.parametrize(
    ("kind", "default"),
    [("medusa", torch.float64), ("eagle", torch.bfloat16), ("dspark", torch.bfloat16)],
)
def test_torchs_default_dtype_changes_no_weight(kind, default, short, tmp_path):
    config = changed(short, head={"type": kind}, loop={"max_steps": 2})
    expected = train(config)
    torch.set_default_dtype(default)
    try:
        other = train(changed(config, output=str(tmp_path / "other")))
        assert torch.get_default_dtype() == default
    finally:
        torch.set_default_dtype(torch.float32)
    assert last_bytes(other) == last_bytes(expected)
