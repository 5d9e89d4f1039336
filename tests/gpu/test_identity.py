"""On an accelerator as on the CPU: every head, tree, acceptance rule, processor, padding and kind
of batch."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from helpers import GREEDY, VOCAB, EachRound, Proposals, continued, head_for, padded_batch, pairs

from headstart.inference import SpeculativeLM, Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:.*launched operation by operation"),
]
ROWS = [torch.tensor([5, 6]), torch.tensor([9, 8, 7, 6, 5]), torch.tensor([3, 1, 2, 4])]
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


RECORDED = pytest.mark.parametrize("compile", [False, True], ids=["eager", "recorded"])
"""How rounds run on the accelerator: operation by operation, or recorded and replayed."""


def seeded_text(lm, rows=ROWS, tokens=14, **settings):
    """The new tokens of each row, and the output, by the global generator."""
    torch.manual_seed(5)
    return continued(lm, rows, max_new_tokens=tokens, **settings)


@pytest.mark.parametrize(
    ("tree", "acceptance", "compile"),
    [
        *((tree, word, True) for tree, words in DRAWN.items() for word in words),
        *((tree, words[-1], False) for tree, words in DRAWN.items()),
    ],
)
def test_every_rule_draws_what_it_draws_on_the_cpu(lms, device, compile, tree, acceptance):
    """The simulated device draws the CPU's numbers; a GPU draws others."""
    options = {"tree": tree, "acceptance": acceptance, "lossy": acceptance == "typical"}
    here, away = lms("eagle3", compile, **options)
    expected, on_cpu_output = seeded_text(here, do_sample=True)
    texts, output = seeded_text(away, do_sample=True)
    assert texts[0]
    # a CPU is asked sooner, and draws fewer numbers
    if device.type == "sim" and not tree.startswith("stop"):
        assert texts == expected
        assert output.stats.acceptance_length == on_cpu_output.stats.acceptance_length


@pytest.mark.parametrize(
    ("name", "tree", "inputs_on_cpu", "compile"),
    pairs(SETTINGS, ["dynamic:8:3:2", "drawn:chain:2"], [False, True], [False, True]),
)
def test_every_setting(lms, device, compile, tree, name, inputs_on_cpu):
    here, away = lms("medusa", compile, tree=tree)
    expected, _ = seeded_text(here, **SETTINGS[name])
    torch.manual_seed(5)
    ids, mask = padded_batch(ROWS)
    where = "cpu" if inputs_on_cpu else device
    settings = {**GREEDY, "max_new_tokens": 14, **SETTINGS[name], "attention_mask": mask.to(where)}
    texts = away.generate(ids.to(where), **settings).sequences[:, ids.shape[1] :].tolist()
    if device.type == "sim" or not SETTINGS[name]["do_sample"]:
        assert texts == expected


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "hydra++"])
def test_a_model_over_two_devices(on_cpu, device, kind):
    """As accelerate spreads it; a GPU alone is given twice."""
    from accelerate import dispatch_model

    first = device
    second = torch.device(device.type, 1 if device.type == "sim" else 0)
    places = {
        "model.embed_tokens": first,
        "model.rotary_emb": first,
        "model.norm": second,
        "lm_head": second,
    }
    for number in range(on_cpu.info.num_layers):
        places[f"model.layers.{number}"] = first if number < 3 else second
    model = copy.deepcopy(on_cpu.model)
    spread = Target(dispatch_model(model, places, main_device=first, force_hooks=True))
    head = head_for(on_cpu, kind).to(spread.device)
    expected, _ = seeded_text(SpeculativeLM(on_cpu))
    for tree in ("branch:2x2", "dynamic:8:3:2"):
        lm = SpeculativeLM.from_pretrained(spread, head, tree=tree, compile=False, adaptive=False)
        assert seeded_text(lm)[0] == expected


@RECORDED
@pytest.mark.parametrize("slots", [None, 2])
def test_what_prompts_share(lms, compile, slots):
    beginning = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    rows = [torch.cat([beginning, torch.tensor(more)]) for more in ([1], [2, 3], [1], [4, 5, 6])]
    here, away = lms("eagle3", compile, tree="chain:3")
    expected, _ = seeded_text(SpeculativeLM(here.target), rows)
    assert seeded_text(here, rows)[0] == expected
    assert seeded_text(away, rows, max_batch_size=slots)[0] == expected


@RECORDED
def test_a_stream_records_in_a_thread_of_its_own(lms, device, compile):
    here, away = lms("eagle3", compile, tree="chain:3")
    [expected] = seeded_text(SpeculativeLM(here.target), ROWS[1:2], tokens=40)[0]
    for _ in range(2):  # recorded, then replayed in another thread
        rounds = away.stream(ROWS[1][None].to(device), **GREEDY | {"max_new_tokens": 40})
        assert list(itertools.chain.from_iterable(rounds)) == expected


@pytest.mark.parametrize(
    ("whose", "place", "compile"),
    [
        *itertools.product(["target", "head"], ["in place", "elsewhere"], [True]),
        ("target", "elsewhere", False),
        ("head", "elsewhere", False),
    ],
)
def test_weights_that_change_are_not_read_where_they_were(
    on_cpu, head_there, device, compile, whose, place
):
    """Between two generations: what was recorded before is not replayed."""
    model = copy.deepcopy(on_cpu.model)
    target = Target(copy.deepcopy(model).to(device))
    head = head_there("eagle3")
    options = {"tree": "chain:3", "adaptive": False}

    def answer(lm):
        proposals = Proposals()
        lm.observers[:] = [proposals]
        return seeded_text(lm, tokens=20)[0], proposals.drafts

    lm = SpeculativeLM.from_pretrained(target, head, compile=compile, **options)
    text_before, drafts_before = answer(lm)
    layer = target.modules.lm_head if whose == "target" else head.lm_head
    shifted = layer.weight.detach().roll(1, 0)
    if place == "in place":
        layer.weight.data.copy_(shifted)
    else:
        layer.weight = torch.nn.Parameter(shifted, requires_grad=False)
    if whose == "target":
        weight = model.get_output_embeddings().weight
        weight.data.copy_(weight.detach().roll(1, 0))
    text_after, drafts_after = answer(lm)
    assert text_after == seeded_text(SpeculativeLM(Target(model)), tokens=20)[0]
    assert (text_after != text_before) == (whose == "target")
    fresh = SpeculativeLM.from_pretrained(target, head, compile=False, **options)
    assert drafts_before != drafts_after == answer(fresh)[1]


@RECORDED
def test_a_generation_inside_another_leaves_its_results(lms, there, compile):
    """A callback generates after each round, between what a recording left and its use."""
    here, away = lms("eagle3", compile, tree="chain:3")
    _, alone = seeded_text(away, ROWS[1:2], tokens=30)
    recordings = getattr(there.engine.runner, "recordings", {})
    inside = []

    def generate_inside(_):
        if inside:
            return
        inside.append(True)
        before = len(recordings)
        seeded_text(away, ROWS[2:], tokens=8)
        # a replay could write where the outer generation's results lie
        assert len(recordings) == before
        inside.clear()

    away.observers.append(EachRound(generate_inside))
    texts, output = seeded_text(away, ROWS[1:2], tokens=30)
    assert texts == seeded_text(SpeculativeLM(here.target), ROWS[1:2], tokens=30)[0]
    assert output.stats.rows == alone.stats.rows
