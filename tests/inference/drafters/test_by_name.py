"""Drafts without a trained head: whatever the source, the text is the target's; and each drafts
what its spec says."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
import torch
from helpers import padded_batch
from transformers import (
    LogitsProcessorList,
    T5Config,
    T5ForConditionalGeneration,
    TemperatureLogitsWarper,
)

from headstart.heads import CheckpointMetadata, build_head
from headstart.heads.checkpoints.save_load import load_head, save_head
from headstart.inference import SpeculativeLM
from headstart.inference.drafters.by_name import make_drafter
from headstart.inference.drafters.history import HistoryDrafter
from headstart.inference.drafters.lookahead import LookaheadDrafter
from headstart.inference.drafters.ngram_index import Datastore, NgramIndex
from headstart.inference.drafters.ngram_model import NgramModel
from headstart.inference.drafters.specs import (
    SPECS,
    History,
    Lookahead,
    Ngram,
    RandomTokens,
    SmallerModel,
    drafter_spec,
)
from headstart.inference.drafters.text_index import TextIndex
from headstart.inference.targets.loading import load_tokenizer, tokenizer_provenance
from headstart.inference.trees.tree_spec import DynamicShape, TreeShape
from headstart.inference.trees.verify import choose_rule
from headstart.inference.tuning.machine import machine_key

VOCAB = 20


@pytest.fixture
def target(tiny_target):
    return tiny_target(vocab_size=VOCAB)


def corpus(vocab=VOCAB, texts=30):
    chance = random.Random(0)
    return [[chance.randrange(vocab) for _ in range(chance.randrange(1, 40))] for _ in range(texts)]


def source(word, target, tiny_target, tree="auto", vocab=VOCAB):
    """By a word of the command line, or what needs a file or a model."""
    if word == "model":
        return make_drafter(target, tiny_target(vocab_size=vocab, layers=1, seed=3), tree)
    if word == "itself":
        return make_drafter(target, target, tree)
    if word == "retrieval":
        return HistoryDrafter(12, 6, corpus=TextIndex.of(Datastore.of(corpus(vocab)).texts()))
    if word == "hybrid":
        torch.manual_seed(1)
        head = build_head("medusa", {"num_heads": 3}, target.info).to(target.dtype)
        head.initialize(target.modules, torch.ones(vocab, dtype=torch.int64))
        other = SpeculativeLM.from_pretrained(target, head, tree=tree, adaptive=False).drafter
        return HistoryDrafter(2 if tree == "chain:1" else 6, 4, TextIndex(99), other=other)
    return make_drafter(target, word, tree)


def prompts(count, vocab=VOCAB):
    """Of different lengths, and they repeat themselves."""
    chance = random.Random(1)
    rows = []
    for i in range(count):
        part = [chance.randrange(vocab) for _ in range(1 + 3 * i % 7)]
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


@pytest.mark.parametrize(
    ("word", "tree", "acceptance", "new"),
    [
        ("ngram:2", "drawn:chain:2", "auto", 3),
        ("ngram:3", "drawn:chain:1", "token", 3),
        ("ngram:2", "drawn:branch:2", "auto", 2),
        ("random", "drawn:chain:2", "token", 3),
        ("random", "drawn:branch:2", "without_replacement", 2),
        ("model", "drawn:chain:2", "auto", 3),
        ("model", "drawn:branch:2", "traversal", 2),
        ("model", "chain:2", "auto", 2),
        ("ngram:1", "drawn:chain:1|drawn:chain:2", "auto", 2),
        ("prompt-lookup:3:2", "auto", "auto", 3),
        ("lookahead:1:2:1", "auto", "auto", 3),
        ("hybrid", "chain:1", "auto", 3),
    ],
)
def test_what_is_written_has_the_targets_distribution(
    tiny_target, tools, word, tree, acceptance, new
):
    target = tiny_target(vocab_size=3)
    prompt = torch.tensor([1, 2, 1, 2, 1])
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8)])

    def run(draw):
        drafter = source(word, target, tiny_target, tree, 3)
        rule = choose_rule(acceptance, drafter.kind, lossy=False)
        return tuple(tools.write(target, drafter, rule, [prompt], processors, draw, new)[0][0])

    found = tools.every_branch(run)
    for text, weight in tools.exactly(target, prompt, new, 0.8).items():
        assert found.get(text, 0.0) == pytest.approx(weight, abs=1e-9)


def naive_places(texts, gram):
    """(what follows, to the end of its text) wherever the gram stands."""
    size = len(gram)
    return [
        text[i + size :]
        for text in texts
        for i in range(len(text) - size + 1)
        if text[i : i + size] == list(gram)
    ]


def test_a_datastore_finds_what_a_search_finds(tmp_path):
    texts = corpus(vocab=4)
    Datastore.of(texts, "words").save(tmp_path / "store")
    store = Datastore.load(tmp_path / "store")
    for size in range(1, 6):
        for gram in itertools.islice(itertools.product(range(4), repeat=size), 300):
            naive = naive_places(texts, gram)
            tokens, counts = store.following(gram)
            first = [rest[0] for rest in naive if rest]
            assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == {
                t: first.count(t) for t in set(first)
            }


def test_a_datastore_of_others_drafts_tokens_of_the_target_alone(tmp_path):
    Datastore.of([[1, 2, 3, 1, 2, 4], [9, 1, 2, 5]]).save(tmp_path)
    tokens = np.load(tmp_path / "tokens.npy")
    tokens[tokens == 3] = 10**9
    tokens[tokens == 4] = -7
    np.save(tmp_path / "tokens.npy", tokens)
    order = np.load(tmp_path / "order.npy")
    store = Datastore.load(tmp_path, vocab_size=12)
    assert TextIndex.of(store.texts()).search([1, 2], 4).continuations == [[5]]
    assert store.following([2])[0].tolist() == [5]
    assert store.following([])[0].max() < 12
    order[:-1] = 10**12  # in no order, and beyond all texts
    np.save(tmp_path / "order.npy", order)
    store = Datastore.load(tmp_path, vocab_size=12)
    for gram in ([1, 2], [2], [9], [5]):
        assert (store.following(gram)[0] < 12).all()
        found = TextIndex.of(store.texts()).search(gram, 4)
        assert all(0 <= token < 12 for text in found.continuations for token in text)


@pytest.mark.parametrize("order", [[], [99], [-1], [0] * 99])
def test_a_datastore_in_another_order_is_refused(tmp_path, order):
    Datastore.of([[1, 2, 3]]).save(tmp_path)
    np.save(tmp_path / "order.npy", np.array(order, dtype=np.int64))
    with pytest.raises(ValueError, match="make the datastore again"):
        Datastore.load(tmp_path)


@pytest.mark.parametrize("content", [b"\x93NUMPY\1\0\3\0(((", b"PK\3\4", b"", b"x"])
def test_what_numpy_cannot_read_is_named(tmp_path, content):
    Datastore.of([[1, 2, 3]]).save(tmp_path)
    (tmp_path / "order.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"order\.npy cannot be read"):
        Datastore.load(tmp_path)


def test_a_running_text_counts_what_a_search_finds():
    text = NgramIndex(3)
    tokens = random.Random(2).choices(range(3), k=60)
    text.append(tokens)
    for size in range(4):
        for gram in itertools.product(range(3), repeat=size):
            naive = [rest for rest in naive_places([tokens], gram) if rest]
            assert text.following(gram)[1].sum() == len(naive)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
@pytest.mark.parametrize("stored", [False, True])
def test_n_gram_probabilities_are_those_of_the_formula(target, order, stored):
    store = Datastore.of(corpus()) if stored else None
    model = NgramModel(target.info, order, 3, store)
    text = NgramIndex(max(order - 1, 0))
    text.append(corpus()[3] * 2)
    counted = [*([store] if store else []), text]

    def slow(context, token):
        """From the longest context down to 1 / V."""
        if context is None:
            return 1 / VOCAB
        shorter = slow(context[1:] if context else None, token)
        for each in counted:
            tokens, counts = each.following(context)
            if len(tokens):
                here = int(counts[tokens.tolist().index(token)]) if token in tokens else 0
                shorter = (here + len(tokens) * shorter) / (counts.sum() + len(tokens))
        return shorter

    for end in range(len(text.tokens) - 4, len(text.tokens)):
        context = tuple(text.tokens[end - max(order - 1, 0) : end])
        probs = model.probabilities(text, context)
        assert probs.sum() == pytest.approx(1) and (probs > 0).all()
        expected = [slow(context if order else None, token) for token in range(VOCAB)]
        np.testing.assert_allclose(probs, expected)


@pytest.mark.parametrize("new_tokens", [5, 8, 10, 12, 60])
def test_lookahead_learns_what_the_target_says_of_its_own_drafts(target, new_tokens):
    """Every remembered n-gram is a trajectory: the target said each token after what stood before
    it in the tree."""
    drafter = LookaheadDrafter(3, 3, 2)
    trees = []
    original = drafter.propose
    drafter.propose = lambda roots: trees.append(original(roots)) or trees[-1]
    lm = SpeculativeLM(target, drafter)
    output = lm.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=new_tokens, do_sample=False)
    window = drafter.texts[0]
    assert len(window.rows) == 2 and all(len(row) == 3 for row in window.rows)
    assert max(tree.tokens_BN.shape[1] for tree in trees) <= drafter.max_nodes
    assert all(len(known) <= 2 for known in window.grams.values())
    ids, committed = (
        output.sequences[0].tolist(),
        3 + 1 + sum(r.returned for r in output.stats.rows[0][:-1]),
    )
    tree = trees[-1]
    paths = {0: ids[:committed]}
    for node in range(1, tree.tokens_BN.shape[1]):
        paths[node] = paths[int(tree.parents_BN[0, node])] + [int(tree.tokens_BN[0, node])]
    said = [
        int(target.model(torch.tensor([paths[node]])).logits[0, -1].argmax())
        for node in window.below
    ]
    assert said == window.rows[-1]
    if new_tokens == 60:  # a random model soon repeats itself, and so do its trajectories
        assert output.stats.acceptance_length > 1.2
    else:
        assert len(set(said)) > 1


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("history", History()),
        ("history:7:5", History(nodes=7, length=5)),
        ("prompt-lookup", History(earlier=False)),
        ("prompt_lookup:5", History(5, earlier=False)),
        ("retrieval:store", History(folder="store")),
        ("retrieval:a:b:9", History(nodes=9, folder="a:b")),
        ("lookahead:3:2", Lookahead(width=3, ngram=2)),
        ("ngram", Ngram()),
        ("ngram:2:a:b", Ngram(order=2, folder="a:b")),
        ("ngram::store", Ngram(folder="store")),
        ("random", RandomTokens()),
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
        (Lookahead(width=3), "lookahead:3"),
        (Ngram(order=2), "ngram:2"),
        (RandomTokens(), "random"),
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
    drafters = [
        make_drafter(target, "ngram:2", tree) for tree in (objects, "chain:2|dynamic:6:2:2")
    ]
    assert repr(drafters[0]) == repr(drafters[1]) and len(drafters[0].trees) == 2
    assert repr(make_drafter(target, "ngram:2", objects[:1])) == repr(
        make_drafter(target, "ngram:2", "chain:2")
    )
    assert make_drafter(target, "ngram:2", [[0], [0, 0]]).max_nodes == 3


@pytest.mark.parametrize("word", ["prompt-lookup", "lookahead", "retrieval", "ngram:2"])
def test_what_is_looked_up_in_is_the_whole_text(target, tiny_target, word):
    """From the prompt's first token on, prompts of one token too."""
    lm = SpeculativeLM(target, source(word, target, tiny_target))
    for prompt in ([5], [5, 6], [1, 2, 3, 1, 2]):
        written = (
            lm.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False)
            .sequences[0]
            .tolist()
        )
        if isinstance(lm.drafter, HistoryDrafter):
            text = lm.drafter.rows[0].text
            assert text.last(text.end)[: len(written)] == written
            continue
        texts = lm.drafter.rows.catch_up().texts if word == "ngram:2" else lm.drafter.texts
        assert texts[0].tokens[: len(written)] == written


