"""The command line's common parts: options that several commands have, their parsing, errors as one line."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import itertools
import json
import os
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from headstart.train.config import TYPE_CHECKING, CommandOptions, Dtype, template_variables
from headstart.train.console import Stopped, printable, show_on_console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from headstart.inference import SpeculativeLM
    from headstart.train.loading import SharedTarget

set_parsing_settings(docstring_parse_attribute_docstrings=True)

Options = TypeVar("Options")


@dataclass(frozen=True)
class TargetOptions(CommandOptions):
    """The model that a command runs."""

    target: str = ""
    """The model: a folder, a Hub id, a GGUF file, or package:NAME for the GGUF file of a Python package."""
    dtype: Dtype = "fastest"
    """Data type of target and head; fastest takes the fastest one here that is as exact as the checkpoint's own, auto
    the checkpoint's own."""


@dataclass(frozen=True)
class DecodingOptions(TargetOptions):
    """Target, head and sampling of answers."""

    head: str | None = None
    """The head's checkpoint folder or Hub id; null for a drafter that needs none, or plain decoding."""
    max_new_tokens: int = 128
    """Tokens of each answer."""
    thinking: bool | None = None
    """Passed to the chat template as enable_thinking; null leaves it to the template."""
    template_kwargs: dict[str, Any] | None = None
    """Further variables for the chat template, such as {reasoning_effort: high} or {thinking: true}; null for none."""
    temperature: float = 0.0
    """0 for greedy decoding; above 0 for sampling."""
    compile: bool | typing.Literal["auto"] = "auto"
    """Compile rounds and plain steps: on a CPU into kernels of our own, which auto does too; on an accelerator into
    graphs, which take minutes to build."""
    allow_adapter: bool = False
    """Merge the LoRA adapter that the head brings, if it brings one, into the model, which then writes other text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        template_variables(self.thinking, self.template_kwargs)  # raises if they contradict each other

    def load(self, shared: SharedTarget | None = None, **more: Any) -> tuple[SpeculativeLM, PreTrainedTokenizerBase]:
        """Load the target, its tokenizer, and the head or drafter; warn if the head was trained on other prompts."""
        from headstart.train.data.chat_template import warn_of_other_data, warn_of_unread_variables
        from headstart.train.loading import load_speculative_lm

        names = ("acceptance", "allow_adapter", "compile", "drafter", "fallback", "lossy", "tree")
        options = {name: value for name, value in vars(self).items() if name in names} | more
        lm, tokenizer = load_speculative_lm(self.target, self.head or None, self.dtype, shared, **options)
        warn_of_other_data(lm.provenance, tokenizer, self.thinking, self.template_kwargs)
        warn_of_unread_variables(tokenizer, self.thinking, self.template_kwargs)
        return lm, tokenizer

    def as_loaded(self, lm: SpeculativeLM) -> Self:
        """The options with the values that "auto" was resolved to."""
        dtype: Any = str(lm.target.dtype).removeprefix("torch.")
        return dataclasses.replace(self, dtype=dtype, compile=lm.target.compiled)


@dataclass(frozen=True)
class SpeculativeOptions(DecodingOptions):
    """Drafting and verification."""

    tree: str = "auto"
    """The draft tree: auto (the fastest of a few sizes), chain:LENGTH, branch:2x2x1, dynamic:NODES:DEPTH:WIDTH, root,
    or a JSON file of paths; the prefix `drawn:` samples the children without replacement instead of taking the top k,
    `independent:` with replacement; several separated by |, of which each round takes the one that has been fastest."""
    acceptance: str = "auto"
    """The acceptance rule for sampling: auto (the exact one that accepts most), point_mass, token, with_replacement,
    without_replacement, block, traversal, or typical[:EPSILON:DELTA], which is LOSSY."""
    lossy: bool = False
    """Confirm that a lossy acceptance rule (typical) may change the output."""
    drafter: str | None = None
    """A source of drafts that needs no head: prompt-lookup, retrieval:FOLDER (of `headstart datastore`), lookahead,
    ngram:ORDER, random, model:NAME (a smaller model); beside a head, prompt-lookup or retrieval add to its tree."""
    fallback: bool = True
    """Time plain steps too, and decode plainly where drafts cost more time than they save; false to draft always."""
    seed: int = 0
    """Seed of the sampling."""


@dataclass(frozen=True)
class SamplingOptions(SpeculativeOptions):
    """From which tokens an answer is sampled, for commands that show single answers."""

    top_k: int = 0
    """Sample from this many best tokens only; 0 for all."""
    top_p: float = 1.0
    """Sample from the best tokens that hold this share of the probability only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")


