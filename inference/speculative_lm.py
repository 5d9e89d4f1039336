"""Speculative decoding for users: `SpeculativeLM.generate`, or plain `model.generate(custom_generate=...)`.

Settings, logits processors and stopping rules are resolved by `model.generate` itself: it calls our loop through its
`custom_generate` hook, so they mean here what they mean there. Rows are decoded without their padding, so that each
gets the tokens that `generate` returns for it alone.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
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
from transformers.utils.generic import ModelOutput

from ..heads import DraftHead
from .compiled import cpu_kernels
from .compiled.cpu_decoder import packed_head
from .drafters.adaptive import AdaptiveDrafter
from .drafters.base import Drafter, NoDraft
from .drafters.by_name import draft_models, load_fitting_head, make_drafter
from .drafters.head_drafter import HeadDrafter
from .kv_cache import check_room
from .logits import RandomSampler, Sampler, TreeLogitsProcessor
from .loop import Decoding, Verification, speculate
from .metrics import Stats
from .models.encoder_decoder import Seq2SeqTarget, is_encoder_decoder
from .models.loading import check_model_options, refuse_loading_options
from .sequences import Conversation, Sequences, Streamer
from .target import Target
from .tuning.costs import RoundCosts, measured_costs
from .tuning.machine import check_threads
from .tuning.tree_spec import TreeSpec
from .verify import choose_rule, greedy

SETTINGS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_")) | {
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
}
"""What `SpeculativeLM.generate` hands on to `model.generate`, which says what each means."""
NOT_RETURNED = ("output_attentions", "output_hidden_states")
"""Settings that ask for an output which the loop does not keep."""


@dataclass
class GenerateOutput(ModelOutput):
    """Output of `SpeculativeLM.generate`: transformers' `GenerateDecoderOnlyOutput` with statistics."""

    sequences: Tensor
    """The prompts as given and what was written after them, padded on the right."""
    scores: tuple[Tensor, ...] | None = None
    """With `output_scores`: the processed scores of each new token, [batch, V]; 0 behind a row's end."""
    logits: tuple[Tensor, ...] | None = None
    """With `output_logits`: the raw logits, likewise."""
    stats: Stats = None  # type: ignore[assignment]  # always given; the base class allows no other default
    """Acceptance and timings."""
    past_key_values: Conversation | None = None
    """What was given, for the next call."""


