"""Draft, verify, commit: speculative decoding inside one model.

    tree    = a drafter's guesses of what follows the newest token
    output  = one forward of the target over all nodes of the tree
    verdict = the longest path that the acceptance rule lets stand, and one token more from the target

Settings, logits processors and stopping rules are resolved by `model.generate` itself: it calls this loop through its
`custom_generate` hook, so they mean here what they mean there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..heads import DraftHead
from ..heads.checkpoint import HeadFacts, adapter_of, differences, load_head
from .grow import RootOnly, drafter_of
from .planning import default_tree
from .rounds import Drafter, Prefill, Round, Verdict
from .sampling import Draw, RandomDraw, check_processors, process
from .stats import RoundRecord, Stats
from .target import Target, refuse_loading_options
from .tree import TreePolicy, tree_policy
from .verify import Verifier, choose_rule, greedy

SETTINGS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) | {
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
}
"""What `SpeculativeLM.generate` hands on to `model.generate`, which says what each means."""
NOT_RETURNED = (
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)
"""Settings that ask for an output which the loop does not keep."""


class Streamer(Protocol):
    """What transformers' streamers offer."""

    def put(self, value: Tensor) -> None:
        """Take new tokens."""

    def end(self) -> None:
        """There are no more."""


@dataclass(frozen=True)
class GenerateOutput:
    """What `SpeculativeLM.generate` returns."""

    sequences: Tensor
    """The prompts as given and what was written after them, padded on the right."""
    stats: Stats


