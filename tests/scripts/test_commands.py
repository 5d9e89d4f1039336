"""The command line: what it takes, what it refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from itertools import chain, pairwise
from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml
from helpers import saved_head
from messages import lacking, refused
from site_pages import documented_options

from headstart.addons.serve.options import ServedTrainConfig
from headstart.heads import CheckpointMetadata
from headstart.inference import Target
from headstart.scripts import __main__ as entry
from headstart.scripts import (
    bench,
    certify,
    chat,
    command_line,
    data,
    datastore,
    doctor,
    export,
    features,
    generate,
    import_head,
    push,
    serve_check,
    trace,
    tree,
    verify,
)
from headstart.scripts.bench import BenchConfig
from headstart.scripts.command_line import options
from headstart.scripts.tree import TreeConfig
from headstart.train import loop
from headstart.train.config import ObjectiveConfig

COMMANDS = {
    "data": (data.DataCommand, data, "write_conversations"),
    "features": (ServedTrainConfig, features, "precompute"),
    "train": (ServedTrainConfig, loop, "train"),
    "tree": (TreeConfig, tree, "calibrate"),
    "datastore": (datastore.DatastoreConfig, datastore, "build_datastore"),
    "generate": (generate.GenerateConfig, generate, "stream_answer"),
    "chat": (chat.ChatConfig, chat, "chat_on_screen"),
    "trace": (trace.TraceConfig, trace, "trace_prompts"),
    "bench": (BenchConfig, bench, "benchmark"),
    "certify": (certify.CertifyConfig, certify, "certify"),
    "verify": (verify.VerifyConfig, verify, "verify_head"),
    "serve-check": (serve_check.ServeCheckConfig, serve_check, "serve_check"),
    "doctor": (doctor.DoctorConfig, doctor, "describe"),
    "push": (push.PushConfig, push, "push_head"),
    "import": (import_head.ImportConfig, import_head, "import_foreign"),
    "export": (export.ExportConfig, export, "export_foreign"),
}
REQUIRED = {
    "data": ["--target", "t", "--output", "o"],
    "features": ["--target", "t", "--output", "o", "--data.sources", "[d.jsonl]"],
    "train": ["--target", "t", "--output", "o", "--data.sources", "[d.jsonl]"],
    "tree": ["--target", "t", "--head", "h", "--prompts", "[p.jsonl]"],
    "datastore": ["--target", "t", "--sources", "[d.jsonl]", "--output", "o"],
    "generate": ["--target", "t", "--prompt", "p"],
    "chat": ["--target", "t"],
    "trace": ["--target", "t", "--head", "h", "--prompt", "p"],
    "bench": ["--target", "t", "--head", "h", "--prompts", "[p.jsonl]"],
    "certify": ["--target", "t", "--prompts", "[p.jsonl]"],
    "verify": ["--head", "h", "--target", "t"],
    "serve-check": ["--head", "h", "--target", "t"],
    "doctor": [],
    "push": ["--run", "r", "--repo", "me/head"],
    "import": ["--head", "h", "--target", "t", "--output", "o"],
    "export": ["--head", "h", "--to", "speculators", "--output", "o"],
}


@pytest.fixture
def run(monkeypatch, capsys):
    """A command line's status, output and errors."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["headstart", *arguments])
        try:
            entry.main()
            status = 0
        except SystemExit as end:
            status = 0 if end.code is None else end.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture
def parsed(run, monkeypatch):
    """The options that reach a command's function."""

    def call(command, *arguments):
        found = []

        def work(options, **_):
            found.append(options)
            return {"verdict": "identical"}  # of certify

        monkeypatch.setattr(COMMANDS[command][1], COMMANDS[command][2], work)
        status, _, errors = run(command, *arguments)
        assert status == 0, errors
        return found[0]

    return call


