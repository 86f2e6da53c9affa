"""Endpoint `/v1/responses`: OpenAI's Responses API over the same prompts (vLLM 0.32: `entrypoints/openai/responses`).

Items that continue an assistant's turn (reasoning, text, calls) become one message, as there.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .bodies import ChatBody, Json
from .core import EngineCore
from .errors import ApiError
from .output import Choice
from .requests import Call


class ResponsesBody(msgspec.Struct, kw_only=True):
    input: str | list[dict[str, Json]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    background: bool | None = False
    store: bool | None = True
    previous_response_id: str | None = None
    metadata: dict[str, Json] | None = None
    parallel_tool_calls: bool | None = True
    reasoning: dict[str, Json] | None = None
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Json] | None = None
    tools: list[dict[str, Json]] = []
    tool_choice: str | dict[str, Json] = "auto"
    truncation: str | None = "disabled"
    user: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    enable_response_messages: bool = False
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    vllm_xargs: dict[str, Json] | None = None
    kv_transfer_params: dict[str, Json] | None = None
    chat_template_kwargs: dict[str, Json] | None = None


def chat_body(body: ResponsesBody) -> ChatBody:
    """The same request to the chat endpoint. Raises `ApiError`."""
    _check(body)
    tools = [_tool(tool) for tool in body.tools if tool.get("type") == "function"]
    named = isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == "function"
    choice: Any = body.tool_choice
    if named:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    wanted = (body.text or {}).get("format") or {}
    return ChatBody(
        model=body.model,
        messages=list(_messages(body)),
        max_tokens=body.max_output_tokens,
        tools=tools or None,
        tool_choice=choice if tools else None,
        response_format=_response_format(wanted),
        reasoning_effort=(body.reasoning or {}).get("effort"),
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        stream=body.stream,
        cache_salt=body.cache_salt,
        vllm_xargs=body.vllm_xargs,
        kv_transfer_params=body.kv_transfer_params or None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


# -- the request ------------------------------------------------------------------------------------------------------


def _check(body: ResponsesBody) -> None:
    if body.background:
        if not body.store:
            raise ApiError.bad_request("background can only be used when `store` is true", param="background")
        message = (
            "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
            "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
        )
        raise ApiError(400, "invalid_request_error", message, param="background")
    if (before := body.previous_response_id) is not None:
        message = f"Response with id '{before}' not found."
        raise ApiError(404, "invalid_request_error", message, param="response_id")


def _messages(body: ResponsesBody) -> Iterator[dict[str, Json]]:
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    open_: dict[str, Json] | None = None
    """The assistant's message that the next item may go on."""
    for item in body.input:
        part = _assistant_part(item)
        if part is None:
            if open_ is not None:
                yield open_
                open_ = None
            yield _other(item)
        elif open_ is not None and not part.keys() & open_.keys() - {"role", "tool_calls"}:
            calls = [*open_.get("tool_calls", ()), *part.get("tool_calls", ())]
            open_ |= part | ({"tool_calls": calls} if calls else {})
        else:
            if open_ is not None:
                yield open_
            open_ = part
    if open_ is not None:
        yield open_


def _assistant_part(item: dict[str, Json]) -> dict[str, Json] | None:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "reasoning":
        if item.get("encrypted_content"):
            raise ApiError.bad_request("Encrypted content is not supported.", param="input")
        said = item.get("content") or item.get("summary") or [{"text": ""}]
        return {"role": "assistant", "reasoning": said[0]["text"]}
    if kind == "message" and item.get("role") == "assistant":
        content = item.get("content")
        return {"role": "assistant", "content": content[0]["text"] if isinstance(content, list) else content}
    return None


def _other(item: dict[str, Json]) -> dict[str, Json]:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    if kind == "message" and "role" in item:
        return {name: value for name, value in item.items() if name != "type"}
    raise ApiError.bad_request(f"Unsupported input item type: {kind}", param="input")


def _tool(tool: dict[str, Json]) -> dict[str, Json]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _response_format(wanted: dict[str, Json]) -> dict[str, Json] | None:
    match wanted.get("type"):
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.get("schema")}}
        case _:
            return None


# -- the answer -------------------------------------------------------------------------------------------------------