class SpeculativeLM:
    """A target model and a drafter: `generate` writes what the target alone would write, sooner."""

    def __init__(
        self, target: Target, drafter: Drafter | None = None, verifier: str = "auto", lossy: bool = False
    ) -> None:
        """Put the parts together; `from_pretrained` loads them.

        Args:
            target: the frozen model.
            drafter: what guesses; None for plain decoding by the same engine.
            verifier: "greedy", "exact", or "auto" for whichever fits each call.

        Raises:
            ValueError: an unknown verifier, or feature layers that the target does not have.
        """
        self.target = target
        self.drafter: Drafter = drafter or RootOnly()
        self.sampling_rule = choose_rule(verifier, self.drafter.origin, lossy)
        self.origin: dict[str, Any] = {}
        """What the head was trained against, as its checkpoint remembers it."""
        target.check_layers(self.drafter.feature_layers)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel | Target,
        head: str | Path | DraftHead | None = None,
        dtype: torch.dtype | str = "auto",
        tree: str | Sequence[Sequence[int]] | TreePolicy = "auto",
        verifier: str = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        head_revision: str | None = None,
    ) -> SpeculativeLM:
        """Load a target and a head for it.

        Args:
            target: see `Target.from_pretrained`; or one that is loaded already.
            head: a checkpoint folder, a Hub id, or a head; None for plain decoding.
            dtype: of target and head, where they are loaded here.
            tree: "auto" for the tree saved with the head (or a default one), or what `tree_policy` takes.
            verifier: see `__init__`.
            device: of target and head.
            revision: of the target's Hub id.
            head_revision: of the head's Hub id.

        Raises:
            ValueError: something that cannot be loaded, or a head or tree that does not fit; named.
        """
        loaded_here = isinstance(target, str | Path)
        if isinstance(target, Target):
            refuse_loading_options(dtype, device, revision)
        else:
            target = Target.from_pretrained(target, dtype, device, revision)
        if head is None:
            return cls(target, None, verifier)
        facts = HeadFacts()
        if not isinstance(head, DraftHead):
            folder = head
            head, facts = load_head(folder, target.info, target.dtype, head_revision)
            for difference in differences(facts.origin, target.origin):
                warnings.warn(f"the head {str(folder)!r} may accept less here: {difference}", stacklevel=2)
            if facts.adapted:
                _adapt(target, adapter_of(folder, head_revision), loaded_here)
        else:
            head.target.check(target.info)
            dtypes = {parameter.dtype for parameter in head.parameters()} - {target.dtype}
            if dtypes:
                raise ValueError(
                    f"the head's parameters are {dtypes.pop()}, the target's {target.dtype}; convert the head"
                )
        if tree != "auto":
            policy = tree_policy(tree)
        elif facts.tree is not None:
            policy = tree_policy(facts.tree)
        else:
            policy = default_tree(head.max_depth, head.draft_vocab_size)
        lm = cls(target, drafter_of(head.to(target.device).eval(), policy, target.ends), verifier)
        lm.origin = facts.origin
        return lm

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        generator: torch.Generator | None = None,
        streamer: Streamer | None = None,
        **settings: Any,
    ) -> GenerateOutput:
        """Write on, for each row of a batch.

        Args:
            input_ids: prompts, [batch, time]; padded left or right.
            attention_mask: 1 where a token is no padding; None to let transformers infer it from the padding token.
            generation_config: as for `model.generate`.
            generator: of the random draws; None for torch's global one.
            streamer: gets the tokens of every round as they are accepted; batch size 1 only.
            settings: max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id ... as for `model.generate`.

        Raises:
            ValueError: an empty or too long prompt, or a setting that is not supported; named.
        """
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(f"input_ids must be [batch, time] with at least one token, not {list(input_ids.shape)}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}"
            )
        unknown = sorted(set(settings) - SETTINGS)
        if unknown:
            raise ValueError(
                f"generate option {unknown[0]!r} is not supported; choose from {', '.join(sorted(SETTINGS))}"
            )
        if settings.get("max_new_tokens") == 0:
            if streamer is not None:
                streamer.end()
            return GenerateOutput(input_ids, Stats(rows=[[] for _ in input_ids]))
        draw = RandomDraw(generator)

        def decode(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **inputs: Any,
        ) -> GenerateOutput:
            # transformers passes parameters named here twice, hence the mask among the rest
            mask = inputs["attention_mask"]
            return self._decode(input_ids, mask, logits_processor, stopping_criteria, generation_config, draw, streamer)

        output = self.target.model.generate(
            input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            streamer=streamer,
            custom_generate=decode,
            **settings,
        )
        assert isinstance(output, GenerateOutput)
        return output

    def _decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        draw: Draw,
        streamer: Streamer | None,
    ) -> GenerateOutput:
        """Check what `model.generate` prepared, run the loop, and put the rows together again."""
        if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            mode = config.get_generation_mode().value.replace("_", " ")
            raise ValueError(f"{mode} is not supported; choose from greedy search, sampling")
        asked = [name for name in NOT_RETURNED if getattr(config, name, None)]
        if asked:
            raise ValueError(f"{asked[0]} is not supported; the output holds sequences and stats")
        check_processors(processors)
        verify = self.sampling_rule if config.do_sample else greedy
        eos = _eos_tokens(criteria)
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"a streamer takes one row, not a batch of {len(input_ids)}")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [row[keep.bool()] for row, keep in zip(input_ids, mask, strict=True)]
        longest, new_tokens = max(map(len, prompts)), config.max_length - input_ids.shape[1]
        if min(map(len, prompts)) == 0:
            raise ValueError(f"prompt {[len(row) for row in prompts].index(0)} of the batch is all padding")
        if longest + new_tokens > self.target.max_positions:
            raise ValueError(
                f"a prompt of {longest} tokens and {new_tokens} new ones do not fit the {self.target.max_positions} "
                f"positions of {self.target.name!r}"
            )
        rows, stats = speculate(self.target, self.drafter, verify, prompts, processors, draw, new_tokens, eos, streamer)
        if streamer is not None:
            streamer.end()
        padding = config.pad_token_id if config.pad_token_id is not None else next(iter(eos), 0)
        written = input_ids.new_full((len(rows), max(map(len, rows))), padding)
        for target_row, row in zip(written, rows, strict=True):
            target_row[: len(row)] = torch.tensor(row, dtype=written.dtype)
        return GenerateOutput(torch.cat([input_ids, written], dim=1), stats)


def _adapt(target: Target, adapter: Path, loaded_here: bool) -> None:
    """Give the target the adapter that the head was trained with; a model of the user's is never changed."""
    if target.adapter == str(adapter.resolve()):
        return
    if not loaded_here:
        raise ValueError(
            f"the head drafts for the target with the adapter {str(adapter)!r}; call target.merge_adapter with it, or "
            "give the target by name"
        )
    target.merge_adapter(adapter)


