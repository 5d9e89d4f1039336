"""Drafts without a trained head: whatever the source, the text is the target's; and each drafts
what its spec says."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from helpers import (
    build_t5,
    check_identity,
    continued,
    generated,
    head_for,
    other_model,
    random_ids,
)
from messages import refused

from headstart.heads import CheckpointMetadata
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.datastore import TOKENS_FILE, read_datastore, write_datastore
from headstart.inference.drafters.history import HistoryDrafter
from headstart.inference.drafters.specs import History, SmallerModel, drafter_spec
from headstart.inference.drafters.text_index import SEPARATOR, TextIndex
from headstart.inference.targets.loading import load_tokenizer, tokenizer_provenance
from headstart.inference.trees.tree_spec import DynamicShape, TreeShape

VOCAB = 20


def corpus():
    chance = random.Random(0)
    return [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 40))] for _ in range(30)]


def drafter_by_word(word, target):
    """By a word of the command line, or what needs a file or a model."""
    if word == "model":
        return make_drafter(target, other_model(target))
    if word == "retrieval":
        index = TextIndex(1000)
        for text in corpus():
            index.add([*text, SEPARATOR])
        return HistoryDrafter(12, 6, corpus=index)
    if word == "hybrid":
        head = head_for(target, "medusa", num_heads=3)
        return HistoryDrafter(6, 4, TextIndex(99), other=make_drafter(target, head=head))
    return make_drafter(target, word)


@pytest.mark.parametrize(
    ("tree", "do_sample"),
    [
        ("chain:1", False),
        ("chain:3", False),
        ("branch:2x1x1", False),
        ("dynamic:4:3:1", False),
        ("drawn:chain:3", True),
    ],
)
@pytest.mark.parametrize("slots", [None, 2])
def test_a_model_that_drafts_for_itself_is_always_right(target, tree, do_sample, slots):
    """Its cache holds what was written, and its drafts attend to their paths."""
    rows = [random_ids(VOCAB, length, seed=length) for length in (1, 6, 11, 3, 8)]
    lm = SpeculativeLM(target, make_drafter(target, target, tree))
    returned = lm.drafter.depth + 1
    settings = {"do_sample": do_sample, "generator": torch.Generator().manual_seed(0)}
    settings |= {"max_new_tokens": 1 + 4 * returned, "max_batch_size": slots}
    _, output = continued(lm, rows, "right", **settings)
    assert {record.returned for row in output.stats.rows for record in row} == {returned}


@pytest.mark.parametrize(
    "content", [b"\x93NUMPY\1\0\3\0(((", b"PK\3\4", b"", b"x", [], [[1, 2]], [0.5]]
)
def test_a_datastore_that_holds_no_list_of_tokens_is_refused(tmp_path, content):
    write_datastore(tmp_path, [[1, 2, 3]], "words")
    file = tmp_path / TOKENS_FILE
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        np.save(file, np.array(content))
    with refused(TOKENS_FILE):
        read_datastore(tmp_path)


def test_a_datastore_holds_its_texts_one_after_the_other(tmp_path):
    write_datastore(tmp_path, [[1, 2], [], [3]], "words")
    np.save(tmp_path / "order.npy", np.arange(5))  # of an earlier version
    tokens, tokenizer = read_datastore(tmp_path)
    assert tokens.tolist() == [1, 2, SEPARATOR, 3, SEPARATOR] and tokenizer == "words"


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("history", History()),
        ("history:7:5", History(nodes=7, length=5)),
        ("prompt-lookup", History(earlier=False)),
        ("prompt_lookup:5", History(5, earlier=False)),
        ("retrieval:store", History(folder="store")),
        ("retrieval:a:b:9", History(nodes=9, folder="a:b")),
        ("model:org/small", SmallerModel("org/small")),
        ("org/PARD-Qwen3-0.6B", SmallerModel("org/PARD-Qwen3-0.6B")),
    ],
)
def test_a_drafter_is_an_object_in_python_and_text_on_a_command_line(text, spec):
    assert drafter_spec(text) == spec


def test_several_trees_are_a_list_of_objects_or_text(target):
    objects = [TreeShape.chain(2), DynamicShape(6, 2, 2)]
    for trees, text in ((objects, "chain:2|dynamic:6:2:2"), (objects[:1], "chain:2")):
        assert repr(make_drafter(target, target, trees)) == repr(make_drafter(target, target, text))
    assert make_drafter(target, target, [[0], [0, 0]]).max_nodes == 3
    with refused("list of paths"):
        make_drafter(target, target, [TreeShape.chain(2), "chain:3"])


@pytest.mark.parametrize("word", ["prompt-lookup", "retrieval"])
def test_what_is_looked_up_in_is_the_whole_text(target, word):
    """From the prompt's first token on, prompts of one token too."""
    lm = SpeculativeLM(target, drafter_by_word(word, target))
    for prompt in ([5], [5, 6], [1, 2, 3, 1, 2]):
        written = generated(lm, torch.tensor([prompt]), max_new_tokens=15).sequences[0].tolist()
        text = lm.drafter.rows[0].text
        assert text.last(text.end)[: len(written)] == written


