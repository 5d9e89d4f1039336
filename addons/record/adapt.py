"""A head that learns from recorded answers, and is taken only if it drafts better on newer ones.

    OUTPUT/adapt.json             the options
    OUTPUT/adapt.lock             held by the process that works there
    OUTPUT/recorded/states/       the recorded answers as they were when the work began, linked
    OUTPUT/recorded/*.jsonl       which of them are trained on, judged on, and what is replayed
    OUTPUT/recorded/costs.json    what rounds cost where they were recorded, if that is known
    OUTPUT/training/              the training run
    OUTPUT/new/                   the new head: the mean of the trained weights and the first head's
    OUTPUT/report.md              acceptance and predicted speed of both heads by kind of prompt
    OUTPUT/best/                  the new head, if it is better

The newest answers of each kind are judged on (see `judging`): neither head has seen them. The first
head is the one before all adaptations: a series of them stays near it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from filelock import Timeout
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

from ...console import log
from ...files import TEXT_SHARD, write_whole
from ...heads.base import CheckpointMetadata, DraftHead
from ...heads.by_name import head_name
from ...heads.checkpoints.files import HEAD, refuse_foreign
from ...heads.checkpoints.save_load import load_head, save_head
from ...heads.layers.draft_vocab import draft_ids
from ...inference.feature_cache import FeatureCache
from ...inference.targets.loading import locate
from ...train.config import (
    DataConfig,
    EvalConfig,
    FeaturesConfig,
    LoopConfig,
    OptimConfig,
    TrainConfig,
)
from ...train.data.chat_template import Example
from ...train.engines import check_launch, start
from ...train.features.online import CachedFeatures, lacking_in, open_cache
from ...train.inputs import load_inputs
from ...train.loop import train
from .adapt_data import CONVERSATIONS, REPLAYED, manifest_of, rows_of, snapshot
from .config import AdaptConfig
from .judging import judge, report
from .recording import refuse_if_off

FIRST_HEAD = "first_head"
"""Of an adapted head's training: the one before all adaptations."""
SHOWN = 200
"""Characters of a name in a checkpoint that a warning shows."""
LOCK = "adapt.lock"
"""The lock, which stays: a folder without it is not one in which an adaptation has worked."""
WRITTEN = ("adapt.json", "recorded", "training", "new", "report.md")
"""What is written to an output folder besides best/."""
PARTLY_WRITTEN = ("*.json", "*.jsonl", "*.yaml", "report.md", f"{TEXT_SHARD}*.safetensors")
"""Files of which a process that was killed leaves a part."""
PARTIAL = re.compile(r"\.(?P<name>.+)\.\d+\.[0-9a-f]{8}\.partial")
"""Names of these parts, which `files.replacing` writes."""
LOCK_SECONDS = 1.0
"""Time in which a process that has been killed leaves its folder."""


def adapt(config: AdaptConfig) -> Path | None:
    """Train a head on recorded answers and judge it; return the new head's folder if it is taken.

    Raises:
        ValueError: recordings of another target, too few of them, a head that cannot be trained,
            another process that works in this output folder, or HEADSTART_NO_RECORD=1 in the
            environment.
        Stopped: Ctrl-C or SIGTERM; the same command resumes.
    """
    output = Path(config.output)
    refuse_if_off(f"adapting a head to {config.recorded!r}")
    refuse_foreign(output / "best", HEAD)
    if not (output / LOCK).exists():
        for name in WRITTEN:
            if (output / name).exists():
                raise ValueError(
                    f"{output / name} was not written by an adaptation, which would replace it:"
                    " choose another output"
                )
    output.mkdir(mode=0o700, parents=True, exist_ok=True)
    with alone_in(output):
        # 1. What a killed process has left; `recorded` and `training` hold what people wrote.
        for name in ("recorded", "training"):
            (output / name).mkdir(mode=0o700, exist_ok=True)
        recorded = output / "recorded"
        token_caches = (recorded / "tokens").glob("*")
        for folder in (output, output / "training", recorded, recorded / "states", *token_caches):
            remove_partials(folder)

        # 2. The heads, and the answers as they are now.
        best = output / "best"
        old, old_metadata = load_head(config.head)
        first_name, first = first_head(config, old, old_metadata)
        snapshot(config, recorded)
        if best.exists():
            log.info(f"{output} is finished: the new head is {best}, see report.md there")
            return best

        # 3. Train, and average with the first head.
        training = training_config(config, old)
        if (recorded / CONVERSATIONS).exists():
            compute_states(training, recorded)
        run = train(training)
        new, metadata = load_head(run / "best")
        average_weights(new, first, config.first_share)
        is_folder = Path(first_name).exists()
        metadata.training[FIRST_HEAD] = str(Path(first_name).resolve()) if is_folder else first_name
        save_head(new, output / "new", metadata)

        # 4. Judge.
        judged = rows_of(recorded / "judged.jsonl")
        judgement = judge(config, manifest_of(recorded / "states"), judged, output / "new")
        page = report(config, judgement)
        write_whole(output / "report.md", page)
        log.info(page)
        if not judgement.taken:
            return None
        save_head(new, best, metadata)
        return best


