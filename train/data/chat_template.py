"""Chat template and loss mask: conversations as token sequences.

A conversation is {"messages": [{"role": ..., "content": ...}, ...]}. The loss mask covers exactly the tokens that the
assistant generated: from the first one after the generation prompt to the end-of-turn token, both included, in every
turn. A sequence holds the tokens that the model read and wrote at that turn: the prompt is rendered and tokenized as
for generation, and the answer follows it. So templates may render the past in another way than the present (drop its
reasoning, move the system prompt): such a conversation becomes several sequences.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ...console import log
from ...heads.checkpoints.save_load import differences
from ...inference import tokenizer_provenance
from ...options import template_variables

GIVEN_BY_TRANSFORMERS = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Variables and functions that transformers gives to every chat template."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys under which servers return an answer's reasoning, and chat templates read it."""
REASONING_TAGS = (
    ("<think>", "</think>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
)
"""Tags around an answer's reasoning. Some generation prompts end in the first."""
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""The tags of transformers' own around what the assistant writes, in templates that mark it."""
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""Errors that a template's code raises for messages that it was not written for."""


@dataclass(frozen=True)
class Example:
    """One sequence to train on."""

    tokens: list[int]
    loss_mask: list[bool]
    """True where the assistant generated the token."""
    conversation: int = -1
    """Index of its conversation, over all sources."""

    def truncated(self, length: int) -> Example:
        """The sequence's first `length` tokens."""
        return Example(self.tokens[:length], self.loss_mask[:length], self.conversation)


def encode(
    conversation: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    max_length: int,
    thinking: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Example]:
    """Tokenize a conversation into sequences of at most `max_length` tokens with loss masks.

    The arguments are those of `whole_sequences`. A sequence of which no answer token is left is left out.
    """
    whole = whole_sequences(conversation, tokenizer, eos, thinking, template_kwargs)
    return [each for each in (example.truncated(max_length) for example in whole) if any(each.loss_mask)]


def whole_sequences(
    conversation: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos: frozenset[int],
    thinking: bool | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Example]:
    """Tokenize a conversation into sequences with loss masks.

    One sequence if the chat template renders earlier turns the same once later ones follow. Some templates do not
    (they drop the reasoning of earlier turns): then an answer has a sequence of its own, with the prompt as it was when
    the assistant generated it. `"finished": false` in the conversation says that its last answer was truncated, so that
    the end-of-turn token there is the template's and not the assistant's. An assistant message with `"weight": 0` is
    read and not trained on. `eos` are the tokens that end a turn.

    A row of tokens, `input_ids` and `loss_mask`, is one sequence as it is: nothing is rendered. Without a chat
    template, a `prompt` and its `completion`, both texts, are tokenized as they are.

    Raises:
        ValueError: the template refuses the conversation, or the assistant's tokens cannot be told apart.
    """
    if conversation.get("input_ids") is not None:
        return [Example(list(conversation["input_ids"]), [bool(own) for own in conversation["loss_mask"]])]
    truncated = conversation.get("finished") is False
    if not tokenizer.chat_template:
        return [_completion(conversation, tokenizer, truncated)]
    messages, tools = conversation["messages"], conversation.get("tools")
    variables = template_variables(thinking, template_kwargs)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    sequences: list[Example] = []
    written = 0  # tokens of the last sequence up to the end of its last answer
    for turn in turns:
        prompt, own = _prompt_and_answer(tokenizer, messages[: turn + 1], variables, tools)
        prompt_tokens, own_tokens = joined(tokenizer, prompt, own)
        end = next((i for i, token in enumerate(own_tokens) if token in eos), None)
        stop = len(own_tokens)
        if end is not None:
            # What follows the end of the turn is the template's.
            stop = end if truncated and turn == turns[-1] else end + 1
        trained = messages[turn].get("weight") != 0
        tokens = prompt_tokens + own_tokens
        mask = [False] * len(prompt_tokens) + [trained and i < stop for i in range(len(own_tokens))]
        if sequences and tokens[:written] == sequences[-1].tokens[:written]:
            mask[:written] = sequences[-1].loss_mask[:written]
            sequences.pop()
        sequences.append(Example(tokens, mask))
        written = len(prompt_tokens) + stop
    return [example for example in sequences if any(example.loss_mask)]


def _completion(conversation: dict[str, Any], tokenizer: PreTrainedTokenizerBase, truncated: bool) -> Example:
    """A prompt and its completion, texts both, for a tokenizer without a chat template."""
    prompt, completion = conversation.get("prompt"), conversation.get("completion")
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise ValueError(f"the tokenizer has no chat template{NEEDS_NO_TEMPLATE}")
    prompt_tokens, own_tokens = joined(tokenizer, prompt, completion, add_special_tokens=True)
    if not truncated and tokenizer.eos_token_id is not None:
        own_tokens = [*own_tokens, tokenizer.eos_token_id]
    return Example(prompt_tokens + own_tokens, [False] * len(prompt_tokens) + [True] * len(own_tokens))


def _prompt_and_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    tools: list[Any] | None,
) -> tuple[str, str]:
    """The text that the model read before the last of the messages, and the text that it then wrote.

    What it wrote runs to the end of the rendering, so the template's text after the end of the turn comes with it.
    """
    before, message = messages[:-1], messages[-1]
    prompt = render(tokenizer, before, True, tools=tools, template_kwargs=variables)
    full, marked = _marked(tokenizer, messages, variables, tools)
    tags = next((tags for tags in REASONING_TAGS if prompt.rstrip().endswith(tags[0])), None)
    if full.startswith(prompt):
        own = full[len(prompt) :]
        skipped = _added_reasoning(own, message, tags)
        if marked is not None and marked > len(prompt) and full[len(prompt) : marked].strip():
            skipped = max(skipped, marked - len(prompt))
        return prompt + own[:skipped], own[skipped:]
    if marked is not None:
        return prompt, full[marked:]
    if tags is not None:
        beginning = prompt[: prompt.rindex(tags[0])]
        if full.startswith(beginning):
            return prompt, _opened(full[len(beginning) :], message, tags, prompt[len(beginning) + len(tags[0]) :])
    # The past is rendered in another way: the answer follows the end of its prompt, from the last message on.
    last = before[-1].get("content") if before else None
    words = last.strip() if isinstance(last, str) else ""
    if words and words in prompt:
        tail = prompt[prompt.rindex(words) :]
        answer = message.get("content")
        stop = full.rfind(answer.strip()) if isinstance(answer, str) and answer.strip() else len(full)
        place = full.rfind(tail, 0, stop if stop >= 0 else len(full))
        if place >= 0:
            return prompt, full[place + len(tail) :]
    raise ValueError(
        "the chat template does not continue its own generation prompt with the answer, so the assistant's tokens "
        f"cannot be told apart: {prompt[-60:]!r} is followed by {full[max(0, len(prompt) - 60) :][:60]!r}; give rows "
        "of tokens (input_ids and loss_mask, as `headstart data` writes them), or a template that marks what the "
        "assistant writes with {% generation %}"
    )


