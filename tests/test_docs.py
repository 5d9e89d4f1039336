"""README.md and docs/: commands have the options they show, Python blocks run, figures are those of
benchmarks/."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import site_pages
from families import FAMILIES
from messages import lacking
from runs import ROOT

DOCS = ROOT / "docs"


def texts(paths: Iterable[Path], before: str = "") -> dict[str, str]:
    """Pages by their names."""
    return {before + path.name: path.read_text("utf-8") for path in sorted(paths)}


README = texts([ROOT / "README.md"])
HEAD_PAGES = texts((DOCS / "heads").glob("*.md"), "heads/")
PAGES = README | texts(DOCS.glob("*.md")) | HEAD_PAGES
FIGURES = texts((ROOT / "benchmarks").glob("*.md"))
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NOT_RUN = "<!-- not run: "
"""Before a Python block that needs what a test has not, with the reason."""
OF_OTHERS = {"config", "help", "num_processes"}
"""Options of the parser and of accelerate."""


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """Code blocks of a page, each after the line before it."""
    return re.findall(rf"([^\n]*)\n```{language}\n(.*?)```", PAGES[page], re.DOTALL)


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


def command_lines(page: str) -> list[list[str]]:
    """Words of each command of headstart in a page's bash blocks: the command and its arguments."""
    found = []
    for _, block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"headstart [a-z]", line):
                found.append(shlex.split(line, comments=True)[1:])
            elif "scripts/train.py" in line:
                words = shlex.split(line, comments=True)
                found.append(["train", *words[words.index("scripts/train.py") + 1 :]])
    return found