def first_head(
    config: AdaptConfig, old: DraftHead, metadata: CheckpointMetadata
) -> tuple[str, DraftHead]:
    """The head before all adaptations and its name.

    What the old head's checkpoint says of it is opened if it is a folder, and an adaptation wrote
    the checkpoint here: others could name any folder or repository.

    Raises:
        ValueError: a named head that is not there, or one of another architecture.
    """
    if config.first is not None:
        return config.first, fitting_head(config.first, config, old)
    told = metadata.training.get(FIRST_HEAD)
    if told is None:
        return config.head, old
    reason = "which is opened only if an adaptation here wrote that, and it is a folder"
    written_here = (Path(config.head).parent / LOCK).exists()
    if written_here and isinstance(told, str) and Path(told).is_absolute():
        try:
            return told, fitting_head(told, config, old)
        except ValueError as error:
            reason = f"which cannot be read ({error})"
    log.warning(
        f"{config.head!r} was adapted from {str(told)[:SHOWN]!r}, {reason}: the new head is"
        f" averaged with {config.head!r} instead; name the first one (first)"
    )
    return config.head, old


def fitting_head(name: str, config: AdaptConfig, old: DraftHead) -> DraftHead:
    """A head from the same series of adaptations as the old one.

    Raises:
        ValueError: a head that is not there, or one of another architecture.
    """
    head, _ = load_head(name)
    if _architecture(head) != _architecture(old):
        raise ValueError(
            f"{name!r} is not a version of {config.head!r}: kind, target or options differ"
        )
    return head


def remove_partials(folder: Path) -> None:
    """Remove what was half written in a folder by processes that were killed."""
    for path in folder.glob(".*.partial"):
        partial = PARTIAL.fullmatch(path.name)
        if partial is None or not path.is_file() or path.is_symlink():
            continue
        if any(fnmatch(partial["name"], pattern) for pattern in PARTLY_WRITTEN):
            path.unlink(missing_ok=True)


@contextmanager
def alone_in(output: Path) -> Iterator[None]:
    """Refuse to work in a folder while another process does; one that is killed leaves it free.

    Raises:
        ValueError: another process works there.
    """
    with ExitStack() as held:
        try:
            held.enter_context(WeakFileLock(output / LOCK, timeout=LOCK_SECONDS))
        except Timeout:
            raise ValueError(
                f"another process adapts a head in {str(output)!r}; wait for its end, or choose"
                " another output"
            ) from None
        yield


