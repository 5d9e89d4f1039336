"""Speculative decoding for users: `SpeculativeLM.generate`, or plain `model.generate(custom_generate=...)`.

`model.generate` itself resolves settings, logits processors and stopping criteria and calls our loop through its
`custom_generate` hook, so they keep their meaning. Rows are decoded without their padding, so that each gets the tokens
that `generate` returns for it alone.
"""

from __future__ import annotations

import copy
import queue
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils.generic import ModelOutput

from ..heads import DraftHead
from .drafters.adaptive import AdaptiveDrafter
from .drafters.base import Drafter, NoDraft
from .drafters.by_name import assistants, load_fitting_head, make_drafter
from .drafters.draft_model import within
from .drafters.tree_policies import HeadDrafter
from .kv_cache import free_memory
from .logits import RandomSampler, Sampler, TreeLogitsProcessor
from .loop import Decoding, Verification, speculate
from .models.as_loaded import as_loaded, as_loaded_together, warn_of_autocast
from .models.encoder_decoder import Seq2SeqTarget, is_encoder_decoder
from .models.interface import filled_cache
from .models.loading import check_model_options, load_tokenizer, refuse_loading_options
from .sequences import Conversation, Sequences
from .stats import Stats
from .target import Target
from .tracing.pieces import TextStream
from .tracing.record import Recorder
from .tracing.trace import Trace, trace_of
from .tuning.costs import measured_costs
from .tuning.machine import check_threads
from .tuning.round_costs import RoundCosts
from .tuning.tree_spec import TreeSpec
from .verify import choose_rule, greedy, is_lossy, top_down_rule

SETTINGS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) | {
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
}
"""Settings that `SpeculativeLM.generate` passes to `model.generate`, which documents them."""


