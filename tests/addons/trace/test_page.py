"""The page of a trace, in headless Chromium: it plays, steps, hovers and counts as its data says,
without a network."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from headstart.addons.trace import Trace
from headstart.addons.trace.page import stats_data
from headstart.addons.trace.report import stats_of
from headstart.inference.trees.stats import PARTS

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a Chromium: apt-get install chromium"
)

Data = dict[str, Any]
Piece = tuple[str, str]
"""A token as it is shown, and its piece of the text."""
WORDS: list[Piece] = [
    (word, word)
    for word in (" the", " boat", " sails", ",", " over", " a", " lake", ".", " and", "\n")
]
LIVELY: list[Piece] = [
    (" שלום", " שלום"),
    (" عالم", " عالم"),
    ("⟨F0 9F⟩", ""),
    ("⟨9B B5⟩", "⛵"),
    ("👩‍🚀", "👩‍🚀"),
    ("\u202e", "\u202e"),
    ("\n", "\n"),
    ("   ", "   "),
    ("<b>", "<b>"),
    ("</script>", "</script>"),
]
"""Right-to-left words, halves of a character, a composed emoji, an override of direction, white
space, and HTML."""
HOSTILE = (
    "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'><!--"
    " {{TRACE_JSON}} {{TITLE}}"
)


def made_trace(
    rounds: int = 12,
    rule: str = "without_replacement",
    words: list[Piece] = WORDS,
    plain: bool = True,
    **more: Any,
) -> Data:
    """A trace with the given number of rounds, made up and consistent: trees of 12 nodes, five
    deep."""
    draws = random.Random(rounds)
    lookup = more.pop("lookup", False)
    made = []
    output = [{"v": 0, "p": words[0][1], "r": -1, "d": 0}]
    for index in range(rounds):
        found = made_round(draws, output[-1]["v"], rule, len(words), lookup, plain=index % 7 == 3)
        path = [n for n, node in enumerate(found["nodes"]) if node["s"] == 1]
        found["emitted"] = len(path)
        if index == rounds - 1 and len(path) > 1:  # the answer ends in the middle of the path
            found["emitted"] -= 1
        tokens = [found["nodes"][node]["v"] for node in path[1:]]
        emission = [*zip(tokens, (DEPTH[node] for node in path[1:])), (found["next"], 0)]
        for token, depth in emission[: found["emitted"]]:
            output.append({"v": token, "p": words[token][1], "r": index, "d": depth})
        made.append(found)
    stats = stats_of({"rounds": made, "stats": {"acceptance_rate_by_depth": [None] * max(DEPTH)}})
    stats.seconds["prefill"] = 0.04
    measured = {"ms_per_token": 15.0, "tokens_per_second": 66.7, "same_text": True}
    return {
        "version": 1,
        "target": "some/target",
        "head": "" if lookup else "some/head",
        "drafter": "HistoryDrafter" if lookup else "StaticTree(Eagle3Head, 12 nodes, depth 4)",
        "dtype": "float32",
        "rule": rule,
        "lossy": rule == "typical",
        "temperature": 0.0 if rule == "greedy" else 1.0,
        "vocab": [{"id": 100 + index, "t": shown} for index, (shown, _) in enumerate(words)],
        "prompt": "Write of a boat.",
        "output": output,
        "rounds": made,
        "stats": stats_data(stats),
        "plain": measured if plain else None,
        **more,
    }


PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 10]
DEPTH = [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 5]
"""Of the nodes of every tree."""


def made_round(
    draws: random.Random, newest: int, rule: str, vocabulary: int, lookup: bool, plain: bool
) -> Data:
    """A round after the newest token, but for `emitted`."""
    size = 1 if plain else len(PARENTS)
    tokens = [newest, *draws.choices(range(vocabulary), k=size - 1)]
    target = [distribution(draws, vocabulary) for _ in range(size)]
    draft = [distribution(draws, vocabulary) for _ in range(size)]
    nodes = [{"v": newest, "u": -1, "q": None, "p": None, "s": 1}]
    for node in range(1, size):
        above = PARENTS[node]
        q = None if lookup else draft[above][tokens[node]]
        p = target[above][tokens[node]]
        nodes.append({"v": tokens[node], "u": above, "q": q, "p": p, "s": -1})
    trials = []
    at = 0
    while True:
        accepted = 0
        rejected = False
        for child in (node for node in range(1, size) if PARENTS[node] == at):
            if accepted and rule not in ("greedy", "typical"):
                break
            nodes[child]["s"] = 0
            ok = draws.random() < 0.6
            if rule != "greedy":
                trials.append({"n": at, "c": child, **trial(draws, rule, ok)})
                rejected = rejected or not ok
            accepted = accepted or (child if ok else 0)
        if not accepted:
            break
        nodes[accepted]["s"] = 1
        if rule == "greedy":
            best_token = tokens[accepted]
            trials.append({"n": at, "c": accepted, "kind": "best", "u": None, "token": best_token})
        at = accepted
    following = draws.randrange(vocabulary)
    kind = "best" if rule in ("greedy", "typical") else "sample"
    last = {"n": at, "c": None, "kind": kind, "u": None, "token": following}
    parts = {part: round(draws.uniform(0.1, 9.0), 3) for part in PARTS}
    of_draft = {} if lookup or plain else {str(node): best(draft[node]) for node in range(size)}
    return {
        "ms": round(sum(parts.values()), 4),
        "parts": parts,
        "fallback": "slower" if plain else "",
        "nodes": nodes,
        "draft": of_draft,
        "best": {str(node): best(target[node]) for node in range(size)},
        "draws": [*trials, last],
        "residual": best(target[at]) if rejected and kind == "sample" else None,
        "next": following,
    }


def trial(draws: random.Random, rule: str, ok: bool) -> Data:
    """A draft that is accepted or not, by a number and its limit."""
    limit = round(draws.uniform(0.1, 0.9), 4)
    if ok != (rule == "typical"):
        number = limit * draws.uniform(0.1, 0.9)
    else:
        number = limit * draws.uniform(1.05, 1.1)
    kind = "typical" if rule == "typical" else "accept"
    return {"kind": kind, "u": round(number, 4), "limit": limit, "ok": ok}


def distribution(draws: random.Random, count: int) -> list[float]:
    weights = [draws.random() ** 3 + 1e-3 for _ in range(count)]
    return [round(weight / sum(weights), 4) for weight in weights]


def best(probs: list[float]) -> list[list[float]]:
    return [
        [token, probs[token]]
        for token in sorted(range(len(probs)), key=lambda token: -probs[token])[:10]
    ]


expect.set_options(timeout=30_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page of a trace; at the end it must have asked for nothing, and reported nothing on
    the console."""
    asked: list[str] = []
    reported: list[str] = []
    contexts = []

    def call(data: Data, **options: Any) -> Page:
        path = Trace(data).save(tmp_path / f"trace{len(contexts)}.html")
        contexts.append(
            browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        )
        contexts[-1].set_offline(True)
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: reported.append(message.text))
        page.on("pageerror", lambda error: reported.append(str(error)))
        page.goto(path.as_uri())
        return page

    yield call
    for context in contexts:
        context.close()
    assert reported == []
    assert [url for url in asked if not re.search(r"/trace\d\.html$", url)] == []