_SINCE_033 = ("prompt_cache_options", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")


@dataclass
class ResponseWriter:
    """Writes the answer to one request."""

    body: ResponsesBody
    call: Call
    core: EngineCore
    choice: Choice
    id: str
    created: int
    _sequence: int = 0
    _items: list[dict[str, Json]] = field(default_factory=list)

    async def whole(self) -> dict[str, Json]:
        await self.choice.finish(self.core)
        return self._response(self._final_status, self._output())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Events. A failure of the engine breaks the stream off: vLLM has no event for it."""
        started = self._response("in_progress", [], final=False)
        yield self._event("response.created", {"response": started})
        yield self._event("response.in_progress", {"response": started})
        events = self._calling() if self.choice.tool_parser() is not None else self._saying()
        async with aclosing(events):
            async for one in events:
                yield one
        end = self._final_status if self._speaks_033 else "completed"
        yield self._event(f"response.{end}", {"response": self._response(self._final_status, self._items)})

    async def _saying(self) -> AsyncGenerator[bytes, None]:
        id_ = f"msg_{uuid.uuid4().hex}"
        where = {"output_index": 0, "content_index": 0, "item_id": id_}
        opened = False
        async with aclosing(self.choice.deltas(self.core)) as deltas:
            async for delta in deltas:
                if not delta.text:
                    continue
                if not opened:
                    opened = True
                    item = self._message(id_, "in_progress", [])
                    yield self._event("response.output_item.added", {"output_index": 0, "item": item})
                    yield self._event("response.content_part.added", where | {"part": _text("", [])})
                yield self._event("response.output_text.delta", where | {"delta": delta.text, "logprobs": []})
        if not opened:
            return
        part = _text(self.choice.text, None)
        yield self._event("response.output_text.done", where | {"text": self.choice.text, "logprobs": []})
        yield self._event("response.content_part.done", where | {"part": part})
        self._items.append(self._message(id_, self._item_status, [part]))
        yield self._event("response.output_item.done", {"output_index": 0, "item": self._items[-1]})

    async def _calling(self) -> AsyncGenerator[bytes, None]:
        parser = self.choice.tool_parser()
        if parser is None:
            return
        item: dict[str, Json] = {}
        async with aclosing(self.choice.deltas(self.core)) as deltas:
            async for delta in deltas:
                for part in parser.feed(delta.token_ids):
                    if "id" in part:
                        item = self._function_call(part["id"], part["function"]["name"], "", "in_progress")
                        yield self._event("response.output_item.added", {"output_index": 0, "item": dict(item)})
                    if fresh := part["function"].get("arguments"):
                        item["arguments"] += fresh
                        where = {"output_index": 0, "item_id": item["id"]}
                        yield self._event("response.function_call_arguments.delta", where | {"delta": fresh})
        if not item:
            return
        self._items.append(item | {"status": self._item_status})
        done = {"output_index": 0, "item_id": item["id"], "arguments": item["arguments"], "name": item["name"]}
        yield self._event("response.function_call_arguments.done", done)
        yield self._event("response.output_item.done", {"output_index": 0, "item": self._items[-1]})

    def _event(self, name: str, fields: dict[str, Json]) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        data = msgspec.json.encode({**fields, "sequence_number": number, "type": name})
        return f"event: {name}\ndata: ".encode() + data + b"\n\n"

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def _final_status(self) -> str:
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    @property
    def _item_status(self) -> str:
        return self._final_status if self._speaks_033 else "completed"

    @property
    def _speaks_033(self) -> bool:
        return self.core.config.speaks_033

    def _output(self) -> list[dict[str, Json]]:
        if calls := self.choice.tool_calls():
            functions = [(call["id"], call["function"]) for call in calls]
            return [self._function_call(id_, f["name"], f["arguments"], self._item_status) for id_, f in functions]
        if not self.choice.text:
            return []
        return [self._message(f"msg_{uuid.uuid4().hex}", self._item_status, [_text(self.choice.text, None)])]

    @staticmethod
    def _message(id_: str, status: str, content: list[dict[str, Json]]) -> dict[str, Json]:
        return {"id": id_, "content": content, "role": "assistant", "status": status, "type": "message", "phase": None}

    @staticmethod
    def _function_call(call_id: str, name: str, arguments: str, status: str) -> dict[str, Json]:
        head = {"arguments": arguments, "call_id": call_id, "name": name, "type": "function_call"}
        return head | {"id": f"fc_{uuid.uuid4().hex}", "namespace": None, "status": status}

    def _response(self, status: str, output: list[dict[str, Json]], *, final: bool = True) -> dict[str, Json]:
        body, call, shown = self.body, self.call, self.body.enable_response_messages and final
        prompt, made = call.prompts[0].tokens, self.choice.token_ids
        return {
            "id": self.id,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "model": call.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "tool_choice": body.tool_choice if body.tools else "none",
            "tools": body.tools,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "background": False,
            "max_output_tokens": call.max_tokens[0],
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": body.reasoning,
            "service_tier": "auto",
            "status": status,
            "text": body.text,
            "top_logprobs": None,
            "truncation": body.truncation,
            "usage": self._usage() if final else None,
            "user": body.user,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": self.choice.kv_transfer_params if final else None,
            "ec_transfer_params": None,
            "input_messages": [_raw("", prompt)] if shown else None,
            "output_messages": [_raw(self.choice.text, made)] if shown and made else None,
            **(dict.fromkeys(_SINCE_033) if self._speaks_033 else {}),
        }

    def _usage(self) -> dict[str, Json]:
        prompt, made = len(self.call.prompts[0].tokens), len(self.choice.token_ids)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": self.choice.cached_tokens,
                "cache_write_tokens": self.choice.seq.num_created,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": made,
            "output_tokens_details": {
                "reasoning_tokens": 0,
                "tool_output_tokens": 0,
                "output_tokens_per_turn": [],
                "tool_output_tokens_per_turn": [],
            },
            "total_tokens": prompt + made,
        }


def _text(text: str, logprobs: list[Json] | None) -> dict[str, Json]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _raw(message: str, tokens: list[int]) -> dict[str, Json]:
    return {"message": message, "tokens": tokens, "type": "raw_message_tokens"}