@dataclass
class GenerateOutput(ModelOutput):
    """Output of `SpeculativeLM.generate`: transformers' `GenerateDecoderOnlyOutput` with statistics."""

    sequences: Tensor
    """The prompts as given, followed by the new tokens, padded on the right."""
    scores: tuple[Tensor, ...] | None = None
    """With `output_scores`: the processed scores of each new token, [batch, V]; 0 behind a row's end."""
    logits: tuple[Tensor, ...] | None = None
    """With `output_logits`: the raw logits of each new token, [batch, V]; 0 behind a row's end."""
    stats: Stats = None  # type: ignore[assignment]  # always given; the base class allows no other default
    """Acceptance and timings."""
    trace: Trace | None = None
    """With `trace`: the recorded rounds, as a page."""


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
        self.drafter: Drafter = drafter or NoDraft()
        self.sampling_rule = Verification(choose_rule(acceptance, self.drafter.kind, lossy))
        self.greedy_rule = Verification(greedy)
        self.acceptance, self.lossy = acceptance, lossy
        self.provenance: dict[str, Any] = {}
        """The target that the head was trained against, from the head's checkpoint."""
        self.callbacks: list[Callable[[Stats], None]] = []
        """Called with the statistics of every generation."""
        self.round_callbacks: list[Callable[[Sequences], None]] = []
        """Called with the sequences so far when prompts have been read, and after every round; an exception ends the
        generation."""
        self._drafter_with: Callable[[TreeSpec], Drafter] | None = None
        """Makes a drafter of the same head or source with another tree."""
        self._variants: dict[str, SpeculativeLM] = {}
        """By tree and acceptance rule: this model with those of single calls."""
        target.check_layers(self.drafter.feature_layers)

    def __repr__(self) -> str:
        return f"SpeculativeLM({self.target!r}, {self.drafter!r}, acceptance={self.acceptance!r})"

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
        compile: bool | str = "auto",
        drafter: str | Drafter | None = None,
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
                chain of one token and dynamic trees of a few sizes, smaller in batches, where each node costs more.
                Of several trees separated by |, each round takes the one that has been fastest so far.
            acceptance: see `__init__`, as for `lossy`.
            compile: True to compile the rounds, see the method `compile`; False not to; "auto" to compile where it
                takes no time, on CPUs.
            drafter: a spec of `drafters.by_name.SPECS`, or a drafter of your own, whose errors cannot change the
                output. With a head, its drafts are joined with the head's tree.
            fallback: measure plain steps too, and take them where drafts cost more time than they save; see
                `AdaptiveDrafter`. False to draft in every round: with the given tree, the fastest of several, or the
                first that "auto" would choose from. For a seed, top-k trees give the same text either way; so do
                sampled ones, of which sampling takes the first given one each round.
            allow_adapter: merge the LoRA adapter that the head's checkpoint brings, if it brings one, into the target,
                which then writes other text than the original; a loaded model is changed in place. Without it such a
                head is refused.
            model_kwargs: see `Target.from_pretrained`.

        Raises:
            ValueError: names what cannot be loaded, or the head or tree that does not fit.
        """
        auto_dtype = isinstance(target, str | Path) and dtype == "fastest"
        check_model_options(model_kwargs)
        if isinstance(target, Target):
            refuse_loading_options(target.dtype, dtype, device_map, revision, model_kwargs)
        else:
            target_class = Seq2SeqTarget if is_encoder_decoder(target, revision, model_kwargs) else Target
            target = target_class.from_pretrained(target, dtype, device_map, revision, **model_kwargs)
        if target.device.type == "cpu":
            check_threads()
        if compile != "auto" and not isinstance(compile, bool):
            raise ValueError(f"compile must be True, False or 'auto', not {compile!r}")
        if compile:
            with as_loaded(target.model):  # kernels may hold a copy of it
                target.compile(compile)
        loaded_head, metadata = None, None
        if head is not None:
            loaded_head, metadata = load_fitting_head(head, target, head_revision, allow_adapter, auto_dtype)
            loaded_head = loaded_head.to(target.device).eval()
            target.check_layers(loaded_head.feature_layers)
            if compile:
                loaded_head = target.engine.draft_head(loaded_head)
        drafter_with = partial(make_drafter, target, drafter, head=loaded_head, metadata=metadata, adaptive=fallback)
        with as_loaded(target.model):  # the cost of rounds may be measured
            lm = cls(target, drafter_with(tree), acceptance, lossy)
        lm.provenance, lm._drafter_with = {} if metadata is None else metadata.provenance, drafter_with
        return lm.compile(compile) if compile else lm

    def compile(self, mode: bool | str = True) -> SpeculativeLM:
        """Speed up plain steps and speculation rounds on this device; `from_pretrained` does so with mode "auto".

        On a CPU, target and head run in our own kernels, built once per machine in seconds. They hold a copy of the
        weights in the shortest exact format, renewed when the weights change: every call compares a few elements of
        each tensor. After a change that this may miss call `refresh`. Without a C++ compiler a warning is given and
        nothing changes.

        On a GPU with CUDA, the operations of rounds are recorded as CUDA graphs at their second call, in as little time
        as that takes, and read the weights where they lie. With mode True the target's forward is fused by
        torch.compile before, which takes minutes per process.
        """
        with as_loaded(self.target.model):
            self.target.compile(mode)
        self.drafter.use(self.target.engine)
        return self

    def refresh(self) -> SpeculativeLM:
        """Copy the weights of target, head and draft model again; conversations read their text again.

        Needed only after a change that each call's comparison of sampled weights cannot see: a write through `.data` to
        a few rows of an embedding or LM head, or to so few elements that none of the sampled ones differs.
        """
        with self.target.lock:
            self.target.refresh()
            for lm in (self, *self._variants.values()):
                lm.drafter.renew(force=True)
        return self

    @cached_property
    def costs(self) -> RoundCosts:
        """Cost of rounds on this machine; measured, in about a second, if it is not known."""
        heads = [each.head for each in self.drafter.nested() if isinstance(each, HeadDrafter)]
        with as_loaded(self.target.model):
            return measured_costs(self.target, next((head for head in heads if isinstance(head, DraftHead)), None))

    def warmup(self) -> SpeculativeLM:
        """Build kernels, measure the cost of rounds and generate a few tokens, which the first call would wait for."""
        self.costs  # noqa: B018 - measured now
        callbacks = self.callbacks[:]
        self.callbacks.clear()
        prompt_1T = torch.zeros(1, 2, dtype=torch.int64, device=self.target.device)
        mask_1T, generator = torch.ones_like(prompt_1T), torch.Generator(self.target.device)
        settings: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": [], "pad_token_id": 0, "stop_strings": None}
        try:
            for sampling in (False, True):
                self.generate(prompt_1T, mask_1T, generator=generator, do_sample=sampling, **settings)
        finally:
            self.callbacks[:] = callbacks
            for each in self.drafter.nested():  # speeds on this text predict nothing
                if isinstance(each, AdaptiveDrafter):
                    each.speeds.clear()
        return self

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        generator: torch.Generator | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_batch_size: int | None = None,
        tree: TreeSpec | None = None,
        acceptance: str | None = None,
        past_key_values: Conversation | None = None,
        trace: bool = False,
        **settings: Any,
    ) -> GenerateOutput:
        """Generate a continuation of each row of a batch.

        Args:
            input_ids: prompts [batch, time], int64 or int32, padded left or right.
            attention_mask: 1 for tokens, 0 for padding, [batch, time]; None to let transformers infer it from the
                padding token.
            generator: source of randomness; None for torch's global one. With top-k trees, and without drafts, each
                token is sampled by a random number of its row and position: a seed gives the same text whatever was
                drafted, with any `max_batch_size`. The rules for sampled trees draw anew in each round.
            streamer: gets the tokens of every round as they are accepted; batch size 1 only.
            tokenizer: needed for `stop_strings`, `token_healing` and `trace`, also where the model's generation config
                asks for them; loaded if the target has a name.
            max_batch_size: rows decoded at the same time; a finished row frees its slot for the next one (continuous
                batching). None for all at once.
            tree: tree for this call, of the same head or source; None for the one of `from_pretrained`.
            acceptance: acceptance rule for this call; None for the one given at first, or "auto" if `tree` is of
                another kind.
            past_key_values: KV cache and drafter state of earlier calls, so that their text is not read again; updated
                in place. One row only, and the same `tree` in every call.
            trace: record every round for `GenerateOutput.trace`, a page that plays them; the tokens stay the same. One
                row only.
            settings: max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id, logits_processor,
                stopping_criteria ... as for `model.generate`. Your own processors and criteria are called as it calls
                them for one row alone: after each token, with the row's unpadded tokens.

        Raises:
            ValueError: names an empty or too long prompt, a tree or acceptance rule that does not fit, or an
                unsupported setting.
        """
        lm = self if tree is None and acceptance is None else self._variant(tree, acceptance)
        lm._check_arguments(input_ids, attention_mask, max_batch_size, past_key_values, settings)
        recorder = Recorder() if trace else None
        if recorder is not None:
            if len(input_ids) > 1:
                raise ValueError(f"trace records one row, not a batch of {len(input_ids)}")
            if settings.get("max_new_tokens") == 0:
                raise ValueError("trace records rounds, and there are none with max_new_tokens=0")
            tokenizer = tokenizer or load_tokenizer(self.target.name)
        if settings.get("max_new_tokens") == 0:
            if streamer is not None:
                streamer.end()
            return GenerateOutput(sequences=input_ids, stats=Stats(rows=[[] for _ in input_ids]))
        target = self.target
        warn_of_autocast(target.model)
        with target.lock, as_loaded(target.model):
            prompts = Prompts(input_ids, attention_mask)
            prompts, settings = with_tokenizer(target, prompts, settings, generation_config, tokenizer)
            with lm._shown_to_encoders(prompts) as encoded:
                output = target.model.generate(
                    prompts.input_ids,
                    attention_mask=prompts.attention_mask,
                    generation_config=generation_config,
                    streamer=streamer,
                    custom_generate=lm.decoding_method(
                        RandomSampler(generator), streamer, max_batch_size, past_key_values, recorder=recorder
                    ),
                    **settings,
                    **encoded,
                )
        assert isinstance(output, GenerateOutput)
        if recorder is not None and tokenizer is not None:
            prompt_T = prompts.input_ids[0]
            if prompts.attention_mask is not None:
                prompt_T = prompt_T[prompts.attention_mask[0].bool()]
            output.trace = trace_of(recorder, output.stats, prompt_T.tolist(), tokenizer)
        return output

    @contextmanager
    def _shown_to_encoders(self, prompts: Prompts) -> Iterator[dict[str, Any]]:
        """Let the encoders of an encoder-decoder and of its draft model read a prompt; `generate`'s argument for it."""
        target = self.target
        if not isinstance(target, Seq2SeqTarget):
            yield {}
            return
        _check_ids(prompts.input_ids, prompts.attention_mask, target)
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
                model.encoded, model.encoded_mask = states, mask

    def _check_arguments(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_batch_size: int | None,
        past: Any,
        settings: dict[str, Any],
    ) -> None:
        """Refuse arguments of `generate` that cannot be decoded."""
        check_inputs(input_ids, attention_mask)
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        if past is not None and not isinstance(past, Conversation):
            raise ValueError(
                f"past_key_values must be a headstart.inference.Conversation, not a {type(past).__name__}: it keeps "
                "what drafts have read, too"
            )
        if past is not None and len(input_ids) > 1:
            raise ValueError(f"past_key_values takes one row, not a batch of {len(input_ids)}")
        if past is not None and isinstance(self.target, Seq2SeqTarget):
            raise ValueError("past_key_values of an encoder-decoder cannot be continued; leave it out")
        if "cache" in settings:
            raise ValueError(
                "generate takes no 'cache' of transformers: give the whole text, and past_key_values=Conversation() so "
                "that later calls read only what is new"
            )
        unknown = sorted(set(settings) - SETTINGS)
        if unknown:
            raise ValueError(
                f"generate option {unknown[0]!r} is not supported; choose from {', '.join(sorted(SETTINGS))}"
            )

    def stream(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Iterator[list[int]]:
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
        rounds: queue.Queue[list[int] | BaseException | None] = queue.Queue()
        streamer = _QueueStreamer(rounds)

        def generate() -> None:
            try:
                self.generate(input_ids, attention_mask, streamer=streamer, **options)
            except _StreamClosed:
                pass
            except BaseException as error:  # raised again in the caller's thread
                rounds.put(error)
            finally:
                rounds.put(None)

        thread = threading.Thread(target=generate, name="headstart stream", daemon=True)
        thread.start()
        try:
            while (tokens := rounds.get()) is not None:
                if isinstance(tokens, BaseException):
                    raise tokens
                yield tokens
        finally:
            streamer.closed = True
            thread.join()

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
                drafter = self._drafter_with(tree)
            name = acceptance or (self.acceptance if drafter.kind == self.drafter.kind else "auto")
            variant = copy.copy(self)
            variant.drafter, variant.acceptance = drafter, name
            variant.sampling_rule = Verification(choose_rule(name, drafter.kind, self.lossy))
            self._variants[key] = variant
        return self._variants[key]

    def chat(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None, **settings: Any) -> Chat:
        """A conversation by the tokenizer's chat template, each turn of which reads only new tokens; see `Chat`."""
        return Chat(self, tokenizer, system, **settings)

    def decoding_method(
        self,
        sampler: Sampler,
        streamer: BaseStreamer | None = None,
        max_batch_size: int | None = None,
        past: Conversation | None = None,
        always_output: bool = True,
        recorder: Recorder | None = None,
    ) -> Callable[..., Tensor | GenerateOutput]:
        """A function that `model.generate` of this target's model takes as `custom_generate`.

        It returns a `GenerateOutput`; without `always_output` only if `return_dict_in_generate` asks for it, and else
        the sequences, as transformers' own decoding methods do. A `recorder` records the rounds of a single row.
        """

        def decode(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **inputs: Any,
        ) -> Tensor | GenerateOutput:
            # transformers passes parameters named here twice, hence the mask among the rest
            target, config, mask = self.target, generation_config, inputs.get("attention_mask")
            if isinstance(target, Seq2SeqTarget):
                mask = None  # it is the encoder's
            _check_prepared(config, inputs, streamer, len(input_ids))
            warn_of_autocast(target.model)
            prompts = _without_padding(input_ids, mask, target)
            if config.do_sample and is_lossy(self.acceptance):
                _warn_of_equal_answers(self.acceptance, prompts)
            paddings = [input_ids.shape[1] - len(prompt) for prompt in prompts]
            process_logits = TreeLogitsProcessor(
                logits_processor, paddings, min_length_counts_padding=config.min_new_tokens is not None
            )
            eos_token_ids, max_length, other_criteria = _stopping(stopping_criteria, config.max_length)
            new_tokens, full = max_length - input_ids.shape[1], config.return_dict_in_generate
            rule = self.sampling_rule if config.do_sample else self.greedy_rule
            if config.do_sample and process_logits.one_by_one:
                rule = Verification(top_down_rule(self.acceptance, self.drafter.kind))
            with self._alone(past) as drafter:
                if isinstance(target, Seq2SeqTarget):
                    target.set_encoder_outputs(inputs["encoder_outputs"], inputs.get("attention_mask"))
                    for draft_model in assistants(drafter):
                        if isinstance(draft_model, Seq2SeqTarget):
                            draft_model.check_encoder_outputs()
                target.renew()
                self.drafter.use(target.engine)
                self.drafter.renew()
                self._check_size(prompts, new_tokens, max_batch_size)
                sequences = Sequences(
                    prompts,
                    new_tokens,
                    eos_token_ids,
                    other_criteria,
                    streamer,
                    keep_scores=bool(full and config.output_scores),
                    keep_logits=bool(full and config.output_logits),
                    max_batch_size=max_batch_size,
                    callbacks=self.round_callbacks,
                )
                decoding = Decoding(target, rule, process_logits, sampler)
                owner = None if past is None else (self, target.version)
                if past is not None and past.owner != owner:
                    past.forget()
                    past.owner = owner
                try:
                    decoded = speculate if recorder is None else recorder.speculate
                    stats = decoded(decoding, drafter, sequences, past)
                except BaseException:
                    if past is not None:  # its state may be half updated
                        past.forget()
                    raise
                for callback in self.callbacks:
                    callback(stats)
            if streamer is not None:
                streamer.end()
            output = _output(input_ids, sequences, _padding_token(config), stats)
            return output if always_output or full else output.sequences

        return decode

    @contextmanager
    def _alone(self, past: Conversation | None) -> Iterator[Drafter]:
        """Hold the target for one generation, and give the drafter for it.

        A callback, a streamer, a processor or a criterion may call `generate` in its turn: the inner generation drafts
        with a drafter of its own, and the outer one finds everything as it was.
        """
        target, running = self.target, _RUNNING.generations
        if past is not None and any(other is past for _, other in running):
            raise ValueError(
                "past_key_values is the Conversation of the generation that calls generate here (by a callback, a "
                "streamer, a processor or a criterion); give this one another"
            )
        with target.lock, as_loaded(target.model):
            nested = any(each is target for each, _ in running)
            drafter = self.drafter.fresh() if nested else self.drafter
            encoded = (target.encoded, target.encoded_mask) if isinstance(target, Seq2SeqTarget) else None
            running.append((target, past))
            try:
                with as_loaded_together([model.model for model in assistants(drafter)]):
                    yield drafter
            finally:
                running.pop()
                if nested and isinstance(target, Seq2SeqTarget) and encoded is not None:
                    target.encoded, target.encoded_mask = encoded

    def _check_size(self, prompts: list[Tensor], new_tokens: int, max_batch_size: int | None) -> None:
        """Refuse a batch that does not fit in the model's positions, or in memory, for which the pool is emptied."""
        target, longest = self.target, max(map(len, prompts))
        if longest + new_tokens > target.max_positions:
            raise ValueError(
                f"a prompt of {longest} tokens and {new_tokens} new ones do not fit the {target.max_positions} "
                f"positions of {target.name!r}"
            )
        rows = min(len(prompts), max_batch_size or len(prompts))
        tokens = longest + new_tokens + self.drafter.max_nodes
        scores = rows * self.drafter.max_nodes * target.info.vocab_size
        each = target.dtype.itemsize + 3 * max(target.dtype.itemsize, 4)  # raw, scores, probabilities, random numbers
        needed = {
            "the target's cache": target.cache_bytes(rows, tokens),
            "the drafts'": self.drafter.cache_bytes(rows, tokens),
            "logits": scores * each,
        }
        free, total = free_memory(target.device), sum(needed.values())
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


class Chat:
    """A conversation by the tokenizer's chat template; each answer reads only the new part of the text.

    chat = lm.chat(tokenizer, max_new_tokens=256)
    print(chat.say("What is speculative decoding?"))
    """

    def __init__(
        self,
        lm: SpeculativeLM,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        template: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Begin a conversation; `settings` are options of `SpeculativeLM.generate` for every answer.

        `template` are variables for the chat template, such as `{"enable_thinking": False}`.

        Raises:
            ValueError: a tokenizer without a chat template.
        """
        if not tokenizer.chat_template:
            raise ValueError(f"{type(tokenizer).__name__} has no chat template; give generate the whole text instead")
        self.lm, self.tokenizer, self.template, self.settings = lm, tokenizer, template or {}, settings
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.past = Conversation()

    def say(self, text: str, **settings: Any) -> str:
        """The answer to a message, with `settings` for this call. A call that fails leaves `messages` unchanged."""
        return "".join(self.stream(text, **settings))

    def stream(self, text: str, **settings: Any) -> Generator[str]:
        """The answer, piece by piece; an answer that is not read to its end is not recorded."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt: Any = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **self.template
        )
        answer = TextStream(self.tokenizer)
        options = {"tokenizer": self.tokenizer, **self.settings, **settings}
        input_ids = prompt["input_ids"].to(self.lm.target.device)
        for tokens in self.lm.stream(input_ids, past_key_values=self.past, **options):
            if piece := answer.put(tokens):
                yield piece
        if piece := answer.end():
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]


