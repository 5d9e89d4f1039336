"""Shared parts of the command line: common options, their parsing, and errors as one line."""

from __future__ import annotations

import atexit
import dataclasses
import difflib
import gc
import itertools
import json
import os
import re
import sys
import typing
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import yaml
from jsonargparse import ArgumentParser, get_loader, set_parsing_settings

from headstart.console import LINE_SECONDS, log, show_on_console
from headstart.files import BROKEN, at_home, one_line, printable, read_bytes
from headstart.options import (
    CommandOptions,
    Dtype,
    by_new_names,
    did_you_mean,
    limited,
    parts_of,
    shown,
    template_variables,
    valid_values,
)
from headstart.rows import as_files
from headstart.stopping import Stopped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.inference import SpeculativeLM

set_parsing_settings(docstring_parse_attribute_docstrings=True)

Options = TypeVar("Options", bound=CommandOptions)
MOST_REFERENCES = 20
"""References in a config, which repeat what they name: nested ones grow without end."""
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
"""Folder of the configs that `--config` takes by name, of the repository or of the wheel."""
LONGEST_ERROR = 4000
"""Characters of an error that are printed: it may quote what a file or a server holds."""


@dataclass(frozen=True)
class TargetOptions(CommandOptions):
    """The model that a command runs."""

    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python
    package."""
    dtype: Dtype = "fastest"
    """Data type of target and head; fastest takes the fastest one here that is as exact as the
    checkpoint's own, auto the checkpoint's own."""


@dataclass(frozen=True)
class DecodingOptions(TargetOptions):
    """Target, head and sampling of answers."""

    takes_encoder_decoders: ClassVar[bool] = False
    """Whether the command also answers with an encoder-decoder, which reads a text and no
    conversation."""

    head: str | None = None
    """The head's checkpoint folder or Hub id; null for a drafter that needs none, or plain
    decoding."""
    max_new_tokens: int = limited(128, minimum=1)
    """Tokens of each answer."""
    thinking: bool | None = None
    """Passed to the chat template as enable_thinking; null leaves it to the template."""
    template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template, such as {reasoning_effort: high} or {thinking:
    true}; null for none."""
    temperature: float = limited(0.0, minimum=0)
    """0 for greedy decoding; above 0 for sampling."""
    compile: bool = True
    """How forwards run. true: kernels of our own on a CPU, CUDA graphs on a GPU. false:
    transformers' own operations."""
    allow_adapter: bool = False
    """Merge the LoRA adapter that the head brings, if it brings one, into the model, which then
    writes different text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Called for its error: they may contradict each other.
        template_variables(self.thinking, self.template_kwargs)

    def load(self, **more: Any) -> tuple[SpeculativeLM, PreTrainedTokenizerBase]:
        """Load the target, its tokenizer, and the head or drafter.

        Warn if the head was trained on prompts that were tokenized or rendered differently.
        """
        from headstart.inference.engines.encoder_decoder import is_encoder_decoder
        from headstart.inference.load import load_speculative_lm
        from headstart.inference.text.chat_template import (
            warn_of_other_data,
            warn_of_unread_variables,
        )

        if not self.takes_encoder_decoders and is_encoder_decoder(self.target):
            raise ValueError(
                f"{self.target!r} is an encoder-decoder, which `headstart generate` and `headstart"
                " bench` take; this command takes decoder-only models"
            )
        # Those of the decoder's options that this command has.
        names = (
            "acceptance",
            "allow_adapter",
            "compile",
            "drafter",
            "adaptive",
            "lossy",
            "tree",
        )
        options = {name: value for name, value in vars(self).items() if name in names} | more
        lm, tokenizer = load_speculative_lm(self.target, self.head or None, self.dtype, **options)
        warn_of_other_data(lm.provenance, tokenizer, self.thinking, self.template_kwargs)
        warn_of_unread_variables(tokenizer, self.thinking, self.template_kwargs)
        return lm, tokenizer

    def as_loaded(self, lm: SpeculativeLM) -> Self:
        """Return the options with the values that "auto" was resolved to."""
        from headstart.heads.base import dtype_name

        dtype: Any = dtype_name(lm.target.dtype)
        return dataclasses.replace(self, dtype=dtype, compile=lm.target.compiled)


@dataclass(frozen=True)
class SpeculativeOptions(DecodingOptions):
    """Drafting and verification."""

    tree: str = "auto"
    """The draft tree: auto (the fastest of a few sizes), chain:LENGTH, branch:2x2x1,
    dynamic:NODES:DEPTH:WIDTH, root, or a JSON file of paths; the prefix `drawn:` samples the
    children without replacement instead of taking the top k, `independent:` with replacement;
    several separated by |, of which each round takes the one that has been fastest."""
    acceptance: str = "auto"
    """The acceptance rule for sampling: auto (the exact one that accepts most), point_mass, token,
    with_replacement, without_replacement, block, traversal, or typical[:EPSILON:DELTA], which is
    LOSSY."""
    lossy: bool = False
    """Confirm that a lossy acceptance rule (typical) may change the output."""
    drafter: str | None = None
    """A source of drafts that needs no head: history (what followed before, in the text and in
    earlier answers), prompt-lookup (in the text alone), retrieval:FOLDER (in what `headstart
    datastore` made, too), model:NAME (a smaller model); beside a head, one of the first three."""
    adaptive: bool = True
    """Time steps without drafts too, and draft only where that is faster; false to draft always."""
    seed: int = 0
    """Seed of the sampling."""


@dataclass(frozen=True)
class SamplingOptions(SpeculativeOptions):
    """From which tokens an answer is sampled, for commands that show single answers."""

    top_k: int = limited(0, minimum=0)
    """Sample from this many best tokens only; 0 for all."""
    top_p: float = limited(1.0, above=0, maximum=1)
    """Sample from the best tokens that hold this share of the probability only."""


@dataclass(frozen=True)
class PromptFiles(CommandOptions):
    """Files of prompts that a command answers."""

    prompts: list[str] = field(default_factory=list)
    """JSONL files of prompts."""
    limit: int | None = limited(None, minimum=1)
    """Use only the first prompts of each file; null for all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompts", as_files(self.prompts))
        super().__post_init__()


