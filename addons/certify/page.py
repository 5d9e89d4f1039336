"""A certificate as text: console lines and a Markdown page from a `headstart certify` report."""

from __future__ import annotations

from typing import Any

from ...console import table_cell

WEAK = 0.3
"""Smallest detectable total variation from which a sampling test says little."""


def summary(report: dict[str, Any]) -> list[str]:
    """The facts that a user needs, a line for each."""
    greedy = report["greedy"]
    lines = [
        f"greedy: {greedy['exact_answers']} of {greedy['answers']} answers are the target's own; "
        f"{greedy['not_best']} of {greedy['tokens']} tokens are not the best one{_margins(greedy)}"
    ]
    rounding = greedy["rounding"]
    lines.append(
        f"rounding in {report['engine']['dtype']} changes a gap between two logits by"
        f" {greedy['tie']:.2g} at most (e), median"
        f" {rounding['change_of_a_gap'].get('median', 0):.2g}; one-token forwards choose"
        f" {rounding['one_token_forwards_not_best']} tokens that are not the best one, by"
        f" {rounding['one_token_forwards_largest_margin']:.2g} at most"
    )
    reported = greedy["engine_tells"]
    if "log_prob_difference" in reported:
        difference = reported["log_prob_difference"]
        lines.append(
            f"the engine's log-probabilities differ from the target's by {difference['median']:.2g}"
            f" (median), {difference['largest']:.2g} (largest)"
        )
    if report["sampling"] is not None:
        lines += _sampling_lines(report["sampling"])
    lines += [f"not tested: {reason}" for reason in report["untested"]]
    if "ids_by" in report["engine"] and "text" in report["engine"]["ids_by"]:
        lines.append(
            "the server gives neither token ids nor log-probabilities: its tokens were derived from"
            " the text, in the way that suits the target best"
        )
    lines += [f"reason: {reason}" for reason in report["reasons"]]
    lines.append(f"verdict: {verdict_words(report)}")
    return lines


def verdict_words(report: dict[str, Any]) -> str:
    """The verdict, with e where there are ties."""
    if report["verdict"] == "identical up to ties":
        return f"identical up to ties within {report['greedy']['tie']:.2g}"
    return str(report["verdict"])


def _margins(greedy: dict[str, Any]) -> str:
    margins = greedy["margins"]
    if not margins:
        return ""
    largest = "infinitely far" if margins[-1] is None else f"{margins[-1]:.2g}"
    return f", by {margins[len(margins) // 2] or 0:.2g} (median), {largest} (largest)"


def _sampling_lines(sampling: dict[str, Any]) -> list[str]:
    draws = sampling["prompts"] * sampling["draws_of_each"]
    # Positions with too few draws for a test have None.
    positions = sampling["positions"]
    tested_rows = [row for row in positions if row["detectable_everywhere"] is not None]
    measured = [row["detectable_everywhere"] for row in tested_rows]
    tested = [row["token"] for row in tested_rows]
    head = (
        f"sampling: {draws} continuations of {sampling['prompts']} prompts, {sampling['tests']}"
        " tests"
    )
    if not measured:
        return [f"{head}: too few draws to say anything"]
    partly = ""
    if len(tested) < len(positions):
        partly = f" at tokens {', '.join(map(str, tested))} alone"
    lines = [
        f"{head}; a difference of {max(measured):.2f} in total variation, the same everywhere, is"
        f" seen with probability {sampling['power']}{partly}"
    ]
    if max(measured) > WEAK:
        lines.append(
            "these are few draws: only coarse differences would be seen; raise samples or"
            " sample_prompts"
        )
    return lines


