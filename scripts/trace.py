"""Record a generation as a page: `headstart trace --target MODEL --head HEAD --prompt "..."`.

The page is one file, without any network: the text with every token coloured by the depth at which
it was drafted, and the draft tree, the draws and the time of each round. With `--report`, a summary
of one or several prompts instead: what is rejected, how well the draft knows its chances, and which
depth pays.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.console import counted, log
from headstart.scripts.command_line import PromptFiles, SamplingOptions, options

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from headstart.addons.trace import Trace
    from headstart.inference import SpeculativeLM

NODES = 16
"""Size of the tree that is drafted if none is named."""
DEPTH = 5
"""Its depth, which the head may limit."""


@dataclass(frozen=True)
class TraceConfig(PromptFiles, SamplingOptions):
    """A generation, recorded round by round."""

    required = ("target",)
    most_used = ("target", "head", "prompt", "output", "max_new_tokens")
    texts = ("prompt",)

    prompt: str = ""
    """The user's message."""
    output: str = "trace.html"
    """HTML file to write: the page, or the report."""
    report: bool = False
    """Summarize: tables on the console, and with their plots in the file."""
    adaptive: bool = False
    """Draft in every round, so that there is something to see; true to draft only where that is
    faster, as the other commands do. Without it, the tree auto is a dynamic one of 16 nodes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head and not self.drafter:
            raise ValueError("a head or a drafter is required and neither was given")
        if bool(self.prompt) == bool(self.prompts):
            raise ValueError(
                "one of prompt and prompts is required: a message, or files of them for the report"
            )
        if self.prompts and not self.report:
            raise ValueError("prompts are for the report; give --report, or a single --prompt")


def main(arguments: list[str]) -> None:
    """Run `headstart trace` with these command-line arguments."""
    trace_prompts(options(TraceConfig, "trace", __doc__, arguments, first="prompt"))


def trace_prompts(config: TraceConfig) -> list[Trace]:
    """Record each prompt, with drafts and without; write the page or the report."""
    from headstart.addons.trace.report import trace_report
    from headstart.addons.trace.report_page import print_report, report_page
    from headstart.files import write_whole
    from headstart.scripts.measuring.comparison import load_with_prompts, read_prompt_files

    output = writable(config.output)
    files = {config.prompt[:40]: [[{"role": "user", "content": config.prompt}]]}
    if config.prompts:
        files = read_prompt_files(config.prompts, config.limit)
    lm, tokenizer, encoded = load_with_prompts(config, files)
    prompts = list(itertools.chain(*encoded.values()))
    traces = record(config, lm, tokenizer, prompts)
    if config.report:
        report = trace_report([traced.data for traced in traces])
        print_report(report)
        write_whole(output, report_page(report, config.head or config.drafter or ""))
    else:
        (single,) = traces
        single.save(output)
    log.info(f"{output}: {output.stat().st_size / 1e6:.2f} MB")
    return traces


def writable(path: str) -> Path:
    """Check the path of a file, whose folder must exist and be writable."""
    output = Path(path)
    if output.is_dir():
        raise ValueError(f"{path!r} is a folder; name a file in it")
    if not output.parent.is_dir():
        raise ValueError(f"no folder at {str(output.parent)!r} to write {output.name!r} to")
    if not os.access(output.parent, os.W_OK):
        raise ValueError(f"the folder {str(output.parent)!r} cannot be written to")
    return output


def record(
    config: TraceConfig,
    lm: SpeculativeLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Tensor],
) -> list[Trace]:
    """Record the answers to prompts [1, time], each beside plain decoding of the same prompt."""
    import torch

    from headstart.addons.trace import trace
    from headstart.inference import SpeculativeLM
    from headstart.scripts.measuring.comparison import answer_settings

    plain = SpeculativeLM(lm.target)
    settings = answer_settings(
        config.max_new_tokens, config.temperature, config.top_k, config.top_p
    )
    tree = tree_to_show(config, lm)
    # The first call of either is slow.
    log.info("warming up both sides")
    short = {**settings, "max_new_tokens": min(4, config.max_new_tokens)}
    plain.generate(prompts[0], **short)
    lm.generate(prompts[0], **tree, **short)

    def seeded() -> torch.Generator:
        """Both sides, and each prompt, begin with the same state."""
        return torch.Generator(lm.target.device).manual_seed(config.seed)

    traces = []
    for ids_1T in counted(prompts, "traces") if len(prompts) > 1 else prompts:
        without = plain.generate(ids_1T, generator=seeded(), **settings)
        output, traced = trace(
            lm, ids_1T, generator=seeded(), tokenizer=tokenizer, **tree, **settings
        )
        # An answer of one token is the prefill's: it has no round to measure.
        measured = None
        if without.stats.tokens:
            seconds = sum(without.stats.round_seconds)
            measured = {
                "ms_per_token": 1000 * seconds / without.stats.tokens,
                "tokens_per_second": without.stats.tokens / seconds,
                "same_text": torch.equal(without.sequences, output.sequences),
            }
        about = {"target": config.target, "head": config.head, "plain": measured}
        log.info(output.stats.summary())
        traces.append(dataclasses.replace(traced, data={**traced.data, **about}))
    return traces


def tree_to_show(config: TraceConfig, lm: SpeculativeLM) -> dict[str, Any]:
    """Return `generate`'s argument `tree`: a dynamic one if a head drafts and none is named."""
    from headstart.inference.drafters.tree_policies import model_states
    from headstart.inference.tuning.tree_search import default_dynamic_tree

    if config.tree != "auto" or not config.head or config.adaptive:
        return {}
    head = model_states(lm.drafter)[0].model
    log.info(
        f"{NODES} nodes in every round, to look at; --adaptive true shows headstart's own choice of"
        " trees"
    )
    return {"tree": default_dynamic_tree(min(head.max_depth, DEPTH), NODES)}
