"""Filling a folder with all states of a run and its evaluations, for `headstart features`."""

from __future__ import annotations

from accelerate import Accelerator

from ...console import log
from ...inference.feature_cache import FeatureCache, key_of
from ...inference.probe import probe_text
from ...inference.replay import BEYOND
from ..config import TrainConfig
from ..data.chat_template import Example
from ..engines import all_agree, from_main
from ..evaluate import eval_prompts, judged
from ..inputs import Inputs
from .by_mode import check_source, import_states, normed
from .online import CachedFeatures
from .sources import OpenSource
from .stored import PROBE_TOKENS, answer_path, write_answer


def fill_folder(
    config: TrainConfig,
    accelerator: Accelerator,
    inputs: Inputs,
    cache: FeatureCache,
    outside: OpenSource | None = None,
) -> None:
    """Write what a folder lacks for `features.mode stored`; processes share the work.

    The target computes the states, or the source from `outside` has them.

    Raises:
        ValueError: a source without these states, or a full disk.
        Stopped: Ctrl-C or SIGTERM; the same command resumes.
    """
    held_out = judged(inputs.held_out, config.eval)
    if outside is not None:
        _from_source(config, accelerator, inputs, cache, held_out, outside)
        return
    # 1. The conversations.
    cached = CachedFeatures(inputs.target, inputs.head, cache, accelerator)
    cached.write(accelerator, inputs.training)
    cached.write(accelerator, held_out)

    # 2. The texts that evaluations replay: the probe's, and the target's answers to prompts.
    probe = probe_text(inputs.target.info.vocab_size, PROBE_TOKENS).tolist()
    texts = [probe]
    if inputs.replay is None:
        log.info(
            "the target is sharded: evaluations without it will replay the conversations' own"
            " answers"
        )
    else:
        prompts = eval_prompts(inputs.target, held_out, config.eval)
        if accelerator.is_main_process:
            inputs.replay.learn(prompts, config.eval.max_new_tokens)
            texts += [inputs.replay.texts[tuple(prompt.tolist())].tolist() for prompt in prompts]
        texts = from_main(accelerator, texts)
    cached.write(accelerator, [Example(text, [True] * len(text)) for text in texts])

    # 3. The answers come after their states: an answer that is listed can be replayed.
    if inputs.replay is not None and accelerator.is_main_process:
        for prompt, text in zip(prompts, texts[1:], strict=True):
            write_answer(cache.folder, prompt.tolist(), text)
    accelerator.wait_for_everyone()


def _from_source(
    config: TrainConfig,
    accelerator: Accelerator,
    inputs: Inputs,
    cache: FeatureCache,
    held_out: list[Example],
    outside: OpenSource,
) -> None:
    """Copy a source's states, and if it answers, those of answers to the prompts of evaluations."""
    # 1. Has the source all of them?
    target = inputs.target
    source = outside(target.info, cache.layers)
    check_source(source, accelerator, target, held_out)

    # 2. The conversations.
    import_states(accelerator, cache, source, target, inputs.head, inputs.training)
    import_states(accelerator, cache, source, target, inputs.head, held_out)
    if not source.greedy:
        return

    # 3. The texts that evaluations replay, as in `fill_folder`.
    def ask() -> None:
        if not accelerator.is_main_process:
            return
        examples = {tuple(example.prompt): example for example in held_out}
        for prompt_T in eval_prompts(target, held_out, config.eval):
            prompt = prompt_T.tolist()
            if answer_path(cache.folder, prompt).exists():  # of an earlier start
                continue
            room = target.max_positions - len(prompt)
            new_tokens = min(config.eval.max_new_tokens + BEYOND, room)
            text_T, (states_TLD, _) = source.answer(examples[tuple(prompt)], new_tokens)
            cache.add(key_of(text_T), normed(source, target, states_TLD))
            # The states first: an answer that is listed can be replayed.
            cache.flush()
            write_answer(cache.folder, prompt, text_T.tolist())
        probe_T = probe_text(target.info.vocab_size, PROBE_TOKENS)
        if key_of(probe_T) in cache:
            return
        known = source.probe(probe_T)
        if known is not None:
            cache.add(key_of(probe_T), normed(source, target, known[0]))
            cache.flush()

    all_agree(accelerator, ask)
    accelerator.wait_for_everyone()