@pytest.mark.parametrize("word", ["prompt-lookup", "retrieval", "hybrid", "model"])
def test_a_fresh_drafter_is_independent(target, word):
    """Continuous batching reads a new prompt with it while the other rows continue."""

    def state(drafter):
        if word == "model":
            cache = drafter.model_state.progress.state.cache
            return [block.clone() for block in cache.blocks], cache.lengths_B.clone()
        return [row.text.last(99) for row in drafter.rows]

    drafter = drafter_by_word(word, target)
    generated(SpeculativeLM(target, drafter), torch.tensor([[1, 2, 3]]), max_new_tokens=5)
    before = state(drafter)
    generated(SpeculativeLM(target, drafter.fresh()), torch.tensor([[9]]), max_new_tokens=5)
    torch.testing.assert_close(state(drafter), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("prompt-lokup", "'prompt-lokup' history prompt-lookup"),
        ("prompt-lookup:1", "2 nodes"),
        ("prompt-lookup:a", "prompt-lookup[:NODES"),
        ("prompt-lookup:12:10:3", "prompt-lookup[:NODES"),
        ("lookahead:2:3:2", "'lookahead:2:3:2' history"),
        ("retrieval", "datastore"),
        ("retrieval:nowhere", "'nowhere'"),
        ("model", "model"),
    ],
)
def test_what_is_no_drafter_is_refused(target, word, words):
    with refused(words):
        SpeculativeLM.from_pretrained(target, drafter=word, adaptive=False)


def test_another_vocabulary_is_refused(target, tiny_target):
    with refused("vocabulary"):
        make_drafter(target, tiny_target(vocab_size=VOCAB + 1))


@pytest.fixture
def tokenizer_hash(target_folder):
    return tokenizer_provenance(load_tokenizer(target_folder))["tokenizer"]


@pytest.mark.parametrize("token", [None, 300, -7])
def test_a_datastore_of_another_tokenizer_is_refused(
    target_folder, tokenizer_hash, tmp_path, token
):
    """By its name, or by a token that the target has not."""
    text = [1, 2] if token is None else [1, token, 2]
    write_datastore(tmp_path, [text], "another" if token is None else tokenizer_hash)
    with refused("another" if token is None else str(token)):
        SpeculativeLM.from_pretrained(target_folder, drafter=f"retrieval:{tmp_path}")


def test_an_empty_corpus_is_refused(tmp_path):
    with refused("corpus"):
        write_datastore(tmp_path, [[], []], "words")


def test_the_hub_is_not_asked_for_models_that_were_made_in_memory(target, monkeypatch):
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda name, **_: pytest.fail(name)
    )
    make_drafter(target, target)  # compares the tokenizers of models that have some
    with refused(repr(target.name)):
        _ = target.tokenizer