def page(report: dict[str, Any]) -> str:
    """The certificate in Markdown."""
    # 1. The verdict, its reasons, and what was judged.
    engine = report["engine"]
    greedy = report["greedy"]
    target = report["target"]
    parts = [f"# Certificate: {verdict_words(report)}", ""]
    parts += [f"- {reason}" for reason in report["reasons"]]
    parts += ["", "| | |", "|---|---|"]
    named = [
        f"{key} {value}"
        for key, value in engine.items()
        if key not in ("kind", "lossy", "dtype") and value
    ]
    rows = {
        "engine": ", ".join([engine["kind"], *named]),
        "dtype of the engine": engine["dtype"],
        "target": f"{target['target']}, weights {target['weights']}",
        "reference": report["reference"],
        "prompts": f"{report['prompts']['count']} of {', '.join(report['prompts']['files'])}",
        "greedy tokens": f"{report['options']['max_new_tokens']} for each prompt at most",
        "hardware": report["hardware"],
        "versions": ", ".join(
            f"{name} {version}" for name, version in report["versions"].items() if version
        ),
    }
    parts += [f"| {name} | {table_cell(value)} |" for name, value in rows.items()]
    # 2. Greedy answers: the console's lines without its verdict, and where they diverge.
    parts += ["", "## Greedy", ""]
    parts += summary({**report, "reasons": [], "sampling": None, "untested": []})[:-1]
    tables = {
        "Where answers leave the target's own first, counted from 1; from there on the target"
        " judges the engine's text.": greedy["first_divergences"],
        "Tokens that rounding does not explain.": greedy["unexplained"],
    }
    for about, divergences in tables.items():
        if divergences:
            parts += [
                "",
                about,
                "",
                "| prompt | token | chosen | best | margin |",
                "|---" * 5 + "|",
            ]
        for row in divergences:
            parts.append(
                f"| {row['prompt']} | {row['token']} | {_text(row['chosen'])} |"
                f" {_text(row['best'])} | {_figure(row['margin'], '{:.3g}')} |"
            )
    # 3. Draws, and what was not tested.
    if report["sampling"] is not None:
        parts += _sampling_page(report["sampling"])
    if report["untested"]:
        parts += ["", "## Not tested", ""]
        parts += [f"- {reason}" for reason in report["untested"]]
    return "\n".join(parts) + "\n"


def _sampling_page(sampling: dict[str, Any]) -> list[str]:
    warpers = f"temperature {sampling['temperature']:g}"
    if sampling["top_k"]:
        warpers += f", top_k {sampling['top_k']}"
    if sampling["top_p"] < 1:
        warpers += f", top_p {sampling['top_p']:g}"
    parts = [
        "",
        "## Sampling",
        "",
        (
            f"{sampling['draws_of_each']} continuations of each of {sampling['prompts']} prompts,"
            f" {warpers}; {sampling['tests']} tests, a false alarm in"
            f" {sampling['false_alarms']:.0%} of all certificates of exact engines. Detectable is"
            f" the smallest total variation that is seen with probability {sampling['power']}, if"
            " it is the same after every prompt, or after one alone. Surprise is by how many nats"
            " the drawn tokens are less likely than the target's own draws."
        ),
        "",
        (
            "| token | draws | chi-square | freedom | p | surprise | p | rejected tests |"
            " detectable | at one prompt |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sampling["positions"]:
        cells = [
            row["token"],
            row["draws"],
            _figure(row["chi_square"], "{:.4g}"),
            row["freedom"],
            _figure(row["p"], "{:.2g}"),
            f"{row['nats_less_likely']:+.3f} ± {row['standard_error']:.3f}",
            _figure(row["p_of_the_surprise"], "{:.2g}"),
            row["rejected"],
            _figure(row["detectable_everywhere"], "{:.3f}"),
            _figure(row["detectable_at_one_prompt"], "{:.3f}"),
        ]
        parts.append("| " + " | ".join(map(str, cells)) + " |")
    if sampling["impossible"]:
        parts += [
            "",
            "Draws of tokens with probability 0.",
            "",
            "| prompt | after | token | draws |",
            "|---|---|---|---|",
        ]
        for row in sampling["impossible"]:
            parts.append(
                f"| {row['prompt']} | {_text(row['after'])} | {_text(row['token'])} |"
                f" {row['draws']} |"
            )
    return parts


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _text(text: str) -> str:
    """A token's text as code that no table breaks on."""
    return "`" + repr(text)[1:-1].replace("|", "\\|").replace("`", "'") + "`"
