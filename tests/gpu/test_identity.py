"""On an accelerator as on the CPU: every head, tree, acceptance rule, processor, padding and kind
of batch."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import VOCAB, EachRound, head_for, pairs

from headstart.inference import SpeculativeLM, Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:.*launched operation by operation"),
]
PADDED = torch.tensor([[0, 0, 0, 5, 6], [9, 8, 7, 6, 5], [0, 3, 1, 2, 4]])
DRAWN = {
    "drawn:chain:3": (
        "point_mass",
        "token",
        "with_replacement",
        "without_replacement",
        "block",
        "traversal",
    ),
    "drawn:branch:2x2": ("point_mass", "without_replacement", "traversal"),
    "independent:branch:2x2": ("point_mass", "with_replacement"),
    "stop:0.05:drawn:chain:3": ("block",),
    "dynamic:8:3:2": ("point_mass", "typical"),
}
SETTINGS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 12, "top_p": 0.9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "shortest": {"do_sample": False, "min_new_tokens": 12, "eos_token_id": [3, 7]},
    "no repeats": {"do_sample": True, "no_repeat_ngram_size": 2, "bad_words_ids": [[4], [5, 6]]},
    "suppressed": {"do_sample": True, "suppress_tokens": [1, 2], "begin_suppress_tokens": [8]},
    "biased": {"do_sample": False, "sequence_bias": [[[9], 2.0]], "forced_eos_token_id": 3},
    "ends": {"do_sample": False, "eos_token_id": [3, 7, 11, 20]},
}


@pytest.fixture(params=[False, True], ids=["eager", "recorded"])
def mode(request, there):
    """How rounds run on the accelerator: operation by operation, or recorded and replayed."""
    there.compile(False)
    yield request.param
    there.compile(False)


def text(lm, prompts, seed=5, tokens=14, slots=None, **settings):
    torch.manual_seed(seed)
    settings = {"do_sample": False, "pad_token_id": 0, **settings}
    mask = (prompts != 0).long()
    return lm.generate(
        prompts, attention_mask=mask, max_new_tokens=tokens, max_batch_size=slots, **settings
    )


def both(on_cpu, there, mode, kind=None, drafter=None, **options):
    """Our decoder on the CPU, operation by operation, and there."""
    head = None if kind is None else head_for(on_cpu, kind)
    lms = []
    for target, compile in ((on_cpu, False), (there, mode)):
        own = None if head is None else copy.deepcopy(head).to(target.device)
        lms.append(
            SpeculativeLM.from_pretrained(target, own, compile=compile, drafter=drafter, **options)
        )
    return lms


@pytest.mark.parametrize(
    ("tree", "acceptance", "mode"),
    [
        *((tree, word, True) for tree, words in DRAWN.items() for word in words),
        *((tree, words[-1], False) for tree, words in DRAWN.items()),
    ],
    indirect=["mode"],
)
def test_every_rule_draws_what_it_draws_on_the_cpu(on_cpu, there, device, mode, tree, acceptance):
    """The simulated device draws the CPU's numbers; a GPU draws others."""
    options = {
        "tree": tree,
        "acceptance": acceptance,
        "lossy": acceptance == "typical",
        "adaptive": False,
    }
    here, away = both(on_cpu, there, mode, "eagle3", **options)
    expected = text(here, PADDED, do_sample=True)
    found = text(away, PADDED.to(device), do_sample=True)
    assert found.sequences.shape[1] > PADDED.shape[1]
    # a CPU is asked sooner, and draws fewer numbers
    if device.type == "sim" and not tree.startswith("stop"):
        assert torch.equal(found.sequences.cpu(), expected.sequences)
        assert found.stats.acceptance_length == expected.stats.acceptance_length


@pytest.mark.parametrize(
    ("name", "tree", "inputs_on_cpu", "mode"),
    pairs(SETTINGS, ["dynamic:8:3:2", "drawn:chain:2"], [False, True], [False, True]),
    indirect=["mode"],
)
def test_every_setting(on_cpu, there, device, mode, tree, name, inputs_on_cpu):
    here, away = both(on_cpu, there, mode, "medusa", tree=tree, adaptive=False)
    expected = text(here, PADDED, **SETTINGS[name]).sequences
    found = text(away, PADDED if inputs_on_cpu else PADDED.to(device), **SETTINGS[name]).sequences
    if device.type == "sim" or not SETTINGS[name]["do_sample"]:
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "hydra++"])
def test_a_model_over_two_devices(on_cpu, device, kind):
    """As accelerate spreads it; a GPU alone is given twice."""
    from accelerate import dispatch_model

    first, second = (device, torch.device(device.type, 1 if device.type == "sim" else 0))
    model = copy.deepcopy(on_cpu.model)
    places = {
        "model.embed_tokens": first,
        "model.rotary_emb": first,
        "model.norm": second,
        "lm_head": second,
    }
    places |= {
        f"model.layers.{i}": first if i < 3 else second for i in range(on_cpu.info.num_layers)
    }
    spread = Target(dispatch_model(model, places, main_device=first, force_hooks=True))
    head = head_for(on_cpu, kind).to(spread.device)
    expected = text(SpeculativeLM(on_cpu), PADDED).sequences
    for tree in ("branch:2x2", "dynamic:8:3:2"):
        lm = SpeculativeLM.from_pretrained(spread, head, tree=tree, compile=False, adaptive=False)
        assert torch.equal(text(lm, PADDED.to(first)).sequences.cpu(), expected)