def options(
    kind: type[Options], command: str, description: str | None, arguments: list[str], first: str | None = None
) -> Options:
    """Parse a command's options from `--config FILE.yaml` and the command line.

    Exits with status 2 and a message if an option is unknown or its value has the wrong type. The name of the option
    `first` may be left out: `headstart push RUN` means `headstart push --run RUN`.
    """
    parser = ArgumentParser(prog=f"headstart {command}", description=description)
    parser.add_argument("--config", action="config", help="YAML file of options; the command line overrides it")
    parser.add_class_arguments(kind)
    if first and arguments and not arguments[0].startswith("-"):
        arguments = [f"--{first}", *arguments]
    given = spelled_out(arguments, set(options_of_type(kind, list)), set(options_of_type(kind, bool)))
    parsed = parser.instantiate(parser.parse_args(given))
    values = {name: _plain(value) for name, value in vars(parsed).items() if name != "config"}
    return kind(**values)


def _plain(value: Any, inside: bool = False) -> Any:
    """Parse the strings inside untyped mappings (`--head.loss.ce 0.5`) as YAML does."""
    if isinstance(value, dict):
        return {name: _plain(child, inside=True) for name, child in value.items()}
    if not inside or not isinstance(value, str):
        return value
    # YAML reads 1e-3, which has no dot, as a string.
    return float(value) if re.fullmatch(r"[-+]?\d+[eE][-+]?\d+", value) else yaml.safe_load(value)


def options_of_type(kind: type, wanted: type, before: str = "") -> Iterator[str]:
    """Dotted names of the options of a type, such as list."""
    for name, hint in typing.get_type_hints(kind).items():
        if wanted in (hint, typing.get_origin(hint), *typing.get_args(hint)):
            yield before + name
        elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from options_of_type(hint, wanted, f"{before}{name}.")


def spelled_out(arguments: list[str], lists: set[str], flags: set[str]) -> list[str]:
    """Rewrite arguments in the forms that jsonargparse reads.

    `--max-new-tokens 8` with underscores, `--prompts a b` as `--prompts '["a", "b"]'`, and a flag without a value,
    `--compare`, as `--compare true`.
    """
    plain: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--"):
            plain.append(name + equals + value)
            continue
        option = name.replace("-", "_").replace("__", "--", 1)
        plain.append(option + equals + value)
        if option.removeprefix("--") in lists and not equals:
            values = list(itertools.takewhile(lambda argument: not argument.startswith("--"), rest))
            del rest[: len(values)]
            plain.extend(values if len(values) == 1 and values[0].startswith("[") else [json.dumps(values)])
        if option.removeprefix("--") in flags and not equals and (not rest or rest[0].startswith("--")):
            plain.append("true")
    return plain


def run(main: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Run a command; an error ends it with one line on standard error.

    The exit status is 2 after a user's mistake, 1 after a failing disk, and 0 after a request to stop.
    """
    show_on_console()
    shown = warnings.formatwarning
    warnings.formatwarning = lambda *given: printable(shown(*given))
    try:
        main(arguments)
    except (ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except Stopped as stopped:
        print(stopped)
        gc.freeze()  # Python's last garbage collection takes a second, or several on a busy machine
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Threads of torch's gloo may abort a process while its interpreter ends (pytorch/pytorch#179291).
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