@contextmanager
def recorded(
    folder: str | None, decoders: list[SpeculativeLM], tokenizer: PreTrainedTokenizerBase
) -> Iterator[None]:
    """Record what decoders answer inside the block in `folder`, if it is given.

    At the end of the block, a summary of the recordings is logged.
    """
    from headstart.addons.record import record

    recordings = []
    with ExitStack() as running:
        if folder is not None:
            for lm in decoders:
                recordings.append(running.enter_context(record(lm, folder, tokenizer=tokenizer)))
        yield
    for recording in recordings:
        if recording.written or recording.dropped or recording.skipped or recording.failure:
            log.info(f"recorded: {recording.summary()}")


def options(
    kind: type[Options],
    command: str,
    description: str | None,
    arguments: list[str],
    first: str | None = None,
) -> Options:
    """Parse a command's options from `--config FILE.yaml` and the command line.

    The name of the option `first` may be left out: `headstart push RUN` means `headstart push --run
    RUN`.

    Raises:
        ValueError: an unknown option, with the nearest valid ones; or a value of the wrong type.
    """
    # 1. Replace types that are written as strings by the types. jsonargparse would resolve them by
    # running the imports of `if TYPE_CHECKING:`, and to import torch takes seconds.
    constructor: Any = kind.__init__
    constructor.__annotations__ = typing.get_type_hints(kind)

    # 2. A parser with an option for each field of the dataclass; nested ones have dots.
    about = f" [{first.upper()}]" if first else ""
    parser = ArgumentParser(
        prog=f"headstart {command}",
        usage=f"headstart {command}{about} [--config FILE.yaml] [--OPTION VALUE ...]",
        description=description,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="config",
        help="YAML file of options, or the name of one that headstart has, such as smollm2-eagle3;"
        " the command line overrides it",
    )
    parser.add_class_arguments(kind)
    show_first(parser, kind.most_used)

    # 3. Parse. Lists and flags may be written in forms that jsonargparse does not read.
    if first and arguments and not arguments[0].startswith("-"):
        arguments = [f"--{first}", *arguments]
    types = option_types(kind)
    configs: list[str] = []

    def read_config(name: str) -> str:
        configs.append(config_path(name))
        return checked(configs[-1], types)

    spelled_arguments = spelled_out(arguments, types, read_config)
    try:
        parsed = parser.instantiate(parser.parse_args(spelled_arguments))
    except ArgumentError as error:
        explanation = explained(str(error), arguments, types, configs, first)
        raise ValueError(
            f"{explanation}\n`headstart {command} --help` lists all options"
        ) from error
    values = dict(vars(parsed))
    del values["config"]
    return kind(**values)