@pytest.fixture
def head_folder(target_folder, tmp_path):
    metadata = CheckpointMetadata(tree=[[0], [1], [0, 0]])
    target = Target.from_pretrained(target_folder)
    saved_head(tmp_path / "head", target, metadata=metadata, num_heads=2)
    return str(tmp_path / "head")


def test_alone_it_lists_its_commands(run):
    for arguments in ((), ("--help",), ("-h",)):
        status, shown, _ = run(*arguments)
        assert status == 0
        assert all(f"\n  {command} " in shown for command in COMMANDS)
        lines = shown.splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= 80  # one screen


@pytest.mark.parametrize(
    ("given", "told"), [("generte", "the nearest: generate"), ("xyz", "no command has a sim")]
)
def test_an_unknown_command_is_answered_in_three_lines(run, given, told):
    status, _, errors = run(given)
    first, second, third = errors.splitlines()
    assert (status, first, third) == (
        2,
        f"error: unknown command '{given}'",
        "`headstart --help` lists all",
    )
    assert second.startswith(told)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        *(("verify", "head"), ("import", "head"), ("export", "head"), ("push", "run")),
        *(("bench", "head"), ("tree", "head"), ("generate", "prompt"), ("trace", "prompt")),
    ],
)
def test_what_a_command_is_about_may_go_without_its_option(run, parsed, command, option):
    assert f"usage: headstart {command} [{option.upper()}] " in run(command, "--help")[1]
    given = dict(zip(REQUIRED[command][::2], REQUIRED[command][1::2], strict=True))
    given.pop(f"--{option}", None)
    assert getattr(parsed(command, "runs/x", *chain(*given.items())), option) == "runs/x"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_those_that_people_use_first_and_says_what_it_is_for(run, command):
    status, shown, _ = run(command, "--help")
    assert status == 0
    purpose = importlib.import_module(
        f"headstart.scripts.{entry.COMMANDS[command][0]}"
    ).__doc__.partition(":")[0]
    text = "".join(shown.split())  # lines may break anywhere
    assert "".join(purpose.split()) in text
    for name, _, _, told in documented_options(COMMANDS[command][0]):
        assert f"\n  --{name} " in shown
        assert "".join(told.split()) in text, name
    most_used = COMMANDS[command][0].most_used
    first = re.findall(r"^  --([\w.]+)", shown, re.MULTILINE)[: len(most_used)]
    assert (2 <= len(most_used) <= 5 or command == "doctor") and tuple(first) == most_used


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_set_has_the_default_of_the_dataclass(parsed, command):
    config = parsed(command, *REQUIRED[command])
    kind = type(config)
    assert issubclass(COMMANDS[command][0], kind), "without a server, options that the core has"
    given = {argument.lstrip("-").partition(".")[0] for argument in REQUIRED[command][::2]}
    for field in dataclasses.fields(kind):
        if field.name in given:
            continue
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        assert getattr(config, field.name) == default, field.name


def test_the_command_line_overrides_the_yaml_and_the_yaml_the_defaults(parsed, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "target": "from-yaml",
                "output": "o",
                "head": {"type": "medusa", "num_heads": 2, "bias": False},
                "data": {"sources": ["a.jsonl", "b.jsonl"], "max_length": 77},
                "optim": {"lr": 0.25, "clip": 2.0},
            }
        )
    )
    overrides = ("--optim.lr", "1e-3", "--target", "from-line", "--head.num_heads", "3")
    config = parsed("train", "--config", str(path), *overrides)
    assert (config.target, config.output) == ("from-line", "o")
    assert (config.optim.lr, config.optim.clip, config.optim.warmup) == (1e-3, 2.0, 0.1)
    assert config.head == {"type": "medusa", "num_heads": 3, "bias": False}
    assert config.data.sources == ["a.jsonl", "b.jsonl"]
    assert (config.data.max_length, config.data.held_out) == (77, 0.02)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ([], True),
        (["--compile"], True),
        (["--compile", "true"], True),
        (["--compile=true"], True),
        (["--compile", "false"], False),
    ],
)
def test_compile_is_a_flag(parsed, run, tmp_path, written, value):
    command = "generate"
    assert parsed(command, *written, *REQUIRED[command]).compile is value
    assert parsed(command, *REQUIRED[command], *written).compile == value
    (tmp_path / "options.yaml").write_text(f"compile: {json.dumps(value)}\n")
    assert (
        parsed(command, "--config", str(tmp_path / "options.yaml"), *REQUIRED[command]).compile
        == value
    )
    status, _, errors = run(command, *REQUIRED[command], "--compile", "perhaps")
    assert status == 2 and "perhaps" in errors