class _Running(threading.local):
    """The generations of this thread, the innermost last: the target of each, and its conversation."""

    def __init__(self) -> None:
        self.generations: list[tuple[Target, Conversation | None]] = []


_RUNNING = _Running()


class _StreamClosed(Exception):
    """The caller closed a stream before its end."""


@dataclass
class _QueueStreamer(BaseStreamer):
    """A streamer that passes tokens to another thread."""

    rounds: queue.Queue[Any]
    closed: bool = False
    has_prompt: bool = False

    def put(self, value: Tensor) -> None:
        if self.closed:
            raise _StreamClosed
        if self.has_prompt:  # transformers streams the prompt first
            self.rounds.put(value.tolist())
        self.has_prompt = True

    def end(self) -> None:
        """Do nothing: the thread that generates marks the end."""


def _check_prepared(config: GenerationConfig, inputs: dict[str, Any], streamer: BaseStreamer | None, rows: int) -> None:
    """Refuse inputs and settings that `model.generate` accepts and this loop does not support."""
    cached = filled_cache(inputs)
    if cached is not None:
        raise ValueError(
            f"a KV cache with {cached.get_seq_length()} tokens cannot be continued here; give the whole text, or "
            "call SpeculativeLM.generate with a Conversation"
        )
    if inputs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds are not supported: drafts are made from tokens; give input_ids")
    if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        mode = config.get_generation_mode().value.replace("_", " ")
        raise ValueError(f"{mode} is not supported; choose from greedy search, sampling")
    unsupported = [name for name in ("output_attentions", "output_hidden_states") if getattr(config, name, None)]
    if unsupported and config.return_dict_in_generate:
        raise ValueError(f"{unsupported[0]} is not supported; the output holds sequences, scores, logits and stats")
    if streamer is not None and rows > 1:
        raise ValueError(f"a streamer takes one row, not a batch of {rows}")


