"""HTTP server: the endpoints of one engine, and the failures that tests order."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

import msgspec
from aiohttp import web

from . import messages_api, requests, responses_api
from .bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, convert
from .config import EngineConfig, Faults, Received
from .core import EngineCore
from .errors import ApiError, EngineDeadError, KVLoadError
from .messages_api import CountTokensBody, MessagesBody
from .output import Choice
from .rendered import generate_request
from .requests import Call
from .responses import Writer
from .responses_api import ResponsesBody, ResponseWriter
from .sequence import Seq
from .template import Prompt
from .tokenizer import decode, token_str

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_cut_after: ContextVar[int | None] = ContextVar("cut_after", default=None)
"""Bytes of the body after which the request being handled loses its connection."""

_SCALE_OUT_OFF = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


class Server:
    """Routes of one engine core."""

    def __init__(self, core: EngineCore, faults: Faults, received: deque[Received]) -> None:
        self.core = core
        self.config: EngineConfig = core.config
        self.faults = faults
        self.received = received

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 * 2**20, middlewares=[self._faults, self._errors])
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/responses", self.responses)
        app.router.add_post("/v1/messages", self.messages)
        app.router.add_post("/v1/messages/count_tokens", self.count_tokens)
        app.router.add_post("/v1/chat/completions/render", self.render_chat)
        app.router.add_post("/v1/responses/render", self.render_responses)
        app.router.add_post("/v1/messages/render", self.render_messages)
        app.router.add_post("/v1/completions/render", self.render_completions)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_post("/reset_prefix_cache", self.reset_prefix_cache)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ping", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", self.metrics)
        return app

    # -- middlewares -----------------------------------------------------------------------------------------

    @web.middleware
    async def _faults(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        raw = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(request.method, request.path, headers, _json_or_none(raw), raw))
        faults = self.faults
        if not faults.strikes(request.path):
            return await handler(request)
        if faults.stall:
            await asyncio.Event().wait()
        if faults.drop:
            return _hang_up(request)
        if faults.status is not None:
            error = ApiError(faults.status, "ServiceUnavailableError", "failure ordered by a test")
            return web.json_response(error.body(), status=error.status)
        limit = faults.die_after_bytes or 0
        previous = _cut_after.set(limit)
        try:
            response = await handler(request)
        finally:
            _cut_after.reset(previous)
        if isinstance(response, web.Response):
            return await self._cut(request, response, limit)
        return response

    async def _cut(self, request: web.Request, response: web.Response, limit: int) -> web.StreamResponse:
        body = response.body if isinstance(response.body, bytes) else b""
        partial = web.StreamResponse(status=response.status, headers={"Content-Type": response.content_type})
        partial.content_length = len(body)
        await partial.prepare(request)
        await partial.write(body[: min(limit, max(len(body) - 1, 0))])
        return _hang_up(request)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            text = {404: "Not Found", 405: "Method Not Allowed"}.get(error.status, error.reason)
            return _error(ApiError(error.status, text, text))
        except ApiError as error:
            return _error(error)
        except KVLoadError:
            return _error(ApiError.internal())
        except EngineDeadError:
            return _error(
                ApiError.internal("EngineCore encountered an issue. See stack trace (above) for the root cause.")
            )

    # -- generation ------------------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, ChatBody)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CompletionBody)

    async def _generate(self, request: web.Request, type_: type[ChatBody] | type[CompletionBody]) -> web.StreamResponse:
        call, choices = await self._admit(request, convert(await _body(request), type_))
        writer = Writer.make(call, self.core, choices)
        if not call.stream:
            return web.json_response(body=msgspec.json.encode(await writer.whole()))
        return await self._stream(request, writer.stream())

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = convert(await _body(request), MessagesBody)
        chat = messages_api.chat_body(body)
        try:
            call, choices = await self._admit(request, chat)
            writer = Writer.make(call, self.core, choices)
            if not call.stream:
                message = messages_api.message_of(await writer.whole())
                return web.json_response(body=msgspec.json.encode(message))
        except ApiError as error:
            return self._message_error(error)
        except (KVLoadError, EngineDeadError):
            return self._message_error(ApiError.internal())
        return await self._stream(request, _message_events(writer))

    def _message_error(self, error: ApiError) -> web.Response:
        body = messages_api.error_of(error, anthropics_words=self.config.speaks_033)
        return web.json_response(body, status=error.status)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        body = convert(await _body(request), ResponsesBody)
        try:
            chat = responses_api.chat_body(body)
        except ApiError:
            self.core.reject(body.kv_transfer_params)
            raise
        call, (choice,) = await self._admit(request, chat)
        id_ = body.request_id or f"resp_{uuid.uuid4().hex}"
        writer = ResponseWriter(body, call, self.core, choice, id_, int(time.time()))
        if not call.stream:
            return web.json_response(body=msgspec.json.encode(await writer.whole()))
        try:
            return await self._stream(request, writer.stream())
        except (KVLoadError, EngineDeadError):
            return _hang_up(request)

    async def _admit(self, request: web.Request, body: ChatBody | CompletionBody) -> tuple[Call, list[Choice]]:
        if self.core.dead is not None:
            raise self.core.dead
        try:
            call = self._call(request, body)
        except ApiError:
            # The transfer parameters are looked at although the request is refused: P's blocks are let go.
            self.core.reject(body.kv_transfer_params)
            raise
        await self._pay_for_rendering(call)
        return call, self._choices(call)

    def _call(self, request: web.Request, body: ChatBody | CompletionBody) -> Call:
        self._check_model(body.model)
        request_id = request.headers.get("X-Request-Id")
        limit, model = self.core.max_model_len, self.config.model
        if isinstance(body, ChatBody):
            return requests.chat_call(body, request_id=request_id, max_model_len=limit, model=model)
        return requests.completion_call(body, request_id=request_id, max_model_len=limit, model=model)

    def _choices(self, call: Call) -> list[Choice]:
        choices: list[Choice] = []
        for index, prompt in enumerate(call.prompts):
            base = f"chatcmpl-{call.id}" if call.chat else f"cmpl-{call.id}-{index}"
            for copy in range(call.n):
                request_id = f"{copy}_{base}" if call.n > 1 else base
                seq = self._sequence(call, prompt, f"{request_id}-{uuid.uuid4().hex[:8]}", copy, call.max_tokens[index])
                choices.append(Choice(call, seq, len(choices)))
        return choices

    def _sequence(self, call: Call, prompt: Prompt, request_id: str, copy: int, max_tokens: int) -> Seq:
        return Seq(
            request_id=request_id,
            prompt=prompt,
            script=call.script,
            max_tokens=max_tokens,
            min_tokens=call.min_tokens,
            ignore_eos=call.ignore_eos,
            stop_token_ids=call.stop_token_ids,
            token_steps=bool(call.stop),
            params=dict(call.params) if call.params else None,
            salt=call.salt,
            choice=copy,
        )

    async def _stream(self, request: web.Request, written: AsyncGenerator[bytes, None]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        limit = _cut_after.get()
        await response.prepare(request)
        sent = 0
        async with aclosing(written) as events:
            async for event in events:
                if limit is not None and sent + len(event) > limit:
                    await response.write(event[: limit - sent])
                    return _hang_up(request)
                await response.write(event)
                sent += len(event)
        await response.write_eof()
        return response

    # -- rendering and tokens --------------------------------------------------------------------------------

    async def render_chat(self, request: web.Request) -> web.StreamResponse:
        self._check_scale_out()
        return await self._rendered(request, convert(await _body(request), ChatBody))

    async def _rendered(self, request: web.Request, body: ChatBody) -> web.StreamResponse:
        call = self._call(request, body)
        await self._pay_for_rendering(call)
        return web.json_response(generate_request(call, body, 0))

    async def render_messages(self, request: web.Request) -> web.StreamResponse:
        """Disabled thinking means effort `none` here, whatever the template makes of it when it is served."""
        self._check_scale_out()
        return await self._rendered(request, messages_api.chat_body(convert(await _body(request), MessagesBody)))

    async def render_responses(self, request: web.Request) -> web.StreamResponse:
        self._check_scale_out()
        body = convert(await _body(request), ResponsesBody)
        if body.previous_response_id is not None:
            message = "previous_response_id is not supported by the stateless render endpoint."
            raise ApiError(400, "invalid_request_error", message, param="previous_response_id")
        return await self._rendered(request, responses_api.chat_body(body))

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        body = messages_api.counted_body(convert(await _body(request), CountTokensBody))
        self._check_model(body.model)
        count = len(requests.render_chat(body).tokens)
        return web.json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def render_completions(self, request: web.Request) -> web.StreamResponse:
        self._check_scale_out()
        body = convert(await _body(request), CompletionBody)
        call = self._call(request, body)
        await self._pay_for_rendering(call)
        return web.json_response([generate_request(call, body, index) for index in range(len(call.prompts))])

    async def _pay_for_rendering(self, call: Call) -> None:
        if cost := self.config.costs.render_s * sum(len(prompt.tokens) for prompt in call.prompts):
            await self.core.clock.sleep(cost)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        body = convert(await _body(request), TokenizeBody)
        self._check_model(body.model)
        tokens = requests.tokenize(body)
        return web.json_response(
            {
                "count": len(tokens),
                "max_model_len": self.core.max_model_len,
                "tokens": tokens,
                "token_strs": [token_str(token) for token in tokens] if body.return_token_strs else None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        body = convert(await _body(request), DetokenizeBody)
        self._check_model(body.model)
        requests.check_vocabulary(body.tokens, param=None)
        return web.json_response({"prompt": decode(body.tokens, skip_special_tokens=False)})

    # -- about the engine ------------------------------------------------------------------------------------

    async def models(self, request: web.Request) -> web.StreamResponse:
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex}",
            "object": "model_permission",
            "created": int(time.time()),
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self.config.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.core.max_model_len,
            "permission": [permission],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.core.dead is None else 503)

    async def version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": self.config.vllm_version})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        self.core.reap()
        text = self.core.metrics.exposition(
            model=self.config.model,
            usage=self.core.pool.usage,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            prefix_caching=self.config.prefix_caching,
            plugin=self.config.stream_handles == "plugin",
        )
        if (connector := self.core.connector) is not None:
            text += connector.exposition()
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        reset_external = request.query.get("reset_external", "").lower() in ("1", "true", "on", "yes")
        return web.json_response({"success": self.core.reset_cache(reset_external=reset_external)})

    def _check_model(self, model: str | None) -> None:
        if model and model != self.config.model:
            raise ApiError.unknown_model(model, self.config.model)

    def _check_scale_out(self) -> None:
        if not self.config.enable_scale_out:
            raise ApiError.forbidden(_SCALE_OUT_OFF)


async def _message_events(writer: Writer) -> AsyncGenerator[bytes, None]:
    """The head went out with status 200, so a failure is an event of its own, and the last."""
    try:
        async with aclosing(writer.chunks()) as chunks, aclosing(messages_api.message_events(chunks)) as events:
            async for event in events:
                yield event
    except (KVLoadError, EngineDeadError):
        yield messages_api.broken(anthropics_words=writer.core.config.speaks_033)


async def _body(request: web.Request) -> Any:
    if request.content_type != "application/json":
        raise ApiError.invalid("Unsupported Media Type: Only 'application/json' is allowed", param="header")
    try:
        return msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise ApiError.invalid(f"JSON decode error: {error}", param="body") from error


def _json_or_none(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw) if raw else None
    except msgspec.DecodeError:
        return None


def _error(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status)


def _hang_up(request: web.Request) -> web.Response:
    """Ends the connection at once, as the death of the process would."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