def with_draft_model(tmp_path, tokenizer, models, **options):
    """A decoder of two models in folders, the first as the target, the other as its draft."""
    for name, model in zip(("target", "draft"), models, strict=True):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    options |= {"drafter": f"model:{tmp_path / 'draft'}", "adaptive": False}
    return SpeculativeLM.from_pretrained(tmp_path / "target", dtype="float64", **options)


@pytest.mark.parametrize(
    ("ours", "theirs", "tree"),
    [
        (258, 272, "drawn:chain:3"),
        (272, 258, "branch:2x2"),
        (272, 258, "drawn:chain:3"),
        (272, 320, "chain:3"),
    ],
)
def test_a_draft_model_may_pad_its_vocabulary_to_another_size(
    tiny_target, tokenizer, tmp_path, ours, theirs, tree
):
    """Tokens that it does not have are written, and prompts hold them."""
    models = [tiny_target(vocab_size=size, seed=size).model for size in (ours, theirs)]
    lm = with_draft_model(tmp_path, tokenizer, models, tree=tree)
    ids = random_ids(ours, 3, 9, seed=5)
    ids[:, -3:] = ours - 1
    for bias in ({}, {"sequence_bias": {(ours - 1,): 3.0}}):
        settings = {"max_new_tokens": 40, "pad_token_id": 257, "eos_token_id": [], **bias}
        check_identity(lm, list(ids), **settings)
        sampled = generated(lm, ids, do_sample=True, max_batch_size=2, **settings).sequences
        assert sampled.shape[1] == 49 and int(sampled.max()) < ours


def test_a_small_encoder_decoder_may_pad_its_vocabulary_to_another_size(tokenizer, tmp_path):
    models = [build_t5(size, seed=size, layers=1, eos_token_id=None) for size in (272, 258)]
    lm = with_draft_model(tmp_path, tokenizer, models)
    ids = torch.tensor([[5, 271, 6, 265]])
    settings = {"max_new_tokens": 30, "sequence_bias": {(271,): 2.0}}
    expected = generated(lm.target.model, ids, **settings)
    assert torch.equal(generated(lm, ids, **settings).sequences, expected)


@pytest.mark.parametrize("name", ["store", "a:b", "C:store", "12:4", "with space"])
def test_a_folder_may_have_colons_in_its_name(target_folder, tokenizer_hash, tmp_path, name):
    write_datastore(tmp_path / name, [[1, 2, 3, 4, 1, 2, 3]], tokenizer_hash)
    for options, nodes in (("", 12), (":7", 7), (":7:3", 7)):
        drafter = f"retrieval:{tmp_path / name}{options}"
        lm = SpeculativeLM.from_pretrained(target_folder, drafter=drafter, adaptive=False)
        assert lm.drafter.max_nodes == nodes


@pytest.mark.parametrize(
    "tree",
    [
        "chain:1000000000",
        "branch:1000x1000x1000",
        "dynamic:1000000000:5:5",
        "dynamic:60:1000000000:10",
        "dynamic:60:7:1000000000",
        "stop:0.4:chain:1000000000",
        "drawn:" * 2000 + "chain:3",
        "tree.json",
        "drawn:tree.json",
        [[0]] * 5000,
        [[10**9]],
        [[0] * 3000],
        [5],
        [{}],
        ["a"],
    ],
    ids=lambda tree: str(tree)[:30],
)
def test_a_stored_tree_that_is_huge_or_a_file_is_refused_at_once(
    target, medusa_head, tree, tmp_path, monkeypatch
):
    """A stranger wrote it; nothing is read or allocated for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree.json").write_text("[[0]]")
    folder = str(tmp_path / "head")
    save_head(medusa_head, folder, CheckpointMetadata(tree=tree))
    began = time.monotonic()
    for given in (folder, load_head(folder)[0]):
        with refused("tree config.json"):
            SpeculativeLM.from_pretrained(target, head=given, compile=False, adaptive=False)
    assert time.monotonic() - began < 10
    SpeculativeLM.from_pretrained(target, folder, tree="chain:2", compile=False, adaptive=False)
