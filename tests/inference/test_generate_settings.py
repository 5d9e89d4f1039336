"""What `generate` promises around the loop: processors, stopping, outputs, batches, and plain
`model.generate`."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers import calls_of, check_identity, head_for, padded_batch, pairs
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import save_head
from headstart.inference import SpeculativeLM, Target, TreeShape, custom_generate
from headstart.inference.drafters import draft_model_state
from headstart.inference.rounds import prefill
from headstart.inference.tuning.machine import machine_key

VOCAB = 31
ROWS = [
    torch.randint(1, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in (3, 12, 1, 7)
]
SHAPE = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 0, 0, 0]])
PLAIN = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


def stock(target, row, **settings):
    """What `generate` writes for one row alone."""
    settings = {**PLAIN, **settings}
    return target.model.generate(row[None], attention_mask=torch.ones_like(row[None]), **settings)[
        0, len(row) :
    ]


def batch(rows):
    """Arguments of `generate`."""
    input_ids, mask = padded_batch(rows)
    return {"input_ids": input_ids, "attention_mask": mask}


def a_head(target, kind="eagle3"):
    options = {"eagle3": {"depth": 4}, "medusa": {"num_heads": 3}}
    return head_for(target, kind, 0.2, **options[kind])


@pytest.mark.parametrize("reads_text", [{}, {"repetition_penalty": 1.3}])
def test_scores_and_logits_are_those_of_generate(tiny_target, tools, reads_text):
    target = tiny_target(vocab_size=VOCAB)
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    eos = [
        int(stock(target, ROWS[0], **reads_text)[6]),
        int(stock(target, ROWS[1], **reads_text)[9]),
    ]
    settings = {**PLAIN, **asked, **reads_text, "eos_token_id": eos}
    alone = [
        target.model.generate(row[None], attention_mask=torch.ones_like(row[None]), **settings)
        for row in ROWS
    ]
    truths = [stock(target, row, **reads_text).tolist() for row in ROWS]
    input_ids, mask = padded_batch(ROWS)
    lm = SpeculativeLM(target, tools.Oracle(SHAPE, truths, VOCAB, wrong=0.2))
    output = lm.generate(input_ids, attention_mask=mask, **settings)
    assert (
        len(output.scores) == len(output.logits) == output.sequences.shape[1] - input_ids.shape[1]
    )
    lengths = {len(one.scores) for one in alone}
    assert len(lengths) > 1
    for row, one in enumerate(alone):
        for place in range(len(output.scores)):
            for ours, theirs in ((output.scores, one.scores), (output.logits, one.logits)):
                expected = (
                    theirs[place][0]
                    if place < len(theirs)
                    else torch.zeros(VOCAB, dtype=torch.float64)
                )
                # `generate` keeps scores in float32
                torch.testing.assert_close(
                    ours[place][row], expected, rtol=0, atol=1e-5, check_dtype=False
                )
    unasked = lm.generate(input_ids, attention_mask=mask, **PLAIN)
    assert unasked.scores is None and unasked.logits is None


def test_several_sequences_of_one_prompt_differ_and_repeat_for_a_seed(tiny_target):
    target = tiny_target(vocab_size=VOCAB)
    lm = SpeculativeLM.from_pretrained(
        target, head=a_head(target), tree="drawn:branch:2x1", adaptive=False
    )
    settings = {
        "max_new_tokens": 9,
        "do_sample": True,
        "pad_token_id": 0,
        "num_return_sequences": 5,
    }
    first, again, other = (
        lm.generate(
            torch.stack([ROWS[3]] * 2), generator=torch.Generator().manual_seed(seed), **settings
        ).sequences
        for seed in (1, 1, 2)
    )
    assert first.shape == (10, len(ROWS[3]) + 9)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(row) for row in first.tolist()}) > 5


@pytest.mark.parametrize(
    ("acceptance", "told"), [("typical", True), ("typical:0.1:0.5", True), ("auto", False)]
)
def test_several_answers_of_typical_acceptance_are_one_and_that_is_told(
    tiny_target, acceptance, told
):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    lm = SpeculativeLM.from_pretrained(
        target, head=a_head(target), acceptance=acceptance, lossy=told
    )
    settings: dict = {**PLAIN, "do_sample": True, "num_return_sequences": 3}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        written = lm.generate(
            ROWS[1][None], attention_mask=torch.ones_like(ROWS[1][None]), **settings
        ).sequences
        lm.generate(**batch(ROWS), **PLAIN | {"do_sample": True})  # prompts that differ
    said = [str(each.message) for each in given if "draws no random numbers" in str(each.message)]
    assert ["1 different prompts in 3 rows" in each for each in said] == [True] * told
    assert (len({tuple(row.tolist()) for row in written}) == 1) == told


def test_thresholds_of_typical_acceptance_decide_how_much_is_accepted(tiny_target):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    row_1T = ROWS[1][None]
    lengths = []
    for acceptance in ("typical:1:1e9", "typical", "typical:0.09:0.3", "typical:1e-9:1"):
        lm = SpeculativeLM.from_pretrained(
            target, head=a_head(target), acceptance=acceptance, lossy=True, adaptive=False
        )
        out = lm.generate(
            row_1T, attention_mask=torch.ones_like(row_1T), **PLAIN | {"do_sample": True}
        )
        lengths.append(out.stats.acceptance_length)
        if acceptance == "typical:1:1e9":  # no probability is above 1
            assert out.sequences[0, row_1T.shape[1] :].tolist() == stock(target, ROWS[1]).tolist()
    assert lengths[0] == 1.0 < lengths[3] and lengths[1] == lengths[2]


@pytest.mark.parametrize(
    "acceptance",
    ["typical:0.1", "typical:0:0.3", "typical:2:0.3", "typical:0.1:x", "block:0.1:0.3"],
)
def test_thresholds_that_are_none_are_named(tiny_target, acceptance):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    tree = "drawn:chain:3" if acceptance.startswith("block") else "chain:3"
    with pytest.raises(
        ValueError, match=f"unknown options '{acceptance.partition(':')[2]}' of the acceptance rule"
    ):
        SpeculativeLM.from_pretrained(
            target, head=a_head(target), tree=tree, acceptance=acceptance, lossy=True
        )


@pytest.mark.parametrize(
    ("size", "kind", "reader"), pairs([1, 4, 5], ["eagle3", "medusa"], ["target", "head"])
)
def test_prompts_read_in_chunks_are_prompts_read_at_once(
    tiny_target, monkeypatch, kind, reader, size
):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    lm = SpeculativeLM.from_pretrained(
        target, head=a_head(target, kind), tree="dynamic:9:3:3", adaptive=False
    )
    whole = check_identity(lm, ROWS)
    if reader == "target":
        monkeypatch.setattr(prefill, "PREFILL_TOKENS", size)
    else:
        monkeypatch.setattr(draft_model_state, "CHUNK_TOKENS", size)
    chunked = check_identity(lm, ROWS)
    assert chunked.stats.rows == whole.stats.rows  # so the head has seen the same


def test_rows_that_have_ended_are_in_no_forward(tiny_target, monkeypatch):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    lm = SpeculativeLM.from_pretrained(target, head=a_head(target), tree="chain:2", adaptive=False)
    calls = calls_of(monkeypatch, target.engine, "forward_tree")
    eos = [int(stock(target, ROWS[0])[6]), int(stock(target, ROWS[1])[9])]
    output = check_identity(lm, ROWS, max_new_tokens=40, eos_token_id=eos)
    sizes = [len(tree.tokens_BN) for tree, *_ in calls]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 1
    assert sum(sizes) == output.stats.rounds


@pytest.mark.parametrize(
    "tree", ["dynamic:12:3:3", [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [1, 0]]]
)
def test_in_a_batch_the_heads_own_tree_shrinks_until_the_batch_goes_plain(
    tiny_target, monkeypatch, tmp_path, tree
):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    here = {"fastest": {machine_key(target.device, compiled=True): tree}}
    save_head(a_head(target), tmp_path / "head", CheckpointMetadata(measured=here))
    lm = SpeculativeLM.from_pretrained(target, tmp_path / "head", adaptive=False)
    budget = lm.drafter.max_nodes
    calls = calls_of(monkeypatch, target.engine, "forward_tree")
    for count in (1, 2, 3, budget, budget + 1):
        calls.clear()
        check_identity(lm, [ROWS[number % 4] for number in range(count)], max_new_tokens=9)
        sizes = [tree.tokens_BN.shape for tree, *_ in calls]
        assert sizes[0] == (count, max(1, budget // count))
        assert all(rows * nodes <= max(rows, budget) for rows, nodes in sizes)
    explicit = SpeculativeLM.from_pretrained(target, tmp_path / "head", tree=tree, adaptive=False)
    calls.clear()
    check_identity(explicit, ROWS)
    assert all(tree.tokens_BN.shape[1] == budget for tree, *_ in calls)


@pytest.mark.parametrize("source", ["head", "folder", "the folder's own code", "drafter"])
def test_a_plain_model_generates_with_what_drafts(tiny_target, tmp_path, source):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    head = a_head(target)
    save_head(head, tmp_path / "head", CheckpointMetadata(tree="dynamic:9:3:3"))
    given = {
        "head": {"custom_generate": custom_generate(head)},
        "folder": {"custom_generate": custom_generate(tmp_path / "head")},
        "the folder's own code": {"custom_generate": str(tmp_path / "head")},
        "drafter": {"custom_generate": custom_generate(drafter="prompt-lookup")},
    }[source]
    if "own code" in source:
        given["trust_remote_code"] = True
    rows = batch(ROWS)
    written = target.model.generate(**rows, **given, **PLAIN)
    assert isinstance(written, torch.Tensor)
    expected = [stock(target, row).tolist() for row in ROWS]
    assert written[:, rows["input_ids"].shape[1] :].tolist() == expected
    output = target.model.generate(**rows, **given, return_dict_in_generate=True, **PLAIN)
    assert torch.equal(output.sequences, written) and output.stats.rounds > 0


def test_a_heads_folder_that_was_moved_is_told(tiny_target, tmp_path):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    save_head(a_head(target), tmp_path / "head", CheckpointMetadata(tree="chain:2"))
    (tmp_path / "head").rename(tmp_path / "moved")
    with pytest.raises(
        ValueError,
        match=r"names the folder .*head.*in which it was saved.*custom_generate\(FOLDER\)",
    ):
        target.model.generate(
            ROWS[0][None], custom_generate=str(tmp_path / "moved"), trust_remote_code=True, **PLAIN
        )


class Forbids(LogitsProcessor):
    """All tokens, once the text is long enough."""

    def __call__(self, input_ids, scores):
        return scores - torch.inf if input_ids.shape[1] > 10 else scores


def test_logits_that_are_no_numbers_are_told(tiny_target, monkeypatch):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    lm = SpeculativeLM.from_pretrained(target, head=a_head(target), tree="chain:2", adaptive=False)
    forward, calls = target.engine.forward_tree, []

    def broken(*args):
        output = forward(*args)
        calls.append(1)
        if len(calls) > 3:
            output.logits_BNV[:, :, 7] = torch.nan
        return output

    for settings in (PLAIN, {**PLAIN, "do_sample": True}):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(target.engine, "forward_tree", broken)
            with pytest.raises(ValueError, match=r"logits for new token \d+ of row 0 contain NaN"):
                lm.generate(ROWS[0][None], **settings)
        check_identity(lm, ROWS[:1])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("tree", "acceptance"),
    [("chain:2", "auto"), ("drawn:chain:2", "token"), ("drawn:chain:2", "auto")],
)
def test_processors_that_leave_no_token_are_told(tiny_target, do_sample, tree, acceptance):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    lm = SpeculativeLM.from_pretrained(
        target, head=a_head(target), tree=tree, acceptance=acceptance, adaptive=False
    )
    settings = {**PLAIN, "do_sample": do_sample, "logits_processor": [Forbids()]}
    with pytest.raises(
        ValueError, match="forbid every token at new token 8 of row 0; leave at least one allowed"
    ):
        lm.generate(ROWS[0][None], **settings)
    with pytest.raises(ValueError, match="forbid every token at new token 0 of row 1"):
        lm.generate(**batch(ROWS[:2]), **settings)
    check_identity(lm, ROWS[:1])


def test_a_started_cache_and_embeddings_are_refused(tiny_target):
    target = tiny_target(vocab_size=VOCAB, layers=3)
    method = custom_generate(a_head(target))
    name = target.cache_interface.name
    with torch.no_grad():
        cache = target.model(ROWS[0][None], use_cache=True)[name]
    with pytest.raises(ValueError, match="a KV cache with 3 tokens cannot be continued"):
        target.model.generate(ROWS[1][None], **{name: cache}, custom_generate=method, **PLAIN)
    embeds = target.model.get_input_embeddings()(ROWS[0][None])
    with pytest.raises(ValueError, match="inputs_embeds are not supported"):
        target.model.generate(inputs_embeds=embeds, custom_generate=method, **PLAIN)


@pytest.mark.parametrize("tree", ["chain:4", "dynamic:12:4:3"])
def test_a_text_that_fills_all_positions_is_written_to_its_end(tree):
    """Trees reach past the last position of a model that keeps a table of them; what is there is
    never returned."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=24,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).double().eval()
    for parameter in model.parameters():
        parameter.data *= 4
    target = Target(model)
    head = build_head("eagle", {"depth": 4, "start": "random"}, target.info).double().eval()
    lm = SpeculativeLM.from_pretrained(target, head, tree=tree, adaptive=False)
    for length in (1, 20, 31):
        row = torch.arange(1, 1 + length) % 23 + 1
        check_identity(lm, [row], max_new_tokens=32 - length, eos_token_id=[])
    row = torch.arange(1, 21)[None]
    with pytest.raises(
        ValueError, match="a prompt of 20 tokens and 13 new ones do not fit the 32 positions"
    ):
        lm.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=13, do_sample=False)
