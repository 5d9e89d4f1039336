"""Rows that yield no sequence: counted, named, written to a file, and refused if too many."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ...console import log
from ...files import write_whole
from ..config import DataConfig, SelfMadeConfig
from .token_cache import TokenCache, UnusedRow

REJECTED = "rejected.jsonl"
"""File in a run's folder with the rows that cannot be used."""
SHARE = 0.01
"""Share of rejected rows that is allowed by default."""
FEW = 10
"""Rejected rows that are allowed in any case, if they are at most `SHARE_OF_FEW` of all."""
SHARE_OF_FEW = 0.1
NAMED = 20
"""Rejected rows that a message names."""


def settle_unused_rows(
    cache: TokenCache,
    data: DataConfig,
    max_length: int,
    folder: Path | None,
    main_process: bool = True,
) -> None:
    """Report the rows of the sources, and write those that cannot be used to a file in the folder.

    Args:
        cache: the tokenized sources.
        data: says how many rejected rows are allowed.
        max_length: tokens of the longest sequence.
        folder: the run's; None writes no file.
        main_process: whether this process writes and reports for all.

    Raises:
        ValueError: more rejected rows than are allowed, or no answer tokens within `max_length`.
    """
    # 1. Count by reason.
    rejected = [row for row in cache.unused if row.why == "rejected"]
    too_long = sum(row.why == "too long" for row in cache.unused)
    unanswered = sum(row.why == "unanswered" for row in cache.unused)
    used = cache.read - len(cache.unused)
    limit = f"data.max_length {data.max_length}"
    if max_length < data.max_length:
        limit = f"the model's {max_length} positions"
    file = "" if folder is None else f" ({folder / REJECTED})"

    # 2. Write the rows before any error, so that it can name the file.
    if rejected and folder is not None and main_process:
        folder.mkdir(parents=True, exist_ok=True)
        _write_rejected(rejected, folder / REJECTED)

    # 3. Refuse, on every process: one conversation to train on and one to hold out must be left.
    if len(rejected) > allowed(data, cache.read):
        raise ValueError(_refusal(rejected, cache.read, data, file))
    if used < 2 and too_long:
        if used == 0:
            left = "no answer token is left: the answers of all"
        else:
            left = "one conversation is left: the answers of"
        raise ValueError(
            f"{left} {too_long} conversations begin after {limit}; choose a larger data.max_length,"
            " or shorter prompts"
        )
    if not main_process:
        return

    # 4. Report what was read.
    skipped = f"{len(rejected):,} skipped" + (file if rejected else "")
    log.info(
        f"{cache.read:,} rows read, {used:,} used, {cache.truncated:,} of them truncated at"
        f" {limit}; {too_long:,} dropped whose answers begin after it; {unanswered:,} without an"
        f" answer; {skipped}"
    )
    if rejected:
        log.warning(
            f"{_share(rejected, cache.read)} cannot be used and are skipped:\n{_named(rejected)}"
        )


def settle_rejected_prompts(rejected: list[UnusedRow], rows: int, config: SelfMadeConfig) -> None:
    """Report prompts that cannot be answered, and write them to a file beside the output.

    Raises:
        ValueError: more of them than are allowed.
    """
    if not rejected:
        return
    file = Path(f"{config.output}.{REJECTED}")
    file.parent.mkdir(parents=True, exist_ok=True)
    _write_rejected(rejected, file)
    if len(rejected) > allowed(config, rows):
        raise ValueError(_refusal(rejected, rows, config, f" ({file})", "bad_rows"))
    log.warning(
        f"{_share(rejected, rows)} cannot be answered and are skipped ({file}):\n{_named(rejected)}"
    )


def _write_rejected(rejected: list[UnusedRow], file: Path) -> None:
    """Write the rows to a file of JSON lines."""
    lines = [
        json.dumps({"source": row.source, "where": row.where, "reason": row.reason}) + "\n"
        for row in rejected
    ]
    write_whole(file, "".join(lines))


def allowed(data: DataConfig | SelfMadeConfig, rows: int) -> float:
    """Number of rejected rows, of all rows, that do not end the run."""
    if data.bad_rows == "refuse":
        return 0
    if data.bad_rows_limit is not None:
        return data.bad_rows_limit * rows
    # 1,000 rows: 10 by either. 100 rows: 10 of FEW. 20 rows: 2, a tenth.
    return max(SHARE * rows, min(FEW, SHARE_OF_FEW * rows))


def _refusal(
    rejected: list[UnusedRow],
    rows: int,
    data: DataConfig | SelfMadeConfig,
    file: str,
    option: str = "data.bad_rows",
) -> str:
    """The error for rows that are not allowed by the option of this name."""
    if data.bad_rows == "refuse":
        advice = f"mend them, or leave them out with {option} skip"
    else:
        # Rounded up to three decimals, so that the limit in the message would allow them.
        needed = math.ceil(1000 * len(rejected) / rows) / 1000
        limit = f"{SHARE:.0%}" if data.bad_rows_limit is None else str(data.bad_rows_limit)
        advice = (
            f"{option}_limit allows {limit}; mend them, or allow as many with {option}_limit"
            f" {needed}"
        )
    return f"{_share(rejected, rows)} cannot be used{file}; {advice}:\n{_named(rejected)}"


def _share(rejected: list[UnusedRow], rows: int) -> str:
    return f"{len(rejected):,} of {rows:,} rows ({len(rejected) / rows:.1%})"


def _named(rejected: list[UnusedRow]) -> str:
    """List the first rejected rows, one a line."""
    lines = [f"  {row.where}: {row.reason}" for row in rejected[:NAMED]]
    if len(rejected) > NAMED:
        lines.append(f"  and {len(rejected) - NAMED:,} more")
    return "\n".join(lines)