def check_inputs(input_ids: Any, attention_mask: Any = None) -> None:
    """Refuse what is no batch of token ids, or no mask of one.

    Raises:
        ValueError: says what was given and what is valid.
    """
    wanted = "input_ids must be a tensor [batch, time] of token ids, int64 or int32, with at least one token"
    if not isinstance(input_ids, Tensor):
        hint = "; unpack it: generate(**inputs)" if hasattr(input_ids, "input_ids") else ""
        raise ValueError(f"{wanted}, not a {type(input_ids).__name__}{hint}")
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        hint = "; for one prompt give input_ids[None]" if input_ids.ndim == 1 and len(input_ids) else ""
        raise ValueError(f"{wanted}, not one of shape {list(input_ids.shape)}{hint}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{wanted}, not of {input_ids.dtype}")
    if input_ids.device.type == "meta":
        raise ValueError(f"{wanted}, not on the device meta, which holds no values")
    if attention_mask is None:
        return
    wanted = "attention_mask must be a tensor [batch, time] like input_ids, 1 for tokens and 0 for padding"
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"{wanted}, not a {type(attention_mask).__name__}")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}; {wanted}"
        )
    other = attention_mask[(attention_mask != 0) & (attention_mask != 1)]  # sync: once a call
    if len(other):
        raise ValueError(f"{wanted}; it holds {other[0].item()}")


