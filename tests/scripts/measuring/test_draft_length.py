"""`headstart tree --explain`: what is printed as measured is what was decoded, and the rest are the formulas."""

from __future__ import annotations

import json

import pytest
import torch

from headstart.inference import SpeculativeLM, Stats, load_tokenizer
from headstart.inference.tuning.tree_search import chain_length
from headstart.scripts.measuring.draft_length import best_draft_length, operations_factor, time_factor
from headstart.scripts.tree import TreeConfig, explain_chains
from headstart.train.data.chat_template import prompt_ids
from headstart.train.data.conversations import read_prompts
from headstart.train.loop import train


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"count to {i}"}) for i in range(3, 6)), encoding="utf-8")
    return str(path)


def test_chains_of_a_source_are_explained(taught, prompts, capsys):
    config = TreeConfig(
        str(taught), prompts=[prompts], explain=True, drafter="ngram:3", dtype="float32", max_new_tokens=20
    )
    found = explain_chains(config)
    assert [row.gamma for row in found] == list(range(1, 9))
    assert "best:" in capsys.readouterr().out
    assert all(row.operations is None and row.factor > 0 and row.expected_factor > 0 for row in found)
    lengths = [row.expected_tokens for row in found]
    assert lengths == sorted(lengths) and lengths[-1] > 1
    ids = [prompt_ids(load_tokenizer(taught), row) for row in read_prompts(prompts)]
    for row in (found[0], found[4]):
        lm = SpeculativeLM.from_pretrained(
            taught, dtype=torch.float32, drafter="ngram:3", tree=f"chain:{row.gamma}", fallback=False
        )
        stats = Stats.merged(lm.generate(each, max_new_tokens=20, do_sample=False).stats for each in ids)
        assert row.tokens == pytest.approx(stats.acceptance_length)


def test_chains_of_a_head_are_explained_with_their_operations(run_options, changed, tmp_path, prompts):
    config = run_options(tmp_path / "run", 5)
    head = train(changed(config, loop={"eval_every": 0, "save_every": 0})) / "last"
    asked = TreeConfig(
        target=config.target,
        head=str(head),
        prompts=[prompts],
        explain=True,
        dtype="float32",
        max_new_tokens=8,
        limit=2,
    )
    before = (head / "config.json").read_bytes()
    found = explain_chains(asked)
    assert all(row.operations > 0 for row in found)
    assert (head / "config.json").read_bytes() == before


def test_what_cannot_be_explained_is_refused(taught, prompts):
    with pytest.raises(ValueError, match="'lookahead' takes no tree 'chain:8'"):
        explain_chains(
            TreeConfig(target=str(taught), prompts=[prompts], explain=True, drafter="lookahead", dtype="float32")
        )
    with pytest.raises(ValueError, match="has no tree to find; give --explain"):
        TreeConfig(target=str(taught), prompts=[prompts], drafter="random")
    with pytest.raises(ValueError, match="'head' is required"):
        TreeConfig(target=str(taught), prompts=[prompts])


@pytest.mark.parametrize(("rate", "best", "factor"), [(0.5, 3, 1.63), (0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09)])
def test_the_best_draft_length_is_the_papers(rate, best, factor):
    """At c = 0.05 (arXiv:2211.17192, section 3.3)."""
    assert best_draft_length([rate], 0.05) == best
    assert time_factor([rate], best, 0.05) == pytest.approx(factor, abs=0.005)


def test_chains_gain_by_the_formulas():
    assert chain_length([0.8], 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert chain_length([0.9, 0.5], 3) == pytest.approx(1 + 0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.5)
    assert chain_length([0.8], 0) == 1
    assert operations_factor([0.8], 4, 0.1) == pytest.approx((1 - 0.8) * (4 * 0.1 + 4 + 1) / (1 - 0.8**5))
    assert time_factor([0.8], 2, 0.1, lambda nodes: 1 + nodes / 10) == pytest.approx(2.44 / (0.2 + 1.3))
    assert best_draft_length([0.1], 0.5) == 0  # a draft that costs more than it gives
