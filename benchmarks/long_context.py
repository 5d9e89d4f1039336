"""EAGLE-3 after long texts: acceptance and draft time by the length of the context, with and
without a sliding window.

    python benchmarks/long_context.py --text docs/*.md benchmarks/*.md \\
        --output long_context.md --also 8k=runs/8k/best

Acceptance: greedy chains of the shipped head with SmolLM2, after prompts of up to its 8,192
positions. The windows are given to that head afterwards: they change what its layer sees, and no
weight. Draft time: the same head in our kernels, with random keys and values of up to 32,768
tokens, which its target could not read; observing four tokens and drafting a chain of seven, as a
round does.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import HEAD, TARGET, arguments, named_heads, replay_target, save
from torch import Tensor

from headstart.heads import DraftHead, build_head
from headstart.heads.base import TargetModules
from headstart.heads.checkpoints.save_load import load_head
from headstart.inference import TreeShape, load_tokenizer
from headstart.inference.drafters.base import DraftContext, PrefillChunk
from headstart.inference.drafters.draft_model_state import DraftModelState
from headstart.inference.engines.cpu_decoder import packed_head
from headstart.inference.targets.provenance import hardware
from headstart.inference.trees.sampling import RandomSampler
from headstart.inference.tuning.machine import turns
from headstart.train.evaluate import greedy_answers

CONTEXTS = (512, 1024, 2048, 4096, 8000)
"""Tokens of a prompt."""
TEXTS = (512, 2048, 8192, 32768)
"""Tokens before a timed round."""
WINDOWS = (None, 1024, 512)
ROUNDS = 30
COMMITTED = 4
"""Tokens that a timed round accepts."""


def main() -> None:
    """Write the tables of acceptance lengths and of draft times."""
    parser = arguments(__doc__, "long_context.md")
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--head", default=HEAD)
    parser.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="NAME=HEAD",
        help="heads whose acceptance is measured as they are",
    )
    parser.add_argument(
        "--text", nargs="+", default=[], help="files of English text, from which prompts are cut"
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each length")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--times-only", action="store_true", help="draft times alone: no text is read"
    )
    args = parser.parse_args()
    if not args.text and not args.times_only:
        parser.error("--text is needed, or --times-only")
    also = named_heads(parser, args.also)
    lines = [] if args.times_only else acceptance_lengths(args, also)
    save(args.output, [*lines, *draft_times(args)])


def with_window(head: DraftHead, window: int | None) -> DraftHead:
    """A head of the same weights that sees a window."""
    options = {**dataclasses.asdict(head.config), "sliding_window": window}
    other = build_head("eagle3", options, head.target)
    other.load_state_dict(head.state_dict())
    return other.to(next(head.parameters()).dtype).eval()


def name_of(window: int | None) -> str:
    """The title of a window's column."""
    return "all of the text" if window is None else f"window of {window}"


