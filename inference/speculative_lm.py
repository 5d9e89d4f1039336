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
from dataclasses import dataclass
from functools import cached_property, partial
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
from .compiled import cpu_kernels
from .compiled.cpu_decoder import packed_head
from .drafters.adaptive import AdaptiveDrafter
from .drafters.base import Drafter, NoDraft
from .drafters.by_name import draft_models, load_fitting_head, make_drafter
from .drafters.tree_policies import HeadDrafter
from .kv_cache import free_memory
from .logits import RandomSampler, Sampler, TreeLogitsProcessor
from .loop import Decoding, Verification, speculate
from .models.encoder_decoder import Seq2SeqTarget, is_encoder_decoder
from .models.interface import CACHE_NAMES, filled_cache
from .models.loading import check_model_options, load_tokenizer, refuse_loading_options
from .sequences import Conversation, Sequences
from .stats import Stats
from .target import Target
from .tracing.record import Recorder
from .tracing.trace import Trace, trace_of
from .tuning.costs import RoundCosts, measured_costs
from .tuning.machine import check_threads
from .tuning.tree_spec import TreeSpec
from .verify import choose_rule, greedy, is_lossy

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
        self, target: Target, drafter: Drafter | None = None, verifier: str = "auto", lossy: bool = False
    ) -> None:
        """Put the parts together; `from_pretrained` loads them.

        Args:
            target: the frozen model.
            drafter: proposes draft trees; None for autoregressive decoding by the same engine.
            verifier: the acceptance rule for sampling, one of `RULES`, or "auto" for the exact one that accepts most.
                Greedy decoding has one rule.
            lossy: allow a rule ("typical") that changes the output distribution.

        Raises:
            ValueError: an unknown verifier, or one that does not fit the drafter's trees; feature layers that the
                target does not have.
        """
        self.target = target
        self.drafter: Drafter = drafter or NoDraft()
        self.sampling_rule = Verification(choose_rule(verifier, self.drafter.kind, lossy))
        self.greedy_rule = Verification(greedy)
        self.verifier, self.lossy = verifier, lossy
        self.provenance: dict[str, Any] = {}
        """The target that the head was trained against, from the head's checkpoint."""
        self.callbacks: list[Callable[[Stats], None]] = []
        """Called with the statistics of every generation."""
        self.round_callbacks: list[Callable[[Sequences], None]] = []
        """Called with the sequences so far when prompts have been read, and after every round; an exception ends the
        generation."""
        self.listeners, self.round_listeners = self.callbacks, self.round_callbacks  # earlier names
        self._drafter_with: Callable[[TreeSpec], Drafter] | None = None
        """Makes a drafter of the same head or source with another tree."""
        self._variants: dict[str, SpeculativeLM] = {}
        """By tree and verifier: this model with those of single calls."""
        target.check_layers(self.drafter.feature_layers)

    def __repr__(self) -> str:
        return f"SpeculativeLM({self.target!r}, {self.drafter!r}, verifier={self.verifier!r})"

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel | Target,
        head: str | Path | DraftHead | None = None,
        dtype: torch.dtype | str = "auto",
        tree: TreeSpec = "auto",
        verifier: str = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        head_revision: str | None = None,
        lossy: bool = False,
        compile: bool | str = "auto",
        drafter: str | Drafter | None = None,
        fallback: bool = True,
        **model_kwargs: Any,
    ) -> SpeculativeLM:
        """Load a target and a drafter for it.

        Args:
            target: a source for `Target.from_pretrained`, or a loaded target.
            head: a checkpoint folder, a Hub id, or a head; None for a drafter without a head, or for autoregressive
                decoding.
            dtype: dtype of target and head if they are loaded here; "auto" for the fastest on this machine that keeps
                the model's accuracy (see `dtypes`), float32 for a GGUF file.
            tree: argument of `tree_policy`, or "auto" for the tree that `headstart tree` found on this machine, else a
                chain of one token and dynamic trees of a few sizes, smaller in batches, where each node costs more.
                Of several trees separated by |, each round takes the one that has been fastest so far.
            verifier: see `__init__`, as for `lossy`.
            compile: True to compile the rounds, see the method `compile`; False not to; "auto" to compile where it
                takes no time, on CPUs.
            drafter: a spec of `drafters.by_name.SPECS`, or a drafter of your own, whose errors cannot change the
                output. With a head, its drafts are joined with the head's tree.
            fallback: measure plain steps too, and take them where drafts cost more time than they save; see
                `AdaptiveDrafter`. False to draft in every round: with the given tree, the fastest of several, or the
                first that "auto" would choose from. For a seed, top-k trees give the same text either way; so do
                sampled ones, of which sampling takes the first given one each round.
            model_kwargs: see `Target.from_pretrained`.

        Raises:
            ValueError: names what cannot be loaded, or the head or tree that does not fit.
        """
        loaded_here = isinstance(target, str | Path)
        check_model_options(model_kwargs)
        if isinstance(target, Target):
            refuse_loading_options(target.dtype, dtype, device, revision, model_kwargs)
        else:
            target_class = Seq2SeqTarget if is_encoder_decoder(target, revision, model_kwargs) else Target
            target = target_class.from_pretrained(target, dtype, device, revision, **model_kwargs)
        if target.device.type == "cpu":
            check_threads()
        if compile == "auto":
            compile = cpu_kernels.serve(target.device)
        elif not isinstance(compile, bool):
            raise ValueError(f"compile must be True, False or 'auto', not {compile!r}")
        if compile:
            target.compile()
        loaded_head, metadata = None, None
        if head is not None:
            loaded_head, metadata = load_fitting_head(head, target, head_revision, loaded_here, dtype == "auto")
            loaded_head = loaded_head.to(target.device).eval()
            target.check_layers(loaded_head.feature_layers)
            if compile and cpu_kernels.serve(target.device):
                loaded_head = packed_head(loaded_head)
        drafter_with = partial(make_drafter, target, drafter, head=loaded_head, metadata=metadata, adaptive=fallback)
        lm = cls(target, drafter_with(tree), verifier, lossy)
        lm.provenance, lm._drafter_with = {} if metadata is None else metadata.provenance, drafter_with
        return lm.compile() if compile else lm

    def compile(self) -> SpeculativeLM:
        """Compile plain steps and speculation rounds for this device; `compile="auto"` does so on CPUs.

        On a CPU, target and head run in our own kernels, built once per machine in seconds. They hold a copy of the
        weights in the shortest exact format, renewed when the target's weights change in place. Without a C++ compiler
        a warning is given and nothing changes. On an accelerator, rounds are CUDA graphs, recorded at first use, which
        takes minutes per process; weights must not change afterwards.
        """
        self.target.compile()
        self.drafter.compile()
        for rule in (self.sampling_rule, self.greedy_rule):
            rule.compile(self.target.device)
        return self

    @cached_property
    def costs(self) -> RoundCosts:
        """Cost of rounds on this machine; measured, in about a second, if it is not known."""
        heads = [each.head for each in self.drafter.nested() if isinstance(each, HeadDrafter)]
        return measured_costs(self.target, next((head for head in heads if isinstance(head, DraftHead)), None))

    def warmup(self) -> SpeculativeLM:
        """Build kernels, measure the cost of rounds and generate a few tokens, which the first call would wait for."""
        self.costs  # noqa: B018 - measured now
        callbacks = self.callbacks[:]
        self.callbacks.clear()
        prompt_1T = torch.zeros(1, 2, dtype=torch.int64, device=self.target.device)
        mask_1T, generator = torch.ones_like(prompt_1T), torch.Generator(self.target.device)
        settings: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": [], "pad_token_id": 0}
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
        verifier: str | None = None,
        conversation: Conversation | None = None,
        trace: bool = False,
        **settings: Any,
    ) -> GenerateOutput:
        """Generate a continuation of each row of a batch.

        Args:
            input_ids: prompts [batch, time], padded left or right.
            attention_mask: 1 for tokens, 0 for padding; None to let transformers infer it from the padding token.
            generator: source of randomness; None for torch's global one. With top-k trees, and without drafts, each
                token is sampled by a random number of its row and position: a seed gives the same text whatever was
                drafted, with any `max_batch_size`. The rules for sampled trees draw anew in each round.
            streamer: gets the tokens of every round as they are accepted; batch size 1 only.
            tokenizer: needed for `stop_strings`; for `trace` it is loaded if the target has a name.
            max_batch_size: rows decoded at the same time; a finished row frees its slot for the next one (continuous
                batching). None for all at once.
            tree: tree for this call, of the same head or source; None for the one of `from_pretrained`.
            verifier: acceptance rule for this call; None for the one given at first, or "auto" if `tree` is of another
                kind.
            conversation: KV cache and drafter state of earlier calls, so that their text is not read again; updated
                in place. One row only, and the same `tree` in every call.
            trace: record every round for `GenerateOutput.trace`, a page that plays them; the tokens stay the same. One
                row only.
            settings: max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id, logits_processor,
                stopping_criteria ... as for `model.generate`. Your own processors and criteria are called with one
                row's unpadded tokens at a time.

        Raises:
            ValueError: names an empty or too long prompt, a tree or verifier that does not fit, or an unsupported
                setting.
        """
        max_batch_size = settings.pop("slots", max_batch_size)  # its earlier name
        lm = self if tree is None and verifier is None else self._variant(tree, verifier)
        lm._check_arguments(input_ids, attention_mask, max_batch_size, conversation, settings)
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
        target, models = self.target, draft_models(lm.drafter)
        with target.lock:
            if isinstance(target, Seq2SeqTarget):
                settings |= {"encoder_outputs": target.encode(input_ids, attention_mask)}
                for model in models:
                    model.encode(input_ids, attention_mask)
            output = target.model.generate(
                input_ids,
                attention_mask=attention_mask,
                generation_config=generation_config,
                streamer=streamer,
                custom_generate=lm.decoding_method(
                    RandomSampler(generator), streamer, max_batch_size, conversation, recorder=recorder
                ),
                **with_stop_strings(settings, generation_config, tokenizer),
            )
            for model in models:
                model.encoded = None
        assert isinstance(output, GenerateOutput)
        if recorder is not None and tokenizer is not None:
            prompt_T = input_ids[0] if attention_mask is None else input_ids[0, attention_mask[0].bool()]
            output.trace = trace_of(recorder, output.stats, prompt_T.tolist(), tokenizer)
        return output

    def _check_arguments(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_batch_size: int | None,
        past: Any,
        settings: dict[str, Any],
    ) -> None:
        """Refuse arguments of `generate` that cannot be decoded."""
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(f"input_ids must be [batch, time] with at least one token, not {list(input_ids.shape)}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}"
            )
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        if past is not None and not isinstance(past, Conversation):
            raise ValueError(
                f"conversation must be a headstart.inference.Conversation, not a {type(past).__name__}: it keeps what "
                "drafts have read, too"
            )
        if past is not None and len(input_ids) > 1:
            raise ValueError(f"conversation takes one row, not a batch of {len(input_ids)}")
        if past is not None and isinstance(self.target, Seq2SeqTarget):
            raise ValueError("a conversation with an encoder-decoder cannot be continued; leave it out")
        for name in CACHE_NAMES:
            if name in settings:
                raise ValueError(
                    f"generate takes no {name!r}: give the whole text, and conversation=Conversation() so that later "
                    "calls read only what is new"
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

    def _variant(self, tree: TreeSpec | None, verifier: str | None) -> SpeculativeLM:
        """This model with another tree or rule; made once for each, so that measured speeds are kept."""
        key = repr((tree, verifier))
        if key not in self._variants:
            drafter = self.drafter
            if tree is not None:
                if self._drafter_with is None:
                    raise ValueError(
                        f"tree {tree!r} was given for a drafter that is made already; make it with that tree"
                    )
                drafter = self._drafter_with(tree)
            name = verifier or (self.verifier if drafter.kind == self.drafter.kind else "auto")
            variant = copy.copy(self)
            variant.drafter, variant.verifier = drafter, name
            variant.sampling_rule = Verification(choose_rule(name, drafter.kind, self.lossy))
            self._variants[key] = variant.compile() if self.target.compiled else variant
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
                target.set_encoder_outputs(inputs["encoder_outputs"], mask)
                for draft_model in draft_models(self.drafter):
                    draft_model.check_encoder_outputs()
                mask = None  # it is the encoder's
            _check_prepared(config, inputs, streamer, len(input_ids))
            prompts = _without_padding(input_ids, mask)
            if config.do_sample and is_lossy(self.verifier):
                _warn_of_equal_answers(self.verifier, prompts)
            paddings = [input_ids.shape[1] - len(prompt) for prompt in prompts]
            process_logits = TreeLogitsProcessor(
                logits_processor, paddings, min_length_counts_padding=config.min_new_tokens is not None
            )
            eos_token_ids, max_length, other_criteria = _stopping(stopping_criteria, config.max_length)
            new_tokens, full = max_length - input_ids.shape[1], config.return_dict_in_generate
            with target.lock:
                if target.compiled:
                    target.compile()  # again, if weights or active adapters have changed
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
                rule = self.sampling_rule if config.do_sample else self.greedy_rule
                decoding = Decoding(target, rule, process_logits, sampler)
                if past is not None and past.owner != (self, target.version):
                    past.forget()
                    past.owner = (self, target.version)
                try:
                    decoded = speculate if recorder is None else recorder.speculate
                    stats = decoded(decoding, self.drafter, sequences, past)
                except BaseException:
                    if past is not None:  # its state may be half updated
                        past.forget()
                    raise
                for callback in self.callbacks:
                    callback(stats)
            if streamer is not None:
                streamer.end()
            padding = min(eos_token_ids, default=0) if config.pad_token_id is None else config.pad_token_id
            output = _output(input_ids, sequences, padding, stats)
            return output if always_output or full else output.sequences

        return decode

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
        new_tokens: list[int] = []
        answer = yielded = ""
        rounds = self.lm.stream(
            prompt["input_ids"].to(self.lm.target.device), conversation=self.past, **{**self.settings, **settings}
        )
        for tokens in rounds:
            new_tokens += tokens
            answer = str(self.tokenizer.decode(new_tokens, skip_special_tokens=True))
            if len(answer) > len(yielded) and not answer.endswith("\ufffd"):  # a round may end within a character
                yield answer[len(yielded) :]
                yielded = answer
        if len(answer) > len(yielded):
            yield answer[len(yielded) :]
        self.messages = [*messages, {"role": "assistant", "content": answer}]


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


def _without_padding(input_ids: Tensor, mask: Tensor | None) -> list[Tensor]:
    """The prompts of a batch, int64 [batch, T], each [its length]; a ValueError where one has no token."""
    mask = torch.ones_like(input_ids) if mask is None else mask
    prompts = [row[attended.bool()] for row, attended in zip(input_ids, mask, strict=True)]
    if 0 in (lengths := [*map(len, prompts)]):
        raise ValueError(f"prompt {lengths.index(0)} of the batch is all padding")
    return prompts


def _warn_of_equal_answers(verifier: str, prompts: list[Tensor]) -> None:
    """Warn if one prompt is to get several answers by a rule that draws nothing."""
    different = len({tuple(prompt.tolist()) for prompt in prompts})
    if different < len(prompts):
        warnings.warn(
            f"the verifier {verifier!r} draws no random numbers: equal prompts get equal answers ({different} "
            f"different prompts in {len(prompts)} rows); for samples that differ, choose the verifier 'auto'",
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


def with_stop_strings(
    settings: dict[str, Any], config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """Settings whose stop strings are a criterion: `model.generate` hides the tokenizer from decoders of our own."""
    criteria = StoppingCriteriaList(settings.get("stopping_criteria") or [])
    strings = settings.get("stop_strings") or getattr(config, "stop_strings", None)
    if strings:
        if tokenizer is None:
            raise ValueError(f"stop_strings {strings!r} need the tokenizer; give generate(..., tokenizer=...)")
        criteria.append(StopStringCriteria(tokenizer, strings))
    return {**settings, "stopping_criteria": criteria, "stop_strings": None}


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