def go(page: Page, number: int) -> None:
    """Step to a round, counted from 1."""
    page.locator("#slider").evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')) }",
        number,
    )
    expect(page.locator("#round-title")).to_have_text(f"Round {number}")


def node(page: Page, index: int) -> Locator:
    return page.locator(f'#tree [data-n="{index}"]')


def word(data: Data, token: int) -> str:
    """A token as the page shows it."""
    return data["vocab"][token]["t"].replace(" ", "␣").replace("\n", "↵")


def answer(data: Data) -> str:
    return "".join(token["p"] for token in data["output"])


def at_each_round(page: Page, expression: str) -> list[Any]:
    """The value of a JavaScript expression at each round, stepped to by the slider."""
    return page.evaluate(f"""() => {{
            const slider = document.getElementById("slider");
            return Array.from({{ length: Number(slider.max) }}, (_, index) => {{
                slider.value = index + 1;
                slider.dispatchEvent(new Event("input"));
                return {expression};
            }});
        }}""")


def test_buttons_and_keys_step_and_it_plays_to_the_end(opened):
    page = opened(made_trace(12))
    title = page.locator("#round-title")
    for press, number in (
        (lambda: page.get_by_role("button", name="One round on").click(), 2),
        (lambda: page.keyboard.press("ArrowRight"), 3),
        (lambda: page.get_by_role("button", name="One round back").click(), 2),
        (lambda: page.keyboard.press("ArrowLeft"), 1),
        (lambda: page.keyboard.press("ArrowLeft"), 1),
        (lambda: page.keyboard.press("End"), 12),
        (lambda: page.keyboard.press("ArrowRight"), 12),
        (lambda: page.keyboard.press("Home"), 1),
        (lambda: page.get_by_role("button", name="Last round").click(), 12),
        (lambda: page.get_by_role("button", name="First round").click(), 1),
    ):
        press()
        expect(title).to_have_text(f"Round {number}")
        expect(page.locator("#where")).to_have_text(f"Round {number} of 12")
        assert page.locator("#slider").input_value() == str(number)
    page.locator("#speed").select_option("10")
    page.locator("#play").click()
    expect(page.locator("#play")).to_have_text("Pause")
    expect(title).to_have_text("Round 12")
    expect(page.locator("#play")).to_have_text("Play")