def training_config(config: AdaptConfig, head: DraftHead) -> TrainConfig:
    """The training run of a head that starts from another one's weights."""
    folder = Path(config.output) / "recorded"
    manifest = manifest_of(folder / "states")
    sources = [folder / "training.jsonl"]
    rows = rows_of(sources[0])
    weights = None
    for replay in (folder / REPLAYED, folder / CONVERSATIONS):
        if replay.exists():
            sources.append(replay)
            replayed = rows_of(replay)
            ratio = config.replay_share / (1 - config.replay_share)
            weights = [1.0, ratio * len(rows) / len(replayed)]
            rows += replayed
    _, gguf = locate(config.target)
    longest = max(len(row["input_ids"]) for row in rows)
    options = {"type": head_name(head), **dataclasses.asdict(head.config)}
    if head.draft_vocab_size < head.target.vocab_size:
        # Tokens of the old head and of the answers. None gives way: the answers do not tell which
        # of them other texts need.
        drafted = set(head.vocabulary().tolist())
        for row in rows:
            answer = zip(row["input_ids"], row["loss_mask"], strict=True)
            drafted.update(token for token, own in answer if own)
        options["draft_vocab_size"] = len(drafted)
    return TrainConfig(
        target=config.target,
        target_revision=manifest["revision"],
        dtype=manifest["dtype"],
        output=str(Path(config.output) / "training"),
        head=options,
        init_from=config.head,
        data=DataConfig(
            sources=[str(source) for source in sources],
            weights=weights,
            held_out=0.1,
            max_length=longest,
            cache=str(folder / "tokens"),  # recorded texts stay in this folder
        ),
        features=FeaturesConfig(
            # The outer modules of a GGUF file cannot be read alone.
            mode="stored" if gguf is None else "cached",
            folder=str(folder / "states"),
            format=manifest["format"],
        ),
        optim=OptimConfig(lr=config.lr),
        # One evaluation, at the end: the newest answers judge the head.
        loop=LoopConfig(
            max_steps=config.steps,
            batch_size=config.batch_size,
            eval_every=config.steps,
        ),
        eval=EvalConfig(max_new_tokens=config.max_new_tokens),
    )


def compute_states(training: TrainConfig, folder: Path) -> None:
    """Compute the states of replayed conversations, those that are judged on too.

    Raises:
        ValueError: another target than the recorded one, or a full disk.
        Stopped: Ctrl-C or SIGTERM, once the states so far are written.
    """
    older = [row for row in rows_of(folder / "judged.jsonl") if row.get("replayed")]
    examples = [Example.of_row(row) for row in rows_of(folder / CONVERSATIONS) + older]
    states = FeatureCache(folder / "states", manifest_of(folder / "states"))
    check_launch(training)
    accelerator, _ = start(training)
    if not lacking_in(accelerator, states, examples):
        return
    computed = dataclasses.replace(training.features, mode="cached")
    inputs = load_inputs(dataclasses.replace(training, features=computed), accelerator)
    cache = open_cache(
        accelerator, inputs.head, inputs.provenance, training.features, Path(training.output)
    )
    CachedFeatures(inputs.target, inputs.head, cache, accelerator).write(accelerator, examples)


def average_weights(head: DraftHead, earlier: DraftHead, share: float) -> None:
    """Move a head's weights towards those of an earlier one.

    They become `share` of the earlier ones and the rest of the head's own. On the way back it
    regains more of what it knew than it loses of what it has learned (WiSE-FT, arXiv:2109.01903).
    Rows of tokens that the earlier head cannot draft stay as they are.
    """
    own, theirs = head.state_dict(), earlier.state_dict()
    places_V = draft_ids(head.vocabulary(), earlier.vocabulary())
    common_V = places_V >= 0
    for name in own.keys() & theirs.keys():
        if not own[name].is_floating_point():
            continue
        before = theirs[name].to(own[name])
        has_row_for_each_token = any(
            name.startswith(f"{layer}.") for layer in head.vocabulary_layers
        )
        if has_row_for_each_token:
            own[name][common_V] = own[name][common_V].lerp(before[places_V[common_V]], share)
        else:
            own[name].lerp_(before, share)


def _architecture(head: DraftHead) -> dict[str, Any]:
    """All that two heads must have in common for their weights to be averaged.

    The draft vocabulary and the target's name may differ.
    """
    options = {**dataclasses.asdict(head.config), "draft_vocab_size": None}
    target = dataclasses.replace(head.target, name="")
    return {"head": head_name(head), "target": target, **options}
