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


def report_unused_rows(
    cache: TokenCache,
    data: DataConfig,
    max_length: int,
    folder: Path | None,
    main_process: bool = True,
) -> None:
    """Report the rows of the sources, and write those that cannot be used to a file in the folder.

    Args:
        data: says how many rejected rows are allowed.
        max_length: tokens of the longest sequence.
        folder: the run's; None writes no file.
        main_process: whether this process writes and reports for all.

    Raises:
        ValueError: more rejected rows than are allowed, or no answer tokens within `max_length`.
    """
    # 1. Rows that cannot be used.
    rejected = [row for row in cache.unused if row.why == "rejected"]
    file = None if folder is None else folder / REJECTED
    _report_rejected(rejected, cache.read, data, file, "data.bad_rows", "used", main_process)

    # 2. Refuse, on every process: one conversation to train on and one to hold out must be left.
    too_long = sum(row.why == "too long" for row in cache.unused)
    used = cache.read - len(cache.unused)
    limit = f"data.max_length {data.max_length}"
    if max_length < data.max_length:
        limit = f"the model's {max_length} positions"
    if used < 2 and too_long:
        if used == 0:
            left = "no answer token is left: the answers of all"
        else:
            left = "one conversation is left: the answers of"
        raise ValueError(
            f"{left} {too_long} conversations begin after {limit}; choose a larger data.max_length,"
            " or shorter prompts"
        )

    # 3. Report what was read.
    if main_process:
        unanswered = sum(row.why == "unanswered" for row in cache.unused)
        skipped = f"{len(rejected):,} skipped"
        if rejected and file is not None:
            skipped += f" ({file})"
        log.info(
            f"{cache.read:,} rows read, {used:,} used, {cache.truncated:,} of them truncated at"
            f" {limit}; {too_long:,} dropped whose answers begin after it; {unanswered:,} without"
            f" an answer; {skipped}"
        )


def report_rejected_prompts(rejected: list[UnusedRow], rows: int, config: SelfMadeConfig) -> None:
    """Report prompts that cannot be answered, and write them to a file beside the output.

    Raises:
        ValueError: more of them than are allowed.
    """
    file = Path(f"{config.output}.{REJECTED}")
    _report_rejected(rejected, rows, config, file, "bad_rows", "answered")


def _report_rejected(
    rejected: list[UnusedRow],
    rows: int,
    options: DataConfig | SelfMadeConfig,
    file: Path | None,
    option: str,
    verb: str,
    main_process: bool = True,
) -> None:
    """Report rejected rows, of all `rows`, and write them to a file, unless it is None.

    `option` is the name of the option bad_rows, and `verb` what cannot be done to the rows.
    """
    if not rejected:
        return
    # 1. Write the rows before any error, so that it can name the file.
    if file is not None and main_process:
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"source": row.source, "where": row.where, "reason": row.reason}) + "\n"
            for row in rejected
        ]
        write_whole(file, "".join(lines))
    place = "" if file is None else f" ({file})"
    share = f"{len(rejected):,} of {rows:,} rows ({len(rejected) / rows:.1%})"
    named = "\n".join(f"  {row.where}: {row.reason}" for row in rejected[:NAMED])
    if len(rejected) > NAMED:
        named += f"\n  and {len(rejected) - NAMED:,} more"

    # 2. Refuse more than are allowed, on every process.
    if len(rejected) > allowed(options, rows):
        if options.bad_rows == "refuse":
            advice = f"mend them, or leave them out with {option} skip"
        else:
            # Rounded up to three decimals, so that the limit in the message would allow them.
            needed = math.ceil(1000 * len(rejected) / rows) / 1000
            limit = f"{SHARE:.0%}" if options.bad_rows_limit is None else options.bad_rows_limit
            advice = (
                f"{option}_limit allows {limit}; mend them, or allow as many with {option}_limit"
                f" {needed}"
            )
        raise ValueError(f"{share} cannot be {verb}{place}; {advice}:\n{named}")
    if main_process:
        log.warning(f"{share} cannot be {verb} and are skipped{place}:\n{named}")


def allowed(data: DataConfig | SelfMadeConfig, rows: int) -> float:
    """Number of rejected rows, of all rows, that do not end the run."""
    if data.bad_rows == "refuse":
        return 0
    if data.bad_rows_limit is not None:
        return data.bad_rows_limit * rows
    # 1,000 rows: 10 by either. 100 rows: 10 of FEW. 20 rows: 2, a tenth.
    return max(SHARE * rows, min(FEW, SHARE_OF_FEW * rows))