@pytest.mark.parametrize("slots", [None, 2])
def test_what_prompts_share(on_cpu, there, device, mode, slots):
    beginning = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    rows = [torch.cat([beginning, torch.tensor(more)]) for more in ([1], [2, 3], [1], [4, 5, 6])]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    here, away = both(on_cpu, there, mode, "eagle3", tree="chain:3", adaptive=False)
    expected = text(SpeculativeLM(on_cpu), padded).sequences
    assert torch.equal(text(here, padded).sequences, expected)
    assert torch.equal(text(away, padded.to(device), slots=slots).sequences.cpu(), expected)


def test_a_stream_records_in_a_thread_of_its_own(on_cpu, there, device, mode):
    _, away = both(on_cpu, there, mode, "eagle3", tree="chain:3", adaptive=False)
    expected = text(SpeculativeLM(on_cpu), PADDED[1:2], tokens=40).sequences
    for _ in range(2):  # recorded, then replayed in another thread
        settings = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
        prompt = PADDED[1:2].to(device)
        found = list(away.stream(prompt, attention_mask=torch.ones_like(prompt), **settings))
        assert [token for tokens in found for token in tokens] == expected[0, 5:].tolist()


@pytest.mark.parametrize(
    ("whose", "changed", "mode"),
    pairs(["target", "head"], ["in place", "elsewhere"], [False, True]),
    indirect=["mode"],
)
def test_weights_that_change_are_not_read_where_they_were(
    on_cpu, device, mode, monkeypatch, whose, changed
):
    """Between two generations: what was recorded before is not replayed."""
    model = copy.deepcopy(on_cpu.model)
    target = Target(copy.deepcopy(model).to(device))
    head = copy.deepcopy(head_for(on_cpu, "eagle3")).to(device)
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:3", compile=mode, adaptive=False)
    drafted = []

    def note_drafts():
        forward = target.engine.forward_tree

        def noted(tree, *rest):
            drafted.append(tree.tokens_BN.tolist())
            return forward(tree, *rest)

        monkeypatch.setattr(target.engine, "forward_tree", noted)

    note_drafts()
    first = text(lm, PADDED.to(device), tokens=20)
    before = drafted.copy()
    drafted.clear()
    layer = target.modules.lm_head if whose == "target" else head.lm_head
    shifted = layer.weight.detach().roll(1, 0)
    if changed == "in place":
        layer.weight.data.copy_(shifted)
    else:
        layer.weight = torch.nn.Parameter(shifted, requires_grad=False)
    if whose == "target":
        own = model.get_output_embeddings().weight
        own.data.copy_(own.detach().roll(1, 0))
    expected = text(SpeculativeLM(Target(model)), PADDED, tokens=20).sequences
    found = text(lm, PADDED.to(device), tokens=20)
    assert torch.equal(found.sequences.cpu(), expected)
    if whose == "head":
        fresh = SpeculativeLM.from_pretrained(
            target, head, tree="chain:3", compile=False, adaptive=False
        )
        recorded = target.engine
        target.compile(False)
        if target.engine is not recorded:  # another has taken its place
            note_drafts()
        after = drafted.copy()
        drafted.clear()
        text(fresh, PADDED.to(device), tokens=20)
        assert before != after == drafted
    else:
        assert not torch.equal(found.sequences, first.sequences)


def test_a_generation_inside_another_leaves_its_results(on_cpu, there, device, mode):
    """A callback generates after each round, between what a recording left and its use."""
    _, away = both(on_cpu, there, mode, "eagle3", tree="chain:3", adaptive=False)
    prompts, alone = PADDED[1:2], text(away, PADDED[1:2].to(device), tokens=30)
    depth, recordings = [], getattr(there.engine.runner, "recordings", {})

    def inner(_):
        if not depth:
            depth.append(1)
            before = len(recordings)
            text(away, PADDED[2:3].to(device), tokens=8)
            # a replay could write where the outer generation's results lie
            assert len(recordings) == before
            depth.clear()

    away.observers.append(EachRound(inner))
    found = text(away, prompts.to(device), tokens=30)
    assert torch.equal(
        found.sequences.cpu(), text(SpeculativeLM(on_cpu), prompts, tokens=30).sequences
    )
    assert found.stats.rows == alone.stats.rows
