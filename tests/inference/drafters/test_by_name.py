"""Drafts without a trained head: whatever the source, the text is the target's; and each drafts
what its spec says."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from helpers import build_t5, head_for, other_model, padded_batch
from messages import refused

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.datastore import TOKENS_FILE, read_datastore, write_datastore
from headstart.inference.drafters.history import HistoryDrafter
from headstart.inference.drafters.specs import (
    REMOVED,
    SPECS,
    History,
    SmallerModel,
    drafter_spec,
)
from headstart.inference.drafters.text_index import SEPARATOR, TextIndex
from headstart.inference.targets.loading import load_tokenizer, tokenizer_provenance
from headstart.inference.trees.tree_spec import DynamicShape, TreeShape

VOCAB = 20


def corpus():
    chance = random.Random(0)
    return [[chance.randrange(VOCAB) for _ in range(chance.randrange(1, 40))] for _ in range(30)]


def source(word, target):
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
        other = SpeculativeLM.from_pretrained(target, head, adaptive=False).drafter
        return HistoryDrafter(6, 4, TextIndex(99), other=other)
    return make_drafter(target, word)


def prompts(count):
    """Of different lengths, and they repeat themselves."""
    chance = random.Random(1)
    rows = []
    for i in range(count):
        part = [chance.randrange(VOCAB) for _ in range(1 + 3 * i % 7)]
        rows.append(torch.tensor((part * 3)[: 1 + 5 * i % 13]))
    return rows


@pytest.mark.parametrize(
    "tree", ["chain:1", "chain:3", "branch:2x1x1", "dynamic:4:3:1", "drawn:chain:3"]
)
@pytest.mark.parametrize("slots", [None, 2])
def test_a_model_that_drafts_for_itself_is_always_right(target, tree, slots):
    """Its cache holds what was written, and its drafts attend to their paths."""
    rows = prompts(5)
    padded, mask = padded_batch(rows, "right")
    lm = SpeculativeLM(target, make_drafter(target, target, tree))
    depth = lm.drafter.depth
    for sampling in (False, True):
        generator = torch.Generator().manual_seed(0)
        settings = {"max_new_tokens": 1 + 4 * (depth + 1), "do_sample": sampling, "pad_token_id": 0}
        stats = lm.generate(
            padded, attention_mask=mask, max_batch_size=slots, generator=generator, **settings
        ).stats
        if not sampling or tree.startswith("drawn"):
            assert {record.returned for row in stats.rows for record in row} == {depth + 1}


UNREAD = (b"\x93NUMPY\1\0\3\0(((", b"PK\3\4", b"", b"x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((content, r"tokens\.npy cannot be read") for content in UNREAD),
        *((tokens, "make the datastore again") for tokens in ([], [[1, 2]], [0.5])),
    ],
)
def test_a_datastore_that_holds_no_list_of_tokens_is_refused(tmp_path, content, words):
    write_datastore(tmp_path, [[1, 2, 3]], "words")
    if isinstance(content, bytes):
        (tmp_path / TOKENS_FILE).write_bytes(content)
    else:
        np.save(tmp_path / TOKENS_FILE, np.array(content))
    with pytest.raises(ValueError, match=words):
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
    ],
)
def test_a_drafter_is_an_object_in_python_and_text_on_a_command_line(text, spec):
    assert drafter_spec(text) == spec


def test_objects_draft_what_their_text_does(target, tiny_target, tmp_path):
    prompt = torch.tensor([[1, 2, 3, 1, 2]])
    settings = {"max_new_tokens": 15, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    small = tiny_target(vocab_size=VOCAB, layers=1, seed=3)
    for drafter, expected in (
        (History(nodes=5, earlier=False), "prompt-lookup:5"),
        (small, None),
        (small.model, None),
    ):
        lm = SpeculativeLM.from_pretrained(target, drafter=drafter, adaptive=False)
        stats = lm.generate(prompt, **settings).stats
        assert stats.rounds > 0
        if expected is not None:
            other = SpeculativeLM.from_pretrained(target, drafter=expected, adaptive=False)
            assert repr(other.drafter) == repr(lm.drafter)
            assert other.generate(prompt, **settings).stats.rounds == stats.rounds
    with pytest.raises(ValueError, match=r"the drafter History\(.*takes no tree 'chain:3'"):
        SpeculativeLM.from_pretrained(target, drafter=History(), tree="chain:3")


def test_several_trees_are_a_list_of_objects_or_text(target):
    objects = [TreeShape.chain(2), DynamicShape(6, 2, 2)]
    drafters = [make_drafter(target, target, tree) for tree in (objects, "chain:2|dynamic:6:2:2")]
    assert repr(drafters[0]) == repr(drafters[1]) and len(drafters[0].trees) == 2
    assert repr(make_drafter(target, target, objects[:1])) == repr(
        make_drafter(target, target, "chain:2")
    )
    assert make_drafter(target, target, [[0], [0, 0]]).max_nodes == 3
    with refused("list of paths"):
        make_drafter(target, target, [TreeShape.chain(2), "chain:3"])


@pytest.mark.parametrize("word", ["prompt-lookup", "retrieval"])
def test_what_is_looked_up_in_is_the_whole_text(target, word):
    """From the prompt's first token on, prompts of one token too."""
    lm = SpeculativeLM(target, source(word, target))
    for prompt in ([5], [5, 6], [1, 2, 3, 1, 2]):
        written = (
            lm.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False)
            .sequences[0]
            .tolist()
        )
        text = lm.drafter.rows[0].text
        assert text.last(text.end)[: len(written)] == written