class SpeculativeLM:
    """A target model and a drafter: `generate` returns the target's own tokens, faster.

    Threads may share it; their generations wait for each other.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, verifier: str = "auto", lossy: bool = False
    ) -> None:
        """Put the parts together; `from_pretrained` loads them.

        Args:
            target: the frozen model.
            drafter: what guesses; None for plain decoding by the same engine.
            verifier: the acceptance rule for sampling, one of `RULES`, or "auto" for the exact one that accepts most.
                Greedy decoding has one rule.
            lossy: agreement that a lossy rule ("typical") may change what is written.

        Raises:
            ValueError: an unknown verifier, or one that does not fit the drafter's trees; feature layers that the
                target does not have.
        """
        self.target = target
        self.drafter: Drafter = drafter or NoDraft()
        self.sampling_rule = Verification(choose_rule(verifier, self.drafter.kind, lossy))
        self.greedy_rule = Verification(greedy, samples=False)
        self.verifier, self.lossy = verifier, lossy
        self.provenance: dict[str, Any] = {}
        """What the head was trained against, as its checkpoint remembers it."""
        self.callbacks: list[Callable[[Stats], None]] = []
        """Called with the statistics of every generation."""
        self.round_callbacks: list[Callable[[Sequences], None]] = []
        """Called after every round with what was written so far; what one of them raises ends the generation."""
        self.listeners, self.round_listeners = self.callbacks, self.round_callbacks  # earlier names
        self._drafter_with: Callable[[TreeSpec], Drafter] | None = None
        """Another drafter of the same head or source, with a tree."""
        self._others: dict[str, SpeculativeLM] = {}
        """What calls asked for that want another tree or rule."""
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
        """Load a target and what drafts for it.

        Args:
            target: see `Target.from_pretrained`; or one that is loaded already.
            head: a checkpoint folder, a Hub id, or a head; None for a drafter that needs none, or for plain decoding.
            dtype: of target and head, where they are loaded here; "auto" for the fastest on this machine of those that
                are right for the model (see `dtypes`), float32 for a GGUF file.
            tree: what `tree_policy` takes, or "auto" for the tree that `headstart tree` found on this machine, or else
                for a chain of one token and dynamic trees of a few sizes, made smaller in batches so that a forward
                does not cost more than it saves. Several with | between them: each round takes the one that has been
                fastest so far.
            verifier: see `__init__`.
            device: of target and head.
            revision: of the target's Hub id.
            head_revision: of the head's Hub id.
            lossy: see `__init__`.
            compile: True for compiled rounds, see the method `compile`; False for none; "auto" for them where they need
                not be waited for, on CPUs.
            drafter: a spec of `drafters.by_name.SPECS`, or a drafter of your own, which may be wrong in any way: the
                output stays the target's. Beside a head, what it looks up is joined with the head's tree.
            fallback: measure plain steps too, and take them where drafts cost more time than they save; see
                `AdaptiveDrafter`. False for drafts in each round: of the tree that is named, of the fastest of several,
                or of the first of those that "auto" would choose from. For a seed, picked trees give one text either
                way; so do drawn ones, of which sampling takes the first that is named each round.
            model_kwargs: see `Target.from_pretrained`.

        Raises:
            ValueError: something that cannot be loaded, or a head or tree that does not fit; named.
        """
        loaded_here = isinstance(target, str | Path)
        check_model_options(model_kwargs)
        if isinstance(target, Target):
            refuse_loading_options(target.dtype, dtype, device, revision, model_kwargs)
        else:
            kind = Seq2SeqTarget if is_encoder_decoder(target, revision, model_kwargs) else Target
            target = kind.from_pretrained(target, dtype, device, revision, **model_kwargs)
        if target.device.type == "cpu":
            check_threads()
        compiled = wanted(compile, target.device)
        if compiled:
            target.compile()
        origin: dict[str, Any] = {}
        ours, metadata = None, None
        if head is not None:
            ours, metadata = load_fitting_head(head, target, head_revision, loaded_here, dtype == "auto")
            origin = metadata.provenance
            ours = ours.to(target.device).eval()
            target.check_layers(ours.feature_layers)
            if compiled and cpu_kernels.serve(target.device):
                ours = packed_head(ours)

        def drafter_with(tree: TreeSpec) -> Drafter:
            return make_drafter(target, drafter, tree, ours, metadata, fallback)

        lm = cls(target, drafter_with(tree), verifier, lossy)
        lm.provenance, lm._drafter_with = origin, drafter_with
        return lm.compile() if compiled else lm

    def compile(self) -> SpeculativeLM:
        """Run plain steps and rounds as fast as this device can, which `compile="auto"` does on CPUs.

        On a CPU target and head run in kernels of our own, which are compiled once for a machine, in seconds, and hold
        a copy of the weights in the shortest format that holds them exactly; weights of the target that change in place
        are copied again. Without a compiler a warning says so and all runs as it is. On an accelerator rounds
        are graphs, made when they are first needed, which takes minutes a process; weights must not change then.
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
        """Do now what the first answer would wait for: build and pack, measure what rounds cost, write a few tokens."""
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
            for each in self.drafter.nested():  # this text says nothing of others
                if isinstance(each, AdaptiveDrafter):
                    each.speeds.clear()
        return self

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        generator: torch.Generator | None = None,
        streamer: Streamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_batch_size: int | None = None,
        tree: TreeSpec | None = None,
        verifier: str | None = None,
        past_key_values: Conversation | None = None,
        **settings: Any,
    ) -> GenerateOutput:
        """Write on, for each row of a batch.

        Args:
            input_ids: prompts, [batch, time]; padded left or right.
            attention_mask: 1 where a token is no padding; None to let transformers infer it from the padding token.
            generation_config: as for `model.generate`.
            generator: source of randomness; None for torch's global one. With top-k trees, and without drafts, the
                random number that decides a token belongs to its row and position: for a seed the text is the same
                whatever was drafted, with any `max_batch_size`. The rules for sampled trees draw anew in each round.
            streamer: gets the tokens of every round as they are accepted; batch size 1 only.
            tokenizer: needed for `stop_strings`.
            max_batch_size: rows that are decoded at the same time; the next one begins where one has ended (continuous
                batching). None for all at once.
            tree: for this call, of the same head or source; see `from_pretrained`. None for the one that was chosen
                there.
            verifier: for this call; see `__init__`. None for the one that was chosen there, or, with a tree of another
                kind than its, "auto".
            past_key_values: what earlier calls have read of the text, whose beginning is then not read again; it is
                changed in place. One row only, and the same `tree`.
            settings: max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id, logits_processor,
                stopping_criteria ... as for `model.generate`. Processors and criteria of your own are asked one row at
                a time, with the row's unpadded tokens.

        Raises:
            ValueError: an empty or too long prompt, a tree or verifier that does not fit, or a setting that is not
                supported; named.
        """
        if tree is not None or verifier is not None:
            other = self._with(tree, verifier)
            return other.generate(
                input_ids,
                attention_mask,
                generation_config,
                generator,
                streamer,
                tokenizer,
                max_batch_size,
                past_key_values=past_key_values,
                **settings,
            )
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(f"input_ids must be [batch, time] with at least one token, not {list(input_ids.shape)}")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}"
            )
        max_batch_size = settings.pop("slots", max_batch_size)  # its earlier name
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, not {max_batch_size}")
        if past_key_values is not None:
            self._check_past(past_key_values, len(input_ids))
        unknown = sorted(set(settings) - SETTINGS)
        if unknown:
            raise ValueError(
                f"generate option {unknown[0]!r} is not supported; choose from {', '.join(sorted(SETTINGS))}"
            )
        if settings.get("max_new_tokens") == 0:
            if streamer is not None:
                streamer.end()
            return GenerateOutput(sequences=input_ids, stats=Stats(rows=[[] for _ in input_ids]))
        with self.target.lock:
            if isinstance(self.target, Seq2SeqTarget):
                settings |= {"encoder_outputs": self.target.encode(input_ids, attention_mask)}
                for model in draft_models(self.drafter):
                    model.encode(input_ids, attention_mask)
            output = self.target.model.generate(
                input_ids,
                attention_mask=attention_mask,
                generation_config=generation_config,
                streamer=streamer,
                custom_generate=self.decoding_method(
                    RandomSampler(generator), streamer, max_batch_size, past_key_values
                ),
                **with_stop_strings(settings, generation_config, tokenizer),
            )
            for model in draft_models(self.drafter):
                model.encoded = None
        assert isinstance(output, GenerateOutput)
        return output

    def stream(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Iterator[list[int]]:
        """Write on after one prompt, round by round; who stops listening ends the generation.

        Args:
            input_ids: see `generate`; one row.
            attention_mask: see `generate`.
            options: all others of `generate` but `streamer`.

        Yields:
            the tokens of a round, as soon as they are accepted.

        Raises:
            ValueError: see `generate`.
        """
        rounds: queue.Queue[list[int] | BaseException | None] = queue.Queue()
        listener = _Listener(rounds)

        def write() -> None:
            try:
                self.generate(input_ids, attention_mask, streamer=listener, **options)
            except _NobodyListens:
                pass
            except BaseException as error:  # for whoever listens
                rounds.put(error)
            finally:
                rounds.put(None)

        writer = threading.Thread(target=write, name="headstart stream", daemon=True)
        writer.start()
        try:
            while (tokens := rounds.get()) is not None:
                if isinstance(tokens, BaseException):
                    raise tokens
                yield tokens
        finally:
            listener.gone = True
            writer.join()

    def _with(self, tree: TreeSpec | None, verifier: str | None) -> SpeculativeLM:
        """The same with another tree or rule; made once for each, so that what is learned of it stays.

        Raises:
            ValueError: a tree or verifier that does not fit, or a tree for a drafter that was made elsewhere.
        """
        key = repr((tree, verifier))
        if key not in self._others:
            drafter = self.drafter
            if tree is not None and self._drafter_with is None:
                raise ValueError(f"tree {tree!r} was given for a drafter that is made already; make it with that tree")
            if tree is not None and self._drafter_with is not None:
                drafter = self._drafter_with(tree)
            same = drafter.kind == self.drafter.kind
            word = verifier or (self.verifier if same else "auto")
            other = copy.copy(self)
            other.drafter, other.verifier = drafter, word
            other.sampling_rule = Verification(choose_rule(word, drafter.kind, self.lossy))
            self._others[key] = other.compile() if self.target.compiled else other
        return self._others[key]

    def chat(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None, **settings: Any) -> Chat:
        """Turns by the tokenizer's chat template, each of which reads only what is new; see `Chat`."""
        return Chat(self, tokenizer, system, **settings)

    def _check_past(self, past: Any, rows: int) -> None:
        """Refuse what cannot be gone on with.

        Raises:
            ValueError: another kind of cache, a batch, or an encoder-decoder.
        """
        if not isinstance(past, Conversation):
            raise ValueError(
                f"past_key_values must be a headstart.inference.Conversation, not a {type(past).__name__}: it keeps "
                "what drafts have read, too"
            )
        if rows > 1:
            raise ValueError(f"past_key_values takes one row, not a batch of {rows}")
        if isinstance(self.target, Seq2SeqTarget):
            raise ValueError("past_key_values of an encoder-decoder cannot be gone on with; leave it out")

    def decoding_method(
        self,
        draw: Sampler,
        streamer: Streamer | None = None,
        max_batch_size: int | None = None,
        past: Conversation | None = None,
    ) -> Callable[..., GenerateOutput]:
        """A function that `model.generate` of this target's model takes as `custom_generate`."""

        def decode(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **inputs: Any,
        ) -> GenerateOutput:
            # transformers passes parameters named here twice, hence the mask among the rest
            mask = inputs.get("attention_mask")
            if isinstance(self.target, Seq2SeqTarget):
                self.target.set_encoder_outputs(inputs["encoder_outputs"], mask)
                for drafting in draft_models(self.drafter):
                    drafting.check_encoder_outputs()
                mask = None  # it is the encoder's
            cached = inputs.get("past_key_values")
            if cached is not None and cached.get_seq_length() > 0:
                raise ValueError(
                    f"past_key_values with {cached.get_seq_length()} tokens cannot be continued here; give the whole "
                    "text, or call SpeculativeLM.generate with a Conversation"
                )
            if inputs.get("inputs_embeds") is not None:
                raise ValueError("inputs_embeds are not supported: drafts are made from tokens; give input_ids")
            with self.target.lock:
                return self._decode(
                    input_ids,
                    mask,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    draw,
                    streamer,
                    max_batch_size,
                    past,
                )

        return decode

    def _decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        draw: Sampler,
        streamer: Streamer | None,
        max_batch_size: int | None,
        past: Conversation | None,
    ) -> GenerateOutput:
        """Check what `model.generate` prepared, run the loop, and put the rows together again."""
        if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            mode = config.get_generation_mode().value.replace("_", " ")
            raise ValueError(f"{mode} is not supported; choose from greedy search, sampling")
        asked = [name for name in NOT_RETURNED if getattr(config, name, None)]
        if asked and config.return_dict_in_generate:
            raise ValueError(f"{asked[0]} is not supported; the output holds sequences, scores, logits and stats")
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"a streamer takes one row, not a batch of {len(input_ids)}")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [row[keep.bool()] for row, keep in zip(input_ids, mask, strict=True)]
        if min(map(len, prompts)) == 0:
            raise ValueError(f"prompt {[len(row) for row in prompts].index(0)} of the batch is all padding")
        paddings = [input_ids.shape[1] - len(prompt) for prompt in prompts]
        score = TreeLogitsProcessor(processors, paddings, min_length_counts_padding=config.min_new_tokens is not None)
        ends, limit, others = _stops(criteria, config.max_length)
        new_tokens, longest = limit - input_ids.shape[1], max(map(len, prompts))
        if longest + new_tokens > self.target.max_positions:
            raise ValueError(
                f"a prompt of {longest} tokens and {new_tokens} new ones do not fit the {self.target.max_positions} "
                f"positions of {self.target.name!r}"
            )
        self.target.refresh()
        together = min(len(prompts), max_batch_size or len(prompts))
        room = longest + new_tokens + self.drafter.max_nodes
        check_room(self._needed(together, room), together, room, self.target.device, self.target.pool)
        full = config.return_dict_in_generate
        keep_scores, keep_logits = bool(full and config.output_scores), bool(full and config.output_logits)
        callbacks = self.round_callbacks
        out = Sequences(
            prompts, new_tokens, ends, others, streamer, keep_scores, keep_logits, max_batch_size, callbacks
        )
        rule = self.sampling_rule if config.do_sample else self.greedy_rule
        rules = Decoding(self.target, rule, score, draw, bool(config.do_sample))
        if past is not None:
            past.belong((self, self.target.version))
        try:
            stats = speculate(rules, self.drafter, out, past)
        except BaseException:
            if past is not None:  # half of something may have been read
                past.forget()
            raise
        for callback in self.callbacks:
            callback(stats)
        if streamer is not None:
            streamer.end()
        padding = config.pad_token_id if config.pad_token_id is not None else min(ends, default=0)
        written = out.padded(padding).to(input_ids.device, input_ids.dtype)
        return GenerateOutput(
            sequences=torch.cat([input_ids, written], dim=1),
            scores=_by_token(out.scores),
            logits=_by_token(out.logits),
            stats=stats,
            past_key_values=past,
        )

    def _needed(self, rows: int, tokens: int) -> dict[str, int]:
        """Bytes that a batch takes, by what they are for."""
        scores = rows * self.drafter.max_nodes * self.target.info.vocab_size
        each = self.target.dtype.itemsize + 3 * max(self.target.dtype.itemsize, 4)  # raw, scores, probabilities, draws
        return {
            "the target's cache": self.target.cache_bytes(rows, tokens),
            "the drafts'": self.drafter.cache_bytes(rows, tokens),
            "logits": scores * each,
        }