def test_a_fresh_drafter_is_independent(target, tiny_target):
    """Continuous batching reads a new prompt with it while the other rows continue."""

    def state(drafter):
        if word == "model":
            cache = drafter.rows.progress.state.cache
            return [block.clone() for block in cache.blocks], cache.lengths_B.clone()
        if isinstance(drafter, HistoryDrafter):
            return [row.text.last(99) for row in drafter.rows]
        texts = drafter.rows.progress.state.texts if word == "ngram:2" else drafter.texts
        return [list(text.tokens) for text in texts]

    for word in ("prompt-lookup", "lookahead", "retrieval", "hybrid", "ngram:2", "model"):
        drafter = source(word, target, tiny_target)
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
        ("prompt-lookup:a", r"not understood; it is written prompt-lookup\[:NODES"),
        ("lookahead:0", "window of at least 1 column"),
        ("ngram:99", "an order from 0 to 16, not 99"),
        ("prompt-lookup:12:10:3", r"not understood; it is written prompt-lookup\[:NODES"),
        ("random:3", "not understood; it is written random"),
        ("retrieval", "needs a datastore"),
        ("retrieval:nowhere", "no datastore in 'nowhere'"),
        ("model", "needs a model"),
    ],
)
def test_what_is_no_drafter_is_refused(target, word, message):
    with pytest.raises(ValueError, match=message):
        SpeculativeLM.from_pretrained(target, drafter=word, adaptive=False)
    assert word.split(":")[0] in SPECS or "unknown" in message