def test_lists_numbers_and_mixes_of_losses_are_written_as_in_yaml(parsed, tmp_path):
    line = "--data.weights 2 --optim.betas 0.9 0.99 --loop.profile 10 12 --objective.loss.ce 5e-1"
    found = parsed("train", *REQUIRED["train"], *line.split())
    assert found.data.weights == [2.0] and found.optim.betas == (0.9, 0.99)
    assert found.loop.profile == (10, 12) and found.objective.loss == {"ce": 0.5}
    path = tmp_path / "options.yaml"
    path.write_text(
        "head: {type: eagle, noise: 2e-1}\noptim: {lr: 1e-3}\n"
        "objective: {decay: 0.5, loss: {ce: 0.25, lk_lambda: 1.0}}\n"
    )
    of_file = ["train", *REQUIRED["train"], "--config", str(path)]
    found = parsed(*of_file, "--head.depth", "3")
    # a number without a dot is one in mappings, too
    assert found.head == {"type": "eagle", "noise": 0.2, "depth": 3} and found.optim.lr == 1e-3
    assert found.objective == ObjectiveConfig(loss={"ce": 0.25, "lk_lambda": 1.0}, decay=0.5)
    changed = parsed(*of_file, "--objective.loss", "{kl: 2.0}").objective
    assert changed == ObjectiveConfig(loss={"kl": 2.0}, decay=0.5)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("train", "data.template_kwargs"),
        *((name, "template_kwargs") for name in ("data", "generate", "chat", "bench")),
    ],
)
def test_variables_of_the_chat_template_are_options_of_their_own(parsed, run, command, option):
    variables = f"--{option}.reasoning_effort high --{option}.thinking true".split()
    given = parsed(command, *REQUIRED[command], *variables)
    group = given.data if command == "train" else given
    assert group.template_kwargs == {"reasoning_effort": "high", "thinking": True}
    thinking = option.replace("template_kwargs", "thinking")
    both = [f"--{thinking}", "true", f"--{option}", "{enable_thinking: false}"]
    status, _, errors = run(command, *REQUIRED[command], *both)
    assert status == 2
    assert "thinking True and template_kwargs enable_thinking False contradict each other" in errors


OLD_NAMES = [
    ("generate", "fallback", "adaptive", False),
    ("data", "answer_tokens", "max_new_tokens", 12),
    ("data", "target_dtype", "dtype", "float32"),
    ("train", "target_dtype", "dtype", "float32"),
    ("train", "eval.new_tokens", "eval.max_new_tokens", 12),
]


@pytest.mark.parametrize(("command", "old", "new", "value"), OLD_NAMES)
def test_old_names_of_options_are_taken_with_a_warning(parsed, tmp_path, command, old, new, value):
    required = REQUIRED[command]
    with pytest.warns(FutureWarning, match=f"{old} is called {new} now"):
        config = parsed(command, *required, f"--{old}", json.dumps(value).strip('"'))
    assert attrgetter(new)(config) == value
    group, _, name = old.rpartition(".")
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump({group: {name: value}} if group else {name: value}))
    for words in (["--config", str(path)], [f"--config={path}"]):
        with pytest.warns(FutureWarning, match=f"{old} is called {new} now"):
            config = parsed(command, *required, *words)
        assert attrgetter(new)(config) == value


