"""Endpoint `/v1/messages`: Anthropic's API over the chat endpoint, as vLLM does it (`entrypoints/anthropic/serving.py`)."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import msgspec

from .bodies import ChatBody, Json
from .errors import ApiError

_BILLING = "x-anthropic-billing-header"
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's words for statuses; others are an `api_error`."""
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesBody(msgspec.Struct, kw_only=True):
    model: str
    messages: list[dict[str, Json]]
    max_tokens: int
    system: str | list[dict[str, Json]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Json]] | None = None
    tool_choice: dict[str, Json] | None = None
    thinking: dict[str, Json] | None = None
    output_config: dict[str, Json] | None = None
    metadata: dict[str, Json] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Json] | None = None
    vllm_xargs: dict[str, Json] | None = None
    chat_template_kwargs: dict[str, Json] | None = None


class CountTokensBody(msgspec.Struct, kw_only=True):
    model: str
    messages: list[dict[str, Json]]
    system: str | list[dict[str, Json]] | None = None
    tools: list[dict[str, Json]] | None = None
    tool_choice: dict[str, Json] | None = None
    chat_template_kwargs: dict[str, Json] | None = None


def chat_body(body: MessagesBody) -> ChatBody:
    """The same request to the chat endpoint. Raises `ApiError`."""
    if body.max_tokens <= 0:
        raise ApiError.invalid("Value error, max_tokens must be positive", param="body.max_tokens")
    is_prefill = bool((body.kv_transfer_params or {}).get("do_remote_decode"))
    thinking = body.thinking or {}
    if thinking.get("type") == "enabled" and thinking["budget_tokens"] >= body.max_tokens and not is_prefill:
        raise ApiError.invalid("Value error, thinking.budget_tokens must be less than max_tokens", param="body")
    tools, choice = _tools(body.tools, body.tool_choice)
    effort = (body.output_config or {}).get("effort")
    return ChatBody(
        model=body.model,
        messages=[*_system(body.system), *_messages(body.messages)],
        max_tokens=body.max_tokens,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        cache_salt=body.cache_salt,
        kv_transfer_params=body.kv_transfer_params,
        vllm_xargs=body.vllm_xargs,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort="none" if thinking.get("type") == "disabled" else effort,
        tools=tools,
        tool_choice=choice,
        stream=body.stream,
        stream_options={"include_usage": True, "continuous_usage_stats": True} if body.stream else None,
    )


def counted_body(body: CountTokensBody) -> ChatBody:
    tools, choice = _tools(body.tools, body.tool_choice)
    messages = [*_system(body.system), *_messages(body.messages)]
    return ChatBody(
        model=body.model,
        messages=messages,
        tools=tools,
        tool_choice=choice,
        chat_template_kwargs=body.chat_template_kwargs,
    )


# -- the request ------------------------------------------------------------------------------------------------------


def _system(system: str | list[dict[str, Json]] | None) -> Iterator[dict[str, Json]]:
    if isinstance(system, list):
        texts = (str(block.get("text") or "") for block in system if block.get("type") == "text")
        system = "".join(text for text in texts if not text.startswith(_BILLING))
    if system:
        yield {"role": "system", "content": system}


def _messages(messages: list[dict[str, Json]]) -> Iterator[dict[str, Json]]:
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise ApiError.invalid(
                "Input should be 'user', 'assistant' or 'system'", param=f"body.messages.{index}.role"
            )
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif isinstance(content, list):
            yield from _from_blocks(role, content)
        else:
            raise ApiError.invalid("Input should be a valid string", param=f"body.messages.{index}.content")


def _from_blocks(role: str, blocks: list[dict[str, Json]]) -> Iterator[dict[str, Json]]:
    parts: list[dict[str, Json]] = []
    calls: list[dict[str, Json]] = []
    reasoning = ""
    for block in blocks:
        match block.get("type"):
            case "text" if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
            case "image":
                parts.append({"type": "image_url", "image_url": {"url": _url(block.get("source") or {})}})
            case "thinking":
                reasoning += str(block.get("thinking") or "")
            case "tool_use":
                arguments = json.dumps(block.get("input") or {})
                function = {"name": block.get("name") or "", "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                yield from _tool_result(block)
    message: dict[str, Json] = {"role": role}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if parts:
        only_text = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if only_text else parts
    if role != "user" or "content" in message:
        yield message


def _tool_result(block: dict[str, Json]) -> Iterator[dict[str, Json]]:
    content = block.get("content")
    inner = content if isinstance(content, list) else []
    text = content if isinstance(content, str) else "\n".join(i["text"] for i in inner if i.get("type") == "text")
    yield {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text}
    images = [_url(i.get("source") or {}) for i in inner if i.get("type") == "image"]
    if images:
        yield {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in images]}


def _url(source: dict[str, Json]) -> str:
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _tools(
    tools: list[dict[str, Json]] | None, choice: dict[str, Json] | None
) -> tuple[list[dict[str, Json]] | None, str | dict[str, Json] | None]:
    if tools is None:
        return None, None
    functions = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": {"type": "object", **tool["input_schema"]},
            },
        }
        for tool in tools
    ]
    match (choice or {}).get("type"):
        case "any":
            return functions, "required"
        case "none":
            return functions, "none"
        case "tool":
            return functions, {"type": "function", "function": {"name": (choice or {})["name"]}}
        case _:
            return functions, "auto"


