"""A mix of prompts by kind: taken from files, and made out of passages where a kind is rare.

    python benchmarks/prompts.py --config configs/data/assistant.yaml --sources prompts.jsonl \\
        --exclude gsm8k.jsonl humaneval.jsonl mt_bench.jsonl --output runs/data/prompts.jsonl

The shipped head was trained on answers to such a mix, and pages of figures measure on the prompts
that it holds out: a head accepts most on the kinds of prompt that it was trained on. A kind takes
prompts of files, by their source or wording, or fills its templates ("Summarize this text:
{passage}") with paragraphs of prompts and of the model's own long answers.

Text that is measured on is not trained on: prompts that share eight words in a row with an
evaluation file (--exclude) are left out, and some prompts of each kind, with the passages in them,
are held out. They are written to OUTPUT-held-out, one file for each kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

import yaml
from common import arguments

from headstart.console import log
from headstart.files import write_whole
from headstart.inference.text.messages import check_conversation, user_turns
from headstart.train.data.conversations import open_file

GRAM = 8
"""Words in a row that two independent texts hardly share."""
WORDING = 5
"""An n-gram of this many prompts is the wording of a task and no sign of shared content."""
PASSAGE_WORDS = (40, 250)
"""Words of a passage; longer contexts join several."""
HELD_OUT_PASSAGES = 0.05
"""Share of the passages from which held-out prompts are made, and no others."""


@dataclass(frozen=True)
class KindConfig:
    """A kind of prompt in a mix: prompts of the sources, or templates filled with their
    passages."""

    share: float = 1.0
    """Its part of the mix, relative to those of the other kinds."""
    sources: list[str] = field(default_factory=list)
    """Take only rows with one of these values of `source`; empty for all."""
    match: str = ""
    """Take only prompts in which this regular expression is found."""
    templates: list[str] = field(default_factory=list)
    """Prompts with {passage}, {topic} (a name or a word of the passage) and the names in `values`;
    empty for prompts of the sources."""
    values: dict[str, list[str]] = field(default_factory=dict)
    """What may stand for further names in the templates, such as {language}."""
    words: list[int] = field(default_factory=lambda: [40, 250])
    """Fewest and most words of a passage; where one has too few, several are joined."""

    def __post_init__(self) -> None:
        if self.share <= 0:
            raise ValueError(f"a kind's share must be above 0, not {self.share}")
        if len(self.words) != 2 or not 0 < self.words[0] <= self.words[1]:
            raise ValueError(
                f"a kind's words are the fewest and the most of a passage, not {self.words}"
            )
        for template in self.templates:
            names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
            known = {"passage", "topic", *self.values}
            if not {"passage"} <= names <= known:
                raise ValueError(
                    f"template {template!r} needs {{passage}} and takes the names {sorted(known)},"
                    f" not {sorted(names)}"
                )


@dataclass(frozen=True)
class PromptMixConfig:
    """A mix of prompts by kind."""

    output: str
    """JSONL file to write; the held-out prompts go to the folder OUTPUT-held-out beside it."""
    sources: list[str]
    """JSONL files of prompts or conversations: the prompts, and the paragraphs that serve as
    passages."""
    kinds: dict[str, KindConfig]
    """The kinds by name; a prompt of the sources belongs to the first one that takes it."""
    exclude: list[str] = field(default_factory=list)
    """Evaluation files; texts that share 8 words in a row with them are left out."""
    prompts: int = 10_000
    """Number of prompts, divided by the kinds' shares."""
    held_out: int = 20
    """Prompts of each kind that are held out, to measure on."""
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    """Sampling temperatures of the answers, one of which each prompt gets; 0 for greedy
    decoding."""
    systems: list[str] = field(default_factory=list)
    """System prompts, one of which some prompts get."""
    system_share: float = 0.1
    """Share of the prompts with a system prompt."""
    follow_ups: list[str] = field(default_factory=list)
    """Second messages of the user, one of which follows some answers."""
    follow_up_share: float = 0.1
    """Share of the prompts with a second turn."""
    seed: int = 0
    """Seed of every choice."""


@dataclass
class Mix:
    """Prompts by kind."""

    training: dict[str, list[str]]
    held_out: dict[str, list[str]]
    left_out: int
    """Rows and passages that share `GRAM` words with an evaluation file or with a held-out
    prompt."""


