"""The vLLM plugin without vLLM: what it does to a stream of events, and where it keeps its hands off."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from backhaul_connector.vllm_patches import nixl_progress, on_import, plugin

HANDLE = {"do_remote_decode": True, "remote_block_ids": [[4, 5]], "remote_num_tokens": 70}
CHAT, COMPLETIONS, MESSAGES = plugin.TARGETS


def output(*token_ids: int, finish: str | None = None, handle: dict[str, Any] | None = None, index: int = 0) -> Any:
    """One of vLLM's RequestOutputs."""
    choice = SimpleNamespace(index=index, token_ids=list(token_ids), finish_reason=finish)
    return SimpleNamespace(outputs=[choice], kv_transfer_params=handle)


def event(text: str, finish: str | None = None, **fields: Any) -> str:
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **fields}
    return f"data: {json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"


USAGE = 'data: {"id":"x","choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = "data: [DONE]\n\n"


def request(**fields: Any) -> Any:
    return SimpleNamespace(**{"kv_transfer_params": {}, "n": None, "use_beam_search": False, **fields})


async def outputs(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


def chat(last: Callable[[Any], str] = lambda _: event("c", "stop")) -> Callable[..., AsyncGenerator[str, None]]:
    """A generator like vLLM's: an event for every output, then usage. `last` makes the one that ends the choice."""

    async def stream(self: Any, request: Any, result_generator: Any, name: str = "") -> AsyncGenerator[str, None]:
        yield event("")
        async for one in result_generator:
            one = one[1] if isinstance(one, tuple) else one
            yield last(one) if one.outputs[0].finish_reason else event("é")
        yield USAGE
        yield DONE

    return stream


async def run(stream: Callable[..., AsyncGenerator[str, None]], request: Any, *items: Any) -> list[str]:
    return [event async for event in plugin.wrap(stream)(None, request, outputs(*items))]


def added(events: list[str]) -> list[Any]:
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event != DONE]
    return [chunk["kv_transfer_params"] for chunk in chunks if "kv_transfer_params" in chunk]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_complained", False)
    monkeypatch.setattr(plugin, "_patched", set())


# --- what is added ----------------------------------------------------------------------------------------------------

ANSWER = (output(7), output(8, 9), output(10, finish="stop", handle=HANDLE))


async def test_the_event_that_ends_the_choice_gains_the_handle_and_all_ids() -> None:
    events = await run(chat(), request(), *ANSWER)
    assert added(events) == [{**HANDLE, "backhaul": {"version": 1, "token_ids": [7, 8, 9, 10]}}]


async def test_every_other_byte_is_kept() -> None:
    stream = chat(lambda _: event("c", "stop", logprob=-0.30000000000000004, big=1e22))
    plain = await run(stream, request(kv_transfer_params=None), *ANSWER)
    ours = await run(stream, request(), *ANSWER)
    assert [a == b for a, b in zip(ours, plain, strict=True)] == [True, True, True, False, True, True]
    assert ours[3].startswith(plain[3].removesuffix("}\n\n") + ',"kv_transfer_params":{')
    assert ours[3].endswith("}}}\n\n")


async def test_without_a_handle_there_are_the_ids_alone() -> None:
    events = await run(chat(), request(kv_transfer_params={"do_remote_prefill": True}), output(1, finish="length"))
    assert added(events) == [{"backhaul": {"version": 1, "token_ids": [1]}}]


async def test_where_vllm_puts_the_handle_itself_only_ours_is_added() -> None:
    theirs = {**HANDLE, "remote_registration_generation": 3}
    stream = chat(lambda _: event("c", "stop", kv_transfer_params=theirs, system_fingerprint="f"))
    events = await run(stream, request(), *ANSWER)
    assert added(events) == [{**theirs, "backhaul": {"version": 1, "token_ids": [7, 8, 9, 10]}}]
    assert list(json.loads(events[3].removeprefix("data: "))) == [
        "id",
        "choices",
        "kv_transfer_params",
        "system_fingerprint",
    ]