def test_an_option_that_is_gone_says_what_takes_its_place(run, parsed, tmp_path):
    required = REQUIRED["train"]
    path = tmp_path / "old.yaml"
    path.write_text("optim: {ema: 0.9, lr: 0.5}")
    for words in (["--optim.ema", "0.9"], ["--config", str(path)]):
        status, _, errors = run("train", *required, *words)
        assert status == 2
        assert not lacking(errors, "option optim.ema is gone optim.schedule")
    assert str(path) in errors
    # Files of earlier versions have the value that asked for nothing.
    path.write_text("optim: {ema: 0.0, lr: 0.5}")
    assert parsed("train", *required, "--config", str(path)).optim.lr == 0.5


@pytest.mark.parametrize("words", [["--config", "smollm2-eagle3"], ["--config=smollm2-eagle3"]])
def test_a_config_of_headstart_is_taken_by_its_name(parsed, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = parsed("train", *words, "--data.sources", "c.jsonl", "--optim.lr", "3e-3")
    assert (config.head["draft_vocab_size"], config.optim.lr) == (8192, 3e-3)
    # A file of one's own of that name comes first.
    Path("smollm2-eagle3").write_text("target: mine\noutput: o\n")
    assert parsed("train", *words, "--data.sources", "c.jsonl").target == "mine"


def test_the_nearest_config_is_named_for_an_unknown_one(run):
    status, _, errors = run("train", "--config", "smollm2-eagel3")
    assert status == 2
    assert "no config at 'smollm2-eagel3'; did you mean 'smollm2-eagle3'?" in errors


@pytest.mark.parametrize(
    ("given", "unknown", "nearest"),
    [
        (["generate", "--promt", "hi"], "--promt", "--prompt"),
        (["generate", "--promp", "hi"], "--promp", "--prompt"),  # not taken as an abbreviation
        (["generate", "--max-new-token=3"], "--max-new-token", "--max_new_tokens"),
        (["bench", "--promts", "a.jsonl", "b.jsonl"], "--promts", "--prompts"),
        (["train", "--lr", "1e-3"], "--lr", "--optim.lr"),
        (["train", "--sources", "f"], "--sources", "--data.sources\n"),
        (["train", "--loop.batchsize", "3"], "--loop.batchsize", "--loop.batch_size"),
        (["train", "--adapter", "{rnak: 8}"], "adapter.rnak", "--adapter.rank"),
        (
            ["generate", "--temprature", "1", "--topk", "4"],
            "--temprature, --topk",
            "--temperature, --top_k",
        ),
    ],
)
def test_the_nearest_options_are_named_for_an_unknown_one(run, given, unknown, nearest):
    status, shown, errors = run(*given)
    first, second, third = errors.splitlines(keepends=True)
    assert (status, shown, first) == (2, "", f"error: unknown option {unknown}\n")
    assert second.startswith(f"the nearest: {nearest}")
    assert third == f"`headstart {given[0]} --help` lists all options\n"


def test_a_quoted_text_in_the_wrong_place_is_shown_whole(run):
    status, _, errors = run("generate", "--target", "t", "hi there")
    assert status == 2
    assert errors.startswith("error: unexpected 'hi there': it comes first, or after --prompt\n")


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
    subprocess.run(
        [sys.executable, "-m", "headstart.scripts"],
        env={**os.environ, **shell},
        check=True,
        timeout=200,
    )
    assert {word.strip() for word in answer.read_text().split("\n")} == words


def test_help_and_refusals_import_no_torch():
    """Nor does the parser, which would run the imports for type checkers if it were left to resolve
    the types."""
    code = (
        "import contextlib, sys\nfrom headstart.scripts import __main__ as entry\nfor command in"
        " entry.COMMANDS:\n    for arguments in (['--colour', 'red'], ['--config',"
        " '/no/such.yaml'], ['--help']):\n"
        "        sys.argv = ['headstart', command, *arguments]\n        with"
        " contextlib.suppress(SystemExit):\n            entry.main()\n        loaded = {'torch',"
        " 'transformers', 'headstart.heads', 'headstart.inference'} & set(sys.modules)\n       "
        " assert not loaded, (command, arguments, loaded)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "'target'"),
        (["train", *REQUIRED["train"], "--loop.batch_size", "0"], "loop.batch_size 1 0"),
        (["train", *REQUIRED["train"], "--loop.batch_size", "many"], "loop.batch_size 'many'"),
        (["train", "--config", "/no/such.yaml"], "'/no/such.yaml'"),
        (["generate", *REQUIRED["generate"], "--dtype", "float8"], "float8"),
        (["bench", "--target", "t", "--prompts", "[p.jsonl]"], "head drafter"),
        (["certify", *REQUIRED["certify"], "--server", "http://u:secret@h/v1"], "server URL"),
        (
            ["certify", *REQUIRED["certify"], "--server", "u:secret@h:80", "--model", "m"],
            "server URL",
        ),
        (["generate", "--target", "/no/such/target", "--prompt", "hi"], "'/no/such/target'"),
        (["bench", *REQUIRED["bench"]], "p.jsonl"),
        (
            ["data", "--target", "package:no_such_package", "--output", "{tmp}/o.jsonl"],
            "no_such_package",
        ),
    ],
)
def test_a_mistake_is_answered_with_one_line_and_status_2(run, tmp_path, arguments, words):
    status, _, errors = run(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert status == 2
    line = errors.removesuffix(f"`headstart {arguments[0]} --help` lists all options\n")
    assert line.startswith("error: ") and line.count("\n") == 1, errors
    assert not lacking(line, words) and "secret" not in errors


def train_arguments(target_folder, conversations_file, tmp_path):
    return [
        *("--target", str(target_folder), "--output", str(tmp_path / "run")),
        *("--data.sources", f"[{conversations_file}]"),
        *("--dtype", "float32", "--loop.precision", "float32"),
    ]


def test_a_stop_ends_a_command_with_status_0(run, monkeypatch):
    def stopped(*_, **__):
        raise loop.Stopped("stopped at step 3 of 9; the same command continues from there")

    monkeypatch.setattr(loop, "train", stopped)
    status, shown, errors = run("train", *REQUIRED["train"])
    assert (status, errors) == (0, "")
    assert "stopped at step 3 of 9" in shown


def test_train_then_tree_then_generate_then_bench(run, target_folder, conversations_file, tmp_path):
    small = ["--loop.max_steps", "3", "--loop.batch_size", "4"]
    small += ["--eval.prompts", "2", "--eval.max_new_tokens", "4"]
    arguments = [*train_arguments(target_folder, conversations_file, tmp_path), *small]
    status, shown, errors = run("train", *arguments, "--head", '{"type": "medusa", "num_heads": 2}')
    assert status == 0, errors
    assert "acceptance length" in shown
    head = str(tmp_path / "run" / "last")
    used = ["--target", str(target_folder), "--head", head, "--dtype", "float32"]

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["count to 3"]}\n{"prompt": "count to 5"}\n')
    status, shown, errors = run(
        "tree", *used, "--prompts", str(prompts), "--max_new_tokens", "6", "--nodes", "4"
    )
    assert status == 0, errors
    assert "expected tokens/s" in shown and f"tree is saved in {head}" in shown

    status, shown, errors = run(
        "generate", *used, "--prompt", "count to 4", "--max_new_tokens", "12"
    )
    assert status == 0, errors
    assert "tokens/s" in shown and "acceptance rate by depth" in shown
    assert re.search(r"rounds( \(\d+ without drafts\))?, acceptance length", shown)

    report = tmp_path / "report.json"
    size = ["--max_new_tokens", "6", "--output", str(report)]
    status, shown, errors = run("bench", *used, "--prompts", f"[{prompts}]", *size)
    assert status == 0, errors
    assert "2/2" in shown
    assert json.loads(report.read_text())["total"]["identical"] == 2