def show_first(parser: ArgumentParser, names: tuple[str, ...]) -> None:
    """Let `--help` begin with some options, in their order.

    They become the first group, because argparse shows its groups one after another.
    """
    # argparse has no public way to move an option from one group to another.
    groups = list(parser._action_groups)
    most_used = parser.add_argument_group("most used")
    parser._action_groups = [most_used, *groups]
    for name in names:
        for group in groups:
            for action in [action for action in group._group_actions if action.dest == name]:
                group._group_actions.remove(action)
                most_used._group_actions.append(action)


def config_path(name: str) -> str:
    """Return the path of a config: a file, or one of headstart's by its name.

    Raises:
        ValueError: neither, with the nearest name.
    """
    if os.path.isfile(at_home(name)):
        return at_home(name)
    shipped = {path.stem: str(path) for path in CONFIGS.glob("*.yaml")}
    if name not in shipped:
        raise ValueError(f"no config at {name!r}{did_you_mean(name, shipped)}")
    return shipped[name]


def checked(path: str, types: dict[str, Any]) -> str:
    """Return a config's path, or its options as JSON where some have old names (`RENAMED`).

    Raises:
        ValueError: it is not a mapping of options and of groups of them, with the file.
    """
    try:
        text = read_bytes(Path(path)).decode()
        references = sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
        if references > MOST_REFERENCES:
            raise ValueError(
                f"it has {references} references (*NAME), and {MOST_REFERENCES} may be used"
            )
        options = get_loader("yaml")(text)
        if not isinstance(options, dict):
            raise ValueError("it is not a mapping of options")
        json.dumps(options, default=str)  # refuses a list that holds itself
        for name, value in options.items():
            if name == "config":
                raise ValueError("it names another config; give both on the command line")
            if dataclasses.is_dataclass(types.get(name)) and not isinstance(value, dict):
                raise ValueError(f"{name} must be a mapping of options, not {shown(value)}")
        renamed = {
            name: by_new_names(value, f"{name}.") if isinstance(value, dict) else value
            for name, value in by_new_names(options).items()
        }
    except (yaml.YAMLError, *BROKEN) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error
    return path if renamed == options else json.dumps(renamed)


def explained(
    message: str,
    arguments: list[str],
    types: dict[str, Any],
    configs: Sequence[str] = (),
    first: str | None = None,
) -> str:
    """Explain the parser's error in a line or two: what was given, and what is valid.

    Args:
        message: the error of jsonargparse.
        arguments: the command line as it was typed.
        types: types of the valid options, by their dotted names.
        configs: files of options, in which those are that the command line does not name.
        first: the option whose name may be left out, if it comes first.
    """
    in_config = f"{', '.join(configs)}: " if configs else ""
    at_end = f" in {', '.join(configs)}" if configs else ""
    # 1. An unknown option, in one of the three ways in which jsonargparse words it.
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ").split()
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        if not names:
            # The message holds a quoted argument word by word: show it as it was given.
            text = " ".join(unknown)
            given = next(argument for argument in arguments if text.startswith(argument))
            place = f"it comes first, or after --{first}" if first else "write --NAME VALUE"
            return f"unexpected {given!r}: {place}"
        # As the user typed them: `spelled_out` has replaced hyphens by underscores.
        typed = {}
        for argument in arguments:
            option = argument.partition("=")[0]
            typed[spelled(option)] = option
        as_typed = [typed.get(name, name) for name in names]
        return unknown_options(as_typed, [name.lstrip("-") for name in names], types)
    of_yaml = re.fullmatch(
        r"Option '(.+)' is not accepted|Group '(.+)' does not accept option '(.+)'", message
    )
    if of_yaml:
        name = ".".join(filter(None, of_yaml.groups()))
        return unknown_options([name + at_end], [name], types)

    # 2. A value of the wrong type.
    key = re.match(r'Parser key "(.+?)":', message)
    value = re.search(r"(?:Got|Given) value: (.*)", message, re.DOTALL)
    if key and value and key[1] in types:
        typed_options = {spelled(argument.partition("=")[0]) for argument in arguments}
        where = "" if f"--{key[1]}" in typed_options else in_config
        return (
            f"{where}option {key[1]} must be {valid_values(types[key[1]])}, not {shown(value[1])}"
        )

    # 3. Anything else, on one line.
    return in_config + " ".join(message.replace('Parser key "config":', "option --config:").split())


