"""vLLM general plugin, which puts the handle into streams, which vLLM 0.32 forgets, and the generated token ids beside it.

vLLM loads it in each of its processes through the entry point group `vllm.general_plugins`. Only an API server imports
the three modules that are changed here, so nothing happens in an engine core or a worker.

A streamed answer to a request that has `kv_transfer_params` (`{}` too), one prompt and one choice ends with an event
whose choice has a `finish_reason`. That event, and no other, gains

    "kv_transfer_params": {<the handle, if D kept the blocks>, "backhaul": {"version": 1, "token_ids": [...]}}

with the ids of the whole answer, beside what our connector has put under `backhaul`. vLLM 0.33 puts the handle there
itself; then only the ids are added. `/v1/messages` is made of such a chat stream, whose events are written anew: what the
finishing one gained goes into `message_delta`. Up to 0.32 that chat stream is made of events; in 0.33 of the chunks that
such events are made of, which a generator of their own yields to both endpoints. `/v1/responses` needs nothing.

Whatever the installed vLLM turns out to be, a stream is never broken by this: what does not look as expected is left
alone, and a warning says so. `/metrics` has `backhaul_plugin_info` where all of these endpoints carry handles.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec
from backhaul_protocol import KEY, VERSION

from . import nixl_progress, worker_waits
from .on_import import change_on_import

KNOWN_VLLM = ((0, 32), (0, 33))

logger = logging.getLogger("vllm.backhaul_connector")  # below "vllm", whose handlers show it in the engine's log


@dataclass(frozen=True)
class Target:
    """A generator in vLLM's API server, of server-sent events or of the chunks that become such events."""

    module: str
    owner: str
    methods: tuple[str, ...]
    """The first one that the installed release has is meant."""
    parameters: tuple[str, ...]
    """Names that it must have."""
    rewrites: bool = False
    """It makes its events of another target's."""


TARGETS = (
    Target(
        "vllm.entrypoints.openai.chat_completion.serving",
        "OpenAIServingChat",
        ("chat_completion_stream_generator_raw", "chat_completion_stream_generator"),
        ("self", "request", "result_generator"),
    ),
    Target(
        "vllm.entrypoints.openai.completion.serving",
        "OpenAIServingCompletion",
        ("completion_stream_generator",),
        ("self", "request", "result_generator", "num_prompts"),
    ),
    Target(
        "vllm.entrypoints.anthropic.serving",
        "AnthropicServingMessages",
        ("message_stream_converter",),
        ("self", "generator"),
        rewrites=True,
    ),
)


def register() -> None:
    """The entry point. May be called several times in a process; raises nothing, since vLLM would end with it."""
    try:
        nixl_progress.register()
        worker_waits.register()
        installed = str(getattr(sys.modules.get("vllm"), "__version__", "unknown"))
        if not known(installed):
            logger.warning("Backhaul does not know vLLM %s: streams are left as they are", installed)
            return
        for target in TARGETS:
            change_on_import(target.module, functools.partial(patch, target=target))
    except Exception:
        logger.exception("Backhaul's plugin could not be set up: streams are left as they are")


def known(version: str) -> bool:
    """Whether this is a vLLM whose streams were looked at: 0.32 or 0.33."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) in KNOWN_VLLM


_patched: set[str] = set()


def patch(module: ModuleType, target: Target) -> bool:
    """Wraps the target's generator. Returns False, with a warning logged, where its shape is not the known one."""
    owner = getattr(module, target.owner, None)
    method = next((name for name in target.methods if hasattr(owner, name)), target.methods[-1])
    original = getattr(owner, method, None)
    if hasattr(original, "backhaul_version"):
        return True
    if not inspect.isasyncgenfunction(original):
        logger.warning("Backhaul: %s has no async generator %s: left as it is", target.owner, method)
        return False
    missing = [name for name in target.parameters if name not in inspect.signature(original).parameters]
    if missing:
        logger.warning("Backhaul: %s takes no %s: left as it is", method, ", ".join(missing))
        return False
    setattr(owner, method, (wrap_rewriting if target.rewrites else wrap)(original))
    _patched.add(target.owner)
    if _patched == {t.owner for t in TARGETS}:
        _publish()
    return True


def _publish() -> None:
    """Adds the gauge to the registry that vLLM's /metrics serves: the default one, or with several API servers the
    files that all of them write, for which prometheus_client needs a rule to make one sample of several."""
    from prometheus_client import Gauge

    Gauge(
        "backhaul_plugin_info",
        "Version of what Backhaul adds to the last event of a stream.",
        ["version"],
        multiprocess_mode="max",
    ).labels(version=str(VERSION)).set(1)


def wrap(original: Callable[..., AsyncGenerator[Any, None]]) -> Callable[..., AsyncGenerator[Any, None]]:
    """The same generator, except for the last event of the requests that this is for."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        with _harmless():
            call = signature.bind(*args, **kwargs)
            if _is_for(call.arguments):
                answer = Answer()
                call.arguments["result_generator"] = _tap(call.arguments["result_generator"], answer)
                return _with_handle(original(*call.args, **call.kwargs), answer)
        return original(*args, **kwargs)

    generator.backhaul_version = VERSION  # type: ignore[attr-defined]
    return generator


def wrap_rewriting(original: Callable[..., AsyncGenerator[str, None]]) -> Callable[..., AsyncGenerator[str, None]]:
    """The same generator, except for a `message_delta` whose chat stream had something added."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generator(*args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        with _harmless():
            call = signature.bind(*args, **kwargs)
            added = Added()
            call.arguments["generator"] = _watch(call.arguments["generator"], added)
            return _with_added(original(*call.args, **call.kwargs), added)
        return original(*args, **kwargs)

    generator.backhaul_version = VERSION  # type: ignore[attr-defined]
    return generator