def test_a_tree_for_a_source_that_takes_none_is_refused(target):
    with pytest.raises(ValueError, match="takes no tree 'chain:3'"):
        SpeculativeLM.from_pretrained(
            target, drafter="prompt-lookup", tree="chain:3", adaptive=False
        )


def test_other_vocabularies_and_other_tokenizers_are_refused(
    target, tiny_target, target_folder, tmp_path
):
    with pytest.raises(ValueError, match="has another vocabulary"):
        make_drafter(target, tiny_target(vocab_size=VOCAB + 1))
    Datastore.of(corpus(), "another").save(tmp_path / "store")
    with pytest.raises(ValueError, match="was made with tokenizer another, the target has"):
        SpeculativeLM.from_pretrained(
            target_folder, drafter=f"retrieval:{tmp_path / 'store'}", adaptive=False
        )
    hash_of = tokenizer_provenance(load_tokenizer(target_folder))["tokenizer"]
    Datastore.of([[300, 1]], hash_of).save(tmp_path / "large")
    with pytest.raises(ValueError, match="token 300"):
        SpeculativeLM.from_pretrained(
            target_folder, drafter=f"retrieval:{tmp_path / 'large'}", adaptive=False
        )
    with pytest.raises(ValueError, match="corpus is empty"):
        Datastore.of([[], []])


