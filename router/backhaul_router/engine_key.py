"""Validation of the API key that engines are sent: one that would be something else in a request's head is refused beforehand."""

from __future__ import annotations

from .errors import ConfigError

ENGINE_KEY_VARIABLE = "BACKHAUL_ENGINE_API_KEY"
"""Environment variable that holds it, where no setting does."""


def check(key: object) -> None:
    """Raises `ConfigError`, which says what is wrong and never shows the key."""
    if not isinstance(key, str):
        why = f"is a text, not {type(key).__name__}"
    elif not key:
        why = "is empty: leave it out where the engines want none"
    elif (at := next((at for at, char in enumerate(key, 1) if not "!" <= char <= "~"), None)) is not None:
        why = f"has {_kind(key[at - 1])} as character {at} of {len(key)}: a key is ASCII without spaces or line ends"
    else:
        return
    raise ConfigError(f"api_key: what the engines are sent (engine_api_key=, {ENGINE_KEY_VARIABLE}) {why}")


def _kind(char: str) -> str:
    if char in "\r\n":
        return "a line end"
    if char.isspace():
        return "a space"
    return "a control character" if char.isascii() else "one that is not ASCII"