def test_the_sentence_of_a_round_counts_and_is_announced(opened):
    data = made_trace(12)
    said = """[document.getElementById("sentence").textContent, document.querySelector("[role=status]").textContent]"""
    for number, (sentence, spoken) in enumerate(at_each_round(opened(data), said), start=1):
        assert spoken == f"Round {number}: {sentence}"
        found = data["rounds"][number - 1]
        accepted = sum(each["s"] == 1 for each in found["nodes"]) - 1
        if found["fallback"]:
            assert sentence.startswith("No drafts in this round (drafts were slower")
        elif found["emitted"] <= accepted:
            assert f"5 deep, {accepted} accepted. The answer ends here" in sentence
        else:
            assert sentence.startswith(f"11 tokens drafted, 5 deep, {accepted or 'none'} accepted")


def test_the_text_grows_and_shrinks_with_the_rounds(opened):
    data = made_trace(12)
    page = opened(data)
    tokens = page.locator("#answer .t")
    for number in (12, 2, 7):
        go(page, number)
        assert page.locator("#answer .t:not(.off)").count() == sum(
            token["r"] < number for token in data["output"]
        )
        assert page.locator("#answer .now").count() == data["rounds"][number - 1]["emitted"]
    assert page.locator("#answer").evaluate("each => each.textContent") == answer(data)
    shown = tokens.evaluate_all("""all => all.map(each =>
        [each.checkVisibility({ visibilityProperty: true }), each.dataset.d, each.className])""")
    for token, (seen, depth, classes) in zip(data["output"], shown):
        assert seen is (token["r"] < 7)
        assert depth == (str(token["d"]) if token["d"] else None)
        assert (f"d{token['d']}" if token["d"] else "own") in classes.split()


def test_a_click_on_a_token_shows_its_round_and_node(opened):
    data = made_trace(12)
    page = opened(data)
    drafted = next(
        i for i, token in enumerate(data["output"]) if token["d"] == 1 and token["r"] == 4
    )
    own = next(i for i, token in enumerate(data["output"]) if token["d"] == 0 and token["r"] == 5)
    for index, number in ((drafted, 5), (own, 6)):
        page.keyboard.press("End")
        page.locator(f'#answer [data-i="{index}"]').click()
        expect(page.locator("#round-title")).to_have_text(f"Round {number}")
        selected = page.locator('#tree [aria-selected="true"]')
        assert selected.locator(".tok").text_content() == word(data, data["output"][index]["v"])
        assert ("own" in selected.get_attribute("class").split()) is (index == own)


