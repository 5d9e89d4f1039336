"""Speculative decoding for users: `SpeculativeLM.generate`, or plain `model.generate(custom_generate=...)`.

`model.generate` itself resolves settings, logits processors and stopping criteria and calls our loop through its
`custom_generate` hook, so they keep their meaning. Rows are decoded without their padding, so that each gets the tokens
that `generate` returns for it alone.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..heads.base import DraftHead
from .cache.kv_cache import free_memory
from .drafters.adaptive import AdaptiveDrafter
from .drafters.base import BatchDrafter, Drafter, NoDraft
from .drafters.by_name import DrafterSource, assistants, make_drafter, needs_costs
from .drafters.costs import measured_costs
from .drafters.draft_model import within
from .drafters.tree_policies import draft_models
from .drafters.validated import validated
from .engines.encoder_decoder import Seq2SeqTarget, is_encoder_decoder
from .engines.target import Target
from .head_loading import load_fitting_head, merge_adapter_of
from .inputs import (
    Prompts,
    Stopping,
    check_conversation,
    check_ids,
    check_prepared,
    check_settings,
    inputs_of_prompt,
    padding_token,
    prompts_of,
    warn_of_equal_answers,
    with_tokenizer,
    without_padding,
)
from .output import GenerateDictOutput, GenerateOutput, collected
from .rounds.decoding import Decoding
from .rounds.loop import speculate
from .rounds.observers import RoundObserver
from .rounds.sequences import Conversation, Sequences
from .rounds.verification import Verification, verification_by
from .targets.as_loaded import as_loaded, as_loaded_together, warn_of_autocast
from .targets.loading import check_model_options, refuse_loading_options
from .targets.prompt_inputs import is_prompt_input
from .text.chat import Chat
from .text.streaming import streamed
from .trees.logits import TreeLogitsProcessor
from .trees.sampling import RandomSampler, Sampler
from .trees.stats import Stats
from .trees.tree_spec import TreeSpec
from .trees.verify import choose_rule, greedy, is_lossy, top_down_rule
from .tuning.machine import check_threads
from .tuning.round_costs import RoundCosts


@dataclass(frozen=True)
class Call:
    """One call of `generate`, besides the prompts and the settings that transformers resolves."""

    sampler: Sampler
    streamer: BaseStreamer | None = None
    max_batch_size: int | None = None
    past: Conversation | None = None
    as_transformers: bool = False
    """Whether to return what transformers' own decoding methods do: the sequences, or a `GenerateDictOutput` if
    `return_dict_in_generate` asks for it."""


@dataclass(frozen=True, eq=False)
class LoadedHead:
    """A head, and how drafters are made of it."""

    head: DraftHead
    tree: TreeSpec
    make: Callable[..., BatchDrafter]
    """`make_drafter` for the target, what drafts beside the head, and the fallback."""
    compiled: bool
    """Whether it runs in the target's engine."""

    def drafter_with(self, target: Target) -> Callable[[TreeSpec], BatchDrafter]:
        """Makes drafters by tree."""
        head = target.engine.draft_head(self.head) if self.compiled else self.head
        return partial(self.make, head=head)


