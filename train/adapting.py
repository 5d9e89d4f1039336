"""A head that learns from recorded answers, and is taken only if it drafts better on newer ones.

    OUTPUT/adapt.json             the options
    OUTPUT/recorded/states/       the recorded answers as they were when the work began, linked
    OUTPUT/recorded/*.jsonl       which of them are trained on, judged on, and replayed from an older recording
    OUTPUT/training/              the training run
    OUTPUT/report.md              acceptance of both heads by kind of prompt
    OUTPUT/best/                  the new head, if it is better

The newest answers are judged on: neither head has seen them. Both draft along them, with the states that were recorded.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..console import log
from ..files import recorded_files, write_whole
from ..heads.base import DraftHead
from ..heads.by_name import HEADS
from ..heads.checkpoints.files import HEAD, refuse_foreign
from ..heads.checkpoints.save_load import load_head
from ..inference.feature_cache import MANIFEST, FeatureCache
from ..inference.models.dtypes import dtype_named
from ..inference.models.loading import default_device, locate
from ..inference.models.outer_modules import OuterTarget
from ..inference.recorded_folder import recorded_rows
from ..inference.stats import Stats
from ..inference.target import Target
from ..inference.tuning.tree_spec import TreeShape
from ..options import check_options
from .config import AdaptConfig, DataConfig, EvalConfig, FeaturesConfig, LoopConfig, OptimConfig, TrainConfig
from .data.chat_template import Example
from .evaluate import difference_interval, greedy_answers, prompt_of
from .features.stored import FolderStates, StoredReplay
from .loop import train

FEWEST = 8
"""Recorded answers from which a head can be adapted and judged."""
MOST_JUDGED = 200
"""Answers that are judged on, at most."""


@dataclass(frozen=True)
class Comparison:
    """Acceptance of two heads along the same answers."""

    kind: str
    """Kind of the prompts."""
    old: Stats
    new: Stats

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the new head's acceptance length less the old one's, paired by prompt."""
        return difference_interval(self.new.tokens_and_rounds, self.old.tokens_and_rounds)

    @property
    def better(self) -> bool:
        """Whether the new head accepts more, beyond chance: with a single prompt nothing is beyond it."""
        return len(self.new.rows) > 1 and self.interval[0] > 0


def adapt(config: AdaptConfig) -> Path | None:
    """Train a head on recorded answers, and judge it; return the folder of the new head, None if it is not taken.

    Raises:
        ValueError: recordings of another target, too few of them, or a head that cannot be trained.
        Stopped: Ctrl-C or SIGTERM; the same command resumes.
    """
    output = Path(config.output)
    best = output / "best"
    refuse_foreign(best, HEAD)
    old, _ = load_head(config.head)
    snapshot(config, output / "recorded")
    run = train(training_config(config, old))
    comparisons = judge(config, run / "best")
    whole = comparisons[0]
    taken = whole.better
    page = report(config, comparisons, taken)
    write_whole(output / "report.md", page)
    log.info(page)
    if not taken:
        return None
    if not best.exists():
        partial = output / "best.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(run / "best", partial)
        partial.rename(best)
    return best


def snapshot(config: AdaptConfig, folder: Path) -> None:
    """Keep the recorded answers as they are now, with the options: a recording that goes on may remove them.

    Raises:
        ValueError: too few answers, folders of different targets, or other options than those that the work began with.
    """
    options = dataclasses.asdict(config)
    kept = folder.parent / "adapt.json"
    last = folder / "training.jsonl"
    if last.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        advice = "continue with these, or choose another output"
        check_options(f"{folder.parent} was begun with", before, options, advice)
        return
    manifest = _manifest(config.recorded)
    states = folder / "states"
    states.mkdir(parents=True, exist_ok=True)
    rows = _linked(config.recorded, states)
    if len(rows) < FEWEST:
        raise ValueError(
            f"{config.recorded!r} holds {len(rows)} different answers; a head is adapted from {FEWEST} or more"
        )
    judged = rows[-min(max(2, round(config.held_out * len(rows))), MOST_JUDGED) :]
    prompts = {_prompt(row) for row in judged}
    training = [row for row in rows[: -len(judged)] if _prompt(row) not in prompts]
    if len(training) < 2:
        raise ValueError(
            f"{config.recorded!r} holds {len(training)} answers to prompts other than the {len(judged)} newest ones, "
            "which are judged on; record more, or lower held_out"
        )
    if config.replay is not None:
        other = _manifest(config.replay)
        if other != manifest:
            name = next(name for name in manifest if other.get(name) != manifest[name])
            raise ValueError(
                f"{config.replay!r} holds states with {name} = {other.get(name)!r}, and {config.recorded!r} with "
                f"{manifest[name]!r}; replay a recording of the same target, layers and format"
            )
        replayed = [row for row in _linked(config.replay, states) if _prompt(row) not in prompts]
        if not replayed:
            raise ValueError(f"{config.replay!r} holds no answers but those that are judged on; leave replay out")
        _write_rows(folder / "replay.jsonl", replayed)
    write_whole(states / MANIFEST, json.dumps(manifest, indent=1))
    _write_rows(folder / "judged.jsonl", judged)
    write_whole(kept, json.dumps(options, indent=1))
    _write_rows(last, training)