COMMANDS = [(page, words) for page in PAGES for words in command_lines(page)]


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_a_documented_command_line_is_parsed_by_its_command(page, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # files of configs/ are named from there
    try:
        site_pages.asked(words[0], words[1:])()
    except SystemExit:
        pytest.fail(f"{page}: headstart {' '.join(words)}\n{capsys.readouterr().err}")


def test_make_targets_and_extras_that_pages_name_exist():
    text = "\n".join((*PAGES.values(), (ROOT / "CONTRIBUTING.md").read_text("utf-8")))
    made = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test", "docs"} <= made <= MAKE_TARGETS
    extras = set(re.findall(r"""pip install ['"]\.\[(\w+)\]""", text))
    assert {"otel"} <= extras <= PROJECT["optional-dependencies"].keys()


def options_of(command: str) -> list[site_pages.Option]:
    return list(site_pages.documented_options(site_pages.asked(command).args[0]))


# options of servers are there
@pytest.mark.parametrize("page", [page for page in PAGES if page != "serving.md"])
def test_options_that_a_page_names_in_its_text_exist(page):
    known = {option.name for command in site_pages.COMMANDS for option in options_of(command)}
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    code = " ".join(re.findall(r"`([^`]*)`", text))
    named = set(re.findall(r"(?<!\S)--([a-z_.]+)", code))
    assert named - OF_OTHERS <= known


def test_what_the_dockerfile_runs_is_here():
    """Nothing here can build it."""
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    made = {line.split()[-1] for line in lines if line.startswith("RUN make")}
    assert made == {"setup"}
    assert lines[-1] == 'CMD ["make", "demo"]'
    assert {"setup", "demo"} <= MAKE_TARGETS
    comments = [line.removeprefix("#   ") for line in lines if line.startswith("#   ")]
    assert all(comment in PAGES["platforms.md"] for comment in comments)


def test_every_command_that_a_notebook_needs_is_a_class_of_options_and_a_function():
    text = PAGES["python.md"].partition("| command | from | options | function |")[2]
    table = text.partition("\n\n")[0].splitlines()[2:]
    assert len(table) >= 8
    for line in table:
        command, module, options, function = re.findall(r"`(.+?)`", line)
        assert command in site_pages.COMMANDS
        code = importlib.import_module(module)
        assert dataclasses.is_dataclass(getattr(code, options))
        first = next(iter(inspect.signature(getattr(code, function)).parameters.values()))
        assert first.annotation == options


@pytest.mark.parametrize("page", PAGES)
def test_files_that_commands_name_exist(page):
    for _, block in blocks(page, "bash"):
        for name in re.findall(
            r"(?<![\w/.-])(?:configs|benchmarks|examples|scripts)/[\w./+-]+", block
        ):
            assert (ROOT / name).exists(), f"{page} names {name}"


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_compile_and_a_reason_stands_before_what_is_not_run(page):
    for before, block in blocks(page, "python"):
        compile(block, page, "exec")
        assert not before.startswith("<!--") or (
            before.startswith(NOT_RUN) and before.endswith(" -->")
        ), before


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_run_one_after_the_other(page):
    run = [code for before, code in blocks(page, "python") if not before.startswith(NOT_RUN)]
    subprocess.run([sys.executable, "-c", "\n".join(run)], cwd=ROOT, check=True, timeout=900)


def table_rows(text: str) -> list[list[str]]:
    """Cells of the rows of Markdown tables."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def by_first_cell(text: str) -> dict[str, list[str]]:
    """Rows of Markdown tables by their first cell; of rows that begin alike the first."""
    return {first: rest for first, *rest in reversed(table_rows(text))}


def section(page: str, title: str) -> str:
    """The text under a heading of a page of benchmarks/."""
    return FIGURES[page].partition(f"\n{title}\n")[2].partition("\n#")[0]


def lengths_and_speed(title: str, head: str) -> list[str]:
    """A head's acceptance lengths, on a chain and in a tree, and its speed on a chain."""
    rows = by_first_cell(section("heads.md", title))
    chain = rows[f"{head}: chain"]
    tree = rows[f"{head}: tree"]
    return [cell.split()[0] for cell in (chain[0], tree[0], chain[2])]


def title_for(prompts: str, head: str) -> str:
    """The heading of figures of a kind of prompts."""
    block = head.startswith(("dflash", "dspark"))
    return f"### {prompts}, block drafts" if block else f"### {prompts}, greedy"


HEADS_OF = {
    "heads/medusa.md": ["medusa"],
    "heads/hydra.md": ["hydra++"],
    "heads/eagle.md": ["eagle"],
    "heads/eagle3.md": ["eagle3", "eagle3-shipped"],
    "heads/dflash.md": ["dflash", "dflash, 2 layers"],
    "heads/dspark.md": ["dspark", "dspark, 2 layers"],
}
"""The heads whose figures a page shows, a table each."""


def test_the_figures_of_heads_are_those_that_were_measured():
    shown = by_first_cell(PAGES["heads.md"])
    for heads in HEADS_OF.values():
        for head in heads:
            assert shown[head] == lengths_and_speed(title_for("GSM8K", head), head)
    maths = by_first_cell(section("sources.md", "### gsm8k"))
    copying = by_first_cell(section("sources.md", "### copying"))
    for source in ("prompt lookup", "retrieval", "3-grams", "second model (4 layers)"):
        rows = (maths[source], copying[source])
        assert shown[source] == [row[column].split()[0] for row in rows for column in (2, 0)]


@pytest.mark.parametrize("page", HEADS_OF)
def test_the_figures_of_a_head_on_its_own_page_are_those_that_were_measured(page):
    text = PAGES[page].partition("\n## Figures\n")[2].partition("\n## ")[0]
    expected = []
    for head in HEADS_OF[page]:
        for prompts in ("MT-bench", "GSM8K", "HumanEval"):
            expected.append([prompts, *lengths_and_speed(title_for(prompts, head), head)])
    assert [row for row in table_rows(text) if row[0] != "prompts"] == expected


def test_every_head_has_a_page_with_its_options_and_a_picture():
    comments = re.findall(r"<!-- options: (\S+) -->", "\n".join(HEAD_PAGES.values()))
    variants = {"hydra"}  # on the page of hydra++
    assert sorted([*comments, *variants]) == sorted(site_pages.HEADS)
    for page, text in HEAD_PAGES.items():
        (picture,) = re.findall(r"\(\.\./(images/heads/\w+\.svg)\)", text)
        assert (DOCS / picture).exists(), page
        assert "| `" in site_pages.with_options(text), page


SHIPPED = json.loads(
    (ROOT / "examples" / "smollm2-135m-eagle3" / "config.json").read_text("utf-8")
)["headstart"]["measured"]["default"]["speedup"]
"""Speed of the head in this repository over decoding without drafts, by kind of prompt: what its
card, the README and the pages say."""


def test_the_figures_of_the_readme_are_those_that_were_measured():
    text = PAGES["README.md"].partition("## What you gain")[2]
    shown = by_first_cell(text)
    default = by_first_cell(FIGURES["adaptivity.md"].partition("\nSince then")[2])
    kernels = by_first_cell(section("cpu.md", "### Zen 4, AVX-512"))
    for kind, speedup in SHIPPED.items():
        file = kind.lower().replace("-", "_")
        chain, _, _ = lengths_and_speed(title_for(kind, "eagle3-shipped"), "eagle3-shipped")
        assert f"{speedup:.2f}" == default[file][0].split()[0]
        assert shown[kind] == [chain, f"{speedup:.2f}", kernels[file][3].split()[0]]
    gpu = table_rows(FIGURES["gpu.md"].partition("\n## Before")[0])
    rates = {row[2]: row[3] for row in gpu if row[:2] == ["cuda graphs", "512"]}
    assert not lacking(" ".join(text.split()), f"{rates['1']} tokens a second", rates["60"])


@pytest.mark.parametrize("page", ["README.md", "start.md", "heads.md"])
def test_a_speed_of_the_shipped_head_is_the_same_on_every_page(page):
    """Whatever page says how many times as fast GSM8K is with it, says what the card says."""
    text = " ".join(PAGES[page].split())
    said = re.findall(r"(\d\.\d\d) times as fast (?:with them|as without drafts)", text)
    assert set(said) == {f"{SHIPPED['GSM8K']:.2f}"}


def test_the_platforms_are_those_of_the_classifiers_and_of_what_is_imported():
    """Modules of Unix are imported where no other system is promised."""
    states = {row: cells[0] for row, cells in by_first_cell(PAGES["platforms.md"]).items()}
    systems = {
        "Linux, x86-64": "Operating System :: POSIX :: Linux",
        "macOS": "Operating System :: MacOS",
        "Windows": "Operating System :: Microsoft :: Windows",
    }
    promised = {name for row, name in systems.items() if states[row] != "not"}
    named = {name for name in PROJECT["classifiers"] if name.startswith("Operating System")}
    assert named == promised
    unix = [
        path
        for folder in ("heads", "inference", "train", "addons", "scripts", "package")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^import (fcntl|resource|grp|pwd)\b", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert not unix or states["Windows"] == "not", unix


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_the_column_of_the_site(page):
    for block in re.findall(r"```\w*\n(.*?)```", PAGES[page], re.DOTALL):
        assert [line for line in block.splitlines() if len(line) > 80] == []


def test_the_site_lists_every_page():
    # `make docs` is strict: a page that its navigation lacks fails the build.
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages | {f"benchmarks/{name}" for name in FIGURES} <= set(listed)


def test_supported_families_are_those_of_the_tests():
    assert "\n\n" + "; ".join(FAMILIES) + ".\n" in PAGES["models.md"]


EXAMPLE = """
const {distribution, acceptance} = require("./docs/javascripts/acceptance.js");
const pairs = WEIGHTS.map(weights => weights.map(row => distribution(row)));
console.log(JSON.stringify(pairs.map(([p, q]) => [p, q, acceptance(p, q)])));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_interactive_example_emits_the_target_distribution():
    weights = [
        [[50, 30, 15, 5], [20, 60, 10, 10]],
        [[1, 0, 0, 3], [0, 5, 5, 0]],
        [[7, 7, 1, 1], [7, 7, 1, 1]],
    ]
    command = ["node", "-e", EXAMPLE.replace("WEIGHTS", json.dumps(weights))]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for p, q, result in json.loads(shown):
        assert result["emitted"] == pytest.approx(p, abs=1e-12)
        assert result["rate"] == pytest.approx(sum(map(min, p, q)))


def test_commands_and_heads_pages_name_every_option():
    commands = "\n".join(map(site_pages.command_page, site_pages.COMMANDS))
    heads = site_pages.heads_page()
    assert "| `loop.batch_size` | `int` | `8` | Rows per optimizer step" in commands
    assert all(f"# headstart {command}\n" in commands for command in site_pages.COMMANDS)
    assert all(f"## {name}\n" in heads for name in site_pages.HEADS)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(DOCS / "first-steps.ipynb", as_version=4)
    # A head of a few steps, in a folder that is removed.
    for cell in notebook.cells:
        cell.source = cell.source.replace("= 240, 120", "= 12, 3").replace("runs/", f"{tmp_path}/")
    folder = {"metadata": {"path": str(DOCS)}}
    NotebookClient(notebook, timeout=600, resources=folder).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    printed = "".join(out.get("text", "") for out in outputs)
    assert "the same text: True" in printed
    assert "the same text as before: True" in printed
    assert "acceptance length" in printed