class Chat:
    """A conversation by the tokenizer's chat template; each answer reads only the new part of the text.

    chat = lm.chat(tokenizer, max_new_tokens=256)
    print(chat.say("What is speculative decoding?"))
    """

    def __init__(
        self, lm: SpeculativeLM, tokenizer: PreTrainedTokenizerBase, system: str | None = None, **settings: Any
    ) -> None:
        """Begin a conversation.

        Args:
            lm: the model that answers.
            tokenizer: with a chat template.
            system: the system message.
            settings: for every answer, as for `SpeculativeLM.generate`.

        Raises:
            ValueError: a tokenizer without a chat template.
        """
        if not tokenizer.chat_template:
            raise ValueError(f"{type(tokenizer).__name__} has no chat template; give generate the whole text instead")
        self.lm, self.tokenizer, self.settings = lm, tokenizer, settings
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.past = Conversation()

    def say(self, text: str, **settings: Any) -> str:
        """The answer to a message; `settings` are for this one. A call that fails leaves the messages as they were."""
        return "".join(self.stream(text, **settings))

    def stream(self, text: str, **settings: Any) -> Iterator[str]:
        """The answer in pieces, as soon as each is there; an answer that is not read to its end is not recorded."""
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt: Any = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        written: list[int] = []
        told = ""
        rounds = self.lm.stream(
            prompt["input_ids"].to(self.lm.target.device), past_key_values=self.past, **{**self.settings, **settings}
        )
        for tokens in rounds:
            written += tokens
            answer = self._decoded(written)
            if len(answer) > len(told) and not answer.endswith("\ufffd"):  # the bytes of a character may come apart
                yield answer[len(told) :]
                told = answer
        answer = self._decoded(written)
        if len(answer) > len(told):
            yield answer[len(told) :]
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


