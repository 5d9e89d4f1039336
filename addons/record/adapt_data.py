"""The answers that a head is adapted to, as they were when the work began.

Recorded answers are linked, so that a recording that goes on may remove them. The newest of each
kind are judged on, the others trained on; older ones may be replayed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from ...console import log
from ...files import (
    read_json,
    read_json_lines,
    replacing,
    require_regular,
    text_shards,
    write_whole,
)
from ...inference.feature_cache import MANIFEST, read_manifest, text_rows
from ...inference.targets.loading import load_tokenizer, target_facts
from ...options import by_new_names, check_options
from ...train.config import DataConfig, TrainConfig
from ...train.data.conversations import check_row, open_source
from ...train.data.split import check_renders, rendering
from .config import AdaptConfig
from .folder import COSTS, check_kind
from .judging import FEWEST_JUDGED, FEWEST_OF_KIND, outer_modules_of

REPLAYED = "replay.jsonl"
"""Older recorded answers, whose states are known."""
CONVERSATIONS = "conversations.jsonl"
"""Conversations as rows of tokens, whose states the target computes before the first step."""
ANEW = "remove {}, and the work begins anew"
"""What helps where files of an adaptation were changed."""
LENGTH_STEP = 512
"""Tokens to a multiple of which conversations are cut that are replayed."""
FEWEST = 2 * FEWEST_JUDGED
"""Recorded answers from which a head can be adapted and judged."""
JUDGED_OF_REPLAYED = 5
"""Of so many older conversations one is judged on."""
MOST_JUDGED = 200
"""Answers that are judged on, at most."""


def snapshot(config: AdaptConfig, folder: Path) -> None:
    """Keep the recorded answers as they are now, with the options.

    A recording that goes on may remove them.

    Raises:
        ValueError: too few answers, folders of different targets, or other options than those that
            the work began with.
    """
    options = dataclasses.asdict(config)
    kept = folder.parent / "adapt.json"
    last = folder / "training.jsonl"
    if last.exists():
        before = read_json(kept)
        if not isinstance(before, dict):
            raise ValueError(f"{kept} holds no options; {ANEW.format(folder.parent)}")
        advice = "continue with these, or choose another output"
        before = by_new_names(before, warn=False)
        check_options(f"{folder.parent} was begun with", before, options, advice)
        return
    manifest = manifest_of(config.recorded)
    states = folder / "states"
    states.mkdir(parents=True, exist_ok=True)
    for name in (REPLAYED, CONVERSATIONS, COSTS):  # of an attempt with other options that failed
        (folder / name).unlink(missing_ok=True)
    rows = _linked(config.recorded, states)
    if len(rows) < FEWEST:
        raise ValueError(
            f"{config.recorded!r} holds {len(rows)} different answers; a head is adapted from"
            f" {FEWEST} or more"
        )
    training, judged = divided(rows, config.held_out)
    if len(training) < 2:
        raise ValueError(
            f"{config.recorded!r} holds {len(training)} answers to prompts other than the"
            f" {len(judged)} newest of each kind, which are judged on; record more, or lower"
            " held_out"
        )
    kinds = {row["kind"] for row in rows}
    if len(kinds) == 1 and config.replay is None:
        log.warning(
            f"all {len(rows)} answers in {config.recorded!r} are of one kind, {kinds.pop()!r}: what"
            " the new head does to others is not measured; record others too, or keep what the"
            " head knows by older data (replay)"
        )
    if config.replay is not None:
        judged += snapshot_replay(config, manifest, rows, training, judged, folder)
    known = Path(config.recorded) / COSTS
    if known.exists():
        write_whole(folder / COSTS, require_regular(known).read_text(encoding="utf-8"))
    write_whole(states / MANIFEST, json.dumps(manifest, indent=1))
    _write_rows(folder / "judged.jsonl", judged)
    write_whole(kept, json.dumps(options, indent=1))
    _write_rows(last, training)


def snapshot_replay(
    config: AdaptConfig,
    manifest: dict[str, Any],
    rows: list[dict[str, Any]],
    training: list[dict[str, Any]],
    judged: list[dict[str, Any]],
    folder: Path,
) -> list[dict[str, Any]]:
    """Keep what is replayed as well as the recorded answers, `rows`; return what is judged on.

    No prompt is both trained on and judged on.
    """
    file, replayed = _replayed(config, manifest, rows, folder / "states")
    prompts = {_prompt(row) for row in judged}
    replayed = [row for row in replayed if _prompt(row) not in prompts]
    if not replayed:
        raise ValueError(
            f"{config.replay!r} holds no answers but those that are judged on; leave replay out"
        )
    learned = {_prompt(row) for row in training}
    older: list[dict[str, Any]] = []
    again: list[dict[str, Any]] = []
    for row in replayed:
        # What an earlier adaptation has trained on is never judged on in a later one.
        if not for_judging(row.pop("text", row["input_ids"])):
            again.append(row)
        elif _prompt(row) not in learned:
            older.append({**row, "replayed": True})
    judged_prompts = {_prompt(row) for row in older}
    again = [row for row in again if _prompt(row) not in judged_prompts]
    _write_rows(folder / file, again)
    return older[:MOST_JUDGED]


def for_judging(conversation: Any) -> bool:
    """Whether an older conversation is judged on: always the same, whatever comes with it."""
    digest = hashlib.blake2b(json.dumps(conversation, sort_keys=True).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") % JUDGED_OF_REPLAYED == 0


def divided(
    rows: list[dict[str, Any]], held_out: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Recorded answers to train on, and the newest ones of each kind to judge on.

    No prompt is on both sides. At least `FEWEST_JUDGED` are judged on, about. Kinds of fewer than
    `FEWEST_OF_KIND` answers count as one.
    """
    held_out = max(held_out, FEWEST_JUDGED / len(rows))
    counts = Counter(row["kind"] for row in rows)
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kind = row["kind"] if counts[row["kind"]] >= FEWEST_OF_KIND else ""
        kinds.setdefault(kind, []).append(row)
    judged = []
    for own in kinds.values():
        count = min(max(2, math.ceil(held_out * len(own))), max(MOST_JUDGED // len(kinds), 1))
        judged += own[-count:]
    prompts = {_prompt(row) for row in judged}
    training = [row for row in rows if _prompt(row) not in prompts]
    return training, judged


def _replayed(
    config: AdaptConfig, manifest: dict[str, Any], rows: list[dict[str, Any]], states: Path
) -> tuple[str, list[dict[str, Any]]]:
    """The file for what is replayed, and its rows.

    They are recorded answers, whose states are linked, or conversations. `rows` are the recorded
    answers to adapt to.
    """
    assert config.replay is not None
    given = Path(config.replay)
    if given.is_file():
        longest = max(len(row["input_ids"]) for row in rows)
        # In large steps, so that short recordings do not cut conversations much shorter than those
        # that the head was trained on.
        longest = -(-longest // LENGTH_STEP) * LENGTH_STEP
        return CONVERSATIONS, _conversations(config, manifest, longest)
    if not (given / MANIFEST).exists():
        raise ValueError(
            f"there is neither a recording nor a file at {config.replay!r}; replay takes a folder"
            " of recorded answers, or a file of conversations such as the head was trained on"
            " (JSON Lines, Parquet)"
        )
    other = manifest_of(config.replay)
    for name, value in manifest.items():
        if other.get(name) != value:
            raise ValueError(
                f"{config.replay!r} holds states with {name} = {other.get(name)!r}, and"
                f" {config.recorded!r} with {value!r}; replay what is of the same target, layers"
                " and format"
            )
    replayed = _linked(config.replay, states)
    if not replayed:
        raise ValueError(
            f"{config.replay!r} holds states and no recorded answers; to replay what `headstart "
            "features` read, name its file of conversations, whose states are computed again"
        )
    return REPLAYED, replayed


def _conversations(
    config: AdaptConfig, manifest: dict[str, Any], longest: int
) -> list[dict[str, Any]]:
    """Conversations of a file as rows of tokens, chosen at random.

    They are as many as training will see and as are judged on.

    Raises:
        ValueError: a file that does not hold conversations, or none that can be used.
    """
    assert config.replay is not None
    source = open_source(config.replay)
    tokenizer = load_tokenizer(config.target, manifest["revision"])
    check_renders(tokenizer, [source], config.target)
    target = target_facts(config.target, manifest["revision"]) or outer_modules_of(config, manifest)
    data = DataConfig(sources=[config.replay], max_length=longest)
    training = TrainConfig(target=config.target, output=config.output, data=data)
    how = rendering(training, target, tokenizer)
    learned = config.steps * config.batch_size * config.replay_share
    wanted = math.ceil(learned / (1 - 1 / JUDGED_OF_REPLAYED))
    count = len(source.rows)
    numbers = sorted(random.Random(0).sample(range(count), min(wanted, count)))
    rows: list[dict[str, Any]] = []
    unusable: list[ValueError] = []
    values = source.reader.values(source.rows[numbers], numbers)
    for number, (where, value) in zip(numbers, values, strict=True):
        try:
            if isinstance(value, ValueError):
                raise value
            examples = how.encode(check_row(value, where), where, number)
        except ValueError as error:
            unusable.append(error)
            continue
        for example in examples:
            mask = [int(own) for own in example.loss_mask]
            # The text, since a template may put today's date into the tokens.
            rows.append(
                {"input_ids": example.tokens, "loss_mask": mask, "kind": "", "text": str(value)}
            )
    if not rows:
        why = f"no answer begins within {longest} tokens, the longest that was recorded"
        if unusable:
            why = str(unusable[0])
        raise ValueError(f"{config.replay!r} holds no conversation that can be replayed: {why}")
    if unusable:
        log.warning(
            f"{len(unusable)} of {len(numbers)} conversations cannot be replayed; the first:"
            f" {unusable[0]}"
        )
    return rows


def _linked(source: str, folder: Path) -> list[dict[str, Any]]:
    """Link the recorded answers of a folder into another, or copy them to another disk.

    Returns:
        their rows, each text once.
    """
    places = []
    for path in text_shards(source):
        place = folder / path.name
        try:
            _link(require_regular(path), place)
        except FileNotFoundError:  # it has given way to a newer one meanwhile
            continue
        places.append(place)
    rows = text_rows(places)
    for row in rows:
        check_kind(row.get("kind"), f"an answer in {str(source)!r}")
    return rows


def _link(path: Path, place: Path) -> None:
    """Link a file into another folder, or copy it to another disk; what is there already stays."""
    if place.exists():
        return
    try:
        os.link(path, place)
    except FileNotFoundError:
        raise
    except FileExistsError:  # another process was faster
        pass
    except OSError:
        with replacing(place) as partial:
            shutil.copyfile(path, partial)


def manifest_of(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder of recorded answers.

    Raises:
        ValueError: a folder without one.
    """
    if not (Path(folder) / MANIFEST).exists():
        raise ValueError(
            f"no recorded answers in {str(folder)!r}; `headstart chat --record FOLDER` writes them"
        )
    return read_manifest(Path(folder))


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file that `_write_rows` wrote.

    Raises:
        ValueError: a file of something else.
    """
    rows = read_json_lines(path)
    for row in rows:
        tokens = row.get("input_ids")
        mask = row.get("loss_mask")
        is_text = (
            isinstance(tokens, list)
            and isinstance(mask, list)
            and {type(number) for number in (*tokens, *mask)} == {int}
            and len(tokens) == len(mask)
            and 1 in mask[1:]
        )
        if not is_text:
            raise ValueError(f"{path} holds rows of something else; {ANEW.format(path.parent)}")
        check_kind(row.get("kind"), f"a row of {path}")
    return rows


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def _prompt(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row["input_ids"][: row["loss_mask"].index(1)])
