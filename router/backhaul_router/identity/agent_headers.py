"""Adapters for agents' own headers: ids that they send of their own accord, coding agents' headers, and fields of the OpenAI
and Anthropic APIs.

They were made for other purposes, so nothing here is an error: what is malformed or too long is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

import msgspec

from .ids import Identity, named, nested

BAGGAGE_KEYS: Final = ("gen_ai.conversation.id", "session.id")
"""OpenTelemetry's and OpenInference's names for a conversation, the exact one first."""
BAGGAGE_SPACE: Final = "otel"

_PLAIN_HEADERS: Final = (
    ("x-opencode-session", "opencode", "x-opencode-parent-session"),
    ("x-session-affinity", "session-affinity", "x-parent-session-id"),
    ("x-amp-thread-id", "amp", None),
    ("x-dynamo-session-id", "dynamo", "x-dynamo-parent-session-id"),
)
_CODEX_SESSION: Final = ("session-id", "session_id")
_CODEX_THREAD: Final = ("thread-id", "conversation_id")
_CODEX = re.compile(r"codex", re.IGNORECASE)
_SENDS_SESSION_AS_REQUEST_ID = re.compile(r"(codex|pi)\b|codex_", re.IGNORECASE)
_SESSION_HEADER = re.compile(r"x-(.+)-session-id")
_OF_NO_CONVERSATION: Final = frozenset(
    {"parent", "auth", "oauth", "sso", "login", "user", "token", "secret", "key", "csrf"}
)
"""Words in a header's name by which the session is a person's login, or another conversation."""
_SESSION_OF_USER_ID = re.compile(r"_session_([0-9A-Fa-f-]{8,64})\Z")
_MAX_BAGGAGE = 8192
_MAX_USER_ID = 4096


def of_headers(headers: Mapping[str, str]) -> Identity | None:
    """The conversation by the headers of Claude Code, Codex, OpenCode, Amp, Dynamo's clients, or anybody's `X-...-Session-ID`.
    Names are lower-case."""
    return _of_claude_code(headers) or _of_codex(headers) or _of_plain(headers) or _of_any(headers) or _of_pi(headers)


def _of_claude_code(headers: Mapping[str, str]) -> Identity | None:
    name = "x-claude-code-session-id"
    agent, above = headers.get("x-claude-code-agent-id"), headers.get("x-claude-code-parent-agent-id")
    return nested("claude-code", headers.get(name), agent, f"header:{name}", above=above)


def _of_codex(headers: Mapping[str, str]) -> Identity | None:
    """The agents of one Codex session share its id and have a thread each; the first thread's id is the session's."""
    if not _CODEX.match(headers.get("user-agent", "")):
        return None
    session, thread = _first(headers, _CODEX_SESSION), _first(headers, _CODEX_THREAD)
    above = headers.get("x-codex-parent-thread-id")
    if session is not None:
        return nested("codex", headers[session], headers[thread] if thread else None, f"header:{session}", above=above)
    if thread is None:
        return None
    return named("codex", headers[thread], f"header:{thread}", parent=f"codex:{above}" if above else None)


def _of_plain(headers: Mapping[str, str]) -> Identity | None:
    for name, space, parents in _PLAIN_HEADERS:
        above = headers.get(parents) if parents else None
        if found := named(space, headers.get(name), f"header:{name}", parent=f"{space}:{above}" if above else None):
            return found
    return None


def _of_any(headers: Mapping[str, str]) -> Identity | None:
    for name in sorted(headers):
        match = _SESSION_HEADER.fullmatch(name)
        if match is None or _OF_NO_CONVERSATION & set(match[1].split("-")):
            continue
        if found := named(match[1], headers[name], f"header:{name}"):
            return found
    return None


def _of_pi(headers: Mapping[str, str]) -> Identity | None:
    """Most clients have a new request id for every request; these have one for a session."""
    who = headers.get("originator") or headers.get("user-agent", "")
    if not _SENDS_SESSION_AS_REQUEST_ID.match(who):
        return None
    return named("client-request-id", headers.get("x-client-request-id"), "header:x-client-request-id")


def of_prompt_cache_key(fields: Mapping[str, object]) -> Identity | None:
    """OpenAI's `prompt_cache_key`."""
    return named("prompt-cache-key", fields.get("prompt_cache_key"), "body:prompt_cache_key")


def of_conversation(fields: Mapping[str, object]) -> Identity | None:
    """OpenAI's `conversation`, a string or an object with an id."""
    value = fields.get("conversation")
    return named("conversation", value.get("id") if isinstance(value, dict) else value, "body:conversation")


class _UserId(msgspec.Struct):
    session_id: str | None = None


def of_metadata(fields: Mapping[str, object]) -> Identity | None:
    """Anthropic's `metadata.user_id`, in which Claude Code names its session, as JSON or at the end of a string."""
    user = fields.get("metadata.user_id")
    if not isinstance(user, str) or len(user) > _MAX_USER_ID:
        return None
    if user.startswith("{"):
        try:
            session = msgspec.json.decode(user.encode(), type=_UserId).session_id
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            return None
    else:
        match = _SESSION_OF_USER_ID.search(user)
        session = match[1] if match else None
    return named("claude-code", session, "body:metadata.user_id")


def of_baggage(headers: Mapping[str, str]) -> Identity | None:
    """W3C `baggage`: comma-separated `key=value`, values percent-encoded, each with properties after a semicolon."""
    header = headers.get("baggage", "")
    if not header or len(header) > _MAX_BAGGAGE:
        return None
    pairs = (member.partition(";")[0].partition("=") for member in header.split(","))
    values = {key.strip(): unquote(value.strip()) for key, _, value in pairs}
    for key in BAGGAGE_KEYS:
        if found := named(BAGGAGE_SPACE, values.get(key), f"baggage:{key}"):
            return found
    return None


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if headers.get(name)), None)
