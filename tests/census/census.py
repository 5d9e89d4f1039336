"""The census: every type of language model of the installed transformers, tiny and random, as a
target.

    make census                                              # all types in about ten minutes,
                                                             # and docs/models.md
    .venv/bin/python tests/census/census.py qwen3 lfm2       # some types: their records,
                                                             # and nothing is written

Each type decodes with prompt lookup, with trees and chains that hold the true text but for a share
of wrong tokens, and with an EAGLE-3 head that a few steps of training have taught the model's own
answers; a row alone, and two rows in a padded batch. Each row must be what `model.generate` writes
for it alone. A type is

    trees       identical in trees and chains
    chains      identical in chains; trees are cut to chains, or refused where they are named
    refused     by a ValueError of ours before the first token
    wrong       another token, where the two best logits are further apart than rounding
    error       any other exception
    not built   transformers builds no small model of it here, or its own `generate` fails

A census that was stopped goes on where it stopped, unless the code or a version has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"  # read when torch is imported; the processes share the cores
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HEADSTART_CACHE"] = tempfile.mkdtemp(prefix="headstart-census-")
    sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_models
import torch
import transformers
from helpers import PromptOracle, padded_batch, written_alone
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from headstart.heads import DraftHead, build_head
from headstart.heads.objective import Objective
from headstart.inference import SpeculativeLM, Target, TreeShape
from headstart.train.data.batches import collate
from headstart.train.data.chat_template import Example
from headstart.train.features.online import online_features

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests/census/results.json"
PROGRESS = ROOT / "build/census.jsonl"
"""Records so far, after a line that says by which code and versions they were made."""
SECONDS = 240
"""Longest time for one type."""
MEMORY = 16 << 30
"""Address space of a process in bytes."""

GREEDY = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
VARIED = {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
"""By which a random model does not repeat itself."""
SCALES = [(3.0, False), (2.0, False), (5.0, False), (3.0, True), (1.0, True), (6.0, True)]
"""Factors on the weights, and whether the LM head is untied, until the model says something."""
TREE = TreeShape.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 0, 0, 0]])
CHAIN = TreeShape.chain(4)
TEACHING_STEPS = 9
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Distance of the two best logits, relative to the largest, below which another token is
rounding."""


@dataclass
class Record:
    """What the census found for one type."""

    name: str
    kind: str
    """The class of the model."""
    outcome: str
    reason: str = ""
    """Of a refusal, an error or a difference."""
    heads: str = ""
    """"trains", or why an EAGLE-3 head cannot be taught."""
    folder: str = ""
    """"loads", or why `Target.from_pretrained` does not take a folder with this model."""
    accepted: dict[str, float] = field(default_factory=dict)
    """Acceptance lengths, by drafter."""


class Difference(Exception):
    """Another token than `generate` wrote."""


@dataclass(frozen=True)
class Text:
    """Prompts that are decoded together, and what the model writes after each of them alone."""

    prompts: list[Tensor]
    truths: list[list[int]]


def random_prompts() -> tuple[list[Tensor], list[Tensor]]:
    """One prompt that repeats itself, for lookup, and two of different lengths for a padded
    batch."""
    random = torch.Generator().manual_seed(7)

    def draw(length: int) -> Tensor:
        return torch.randint(10, 100, (length,), generator=random)

    piece = draw(5)
    repeated = torch.cat([piece, draw(2), piece, piece, piece[:3]])
    return [repeated], [draw(13), draw(6)]


def written_by(model: PreTrainedModel, prompts: list[Tensor], settings: dict[str, Any]) -> Text:
    """What the model's own `generate` writes after each prompt alone."""
    return Text(prompts, [written_alone(model, prompt, **settings) for prompt in prompts])