def test_a_fresh_drafter_is_independent(target):
    """Continuous batching reads a new prompt with it while the other rows continue."""

    def state(drafter):
        if word == "model":
            cache = drafter.model_state.progress.state.cache
            return [block.clone() for block in cache.blocks], cache.lengths_B.clone()
        return [row.text.last(99) for row in drafter.rows]

    for word in ("prompt-lookup", "retrieval", "hybrid", "model"):
        drafter = source(word, target)
        lm = SpeculativeLM(target, drafter)
        lm.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False)
        before = state(drafter)
        SpeculativeLM(target, drafter.fresh()).generate(
            torch.tensor([[9]]), max_new_tokens=5, do_sample=False
        )
        torch.testing.assert_close(state(drafter), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("prompt-lokup", "unknown drafter 'prompt-lokup'; choose from history"),
        ("prompt-lookup:1", "at least 2 nodes"),
        ("prompt-lookup:a", r"invalid options; write prompt-lookup\[:NODES"),
        ("lookahead:2:3:2", "the drafter 'lookahead:2:3:2' was removed; use history"),
        ("random", "the drafter 'random' was removed; use history"),
        ("ngram:3", "the drafter 'ngram:3' was removed; use history"),
        ("prompt-lookup:12:10:3", r"invalid options; write prompt-lookup\[:NODES"),
        ("retrieval", "needs a datastore"),
        ("retrieval:nowhere", "no datastore in 'nowhere'"),
        ("model", "needs a model"),
    ],
)
def test_what_is_no_drafter_is_refused(target, word, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeLM.from_pretrained(target, drafter=word, adaptive=False)
    assert word.split(":")[0] in {**SPECS, **REMOVED} or "unknown" in message


def test_other_vocabularies_and_other_tokenizers_are_refused(
    target, tiny_target, target_folder, tmp_path
):
    with pytest.raises(ValueError, match="has another vocabulary"):
        make_drafter(target, tiny_target(vocab_size=VOCAB + 1))
    write_datastore(tmp_path / "store", corpus(), "another")
    with pytest.raises(ValueError, match="was made with tokenizer another, the target has"):
        SpeculativeLM.from_pretrained(
            target_folder, drafter=f"retrieval:{tmp_path / 'store'}", adaptive=False
        )
    hash_of = tokenizer_provenance(load_tokenizer(target_folder))["tokenizer"]
    for token in (300, -7):
        write_datastore(tmp_path / "others", [[1, token, 2]], hash_of)
        with pytest.raises(ValueError, match=f"holds token {token}; the target has"):
            SpeculativeLM.from_pretrained(
                target_folder, drafter=f"retrieval:{tmp_path / 'others'}", adaptive=False
            )
    with pytest.raises(ValueError, match="corpus is empty"):
        write_datastore(tmp_path / "none", [[], []], hash_of)


def test_the_hub_is_not_asked_for_models_that_were_made_in_memory(target, monkeypatch):
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda name, **_: pytest.fail(name)
    )
    make_drafter(target, target)  # compares the tokenizers of models that have some
    with pytest.raises(ValueError, match=f"{target.name!r} was made in memory"):
        _ = target.tokenizer


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
    for name, size in (("target", ours), ("draft", theirs)):
        tiny_target(vocab_size=size, seed=size).model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    draft = f"model:{tmp_path / 'draft'}"
    lm = SpeculativeLM.from_pretrained(
        tmp_path / "target", dtype="float64", drafter=draft, tree=tree, adaptive=False
    )
    ids = torch.randint(0, ours, (3, 9), generator=torch.Generator().manual_seed(5))
    ids[:, -3:] = ours - 1
    settings = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 40,
        "pad_token_id": 257,
        "eos_token_id": [],
    }
    for bias in ({}, {"sequence_bias": {(ours - 1,): 3.0}}):
        expected = lm.target.model.generate(ids, do_sample=False, **settings, **bias)
        assert torch.equal(
            lm.generate(ids, do_sample=False, **settings, **bias).sequences, expected
        )
        sampled = lm.generate(ids, do_sample=True, max_batch_size=2, **settings, **bias).sequences
        assert sampled.shape == expected.shape and int(sampled.max()) < ours