async def test_what_our_connector_says_stays_beside_the_ids() -> None:
    handle = {**HANDLE, "backhaul": {"version": 1, "digests": "AAAA", "account": {"prompt": 3}}}
    events = await run(chat(), request(), output(7, finish="stop", handle=handle))
    assert added(events) == [{**handle, "backhaul": {**handle["backhaul"], "token_ids": [7]}}]


async def test_where_vllm_says_that_there_is_no_handle_ours_takes_the_place() -> None:
    events = await run(chat(lambda _: event("c", "stop", kv_transfer_params=None)), request(), *ANSWER)
    assert added(events) == [{**HANDLE, "backhaul": {"version": 1, "token_ids": [7, 8, 9, 10]}}]


async def test_completions_are_served_too() -> None:
    async def completions(
        self: Any, request: Any, engine_inputs: Any, result_generator: Any, num_prompts: int
    ) -> AsyncGenerator[str, None]:
        async for event in chat()(self, request, result_generator):
            yield event

    numbered = [(0, item) for item in ANSWER]
    wrapped = plugin.wrap(completions)
    one = [event async for event in wrapped(None, request(), ["p"], outputs(*numbered), num_prompts=1)]
    two = [event async for event in wrapped(None, request(), ["p", "q"], outputs(*numbered), num_prompts=2)]
    assert added(one) == [{**HANDLE, "backhaul": {"version": 1, "token_ids": [7, 8, 9, 10]}}]
    assert added(two) == []


async def test_text_that_looks_like_an_ending_is_only_text() -> None:
    stream = chat(lambda _: event('"finish_reason":"stop"', None))
    assert added(await run(stream, request(), *ANSWER)) == []


# --- where nothing is touched -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"kv_transfer_params": None}, {"n": 2}, {"use_beam_search": True}], ids=str)
async def test_other_requests_get_vllms_own_generator(fields: dict[str, Any]) -> None:
    own = chat()(None, request(), outputs())

    async def stream(self: Any, request: Any, result_generator: Any) -> AsyncGenerator[str, None]:
        yield ""

    wrapped = plugin.wrap(stream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "_with_handle", lambda *_: own)
        theirs = wrapped(None, request(**fields), outputs())
        assert theirs is not own
        assert wrapped(None, request(), outputs()) is own
    await theirs.aclose()
    await own.aclose()


@pytest.mark.parametrize(
    "strange", [SimpleNamespace(), output(1, finish="stop", handle=HANDLE).outputs[0]], ids=["empty", "no outputs"]
)
async def test_outputs_of_another_shape_leave_the_stream_as_it_is(
    strange: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def stream(self: Any, request: Any, result_generator: Any) -> AsyncGenerator[str, None]:
        async for _ in result_generator:
            yield event("c", "stop")

    for _ in range(2):
        assert await run(stream, request(), strange, *ANSWER) == [event("c", "stop")] * 4
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("odd", ["data: {not json\n\n", ": comment\n\n", "data: [1]\n\n", 'data: {"choices":7}\n\n'])
async def test_events_of_another_shape_are_passed_on(odd: str) -> None:
    assert await run(chat(lambda _: odd), request(), *ANSWER) == [event(""), event("é"), event("é"), odd, USAGE, DONE]


async def test_a_call_of_another_shape_is_passed_on() -> None:
    async def stream(
        self: Any, request: Any, result_generator: Any, num_prompts: Any = None
    ) -> AsyncGenerator[str, None]:
        yield event("c", "stop")

    assert [event async for event in plugin.wrap(stream)(None, object(), outputs())] == [event("c", "stop")]


async def test_an_error_of_the_stream_is_not_hidden() -> None:
    async def stream(self: Any, request: Any, result_generator: Any) -> AsyncGenerator[str, None]:
        yield event("")
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs"):
        await run(stream, request())


async def test_closing_the_stream_closes_vllms_generator() -> None:
    closed: list[bool] = []

    async def stream(self: Any, request: Any, result_generator: Any) -> AsyncGenerator[str, None]:
        try:
            async for _ in result_generator:
                yield event("")
        finally:
            closed.append(True)

    events = plugin.wrap(stream)(None, request(), outputs(*ANSWER))
    await anext(events)
    await events.aclose()
    assert closed == [True]


# --- events that are made of a stream's -------------------------------------------------------------------------------


def named(name: str, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, separators=(',', ':'), ensure_ascii=False)}\n\n"


