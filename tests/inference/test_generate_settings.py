"""What `generate` promises around the loop: processors, stopping, outputs, batches, and plain
`model.generate`."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    GREEDY,
    Oracle,
    calls_of,
    check_identity,
    continued,
    head_for,
    padded_batch,
    pairs,
    warnings_of,
    written_alone,
)
from messages import lacking, refused
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


@pytest.fixture
def deeper(tiny_target):
    """A target of three layers."""
    return tiny_target(vocab_size=VOCAB, layers=3)


@pytest.fixture
def eagle(deeper):
    return head_for(deeper, "eagle3", 0.2, depth=4)


@pytest.mark.parametrize("reads_text", [{}, {"repetition_penalty": 1.3}])
def test_scores_and_logits_are_those_of_generate(tiny_target, reads_text):
    target = tiny_target(vocab_size=VOCAB)
    truths = [written_alone(target.model, row, **reads_text) for row in ROWS]
    settings = {
        **GREEDY,
        **reads_text,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "eos_token_id": [truths[0][6], truths[1][9]],
    }
    alone = [target.model.generate(row[None], **settings) for row in ROWS]
    assert len({len(one.scores) for one in alone}) > 1
    lm = SpeculativeLM(target, Oracle(SHAPE, truths, VOCAB, wrong=0.2))
    texts, output = continued(lm, ROWS, **settings)
    assert len(output.scores) == len(output.logits) == len(texts[0])
    zeros_V = torch.zeros(VOCAB)
    for row, one in enumerate(alone):
        for ours, theirs in ((output.scores, one.scores), (output.logits, one.logits)):
            for place, scores_BV in enumerate(ours):
                expected_V = theirs[place][0] if place < len(theirs) else zeros_V
                # `generate` keeps scores in float32
                close = {"rtol": 0, "atol": 1e-5, "check_dtype": False}
                torch.testing.assert_close(scores_BV[row], expected_V, **close)
    _, unasked = continued(lm, ROWS)
    assert unasked.scores is None and unasked.logits is None


def test_several_sequences_of_one_prompt_differ_and_repeat_for_a_seed(deeper, eagle):
    lm = SpeculativeLM.from_pretrained(deeper, eagle, tree="drawn:branch:2x1", adaptive=False)
    texts = []
    for seed in (1, 1, 2):
        draws = torch.Generator().manual_seed(seed)
        settings = {"do_sample": True, "num_return_sequences": 5, "generator": draws}
        texts.append(continued(lm, [ROWS[3]] * 2, **settings)[0])
    assert len(texts[0]) == 10
    assert texts[0] == texts[1] != texts[2]
    assert len(set(map(tuple, texts[0]))) > 5


@pytest.mark.parametrize(
    ("acceptance", "told"), [("typical", True), ("typical:0.1:0.5", True), ("auto", False)]
)
def test_several_answers_of_typical_acceptance_are_one_and_that_is_told(
    deeper, eagle, acceptance, told
):
    lm = SpeculativeLM.from_pretrained(deeper, eagle, acceptance=acceptance, lossy=told)
    texts = []

    def answer():
        settings = {"do_sample": True, "num_return_sequences": 3}
        texts.extend(continued(lm, [ROWS[1]], **settings)[0])
        continued(lm, ROWS, do_sample=True)  # prompts that differ

    said = [text for text in warnings_of(answer) if not lacking(text, "random numbers")]
    assert [lacking(text, "1 prompts 3 rows") for text in said] == [[]] * told
    assert (texts[0] == texts[1] == texts[2]) == told


def test_thresholds_of_typical_acceptance_decide_how_much_is_accepted(deeper, eagle):
    lengths = []
    for acceptance in ("typical:1:1e9", "typical", "typical:0.09:0.3", "typical:1e-9:1"):
        lm = SpeculativeLM.from_pretrained(
            deeper, eagle, acceptance=acceptance, lossy=True, adaptive=False
        )
        texts, output = continued(lm, [ROWS[1]], do_sample=True)
        lengths.append(output.stats.acceptance_length)
        if acceptance == "typical:1:1e9":  # no probability is above 1
            assert texts == [written_alone(deeper.model, ROWS[1])]
    assert lengths[0] == 1.0 < lengths[3] and lengths[1] == lengths[2]


@pytest.mark.parametrize(
    "acceptance",
    ["typical:0.1", "typical:0:0.3", "typical:2:0.3", "typical:0.1:x", "block:0.1:0.3"],
)
def test_thresholds_that_are_none_are_named(deeper, eagle, acceptance):
    tree = "drawn:chain:3" if acceptance.startswith("block") else "chain:3"
    rule, _, thresholds = acceptance.partition(":")
    with refused(f"'{thresholds}' acceptance {rule}"):
        SpeculativeLM.from_pretrained(deeper, eagle, tree=tree, acceptance=acceptance, lossy=True)


@pytest.mark.parametrize(
    ("size", "kind", "reader"), pairs([1, 4, 5], ["eagle3", "medusa"], ["target", "head"])
)
def test_prompts_read_in_chunks_are_prompts_read_at_once(deeper, monkeypatch, kind, reader, size):
    head = head_for(deeper, kind, 0.2)
    lm = SpeculativeLM.from_pretrained(deeper, head, tree="dynamic:9:3:3", adaptive=False)
    whole = check_identity(lm, ROWS)
    if reader == "target":
        monkeypatch.setattr(prefill, "PREFILL_TOKENS", size)
    else:
        monkeypatch.setattr(draft_model_state, "CHUNK_TOKENS", size)
    chunked = check_identity(lm, ROWS)
    assert chunked.stats.rows == whole.stats.rows  # so the head has seen the same


def test_rows_that_have_ended_are_in_no_forward(deeper, eagle, monkeypatch):
    lm = SpeculativeLM.from_pretrained(deeper, eagle, tree="chain:2", adaptive=False)
    calls = calls_of(monkeypatch, deeper.engine, "forward_tree")
    ends = [written_alone(deeper.model, ROWS[0])[6], written_alone(deeper.model, ROWS[1])[9]]
    output = check_identity(lm, ROWS, max_new_tokens=40, eos_token_id=ends)
    sizes = [len(tree.tokens_BN) for tree, *_ in calls]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 1
    assert sum(sizes) == output.stats.rounds


@pytest.mark.parametrize(
    "tree", ["dynamic:12:3:3", [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0], [1, 0]]]
)
def test_in_a_batch_the_heads_own_tree_shrinks_until_the_batch_goes_plain(
    deeper, eagle, monkeypatch, tmp_path, tree
):
    here = {"fastest": {machine_key(deeper.device, compiled=True): tree}}
    save_head(eagle, tmp_path, CheckpointMetadata(measured=here))
    lm = SpeculativeLM.from_pretrained(deeper, tmp_path, adaptive=False)
    budget = lm.drafter.max_nodes
    calls = calls_of(monkeypatch, deeper.engine, "forward_tree")
    for count in (1, 2, 3, budget, budget + 1):
        calls.clear()
        check_identity(lm, [ROWS[number % 4] for number in range(count)], max_new_tokens=9)
        sizes = [tree.tokens_BN.shape for tree, *_ in calls]
        assert sizes[0] == (count, max(1, budget // count))
        assert all(rows * nodes <= max(rows, budget) for rows, nodes in sizes)
    explicit = SpeculativeLM.from_pretrained(deeper, tmp_path, tree=tree, adaptive=False)
    calls.clear()
    check_identity(explicit, ROWS)
    assert all(tree.tokens_BN.shape[1] == budget for tree, *_ in calls)


@pytest.mark.parametrize("source", ["head", "folder", "the folder's own code", "drafter"])
def test_a_plain_model_generates_with_what_drafts(deeper, eagle, tmp_path, source):
    save_head(eagle, tmp_path / "head", CheckpointMetadata(tree="dynamic:9:3:3"))
    given = {
        "head": {"custom_generate": custom_generate(eagle)},
        "folder": {"custom_generate": custom_generate(tmp_path / "head")},
        "the folder's own code": {
            "custom_generate": str(tmp_path / "head"),
            "trust_remote_code": True,
        },
        "drafter": {"custom_generate": custom_generate(drafter="prompt-lookup")},
    }[source]
    ids, mask = padded_batch(ROWS)
    settings = {**GREEDY, **given, "attention_mask": mask}
    written = deeper.model.generate(ids, **settings)
    assert isinstance(written, torch.Tensor)
    expected = [written_alone(deeper.model, row) for row in ROWS]
    assert written[:, ids.shape[1] :].tolist() == expected
    output = deeper.model.generate(ids, return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, written) and output.stats.rounds > 0


def test_a_heads_folder_that_was_moved_is_told(deeper, eagle, tmp_path):
    save_head(eagle, tmp_path / "head", CheckpointMetadata(tree="chain:2"))
    moved = (tmp_path / "head").rename(tmp_path / "moved")
    with refused(str(tmp_path / "head"), "custom_generate(FOLDER)"):
        written_alone(deeper.model, ROWS[0], custom_generate=str(moved), trust_remote_code=True)


class Forbids(LogitsProcessor):
    """All tokens, once the text is long enough."""

    def __call__(self, input_ids, scores):
        return scores - torch.inf if input_ids.shape[1] > 10 else scores


@pytest.mark.parametrize("do_sample", [False, True])
def test_logits_that_are_no_numbers_are_told(deeper, eagle, do_sample):
    lm = SpeculativeLM.from_pretrained(deeper, eagle, tree="chain:2", adaptive=False)
    text = written_alone(deeper.model, ROWS[0])
    embedding_D = deeper.model.get_input_embeddings().weight.data[text[2]]
    healthy_D = embedding_D.clone()
    embedding_D.fill_(torch.nan)
    best = {"do_sample": True, "top_k": 1} if do_sample else {}
    with refused(f"target {text.index(text[2]) + 1} row 0 NaN"):
        continued(lm, ROWS[:1], **best)
    embedding_D.copy_(healthy_D)
    check_identity(lm, ROWS[:1])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("tree", "acceptance"),
    [("chain:2", "auto"), ("drawn:chain:2", "token"), ("drawn:chain:2", "auto")],
)
def test_processors_that_leave_no_token_are_told(deeper, eagle, do_sample, tree, acceptance):
    options = {"tree": tree, "acceptance": acceptance, "adaptive": False}
    lm = SpeculativeLM.from_pretrained(deeper, eagle, **options)
    settings = {"do_sample": do_sample, "logits_processor": [Forbids()]}
    with refused("forbid 8 row 0"):
        continued(lm, ROWS[:1], **settings)
    with refused("forbid 0 row 1"):
        continued(lm, ROWS[:2], **settings)
    check_identity(lm, ROWS[:1])


def test_a_started_cache_and_embeddings_are_refused(deeper, eagle):
    model = deeper.model
    settings = {**GREEDY, "custom_generate": custom_generate(eagle)}
    name = deeper.cache_interface.name
    with torch.no_grad():
        cache = model(ROWS[0][None], use_cache=True)[name]
    with refused("cache 3"):
        model.generate(ROWS[1][None], **{name: cache}, **settings)
    embeds = model.get_input_embeddings()(ROWS[0][None])
    with refused("inputs_embeds"):
        model.generate(inputs_embeds=embeds, **settings)


@pytest.mark.parametrize("tree", ["chain:4", "dynamic:12:4:3"])
def test_a_text_that_fills_all_positions_is_written_to_its_end(tree):
    """Trees reach past the last position of a model that keeps a table of them; what is there is
    never returned."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).double().eval()
    for parameter in model.parameters():
        parameter.data *= 4
    target = Target(model)
    head = build_head("eagle", {"depth": 4, "start": "random"}, target.info).double().eval()
    lm = SpeculativeLM.from_pretrained(target, head, tree=tree, adaptive=False)
    for length in (1, 20, 31):
        row = torch.arange(1, 1 + length) % 23 + 1
        check_identity(lm, [row], max_new_tokens=32 - length, eos_token_id=[])
    with refused("20 13 32 positions"):
        continued(lm, [torch.arange(1, 21)], max_new_tokens=13)