def _check_ids(input_ids: Tensor, mask: Tensor | None, target: Target) -> None:
    """Refuse token ids that the model does not have; those of padding are not read."""
    known = len(target.model.get_input_embeddings().weight)
    wrong_BT = (input_ids < 0) | (input_ids >= known)
    if mask is not None:
        wrong_BT &= mask.to(wrong_BT.device).bool()
    if wrong_BT.any():  # sync: once a call
        row, place = wrong_BT.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {place}] is {int(input_ids[row, place])}; {target.name!r} has the tokens 0 to "
            f"{known - 1}. Where it marks padding (as -100 does in labels), give attention_mask 0 there"
        )


def _without_padding(input_ids: Tensor, mask: Tensor | None, target: Target) -> list[Tensor]:
    """The prompts of a batch, [batch, T], each [its length]; a ValueError where one has no token, or an unknown one."""
    check_inputs(input_ids, mask)
    _check_ids(input_ids, mask, target)
    if mask is None:
        return list(input_ids)
    mask = mask.to(input_ids.device).bool()
    prompts = [row[attended] for row, attended in zip(input_ids, mask, strict=True)]
    if 0 in (lengths := [*map(len, prompts)]):
        raise ValueError(f"prompt {lengths.index(0)} of the batch is all padding")
    return prompts