def _reasoning(message: dict[str, Any]) -> str:
    """The reasoning of an answer that stands beside its content."""
    return next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), "")


def _added_reasoning(own: str, message: dict[str, Any], opened: tuple[str, str] | None) -> int:
    """Length of the empty block of reasoning that the template wrote before an answer that holds none."""
    content = message.get("content") or ""
    if _reasoning(message).strip():
        return 0
    for first, last in REASONING_TAGS:
        found = re.match(rf"\s*({re.escape(first)}\s*)?{re.escape(last)}\s*", own)
        if found is None or last in content:
            continue
        if opened is not None:
            raise _no_reasoning(opened[0])
        return found.end()
    return 0


def _opened(rendered: str, message: dict[str, Any], tags: tuple[str, str], space: str) -> str:
    """The text that the model wrote after a generation prompt that opened the reasoning.

    `rendered` is the template's rendering of the answer, without its reasoning; `space` follows the tag in the prompt.
    """
    first, last = tags
    content = message.get("content") or ""
    reasoning = _reasoning(message)
    if reasoning.strip():
        thoughts = reasoning if reasoning.endswith(space) else reasoning + space
        answer = content
    elif last in content:
        thoughts, _, answer = content.partition(last)
        thoughts = thoughts.split(first)[-1].removeprefix(space)
    else:
        raise _no_reasoning(first)
    rest = re.sub(rf"^\s*({re.escape(first)}\s*)?{re.escape(last)}", "", rendered)
    between = answer[: len(answer) - len(answer.lstrip())]
    if not between and reasoning.strip():
        between = 2 * space  # as models with a line feed after the first tag write it
    return thoughts + last + between + rest.lstrip()


def _no_reasoning(tag: str) -> ValueError:
    return ValueError(
        f"the generation prompt ends in {tag}, and the answer holds no reasoning, so the model did not write it after "
        "this prompt; give the reasoning as reasoning_content, give rows of tokens (input_ids and loss_mask, as "
        "`headstart data` writes them), or set data.thinking or data.template_kwargs so that the template opens none"
    )


def _marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    tools: list[Any] | None,
) -> tuple[str, int | None]:
    """The rendering of messages, and where the last stretch begins that the template marks as the assistant's."""
    text = render(tokenizer, messages, tools=tools, template_kwargs=variables)
    template = tokenizer.get_chat_template(None, tools)
    if not GENERATION_TAG.search(template):
        return text, None
    for form in _forms(messages):
        try:
            rendered: Any = render_jinja_template(
                conversations=[form],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **{**tokenizer.special_tokens_map, **variables},
            )
        except TEMPLATE_ERRORS:
            continue
        (own_text,), (places,) = rendered  # of one conversation
        if own_text == text and places:
            return text, int(places[-1][0])
    return text, None