ROWS = """() => Array.from(document.querySelectorAll("#best tbody tr"), row => [
    row.className, row.cells[1].querySelector(".tok").textContent, ...[0, 2].map(cell => row.cells[cell].textContent)
])"""
"""Rows of the table of the ten best: class, token, draft and target probability."""


def test_hovering_a_node_shows_the_ten_best_of_draft_and_target(opened):
    data = made_trace(5)
    page = opened(data)
    found = data["rounds"][0]
    for index in (1, 4):
        node(page, index).hover()
        parent = str(found["nodes"][index]["u"])
        rows = page.evaluate(ROWS)
        assert [token for kind, token, *_ in rows if "here" in kind] == [
            word(data, found["nodes"][index]["v"])
        ]
        for place, name in enumerate(("draft", "best"), start=2):
            numbers = {row[1]: float(row[place].replace("−", "-")) for row in rows}
            wanted = {word(data, token): value for token, value in found[name][parent]}
            assert len(wanted) == 10 and numbers == pytest.approx(wanted, rel=0.06, abs=6e-4)
    page.mouse.move(5, 5)
    assert page.locator('#tree [aria-selected="true"]').get_attribute("data-n") == str(
        len(found["nodes"])
    )


def test_the_keyboard_reaches_every_node_and_does_not_step_there(opened):
    data = made_trace(5)
    page = opened(data)
    page.locator('#tree [tabindex="0"]').focus()
    page.keyboard.press("Home")
    reached = []
    for _ in range(len(data["rounds"][0]["nodes"]) + 1):
        reached.append(page.evaluate("document.activeElement.dataset.n"))
        assert page.locator('#tree [aria-selected="true"]').get_attribute("data-n") == reached[-1]
        page.keyboard.press("ArrowDown")
    assert sorted(map(int, reached)) == list(range(13))
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    child = page.evaluate("document.activeElement.dataset.n")
    assert child != "0"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.n") == "0"
    expect(page.locator("#round-title")).to_have_text("Round 1")
    assert page.locator('#tree [tabindex="0"]').count() == 1


NODES = """({
    nodes: Object.fromEntries(Array.from(document.querySelectorAll("#tree [data-n]"), each => [each.dataset.n, {
        state: each.className.split(" ")[1],
        label: each.getAttribute("aria-label"),
        why: each.querySelector(".why")?.textContent,
    }])),
    residual: document.getElementById("residual-part").checkVisibility(),
    own: document.querySelectorAll("#draws li.own").length,
})"""
"""The tree as it is shown, and whether a residual is."""


@pytest.mark.parametrize("rule", ["greedy", "without_replacement", "typical"])
def test_nodes_say_what_became_of_them_and_why(opened, rule):
    data = made_trace(12, rule)
    reasons = set()
    for found, shown in zip(data["rounds"], at_each_round(opened(data), NODES), strict=True):
        tried = {
            draw["c"]: draw for draw in found["draws"] if draw["kind"] in ("accept", "typical")
        }
        best = {draw["n"]: draw["token"] for draw in found["draws"] if draw["kind"] == "best"}
        for index, each in enumerate(found["nodes"][1:], start=1):
            state, label, why = (
                shown["nodes"][str(index)].get(name) for name in ("state", "label", "why")
            )
            assert state == {1: "accepted", 0: "rejected", -1: "unreached"}[each["s"]]
            if each["s"] == -1:
                reason = "never reached"
            elif rule == "greedy":
                text = word(data, best[each["u"]])
                reason = (
                    f"the target’s best token is “{text}”"
                    if each["s"] == 0
                    else "it is the target’s best token"
                )
                assert why == (f"best: {text}" if each["s"] == 0 else "target’s best")
            elif rule == "typical" and tried[index]["ok"] and each["s"] == 0:
                reason = "a longer or likelier path won"
                assert why == "other path won"
            else:
                draw = tried[index]
                left, sign, right = re.match(r"([\d.]+) (<|>|≤) ([\d.]+)$", why).groups()
                assert float(left) == pytest.approx(draw["u"], abs=0.006)
                assert float(right) == pytest.approx(draw["limit"], abs=0.006)
                assert sign == {"typical": "≤>"}.get(rule, "><")[draw["ok"]]
                reason = (
                    "plausible"
                    if draw["ok"] and rule == "typical"
                    else "accepted"
                    if draw["ok"]
                    else "rejected"
                )
            assert reason in label
            reasons.add(reason.partition("“")[0])
        assert shown["nodes"][str(len(found["nodes"]))]["state"] == "own"
        assert shown["residual"] is (found["residual"] is not None)
        assert shown["own"] == 1
    assert len(reasons) == (4 if rule == "typical" else 3)