@dataclass
class Added:
    """The `kv_transfer_params` of a chat stream, once they have come."""

    params: msgspec.Raw | None = None

    def note(self, event: Any) -> None:
        """Takes an event, or the chunk that one would be made of (or vLLM's word of an error, which has no parameters)."""
        if not isinstance(event, str):
            if params := getattr(event, "kv_transfer_params", None):
                self.params = msgspec.Raw(msgspec.json.encode(params))
        elif _PARAMS in event:
            found = msgspec.json.decode(event.removeprefix("data: "), type=_Chunk).kv_transfer_params
            self.params = self.params if bytes(found) == b"null" else found


async def _watch(events: AsyncIterator[Any], added: Added) -> AsyncIterator[Any]:
    async for event in events:
        with _harmless():
            added.note(event)
        yield event


async def _with_added(events: AsyncGenerator[str, None], added: Added) -> AsyncGenerator[str, None]:
    async with contextlib.aclosing(events):
        async for event in events:
            changed = None
            if added.params is not None and event.startswith(_MESSAGE_DELTA):
                with _harmless():
                    changed = with_params(event, added.params)
            yield event if changed is None else changed


def with_params(event: str, params: msgspec.Raw) -> str:
    """The event with `kv_transfer_params`; all other bytes are kept."""
    fields = msgspec.json.decode(event.removeprefix(_MESSAGE_DELTA), type=dict[str, msgspec.Raw])
    fields["kv_transfer_params"] = params
    return f"{_MESSAGE_DELTA}{msgspec.json.encode(fields).decode()}\n\n"


_PARAMS = '"kv_transfer_params"'
_MESSAGE_DELTA = "event: message_delta\ndata: "


class _Chunk(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def _is_for(arguments: dict[str, Any]) -> bool:
    request = arguments["request"]
    return (
        request.kv_transfer_params is not None
        and request.n in (None, 1)
        and not getattr(request, "use_beam_search", False)
        and arguments.get("num_prompts", 1) == 1
    )


@dataclass
class Answer:
    """What the engine has said about one request so far."""

    token_ids: list[int] = field(default_factory=list)
    handle: dict[str, Any] | None = None
    finished: bool = False
    whole: bool = True
    """False once an output could not be understood: ids with a gap are worse than none."""

    def note(self, output: Any) -> None:
        """Takes one of vLLM's RequestOutputs, whose token ids are those since the one before."""
        whole, self.whole = self.whole, False
        self.handle = output.kv_transfer_params or self.handle
        for choice in output.outputs:
            if choice.index == 0:
                self.token_ids.extend(choice.token_ids)
                self.finished = self.finished or choice.finish_reason is not None
        self.whole = whole


async def _tap(outputs: AsyncIterator[Any], answer: Answer) -> AsyncIterator[Any]:
    async for item in outputs:
        with _harmless():
            answer.note(item[1] if isinstance(item, tuple) else item)
        yield item


async def _with_handle(events: AsyncGenerator[Any, None], answer: Answer) -> AsyncGenerator[Any, None]:
    added = False
    async with contextlib.aclosing(events):
        async for event in events:
            changed = None
            if answer.finished and answer.whole and not added:
                with _harmless():
                    changed = (add_handle if isinstance(event, str) else set_handle)(event, answer)
            added = added or changed is not None
            yield event if changed is None else changed


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


def add_handle(event: str, answer: Answer) -> str | None:
    """The event with handle and ids, if it is the one that ends the choice; all other bytes are kept."""
    data = event.removeprefix("data: ")
    if not data.startswith("{"):
        return None
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    choices = msgspec.json.decode(fields.get("choices", b"[]"), type=list[_Choice])
    if len(choices) != 1 or choices[0].finish_reason is None:
        return None
    handle = msgspec.json.decode(fields.get("kv_transfer_params", b"null")) or answer.handle or {}
    fields["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode(_with_ids(handle, answer)))
    return f"data: {msgspec.json.encode(fields).decode()}\n\n"


def set_handle(chunk: Any, answer: Answer) -> Any | None:
    """The chunk with handle and ids, if it is the one that ends the choice."""
    choices: list[Any] = getattr(chunk, "choices", [])
    if len(choices) != 1 or choices[0].finish_reason is None:
        return None
    chunk.kv_transfer_params = _with_ids(chunk.kv_transfer_params or answer.handle or {}, answer)
    return chunk


def _with_ids(handle: dict[str, Any], answer: Answer) -> dict[str, Any]:
    ours = {**(handle.get(KEY) or {}), "version": VERSION, "token_ids": answer.token_ids}
    return {**handle, KEY: ours}


_complained = False


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """Logs an error of ours and goes on without; only the first one, as the same would happen on every stream."""
    global _complained
    try:
        yield
    except Exception:
        if not _complained:
            _complained = True
            logger.exception("Backhaul cannot add the handle to a stream: it is passed on as it is")