class _NobodyListens(Exception):
    """A stream was left before its end."""


class _Listener:
    """A streamer that hands tokens to another thread."""

    def __init__(self, rounds: queue.Queue[Any]) -> None:
        self.rounds, self.gone, self._prompt = rounds, False, True

    def put(self, value: Tensor) -> None:
        """Take new tokens; the first ones are the prompt's, as with transformers' streamers."""
        if self.gone:
            raise _NobodyListens
        if not self._prompt:
            self.rounds.put(value.tolist())
        self._prompt = False

    def end(self) -> None:
        """Do nothing: `stream` notices the end."""


def wanted(compile: bool | str, device: torch.device) -> bool:
    """Whether to compile; "auto" does where compiling takes no time.

    Raises:
        ValueError: another word.
    """
    if compile == "auto":
        return cpu_kernels.serve(device)
    if not isinstance(compile, bool):
        raise ValueError(f"compile must be True, False or 'auto', not {compile!r}")
    return compile


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


def _stops(criteria: StoppingCriteriaList, max_length: int) -> tuple[frozenset[int], int, list[Callable[..., Any]]]:
    """The end tokens, the length of the padded prompt with all new tokens, and what must be asked token by token."""
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


def _by_token(rows: list[list[Tensor]] | None) -> tuple[Tensor, ...] | None:
    """Per row and round [tokens, V], to one [batch, V] per token."""
    if rows is None:
        return None
    return pad_sequence([torch.cat(row) for row in rows]).unbind(0)
