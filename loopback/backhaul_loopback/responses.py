"""Response serialization, field by field as vLLM has it (`serving.py` of `openai/chat_completion`, `completion`).

Whole answers carry every field of the model, unset ones as null; streamed chunks carry what was set.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from backhaul_protocol import KEY, VERSION

from .bodies import Json
from .core import EngineCore
from .errors import ApiError, EngineDeadError, KVLoadError
from .kv import kv_value
from .output import Choice, Delta
from .requests import Call
from .tokenizer import decode, token_str

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Writer:
    """Writes the answer to one call."""

    call: Call
    core: EngineCore
    choices: Sequence[Choice]
    details: bool
    """Whether usage says how many tokens were cached (`--enable-prompt-tokens-details`)."""
    plugin: bool
    """Whether the last streamed chunk carries the handle and the ids."""
    created: int

    @classmethod
    def make(cls, call: Call, core: EngineCore, choices: Sequence[Choice]) -> Writer:
        config = core.config
        plugin = config.stream_handles == "plugin" and call.carries_params and len(choices) == 1
        return cls(call, core, choices, config.enable_prompt_tokens_details, plugin, int(time.time()))

    # -- whole answers ---------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Json]:
        for choice in self.choices:
            await choice.finish(self.core)
        build = self._chat_choice if self.call.chat else self._completion_choice
        head = {
            "id": self._id,
            "object": "chat.completion" if self.call.chat else "text_completion",
            "created": self.created,
            "model": self.call.model,
            "choices": [build(choice) for choice in self.choices],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._usage(whole=True),
        }
        tail = {"kv_transfer_params": self.choices[0].kv_transfer_params, "ec_transfer_params": None, "metrics": None}
        if not self.call.chat:
            return head | tail
        ids = self.call.prompts[0].tokens if self.call.return_token_ids else None
        return head | {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None} | tail

    def _chat_choice(self, choice: Choice) -> dict[str, Json]:
        calls = choice.tool_calls()
        text: str | None = choice.text
        if calls:
            text = None if not self._demanded_tool else ""
        message: dict[str, Json] = {
            "role": "assistant",
            "content": text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            **({"tool_calls": calls} if calls else {}),
            "reasoning": None,
        }
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._chat_logprobs(choice, choice.token_ids, 0),
            "finish_reason": self._finish_reason(choice.finish_reason, bool(calls)),
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self.call.return_token_ids else None,
            "routed_experts": None,
            **self._weights,
        }

    def _completion_choice(self, choice: Choice) -> dict[str, Json]:
        prompt = choice.seq.prompt.tokens
        ids, text = choice.token_ids, choice.text
        if self.call.echo:
            shown = "" if self.call.return_token_ids else decode(prompt)
            text, ids = shown + text, [*prompt, *ids]
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._completion_logprobs(choice, ids, 0),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self.call.return_token_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if self.call.return_token_ids else None,
            "routed_experts": None,
            **self._weights,
        }

    # -- streams ---------------------------------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. The head went out with status 200, so a failure is an event of its own."""
        try:
            async with aclosing(self.chunks()) as events:
                async for event in events:
                    yield b"data: " + msgspec.json.encode(event) + b"\n\n"
        except KVLoadError:
            yield b"data: " + msgspec.json.encode(ApiError.internal().body()) + b"\n\n"
        except EngineDeadError as error:
            yield b"data: " + msgspec.json.encode(ApiError.internal(str(error)).body()) + b"\n\n"
        yield DONE

    async def chunks(self) -> AsyncGenerator[dict[str, Json], None]:
        """A stream's chunks. Raises `KVLoadError` and `EngineDeadError`."""
        started = False
        for choice in self.choices:
            first = True
            parser = choice.tool_parser()
            async with aclosing(choice.deltas(self.core)) as deltas:
                async for delta in deltas:
                    if not started and self.call.chat:
                        for other in self.choices:
                            yield self._role_chunk(other)
                    started = True
                    if not self.call.chat:
                        yield self._completion_chunk(choice, delta, first=first)
                    elif parser is None:
                        yield self._chat_chunk(choice, delta, {"content": delta.text})
                    else:
                        for chunk in self._tool_chunks(choice, delta, parser.feed(delta.token_ids)):
                            yield chunk
                    first = False
        if self.call.include_usage:
            head = self._head([]) | {"usage": self._usage(whole=False), "system_fingerprint": self._fingerprint}
            yield head

    def _role_chunk(self, choice: Choice) -> dict[str, Json]:
        delta = {"role": "assistant", "content": ""}
        body = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = self.call.prompts[0].tokens if self.call.return_token_ids else None
        chunk = self._head([body])
        if self.call.continuous_usage:
            chunk["usage"] = self._running_usage(choice, 0)
        return chunk | {"prompt_token_ids": ids, "prompt_text": None}

    def _chat_chunk(
        self, choice: Choice, delta: Delta, message: dict[str, Json], *, is_tool: bool = False
    ) -> dict[str, Json]:
        start = len(choice.token_ids) - len(delta.token_ids)
        body: dict[str, Json] = {
            "index": choice.index,
            "delta": message,
            "logprobs": self._chat_logprobs(choice, delta.token_ids, start),
            "finish_reason": self._finish_reason(delta.finish_reason, is_tool),
        }
        if delta.finish_reason is not None:
            body["stop_reason"] = delta.stop_reason
        body["token_ids"] = list(delta.token_ids) if self.call.return_token_ids else None
        if delta.finish_reason is not None:
            body |= self._weights
        return self._finished_chunk(choice, delta, self._head([body]))

    def _tool_chunks(self, choice: Choice, delta: Delta, calls: list[dict[str, Json]]) -> list[dict[str, Json]]:
        """One chunk per part of the call; the ids and the finish reason go with the last."""
        if not calls and delta.finish_reason is None and not self.call.return_token_ids:
            return []
        messages: list[dict[str, Json]] = [{"tool_calls": [call]} for call in calls] or [{}]
        early = Delta("", ())
        chunks = [self._chat_chunk(choice, early, message) for message in messages[:-1]]
        return [*chunks, self._chat_chunk(choice, delta, messages[-1], is_tool=True)]

    def _completion_chunk(self, choice: Choice, delta: Delta, *, first: bool) -> dict[str, Json]:
        prompt = choice.seq.prompt.tokens
        text = delta.text
        if first and self.call.echo and not self.call.return_token_ids:
            text = decode(prompt) + text
        start = len(choice.token_ids) - len(delta.token_ids)
        body = {
            "index": choice.index,
            "text": text,
            "logprobs": self._completion_logprobs(choice, delta.token_ids, start),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "prompt_token_ids": prompt if first and self.call.return_token_ids else None,
            "token_ids": list(delta.token_ids) if self.call.return_token_ids else None,
            **self._weights,
        }
        return self._finished_chunk(choice, delta, self._head([body]))

    def _finished_chunk(self, choice: Choice, delta: Delta, chunk: dict[str, Json]) -> dict[str, Json]:
        if self.call.continuous_usage:
            chunk["usage"] = self._running_usage(choice, len(choice.token_ids))
        if self._speaks_033:
            chunk["kv_transfer_params"] = choice.kv_transfer_params if delta.finish_reason is not None else None
        if delta.finish_reason is None:
            return chunk
        if not self.call.include_usage:
            chunk["system_fingerprint"] = self._fingerprint
        if self.plugin:
            handle = choice.kv_transfer_params or {}
            own = {"version": VERSION, "token_ids": choice.token_ids}
            chunk["kv_transfer_params"] = handle | {KEY: handle.get(KEY, {}) | own}
        return chunk

    def _head(self, choices: list[dict[str, Json]]) -> dict[str, Json]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk" if self.call.chat else "text_completion",
            "created": self.created,
            "model": self.call.model,
            "choices": choices,
        }

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def _speaks_033(self) -> bool:
        return self.core.config.speaks_033

    @property
    def _weights(self) -> dict[str, Json]:
        return {"weight_versions": None} if self._speaks_033 else {}

    @property
    def _fingerprint(self) -> str:
        return f"vllm-{self.core.config.vllm_version}-loopback"

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self.call.id}" if self.call.chat else f"cmpl-{self.call.id}"

    @property
    def _demanded_tool(self) -> bool:
        return self.call.named_tool or self.call.required_tool

    def _finish_reason(self, reason: str | None, called_tool: bool) -> str | None:
        """`tool_calls` for calls that the model chose or had to make, `stop` where the request named the tool."""
        return "tool_calls" if called_tool and reason == "stop" and not self.call.named_tool else reason

    def _usage(self, *, whole: bool) -> dict[str, Json]:
        prompt = sum(len(prompt.tokens) for prompt in self.call.prompts)
        generated = sum(len(choice.token_ids) for choice in self.choices)
        usage: dict[str, Json] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "completion_tokens": generated,
        }
        details: dict[str, Json] | None = None
        if self.details:
            first, last = self.choices[0], self.choices[-1]
            if self.call.chat:
                details = {"cached_tokens": first.cached_tokens, "created_cache_tokens": first.seq.num_created}
            else:
                details = {"cached_tokens": last.cached_tokens}
        if whole:
            unset = {"cached_tokens": None, "created_cache_tokens": None, "multimodal_tokens": None}
            usage["prompt_tokens_details"] = unset | details if details else None
            usage["completion_tokens_details"] = None
        elif details:
            usage["prompt_tokens_details"] = details
        return usage

    def _running_usage(self, choice: Choice, generated: int) -> dict[str, Json]:
        prompt = choice.seq.num_prompt
        return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}

    def _chat_logprobs(self, choice: Choice, ids: Sequence[int], start: int) -> dict[str, Any] | None:
        if self.call.logprobs is None:
            return None
        content = []
        for position, token in enumerate(ids, start):
            entry = {
                "token": token_str(token),
                "logprob": _logprob(choice, position),
                "bytes": list(token_str(token).encode()),
            }
            content.append(entry | {"top_logprobs": [entry] if self.call.logprobs else []})
        return {"content": content}

    def _completion_logprobs(self, choice: Choice, ids: Sequence[int], start: int) -> dict[str, Any] | None:
        if self.call.logprobs is None:
            return None
        names = [token_str(token) for token in ids]
        values = [_logprob(choice, position) for position, _ in enumerate(ids, start)]
        return {
            "text_offset": list(range(start, start + len(ids))),
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": [{name: value} for name, value in zip(names, values, strict=True)],
        }


def _logprob(choice: Choice, position: int) -> float:
    """Some number that depends on the KV, as the text does."""
    return -(kv_value(choice.seq.seed, position) % 1000) / 1000