def acceptance_lengths(args: argparse.Namespace, also: dict[str, DraftHead]) -> list[str]:
    """Acceptance length of a chain by context and head: that of `--head` with each window, and
    others."""
    tokenizer = load_tokenizer(args.target)
    text = "\n\n".join(Path(path).read_text(encoding="utf-8") for path in args.text)
    tokens_T = tokenizer(text, return_tensors="pt").input_ids[0]
    contexts = {
        str(length): prompts_of(tokenizer, tokens_T, length, args.prompts) for length in CONTEXTS
    }
    target = replay_target(contexts, args.new_tokens, args.target)
    head = load_head(args.head)[0].to(target.dtype)
    chain = TreeShape.chain(head.max_depth)
    heads = {name_of(window): with_window(head, window) for window in WINDOWS}
    heads |= {name: other.to(target.dtype).eval() for name, other in also.items()}
    lines = [
        (
            f"{args.prompts} prompts of each length, {args.new_tokens} new tokens, greedy, chains"
            f" of {head.max_depth}."
        ),
        "",
        "| context | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    for length, prompts in contexts.items():
        rows = [prompt_1T[0] for prompt_1T in prompts]
        found = [
            greedy_answers(target, each, chain, rows, args.new_tokens).stats
            for each in heads.values()
        ]
        cells = " | ".join(f"{stats.acceptance_length:.2f}" for stats in found)
        lines.append(f"| {int(length):,} | {cells} |")
    return [*lines, ""]


def prompts_of(tokenizer: Any, tokens_T: Tensor, length: int, count: int) -> list[Tensor]:
    """Prompts [1, length]: a user shows a text, cut from another place for each, and asks for a
    summary."""
    content = "Summarize this text.\n\n{}"
    empty = tokenizer.apply_chat_template(
        [{"role": "user", "content": content.format("")}],
        add_generation_prompt=True,
        return_dict=False,
    )
    prompts = []
    for number in range(count):
        shown = length - len(empty)
        start = (len(tokens_T) - shown) * number // count
        words = tokenizer.decode(tokens_T[start : start + shown])
        chat = [{"role": "user", "content": content.format(words)}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False, return_tensors="pt"
        )
        prompts.append(ids[:, -length:])
    return prompts


def draft_times(args: argparse.Namespace) -> list[str]:
    """Milliseconds of a round's drafts by text and window, the windows in turns."""
    head = load_head(args.head)[0].float()
    embedding = torch.nn.Embedding(head.target.vocab_size, head.target.hidden_size)
    modules = TargetModules(embedding, torch.nn.Linear(1, 1), torch.nn.Identity(), ())
    lines = [
        (
            f"Hardware: {hardware()}; float32. Milliseconds of the drafts of a round, the median of"
            f" {ROUNDS}, on {torch.get_num_threads()} threads."
        ),
        "",
        "| text | " + " | ".join(map(name_of, WINDOWS)) + " |",
        "|---|" + "---|" * len(WINDOWS),
    ]
    for length in TEXTS:
        rounds = {
            window: Round(packed_head(with_window(head, window)), modules, length)
            for window in WINDOWS
        }
        seconds: dict[int | None, list[float]] = {window: [] for window in WINDOWS}
        for number in range(ROUNDS):
            for window in turns(list(WINDOWS), number):
                start = time.perf_counter()
                rounds[window].run()
                seconds[window].append(time.perf_counter() - start)
        cells = " | ".join(f"{1e3 * statistics.median(seconds[window]):.2f}" for window in WINDOWS)
        lines.append(f"| {length:,} | {cells} |")
    return lines


class Round:
    """The drafts of one round after a text of random states: observe what was accepted, draft a
    chain."""

    def __init__(self, head: DraftHead, modules: TargetModules, length: int) -> None:
        self.head = head
        self.model_state = DraftModelState(head, modules)
        self.model_state.make_room(head.max_depth, head.max_depth)
        self.features = len(head.feature_layers) * head.target.hidden_size
        with torch.inference_mode():
            capacity = length + (ROUNDS + 1) * COMMITTED
            self.model_state.begin(DraftContext(1, capacity, RandomSampler(), None))
            progress = self.model_state.progress
            for states in (*progress.state.cache.keys, *progress.state.cache.values):
                states.normal_()
            progress.state = dataclasses.replace(progress.state, lengths_B=torch.tensor([length]))
            progress.empty = False
            progress.longest = length

    def chunk(self, tokens: int) -> PrefillChunk:
        """Random tokens and features, as if so many tokens had been accepted."""
        tokens_1T = torch.randint(1000, (1, tokens + 1))
        features_1TF = torch.randn(1, tokens, self.features)
        return PrefillChunk(
            tokens_1T[:, :-1], tokens_1T[:, 1:], features_1TF, torch.tensor([tokens])
        )

    @torch.inference_mode()
    def run(self) -> None:
        """Observe `COMMITTED` tokens and draft a greedy chain of the head's depth."""
        self.model_state.prefill(self.chunk(COMMITTED))
        state = self.model_state.catch_up()
        tokens_11 = torch.zeros(1, 1, dtype=torch.int64)
        parents_11 = torch.full((1, 1), -1)
        for _ in range(self.head.max_depth):
            logits_11V, state = self.model_state.expand(state, tokens_11, parents_11)
            tokens_11 = self.head.target_tokens(logits_11V.argmax(-1))
            parents_11 = torch.zeros(1, 1, dtype=torch.int64)


if __name__ == "__main__":
    main()
