"""The command line: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import MISSING, fields
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml
from helpers import written_alone
from messages import lacking, refused, warned
from runs import write_prompts
from site_pages import asked, documented_options

from headstart.addons.serve.options import ServedTrainConfig
from headstart.inference import Target
from headstart.inference.text.chat_template import prompt_ids
from headstart.scripts import __main__ as entry
from headstart.scripts import command_line
from headstart.scripts.command_line import options
from headstart.stopping import Stopped
from headstart.train.config import ObjectiveConfig

RUN = "--target t --output o --data.sources [d.jsonl]"
COMMANDS = {
    "data": ("scripts.data.write_conversations", "--target t --output o"),
    "features": ("scripts.features.precompute", RUN),
    "train": ("train.loop.train", RUN),
    "tree": ("scripts.tree.calibrate", "--target t --head h --prompts [p.jsonl]"),
    "datastore": (
        "scripts.datastore.build_datastore",
        "--target t --sources [d.jsonl] --output o",
    ),
    "generate": ("scripts.generate.stream_answer", "--target t --prompt p"),
    "chat": ("scripts.chat.chat_on_screen", "--target t"),
    "trace": ("scripts.trace.trace_prompts", "--target t --head h --prompt p"),
    "bench": ("scripts.bench.benchmark", "--target t --head h --prompts [p.jsonl]"),
    "certify": ("scripts.certify.certify", "--target t --prompts [p.jsonl]"),
    "verify": ("scripts.verify.verify_head", "--head h --target t"),
    "serve-check": ("scripts.serve_check.serve_check", "--head h --target t"),
    "doctor": ("scripts.doctor.describe", ""),
    "push": ("scripts.push.push_head", "--run r --repo me/head"),
    "import": ("scripts.import_head.import_foreign", "--head h --target t --output o"),
    "export": ("scripts.export.export_foreign", "--head h --to speculators --output o"),
}
"""The function of each command, and options without which it does nothing."""


def required(command):
    return COMMANDS[command][1].split()


@pytest.fixture
def headstart(monkeypatch, capsys):
    """A command line's status, output and errors."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["headstart", *map(str, arguments)])
        try:
            entry.main()
            status = 0
        except SystemExit as end:
            status = 0 if end.code is None else end.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def succeeds(headstart):
    """The output of a command line without errors."""

    def call(*arguments):
        status, shown, errors = headstart(*arguments)
        assert status == 0, errors
        return shown

    return call


@pytest.fixture
def mistaken(headstart):
    """The errors of a command line that is refused."""

    def call(*arguments):
        status, shown, errors = headstart(*arguments)
        assert (status, shown) == (2, "")
        return errors

    return call


@pytest.fixture
def parsed(succeeds, monkeypatch):
    """The options that reach a command's function."""

    def call(command, *arguments):
        found = []

        def work(options, **_):
            found.append(options)
            return {"verdict": "identical"}  # of certify

        monkeypatch.setattr(f"headstart.{COMMANDS[command][0]}", work)
        succeeds(command, *arguments)
        return found[0]

    return call