def test_generate_streams_what_stock_generate_writes(run, target_folder, head_folder, tokenizer):
    options = ["--dtype", "float32", "--prompt", "hello", "--max_new_tokens", "20"]
    used = ["--target", str(target_folder), *options]
    status, shown, errors = run("generate", *used, "--head", head_folder, "--compare", "true")
    assert status == 0, errors
    target = Target.from_pretrained(target_folder, torch.float32)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    written = target.model.generate(prompt, max_new_tokens=20, do_sample=False)[
        0, prompt.shape[1] :
    ]
    answered = tokenizer.decode(written, skip_special_tokens=True)
    assert shown.count(answered.strip()) == 2  # both sides
    found = re.search(r"(\d+) rounds(?: \((\d+) without drafts\))?", shown)
    rounds, plain = map(int, found.groups(default="0"))
    assert ("drafts did not pay" in shown) == (2 * plain > rounds)
    rates, equal = shown.splitlines()[-2:]
    assert " times)" in rates and equal == "both generated the same text"


def test_generate_of_no_tokens_says_nothing(run, target_folder):
    options = ["--prompt", "hi", "--max_new_tokens", "0", "--dtype", "float32"]
    status, shown, errors = run("generate", "--target", str(target_folder), *options)
    assert status == 0, errors
    assert "acceptance" not in shown


