"""Text rows as messages: OpenAI `messages`, ShareGPT `conversations`, `prompt` and `completion`.

A row becomes {"messages": [{"role": "user", "content": "..."}]}; its other columns stay. `content`
may be null beside `tool_calls`; parts of type text are joined. `tools` is passed to the chat
template.

Trainers mix these: a turn of `conversations` may be a message with role and content, a message may
have ShareGPT's names of roles, and a call may be a turn or a key `function_call`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...files import parse_json
from ...options import shown

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
}
"""Columns of the formats that hold text: OpenAI's messages, ShareGPT's from/value pairs, a prompt
with its answer. A row has the first format of which it has all columns."""
SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
"""Roles by ShareGPT's value of `from`."""
CALLS = ("function_call", "tool_call")
"""Roles of a turn that is a call, or a list of calls, as JSON text."""

Messages = list[dict[str, str]]
"""Roles and contents of a prompt or a conversation."""
Formats = Mapping[str, tuple[str, ...]]
"""Columns by the names of formats."""


def user_turns(row: Any) -> list[Any]:
    """Return the user's turns in a row without messages; empty for any other row.

    They are Spec-Bench's `turns`, or its `prompt`.
    """
    if not isinstance(row, dict):
        return []
    if isinstance(row.get("turns"), list) and row["turns"]:
        return row["turns"]
    return [row["prompt"]] if isinstance(row.get("prompt"), str) else []


def check_columns(columns: list[str], where: str, formats: Formats = TEXT_FORMATS) -> str:
    """Return the first of the formats that has these columns."""
    for name, needed in formats.items():
        if set(needed) <= set(columns):
            return name
    lacking = []
    for name, needed in formats.items():
        missing = [repr(column) for column in needed if column not in columns]
        lacking.append(f"{name} lacks {', '.join(missing)}")
    there = ", ".join(map(repr, columns)) or "no columns"
    raise ValueError(
        f"{where}: no conversation in any format that can be read; it has {there}:"
        f" {'; '.join(lacking)}"
    )


def format_of(row: Any, where: str, formats: Formats = TEXT_FORMATS) -> str:
    """Return the format of a row, whose columns without a value do not count."""
    if not isinstance(row, dict):
        raise ValueError(
            f'{where}: no conversation; expected {{"messages": [{{"role": ..., "content": ...}},'
            " ...]}"
        )
    return check_columns([name for name, value in row.items() if value is not None], where, formats)


def check_conversation(row: Any, where: str, expected: str | None = None) -> dict[str, Any]:
    """Convert a row of text to `messages`; its other columns stay.

    Errors name the row's place, `where`.

    `expected` is the format of the source's earlier rows, if there are any.
    """
    found = format_of(row, where)
    if expected not in (None, "tokens", found):
        raise ValueError(
            f"{where}: a row in the format {found!r}, but the source began with {expected!r}; all"
            " rows of a source have one format: split it into several sources"
        )
    messages: Any = _pair(row, where) if found == "prompt/completion" else row[found]
    if not isinstance(messages, list):
        keys = ("from", "value") if found == "conversations" else ("role", "content")
        raise ValueError(
            f"{where}: no conversation; {found!r} must be a list of {{{keys[0]!r}: ...,"
            f" {keys[1]!r}: ...}}"
        )
    if found == "conversations":
        messages = [_of_turn(turn, i, where) for i, turn in enumerate(messages)]
    messages = [_message(message, i, where) for i, message in enumerate(messages)]
    if found == "conversations" and isinstance(row.get("system"), str) and row["system"]:
        messages.insert(0, {"role": "system", "content": row["system"]})
    if not messages:
        raise ValueError(f"{where}: no conversation: {TEXT_FORMATS[found][0]!r} is empty")
    tools = {"tools": _tools(row["tools"], where)} if row.get("tools") else {}
    return {**row, "messages": messages, **tools}


def _of_turn(turn: Any, number: int, where: str) -> Any:
    """Return a ShareGPT turn with the keys of a message; one with a role has them already."""
    if isinstance(turn, dict) and turn.get("from") is None and turn.get("role") is not None:
        return turn
    if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
        raise ValueError(f"{where}: message {number} needs a 'from' and a 'value' text")
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise ValueError(
            f"{where}: message {number} is from {shown(speaker)}; choose from"
            f" {', '.join(SHAREGPT_ROLES)}"
        )
    return {"role": speaker, "content": turn["value"]}


def _with_tool_calls(message: dict[str, Any], number: int, where: str) -> dict[str, Any]:
    """Return a message with `tool_calls` for a call in another form.

    It is a role of `CALLS`, or OpenAI's older key `function_call`.
    """
    role, content = message.get("role"), message.get("content")
    if role in CALLS and isinstance(content, str):
        calls = parse_json(content, f"{where}: message {number}, a {role},")
        message = {**message, "content": None}
    elif message.get("function_call") and not message.get("tool_calls"):
        calls = message["function_call"]
        message = {name: value for name, value in message.items() if name != "function_call"}
    else:
        return message
    listed = calls if isinstance(calls, list) else [calls]
    return message | {"tool_calls": [{"type": "function", "function": call} for call in listed]}


def _pair(row: dict[str, Any], where: str) -> list[Any]:
    """Join a prompt and its completion, each a text or messages."""
    messages: list[Any] = []
    for name, role in (("prompt", "user"), ("completion", "assistant")):
        part = row[name]
        if not isinstance(part, (str, list)):
            raise ValueError(
                f"{where}: {name!r} must be a text or a list of messages, not {shown(part)}"
            )
        messages += [{"role": role, "content": part}] if isinstance(part, str) else part
    return messages


def _message(message: Any, number: int, where: str) -> dict[str, Any]:
    """Check a message; its content becomes one text, or null beside tool calls."""
    if not isinstance(message, dict):
        raise ValueError(f"{where}: message {number} needs a 'role' and a 'content' text")
    message = _with_tool_calls(message, number, where)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(
                    f"{where}: message {number} has a content part {shown(kind)}; only parts of"
                    " type 'text' are read"
                )
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise ValueError(
            f"{where}: message {number} needs a 'role' and a 'content' text, or 'tool_calls'"
        )
    role = message.get("role")
    if isinstance(role, str):
        role = SHAREGPT_ROLES.get(role, role)
    if role not in ROLES:
        raise ValueError(
            f"{where}: message {number} has role {shown(message.get('role'))}; choose from"
            f" {', '.join(ROLES)}"
        )
    message = {**message, "role": role, "content": content}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise ValueError(
                f"{where}: message {number} needs a list of 'tool_calls', not"
                f" {shown(message['tool_calls'])}"
            )
        message["tool_calls"] = [_tool_call(call, number, where) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any, number: int, where: str) -> dict[str, Any]:
    """Check a tool call, whose arguments are an object or, as OpenAI sends them, its JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{where}: message {number} has a tool call without a function's 'name': {shown(call)}"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        what = f"what message {number} calls {shown(function['name'])} with"
        parse_json(arguments or "{}", f"{where}: {what}")
    return dict(call)


def _tools(tools: Any, where: str) -> list[Any]:
    """Parse the tools of a conversation, which some data sets hold as JSON text."""
    if isinstance(tools, str):
        tools = parse_json(tools, f"{where}: 'tools', a text,")
    if not isinstance(tools, list):
        raise ValueError(
            f"{where}: 'tools' must be a list of tools, or its JSON text, not {shown(tools)}"
        )
    one = f"{where}: one of 'tools', a text,"
    return [parse_json(tool, one) if isinstance(tool, str) else tool for tool in tools]