@torch.inference_mode()
def speculate(
    target: Target,
    drafter: Drafter,
    verify: Verifier,
    prompts: list[Tensor],
    processors: LogitsProcessorList,
    draw: Draw,
    new_tokens: int,
    eos: frozenset[int],
    streamer: Streamer | None = None,
) -> tuple[list[list[int]], Stats]:
    """The loop: draft, verify, commit, until every row has ended.

    Returns:
        What was written for each prompt, and the statistics.
    """
    stats = Stats(rows=[[] for _ in prompts])
    out = _Written([len(prompt) for prompt in prompts], new_tokens, eos, target.device, streamer)
    cache, layers = target.new_cache(len(prompts)), drafter.feature_layers
    with stats.clock("prefill"):
        tokens_BT = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(target.device)
        lengths_B = torch.tensor(out.lengths, device=target.device)
        logits_BV, features_BTF = target.prefill(tokens_BT, lengths_B, out.longest, cache, layers)
        root_only = RootOnly().propose(tokens_BT[:, 0])
        roots_B = verify(root_only, process(logits_BV[:, None], processors), draw).next_tokens_B
        capacity = out.longest + new_tokens + drafter.max_nodes
        drafter.begin(Prefill(tokens_BT, lengths_B, logits_BV, features_BTF, capacity), roots_B)
        out.first(roots_B)
    while not out.finished:
        with stats.clock("draft"):
            tree = drafter.propose(roots_B)
        with stats.clock("target"):
            output = target.forward_tree(tree, out.longest, cache, layers)
        with stats.clock("verify"):
            scores_BNV = process(output.logits_BNV, processors)
            verdict = out.freeze(verify(tree, scores_BNV, draw))
            finished = Round(tree, output, verdict)
            out.add(finished, stats)
        with stats.clock("rest"):
            cache.keep(verdict.path_BA, verdict.lengths_B)
        with stats.clock("draft"):
            drafter.observe(finished)
            roots_B = verdict.next_tokens_B
        stats.max_depth = max(stats.max_depth, tree.max_depth)
    return out.rows, stats


class _Written:
    """The host's side of the loop: what each row has written, when it ends, and who is told."""

    def __init__(
        self,
        lengths: list[int],
        new_tokens: int,
        eos: frozenset[int],
        device: torch.device,
        streamer: Streamer | None,
    ) -> None:
        self.lengths = lengths
        """Committed tokens of each row, as in the cache."""
        self.rows: list[list[int]] = [[] for _ in lengths]
        self.new_tokens = new_tokens
        self.eos = eos
        self.streamer = streamer
        self._active = [True] * len(lengths)
        self._active_B = torch.ones(len(lengths), dtype=torch.bool, device=device)

    @property
    def longest(self) -> int:
        """Length of the longest row in the cache."""
        return max(self.lengths)

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return not any(self._active)

    def freeze(self, verdict: Verdict) -> Verdict:
        """Let rows that have ended commit nothing."""
        return Verdict(verdict.path_BA, verdict.lengths_B * self._active_B, verdict.next_tokens_B)

    def first(self, roots_B: Tensor) -> None:
        """Take the tokens that follow the prompts."""
        self._append([[token] for token in roots_B.tolist()])  # sync: the first tokens, once a call

    def add(self, finished: Round, stats: Stats) -> None:
        """Take what a round emitted."""
        lengths_B = finished.verdict.lengths_B
        # sync: the only one of a round; the host must know what to return and when to stop
        lengths, *columns = torch.cat([lengths_B[None], finished.emitted_BA.T]).tolist()
        emitted = [list(row)[:length] for row, length in zip(zip(*columns, strict=True), lengths, strict=True)]
        self.lengths = [before + length for before, length in zip(self.lengths, lengths, strict=True)]
        returned = self._append(emitted)
        for row, length, count in zip(stats.rows, lengths, returned, strict=True):
            if length:
                row.append(RoundRecord(accepted=length - 1, returned=count))

    def _append(self, emitted: list[list[int]]) -> list[int]:
        """Cut at the end token and at the length limit; return how many tokens of each row were taken."""
        counts = []
        for i, (row, tokens) in enumerate(zip(self.rows, emitted, strict=True)):
            stop = next((place + 1 for place, token in enumerate(tokens) if token in self.eos), len(tokens))
            taken = tokens[: min(stop, self.new_tokens - len(row))]
            row.extend(taken)
            counts.append(len(taken))
            if taken and (taken[-1] in self.eos or len(row) == self.new_tokens):
                self._active[i] = False
                self._active_B[i] = False
        if self.streamer is not None:
            self.streamer.put(torch.tensor(emitted[0][: counts[0]]))
        return counts


def _eos_tokens(criteria: StoppingCriteriaList) -> frozenset[int]:
    """The end tokens among the stopping criteria; any rule that is not yet supported is refused by name."""
    tokens: set[int] = set()
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            tokens.update(criterion.eos_token_id.tolist())
        elif not isinstance(criterion, MaxLengthCriteria):
            raise ValueError(
                f"{type(criterion).__name__} is not supported; choose from EosTokenCriteria, MaxLengthCriteria"
            )
    return frozenset(tokens)
