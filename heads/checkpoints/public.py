"""Values for public eyes: names in place of local paths, addresses without their secrets."""

from __future__ import annotations

import re
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

LOCAL = re.compile(r"~?/[^/]+/|~/|\.{1,2}/|[A-Za-z]:[\\/]|\\\\\w|file://")
"""How a whole string begins that is a path of this machine."""
INSIDE = re.compile(r"(?<![\w/.~<\]-])~?(?:/[\w.@+,=-]+){2,}/?")
"""A path of this machine inside a sentence or a command: at least two folders, and not the end of
an address."""
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


def public_url(address: str) -> str:
    """An address without user, password, query and fragment, which may hold keys."""
    try:
        parts = urlsplit(address)
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:  # a port that is not a number, for one
        return address.partition("://")[0] + "://..."
    if not parts.netloc:
        return address.partition("?")[0].rpartition("@")[2]
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host  # IPv6
    return urlunsplit((parts.scheme, host + port, parts.path, "", ""))


def public(value: Any) -> Any:
    """Return a JSON value fit for a public repository.

    Local paths become the last part of their name, and addresses lose keys.
    """
    if isinstance(value, dict):
        return {public(key): public(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(child) for child in value]
    return public_text(value) if isinstance(value, str) else value


def public_text(text: str) -> str:
    """Return a string of a card or config without local paths, and without keys in addresses."""
    one_line = "\n" not in text
    if one_line and LOCAL.match(text):
        return _last_part(text)
    # a path from the folder in which the command ran, for one
    if one_line and "/" in text and _exists(text):
        return _last_part(text)
    text = ADDRESS.sub(_public_address, text)
    return INSIDE.sub(lambda match: _last_part(match[0]), text)


def _public_address(match: re.Match[str]) -> str:
    address = match[0]
    return _last_part(address) if address.startswith("file://") else public_url(address)


def _last_part(path: str) -> str:
    """The last part of a path: what its owner calls it."""
    # /home/ann/models/chat becomes chat, C:\models\chat too.
    path = path.removeprefix("file://").rstrip("/\\")
    name = PureWindowsPath(path).name if re.match(r"[A-Za-z]:[\\/]|.*\\", path) else Path(path).name
    return name if name not in ("", ".", "..", "~") else "local"


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except OSError:  # longer than a file's name can be
        return False