def test_the_time_of_a_round_is_shown_by_part(opened):
    data = made_trace(3)
    page = opened(data)
    for number, found in enumerate(data["rounds"], start=1):
        go(page, number)
        text = page.locator("#time").text_content()
        assert text.startswith(f"{found['ms']:.1f} ms")
        shown = [
            float(each)
            for each in re.findall(r"([\d.]+) ms", page.locator("#time .parts").text_content())
        ]
        assert shown == pytest.approx([found["parts"][part] for part in PARTS], abs=0.06)
        assert f"{15 * found['emitted']:.1f} ms by plain decoding" in text


@pytest.mark.parametrize("rounds", [1, 12, 40])
def test_counts_equal_those_of_stats_and_so_far_becomes_the_whole(opened, rounds):
    data = made_trace(rounds)
    page = opened(data)
    page.keyboard.press("End")
    stats = data["stats"]
    wanted = {
        "rounds": str(stats["rounds"]),
        "plain_rounds": str(stats["plain_rounds"]),
        "tokens": str(stats["tokens"]),
        "acceptance_length": f"{stats['acceptance_length']:.2f}",
        "tokens_per_second": f"{stats['tokens_per_second']:.1f}",
        "speed": f"{stats['tokens_per_second'] * 0.015:.2f}×",
        "prefill_ms": "40.0 ms",
    }
    for name, text in wanted.items():
        whole = page.locator(f'[data-stat="{name}"]').text_content()
        if name == "acceptance_length" and stats["interval"]:
            low, high = stats["interval"]
            assert whole == f"{text} ({low:.2f} to {high:.2f})"
        else:
            assert whole == text
        assert page.locator(f'[data-so-far="{name}"]').text_content() == text
    for depth, rate in enumerate(stats["acceptance_rate_by_depth"]):
        text = "–" if rate is None else f"{rate:.2f}"
        assert page.locator(f'[data-rate="{depth}"]').text_content() == text
        assert page.locator(f'[data-rate-so-far="{depth}"]').text_content() == text
    if rounds > 1:
        go(page, rounds // 2)
        first = data["rounds"][: rounds // 2]
        assert page.locator('[data-so-far="tokens"]').text_content() == str(
            sum(each["emitted"] for each in first)
        )


def test_text_of_the_data_is_never_markup(opened):
    data = made_trace(
        4,
        words=[(HOSTILE, HOSTILE), ("<b>", "<b>"), ("&amp;", "&amp;"), ("<!--", "<!--")],
        prompt=HOSTILE,
    )
    for name in ("target", "head", "drafter", "dtype"):
        data[name] = HOSTILE
    page = opened(data)
    for number in range(1, 5):
        go(page, number)
        node(page, 1).hover()
    page.locator("#race-speed").select_option("4")
    page.locator("#race-play").click()
    expect(page.locator("#race-end")).not_to_be_empty()
    assert page.locator("#prompt").text_content() == HOSTILE
    assert page.locator("#answer").evaluate("each => each.textContent") == answer(data)
    assert page.locator("#ours-stream").evaluate("each => each.textContent") == answer(data)
    assert page.evaluate("window.broken") is None
    assert page.locator("img, main b:text-is('<b>')").count() == 0
    assert page.locator("script").count() == 2


def test_half_characters_emoji_and_right_to_left_text(opened):
    data = made_trace(12, words=LIVELY, prompt="שלום\n🙂 \u202eabc")
    page = opened(data)
    page.keyboard.press("End")
    assert page.locator("#answer").evaluate("each => each.textContent") == answer(data)
    chips = """Array.from(document.querySelectorAll("#tree .tok, #draws .tok, #best .tok"), each =>
        [each.textContent, getComputedStyle(each).unicodeBidi])"""
    found = [chip for chips in at_each_round(page, chips) for chip in chips]
    assert {bidi for _, bidi in found} == {"isolate"}
    assert {"⟨U+202E⟩", "⟨F0 9F⟩", "␣␣␣", "↵", "␣שלום", "👩\u200d🚀"} <= {text for text, _ in found}
    assert not any("\u202e" in text for text, _ in found)
    overriding = page.locator("#answer .t:has-text('\u202e')").first
    assert overriding.evaluate("each => getComputedStyle(each).unicodeBidi") == "isolate"


def test_a_lossy_rule_is_called_lossy(opened):
    text = opened(made_trace(3, "typical")).locator("#promise").text_content()
    assert text.startswith("Lossy.") and "does not have the target’s distribution" in text
    for rule, word in (("greedy", "Greedy"), ("without_replacement", "Exact")):
        promise = opened(made_trace(3, rule)).locator("#promise")
        assert promise.text_content().startswith(word) and "lossy" not in promise.get_attribute(
            "class"
        )


def test_a_lookup_has_no_draft_probabilities(opened):
    page = opened(made_trace(3, "greedy", lookup=True))
    node(page, 1).hover()
    expect(page.locator("#best-note")).to_contain_text("has no probabilities")
    assert "q " not in node(page, 1).text_content()
    assert page.locator("#best tbody tr").count() >= 10


def test_the_race_runs_in_measured_time(opened):
    data = made_trace(8)
    page = opened(data)
    expect(page.locator("#race-clock")).to_have_text("0.00 s")
    page.evaluate("window.requestAnimationFrame = drawn => { window.frame = drawn; return 1 }")
    page.locator("#race-play").click()
    page.evaluate("frame(500); frame(600)")
    page.locator("#race-speed").select_option("0.05")
    page.evaluate("frame(1000)")
    expect(page.locator("#race-clock")).to_have_text("0.12 s")
    page.locator("#race-play").click()
    expect(page.locator("#race-play")).to_have_text("Go on")
    clock = 100 + 400 * 0.05
    ends = {
        index: sum(each["ms"] for each in data["rounds"][: index + 1]) for index in range(-1, 8)
    }
    for name, times in (
        ("plain", [40 + 15 * index for index in range(len(data["output"]))]),
        ("ours", [40 + ends[token["r"]] for token in data["output"]]),
    ):
        count = int(page.locator(f"#{name}-count").text_content().split()[0])
        assert 1 < count == sum(time <= clock for time in times)
    page.locator("#race-play").click()
    page.evaluate("frame(2000); frame(20000)")
    expect(page.locator("#race-play")).to_have_text("Again")
    end = page.locator("#race-end")
    expect(end).to_contain_text(f"Speculative decoding took {(40 + ends[7]) / 1000:.2f} s")
    expect(end).to_contain_text(
        f"plain decoding {(40 + 15 * (len(data['output']) - 1)) / 1000:.2f} s"
    )
    for name in ("plain", "ours"):
        assert page.locator(f"#{name}-stream").evaluate("each => each.textContent") == answer(data)
    page.locator("#race-reset").click()
    expect(page.locator("#ours-count")).to_have_text("0 tokens")
    assert page.locator("#ours-stream").text_content() == ""


def test_without_a_measurement_of_plain_decoding_nothing_is_claimed(opened):
    page = opened(made_trace(3, plain=False))
    expect(page.locator("#race-note")).to_contain_text("no measurement of plain decoding")
    assert page.locator("#race-play").count() == 0
    assert page.locator('[data-stat="speed"]').count() == 0
    assert "plain" not in page.locator("#time").text_content()


def test_a_trace_without_rounds(opened):
    page = opened(made_trace(0, plain=False))
    expect(page.locator("#sentence")).to_contain_text("nothing to draft")
    assert page.locator("#answer").text_content() == WORDS[0][1]
    page.keyboard.press("ArrowRight")
    page.locator("#play").click()
