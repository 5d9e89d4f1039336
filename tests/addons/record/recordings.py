"""Recorded answers from which a head can be adapted to a tiny target."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import saved_head

from headstart.addons.record import record
from headstart.inference import SpeculativeLM, Target, load_tokenizer

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