@pytest.fixture
def config_file(tmp_path):
    """Writes a file for `--config`; returns its name."""

    def write(text):
        path = tmp_path / "options.yaml"
        path.write_bytes(text.encode("latin-1"))
        return str(path)

    return write


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_alone_it_lists_its_commands_on_one_screen(succeeds, arguments):
    shown = succeeds(*arguments)
    assert all(f"\n  {command} " in shown for command in COMMANDS)
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_the_nearest_command_is_named_for_an_unknown_one(mistaken):
    errors = mistaken("generte")
    assert not lacking(errors, "unknown 'generte' generate --help")
    assert errors.count("\n") == 3


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("verify", "head"),
        ("import", "head"),
        ("export", "head"),
        ("push", "run"),
        ("bench", "head"),
        ("tree", "head"),
        ("generate", "prompt"),
        ("trace", "prompt"),
    ],
)
def test_what_a_command_is_about_may_go_without_its_option(succeeds, parsed, command, option):
    assert f"usage: headstart {command} [{option.upper()}] " in succeeds(command, "--help")
    given = dict(zip(required(command)[::2], required(command)[1::2], strict=True))
    given.pop(f"--{option}", None)
    assert getattr(parsed(command, "runs/x", *chain(*given.items())), option) == "runs/x"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_those_that_people_use_first_and_says_what_it_is_for(
    succeeds, command
):
    shown = succeeds(command, "--help")
    kind = asked(command).args[0]
    module = importlib.import_module(f"headstart.scripts.{entry.COMMANDS[command][0]}")
    purpose = module.__doc__.partition(":")[0]
    text = "".join(shown.split())  # lines may break anywhere
    assert "".join(purpose.split()) in text
    for name, _, _, told in documented_options(kind):
        assert f"\n  --{name} " in shown
        assert "".join(told.split()) in text, name
    first = re.findall(r"^  --([\w.]+)", shown, re.MULTILINE)[: len(kind.most_used)]
    assert tuple(first) == kind.most_used
    assert 2 <= len(kind.most_used) <= 5 or command == "doctor"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_set_has_the_default_of_the_dataclass(parsed, command):
    config = parsed(command, *required(command))
    assert issubclass(asked(command).args[0], type(config)), "the core's options, without a server"
    given = {argument.lstrip("-").partition(".")[0] for argument in required(command)[::2]}
    for field in fields(config):
        default = field.default_factory() if field.default is MISSING else field.default
        assert field.name in given or getattr(config, field.name) == default, field.name


def test_the_command_line_overrides_the_yaml_and_the_yaml_the_defaults(parsed, config_file):
    path = config_file(
        "target: from-yaml\noutput: o\n"
        "head: {type: medusa, num_heads: 2, bias: false}\n"
        "data: {sources: [a.jsonl, b.jsonl], max_length: 77}\n"
        "optim: {lr: 0.25, clip: 2.0}\n"
    )
    overrides = ("--optim.lr", "1e-3", "--target", "from-line", "--head.num_heads", "3")
    config = parsed("train", "--config", path, *overrides)
    assert (config.target, config.output) == ("from-line", "o")
    assert (config.optim.lr, config.optim.clip, config.optim.warmup) == (1e-3, 2.0, 0.1)
    assert config.head == {"type": "medusa", "num_heads": 3, "bias": False}
    assert config.data.sources == ["a.jsonl", "b.jsonl"]
    assert (config.data.max_length, config.data.held_out) == (77, 0.02)


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([], True),
        (["--compile"], True),
        (["--compile", "true"], True),
        (["--compile=true"], True),
        (["--compile", "false"], False),
        (["--config", "{config}"], False),
    ],
)
def test_compile_is_a_flag(parsed, config_file, words, value):
    path = config_file("compile: false")
    written = [word.format(config=path) for word in words]
    assert parsed("generate", *written, *required("generate")).compile is value
    assert parsed("generate", *required("generate"), *written).compile is value


def test_lists_numbers_and_mixes_of_losses_are_written_as_in_yaml(parsed, config_file):
    line = "--data.weights 2 --optim.betas 0.9 0.99 --loop.profile 10 12 --objective.loss.ce 5e-1"
    config = parsed("train", *required("train"), *line.split())
    assert (config.data.weights, config.optim.betas) == ([2.0], (0.9, 0.99))
    assert (config.loop.profile, config.objective.loss) == ((10, 12), {"ce": 0.5})
    path = config_file(
        "head: {type: eagle, noise: 2e-1}\noptim: {lr: 1e-3}\n"
        "objective: {decay: 0.5, loss: {ce: 0.25, lk_lambda: 1.0}}\n"
    )
    of_file = ["train", *required("train"), "--config", path]
    config = parsed(*of_file, "--head.depth", "3")
    # a number without a dot is one in mappings, too
    assert config.head == {"type": "eagle", "noise": 0.2, "depth": 3}
    assert config.optim.lr == 1e-3
    assert config.objective == ObjectiveConfig(loss={"ce": 0.25, "lk_lambda": 1.0}, decay=0.5)
    objective = parsed(*of_file, "--objective.loss", "{kl: 2.0}").objective
    assert objective == ObjectiveConfig(loss={"kl": 2.0}, decay=0.5)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("train", "data.template_kwargs"),
        *((name, "template_kwargs") for name in ("data", "generate", "chat", "bench")),
    ],
)
def test_variables_of_the_chat_template_are_options_of_their_own(parsed, mistaken, command, option):
    variables = f"--{option}.reasoning_effort high --{option}.thinking true".split()
    config = parsed(command, *required(command), *variables)
    assert attrgetter(option)(config) == {"reasoning_effort": "high", "thinking": True}
    thinking = option.replace("template_kwargs", "thinking")
    both = [f"--{thinking}", "true", f"--{option}", "{enable_thinking: false}"]
    errors = mistaken(command, *required(command), *both)
    assert not lacking(errors, "thinking True template_kwargs enable_thinking False")


