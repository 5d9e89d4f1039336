"""Small chat templates, each with a property of a published one that a loss mask has to survive."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from helpers import CHATML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m['role']"
    " }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if"
    " add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == 'assistant' %}
        {%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- set f = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
"""Past reasoning is dropped; the last answer has a block of reasoning, an empty one if it holds
none."""
QWEN3_THINKING = QWEN3.replace(
    "{%- if enable_thinking is defined and enable_thinking is false %}{{-"
    " '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    "{{- '<think>\\n' }}",
)
"""The generation prompt opens the reasoning, and the last answer is rendered so."""
QWQ = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""The generation prompt opens the reasoning, and no answer is rendered with any."""
R1 = """\
{{- '<s>' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|Assistant|>' + (m.content or '').split('</think>')[-1] }}
        {%- for call in m.tool_calls or [] %}
            {{- '<|call|>' + call['function']['name'] + '\\n' + call['function']['arguments'] }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif m.role == 'tool' %}{{- '<|tool|>' + m.content }}
    {%- else %}{{- '<|User|>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{% endif %}"""
"""As QWQ, but line feeds after the reasoning stay, and arguments of tools are joined as text."""
DEEPSEEK_V31 = """\
{{- '<s>' }}{% set ns = namespace(user=false) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if ns.user %}{{- '<|Assistant|></think>' }}{% endif %}
        {%- set ns.user = false %}
        {{- (m.content or '').split('</think>')[-1] }}
        {%- for call in m.tool_calls or [] %}
            {{- '<|call|>' + call['function']['name'] + '<|sep|>' + call['function']['arguments'] }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif m.role == 'tool' %}{% set ns.user = false %}{{- '<|tool|>' + m.content }}
    {%- else %}{% set ns.user = true %}{{- '<|User|>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.user %}
    {{- '<|Assistant|>' + ('<think>' if thinking is defined and thinking else '</think>') }}
{%- endif %}"""
"""The variable is called thinking; answers are rendered with closed reasoning even while the prompt
opens it."""
MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set rest = messages[1:] if system is not none else messages %}
{{- '<s>' }}
{%- for m in rest %}
    {%- if m.role == 'assistant' %}
        {%- if m.tool_calls %}{{- '[TOOL_CALLS] ' + (m.tool_calls | tojson) + '</s>' }}
        {%- else %}{{- ' ' + m.content + '</s>' }}{% endif %}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if loop.last and tools %}{{- '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
        {{- '[INST] ' }}
        {%- if loop.last and system is not none %}{{- system + '\\n\\n' }}{% endif %}
        {{- m.content + '[/INST]' }}
    {%- endif %}
{%- endfor %}"""
"""System prompt and tools stand before the user's last message, while it is the last; answers begin
with a space."""
HARMONY = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- if m.thinking and (m.tool_calls or (loop.last and not add_generation_prompt)) %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<|start|>assistant<|channel|>commentary to=' + call.function.name + '<|message|>' }}
            {{- call.function.arguments | tojson }}{{- '<|call|>' }}
        {%- endfor %}
        {%- if not m.tool_calls %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
            {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}{{- '<|start|>tool<|message|>' + m.content + '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"""
"""Channels are special tokens; the analysis of past turns is dropped, and a past answer ends in
another token."""
MARKED = """\
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- 'bot> ' }}
        {%- generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
    {%- else %}{{- m.role + '> ' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant> ' }}{% endif %}"""
"""The rendering does not continue the generation prompt; the template marks what the assistant
wrote."""

CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "unit": None}},
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ARGUMENTS = json.dumps(CALL["function"]["arguments"])
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(
        "<|User|>",
        "<|Assistant|>",
        "<|call|>",
        "<|tool|>",
        "<|sep|>",
        "[INST]",
        "[/INST]",
        "[TOOL_CALLS]",
    ),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
)
Written = Callable[[str, str, bool], str]
"""What a model writes after the generation prompt, its end token too: of reasoning, content, and
whether it calls."""