def lively_model(name: str) -> tuple[PreTrainedModel, list[Text], list[Text]]:
    """A model that says something, and its texts without and with penalties; alone, then those of
    the batch."""
    alone, together = random_prompts()
    best: tuple[Any, ...] | None = None
    for scale, untied in SCALES:
        model = tiny_models.tiny_model(name, scale, untied)
        texts = [written_by(model, prompts, GREEDY) for prompts in (alone, together)]
        truths = [truth for text in texts for truth in text.truths]
        distinct = len(set(map(tuple, truths)))
        talking = sum(len(set(truth)) > 2 for truth in truths)
        if best is None or (distinct, talking) > best[0]:
            best = ((distinct, talking), model, texts)
        if (distinct, talking) == (3, 3):
            break
    assert best is not None
    _, model, texts = best
    return model, texts, [written_by(model, prompts, VARIED) for prompts in (alone, together)]


def decode(lm: SpeculativeLM, text: Text, settings: dict[str, Any]) -> float:
    """The acceptance length with which `lm` writes the truths; a `Difference` if it writes
    others."""
    padded, mask = padded_batch(text.prompts)
    output = lm.generate(padded, attention_mask=mask, **settings)
    width = padded.shape[1]
    for row, (prompt, truth) in enumerate(zip(text.prompts, text.truths, strict=True)):
        found = output.sequences[row, width:].tolist()
        if found != truth:
            _check_rounding(
                lm.target.model, prompt, found, truth, f"row {row} of {len(text.truths)}"
            )
    return output.stats.acceptance_length


def _check_rounding(
    model: PreTrainedModel, prompt: Tensor, found: list[int], truth: list[int], where: str
) -> None:
    """Raise a `Difference`, unless the two tokens have the same logits but for rounding."""
    at = next(
        (i for i, pair in enumerate(zip(found, truth)) if pair[0] != pair[1]),
        min(len(found), len(truth)),
    )
    said = f"{where}, token {at}: {found[at : at + 3]} where generate writes {truth[at : at + 3]}"
    if at >= min(len(found), len(truth)):
        raise Difference(said)
    with torch.no_grad():
        logits_V = model(
            input_ids=torch.cat([prompt, torch.tensor(truth[:at]).long()])[None]
        ).logits[0, -1]
    apart = (logits_V[found[at]] - logits_V[truth[at]]).abs() / logits_V.abs().max()
    if apart > ROUNDING[logits_V.dtype]:
        raise Difference(said)