def _warn_of_equal_answers(acceptance: str, prompts: list[Tensor]) -> None:
    """Warn if one prompt is to get several answers by a rule that draws nothing."""
    different = len({tuple(prompt.tolist()) for prompt in prompts})
    if different < len(prompts):
        warnings.warn(
            f"the acceptance rule {acceptance!r} draws no random numbers: equal prompts get equal answers ({different} "
            f"different prompts in {len(prompts)} rows); for samples that differ, choose the acceptance rule 'auto'",
            stacklevel=2,
        )


def _output(input_ids: Tensor, sequences: Sequences, padding: int, stats: Stats) -> GenerateOutput:
    """The new tokens behind the prompts, padded on the right, and what was kept of each, as `generate` returns it."""
    rows = [torch.tensor(row, dtype=torch.int64) for row in sequences.rows]
    new_BT = pad_sequence(rows, batch_first=True, padding_value=padding).to(input_ids.device, input_ids.dtype)
    scores, logits = (  # per row and round [tokens, V], to one [batch, V] per token
        None if kept is None else pad_sequence([torch.cat(row) for row in kept]).unbind(0)
        for kept in (sequences.scores, sequences.logits)
    )
    return GenerateOutput(
        sequences=torch.cat([input_ids, new_BT], dim=1),
        scores=scores,
        logits=logits,
        stats=stats,
    )