async def converted(self: Any, generator: AsyncIterator[str]) -> AsyncGenerator[str, None]:
    """Like vLLM's: events of its own, of which the one for the usage comes last but one."""
    async for event in generator:
        if event == DONE:
            yield named("message_stop")
        elif '"usage"' in event:
            yield named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3, "odd": 1e22})
        else:
            yield named("content_block_delta", delta={"text": "é"})


async def convert(request: Any, *items: Any) -> list[str]:
    chunks = plugin.wrap(chat())(None, request, outputs(*items))
    return [event async for event in plugin.wrap_rewriting(converted)(None, chunks)]


async def test_a_message_s_delta_gains_what_the_chat_s_last_event_gained() -> None:
    plain = await convert(request(kv_transfer_params=None), *ANSWER)
    ours = await convert(request(), *ANSWER)
    assert [a == b for a, b in zip(ours, plain, strict=True)] == [True] * 4 + [False, True]
    added = {**HANDLE, "backhaul": {"version": 1, "token_ids": [7, 8, 9, 10]}}
    encoded = json.dumps(added, separators=(",", ":"))
    assert ours[4] == plain[4].removesuffix("}\n\n") + f',"kv_transfer_params":{encoded}}}\n\n'


async def test_vllms_own_nulls_add_nothing_to_a_message() -> None:
    async def chunks() -> AsyncIterator[str]:
        yield event("a", kv_transfer_params=None)
        yield event("b", "stop", kv_transfer_params=None)
        yield USAGE
        yield DONE

    events = [event async for event in plugin.wrap_rewriting(converted)(None, chunks())]
    assert not [event for event in events if "kv_transfer_params" in event]


async def test_a_message_of_a_stream_of_another_shape_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    async def chunks() -> AsyncIterator[str]:
        yield 'data: {"kv_transfer_params": {\n\n'
        yield USAGE

    events = [event async for event in plugin.wrap_rewriting(converted)(None, chunks())]
    assert [event.split("\n")[0] for event in events] == ["event: content_block_delta", "event: message_delta"]
    assert "it is passed on as it is" in caplog.text


# --- streams of chunks, of which vLLM 0.33 makes both a chat's events and a message's ------------------------------------


class Chunk(SimpleNamespace):
    """vLLM's ChatCompletionStreamResponse: here with what is looked at."""


def chunk(finish: str | None = None, handle: dict[str, Any] | None = None) -> Chunk:
    return Chunk(choices=[SimpleNamespace(finish_reason=finish)], kv_transfer_params=handle)


USAGE_CHUNK = Chunk(choices=[], kv_transfer_params=None)


class Serving:
    """As vLLM 0.33 has it: only the generator of chunks is the same for both endpoints."""

    async def chat_completion_stream_generator(self, request: Any, result_generator: Any) -> AsyncGenerator[str, None]:
        async for one in self.chat_completion_stream_generator_raw(request, result_generator):
            yield f"data: {json.dumps(one.kv_transfer_params)}\n\n"

    async def chat_completion_stream_generator_raw(
        self, request: Any, result_generator: Any
    ) -> AsyncGenerator[Any, None]:
        async for one in result_generator:
            yield chunk(one.outputs[0].finish_reason, one.kv_transfer_params)
        yield USAGE_CHUNK