def taught_head(target: Target, texts: list[Text]) -> DraftHead:
    """An EAGLE-3 head that knows a part of the model's own answers.

    Raises:
        ValueError: training refuses the target, or its logits are not what the model computes.
        Difference: the loss does not fall.
    """
    target.check_features()  # as training does
    layers = target.info.num_layers
    chosen = [0, 1, -1] if layers > 2 else [0, -1] if layers > 1 else [-1]
    torch.manual_seed(0)
    head = build_head("eagle3", {"depth": 4, "feature_layers": chosen}, target.info).to(
        target.dtype
    )
    head.initialize(target.modules, torch.arange(target.info.vocab_size) + 1)
    examples = []
    for text in texts:
        for prompt, truth in zip(text.prompts, text.truths, strict=True):
            tokens = [*prompt.tolist(), *truth]
            examples.append(
                Example(tokens, [place >= len(prompt) - 1 for place in range(len(tokens))])
            )
    features = online_features(target, head, collate(examples), target.dtype)
    weights = [weight for weight in head.train().parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    # not by distributions, which a random model may leave almost uniform
    by_tokens = Objective({"ce": 1.0})
    losses = []
    for _ in range(TEACHING_STEPS):
        loss = head(features, by_tokens).loss
        losses.append(float(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if not losses[-1] < 0.9 * losses[0]:
        raise Difference(
            f"the loss of an EAGLE-3 head goes from {losses[0]:.3g} to {losses[-1]:.3g}"
        )
    return head.requires_grad_(False).eval()


def logits_differ(target: Target, prompt: Tensor) -> bool:
    """Whether heads would learn from other logits than the model's own."""
    _, last_1TD = target.read(prompt[None], (-1,))
    with torch.no_grad():
        expected_1TV = target.model(input_ids=prompt[None]).logits
    found_1TV = target.modules.logits(last_1TD).to(expected_1TV.dtype)
    return not torch.allclose(found_1TV, expected_1TV, rtol=1e-4, atol=1e-4)


def is_refusal(error: Exception) -> bool:
    """Whether an exception is a sentence of ours: a ValueError that headstart itself raised."""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    module = frame.f_globals["__name__"]  # installed as a wheel, headstart lies in another folder
    return isinstance(error, ValueError) and module.startswith("headstart.")


def in_words(error: Exception) -> str:
    """An exception in a line: a refusal's or difference's own words, else where it was raised
    too."""
    words = " ".join(str(error).split())
    if isinstance(error, Difference) or is_refusal(error):
        return words
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {words[:200]} ({Path(last.filename).name}:{last.lineno})"


def outcome_of(error: Exception) -> str:
    """The outcome that an exception means."""
    if isinstance(error, Difference):
        return "wrong"
    return "refused" if is_refusal(error) else "error"


def census(name: str) -> Record:
    """The record of a type or variant."""
    kind = {**tiny_models.causal_types(), **tiny_models.multimodal_types()}[name.split("@")[0]]
    record = Record(name, kind, "")
    try:
        model, plain, varied = lively_model(name)
    except Exception as error:
        record.outcome, record.reason = "not built", in_words(error)
        return record
    try:
        target = Target.from_pretrained(model)
        record.accepted["lookup"] = _lookup(target, plain)
    except Exception as error:
        record.outcome, record.reason = outcome_of(error), in_words(error)
        return record
    chains_only = target.engine.chains_only
    try:
        if not chains_only:
            record.accepted["tree"] = _true_text(target, TREE, varied)
        record.accepted["chain"] = _true_text(target, CHAIN, varied)
        record.outcome = "chains" if chains_only else "trees"
    except Exception as error:
        record.outcome, record.reason = outcome_of(error), in_words(error)
    if record.outcome in ("trees", "chains"):
        _with_a_head(record, target, plain)
        record.folder = _from_a_folder(target, plain[0].prompts[0])
    return record


def _lookup(target: Target, texts: list[Text]) -> float:
    lm = SpeculativeLM.from_pretrained(target, drafter="prompt-lookup", adaptive=False)
    return max([decode(lm, text, GREEDY) for text in texts])


def _true_text(target: Target, shape: TreeShape, texts: list[Text]) -> float:
    """With trees that hold the true text but for a tenth of their tokens."""
    vocabulary = target.info.vocab_size
    lengths = []
    for text in texts:
        by_prompt = {
            tuple(row.tolist()): truth for row, truth in zip(text.prompts, text.truths, strict=True)
        }
        lm = SpeculativeLM(target, PromptOracle(shape, by_prompt, vocabulary, 0.1))
        lengths.append(decode(lm, text, VARIED))
    return max(lengths)


def _with_a_head(record: Record, target: Target, texts: list[Text]) -> None:
    """Teach a head and decode with it; a difference in decoding is the type's outcome."""
    try:
        head = taught_head(target, texts)
    except Exception as error:
        record.heads = in_words(error)
        if outcome_of(error) == "error":
            record.outcome, record.reason = "error", in_words(error)
        return
    record.heads = "trains"
    if logits_differ(target, texts[0].prompts[0]):
        record.outcome = "wrong"
        record.reason = "heads learn from other logits than the model's own"
        return
    trees = ["dynamic:8:3:3", "chain:3"] if record.outcome == "trees" else ["chain:3"]
    try:
        for tree in trees:
            lm = SpeculativeLM.from_pretrained(target, head, tree=tree, adaptive=False)
            lengths = [decode(lm, text, GREEDY) for text in texts]
            record.accepted[f"eagle3 {tree.split(':')[0]}"] = max(lengths)
    except Exception as error:
        record.outcome, record.reason = outcome_of(error), in_words(error)


def _from_a_folder(target: Target, prompt: Tensor) -> str:
    """Whether a folder with the model loads and gives the same logits."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        try:
            target.model.save_pretrained(folder)
        except Exception as error:
            return f"transformers does not save it: {in_words(error)}"
        try:
            loaded = Target.from_pretrained(folder, dtype=target.dtype)
            if hasattr(loaded.model, "set_experts_implementation"):
                loaded.model.set_experts_implementation("eager")
            found, expected = (one.model(input_ids=prompt[None]).logits for one in (loaded, target))
        except Exception as error:
            return in_words(error).replace(folder, "FOLDER")
        return (
            "loads"
            if torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
            else "loads with other logits"
        )


# All types, in processes of their own.


def made_by() -> dict[str, str]:
    """Versions, and a hash of the code by which records are made."""
    digest = hashlib.sha256()
    for part in ("heads", "inference", "train", "tests/census"):
        for path in sorted((ROOT / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "code": digest.hexdigest()[:16],
    }


def _in_a_process(name: str, results: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        record = census(name)
    record.accepted = {drafter: round(length, 2) for drafter, length in record.accepted.items()}
    results.send(asdict(record))


def run(names: list[str], processes: int) -> Iterator[dict[str, Any]]:
    """The records of these types as they are made, each in a process with a time limit."""
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once
    waiting = list(names)
    running: dict[str, tuple[Any, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop(0)
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_in_a_process, args=(name, sending))
            process.start()
            sending.close()
            running[name] = (process, receiving, time.monotonic())
        multiprocessing.connection.wait(
            [receiving for _, receiving, _ in running.values()], timeout=1.0
        )
        for name, (process, receiving, began) in list(running.items()):
            overdue = time.monotonic() - began > SECONDS
            if not receiving.poll() and process.is_alive() and not overdue:
                continue
            try:
                record = receiving.recv() if receiving.poll() else None
            except EOFError:
                record = None
            if record is None:
                process.kill()
                reason = (
                    f"no result in {SECONDS} seconds"
                    if overdue
                    else f"the process ended with {process.exitcode}"
                )
                record = asdict(Record(name, "", "error", reason))
            process.join()
            del running[name]
            yield record


def records_so_far(code: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Records of an interrupted census by the same code and versions, by name."""
    if not PROGRESS.exists():
        return {}
    first, *lines = PROGRESS.read_text(encoding="utf-8").splitlines() or [""]
    if first != json.dumps(code):
        return {}
    return {record["name"]: record for record in map(json.loads, lines)}


def told(record: dict[str, Any]) -> str:
    """A record in one line."""
    accepted = " ".join(f"{drafter} {length}" for drafter, length in record["accepted"].items())
    more = [record["reason"]]
    more += [
        record[part] for part in ("heads", "folder") if record[part] not in ("", "trains", "loads")
    ]
    remarks = " | ".join(filter(None, more))
    return f"{record['name']:32} {record['outcome']:10} {accepted} {remarks}".rstrip()


def main() -> None:
    """Run the census, or some types of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="types or variants; all if none is given")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(1)
    if options.types:
        for record in run(options.types, options.processes):
            print(told(record), flush=True)
        return

    code = made_by()
    names = tiny_models.every_name()
    records = records_so_far(code)
    PROGRESS.parent.mkdir(exist_ok=True)
    if not records:
        PROGRESS.write_text(json.dumps(code) + "\n", encoding="utf-8")
    missing = [name for name in names if name not in records]
    began = time.monotonic()
    with PROGRESS.open("a", encoding="utf-8") as progress:
        for done, record in enumerate(run(missing, options.processes), start=1):
            records[record["name"]] = record
            progress.write(json.dumps(record) + "\n")
            progress.flush()
            left = (time.monotonic() - began) / done * (len(missing) - done)
            print(
                f"{len(records):3}/{len(names)}, {left / 60:4.1f} min left  {told(record)}",
                flush=True,
            )
    save(code, [records[name] for name in names])
    print(dict(Counter(record["outcome"] for record in records.values())))
    print(f"{(time.monotonic() - began) / 60:.1f} minutes for {len(missing)} types")


def save(code: dict[str, str], records: list[dict[str, Any]]) -> None:
    """Write the results, one type a line, and the page made of them."""
    import models_page

    lines = ",\n".join(json.dumps(record) for record in records)
    RESULTS.write_text(
        f'{{"made_by": {json.dumps(code)},\n"records": [\n{lines}\n]}}\n', encoding="utf-8"
    )
    models_page.write()


if __name__ == "__main__":
    main()
