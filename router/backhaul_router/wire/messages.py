"""Strategy of `/v1/messages`: Anthropic's API, as vLLM serves it over its chat endpoint (entrypoints/anthropic/serving.py)."""

from __future__ import annotations

import re
from typing import ClassVar, Final

import msgspec
from msgspec import Raw

from .endpoint import BOOL, INT, NO_IDS, TEXT, Api, History, Types, usage_of
from .json_members import FORBIDDEN, NULL, Members, decode_list, encode, join
from .stream import Listeners, NamedEvents, StreamFilter, UsageEvent, cleaned, head_of
from .usage import Details, Usage

_BILLING: Final = "x-anthropic-billing-header"
"""A line that Claude Code changes with every request; the engine drops a text that begins with it."""
_CACHE_CONTROL: Final = b'"cache_control"'
"""Marks that clients move along with the last message; the engine ignores them."""
_MARK: Final = rb'"cache_control"\s*:\s*(?:\{[^{}]*\}|null)'
_MARKS: Final = re.compile(rb",\s*" + _MARK + rb"|" + _MARK + rb"\s*,")
_TEXT_BLOCKS: Final = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})
_ERRORS: Final = frozenset({"invalid_request_error", "authentication_error", "rate_limit_error"})


class _Message(msgspec.Struct):
    role: Raw = NULL
    content: Raw = NULL


class _Block(msgspec.Struct):
    type: str | None = None
    text: Raw = NULL
    id: Raw = NULL
    content: Raw = NULL


class _SystemBlock(msgspec.Struct):
    type: str
    text: str | None = None


_decode_message = msgspec.json.Decoder(_Message).decode
_decode_blocks = msgspec.json.Decoder(list[_Block]).decode
_decode_system = msgspec.json.Decoder(str | list[_SystemBlock]).decode


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int | None = 0
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


_decode_usage = msgspec.json.Decoder(_Usage).decode


class Messages(Api):
    """Strategy of Anthropic's messages: messages and a system prompt in, one message out."""

    types: ClassVar[Types] = {"model": TEXT, "stream": BOOL, "cache_salt": TEXT, "max_tokens": INT}
    limit = "max_tokens"
    positive = ("max_tokens",)
    alone = frozenset({"mm_payload", "return_mm_kwargs"})
    not_for_prefill = frozenset({"stream", "max_tokens", "stop_sequences"})
    streams_handles_since = None
    covers_paths_below = True

    def history(self, members: Members) -> History:
        try:
            raw = tuple(map(bytes, decode_list(members.get("messages", Raw(b"")))))
            system = _system(members.get("system", NULL))
            read = [_read(message) for message in raw]
        except (msgspec.DecodeError, RecursionError):
            return History(odd="messages")
        if not raw:
            return History(odd="messages")
        unproven = next((why for _, why in read if why), None) or _renders_otherwise(members)
        return History((*system, *raw), (*system, *(part for part, _ in read)), unproven=unproven)

    def decode_only(self, members: Members) -> str | None:
        return None if "max_tokens" in members else "max_tokens"

    def read_usage(self, raw: Raw) -> Usage:
        """`input_tokens` are those that were neither read from a cache nor written to one."""
        usage = _decode_usage(raw)
        read = usage.cache_read_input_tokens
        prompt = usage.input_tokens + (read or 0) + (usage.cache_creation_input_tokens or 0)
        return Usage(prompt, usage.output_tokens, None if read is None else Details(read))

    def read_ids(self, members: Members) -> tuple[tuple[int, ...] | None, Raw]:
        return NO_IDS

    def hide_ids(self, members: Members) -> None:
        pass

    def stream_filter(self, listeners: Listeners) -> StreamFilter:
        return MessagesFilter(self, listeners)

    def error(self, message: str, *, type_: str, code: str, param: str | None = None) -> bytes:
        kind = type_ if type_ in _ERRORS else "api_error"
        return encode({"type": "error", "error": {"type": kind, "message": message}})

    def error_event(self, message: str, *, type_: str, code: str, events: int = 0) -> bytes:
        return b"event: error\ndata: " + self.error(message, type_=type_, code=code) + b"\n\n"


class MessagesFilter(NamedEvents):
    """Stream filter of Anthropic's events: `message_delta` has the usage and, by our plugin, the handle."""

    ends = frozenset({b"message_stop"})
    errors = frozenset({b"error"})

    def __init__(self, api: Messages, listeners: Listeners) -> None:
        super().__init__(listeners, api.error_event)
        self._api = api

    def _passed(self, event: bytes, name: bytes) -> bytes:
        if name != b"message_delta":
            return cleaned(event)
        members = self._members(event)
        if FORBIDDEN & members.keys():
            members = self._take_handle(members)
            event = head_of(name) + join(members) + b"\n\n"
        if "usage" not in members:
            return event
        self._listeners.count(usage_of(self._api, members["usage"]))
        self._usage = UsageEvent(head_of(name), members, event)
        return b""


def _system(raw: Raw) -> tuple[bytes, ...]:
    """The system prompt as the engine joins its blocks."""
    if bytes(raw) == b"null":
        return ()
    system = _decode_system(raw)
    if not isinstance(system, str):
        texts = (block.text for block in system if block.type == "text" and block.text)
        system = "".join(text for text in texts if not text.startswith(_BILLING))
    return (encode(system),) if system else ()


def _read(message: bytes) -> tuple[bytes, str | None]:
    """A message without what says nothing to the engine, and what keeps its ids from being sent in its place."""
    said = _decode_message(message)
    content = bytes(said.content)
    if not content.startswith(b"["):
        return _plain(said.role, content), None
    blocks = _decode_blocks(content)
    if len(blocks) == 1 and blocks[0].type == "text":  # the same to the engine as the text alone
        return _plain(said.role, blocks[0].text), None
    kept = _MARKS.sub(b"", message) if _CACHE_CONTROL in message else message
    return kept, next((why for block in blocks if (why := _not_text(block))), None)


def _plain(role: Raw, text: Raw | bytes) -> bytes:
    return b"%s:%s" % (bytes(role), bytes(text))


def _not_text(block: _Block) -> str | None:
    """The type of a block that does not become text by its own words alone."""
    if block.type not in _TEXT_BLOCKS:
        return str(block.type)
    if block.type == "tool_use" and bytes(block.id) in (b"null", b'""'):
        return "tool_use without an id"  # the engine makes one of the time
    content = bytes(block.content)
    if block.type == "tool_result" and content.startswith(b"["):
        return next((str(inner.type) for inner in _decode_blocks(content) if inner.type != "text"), None)
    return None


class _Thinking(msgspec.Struct):
    type: str | None = None


_decode_thinking = msgspec.json.Decoder(_Thinking | None).decode


def _renders_otherwise(members: Members) -> str | None:
    """`/v1/messages/render` takes disabled thinking for effort `none`; serving asks the template which effort that is."""
    try:
        thinking = _decode_thinking(members.get("thinking", NULL))
    except msgspec.DecodeError:
        return "thinking"
    return "thinking" if thinking is not None and thinking.type == "disabled" else None
