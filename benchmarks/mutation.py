"""Plant faults in the product, one at a time, and name those that no test notices.

    nice -n 19 python benchmarks/mutation.py --output before.jsonl         # 100 faults
    python benchmarks/mutation.py --again before.jsonl --output after.jsonl  # the same faults later

Faults are drawn from the syntax trees of the files of AREAS, with a seed, evenly over areas and
over kinds of fault. Each is planted in a copy of this checkout, in a temporary folder; the tests
that belong to the file run there, those most likely to notice first, one case of each, until one
fails or the time is up. A test that hangs has noticed. A fault that keeps its module from being
imported is not counted: another is drawn.

The output has a line of JSON for each fault; a run that was stopped goes on where it was. A fault
is found again by the text of its lines, wherever they have moved. One that cannot change what the
module does is marked by hand: add `"equivalent": "the reason"` to its line.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice, pairwise, zip_longest
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
AREAS = {
    "loop": ("inference/rounds/*.py", "train/loop.py"),
    "verify": (
        "inference/trees/verify.py",
        "inference/trees/sampling.py",
        "inference/trees/logits.py",
    ),
    "tree": ("inference/trees/tree*.py", "inference/trees/stats.py"),
    "caches": ("inference/cache/*.py", "inference/feature_cache.py", "heads/layers/draft_cache.py"),
    "drafters": ("inference/drafters/*.py", "heads/*/head.py"),
    "losses": ("heads/losses.py", "heads/objective.py"),
    "checkpoints": ("heads/checkpoints/*.py",),
    "data": ("train/data/*.py",),
}
COMPARISONS = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
"""Operators as they are written, and what takes their place."""
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
UNTOUCHED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
"""Texts of errors, and what checks the code itself."""
ORDER_IS_FREE = {"max", "min", "maximum", "minimum", "equal", "gcd", "logaddexp"}
TYPES_DIFFER = {"isinstance", "issubclass", "getattr", "hasattr", "setattr"}
"""Functions whose arguments are not swapped: nothing changes, or any call fails."""
SECONDS_FOR_A_TEST = 60


def is_sequence(node: ast.AST) -> bool:
    """Whether an operand is a text or a list, of which most operators make an error."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def edits(node: ast.AST, returns_bool: bool) -> Iterator[tuple[str, Any, Any, str]]:
    """The faults of one node, as (kind, first and last node of what is replaced, change).

    A change is the new text, with {0} and {1} for those of the two nodes, or "old -> new" for an
    operator, which stands between them and has no place of its own in the tree.
    """
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            written, others = COMPARISONS[type(op)]
            for other in others:
                yield "comparison", left, right, f"{written} -> {other}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            if not is_sequence(left) and not is_sequence(right):
                yield "arithmetic", left, right, " -> ".join(ARITHMETIC[type(op)])
        case ast.BoolOp(op=op, values=[left, right, *_]):
            change = "and -> or" if isinstance(op, ast.And) else "or -> and"
            yield "and/or", left, right, change
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "constant", node, node, str(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "negated", test, test, "not ({0})"
            if not isinstance(node, ast.While):
                yield "dropped branch", test, test, "False"
                if node.orelse:
                    yield "dropped branch", test, test, "True"
        case ast.Call(func=func, args=args):
            name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
            if name not in ORDER_IS_FREE | TYPES_DIFFER:
                for first, second in pairwise(args):
                    if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                        yield "swapped arguments", first, second, "{1}, {0}"
        case ast.Return(value=ast.Constant(value=bool() as value)):
            yield "returned bool", node.value, node.value, str(not value)
        case ast.Return(value=ast.expr() as value) if returns_bool:
            yield "returned bool", value, value, "not ({0})"


def nodes(
    node: ast.AST, function: str = "", is_bool: bool = False
) -> Iterator[tuple[ast.AST, str, bool]]:
    """Each node that may be changed, the function around it, and whether that returns a bool."""
    if isinstance(node, UNTOUCHED):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
        returns = getattr(node, "returns", None)
        is_bool = isinstance(returns, ast.Name) and returns.id == "bool"
    yield node, function, is_bool
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from nodes(child, function, is_bool)


def faults(area: str, path: Path) -> Iterator[dict[str, Any]]:
    """All faults that can be planted in a file, as lines of the output without a result."""
    source = path.read_bytes()
    tree = ast.parse(source)
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: Any) -> tuple[int, int]:
        first = starts[node.lineno - 1] + node.col_offset
        return first, starts[node.end_lineno - 1] + node.end_col_offset

    for node, function, returns_bool in nodes(tree):
        for kind, first, last, change in edits(node, returns_bool):
            (start, start_end), (end_start, end) = place(first), place(last)
            texts = source[start:start_end].decode(), source[end_start:end].decode()
            if " -> " in change:
                old, new = change.split(" -> ")
                pattern = rf"\b{old}\b" if old.isalpha() else re.escape(old)
                operator = source[start_end:end_start].decode()
                changed = texts[0] + re.sub(pattern, new, operator, count=1) + texts[1]
            else:
                changed = change.format(*texts)
            whole = source[:start] + changed.encode() + source[end:]
            from_line, to_line = starts[first.lineno - 1], starts[last.end_lineno]
            yield {
                "area": area,
                "path": str(path.relative_to(ROOT)),
                "line": first.lineno,
                "function": function,
                "kind": kind,
                "before": source[from_line:to_line].decode(),
                "after": whole[from_line : to_line + len(whole) - len(source)].decode(),
            }