class SpeculativeLM:
    """A target model and a drafter: `generate` returns the target's own tokens, faster.

    Threads may share it; their generations run one after the other.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, acceptance: str = "auto", lossy: bool = False
    ) -> None:
        """Put the parts together; `from_pretrained` loads them.

        Args:
            target: the frozen model.
            drafter: proposes draft trees; None for autoregressive decoding by the same engine.
            acceptance: the acceptance rule for sampling, one of `RULES`, or "auto" for the exact one that accepts
                most. Greedy decoding has one rule.
            lossy: allow a rule ("typical") that changes the output distribution.

        Raises:
            ValueError: an unknown acceptance rule, or one that does not fit the drafter's trees; feature layers that
                the target does not have.
        """
        self.target = target
        self.acceptance = acceptance
        self.lossy = lossy
        self.provenance: dict[str, Any] = {}
        """The target that the head was trained against, from the head's checkpoint."""
        self.observers: list[RoundObserver] = []
        """What watches every generation, see `RoundObserver`."""
        self.greedy_rule = Verification(greedy)
        self._drafter: BatchDrafter | None = NoDraft()
        if drafter is not None:
            self._drafter = validated(drafter, target.info.vocab_size)
        """None until the cost of rounds is measured, which decides what is drafted."""
        self._drafter_with: Callable[[TreeSpec], BatchDrafter] | None = None
        """Makes a drafter of the same head or source with another tree."""
        self._loaded: LoadedHead | None = None
        """The head that `from_pretrained` loaded, or the one that took its place."""
        self._variants: dict[str, SpeculativeLM] = {}
        """By tree and acceptance rule: this model with those of single calls."""
        self.sampling_rule = Verification(choose_rule(acceptance, self.drafter.kind, lossy))
        target.check_layers(self.drafter.feature_layers)

    def __repr__(self) -> str:
        drafter = "a drafter chosen at first use" if self._drafter is None else repr(self._drafter)
        return f"SpeculativeLM({self.target!r}, {drafter}, acceptance={self.acceptance!r})"

    @property
    def drafter(self) -> BatchDrafter:
        """Proposes draft trees. Made at first use, or by `compile`, if the cost of rounds must be measured for it."""
        if self._drafter is None:
            with self.target.lock, as_loaded(self.target.model):
                if self._drafter is None:  # no other thread has made it meanwhile
                    assert self._drafter_with is not None
                    self._drafter = self._drafter_with("auto")
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: BatchDrafter) -> None:
        self._drafter = drafter

    @property
    def head(self) -> DraftHead | None:
        """The head that drafts, which `use_head` replaces; None if there is none."""
        return None if self._loaded is None else self._loaded.head

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel | Target,
        head: str | Path | DraftHead | None = None,
        dtype: torch.dtype | str = "fastest",
        tree: TreeSpec = "auto",
        acceptance: str = "auto",
        device_map: str | int | torch.device | dict[str, Any] | None = None,
        revision: str | None = None,
        head_revision: str | None = None,
        lossy: bool = False,
        compile: bool = True,
        drafter: DrafterSource | None = None,
        fallback: bool = True,
        allow_adapter: bool = False,
        **model_kwargs: Any,
    ) -> SpeculativeLM:
        """Load a target and a drafter for it.

        Args:
            target: a source for `Target.from_pretrained`, or a loaded target.
            head: a checkpoint folder, a Hub id, or a head; None for a drafter without a head, or for autoregressive
                decoding.
            dtype: dtype of target and head if they are loaded here; "auto" for the checkpoint's own, "fastest" for the
                fastest one on this machine that is as exact (see `dtypes`), float32 for a GGUF file.
            tree: argument of `tree_policy`, or "auto" for the tree that `headstart tree` found on this machine, else a
                chain of one token and dynamic trees of a few sizes, smaller in batches, where each node costs more. Of
                several trees, in a list or separated by |, each round takes the one that has been fastest so far.
            acceptance: the acceptance rule for sampling, one of `RULES`, or "auto" for the exact one that accepts
                most. Greedy decoding has one rule.
            device_map: see `Target.from_pretrained`.
            revision: revision of the target's Hub id.
            head_revision: revision of the head's Hub id.
            lossy: allow a rule ("typical") that changes the output distribution.
            compile: how forwards run, see the method `compile`: True for our kernels on a CPU and CUDA graphs on a
                GPU, False for transformers' own operations.
            drafter: a drafter without a head: `PromptLookup()`, `Retrieval(folder)`, `Lookahead()`, `Ngram()`, a
                smaller model, or one of them as a command line writes it, see `drafters.specs.SPECS`; or a drafter of
                your own, whose errors cannot change the output. With a head, its drafts are joined with the head's
                tree.
            fallback: measure plain steps too, and take them where drafts cost more time than they save; see
                `AdaptiveDrafter`. False to draft in every round: with the given tree, the fastest of several, or the
                first that "auto" would choose from. A seed gives the same text either way: sampling from sampled trees
                always uses the first one.
            allow_adapter: merge the LoRA adapter that the head's checkpoint brings, if it brings one, into the target,
                which then writes other text than the original; a loaded model is changed in place. Without it such a
                head is refused.
            model_kwargs: see `Target.from_pretrained`.

        Raises:
            ValueError: names what cannot be loaded, or the head or tree that does not fit.
        """
        dtype_was_named = dtype != "fastest" or not isinstance(target, str | Path)
        check_model_options(model_kwargs)
        if isinstance(target, Target):
            refuse_loading_options(target.dtype, dtype, device_map, revision, model_kwargs)
        else:
            target_class = Seq2SeqTarget if is_encoder_decoder(target, revision, model_kwargs) else Target
            target = target_class.from_pretrained(target, dtype, device_map, revision, **model_kwargs)
        target.check_decoding()
        if target.device.type == "cpu":
            check_threads()
        if not isinstance(compile, bool):
            raise ValueError(f"compile must be True or False, not {compile!r}")

        loaded_head = None
        provenance: dict[str, Any] = {}
        if head is not None:
            loaded_head = load_fitting_head(head, target, head_revision, dtype_was_named)
            target.check_layers(loaded_head.feature_layers)
            merge_adapter_of(loaded_head, target, allow_adapter)
            if loaded_head.metadata is not None:
                provenance = loaded_head.metadata.provenance
            loaded_head = loaded_head.to(target.device).eval()
        if compile:
            with as_loaded(target.model):  # kernels may hold a copy of it
                target.compile(compile)

        make = partial(make_drafter, target, drafter, adaptive=fallback)
        drafter_with: Callable[[TreeSpec], BatchDrafter] = make
        loaded = None
        if loaded_head is not None:
            loaded = LoadedHead(loaded_head, tree, make, bool(compile))
            drafter_with = loaded.drafter_with(target)
        later = needs_costs(target, tree, loaded_head, fallback)
        lm = cls(target, None if later else drafter_with(tree), acceptance, lossy)
        lm.provenance = provenance
        lm._drafter_with = drafter_with
        lm._loaded = loaded
        if later:
            lm._drafter = None
        return lm.compile(compile) if compile else lm

    def compile(self, mode: bool = True) -> SpeculativeLM:
        """Speed up plain steps and speculation rounds on this device; `from_pretrained` does so by default.

        On a CPU, target and head run in our own kernels, built once per machine in seconds. They hold a copy of the
        weights in the shortest exact format, renewed when the weights change: every call compares a few elements of
        each tensor. After a change that this may miss call `refresh`. Without a C++ compiler a warning is given and
        nothing changes.

        On a GPU with CUDA, the operations of rounds are recorded as CUDA graphs at their second call, in as little time
        as that takes, and read the weights where they lie.
        """
        with as_loaded(self.target.model):
            self.target.compile(mode)
        for rows in draft_models(self.drafter):
            rows.use(self.target.engine)
        return self

    def refresh(self) -> SpeculativeLM:
        """Copy the weights of target, head and draft model again; conversations read their text again.

        Needed on a CPU only after a change that each call's comparison of sampled weights cannot see: a write through
        `.data` to a few rows of an embedding or LM head, or to so few elements that none of the sampled ones differs.
        On a GPU weights are read where they lie; call it before a conversation goes on after any write through `.data`.
        """
        with self.target.lock:
            self.target.refresh()
            for lm in (self, *self._variants.values()):
                if lm._drafter is None:
                    continue
                for rows in draft_models(lm._drafter):
                    rows.renew(force=True)
        return self

    def use_head(self, head: str | Path | DraftHead, revision: str | None = None) -> None:
        """Draft with another head from the next generation on, such as an adapted one.

        Waits for a generation that runs in another thread. The tree is again that of `from_pretrained`; "auto" is
        chosen for the new head. Conversations go on, and their text is read again. Tokens stay the target's.

        old = lm.head
        lm.use_head("adapted/best")
        lm.use_head(old)  # and back

        Args:
            head: a checkpoint folder, a Hub id, or a head.
            revision: revision of the head's Hub id.

        Raises:
            ValueError: a decoder without a head, a head that does not fit the target, the tree or the rule, or one that
                brings an adapter; nothing has changed then. Also a call inside a generation.
        """
        before = self._loaded
        target = self.target
        if before is None:
            raise ValueError("use_head needs a decoder with a head: SpeculativeLM.from_pretrained(target, head=...)")
        if any(running is target for running, _ in _RUNNING.generations):
            raise ValueError("use_head was called inside a generation with the same target; call it afterwards")
        with target.lock, as_loaded(target.model):
            # 1. All that may be refused.
            new = load_fitting_head(head, target, revision)
            target.check_layers(new.feature_layers)
            merge_adapter_of(new, target, allowed=False)
            loaded = replace(before, head=new.to(target.device).eval())
            drafter_with = loaded.drafter_with(target)
            drafter = drafter_with(before.tree)
            sampling_rule = Verification(choose_rule(self.acceptance, drafter.kind, self.lossy))
            for rows in draft_models(drafter):
                rows.use(target.engine)

            # 2. All of it takes the old one's place, or none.
            names = ("_loaded", "_drafter_with", "_drafter", "sampling_rule", "provenance")
            earlier = {name: getattr(self, name) for name in names}
            try:
                self._loaded = loaded
                self._drafter_with = drafter_with
                self._drafter = drafter
                self.sampling_rule = sampling_rule
                self.provenance = {} if new.metadata is None else new.metadata.provenance
                self._variants.clear()
                vars(self).pop("costs", None)  # of rounds with the old head

                # 3. Recorded rounds hold the old head, its cache and those of single calls' trees.
                target.engine.runner.forget()
            except BaseException:  # Ctrl-C
                for name, value in earlier.items():
                    setattr(self, name, value)
                raise

    @cached_property
    def costs(self) -> RoundCosts:
        """Cost of rounds on this machine; measured, in about a second, if it is not known."""
        with as_loaded(self.target.model):
            return measured_costs(self.target, self._drafting_head())

    def _drafting_head(self) -> DraftHead | None:
        """The head as it drafts, which may be a copy in the target's engine; None if there is none."""
        for rows in draft_models(self.drafter):
            if isinstance(rows.model, DraftHead):
                return rows.model
        return None

    def warmup(self) -> SpeculativeLM:
        """Build kernels, measure the cost of rounds and generate a few tokens, which the first call would wait for."""
        self.costs  # noqa: B018 - measured now
        observers = self.observers[:]
        self.observers.clear()
        prompt_1T = torch.zeros(1, 2, dtype=torch.int64, device=self.target.device)
        settings: dict[str, Any] = {
            "attention_mask": torch.ones_like(prompt_1T),
            "generator": torch.Generator(self.target.device),
            "max_new_tokens": 4,
            "eos_token_id": [],
            "pad_token_id": 0,
            "stop_strings": None,
        }
        try:
            for sampling in (False, True):
                self.generate(prompt_1T, do_sample=sampling, **settings)
        finally:
            self.observers[:] = observers
            for drafter in self.drafter.nested():  # speeds on this text predict nothing
                if isinstance(drafter, AdaptiveDrafter):
                    drafter.speeds.clear()
        return self

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_batch_size: int | None = None,
        tree: TreeSpec | None = None,
        acceptance: str | None = None,
        past_key_values: Conversation | None = None,
        **settings: Any,
    ) -> GenerateOutput:
        """Generate a continuation of each row of a batch.

        Arguments that transformers' `generate` also has mean the same here, and are in the same order.

        Args:
            inputs: prompts [batch, time], int64 or int32, padded left or right.
            generation_config: settings; those given by name take precedence.
            logits_processor: your own processors, as for `stopping_criteria` and `prefix_allowed_tokens_fn`: called as
                `model.generate` calls them for one row alone, after each token, with the row's unpadded tokens.
            stopping_criteria: your own criteria.
            prefix_allowed_tokens_fn: the tokens that are allowed next.
            input_ids: another name of `inputs`, so that a tokenizer's output can be unpacked: generate(**inputs).
            attention_mask: 1 for tokens, 0 for padding, [batch, time]; None to let transformers infer it from the
                padding token.
            generator: source of randomness; None for torch's global one. With top-k trees, and without drafts, each
                token is sampled by a random number of its row and position: a seed gives the same text whatever was
                drafted, with any `max_batch_size`. The rules for sampled trees draw anew in each round.
            streamer: gets the tokens of every round as they are accepted; batch size 1 only.
            tokenizer: needed for `stop_strings` and `token_healing`, also where the model's generation config
                asks for them; loaded if the target has a name.
            max_batch_size: rows decoded at the same time; a finished row frees its slot for the next one (continuous
                batching). None for all at once.
            tree: tree for this call, of the same head or source; None for the one of `from_pretrained`.
            acceptance: acceptance rule for this call; None for the one given at first, or "auto" if `tree` is of
                another kind.
            past_key_values: KV cache and drafter state of earlier calls, so that their text is not read again; updated
                in place. One row only, and the same `tree` in every call.
            settings: what a processor returned beside token ids (pixel_values, image_grid_thw ...), of one row: the
                target reads the prompt with it. And max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id
                ... as for `model.generate`.

        Returns:
            the prompts followed by the new tokens, which can be indexed as the tensor [batch, time] that
            `model.generate` returns, with statistics.

        Raises:
            ValueError: names an empty or too long prompt, a tree or acceptance rule that does not fit, or an
                unsupported setting.
        """
        prompts = prompts_of(inputs, input_ids, attention_mask)
        rows = len(prompts.input_ids)
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        check_conversation(past_key_values, rows, self.target)
        extra = {name: settings.pop(name) for name in [*settings] if is_prompt_input(self.target, name)}
        check_settings(settings, generation_config)
        arguments = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        }
        settings |= {name: value for name, value in arguments.items() if value is not None}
        if settings.get("max_new_tokens") == 0:
            if streamer is not None:
                streamer.end()
            return GenerateOutput(prompts.input_ids, Stats(rows=[[] for _ in range(rows)]))

        target = self.target
        warn_of_autocast(target.model)
        call = Call(RandomSampler(generator), streamer, max_batch_size, past_key_values)
        with target.lock, as_loaded(target.model):
            lm = self if tree is None and acceptance is None else self._variant(tree, acceptance)
            prompts, settings = with_tokenizer(target, prompts, settings, generation_config, tokenizer)
            with lm._shown_to_encoders(prompts) as encoded:
                output = target.model.generate(
                    prompts.input_ids,
                    attention_mask=prompts.attention_mask,
                    generation_config=generation_config,
                    streamer=streamer,
                    custom_generate=lm.decoding_method(call),
                    **settings,
                    **encoded,
                    **extra,
                )
        assert isinstance(output, GenerateOutput)
        return output

    def stream(
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **options: Any
    ) -> Iterator[list[int]]:
        """Generate a continuation of one prompt; closing the iterator ends the generation.

        Takes all options of `generate` but `streamer`.

        Yields:
            The tokens of a round, as soon as they are accepted.
        """
        if any(target is self.target for target, _ in _RUNNING.generations):
            raise ValueError(
                "stream was called inside a generation with the same target (by a callback, a streamer, a processor or "
                "a criterion), which would wait for its own end; call generate there, or stream afterwards"
            )
        yield from streamed(partial(self.generate, inputs, generation_config, **options))

    def chat(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None, **settings: Any) -> Chat:
        """A conversation by the tokenizer's chat template, each turn of which reads only new tokens; see `Chat`."""
        return Chat(self, tokenizer, system, **settings)

    def custom_generate(
        self, generator: torch.Generator | None = None, streamer: BaseStreamer | None = None
    ) -> Callable[..., Tensor | GenerateOutput | GenerateDictOutput]:
        """A decoding method of this decoder for plain `model.generate(..., custom_generate=...)` of its own model.

        Other than the function `custom_generate`, it follows `use_head` and is watched by `observers`. It serves code
        that calls `model.generate` itself, such as a trainer's rollouts:

        model.generate = functools.partial(model.generate, custom_generate=lm.custom_generate())

        Args:
            generator: source of randomness; None for torch's global one.
            streamer: gets the tokens of every round; transformers does not pass its own to a custom decoding method.

        Returns:
            a function that returns the sequences, or with `return_dict_in_generate` a `GenerateDictOutput`.
        """
        call = Call(RandomSampler(generator), streamer, as_transformers=True)
        return self.decoding_method(call)

    def decoding_method(self, call: Call) -> Callable[..., Tensor | GenerateOutput | GenerateDictOutput]:
        """A function that `model.generate` of this target's model takes as `custom_generate`."""
        return partial(self._decode, call)

    def _decode(
        self,
        call: Call,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **inputs: Any,
    ) -> Tensor | GenerateOutput | GenerateDictOutput:
        """Decode what `model.generate` has prepared, whose arguments these are.

        It passes parameters that are named here twice, hence the attention mask among the other inputs.
        """
        target = self.target
        if model is not target.model:
            raise ValueError(
                f"this decoding method is of another {type(target.model).__name__} than the one whose generate was "
                "called; make one for this model: SpeculativeLM.from_pretrained(model, ...).custom_generate()"
            )
        config = generation_config
        check_prepared(config, inputs, call.streamer, len(input_ids))
        warn_of_autocast(target.model)
        encoder_decoder = isinstance(target, Seq2SeqTarget)
        mask = None if encoder_decoder else inputs.get("attention_mask")  # an encoder-decoder's is its encoder's
        prompt_inputs = None
        if not encoder_decoder:
            prompt_inputs = inputs_of_prompt(inputs, input_ids, mask, call.past, target)
        prompts = without_padding(input_ids, mask, target)
        if config.do_sample and is_lossy(self.acceptance):
            warn_of_equal_answers(self.acceptance, prompts)
        process_logits = TreeLogitsProcessor(
            logits_processor,
            [input_ids.shape[1] - len(prompt) for prompt in prompts],
            min_length_counts_padding=config.min_new_tokens is not None,
        )
        stopping = Stopping.of(stopping_criteria, config.max_length)
        new_tokens = stopping.max_length - input_ids.shape[1]
        together = call.max_batch_size
        lengths = [len(prompt) for prompt in prompts]
        if target.segments and not target.segments.together(lengths, new_tokens):
            target.check_border(lengths, new_tokens)
            together = 1
        if target.engine.one_row:
            together = 1
        keep = bool(config.return_dict_in_generate)
        with self._alone(call.past) as drafter:
            if isinstance(target, Seq2SeqTarget):
                target.set_encoder_outputs(inputs["encoder_outputs"], inputs.get("attention_mask"))
                for draft_model in assistants(drafter):
                    if isinstance(draft_model, Seq2SeqTarget):
                        draft_model.check_encoder_outputs()
            target.check_decoding()
            target.renew()
            for rows in draft_models(drafter):
                rows.use(target.engine)
                rows.renew()
            self._check_size(prompts, new_tokens, together)
            sequences = Sequences(
                prompts,
                new_tokens,
                stopping.end_tokens,
                stopping.criteria,
                call.streamer,
                keep_scores=keep and bool(config.output_scores),
                keep_logits=keep and bool(config.output_logits),
                max_batch_size=together,
            )
            rule = self._rule(bool(config.do_sample), process_logits)
            decoding = Decoding(
                target,
                rule,
                process_logits,
                call.sampler,
                prompt_inputs=prompt_inputs,
                observers=tuple(self.observers),
            )
            stats = self._speculate(call, decoding, drafter, sequences)
        if call.streamer is not None:
            call.streamer.end()
        output = collected(input_ids, sequences, padding_token(config), stats)
        if not call.as_transformers:
            return output
        if not keep:
            return output.sequences
        return GenerateDictOutput.of(output)

    def _rule(self, sampling: bool, process_logits: TreeLogitsProcessor) -> Verification:
        """The acceptance rule of a generation; processors that keep a state need one that goes from the root down."""
        if not sampling:
            return self.greedy_rule
        if process_logits.one_by_one:
            return verification_by(top_down_rule(self.acceptance, self.drafter.kind))
        return self.sampling_rule

    def _speculate(self, call: Call, decoding: Decoding, drafter: BatchDrafter, sequences: Sequences) -> Stats:
        """Run the loop; a conversation that it leaves half updated is forgotten."""
        past = call.past
        if past is None:
            return speculate(decoding, drafter, sequences)
        owner = (self, self._loaded, self.target.version)
        if past.owner != owner:
            past.forget()
            past.owner = owner
        try:
            return speculate(decoding, drafter, sequences, past)
        except BaseException:
            past.forget()
            raise

    def _variant(self, tree: TreeSpec | None, acceptance: str | None) -> SpeculativeLM:
        """This model with another tree or rule; made once for each, so that measured speeds are kept."""
        key = repr((tree, acceptance))
        if key not in self._variants:
            drafter = self.drafter
            if tree is not None:
                if self._drafter_with is None:
                    raise ValueError(
                        f"tree {tree!r} was given for a drafter that is made already; make it with that tree"
                    )
                with as_loaded(self.target.model):  # the cost of rounds may be measured
                    drafter = self._drafter_with(tree)
            same_kind = drafter.kind == self.drafter.kind
            name = acceptance or (self.acceptance if same_kind else "auto")
            variant = copy.copy(self)
            variant.drafter = drafter
            variant.acceptance = name
            variant.sampling_rule = Verification(choose_rule(name, drafter.kind, self.lossy))
            self._variants[key] = variant
        return self._variants[key]

    @contextmanager
    def _shown_to_encoders(self, prompts: Prompts) -> Iterator[dict[str, Any]]:
        """Let the encoders of an encoder-decoder and of its draft model read a prompt; `generate`'s argument for it."""
        target = self.target
        if not isinstance(target, Seq2SeqTarget):
            yield {}
            return
        check_ids(prompts.input_ids, prompts.attention_mask, target)
        models = [model for model in assistants(self.drafter) if isinstance(model, Seq2SeqTarget)]
        before = [(model, model.encoded, model.encoded_mask) for model in (target, *models)]
        try:
            encoded = target.encode(prompts.input_ids, prompts.attention_mask)
            for model in models:
                with as_loaded(model.model):
                    model.encode(within(model, prompts.input_ids), prompts.attention_mask)
            yield {"encoder_outputs": encoded}
        finally:
            for model, states, mask in before:  # those of a generation that called this one, or none
                model.encoded = states
                model.encoded_mask = mask

    @contextmanager
    def _alone(self, past: Conversation | None) -> Iterator[BatchDrafter]:
        """Hold the target for one generation, and give the drafter for it.

        A callback, a streamer, a processor or a criterion may call `generate` in its turn: the inner generation drafts
        with a drafter of its own, and the outer one finds everything as it was.
        """
        target = self.target
        running = _RUNNING.generations
        if past is not None and any(other is past for _, other in running):
            raise ValueError(
                "past_key_values is the Conversation of the generation that calls generate here (by a callback, a "
                "streamer, a processor or a criterion); give this one another"
            )
        with target.lock, as_loaded(target.model):
            nested = any(other is target for other, _ in running)
            drafter = self.drafter.fresh() if nested else self.drafter
            encoded = (target.encoded, target.encoded_mask) if isinstance(target, Seq2SeqTarget) else None
            running.append((target, past))
            try:
                as_it_is = target.engine.runner.as_it_is() if nested else nullcontext()
                with as_it_is, as_loaded_together([model.model for model in assistants(drafter)]):
                    yield drafter
            finally:
                running.pop()
                if nested and isinstance(target, Seq2SeqTarget) and encoded is not None:
                    target.encoded, target.encoded_mask = encoded

    def _check_size(self, prompts: list[Tensor], new_tokens: int, max_batch_size: int | None) -> None:
        """Refuse a batch that does not fit in the model's positions, or in memory, for which the pool is emptied."""
        target = self.target
        longest = max(len(prompt) for prompt in prompts)
        if longest + new_tokens > target.max_positions:
            raise ValueError(
                f"a prompt of {longest} tokens and {new_tokens} new ones do not fit the {target.max_positions} "
                f"positions of {target.name!r}"
            )
        rows = min(len(prompts), max_batch_size or len(prompts))
        tokens = longest + new_tokens + self.drafter.max_nodes
        scores = rows * self.drafter.max_nodes * target.info.vocab_size
        bytes_of_score = target.dtype.itemsize + 3 * max(target.dtype.itemsize, 4)
        """Of its raw logit, its score, its probability and its random number."""
        needed = {
            "the target's cache": target.cache_bytes(rows, target.engine.cache_slots(tokens)),
            "the drafts'": sum(model.cache_bytes(rows, tokens) for model in draft_models(self.drafter)),
            "logits": scores * bytes_of_score,
        }
        total = sum(needed.values())
        free = free_memory(target.device)
        if total > free and target.pool.blocks:
            target.pool.blocks.clear()
            free = free_memory(target.device)
        if total > free:
            parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in needed.items())
            raise ValueError(
                f"to decode {rows} rows of {tokens} tokens takes {total / 2**30:.1f} GiB ({parts}), and "
                f"{target.device} has {free / 2**30:.1f} GiB free; ask for fewer new tokens, or decode fewer rows at "
                "once (max_batch_size)"
            )


class _Running(threading.local):
    """The generations of this thread, the innermost last: the target of each, and its conversation."""

    def __init__(self) -> None:
        self.generations: list[tuple[Target, Conversation | None]] = []


_RUNNING = _Running()