def training_config(config: AdaptConfig, head: DraftHead) -> TrainConfig:
    """The training run of a head that starts from another one's weights."""
    folder = Path(config.output) / "recorded"
    manifest = _manifest(folder / "states")
    name = next(name for name, kind in HEADS.items() if type(head) is kind)
    sources = [folder / "training.jsonl"]
    rows = _rows(sources[0])
    weights = None
    replay = folder / "replay.jsonl"
    if replay.exists():
        sources.append(replay)
        replayed = _rows(replay)
        weights = [1.0, config.replay_share / (1 - config.replay_share) * len(rows) / len(replayed)]
        rows += replayed
    _, gguf = locate(config.target)
    longest = max(len(row["input_ids"]) for row in rows)
    return TrainConfig(
        target=config.target,
        target_revision=manifest["revision"],
        target_dtype=manifest["dtype"],
        output=str(Path(config.output) / "training"),
        head={"type": name, **dataclasses.asdict(head.config)},
        init_from=config.head,
        data=DataConfig(sources=[str(source) for source in sources], weights=weights, held_out=0.1, max_length=longest),
        # A GGUF file's embedding and LM head cannot be read alone.
        features=FeaturesConfig(
            mode="stored" if gguf is None else "cached",
            folder=str(folder / "states"),
            format=manifest["format"],
            on_policy=config.on_policy,
        ),
        optim=OptimConfig(lr=config.lr),
        loop=LoopConfig(max_steps=config.steps, batch_size=config.batch_size, eval_every=max(config.steps // 4, 1)),
        eval=EvalConfig(new_tokens=config.new_tokens),
    )


def judge(config: AdaptConfig, new: Path) -> list[Comparison]:
    """Let both heads draft along the answers that are judged on: all of them first, then by kind.

    Raises:
        ValueError: none of them is long enough.
    """
    folder = Path(config.output) / "recorded"
    manifest = _manifest(folder / "states")
    _, gguf = locate(config.target)
    loading = OuterTarget if gguf is None else Target
    target = loading.load(config.target, dtype_named(manifest["dtype"]), default_device(), manifest["revision"])
    rows = {_prompt(row): row for row in _rows(folder / "judged.jsonl")}
    examples = [Example(row["input_ids"], [bool(own) for own in row["loss_mask"]]) for row in rows.values()]
    source = FolderStates(FeatureCache(folder / "states", manifest), target.max_positions)
    replay = StoredReplay(target, source, examples)
    usable = replay.usable(examples, EvalConfig(prompts=len(examples), new_tokens=config.new_tokens))
    kinds: dict[str, list[Example]] = {}
    for example in usable:
        kinds.setdefault(rows[tuple(example.prompt)]["kind"], []).append(example)
    stats: list[dict[str, Stats]] = []
    for checkpoint in (config.head, new):
        head, _ = load_head(checkpoint, target.info, target.dtype)
        stats.append(_stats_by_kind(replay, head.to(target.device).eval(), kinds, config.new_tokens))
    old_by_kind, new_by_kind = stats
    whole = Comparison("all", Stats.merged(old_by_kind.values()), Stats.merged(new_by_kind.values()))
    return [whole, *(Comparison(kind, old_by_kind[kind], new_by_kind[kind]) for kind in kinds)]


def report(config: AdaptConfig, comparisons: Sequence[Comparison], taken: bool) -> str:
    """The judgement as a page: acceptance lengths by kind, and what follows."""
    whole = comparisons[0]
    low, high = whole.interval
    lines = [
        f"# {config.head} adapted to {config.recorded}",
        "",
        f"{len(whole.new.rows)} of the newest answers, {config.new_tokens} tokens at most, drafted in chains.",
        "",
        "| kind | answers | acceptance length before | after | difference, 95 % |",
        "|---|---|---|---|---|",
    ]
    for each in comparisons:
        begin, end = each.interval
        interval = "-" if math.isnan(begin) or len(each.new.rows) < 2 else f"{begin:+.2f} to {end:+.2f}"
        lengths = f"{each.old.acceptance_length:.2f} | {each.new.acceptance_length:.2f}"
        lines.append(f"| {each.kind or '(none)'} | {len(each.new.rows)} | {lengths} | {interval} |")
    lines.append("")
    if len(comparisons) == 2:
        lines += ["All answers are of one kind: what the new head does to others was not measured.", ""]
    if taken:
        lines.append(f"Taken: {Path(config.output) / 'best'}")
    elif high < 0:
        lines.append(f"Not taken: the new head accepts less. Stay with {config.head}.")
    else:
        lines.append(
            f"Not taken: the difference, {low:+.2f} to {high:+.2f}, does not exclude that nothing is gained. Stay with "
            f"{config.head}, record more, or train longer (steps)."
        )
    return "\n".join(lines) + "\n"


def _stats_by_kind(
    target: StoredReplay, head: DraftHead, kinds: dict[str, list[Example]], new_tokens: int
) -> dict[str, Stats]:
    tree = TreeShape.chain(head.max_depth)
    found: dict[str, Stats] = {}
    for kind, examples in kinds.items():
        prompts = [prompt_of(example) for example in examples]
        found[kind] = greedy_answers(target, head, tree, prompts, new_tokens).stats
    return found


def _linked(source: str, folder: Path) -> list[dict[str, Any]]:
    """Link the recorded answers of a folder into another, or copy them to another disk; return them, each text once."""
    places = []
    for path in recorded_files(source):
        place = folder / path.name
        try:
            if not place.exists():
                os.link(path, place)
        except FileNotFoundError:  # it has given way to a newer one meanwhile
            continue
        except OSError:
            shutil.copyfile(path, place)
        places.append(place)
    return recorded_rows(places)


def _manifest(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / MANIFEST
    if not path.exists():
        raise ValueError(f"no recorded answers in {str(folder)!r}; `headstart chat --record FOLDER` writes them")
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def _prompt(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row["input_ids"][: row["loss_mask"].index(1)])


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