# -- the answer -------------------------------------------------------------------------------------------------------


def message_of(answer: dict[str, Json]) -> dict[str, Json]:
    """A whole chat answer as a message. What is unset is left out."""
    (choice,) = answer["choices"]
    said = choice["message"]
    content: list[dict[str, Json]] = []
    if said.get("reasoning"):
        content.append({"type": "thinking", "thinking": said["reasoning"], "signature": uuid.uuid4().hex})
    if said["content"]:
        content.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls") or ():
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        content.append(block | {"input": json.loads(function["arguments"])})
    stop, sequence = _stop(choice["finish_reason"], choice["stop_reason"], bool(said.get("tool_calls")))
    whole = {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "content": content or [{"type": "text", "text": ""}],
        "model": answer["model"],
        "stop_reason": stop,
        "stop_sequence": sequence,
        "usage": _usage(answer["usage"]),
        "kv_transfer_params": answer["kv_transfer_params"],
    }
    return {name: value for name, value in whole.items() if value is not None}


async def message_events(chunks: AsyncIterator[dict[str, Json]]) -> AsyncGenerator[bytes, None]:
    """A chat stream's chunks as Anthropic's events. Our plugin's handle goes from the finishing chunk to `message_delta`;
    vLLM's own, of 0.33, gets lost."""
    started = False
    writing = _Blocks()
    finish: tuple[Any, Any] = (None, None)
    handle: Json = None
    async for chunk in chunks:
        if not started:
            started = True
            head = {"id": chunk["id"], "type": "message", "role": "assistant", "content": [], "model": chunk["model"]}
            usage = {"stop_reason": None, "stop_sequence": None, "usage": _usage(chunk.get("usage"))}
            yield event("message_start", {"message": head | usage})
            continue
        params = chunk.get("kv_transfer_params") or {}
        handle = params if "token_ids" in params.get("backhaul", {}) else handle
        if not chunk["choices"]:
            for one in writing.stop():
                yield one
            stop, sequence = _stop(*finish, writing.used_tool)
            delta = {"delta": {"stop_reason": stop, "stop_sequence": sequence}, "usage": _usage(chunk["usage"])}
            yield event("message_delta", delta if handle is None else delta | {"kv_transfer_params": handle})
            continue
        (choice,) = chunk["choices"]
        if choice["finish_reason"] is not None:
            finish = choice["finish_reason"], choice.get("stop_reason")
        for one in writing.add(choice["delta"]):
            yield one
    yield event("message_stop", {})


class _Blocks:
    """The content block being written."""

    def __init__(self) -> None:
        self.used_tool = False
        self._index = 0
        self._type: str | None = None

    def add(self, delta: dict[str, Json]) -> Iterator[bytes]:
        if text := delta.get("content"):
            if self._type != "text":
                yield from self._start({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            if "id" in call:
                self.used_tool = True
                named = {"id": call["id"], "name": call["function"]["name"], "input": {}}
                yield from self._start({"type": "tool_use", **named})
            if arguments := call["function"].get("arguments"):
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def stop(self) -> Iterator[bytes]:
        if self._type is not None:
            yield event("content_block_stop", {"index": self._index})
            self._type = None
            self._index += 1

    def _start(self, block: dict[str, Json]) -> Iterator[bytes]:
        yield from self.stop()
        self._type = block["type"]
        yield event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Json]) -> bytes:
        return event("content_block_delta", {"index": self._index, "delta": delta})


def event(name: str, fields: dict[str, Json]) -> bytes:
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode({"type": name, **fields}) + b"\n\n"


def error_of(error: ApiError, *, anthropics_words: bool) -> dict[str, Json]:
    """Up to 0.32 the type is vLLM's own word."""
    kind = _ERRORS.get(error.status, "api_error") if anthropics_words else error.type
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def broken(*, anthropics_words: bool) -> bytes:
    """The event of a stream whose engine failed."""
    kind = "api_error" if anthropics_words else "internal_error"
    return event("error", {"error": {"type": kind, "message": "Internal server error"}})


def _stop(finish: str | None, stop: int | str | None, used_tool: bool) -> tuple[str | None, str | None]:
    if finish == "length":
        return "max_tokens", None
    if used_tool:
        return "tool_use", None
    return ("stop_sequence", stop) if isinstance(stop, str) else (_STOPS.get(finish or "", "end_turn"), None)


def _usage(usage: dict[str, Json] | None) -> dict[str, Json]:
    """`input_tokens` are those that no cache had and none has now; the cache fields stand where they are known."""
    if usage is None:
        return {"input_tokens": 0, "output_tokens": 0}
    details = usage.get("prompt_tokens_details") or {}
    read, created = details.get("cached_tokens"), details.get("created_cache_tokens")
    out = {
        "input_tokens": max(0, usage["prompt_tokens"] - (read or 0) - (created or 0)),
        "output_tokens": usage["completion_tokens"],
    }
    if created is not None:
        out["cache_creation_input_tokens"] = created
    if read is not None:
        out["cache_read_input_tokens"] = read
    return out