@dataclass(frozen=True)
class Prompts:
    """Token ids [batch, time] and their mask, as they are given to `model.generate`."""

    input_ids: Tensor
    attention_mask: Tensor | None = None


def with_tokenizer(
    target: Target,
    prompts: Prompts,
    settings: dict[str, Any],
    config: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[Prompts, dict[str, Any]]:
    """Prompts and settings after what needs the tokenizer, which `model.generate` hides from decoders of our own.

    Stop strings become a criterion, and tokens are healed. Both may stand in the call, in the config that was given, or
    in the model's own.

    Raises:
        ValueError: no tokenizer was given, and none can be loaded.
    """

    def resolved(name: str) -> Any:
        """A setting as `model.generate` resolves it."""
        if name in settings:
            return settings[name]
        given = getattr(config, name, None)
        return getattr(target.model.generation_config, name, None) if given is None else given

    def needed_for(what: str) -> PreTrainedTokenizerBase:
        if tokenizer is not None:
            return tokenizer
        try:
            return _tokenizer_named(target.name)
        except ValueError as error:
            raise ValueError(f"{what} needs the tokenizer; give generate(..., tokenizer=...)") from error

    settings = dict(settings)
    strings = resolved("stop_strings")
    settings["stop_strings"] = None
    if strings:
        criteria = StoppingCriteriaList(settings.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(needed_for(f"the setting stop_strings={strings!r}"), strings))
        settings["stopping_criteria"] = criteria
    if resolved("token_healing"):
        healed = target.model.heal_tokens(prompts.input_ids, needed_for("the setting token_healing=True"))
        mask = prompts.attention_mask
        if mask is not None and healed.shape != prompts.input_ids.shape:
            raise ValueError(
                f"token_healing made prompts of {healed.shape[1]} tokens out of {prompts.input_ids.shape[1]}, which "
                "attention_mask does not fit: it strips spaces at the ends of a prompt; leave them out"
            )
        prompts, settings["token_healing"] = Prompts(healed, mask), False
    return prompts, settings


@lru_cache(maxsize=4)
def _tokenizer_named(name: str) -> PreTrainedTokenizerBase:
    """`load_tokenizer`, once for all calls that need it."""
    return load_tokenizer(name)


def _padding_token(config: GenerationConfig) -> int:
    """The token after a row's end, as `generate` chooses it: the padding token, else the first end token."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    ends = config.eos_token_id
    if isinstance(ends, Tensor):
        ends = ends.tolist()
    if isinstance(ends, list | tuple):
        return int(ends[0]) if ends else 0
    return 0 if ends is None else int(ends)


def _stopping(criteria: StoppingCriteriaList, max_length: int) -> tuple[frozenset[int], int, list[Callable[..., Any]]]:
    """The EOS tokens, the largest length of padded prompt and new tokens, and the other stopping criteria."""
    tokens: set[int] = set()
    others = []
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            tokens.update(criterion.eos_token_id.tolist())
        elif isinstance(criterion, MaxLengthCriteria):
            max_length = min(max_length, criterion.max_length)
        else:
            others.append(criterion)
    return frozenset(tokens), max_length, others