@pytest.mark.parametrize(("ours", "theirs"), [(258, 272), (272, 258), (272, 320)])
@pytest.mark.parametrize("tree", ["chain:3", "branch:2x2", "drawn:chain:3"])
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
        torch.manual_seed(size)
        sizes = {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 1,
            "num_decoder_layers": 1,
            "num_heads": 4,
        }
        config = T5Config(
            vocab_size=size, **sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None
        )
        model = T5ForConditionalGeneration(config)
        for parameter in model.parameters():
            parameter.data *= 3 if parameter.ndim > 1 else 1
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
    Datastore.of([[1, 2, 3, 4, 1, 2, 3]], hash_of).save(folder)
    for options, nodes in (("", 12), (":7", 7), (":7:3", 7)):
        lm = SpeculativeLM.from_pretrained(
            target_folder, drafter=f"retrieval:{folder}{options}", adaptive=False
        )
        assert lm.drafter.max_nodes == nodes
    SpeculativeLM.from_pretrained(target_folder, drafter=f"ngram:2:{folder}", adaptive=False)
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


@pytest.mark.parametrize("given", ["folder", "head object"])
def test_a_head_object_has_the_tree_and_the_warnings_of_its_folder(target, given, tmp_path):
    head = build_head("medusa", {"num_heads": 3}, target.info).to(target.dtype)
    measured = {"fastest": {machine_key(target.device, False): "chain:2"}}
    save_head(
        head,
        tmp_path / "head",
        CheckpointMetadata(measured=measured, provenance={"weights": "others"}),
    )
    source = str(tmp_path / "head") if given == "folder" else load_head(tmp_path / "head")[0]
    with pytest.warns(UserWarning, match="may accept less here: weights 'others'"):
        lm = SpeculativeLM.from_pretrained(target, head=source, compile=False, adaptive=False)
    assert lm.drafter.max_nodes == 3 and lm.provenance == {"weights": "others"}