@pytest.mark.parametrize(
    ("command", "old", "new", "value"),
    [
        ("generate", "fallback", "adaptive", False),
        ("data", "answer_tokens", "max_new_tokens", 12),
        ("data", "target_dtype", "dtype", "float32"),
        ("train", "target_dtype", "dtype", "float32"),
        ("train", "eval.new_tokens", "eval.max_new_tokens", 12),
    ],
)
def test_old_names_of_options_are_taken_with_a_warning(
    parsed, config_file, command, old, new, value
):
    group, _, name = old.rpartition(".")
    path = config_file(yaml.safe_dump({group: {name: value}} if group else {name: value}))
    line = [f"--{old}", json.dumps(value).strip('"')]
    for words in (line, ["--config", path], [f"--config={path}"]):
        with warned(old, new, category=FutureWarning):
            config = parsed(command, *required(command), *words)
        assert attrgetter(new)(config) == value


def test_an_option_that_is_gone_says_what_takes_its_place(mistaken, parsed, config_file):
    path = config_file("optim: {ema: 0.9, lr: 0.5}")
    for words in (["--optim.ema", "0.9"], ["--config", path]):
        errors = mistaken("train", *required("train"), *words)
        assert not lacking(errors, "optim.ema optim.schedule")
    assert path in errors
    # Files of earlier versions have the value that asked for nothing.
    path = config_file("optim: {ema: 0.0, lr: 0.5}")
    assert parsed("train", *required("train"), "--config", path).optim.lr == 0.5


@pytest.mark.parametrize("words", [["--config", "smollm2-eagle3"], ["--config=smollm2-eagle3"]])
def test_a_config_of_headstart_is_taken_by_its_name(parsed, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parsed("train", *words, "--data.sources", "c.jsonl", "--optim.lr", "3e-3")
    assert (config.head["draft_vocab_size"], config.optim.lr) == (8192, 3e-3)
    # A file of one's own of that name comes first.
    Path("smollm2-eagle3").write_text("target: mine\noutput: o\n")
    assert parsed("train", *words, "--data.sources", "c.jsonl").target == "mine"


@pytest.mark.parametrize(
    ("given", "unknown", "nearest"),
    [
        ("generate --promt hi", "--promt", "--prompt"),
        ("generate --promp hi", "--promp", "--prompt"),  # not taken as an abbreviation
        ("generate --max-new-token=3", "--max-new-token", "--max_new_tokens"),
        ("bench --promts a.jsonl b.jsonl", "--promts", "--prompts"),
        ("train --lr 1e-3", "--lr", "--optim.lr"),
        ("train --sources f", "--sources", "--data.sources"),
        ("train --loop.batchsize 3", "--loop.batchsize", "--loop.batch_size"),
        ("train --adapter '{rnak: 8}'", "adapter.rnak", "--adapter.rank"),
        ("generate --temprature 1 --topk 4", "--temprature --topk", "--temperature --top_k"),
        ("train --config smollm2-eagel3", "'smollm2-eagel3'", "'smollm2-eagle3'"),
    ],
)
def test_the_nearest_names_are_told_for_an_unknown_one(mistaken, given, unknown, nearest):
    errors = mistaken(*shlex.split(given))
    assert not lacking(errors, unknown, nearest)
    assert errors.count("\n") <= 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("headstart tr", {"tree", "trace", "train"}),
        ("headstart train --optim.l", {"--optim.lr"}),
        ("headstart push runs/x --o", {"--output"}),
        ("headstart generate --adaptive ", {"true", "false"}),
    ],
)
def test_the_shell_completes_commands_and_options(line, words, tmp_path):
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    shell = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    command = [sys.executable, "-m", "headstart.scripts"]
    subprocess.run(command, env={**os.environ, **shell}, check=True, timeout=200)
    assert {word.strip() for word in answer.read_text().split("\n")} == words