class MessagesServing(Serving):
    def chat_completion_stream_generator(self, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        return self.message_stream_converter(self.chat_completion_stream_generator_raw(*args, **kwargs))

    async def message_stream_converter(self, generator: AsyncIterator[Any]) -> AsyncGenerator[str, None]:
        async for one in generator:
            if isinstance(one, Chunk) and not one.choices:
                yield named("message_delta", usage={"output_tokens": 3})
            else:
                yield named("content_block_delta" if isinstance(one, Chunk) else "error")


@pytest.fixture
def of_chunks() -> Iterator[None]:
    """The plugin in both classes."""
    modules = [ModuleType("chat"), ModuleType("messages")]
    modules[0].OpenAIServingChat = Serving  # type: ignore[attr-defined]
    modules[1].AnthropicServingMessages = MessagesServing  # type: ignore[attr-defined]
    before = [dict(vars(Serving)), dict(vars(MessagesServing))]
    assert plugin.patch(modules[0], CHAT)
    assert plugin.patch(modules[1], MESSAGES)
    yield
    for owner, names in zip((Serving, MessagesServing), before, strict=True):
        for target in (CHAT, MESSAGES):
            for name in target.methods:
                if name in names:
                    setattr(owner, name, names[name])


@pytest.mark.usefixtures("of_chunks")
async def test_a_message_made_of_chunks_gains_the_handle_and_all_ids() -> None:
    events = [e async for e in MessagesServing().chat_completion_stream_generator(request(), outputs(*ANSWER))]
    params = {**HANDLE, "backhaul": {"version": 1, "token_ids": [7, 8, 9, 10]}}
    assert events[:3] == [named("content_block_delta")] * 3
    assert events[3:] == [named("message_delta", usage={"output_tokens": 3}, kv_transfer_params=params)]


@pytest.mark.usefixtures("of_chunks")
async def test_a_chat_made_of_chunks_gains_the_handle_and_all_ids_once() -> None:
    events = [e async for e in Serving().chat_completion_stream_generator(request(), outputs(*ANSWER))]
    params = {**HANDLE, "backhaul": {"version": 1, "token_ids": [7, 8, 9, 10]}}
    assert [json.loads(e.removeprefix("data: ")) for e in events] == [None, None, params, None]


@pytest.mark.usefixtures("of_chunks")
async def test_chunks_of_other_requests_are_left_as_they_are() -> None:
    asked = request(kv_transfer_params=None)
    events = [e async for e in MessagesServing().chat_completion_stream_generator(asked, outputs(output(7)))]
    assert events == [named("content_block_delta"), named("message_delta", usage={"output_tokens": 3})]


async def test_an_error_among_the_chunks_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    error = SimpleNamespace(error=SimpleNamespace(message="theirs"))
    converter = plugin.wrap_rewriting(MessagesServing.message_stream_converter)
    assert [e async for e in converter(MessagesServing(), outputs(chunk(), error, USAGE_CHUNK))] == [
        named("content_block_delta"),
        named("error"),
        named("message_delta", usage={"output_tokens": 3}),
    ]
    assert not caplog.records


# --- how it gets into vLLM --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.32.0", True),
        ("0.32.1.dev4+gabc", True),
        ("0.33.0", True),
        ("0.31.2", False),
        ("0.34.0", False),
        ("unknown", False),
    ],
)
def test_only_versions_that_were_looked_at_are_changed(version: str, known: bool) -> None:
    assert plugin.known(version) is known


def fake_module(target: plugin.Target, method: Any) -> ModuleType:
    module = ModuleType(target.module)
    setattr(module, target.owner, type(target.owner, (), {target.methods[-1]: method}))
    return module