@pytest.mark.parametrize("way", ["module", "file"])
def test_commands_run_as_a_module_and_as_files(way):
    """`accelerate launch scripts/train.py` runs the file."""
    file = importlib.import_module("headstart.scripts.train").__file__
    start = ["-m", "headstart.scripts", "train"] if way == "module" else [file]
    done = subprocess.run(
        [sys.executable, *start, "--loop.keep", "0"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr == "error: option 'target' is required and was not given\n"


def test_a_bug_report_holds_versions_and_no_secret(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    status, shown, _ = run("doctor")
    assert status == 0
    assert f"torch {torch.__version__}" in shown
    assert "a token is stored" in shown
    assert "hf_secret" not in shown
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "no token" in run("doctor")[1]


GROWING = "a: &a [1, 1]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklm")
)


@pytest.mark.parametrize(
    "text",
    [
        *("", "- 1", "3", "data: 3", "data: [1]", "data:", "loop: x", "head: 3", "1: 2", "? [1]"),
        *(
            "{",
            "a: 1: 2",
            "target: !!timestamp 2026-99-99",
            "target: !!python/name:os.system",
            "a\0: 1",
            "\x85",
        ),
        *("head: &a {type: medusa, b: *a}", "head: &a [*a]", "config: other.yaml", GROWING),
        *("loop: {epochs: [1]}", "unknown: 1", "loop: {unknown: 1}", "loop: {keep: " + "9" * 5000),
        "init_from: [" + "0, " * 5000 + "0]",
    ],
)
def test_a_config_of_something_else_is_named(tmp_path, text):
    path = tmp_path / "options.yaml"
    path.write_bytes(text.encode("latin-1"))
    given = ["--config", str(path), "--target", "x", "--output", "y"]
    with refused(str(path)) as caught:
        options(ServedTrainConfig, "train", "", given)
    lines = str(caught.value).removesuffix("\n`headstart train --help` lists all options")
    assert lines.count("\n") <= ("unknown option" in lines) and len(lines) < 1500


def test_an_option_of_the_command_line_is_not_said_to_be_in_the_config(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("target: x\noutput: y\n")
    with refused("loop.keep"):
        options(ServedTrainConfig, "train", "", ["--config", str(path), "--loop.keep", "x"])


def test_an_error_is_cut_that_quotes_all_of_a_file(capsys):
    def fail(_):
        raise ValueError("9" * 10**6)

    with pytest.raises(SystemExit):
        command_line.run(fail, [])
    assert 1000 < len(capsys.readouterr().err) < 5000