WITHOUT_WORK = """
import contextlib
import sys
from headstart.scripts import __main__ as entry

for command in entry.COMMANDS:
    for arguments in (["--colour", "red"], ["--config", "/no/such.yaml"], ["--help"]):
        sys.argv = ["headstart", command, *arguments]
        with contextlib.suppress(SystemExit):
            entry.main()
        heavy = {"torch", "transformers", "headstart.heads", "headstart.inference"}
        loaded = heavy & set(sys.modules)
        assert not loaded, (command, arguments, loaded)
"""


def test_help_and_refusals_import_no_torch():
    """Nor does the parser, which would run the imports for type checkers if it were left to resolve
    the types."""
    command = [sys.executable, "-c", WITHOUT_WORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        ("train", [], "'target'"),
        ("train", [*required("train"), "--loop.batch_size", "0"], "loop.batch_size 1 0"),
        ("train", [*required("train"), "--loop.batch_size", "many"], "loop.batch_size 'many'"),
        ("train", ["--config", "/no/such.yaml"], "'/no/such.yaml'"),
        ("generate", ["--target", "t", "hi there"], "'hi there' --prompt"),
        ("generate", [*required("generate"), "--dtype", "float8"], "float8"),
        ("generate", [*required("generate"), "--compile", "perhaps"], "compile 'perhaps'"),
        ("generate", ["--target", "/no/such/target", "--prompt", "hi"], "'/no/such/target'"),
        ("bench", ["--target", "t", "--prompts", "[p.jsonl]"], "head drafter"),
        ("bench", required("bench"), "p.jsonl"),
        ("certify", [*required("certify"), "--server", "http://u:secret@h/v1"], "server URL"),
        ("certify", [*required("certify"), "--server", "u:secret@h:80", "--model", "m"], "server"),
        ("data", ["--target", "package:no_such_package", "--output", "o"], "no_such_package"),
    ],
)
def test_a_mistake_is_answered_with_one_line_and_status_2(
    mistaken, tmp_path, monkeypatch, command, arguments, words
):
    monkeypatch.chdir(tmp_path)
    errors = mistaken(command, *arguments)
    line = errors.removesuffix(f"`headstart {command} --help` lists all options\n")
    assert line.startswith("error: ")
    assert line.count("\n") == 1, errors
    assert not lacking(line, words)
    assert "secret" not in errors


def test_a_stop_ends_a_command_without_an_error(capsys):
    def stop(_):
        raise Stopped("stopped at step 3 of 9")

    command_line.run(stop, [])
    assert capsys.readouterr() == ("stopped at step 3 of 9\n", "")


def test_an_error_is_cut_that_quotes_all_of_a_file(capsys):
    def fail(_):
        raise ValueError("9" * 10**6)

    with pytest.raises(SystemExit):
        command_line.run(fail, [])
    assert 1000 < len(capsys.readouterr().err) < 5000