def changes_code(fault: dict[str, Any]) -> bool:
    """Whether a fault's file is another program, and one that can be compiled."""
    source = (ROOT / fault["path"]).read_text("utf-8")
    try:
        return ast.dump(ast.parse(planted(source, fault))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def planted(source: str, fault: dict[str, Any]) -> str:
    """A module's text with a fault where its lines are now; ValueError if they are not there."""
    places = [found.start() for found in re.finditer(re.escape(fault["before"]), source)]
    if not places:
        raise ValueError(f"{fault['path']} no longer holds {fault['before']!r}")
    nearest = min(places, key=lambda i: abs(source.count("\n", 0, i) + 1 - fault["line"]))
    return source[:nearest] + fault["after"] + source[nearest + len(fault["before"]) :]


def draw(area: str, seed: int) -> Iterator[dict[str, Any]]:
    """The faults of an area in random order, of each kind in turn."""
    generator = random.Random(f"{seed} {area}")
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for pattern in AREAS[area]:
        for path in sorted(ROOT.glob(pattern)):
            for fault in faults(area, path):
                by_kind.setdefault(fault["kind"], []).append(fault)
    for kind in sorted(by_kind):
        generator.shuffle(by_kind[kind])
    kinds = sorted(by_kind)
    generator.shuffle(kinds)
    for turn in zip_longest(*(by_kind[kind] for kind in kinds)):
        yield from (fault for fault in turn if fault is not None and changes_code(fault))


def tests_of(fault: dict[str, Any], copy: Path) -> list[str]:
    """Test files for a fault, the likeliest to notice it first: those named after its module, those
    that import it, those that name its function, its folder's, the rest of its package's."""
    module = Path(fault["path"])
    stem = module.parent.name if module.stem == "head" else module.stem
    dotted = ".".join(module.with_suffix("").parts)
    imported = re.compile(
        rf"\b{re.escape(dotted)}\b|\b{re.escape('.'.join(module.parent.parts))} import .*\b{stem}\b"
    )
    names = [name for name in fault["function"].split(".") if not name.startswith("__")]
    function = re.compile(rf"\b{names[-1]}\b") if names else re.compile(r"(?!)")
    ranked = []
    for path in sorted((copy / "tests").rglob("test_*.py")):
        relative = path.relative_to(copy)
        text = path.read_text("utf-8")
        named = path.stem == f"test_{stem}" or path.stem.startswith(f"test_{stem}_")
        imports = bool(imported.search(text))
        mirrors = relative.parent == Path("tests") / module.parent
        belongs = relative.parts[1] in (module.parts[0], "integration", "gpu")
        if named or imports or belongs:
            likely = 4 * named + 2 * imports + bool(function.search(text)) + mirrors + belongs
            ranked.append((-likely, str(relative)))
    return [name for _, name in sorted(ranked)]


def write(path: Path, text: str) -> None:
    """Write a module and forget its bytecode, which is judged by size and whole seconds."""
    path.write_text(text, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def run(copy: Path, action: Callable[[], int], seconds: float) -> tuple[int | None, str]:
    """The exit status and output of an action in a process that is forked from this one, which has
    imported what is large; a negative status is a signal, and None a process that was killed."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.setsid()
                os.chdir(copy)
                sys.path[:0] = [str(copy / ".typing"), str(copy)]
                os.environ["PYTHONPATH"] = str(copy / ".typing")
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                status = action()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        deadline = time.monotonic() + seconds
        ended, status = 0, 0
        try:
            while not ended and time.monotonic() < deadline:
                ended, status = os.waitpid(process, os.WNOHANG)
                time.sleep(0.1)
        finally:
            if not ended:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status) if ended else None, output.read()


def run_tests(
    copy: Path, tests: list[str], seconds: float, cases: int, options: Sequence[str] = ()
) -> tuple[int | None, str]:
    """Run tests for so many seconds; a test that was begun may end.

    Those of tests/gpu, which need a process of their own, run on a simulated accelerator.
    """
    cache = copy.parent / "cache"
    for path in cache.iterdir():  # kernels take long to compile and do not depend on the fault
        if not path.name.startswith("cpu_kernels-"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)
    command = ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", "not slow and not long"]
    command += [f"--timeout={SECONDS_FOR_A_TEST}", f"--session-timeout={seconds:.0f}"]
    command += [f"--basetemp={copy.parent / 'pytest'}", *options, *tests]
    if cases:
        command += ["--cases", str(cases)]

    def action() -> int:
        if tests[0].startswith("tests/gpu"):
            os.environ["HEADSTART_TEST_DEVICE"] = "sim"
        return int(pytest.main(command))

    return run(copy, action, seconds + 2 * SECONDS_FOR_A_TEST)


def judge(fault: dict[str, Any], copy: Path, seconds: float, cases: int) -> dict[str, Any]:
    """Plant a fault, run its tests, take it out again; returns what noticed it."""
    path = copy / fault["path"]
    original = path.read_text("utf-8")
    try:
        changed = planted(original, fault)
    except ValueError:
        return {"result": "gone", "by": None, "seconds": 0}
    began = time.monotonic()
    try:
        write(path, changed)
        tests = tests_of(fault, copy)
        on_accelerator = [test for test in tests if test.startswith("tests/gpu")]
        by = None
        ended = False
        for part in ([test for test in tests if test not in on_accelerator], on_accelerator):
            status, output = run_tests(copy, part, seconds, cases, ["-x"])
            failed = re.search(
                r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::.*?)?)(?: - |$)", output, re.M
            )
            ended = ended or "session-timeout" in output
            if status is None or status < 0:
                by = "hang" if status is None else f"signal {-status}"
            elif failed:
                by = failed[1]
            elif status in (2, 3, 4):
                by = "collecting the tests"
            if by:
                break
        result = "caught" if by else "survived"
        if by and status in (2, 3, 4):  # no test was run
            module = "headstart." + ".".join(Path(fault["path"]).with_suffix("").parts)
            if run(copy, lambda: bool(not importlib.import_module(module)), 120)[0] != 0:
                result = "not importable"
        return {
            "result": result,
            "by": by or ("time was up" if ended else "all its tests pass"),
            "seconds": round(time.monotonic() - began),
        }
    finally:
        write(path, original)


def checkout(folder: Path) -> None:
    """A copy of this checkout without what git ignores, importable as `headstart`."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["make", "--silent", "types"], cwd=folder, check=True)


def prepare(copy: Path) -> None:
    """Import what all tests import, and compile the kernels that they share.

    The tests take the cache folder that they are given if they think that they are a worker's.
    """
    cache = copy.parent / "cache"
    cache.mkdir()
    shared = {"HEADSTART_CACHE": str(cache), "PYTEST_XDIST_WORKER": "gw0"}
    os.environ |= shared | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for module in ("torch", "accelerate", "datasets", "hypothesis", "peft", "transformers"):
        importlib.import_module(module)
    importlib.import_module("transformers.models.llama.modeling_llama")

    def compile_kernels() -> int:
        importlib.import_module("headstart.inference.engines.cpu_kernels").library()
        return 0

    print(run(copy, compile_kernels, 600)[1], end="")


def recheck(rows: list[dict[str, Any]], copy: Path, cases: int) -> list[str]:
    """The tests that noticed a fault and fail without one, too."""
    tests = sorted({row["by"] for row in rows if str(row["by"]).startswith("tests/")})
    if not tests:
        return []
    output = ""
    for part in (
        [test for test in tests if not test.startswith("tests/gpu")],
        [test for test in tests if test.startswith("tests/gpu")],
    ):
        if part:
            output += run_tests(copy, part, 60 + 20 * len(part), cases)[1]
    return [
        test for test in tests if re.search(rf"^(FAILED|ERROR) {re.escape(test)}", output, re.M)
    ]


def table(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> str:
    """What became of the faults of each area, and each that was not caught; in Markdown."""
    lines = ["| area | faults | caught | equivalent | survived |", "|---|---|---|---|---|"]
    for area in [*AREAS, "all"]:
        of_area = [row for row in rows if area in (row["area"], "all")]
        equivalent = sum("equivalent" in row for row in of_area)
        survived = sum(row["result"] == "survived" for row in of_area) - equivalent
        caught = sum(row["result"] == "caught" for row in of_area)
        lines.append(f"| {area} | {len(of_area)} | {caught} | {equivalent} | {survived} |")
    earlier = {(row["path"], row["before"], row["after"]): row["result"] for row in before}
    for row in rows:
        if row["result"] == "caught":
            continue
        was = earlier.get((row["path"], row["before"], row["after"]))
        lines += [
            "",
            f"{row['path']}:{row['line']} {row['function']}, {row['kind']}: {row['result']}"
            + (f" (before: {was})" if was else "")
            + f", {row.get('equivalent') or row['by']}",
            *(f"    - {line}" for line in row["before"].splitlines()),
            *(f"    + {line}" for line in row["after"].splitlines()),
        ]
    return "\n".join(lines)


def main() -> None:
    """Draw or read the faults, judge those that the output lacks, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON lines; goes on there")
    parser.add_argument("--count", type=int, default=100, help="faults, over all areas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--again", type=Path, help="the faults of this output instead of drawn ones"
    )
    parser.add_argument("--survived", action="store_true", help="of --again, those not caught only")
    parser.add_argument("--limit-seconds", type=float, default=90, help="tests of one fault")
    parser.add_argument("--cases", type=int, default=1, help="of each test function; 0 for all")
    options = parser.parse_args()

    def read(path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]

    def key(fault: dict[str, Any]) -> tuple[Any, ...]:
        return fault["path"], fault["line"], fault["before"], fault["after"]

    before = read(options.again) if options.again else []
    known = {key(row): row for row in read(options.output)} if options.output.exists() else {}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headstart-mutation-") as folder:
        copy = Path(folder) / "headstart"
        checkout(copy)
        prepare(copy)

        def judged(fault: dict[str, Any]) -> dict[str, Any]:
            row = known.get(key(fault))
            if row is None:
                row = fault | judge(fault, copy, options.limit_seconds, options.cases)
                with options.output.open("a", encoding="utf-8") as output:
                    output.write(json.dumps(row, ensure_ascii=False) + "\n")
                print(row["path"], row["line"], row["kind"], row["result"], row["by"], flush=True)
            return row

        if options.again:
            chosen = [row for row in before if row["result"] != "not importable"]
            if options.survived:
                chosen = [r for r in chosen if r["result"] != "caught" and "equivalent" not in r]
            rows = [judged(fault) for fault in chosen]
        else:
            drawn = {area: draw(area, options.seed) for area in AREAS}
            for area in islice(cycle(AREAS), options.count):
                row = next(r for r in map(judged, drawn[area]) if r["result"] != "not importable")
                rows.append(row)
        unreliable = recheck(rows, copy, options.cases)
        for row in rows:
            if row["by"] in unreliable:
                row |= {"result": "survived", "by": f"{row['by']}, which fails without it, too"}
        print(table(rows, before))


if __name__ == "__main__":
    main()