def main() -> None:
    """Read the YAML file of a mix, and write its prompts."""
    parser = arguments(__doc__, "runs/data/prompts.jsonl")
    parser.add_argument(
        "--config",
        required=True,
        help="YAML file with the kinds, such as configs/data/assistant.yaml",
    )
    parser.add_argument(
        "--sources", nargs="+", required=True, help="JSONL files of prompts or conversations"
    )
    parser.add_argument(
        "--exclude", nargs="*", default=[], help="JSONL files that share nothing with the prompts"
    )
    parser.add_argument(
        "--held-out", type=int, help="prompts of each kind to measure on; the config's if not given"
    )
    parser.add_argument("--seed", type=int, default=0)
    write_prompts(mix_config(parser.parse_args()))


def mix_config(args: argparse.Namespace) -> PromptMixConfig:
    """Return the options of the YAML file, with those of the command line."""
    options = yaml.safe_load(Path(args.config).read_text(encoding="utf-8"))
    options["kinds"] = {name: KindConfig(**kind) for name, kind in options["kinds"].items()}
    if args.held_out is not None:
        options["held_out"] = args.held_out
    return PromptMixConfig(
        output=args.output, sources=args.sources, exclude=args.exclude, seed=args.seed, **options
    )


def write_prompts(config: PromptMixConfig) -> Path:
    """Write the mix to `output`, and its held-out prompts to a folder beside it; return the
    folder."""
    mix, chance = mix_prompts(config), random.Random(config.seed)
    rows = []
    for kind, texts in mix.training.items():
        for text in texts:
            system = (
                [{"role": "system", "content": chance.choice(config.systems)}]
                if config.systems
                else []
            )
            messages = [
                *(system if chance.random() < config.system_share else []),
                {"role": "user", "content": text},
            ]
            row = {
                "kind": kind,
                "temperature": chance.choice(config.temperatures),
                "messages": messages,
            }
            if config.follow_ups and chance.random() < config.follow_up_share:
                row["follow_up"] = chance.choice(config.follow_ups)
            rows.append(row)
    chance.shuffle(rows)
    output = Path(config.output)
    folder = output.with_name(f"{output.stem}-held-out")
    folder.mkdir(parents=True, exist_ok=True)
    for kind, texts in mix.held_out.items():
        _write(folder / f"{kind}.jsonl", [{"kind": kind, "prompt": text} for text in texts])
        log.info(f"{kind}: {len(mix.training[kind])} prompts, {len(texts)} held out")
    _write(output, rows)
    log.info(
        f"{output}: {len(rows)} prompts; {mix.left_out} left out that share {GRAM} words in a row"
        f" with an evaluation file or a held-out prompt; the held-out ones are in {folder}"
    )
    return folder


def mix_prompts(config: PromptMixConfig) -> Mix:
    """Choose and make the prompts of every kind.

    Raises:
        ValueError: a kind that holds no prompt to train on.
    """
    chance = random.Random(config.seed)
    found, passages, left_out = _read(config)
    for texts in (passages, *found.values()):
        chance.shuffle(texts)
    held_out = {name: texts[: config.held_out] for name, texts in found.items()}
    apart = passages[: round(HELD_OUT_PASSAGES * len(passages))]
    counts = Counter(gram for texts in found.values() for text in texts for gram in grams(text))
    measured = {gram for text in itertools.chain(apart, *held_out.values()) for gram in grams(text)}
    measured -= {gram for gram, count in counts.items() if count >= WORDING}
    others = {name: texts[config.held_out :] for name, texts in found.items()}
    rest = {
        name: [text for text in texts if measured.isdisjoint(grams(text))]
        for name, texts in others.items()
    }
    usable = [text for text in passages[len(apart) :] if measured.isdisjoint(grams(text))]
    left_out += (
        sum(len(others[name]) - len(rest[name]) for name in found)
        + len(passages)
        - len(apart)
        - len(usable)
    )
    training, total = {}, sum(kind.share for kind in config.kinds.values())
    for name, kind in config.kinds.items():
        wanted = max(1, round(config.prompts * kind.share / total))
        training[name] = rest[name][:wanted]
        if kind.templates:
            held_out[name] = fill(kind, apart, config.held_out, chance)
            training[name] = fill(kind, usable, wanted, chance)
        if not training[name]:
            raise ValueError(
                f"kind {name!r} holds no prompt to train on: {len(found[name])} prompts and"
                f" {len(passages)} passages were found, and {len(held_out[name])} prompts are"
                " held out"
            )
        if len(training[name]) < wanted:
            log.info(
                f"{name}: {len(training[name])} prompts where its share of the mix would be"
                f" {wanted}"
            )
    return Mix(training, held_out, left_out)