def test_a_small_encoder_decoder_may_pad_its_vocabulary_to_another_size(tokenizer, tmp_path):
    for name, size in (("target", 272), ("draft", 258)):
        model = build_t5(size, seed=size, layers=1, eos_token_id=None)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    draft = f"model:{tmp_path / 'draft'}"
    lm = SpeculativeLM.from_pretrained(
        tmp_path / "target", dtype="float64", drafter=draft, adaptive=False
    )
    ids = torch.tensor([[5, 271, 6, 265]])
    settings = {"max_new_tokens": 30, "do_sample": False, "sequence_bias": {(271,): 2.0}}
    expected = lm.target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(
        lm.generate(ids, attention_mask=torch.ones_like(ids), **settings).sequences, expected
    )


@pytest.mark.parametrize("name", ["store", "a:b", "C:store", "12:4", "with space"])
def test_a_folder_may_have_colons_in_its_name(target_folder, tmp_path, name):
    folder = tmp_path / name
    hash_of = tokenizer_provenance(load_tokenizer(target_folder))["tokenizer"]
    write_datastore(folder, [[1, 2, 3, 4, 1, 2, 3]], hash_of)
    for options, nodes in (("", 12), (":7", 7), (":7:3", 7)):
        lm = SpeculativeLM.from_pretrained(
            target_folder, drafter=f"retrieval:{folder}{options}", adaptive=False
        )
        assert lm.drafter.max_nodes == nodes
    with pytest.raises(ValueError, match="no datastore in"):
        SpeculativeLM.from_pretrained(
            target_folder, drafter=f"retrieval:{tmp_path}/not:here:7", adaptive=False
        )


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
    target, tree, tmp_path, monkeypatch
):
    """A stranger wrote it; nothing is read or allocated for it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree.json").write_text("[[0]]")
    head = build_head("medusa", {"num_heads": 3}, target.info).to(target.dtype)
    save_head(head, tmp_path / "head", CheckpointMetadata(tree=tree))
    began = time.monotonic()
    for given in (str(tmp_path / "head"), load_head(tmp_path / "head")[0]):
        with pytest.raises(ValueError, match=r"the tree in the head's config\.json cannot be used"):
            SpeculativeLM.from_pretrained(target, head=given, compile=False, adaptive=False)
    assert time.monotonic() - began < 10
    SpeculativeLM.from_pretrained(
        target, head=str(tmp_path / "head"), tree="chain:2", compile=False, adaptive=False
    )