async def no_events(self: Any) -> AsyncGenerator[str, None]:
    yield ""


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (None, "no async generator"),
        (lambda self: None, "no async generator"),
        (no_events, "takes no request, result_generator"),
    ],
)
def test_a_generator_of_another_shape_is_left_with_a_warning(
    method: Any, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = fake_module(CHAT, method)
    assert plugin.patch(module, CHAT) is False
    assert getattr(module, CHAT.owner).__dict__[CHAT.methods[-1]] is method
    assert complaint in caplog.text


def test_a_module_without_the_class_is_left_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert plugin.patch(ModuleType("m"), CHAT) is False
    assert "no async generator" in caplog.text


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """A vllm package with the three modules, and the gauges that are published."""
    for target in plugin.TARGETS:
        folder = tmp_path.joinpath(*target.module.split(".")[:-1])
        folder.mkdir(parents=True)
        parameters = ", ".join(target.parameters)
        body = f"class {target.owner}:\n    async def {target.methods[-1]}({parameters}):\n        yield ''\n"
        (folder / "serving.py").write_text(body)
        for package in (folder, *folder.parents):
            if package == tmp_path:
                break
            (package / "__init__.py").touch()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.32.0'\n")

    published: list[tuple[Any, ...]] = []
    prometheus = ModuleType("prometheus_client")
    prometheus.Gauge = lambda name, text, labels, **options: SimpleNamespace(  # type: ignore[attr-defined]
        labels=lambda **values: SimpleNamespace(set=lambda value: published.append((name, values, value)))
    )
    monkeypatch.setitem(sys.modules, "prometheus_client", prometheus)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.import_module("vllm")
    yield published
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def patched(target: plugin.Target) -> bool:
    owner = getattr(importlib.import_module(target.module), target.owner)
    return getattr(getattr(owner, target.methods[-1]), "backhaul_version", None) == 1


def test_registering_imports_nothing_and_changes_what_is_imported_later(fake_vllm: list[Any]) -> None:
    before = set(sys.modules)
    plugin.register()
    assert set(sys.modules) == before
    assert patched(CHAT)
    assert fake_vllm == []
    assert patched(COMPLETIONS)
    assert fake_vllm == []
    assert patched(MESSAGES)
    assert fake_vllm == [("backhaul_plugin_info", {"version": "1"}, 1)]


def test_what_was_imported_before_is_changed_at_once(fake_vllm: list[Any]) -> None:
    assert not patched(CHAT)
    plugin.register()
    assert patched(CHAT)


def test_registering_twice_changes_once(fake_vllm: list[Any]) -> None:
    for _ in range(2):
        plugin.register()
    owner = getattr(importlib.import_module(CHAT.module), CHAT.owner)
    once = getattr(owner, CHAT.methods[-1])
    plugin.register()
    assert getattr(owner, CHAT.methods[-1]) is once
    assert patched(COMPLETIONS)
    assert patched(MESSAGES)
    assert len(fake_vllm) == 1


def test_an_unknown_vllm_is_left_alone(fake_vllm: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    sys.modules["vllm"].__version__ = "0.40.0"  # type: ignore[attr-defined]
    plugin.register()
    assert not patched(CHAT)
    assert "does not know vLLM 0.40.0" in caplog.text


def test_the_gauge_is_not_there_if_one_endpoint_could_not_be_changed(fake_vllm: list[Any]) -> None:
    plugin.register()
    serving = Path(sys.modules["vllm"].__file__ or "").parent / "entrypoints/openai/completion/serving.py"
    serving.write_text(serving.read_text().replace("result_generator", "results"))
    assert patched(CHAT)
    assert not patched(COMPLETIONS)
    assert patched(MESSAGES)
    assert fake_vllm == []


def test_a_change_that_fails_does_not_break_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "some_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    on_import.change_on_import("some_module", lambda module: 1 / 0)
    assert importlib.import_module("some_module").value == 1
    assert "could not change some_module" in caplog.text
    del sys.modules["some_module"]


# --- NIXL's progress thread -------------------------------------------------------------------------------------------


def test_nixls_fixed_delay_of_0_is_replaced_and_nothing_else() -> None:
    api = ModuleType("api")
    api.nixlBind = SimpleNamespace(nixlAgentConfig=type("nixlAgentConfig", (), {}))  # type: ignore[attr-defined]
    nixl_progress.set_delay(api, delay_us=1000)
    config = api.nixlBind.nixlAgentConfig()
    config.pthrDelay = 0
    config.lthrDelay = 100_000
    assert vars(config) == {"pthrDelay": 1000, "lthrDelay": 100_000}


@pytest.mark.parametrize(("variable", "changed"), [(None, []), ("1000", list(nixl_progress.API_MODULES))])
def test_nixl_is_changed_only_where_the_environment_asks_for_it(
    variable: str | None, changed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(nixl_progress, "change_on_import", lambda module, change: asked.append(module))
    monkeypatch.delenv(nixl_progress.DELAY_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(nixl_progress.DELAY_VARIABLE, variable)
    nixl_progress.register()
    assert asked == changed