def test_train_then_tree_then_generate_then_bench(
    succeeds, target_folder, conversations_file, tmp_path
):
    target = ["--target", target_folder, "--dtype", "float32"]
    run = ["--output", tmp_path / "run", "--data.sources", f"[{conversations_file}]"]
    run += ["--loop.max_steps", "3", "--loop.batch_size", "4", "--loop.precision", "float32"]
    run += ["--eval.prompts", "2", "--eval.max_new_tokens", "4"]
    shown = succeeds("train", *target, *run, "--head", '{"type": "medusa", "num_heads": 2}')
    assert "acceptance length" in shown

    head = tmp_path / "run" / "last"
    used = [*target, "--head", head]
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["count to 3", "count to 5"])
    files = ["--prompts", prompts, "--max_new_tokens", "6"]
    shown = succeeds("tree", *used, *files, "--nodes", "4")
    assert not lacking(shown, "expected tokens/s", str(head))

    shown = succeeds("generate", *used, "--prompt", "count to 4", "--max_new_tokens", "12")
    assert not lacking(shown, "tokens/s rounds acceptance length rate depth")

    report = tmp_path / "report.json"
    assert "2/2" in succeeds("bench", *used, *files, "--output", report)
    assert json.loads(report.read_text())["total"]["identical"] == 2


def test_generate_streams_what_stock_generate_writes(
    succeeds, target_folder, head_folder, tokenizer
):
    options = ["--dtype", "float32", "--prompt", "hello", "--max_new_tokens", "20"]
    used = ["--target", target_folder, "--head", head_folder, *options]
    shown = succeeds("generate", *used, "--compare", "true")
    model = Target.from_pretrained(target_folder, torch.float32).model
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": "hello"}])[0]
    written = written_alone(model, prompt, max_new_tokens=20)
    answer = tokenizer.decode(written, skip_special_tokens=True)
    assert shown.count(answer.strip()) == 2  # both sides
    numbers = re.search(r"(\d+) rounds(?: \((\d+) without drafts\))?", shown)
    rounds, plain = map(int, numbers.groups(default="0"))
    assert ("drafts did not pay" in shown) == (2 * plain > rounds)
    rates, equal = shown.splitlines()[-2:]
    assert " times)" in rates
    assert "same" in equal


def test_generate_of_no_tokens_says_nothing(succeeds, target_folder):
    options = ["--prompt", "hi", "--max_new_tokens", "0", "--dtype", "float32"]
    assert "acceptance" not in succeeds("generate", "--target", target_folder, *options)


@pytest.mark.parametrize("way", ["module", "file"])
def test_commands_run_as_a_module_and_as_files(way):
    """`accelerate launch scripts/train.py` runs the file."""
    file = importlib.import_module("headstart.scripts.train").__file__
    start = ["-m", "headstart.scripts", "train"] if way == "module" else [file]
    command = [sys.executable, *start, "--loop.keep", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: option 'target' ")
    assert done.stderr.count("\n") == 1


def test_a_bug_report_holds_versions_and_no_secret(succeeds, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    shown = succeeds("doctor")
    assert not lacking(shown, f"torch {torch.__version__} token stored")
    assert "hf_secret" not in shown
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert not lacking(succeeds("doctor"), "no token")


GROWING = "a: &a [1, 1]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklm")
)


@pytest.mark.parametrize(
    "text",
    [
        *("", "- 1", "3", "data: 3", "data: [1]", "data:", "loop: x", "head: 3", "1: 2", "? [1]"),
        *("{", "a: 1: 2", "a\0: 1", "\x85", "head: &a {type: medusa, b: *a}", "head: &a [*a]"),
        *("target: !!timestamp 2026-99-99", "target: !!python/name:os.system", GROWING),
        *("config: other.yaml", "loop: {epochs: [1]}", "unknown: 1", "loop: {unknown: 1}"),
        *("loop: {keep: " + "9" * 5000, "init_from: [" + "0, " * 5000 + "0]"),
    ],
)
def test_a_config_of_something_else_is_named(config_file, text):
    path = config_file(text)
    given = ["--config", path, "--target", "x", "--output", "y"]
    with refused(path) as caught:
        options(ServedTrainConfig, "train", "", given)
    lines = str(caught.value).removesuffix("\n`headstart train --help` lists all options")
    assert lines.count("\n") <= ("unknown option" in lines)
    assert len(lines) < 1500


def test_an_option_of_the_command_line_is_not_said_to_be_in_the_config(config_file):
    path = config_file("target: x\noutput: y\n")
    with refused("loop.keep") as caught:
        options(ServedTrainConfig, "train", "", ["--config", path, "--loop.keep", "x"])
    assert path not in str(caught.value)