def _read(config: PromptMixConfig) -> tuple[dict[str, list[str]], list[str], int]:
    """Prompts by kind, passages, and how many rows were left out because an evaluation file shares
    n-grams."""
    evaluation = {
        gram for _, texts in _texts(config.exclude) for text in texts for gram in grams(text)
    }
    found: dict[str, list[str]] = {name: [] for name in config.kinds}
    passages: dict[str, None] = {}
    seen, left_out = set[str](), 0
    for source, texts in _texts(config.sources):
        if any(not evaluation.isdisjoint(grams(text)) for text in texts):
            left_out += 1
            continue
        passages |= {part: None for text in texts for part in paragraphs(text)}
        prompt, key = texts[0], " ".join(words(texts[0]))
        if key in seen:
            continue
        seen.add(key)
        for name, kind in config.kinds.items():
            if not kind.templates and takes(kind, source, prompt):
                found[name].append(prompt)
                break
    return found, list(passages), left_out


def _texts(paths: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The column `source` of each row, and its texts: all prompts and answers, of which the first
    is a prompt."""
    for path in paths:
        for where, row in open_file(path).read():
            texts = user_turns(row)
            if not texts or "completion" in row:
                messages = check_conversation(row, where)["messages"]
                texts = [
                    each["content"] for each in messages if each["role"] in ("user", "assistant")
                ]
            texts = [text for text in texts if isinstance(text, str) and text]
            if texts:
                yield str(row.get("source", "")), texts


def takes(kind: KindConfig, source: str, text: str) -> bool:
    """Whether a prompt is of this kind: the first one of the mix that takes it has it."""
    return (not kind.sources or source in kind.sources) and re.search(kind.match, text) is not None


def fill(kind: KindConfig, passages: list[str], count: int, chance: random.Random) -> list[str]:
    """Make at most `count` different prompts; a passage meets each template once."""
    low, high = kind.words
    pairs = [
        (template, text) for text in _contexts(passages, low, high) for template in kind.templates
    ]
    chance.shuffle(pairs)
    prompts = (
        template.format(
            passage=text,
            topic=topic(text),
            **{name: chance.choice(each) for name, each in kind.values.items()},
        )
        for template, text in pairs
    )
    return list(dict.fromkeys(itertools.islice(prompts, count)))


def _contexts(passages: list[str], low: int, high: int) -> Iterator[str]:
    """Texts of `low` to `high` words: a passage, or several until there are enough words."""
    joined: list[str] = []
    for passage in passages:
        joined.append(passage)
        size = sum(len(part.split()) for part in joined)
        if size >= low:
            if size <= high:
                yield "\n\n".join(joined)
            joined = []


def topic(text: str) -> str:
    """A name in the text, or else its commonest long word."""
    names = re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}", text)
    return Counter(names or re.findall(r"[A-Za-z]{6,}", text) or ["this"]).most_common(1)[0][0]


def paragraphs(text: str) -> list[str]:
    """Passages of a text: paragraphs of `PASSAGE_WORDS` that end as a sentence does, without lists,
    sums and tasks."""
    fewest, most = PASSAGE_WORDS
    parts = [part.strip() for part in re.split(r"\n\s*\n", text)]
    prose = re.compile(r"(?!.*[{}`?=])(?!(.*\b\d+\b){4})[^-*\d].*[.!\"”]", re.DOTALL)
    return [part for part in parts if fewest <= len(part.split()) <= most and prose.fullmatch(part)]


def words(text: str) -> list[str]:
    """Words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def grams(text: str) -> set[str]:
    """The text's n-grams of `GRAM` words."""
    all_words = words(text)
    return {" ".join(all_words[i : i + GRAM]) for i in range(len(all_words) - GRAM + 1)}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    main()