def joined(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, add_special_tokens: bool = False
) -> tuple[list[int], list[int]]:
    """Tokens of a prompt as for generation, and of the answer after them.

    Where one token would span both, the answer is tokenized alone: the model began it after the prompt's last token.
    `add_special_tokens` adds the tokenizer's own at the beginning of the prompt.
    """
    texts = [prompt, prompt + answer]
    try:
        prompt_tokens, whole = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    except TypeError as error:  # half of a surrogate pair, which JSON may hold and UTF-8 may not
        raise ValueError(f"the tokenizer cannot read the text: {error}") from error
    if whole[: len(prompt_tokens)] == prompt_tokens:
        return prompt_tokens, whole[len(prompt_tokens) :]
    expected = _text(tokenizer, whole)
    for anchor in ("", "\n", tokenizer.eos_token or ""):  # some tokenizers add a space to the beginning of a text
        first, both = tokenizer([anchor, anchor + answer], add_special_tokens=False)["input_ids"]
        own = both[len(first) :]
        if both[: len(first)] == first and _text(tokenizer, prompt_tokens + own) == expected:
            return prompt_tokens, own
    raise ValueError(
        f"the tokenizer joins the end of the prompt, {prompt[-20:]!r}, with the beginning of the answer, "
        f"{answer[:20]!r}, and cannot tokenize them apart; give rows of tokens (input_ids and loss_mask)"
    )


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    add_generation_prompt: bool = False,
    thinking: bool | None = None,
    tools: list[Any] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> str:
    """Render messages as the text that the model reads; `template_kwargs` are further variables for the template.

    Arguments of tool calls are given as objects, and as JSON text to a template that takes them so.
    """
    variables = template_variables(thinking, template_kwargs)
    refused: Exception | None = None
    for form in _forms(messages):
        try:
            text = tokenizer.apply_chat_template(
                form, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except TEMPLATE_ERRORS as error:
            refused = refused or error
            continue
        assert isinstance(text, str)
        if not any(shown in text for shown in _python_objects(form)):
            return text
    raise ValueError(
        f"the chat template refuses a conversation: {refused or 'it shows arguments of tools as Python objects'}"
    ) from refused


def _forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages as a template may take them: arguments of tool calls as objects, and as JSON text."""
    plain = [_for_template(message) for message in messages]
    if not any(message.get("tool_calls") for message in plain):
        return [plain]
    return [[_with_arguments(message, as_text) for message in plain] for as_text in (False, True)]


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under every key that templates read, and without its weight in training."""
    kept = {name: value for name, value in message.items() if name != "weight"}
    reasoning = _reasoning(message)
    if message["role"] != "assistant" or not reasoning:
        return kept
    return {**dict.fromkeys(REASONING_KEYS, reasoning), **kept}


def _with_arguments(message: dict[str, Any], as_text: bool) -> dict[str, Any]:
    """A message whose tool calls have their arguments as JSON text, as they came if they came so, or as an object."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not as_text and isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        function = {**function, "arguments": arguments} if "arguments" in function else function
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _python_objects(messages: list[dict[str, Any]]) -> list[str]:
    """How arguments of tool calls look where a template shows objects without converting them to JSON.

    Those that a message's own words hold tell nothing.
    """
    words = "\n".join(message["content"] for message in messages if isinstance(message.get("content"), str))
    shown = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call.get("function", call).get("arguments")
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
                f"{where}: prompt {number} has {ids_1T.shape[1]} tokens, which with {new_tokens} new ones do not fit "
                f"the model's {positions} positions"
            )


def data_origin(
    tokenizer: PreTrainedTokenizerBase, thinking: bool | None, template_kwargs: dict[str, Any] | None = None
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
    if "thinking" in trained:  # a head that was trained before template_kwargs existed had none
        trained = {"template_kwargs": {}, **trained}
    for difference in differences(trained, data_origin(tokenizer, thinking, template_kwargs)):
        warnings.warn(f"the head may accept less here: {difference}", stacklevel=2)


def warn_of_unread_variables(
    tokenizer: PreTrainedTokenizerBase, thinking: bool | None, template_kwargs: dict[str, Any] | None = None
) -> None:
    """Log a warning, of one line, that names the variables that this tokenizer's chat template never reads."""
    variables = template_variables(thinking, template_kwargs)
    if not variables or not tokenizer.chat_template:
        return
    read = variables_read(tokenizer)
    unread = [f"{name} = {value!r}" for name, value in variables.items() if name not in read]
    if unread:
        others = ", ".join(sorted(read - GIVEN_BY_TRANSFORMERS - set(tokenizer.special_tokens_map))) or "none"
        log.warning(
            f"this tokenizer's chat template does not read {', '.join(unread)}, which changes nothing; variables that "
            f"it reads: {others}"
        )


def variables_read(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names of the variables that the tokenizer's chat templates read and do not set themselves."""
    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [templates]
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    read: set[str] = set()
    for text in texts:
        read |= find_undeclared_variables(environment.parse(GENERATION_TAG.sub("", str(text))))
    return read


NEEDS_NO_TEMPLATE = (
    "; give rows of tokens (input_ids and loss_mask), or of a prompt and a completion, both texts, which are tokenized "
    "as they are"
)
"""What can be trained on without a chat template."""


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, advice: str = "") -> None:
    """Refuse a tokenizer that cannot render a conversation; `advice` ends the error."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {name!r} has no chat template; conversations cannot be rendered for it{advice}"
        )