@dataclass(frozen=True)
class Family:
    """A template, and what a model that was trained on it writes."""

    template: str
    written: Written
    """With reasoning, if the model reasons."""
    ends: tuple[str, ...]
    """Tokens that end a turn."""
    reasons: bool = False
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the template."""
    tools: bool = False
    prefilled: bool = False
    """Whether the generation prompt opens the reasoning."""


def _qwen_call() -> str:
    return '<tool_call>\n{"name": "add", "arguments": ' + ARGUMENTS + "}\n</tool_call>"


def _qwen(reasoning: str, content: str, calls: bool) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n{content}{_qwen_call() if calls else ''}<|im_end|>"


def _qwen_opened(reasoning: str, content: str, calls: bool) -> str:
    return _qwen(reasoning, content, calls).removeprefix("<think>\n")


def _qwen_plain(_: str, content: str, calls: bool) -> str:
    return f"{content}{_qwen_call() if calls else ''}<|im_end|>"


def _r1(reasoning: str, content: str, calls: bool) -> str:
    return (
        f"{reasoning}\n</think>\n\n{content}"
        + ("<|call|>add\n" + ARGUMENTS if calls else "")
        + "</s>"
    )


def _deepseek(_: str, content: str, calls: bool) -> str:
    return content + ("<|call|>add<|sep|>" + ARGUMENTS if calls else "") + "</s>"


def _deepseek_thinking(reasoning: str, content: str, calls: bool) -> str:
    return f"{reasoning}</think>{_deepseek('', content, calls)}"


def _mistral(_: str, content: str, calls: bool) -> str:
    return "[TOOL_CALLS] " + json.dumps([CALL]) + "</s>" if calls else f" {content}</s>"


def _harmony(reasoning: str, content: str, calls: bool) -> str:
    analysis = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
    if calls:
        return f"{analysis}<|channel|>commentary to=add<|message|>{ARGUMENTS}<|call|>"
    return f"{analysis}<|channel|>final<|message|>{content}<|return|>"


FAMILIES = {
    "chatml": Family(CHATML, lambda _, content, calls: content + "<|im_end|>", ("<|im_end|>",)),
    "llama3": Family(LLAMA3, lambda _, content, calls: content + "<|eot_id|>", ("<|eot_id|>",)),
    "qwen3": Family(QWEN3, _qwen, ("<|im_end|>",), reasons=True, tools=True),
    "qwen3, no thinking": Family(
        QWEN3, _qwen_plain, ("<|im_end|>",), False, {"enable_thinking": False}, tools=True
    ),
    "qwen3, always thinking": Family(
        QWEN3_THINKING, _qwen_opened, ("<|im_end|>",), reasons=True, tools=True, prefilled=True
    ),
    "qwq": Family(
        QWQ,
        lambda r, content, calls: f"{r}\n</think>\n\n{content}<|im_end|>",
        ("<|im_end|>",),
        True,
        prefilled=True,
    ),
    "r1": Family(R1, _r1, ("</s>",), reasons=True, tools=True, prefilled=True),
    "deepseek-v3.1": Family(DEEPSEEK_V31, _deepseek, ("</s>",), tools=True),
    "deepseek-v3.1, thinking": Family(
        DEEPSEEK_V31,
        _deepseek_thinking,
        ("</s>",),
        reasons=True,
        variables={"thinking": True},
        prefilled=True,
    ),
    "mistral": Family(MISTRAL, _mistral, ("</s>",), tools=True),
    "harmony": Family(HARMONY, _harmony, ("<|return|>", "<|call|>"), reasons=True, tools=True),
    "marked": Family(MARKED, lambda _, content, calls: content + "<|im_end|>", ("<|im_end|>",)),
}


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    """A byte-level BPE with real merges, so that tokens and characters do not fall together."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    texts = [
        "the sum is three",
        "one and two",
        "\n\n",
        "assistant user analysis final",
        "add the numbers",
    ]
    bpe.train_from_iterator(texts * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=family.ends[0])
    fast.chat_template = family.template
    return fast


def end_tokens(family: Family, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids of the tokens that end a turn."""
    return frozenset(tokenizer.convert_tokens_to_ids(list(family.ends)))
