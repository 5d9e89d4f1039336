"""Speculative decoding by `SpeculativeLM.generate` or plain `model.generate(custom_generate=...)`.

`model.generate` itself resolves settings, logits processors and stopping criteria and calls our
loop through its `custom_generate` hook, so they keep their meaning. Rows are decoded without their
padding, so that each gets the tokens that `generate` returns for it alone.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..heads.base import DraftHead
from ..options import by_new_names
from .drafters.adaptive import AdaptiveDrafter
from .drafters.base import BatchDrafter, Drafter, NoDraft
from .drafters.by_name import DrafterSource, assistants
from .drafters.costs import measured_costs
from .drafters.history import HistoryDrafter
from .drafters.tree_policies import model_states
from .drafters.validated import validated
from .drafting import Drafting, drafting_for
from .engines.encoder_decoder import Seq2SeqTarget, is_encoder_decoder
from .engines.target import Target
from .head_loading import check_configs, load_fitting_head, merge_adapter_of
from .inputs import (
    Stopping,
    check_conversation,
    check_prepared,
    check_settings,
    check_size,
    inputs_of_prompt,
    padding_token,
    prompts_of,
    shown_to_encoders,
    warn_of_equal_answers,
    with_tokenizer,
    without_padding,
)
from .output import GenerateDictOutput, GenerateOutput, collected
from .rounds.loop import speculate
from .rounds.observers import DecodingCall, RoundObserver
from .rounds.sequences import Conversation, Sequences
from .running import alone, runs
from .targets.adapters import unwrapped
from .targets.as_loaded import as_loaded, warn_of_autocast
from .targets.loading import model_options, refuse_loading_options
from .targets.prompt_inputs import is_prompt_input
from .text.chat import Chat
from .text.streaming import streamed
from .trees.logits import TreeLogitsProcessor
from .trees.sampling import RandomSampler
from .trees.stats import Stats
from .trees.tree_spec import TreeSpec
from .trees.verify import AcceptanceRule, check_rule_name, greedy, is_lossy, top_down_rule
from .tuning.machine import check_threads
from .tuning.round_costs import RoundCosts

KEPT_OF_CALLS = 8
"""Draftings of single calls that are kept, with what was measured and recorded for them."""


@dataclass(frozen=True)
class Call:
    """One call of `generate`, besides the prompts and the settings that transformers resolves."""

    sampler: RandomSampler
    streamer: BaseStreamer | None = None
    max_batch_size: int | None = None
    past: Conversation | None = None
    as_transformers: bool = False
    """Whether to return what transformers' own decoding methods do: the sequences, or a
    `GenerateDictOutput` if `return_dict_in_generate` asks for it."""
    drafting: Drafting | None = None
    """What drafts in this call; None for what the decoder drafts with when the call's turn
    comes."""


class SpeculativeLM:
    """A target model and a drafter: `generate` returns the target's own tokens, faster.

    Threads may share it; their generations run one after the other.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        acceptance: str = "auto",
        lossy: bool = False,
    ) -> None:
        """Put the parts together; `from_pretrained` loads them.

        Args:
            target: the frozen model.
            drafter: proposes draft trees; None for autoregressive decoding by the same engine.
            acceptance: the acceptance rule for sampling, one of `RULES`, or "auto" for the exact
                one that accepts most. Greedy decoding has one rule.
            lossy: allow a rule ("typical") that changes the output distribution.

        Raises:
            ValueError: an unknown acceptance rule, or one that does not fit the drafter's trees;
                feature layers that the target does not have.
        """
        self.target = target
        self.observers: list[RoundObserver] = []
        """What watches every generation, see `RoundObserver`."""
        plan = NoDraft() if drafter is None else validated(drafter, target.info.vocab_size)
        target.check_layers(plan.feature_layers)
        self.drafting = Drafting(plan, acceptance, lossy)
        """What drafts, replaced as a whole."""
        self._drafting_by: Callable[[DraftHead | None], Drafting] | None = None
        """Makes what drafts by a head; None for a drafter that was given."""
        self._of_calls: OrderedDict[str, Drafting] = OrderedDict()
        """By tree and acceptance rule: what drafts in single calls that name them, the most
        recently used one last."""

    def __repr__(self) -> str:
        return (
            f"SpeculativeLM({self.target!r}, {self.drafter!r},"
            f" acceptance={self.drafting.acceptance!r})"
        )

    @property
    def drafter(self) -> BatchDrafter:
        """Proposes draft trees."""
        return self.drafting.drafter

    @property
    def head(self) -> DraftHead | None:
        """The head that drafts, which `use_head` replaces; None if there is none."""
        return self.drafting.head

    @property
    def device(self) -> torch.device:
        """The target's device, for inputs: `inputs.to(lm.device)`."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.target.dtype

    @property
    def config(self) -> PreTrainedConfig:
        """The target model's config."""
        return self.target.model.config

    @property
    def generation_config(self) -> GenerationConfig:
        """The target model's defaults for generations."""
        return self.target.model.generation_config

    @property
    def provenance(self) -> dict[str, Any]:
        """The target that the head was trained against, from the head's checkpoint."""
        return self.drafting.provenance

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
        adaptive: bool = True,
        allow_adapter: bool = False,
        **model_kwargs: Any,
    ) -> SpeculativeLM:
        """Load a target and a drafter for it.

        Args:
            target: a source for `Target.from_pretrained`, or a loaded target.
            head: a checkpoint folder, a Hub id, or a head; None for a drafter without a head, or
                for autoregressive decoding.
            dtype: dtype of target and head if they are loaded here; "auto" for the checkpoint's
                own, "fastest" for the fastest one on this machine that is as exact (see `dtypes`),
                float32 for a GGUF file.
            tree: argument of `tree_policy`, or "auto" for the tree that `headstart tree` found on
                this machine, else a chain of one token and dynamic trees of a few sizes, smaller in
                batches, where each node costs more. Of several trees, in a list or separated by |,
                each round takes the one that has been fastest so far.
            acceptance: the acceptance rule for sampling, one of `RULES`, or "auto" for the exact
                one that accepts most. Greedy decoding has one rule.
            device_map: see `Target.from_pretrained`.
            revision: revision of the target's Hub id.
            head_revision: revision of the head's Hub id.
            lossy: allow a rule ("typical") that changes the output distribution.
            compile: how forwards run, see the method `compile`: True for our kernels on a CPU and
                CUDA graphs on a GPU, False for transformers' own operations.
            drafter: a drafter without a head: `History()`, a smaller model, or one of them as a
                command line writes it, see `drafters.specs.SPECS`; or a drafter of your own, whose
                errors cannot change the output. Beside a head, a history: in each round and row,
                whichever expects more accepted tokens drafts.
            adaptive: measure plain steps too, and take them where drafts cost more time than they
                save; see `AdaptiveDrafter`. Beside a head, a `History()` then drafts where the text
                repeats what came before. False to draft in every round, by the head alone: with
                the given tree, the fastest of several, or the first that "auto" would choose from.
                A seed gives the same text either way: sampling from sampled trees always uses the
                first one.
            allow_adapter: merge the LoRA adapter that the head's checkpoint brings, if it brings
                one, into the target, which then writes different text; a loaded model
                is changed in place. Without it such a head is refused.
            model_kwargs: see `Target.from_pretrained`.

        Raises:
            ValueError: names what cannot be loaded, or the head or tree that does not fit.
        """
        # 1. What can be refused before weights are read.
        model_kwargs = by_new_names(model_kwargs)
        adaptive = model_kwargs.pop("adaptive", adaptive)
        dtype = model_kwargs.pop("dtype", dtype)
        dtype_was_named = dtype != "fastest" or not isinstance(target, str | Path)
        check_rule_name(acceptance)
        flags = {
            "lossy": lossy,
            "compile": compile,
            "adaptive": adaptive,
            "allow_adapter": allow_adapter,
        }
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, not {flag!r}")
        ours = [
            name for name in signature(cls.from_pretrained).parameters if name != "model_kwargs"
        ]
        model_kwargs = model_options(model_kwargs, ours)
        if isinstance(target, str | Path) and isinstance(head, str | Path):
            check_configs(head, head_revision, target, revision, model_kwargs)
        # 2. The target. Trying it now reports a model that cannot decode here before a head is
        #    loaded.
        if isinstance(target, Target):
            refuse_loading_options(target.dtype, dtype, device_map, revision, model_kwargs)
        else:
            source = unwrapped(target)
            target_class = Target
            if is_encoder_decoder(source, revision, model_kwargs):
                target_class = Seq2SeqTarget
            target = target_class.from_pretrained(
                source, dtype, device_map, revision, **model_kwargs
            )
        target.check_decoding()
        if target.device.type == "cpu":
            check_threads()

        # 3. The head, in the target's dtype. Its adapter, if it has one, changes the target.
        loaded_head = None
        if head is not None:
            loaded_head = load_fitting_head(head, target, head_revision, dtype_was_named)
            target.check_layers(loaded_head.feature_layers)
            merge_adapter_of(loaded_head, target, allow_adapter)
            loaded_head = loaded_head.to(target.device).eval()
        # 4. What drafts. Kernels may copy the target's weights, and the cost of rounds may be
        #    measured, so the model must be in the state in which it was loaded.
        lm = cls(target)
        lm._drafting_by = partial(
            drafting_for, target, drafter, tree, adaptive, compile, acceptance, lossy
        )
        with as_loaded(target.model):
            if compile:
                target.compile()
            lm.drafting = lm._drafting_by(loaded_head)
        return lm

    def compile(self, mode: bool = True) -> SpeculativeLM:
        """Speed up plain steps and speculation rounds on this device.

        `from_pretrained` does so by default.

        On a CPU, target and head run in our own kernels, built once per machine in seconds. They
        hold a copy of the weights in the shortest exact format. The copy is renewed when the
        weights change: every call compares a few elements of each tensor. Call `refresh` after a
        change that this may miss. Without a C++ compiler a warning is given and nothing changes.

        On a GPU with CUDA, the operations of rounds are recorded as CUDA graphs at their second
        call, in as little time as that takes, and read the weights where they lie.
        """
        with as_loaded(self.target.model):
            self.target.compile(mode)
        for state in model_states(self.drafter):
            state.use(self.target.engine)
        return self

    def refresh(self) -> SpeculativeLM:
        """Copy the weights of target, head and draft model again.

        Conversations read their text again.

        Needed on a CPU only after a change that each call's comparison of sampled weights cannot
        see: a write through `.data` to a few rows of an embedding or LM head, or to so few elements
        that none of the sampled ones differs. On a GPU weights are read where they lie; call it
        before a conversation goes on after any write through `.data`.
        """
        with self.target.lock:
            self.target.refresh()
            for drafting in (self.drafting, *self._of_calls.values()):
                for state in model_states(drafting.drafter):
                    state.renew(force=True)
        return self

    def use_head(self, head: str | Path | DraftHead, revision: str | None = None) -> None:
        """Draft with another head from the next generation on, such as an adapted one.

        Waits for a generation that runs in another thread. The tree is again that of
        `from_pretrained`; "auto" is chosen for the new head. Conversations go on, and their text is
        read again. Tokens stay the target's.

        old = lm.head
        lm.use_head("adapted/best")
        lm.use_head(old)  # and back

        Args:
            head: a checkpoint folder, a Hub id, or a head.
            revision: revision of the head's Hub id.

        Raises:
            ValueError: a decoder without a head, a head that does not fit the target, the tree or
                the rule, or one that brings an adapter; nothing has changed then. Also a call
                inside a generation.
        """
        target = self.target
        if self._drafting_by is None or self.head is None:
            raise ValueError(
                "use_head needs a decoder with a head: SpeculativeLM.from_pretrained(target,"
                " head=...)"
            )
        if runs(target):
            raise ValueError(
                "use_head was called inside a generation with the same target; call it afterwards"
            )
        with target.lock, as_loaded(target.model):
            # 1. Everything that may be refused.
            new = load_fitting_head(head, target, revision)
            target.check_layers(new.feature_layers)
            merge_adapter_of(new, target, allowed=False)
            drafting = self._drafting_by(new.to(target.device).eval())
            # 2. Forget what was recorded for the old head and for trees of single calls: it holds
            #    them and their caches.
            self._of_calls = OrderedDict()
            target.engine.runner.forget()
            # 3. The new one takes the old one's place.
            self.drafting = drafting

    @property
    def costs(self) -> RoundCosts:
        """Cost of rounds on this machine; measured, in about a second, if it is not known."""
        with self.target.lock, as_loaded(self.target.model):
            return measured_costs(self.target, self.drafting.head_in_engine)

    def warmup(self) -> SpeculativeLM:
        """Do in advance what the first call would wait for.

        This builds kernels, measures the cost of rounds and generates a few tokens.
        """
        self.costs  # noqa: B018 - measured now
        # A shallow copy: it shares everything except the observers.
        unobserved = copy.copy(self)
        unobserved.observers = []
        prompt_1T = torch.zeros(1, 2, dtype=torch.int64, device=self.target.device)
        settings: dict[str, Any] = {
            "attention_mask": torch.ones_like(prompt_1T),
            "generator": torch.Generator(self.target.device),
            "max_new_tokens": 4,
            "eos_token_id": [],
            "pad_token_id": 0,
            "stop_strings": None,
        }
        with self.target.lock:
            for sampling in (False, True):
                unobserved.generate(prompt_1T, do_sample=sampling, **settings)
            # Speeds on this text predict nothing.
            for drafter in self.drafter.nested():
                if isinstance(drafter, AdaptiveDrafter):
                    drafter.records.clear()
        self.forget()
        return self

    def forget(self) -> None:
        """Forget the texts of earlier calls, in which a `History` looks for drafts."""
        with self.target.lock:
            for drafting in (self.drafting, *self._of_calls.values()):
                for drafter in drafting.drafter.nested():
                    if isinstance(drafter, HistoryDrafter):
                        drafter.forget()

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

        Arguments that transformers' `generate` also has mean the same here, and are in the same
        order.

        Args:
            inputs: prompts [batch, time], int64 or int32, padded left or right.
            generation_config: settings; those given by name take precedence.
            logits_processor: your own processors, as for `stopping_criteria` and
                `prefix_allowed_tokens_fn`: called as `model.generate` calls them for one row alone,
                after each token, with the row's unpadded tokens.
            stopping_criteria: your own criteria.
            prefix_allowed_tokens_fn: the tokens that are allowed next.
            input_ids: another name of `inputs`, so that a tokenizer's output can be unpacked:
                generate(**inputs).
            attention_mask: 1 for tokens, 0 for padding, [batch, time]; None to let transformers
                infer it from the padding token.
            generator: source of randomness; None for torch's global one. With top-k trees, and
                without drafts, each token is sampled by a random number of its row and position: a
                seed gives the same text whatever was drafted, with any `max_batch_size`. The rules
                for sampled trees draw anew in each round.
            streamer: gets the tokens of every round as they are accepted; batch size 1 only.
            tokenizer: needed for `stop_strings` and `token_healing`, also where the model's
                generation config asks for them; loaded if the target has a name.
            max_batch_size: rows decoded at the same time; a finished row frees its slot for the
                next one (continuous batching). None for all at once.
            tree: tree for this call, of the same head or source; None for the one of
                `from_pretrained`.
            acceptance: acceptance rule for this call; None for the one given at first, or "auto" if
                `tree` is of another kind.
            past_key_values: KV cache and drafter state of earlier calls, so that their text is not
                read again; updated in place. One row only, and the same `tree` in every call.
            settings: max_new_tokens, do_sample, temperature, top_k, top_p, eos_token_id ... as for
                `model.generate`. Also what a processor returned besides token ids (pixel_values,
                image_grid_thw ...), of one row: the target reads the prompt with it.

        Returns:
            the prompts followed by the new tokens, with statistics. It can be indexed like the
            tensor [batch, time] that `model.generate` returns.

        Raises:
            ValueError: names an empty or too long prompt, a tree or acceptance rule that does not
                fit, or an unsupported setting.
        """
        # 1. Check what transformers does not know: it would fail later, or silently ignore it.
        prompts = prompts_of(inputs, input_ids, attention_mask)
        rows = len(prompts.input_ids)
        if max_batch_size is not None and (type(max_batch_size) is not int or max_batch_size < 1):
            raise ValueError(f"max_batch_size must be an int of at least 1, not {max_batch_size!r}")
        check_conversation(past_key_values, rows, self.target)
        # Images and the like are inputs of the model, not settings.
        extra = {
            name: settings.pop(name) for name in [*settings] if is_prompt_input(self.target, name)
        }
        check_settings(settings, generation_config)
        # Only what was given: the others keep the defaults of `model.generate`.
        arguments = {
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        }
        settings |= {name: value for name, value in arguments.items() if value is not None}
        new_tokens = settings.get("max_new_tokens")
        # transformers refuses 0, which here gives the prompts back.
        if type(new_tokens) is int and new_tokens == 0:
            if streamer is not None:
                streamer.end()
            return GenerateOutput(prompts.input_ids, Stats(rows=[[] for _ in range(rows)]))

        # 2. `model.generate` resolves the settings and calls `_decode` with what it has prepared.
        target = self.target
        warn_of_autocast(target.model)
        with target.lock, as_loaded(target.model):
            drafting = self._for_call(tree, acceptance)
            call = Call(
                RandomSampler(generator),
                streamer,
                max_batch_size,
                past_key_values,
                drafting=drafting,
            )
            prompts, settings = with_tokenizer(
                target, prompts, settings, generation_config, tokenizer
            )
            with shown_to_encoders(target, drafting.drafter, prompts) as encoded:
                output = target.model.generate(
                    prompts.input_ids,
                    attention_mask=prompts.attention_mask,
                    generation_config=generation_config,
                    streamer=streamer,
                    custom_generate=self.decoding_method(call),
                    **settings,
                    **encoded,
                    **extra,
                )
        assert isinstance(output, GenerateOutput)
        return output

    def stream(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        **options: Any,
    ) -> Iterator[list[int]]:
        """Generate a continuation of one prompt; closing the iterator ends the generation.

        Takes all options of `generate` but `streamer`.

        Yields:
            The tokens of a round, as soon as they are accepted.
        """
        if runs(self.target):
            raise ValueError(
                "stream was called inside a generation with the same target (by a callback, a"
                " streamer, a processor or a criterion), which would wait for its own end; call"
                " generate there, or stream afterwards"
            )
        yield from streamed(partial(self.generate, inputs, generation_config, **options))

    def chat(
        self, tokenizer: PreTrainedTokenizerBase, system: str | None = None, **settings: Any
    ) -> Chat:
        """Return a `Chat` by the tokenizer's chat template, whose turns read only new tokens."""
        return Chat(self, tokenizer, system, **settings)

    def custom_generate(
        self, generator: torch.Generator | None = None, streamer: BaseStreamer | None = None
    ) -> Callable[..., Tensor | GenerateOutput | GenerateDictOutput]:
        """Return a decoding method for plain `model.generate(..., custom_generate=...)`.

        It belongs to this decoder and works with its model only.

        Unlike the function `custom_generate`, it follows `use_head` and is watched by `observers`.
        It serves code that calls `model.generate` itself, such as a trainer's rollouts:

        model.generate = functools.partial(model.generate, custom_generate=lm.custom_generate())

        Args:
            generator: source of randomness; None for torch's global one.
            streamer: gets the tokens of every round; transformers does not pass its own to a custom
                decoding method.

        Returns:
            a function that returns the sequences, or with `return_dict_in_generate` a
            `GenerateDictOutput`.
        """
        call = Call(RandomSampler(generator), streamer, as_transformers=True)
        return self.decoding_method(call)

    def decoding_method(
        self, call: Call
    ) -> Callable[..., Tensor | GenerateOutput | GenerateDictOutput]:
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

        `model.generate` passes a parameter that is named here twice, so the attention mask is among
        the other inputs.
        """
        # 1. Refuse what this loop does not support.
        target = self.target
        if model is not target.model:
            raise ValueError(
                f"this decoding method is of another {type(target.model).__name__} than the one"
                " whose generate was called; make one for this model:"
                " SpeculativeLM.from_pretrained(model, ...).custom_generate()"
            )
        config = generation_config
        check_prepared(config, inputs, call.streamer, len(input_ids))
        warn_of_autocast(target.model)
        # 2. The prompts without their padding. An encoder-decoder's mask belongs to its encoder:
        #    what is decoded begins with the same start token in every row.
        mask = None
        prompt_inputs = None
        if not isinstance(target, Seq2SeqTarget):
            mask = inputs.get("attention_mask")
            prompt_inputs = inputs_of_prompt(inputs, input_ids, mask, call.past, target)
        prompts = without_padding(input_ids, mask, target)
        process_logits = TreeLogitsProcessor(
            logits_processor,
            [input_ids.shape[1] - len(prompt) for prompt in prompts],
            min_length_counts_padding=config.min_new_tokens is not None,
        )
        # 3. Where rows end. A length counts the padded prompt: rows get equally many new tokens.
        stopping = Stopping.of(stopping_criteria, config.max_length)
        new_tokens = stopping.max_length - input_ids.shape[1]
        # 4. How many rows are decoded together: one where their positions lie in different
        #    segments, or where the engine reads one row only.
        together = call.max_batch_size
        lengths = [len(prompt) for prompt in prompts]
        if target.segments and not target.segments.together(lengths, new_tokens):
            target.check_border(lengths, new_tokens)
            together = 1
        if target.engine.one_row:
            together = 1
        keep = bool(config.return_dict_in_generate)
        # 5. From here on no other generation uses the target. The drafter is the one of the call's
        #    turn, since `use_head` may have been called meanwhile.
        with alone(target, call.past, lambda: (call.drafting or self.drafting).drafter) as drafter:
            drafting = call.drafting or self.drafting
            if config.do_sample and is_lossy(drafting.acceptance):
                warn_of_equal_answers(drafting.acceptance, prompts)
            if isinstance(target, Seq2SeqTarget):
                target.set_encoder_outputs(inputs["encoder_outputs"], inputs.get("attention_mask"))
                for draft_model in assistants(drafter):
                    if isinstance(draft_model, Seq2SeqTarget):
                        draft_model.check_encoder_outputs()
            target.check_decoding()
            # Weights that changed since the last call are copied again, where copies compute.
            target.renew()
            for state in model_states(drafter):
                state.use(target.engine)
                state.renew()
            check_size(target, drafter, prompts, new_tokens, together)
            # 6. Decode.
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
            decoding_call = DecodingCall(
                target,
                drafter,
                _rule(drafting, bool(config.do_sample), process_logits),
                process_logits,
                call.sampler,
                sequences,
                call.past,
                prompt_inputs,
                observers=tuple(self.observers),
            )
            stats = self._speculate(decoding_call, drafting)
        # 7. The output, in the form that was asked for.
        if call.streamer is not None:
            call.streamer.end()
        output = collected(input_ids, sequences, padding_token(config), stats)
        if not call.as_transformers:
            return output
        if not keep:
            return output.sequences
        return GenerateDictOutput.of(output)

    def _speculate(self, call: DecodingCall, drafting: Drafting) -> Stats:
        """Run the loop; a conversation that it leaves half updated is forgotten."""
        past = call.past
        if past is None:
            return speculate(call)
        # A cache that another head, tree or version of the weights has filled cannot go on.
        owner = (drafting, self.target.version)
        if past.owner != owner:
            past.forget()
            past.owner = owner
        try:
            return speculate(call)
        except BaseException:
            past.forget()
            raise

    def _for_call(self, tree: TreeSpec | None, acceptance: str | None) -> Drafting:
        """Return what drafts in a call that may name a tree or a rule.

        It is kept, with its measured speeds, for the next such call.
        """
        if tree is None and acceptance is None:
            return self.drafting
        key = repr((tree, acceptance))  # a tree may be a list, which no dict takes as a key
        if key not in self._of_calls:
            self._of_calls[key] = self.drafting.for_call(tree, acceptance)
        self._of_calls.move_to_end(key)
        if len(self._of_calls) > KEPT_OF_CALLS:
            self._of_calls.popitem(last=False)
            self.target.engine.runner.forget()  # its recordings hold the drafter and its cache
        return self._of_calls[key]


def _rule(
    drafting: Drafting, sampling: bool, process_logits: TreeLogitsProcessor
) -> AcceptanceRule:
    """A generation's acceptance rule: top-down where processors keep a state."""
    if not sampling:
        return greedy
    if process_logits.one_by_one:
        return top_down_rule(drafting.acceptance, drafting.drafter.kind)
    return drafting.sampling_rule