def unknown_options(given: list[str], names: list[str], types: dict[str, Any]) -> str:
    """Return two lines: the unknown options as typed, and the valid ones with the nearest names."""
    nearest: list[str] = []
    for name in names:
        # The same name in another group, such as --optim.lr for --lr, comes first.
        last = name.rpartition(".")[2]
        in_groups = [option for option in types if option.rpartition(".")[2] == last]
        similar = difflib.get_close_matches(name, types, n=3)
        nearest += [f"--{option}" for option in [*in_groups, *similar]]
    first = f"unknown option {', '.join(given)}"
    if not nearest:
        return f"{first}\nno valid option has a similar name"
    return f"{first}\nthe nearest: {', '.join(dict.fromkeys(nearest))}"


def option_types(kind: type, before: str = "") -> dict[str, Any]:
    """List the types of a command's options, nested ones included, by their dotted names."""
    types: dict[str, Any] = {}
    hints = typing.get_type_hints(kind)
    for option in dataclasses.fields(kind):
        hint = hints[option.name]
        types[before + option.name] = hint
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            types |= option_types(hint, f"{before}{option.name}.")
    return types


def spelled(name: str) -> str:
    """Write the name of an option with underscores: --max_new_tokens for --max-new-tokens."""
    # All hyphens become underscores, and then the first two are hyphens again.
    return name.replace("-", "_").replace("__", "--", 1)


def spelled_out(
    arguments: list[str], types: dict[str, Any], read_config: Callable[[str], str]
) -> list[str]:
    """Rewrite arguments in the forms that jsonargparse reads, each with its value.

    `--max-new-tokens 8` with underscores, `--prompts a b` as `--prompts=["a", "b"]`, a flag without
    a value, `--compare`, as `--compare=true`, `--head eagle3` of a training run as
    `--head.type=eagle3`, and old names (`RENAMED`) as new ones. `read_config` gives what takes the
    place of a value of `--config`.
    """
    plain: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.partition("=")
        # A value without an option, or a short option.
        if not name.startswith("--"):
            plain.append(argument)
            continue
        (option,) = by_new_names({spelled(name).removeprefix("--"): None})
        # The types of a union, without their arguments: list and NoneType of list[str] | None.
        kinds = {typing.get_origin(part) or part for part in parts_of(types.get(option))}
        # Its values go on to the next option.
        words = list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
        if not equals:
            if kinds & {list, tuple} and str not in kinds:
                del rest[: len(words)]
                is_json = len(words) == 1 and words[0].startswith("[")
                value = words[0] if is_json else json.dumps(words)
            elif bool in kinds and not words:
                value = "true"
            elif words and (option in types or option == "config"):
                value = rest.pop(0)
            else:
                plain.append(f"--{option}")
                continue
        if option == "config":
            value = read_config(value)
        if option == "head" and dict in kinds and not value.startswith("{"):
            option = "head.type"
        plain.append(f"--{option}={value}")
    return plain


def _in_one_line(format_warning: Callable[..., str]) -> Callable[..., str]:
    """Return a format of warnings: those for users as an error stands, in one line without code.

    Warnings may quote what a file or a server holds: no control characters reach the terminal.
    """

    def formatted(message: object, category: type[Warning], *place: object) -> str:
        if category in (UserWarning, FutureWarning):
            return f"warning: {printable(str(message))}\n"
        return printable(format_warning(message, category, *place))

    return formatted


def run(main: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Run a command; an error ends it with one line on standard error.

    The exit status is 2 after a user's mistake, 1 after a failing disk, 0 after a stop from which
    the same command resumes, and 130 after any other.
    """
    show_on_console()
    warnings.formatwarning = _in_one_line(warnings.formatwarning)
    if not sys.stderr.isatty():
        # In a log, progress bars of other packages appear only where the work is long.
        os.environ.setdefault("TQDM_DELAY", str(LINE_SECONDS))
        os.environ.setdefault("TQDM_MININTERVAL", str(LINE_SECONDS))
    status = 0
    try:
        main(arguments)
    except (ValueError, OSError) as error:
        text = f"error: {error}"
        if len(text) > LONGEST_ERROR:
            text = f"{text[:LONGEST_ERROR]} ..."
        print(printable(text), file=sys.stderr)
        status = 2 if isinstance(error, ValueError) else 1
    except Stopped as stopped:
        # One of several processes tells it.
        if os.environ.get("RANK", "0") == "0":
            print(stopped)
        # Python's last garbage collection takes a second, or several on a busy machine.
        gc.freeze()
    except KeyboardInterrupt:
        print("stopped")
        status = 130
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Threads of torch's gloo may abort a process while its interpreter ends
        # (pytorch/pytorch#179291): do what it would do, and leave at once.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    if status:
        sys.exit(status)
