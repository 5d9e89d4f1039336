"""Prompts by a chat template: rendering, token ids, and how training data was rendered.

The template is the tokenizer's; the training data is a head's.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...files import one_line
from ...heads.checkpoints.save_load import differences
from ...options import template_variables
from ..targets.loading import load_tokenizer, tokenizer_provenance

GIVEN_BY_TRANSFORMERS = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "raise_exception",
    "strftime_now",
}
"""Variables and functions that transformers gives to every chat template."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which servers return an answer's reasoning, and chat templates read it."""
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags that only transformers knows, around what the assistant writes."""
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    SyntaxError,
)
"""Errors that a template's code raises for messages that it was not written for."""

log = logging.getLogger(__name__)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = False,
    thinking: bool | None = None,
    tools: list[Any] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """Render messages as the text that the model reads.

    `template_kwargs` are further variables for the template. Arguments of tool calls are passed as
    objects, or as JSON text to a template that needs text.
    """
    variables = template_variables(thinking, template_kwargs)
    refused: Exception | None = None
    # Try one form after the other. The error of the first one is reported: it is the usual form.
    for form in message_forms(messages):
        try:
            text = tokenizer.apply_chat_template(
                form,
                tools=tools,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except TEMPLATE_ERRORS as error:
            refused = refused or error
            continue
        assert isinstance(text, str)
        # A template that takes text shows an object as Python writes it, {'city': 'Paris'}, without
        # an error: the text must not contain that.
        if not any(shown in text for shown in _python_objects(form)):
            return text
    told = refused or "it shows arguments of tools as Python objects"
    raise template_error(tokenizer, told) from refused


def template_error(tokenizer: PreTrainedTokenizerBase, told: object) -> ValueError:
    """Say in one line that a tokenizer's chat template failed, where it is from, and how."""
    return ValueError(
        f"the chat template refuses a conversation: {one_line(told)} (tokenizer"
        f" {tokenizer.name_or_path!r})"
    )


def message_forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the forms in which a template may take the messages.

    Arguments of tool calls are objects in the first and JSON text in the second. Messages without
    tool calls have one form.
    """
    plain = [_for_template(message) for message in messages]
    if not any(message.get("tool_calls") for message in plain):
        return [plain]
    as_objects = [_with_arguments(message, as_text=False) for message in plain]
    as_texts = [_with_arguments(message, as_text=True) for message in plain]
    return [as_objects, as_texts]


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under every key that templates read.

    Its weight in training is left out.
    """
    fields = {name: value for name, value in message.items() if name != "weight"}
    reasoning = reasoning_of(message)
    if message["role"] != "assistant" or not reasoning:
        return fields
    return {**dict.fromkeys(REASONING_KEYS, reasoning), **fields}


def _with_arguments(message: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as JSON text or as an object.

    Where text is wanted, arguments that came as JSON text stay unchanged.
    """
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        # OpenAI wraps the function, {"type": "function", "function": {...}}; others do not.
        function = call.get("function", call)
        arguments = function.get("arguments")
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if "arguments" in function:
            function = {**function, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _python_objects(messages: list[dict[str, Any]]) -> list[str]:
    """Return arguments of tool calls as Python writes them, where that differs from JSON.

    A template shows them so if it does not convert them to JSON. Arguments that also occur in a
    message's content are left out, as they prove nothing.
    """
    words = "\n".join(
        message["content"] for message in messages if isinstance(message.get("content"), str)
    )
    shown = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
            # {} is written alike in both.
            if not isinstance(arguments, Mapping) or str(arguments) == json.dumps(arguments):
                continue
            if str(arguments) not in words:
                shown.append(str(arguments))
    return shown


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    thinking: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
    tools: list[Any] | None = None,
) -> Tensor:
    """Token ids, [1, time], after which the assistant answers the messages."""
    text = render(tokenizer, messages, True, thinking, tools, template_kwargs)
    ids: Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return ids


def check_lengths(prompts: list[Tensor], new_tokens: int, positions: int, where: str) -> None:
    """Refuse prompts that leave no room for their answers."""
    for number, ids_1T in enumerate(prompts, start=1):
        if ids_1T.shape[1] + new_tokens > positions:
            raise ValueError(
                f"{where}: prompt {number} has {ids_1T.shape[1]} tokens, and with {new_tokens}"
                f" new ones exceeds the model's {positions} positions"
            )


def data_origin(
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None,
    template_kwargs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Identity of the tokenizer and template options, which a head's checkpoint records.

    The same variables have the same origin, whichever of the two options set enable_thinking.
    """
    variables = template_variables(thinking, template_kwargs)
    enabled = variables.pop("enable_thinking", None)
    return {**tokenizer_provenance(tokenizer), "thinking": enabled, "template_kwargs": variables}


def warn_of_other_data(
    trained: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None,
    template_kwargs: dict[str, Any] | None = None,
) -> None:
    """Warn if prompts are tokenized or rendered otherwise than the head's training data."""
    # Older checkpoints record no template_kwargs; those heads were trained with none.
    if "thinking" in trained:
        trained = {"template_kwargs": {}, **trained}
    for difference in differences(trained, data_origin(tokenizer, thinking, template_kwargs)):
        warnings.warn(f"the head may accept less here: {difference}", stacklevel=2)


def warn_of_unread_variables(
    tokenizer: PreTrainedTokenizerBase,
    thinking: bool | None,
    template_kwargs: dict[str, Any] | None = None,
) -> None:
    """Log a one-line warning of variables that this tokenizer's chat template never reads."""
    variables = template_variables(thinking, template_kwargs)
    if not variables or not tokenizer.chat_template:
        return
    read = variables_read(tokenizer)
    unread = [f"{name} = {value!r}" for name, value in variables.items() if name not in read]
    if unread:
        own_variables = read - GIVEN_BY_TRANSFORMERS - set(tokenizer.special_tokens_map)
        others = ", ".join(sorted(own_variables)) or "none"
        log.warning(
            f"this tokenizer's chat template does not read {', '.join(unread)}, which changes"
            f" nothing; variables that it reads: {others}"
        )


def variables_read(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names of the variables that the tokenizer's chat templates read and do not set themselves.

    Raises:
        ValueError: a template that jinja cannot parse.
    """
    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [templates]
    # As transformers parses templates; its own tag, which only it knows, is removed below.
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    read: set[str] = set()
    for text in texts:
        try:
            parsed = environment.parse(GENERATION_TAG.sub("", str(text)))
            read |= find_undeclared_variables(parsed)
        except TEMPLATE_ERRORS as error:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path!r} cannot be parsed:"
                f" {one_line(error)}"
            ) from error
    return read


def load_chat_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer, which must have a chat template."""
    tokenizer = load_tokenizer(source)
    check_tokenizer(tokenizer, source)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, advice: str = "") -> None:
    """Refuse a tokenizer that cannot render a conversation; `advice` ends the error."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {name!r} has no chat template; conversations cannot be rendered for"
            f" it{advice}"
        )


def reasoning_of(message: dict[str, Any]) -> str:
    """The reasoning of an answer, if it is stored under a key of its own; else an empty text."""
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            return str(message[key])
    return ""
