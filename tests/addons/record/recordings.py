"""Recorded answers from which a head can be adapted to a tiny target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers import saved_head
from torch import Tensor

from headstart.addons.record import record
from headstart.files import text_shards
from headstart.inference import SpeculativeLM, Target, load_tokenizer
from headstart.inference.feature_cache import FeatureCache, decoded, key_of, text_row

NEW_TOKENS = 12
ANSWERS = 48
SETTINGS = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}


def record_answers(taught: Path, folder: Path) -> Path:
    """Write an untrained head, and recorded answers of two kinds and of an older one; the newest
    are to other prompts.

    They are in `head`, `recorded` and `older` of the folder, which is returned.
    """
    tokenizer = load_tokenizer(taught)
    target = Target.from_pretrained(str(taught), torch.float32)
    head = saved_head(folder / "head", target, num_heads=2)
    lm = SpeculativeLM.from_pretrained(target, head, tree="chain:2", adaptive=False)
    for name, words in (("recorded", ("count to", "say")), ("older", ("tell",))):
        for first, kind in enumerate(words):
            numbers = range(first, ANSWERS, len(words))
            with record(
                lm, folder / name, kind=kind, format="float32", tokenizer=tokenizer
            ) as running:
                for number in numbers:
                    text = f"{kind} {number % 7 + 3} {'please' * (number // 7)}"
                    lm.generate(tokenizer(text, return_tensors="pt").input_ids, **SETTINGS)
            assert running.written == len(numbers)
    return folder


def rows_and_states(folder: Path) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Each recorded text, the oldest first, with its states [T, L, D]."""
    cache = FeatureCache(folder, json.loads((folder / "manifest.json").read_text()))
    for path in text_shards(folder):
        row = text_row(path)
        yield row, decoded(*cache.stored(key_of(torch.tensor(row["input_ids"]))))


def check_states(target: Target, folder: Path, **close: float) -> list[dict[str, Any]]:
    """Every recorded state is the target's own; the last of a text may be missing. Returns the
    rows."""
    close = {"atol": 1e-5, "rtol": 0.0, **close}
    layers = json.loads((folder / "manifest.json").read_text())["layers"]
    rows = []
    for row, states_TLD in rows_and_states(folder):
        expected_1TF, _ = target.read(torch.tensor([row["input_ids"]]), layers)
        found_TF = states_TLD.flatten(1).to(expected_1TF.dtype)
        read = len(found_TF) if found_TF[-1].any() else len(found_TF) - 1
        torch.testing.assert_close(found_TF[:read], expected_1TF[0, :read], **close)
        rows.append(row)
    return rows
