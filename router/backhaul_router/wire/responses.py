"""Strategy of `/v1/responses`: OpenAI's Responses API (vLLM's entrypoints/openai/responses)."""

from __future__ import annotations

import re
from typing import ClassVar, Final

import msgspec
from msgspec import Raw

from .answer import client_answer, read_answer
from .endpoint import BOOL, INT, NO_IDS, TEXT, Api, History, Types
from .json_members import FALSE, NULL, Members, decode_list, encode, is_set, split
from .stream import Listeners, NamedEvents, StreamFilter, UsageEvent, cleaned, head_of
from .usage import Details, Usage

_TEXT_ITEMS: Final = frozenset(
    {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
)
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"})
_PLAIN_TOOLS: Final = frozenset({"function", "custom", "namespace", "web_search"})
"""Tools that no vLLM runs itself. Others it may, with several engine requests within one response."""


class _Part(msgspec.Struct):
    type: str = ""


class _Item(msgspec.Struct):
    type: str | None = None
    content: str | list[_Part] | None = None
    output: str | list[_Part] | None = None


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int | None = 0
    input_tokens_details: Details | None = None


class _Ran(msgspec.Struct):
    tokens: Raw = NULL


_IDS: Final = re.compile(rb"\[[0-9, ]+\]")
_decode_item = msgspec.json.Decoder(_Item).decode
_decode_tools = msgspec.json.Decoder(list[_Part] | None).decode
_decode_usage = msgspec.json.Decoder(_Usage).decode
_decode_ran = msgspec.json.Decoder(list[_Ran] | None).decode
_decode_ids = msgspec.json.Decoder(tuple[int, ...] | None).decode


class Responses(Api):
    """Strategy of responses: instructions and items in, a response of items out."""

    types: ClassVar[Types] = {
        "model": TEXT,
        "stream": BOOL,
        "cache_salt": TEXT,
        "max_output_tokens": INT,
        "enable_response_messages": BOOL,
        "truncation": TEXT,
    }
    limit = "max_output_tokens"
    positive = ("max_output_tokens",)
    # What one engine keeps, or a history that the router does not see.
    alone = frozenset(
        {"background", "previous_response_id", "conversation", "previous_input_messages", "prompt"}
        | {"mm_payload", "return_mm_kwargs"}
    )
    not_for_prefill = frozenset(
        {"stream", "max_output_tokens", "max_tool_calls", "stop", "include_stop_str_in_output", "include"}
        | {"top_logprobs", "enable_response_messages", "request_id"}
    )
    asks_for_ids = "enable_response_messages"
    shows_ids = True
    streams_handles_since = (0, 32)
    refers_to_answers = True

    def history(self, members: Members) -> History:
        raw = bytes(members.get("input", NULL))
        instructions = bytes(members.get("instructions", NULL))
        first = (instructions,) if instructions.startswith(b'"') else ()
        if raw.startswith(b'"'):
            return History((*first, raw), (*first, raw))
        try:
            items = tuple(map(bytes, decode_list(raw)))
        except (msgspec.DecodeError, RecursionError):
            return History(odd="input")
        if not items or not all(item.startswith(b"{") for item in items):
            return History(odd="input")
        unproven = next((why for item in items if (why := _not_text(item))), None)
        return History((*first, *items), (*first, *items), unproven=unproven)

    def decode_only(self, members: Members) -> str | None:
        """Truncation depends on each leg's token limit; stored items and tools that the engine runs are out of sight."""
        if "truncation" in members and bytes(members["truncation"]) != b'"disabled"':
            return "truncation"
        if is_set(members.get("tools")):
            try:
                tools = _decode_tools(members["tools"])
            except msgspec.DecodeError:
                return "tools"
            if not {tool.type for tool in tools or ()} <= _PLAIN_TOOLS:
                return "tools"
        return "input" if b'"item_reference"' in bytes(members.get("input", NULL)) else None

    def for_prefill(self, members: Members) -> Members:
        return {"store": FALSE}

    def read_usage(self, raw: Raw) -> Usage:
        usage = _decode_usage(raw)
        return Usage(usage.input_tokens, usage.output_tokens, usage.input_tokens_details)

    def read_ids(self, members: Members) -> tuple[tuple[int, ...] | None, Raw]:
        try:
            ran = _decode_ran(members.get("input_messages", NULL))
            made = _decode_ran(members.get("output_messages", NULL))
        except msgspec.DecodeError:
            return NO_IDS  # messages of another kind, as gpt-oss has them
        if not ran or len(ran) != 1 or len(made or ()) > 1 or _IDS.fullmatch(ran[0].tokens) is None:
            return NO_IDS
        return (_decode_ids(made[0].tokens) if made else ()), ran[0].tokens

    def hide_ids(self, members: Members) -> None:
        for name in ("input_messages", "output_messages"):
            if name in members:
                members[name] = NULL

    def stream_filter(self, listeners: Listeners) -> StreamFilter:
        return ResponsesFilter(self, listeners)

    def error_event(self, message: str, *, type_: str, code: str, events: int = 0) -> bytes:
        """OpenAI documents the fields at the top and sends them within `error`; clients read either."""
        fields = {"code": code, "message": message, "param": None}
        told = {"type": "error", "sequence_number": events, **fields, "error": {"type": type_, **fields}}
        return b"event: error\ndata: " + encode(told) + b"\n\n"


class ResponsesFilter(NamedEvents):
    """Stream filter of OpenAI's events: the last one has the whole response, the handle with it."""

    early = frozenset({b"response.created", b"response.queued", b"response.in_progress"})
    ends = frozenset({b"response.completed", b"response.incomplete", b"response.cancelled"})
    errors = frozenset({b"response.failed", b"error"})

    def __init__(self, api: Responses, listeners: Listeners) -> None:
        super().__init__(listeners, api.error_event)
        self._api = api

    def _passed(self, event: bytes, name: bytes) -> bytes:
        if name not in self.ends:
            return cleaned(event)
        members = self._members(event)
        answer = read_answer(self._api, split(members.get("response", NULL)))
        self.handle, self.generated, self.ran = answer.params.handle, answer.generated, answer.ran
        self.answer_id = answer.id
        if self._listeners.account is not None:
            self._listeners.account(answer.params.account)
        self._listeners.count(answer.usage)
        shown = client_answer(self._api, answer.members, shows_ids=self._listeners.shows_ids)
        self._usage = UsageEvent(head_of(name), members, answer=shown)
        return b""


def _not_text(item: bytes) -> str | None:
    """The type of an item, or of a part of it, that does not become text by its own words alone."""
    try:
        read = _decode_item(item)
    except msgspec.DecodeError:
        return "content"
    if (read.type or "message") not in _TEXT_ITEMS:
        return read.type
    for parts in (read.content, read.output):
        for part in parts if isinstance(parts, list) else ():
            if part.type not in _TEXT_PARTS:
                return part.type or "content"
    return None
