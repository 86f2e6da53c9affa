"""The embedded transport, for both HTTP modules, driving a scripted router."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import subprocess
import sys
import textwrap
import threading
from time import perf_counter
from types import ModuleType
from typing import Any

import httpx
import httpx2
import openai
import pytest
from backhaul_router.drive.embedded import make_async_transport, make_transport
from backhaul_router.errors import ConfigError
from backhaul_router.identity import scope
from backhaul_router.report import ReuseReport
from fake_router import SSE, FakeReply, FakeRouter, event, never, replying, stalling_after

URL = "http://anywhere/v1/chat/completions?a=1"
CHUNKS = [event(b'{"n":%d}' % n) for n in range(50)] + [event(b"[DONE]")]
WAIT_S = 10


@pytest.fixture(params=[httpx2, httpx], ids=lambda module: module.__name__)
def module(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def sync_client(module: ModuleType, router: FakeRouter, **options: Any) -> Any:
    return module.Client(transport=make_transport(router, module), **options)


def async_client(module: ModuleType, router: FakeRouter, **options: Any) -> Any:
    return module.AsyncClient(transport=make_async_transport(router, module), **options)


class Scope:
    def __init__(self, id: str) -> None:
        self.id = id
        self.reports: list[ReuseReport] = []
        self.routers: list[Any] = []

    def record(self, report: ReuseReport) -> None:
        self.reports.append(report)

    def attach(self, router: Any) -> None:
        self.routers.append(router)


# What the router sees


def test_the_router_gets_method_path_query_body_and_headers(module: ModuleType) -> None:
    router = FakeRouter()
    with sync_client(module, router) as client:
        client.post(URL, content=b"body", headers={"X-Conversation-ID": "c1", "TE": "trailers"})
    [seen] = router.requests
    assert (seen.method, seen.path, seen.body) == ("POST", "/v1/chat/completions?a=1", b"body")
    headers = dict(seen.headers)
    assert headers["x-conversation-id"] == "c1"
    assert not {"accept-encoding", "connection", "te"} & set(headers)


async def test_the_async_transport_sends_the_same(module: ModuleType) -> None:
    router = FakeRouter()
    async with async_client(module, router) as client:
        answer = await client.post(URL, content=b"body", headers={"X-Conversation-ID": "c1"})
    [seen] = router.requests
    assert (seen.method, seen.path, seen.body) == ("POST", "/v1/chat/completions?a=1", b"body")
    assert dict(seen.headers)["x-conversation-id"] == "c1"
    assert answer.json() == {"ok": True}


async def test_the_async_transport_runs_the_router_in_the_callers_loop(module: ModuleType) -> None:
    router = FakeRouter()
    async with async_client(module, router) as client:
        await client.get(URL)
    assert router.loops == [asyncio.get_running_loop()]


def test_synchronous_clients_of_one_process_share_one_background_loop() -> None:
    one, two = FakeRouter(), FakeRouter()
    with sync_client(httpx2, one) as first, sync_client(httpx, two) as second:
        first.get(URL)
        second.get(URL)
    assert one.loops == two.loops
    assert sum(thread.name == "backhaul-background-loop" for thread in threading.enumerate()) == 1


async def test_a_synchronous_client_works_inside_a_running_event_loop(module: ModuleType) -> None:
    with sync_client(module, FakeRouter()) as client:
        assert client.get(URL).json() == {"ok": True}


# The conversation's scope and other context


def test_the_scope_of_the_calling_code_goes_with_a_synchronous_request(module: ModuleType) -> None:
    router, conversation = FakeRouter(), Scope("c1")
    token = scope.current.set(conversation)
    try:
        with sync_client(module, router) as client:
            client.get(URL)
    finally:
        scope.current.reset(token)
    assert router.requests[0].scope is conversation
    assert conversation.routers == [router]
    assert [report.conversation for report in conversation.reports] == ["c1"]


async def test_each_task_brings_its_own_scope(module: ModuleType) -> None:
    router = FakeRouter()
    async with async_client(module, router) as client:

        async def call(name: str) -> None:
            scope.current.set(Scope(name))
            await client.get(URL + f"&name={name}")

        await asyncio.gather(*(call(name) for name in ("a", "b", "c")))
        await client.get(URL + "&name=none")
    seen = {request.path[-1]: request.scope and request.scope.id for request in router.requests}
    assert seen == {"a": "a", "b": "b", "c": "c", "e": None}


def test_the_router_sees_the_callers_context_variables(module: ModuleType) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    seen = []

    async def script(router: FakeRouter, request: Any) -> FakeReply:
        seen.append(variable.get())
        return await replying(b"{}")(router, request)

    with sync_client(module, FakeRouter(script)) as client:
        contextvars.Context().run(lambda: (variable.set("mine"), client.get(URL)))
    assert seen == ["mine"]


# Streaming


def test_chunks_pass_unsplit_and_unjoined(module: ModuleType) -> None:
    router = FakeRouter(replying(*CHUNKS, headers=[SSE]))
    with sync_client(module, router) as client, client.stream("POST", URL) as answer:
        assert list(answer.iter_raw()) == CHUNKS
    assert router.replies[0].ended == "complete"


async def test_chunks_pass_unsplit_and_unjoined_async(module: ModuleType) -> None:
    router = FakeRouter(replying(*CHUNKS, headers=[SSE]))
    async with async_client(module, router) as client, client.stream("POST", URL) as answer:
        assert [chunk async for chunk in answer.aiter_raw()] == CHUNKS
    assert router.replies[0].ended == "complete"


def test_the_head_and_the_first_chunks_arrive_while_the_answer_is_still_being_made(module: ModuleType) -> None:
    with (
        sync_client(module, FakeRouter(stalling_after(b"one", b"two"))) as client,
        client.stream("POST", URL) as answer,
    ):
        chunks = answer.iter_raw()
        assert (answer.status_code, next(chunks), next(chunks)) == (200, b"one", b"two")


def test_a_closed_stream_is_aborted_before_close_returns(module: ModuleType) -> None:
    router, conversation = FakeRouter(stalling_after(b"one")), Scope("c1")
    token = scope.current.set(conversation)
    try:
        with sync_client(module, router) as client, client.stream("POST", URL) as answer:
            next(answer.iter_raw())
    finally:
        scope.current.reset(token)
    assert router.replies[0].ended == "closed"
    assert [report.error for report in conversation.reports] == ["client_gone"]


async def test_a_closed_stream_is_aborted_before_aclose_returns(module: ModuleType) -> None:
    router = FakeRouter(stalling_after(b"one"))
    async with async_client(module, router) as client:
        async with client.stream("POST", URL) as answer:
            assert await anext(answer.aiter_raw()) == b"one"
        assert router.replies[0].ended == "closed"


async def test_a_stream_closed_unread_is_aborted(module: ModuleType) -> None:
    router = FakeRouter(stalling_after(b"one"))
    async with async_client(module, router) as client:
        async with client.stream("POST", URL):
            pass
        assert router.replies[0].ended == "closed"


def test_closing_after_done_is_no_abort(module: ModuleType) -> None:
    """openai closes a response as soon as it reads `[DONE]`, without reading its end."""
    router = FakeRouter(replying(event(b"{}"), b"data: [D", b"ONE]\n\n", headers=[SSE]))
    with sync_client(module, router) as client, client.stream("POST", URL) as answer:
        chunks = answer.iter_raw()
        for _ in range(3):
            next(chunks)
    assert router.replies[0].ended == "complete"


async def test_closing_after_done_is_no_abort_async(module: ModuleType) -> None:
    router = FakeRouter(replying(event(b"{}"), b"data: [D", b"ONE]\n\n", headers=[SSE]))
    async with async_client(module, router) as client, client.stream("POST", URL) as answer:
        chunks = answer.aiter_raw()
        for _ in range(3):
            await anext(chunks)
    assert router.replies[0].ended == "complete"


async def test_cancelling_the_reader_aborts_the_stream(module: ModuleType) -> None:
    router, reading = FakeRouter(stalling_after(b"one")), asyncio.Event()

    async def read(client: Any) -> None:
        async with client.stream("POST", URL) as answer:
            async for _ in answer.aiter_raw():
                reading.set()

    async with async_client(module, router) as client:
        task = asyncio.create_task(read(client))
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert router.replies[0].ended == "closed"


async def test_cancelling_a_call_before_its_head_cancels_the_router(module: ModuleType) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def script(router: FakeRouter, request: Any) -> FakeReply:
        started.set()
        try:
            return await never(router, request)
        finally:
            cancelled.set()

    async with async_client(module, FakeRouter(script)) as client:
        task = asyncio.create_task(client.post(URL))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert cancelled.is_set()


@pytest.mark.alone
def test_two_hundred_chunks_cost_little_on_the_synchronous_path() -> None:
    """A call into the loop for each chunk would take some 40 ms; the pump takes about 1 ms."""
    router = FakeRouter(replying(*[event(b"{}")] * 200, headers=[SSE]))
    times = []
    with sync_client(httpx2, router) as client:
        while len(times) < 50 and not any(time < 0.02 for time in times):
            start = perf_counter()
            with client.stream("POST", URL) as answer:
                assert sum(1 for _ in answer.iter_raw()) == 200
            times.append(perf_counter() - start)
    assert min(times) < 0.02


# Timeouts, errors, headers


def test_the_clients_read_timeout_covers_the_wait_for_the_head(module: ModuleType) -> None:
    with sync_client(module, FakeRouter(never), timeout=0.05) as client:
        with pytest.raises(module.ReadTimeout, match=r"0\.05 s, the client's own read timeout") as raised:
            client.post(URL)
    assert raised.value.request.url.path == "/v1/chat/completions"


async def test_the_clients_read_timeout_covers_the_wait_for_the_head_async(module: ModuleType) -> None:
    async with async_client(module, FakeRouter(never), timeout=0.05) as client:
        with pytest.raises(module.ReadTimeout, match=r"0\.05 s, the client's own read timeout"):
            await client.post(URL)


def test_the_clients_read_timeout_covers_silence_in_a_stream(module: ModuleType) -> None:
    router = FakeRouter(stalling_after(b"one"))
    with sync_client(module, router, timeout=module.Timeout(5, read=1.0)) as client:
        with pytest.raises(module.ReadTimeout), client.stream("POST", URL) as answer:
            answer.read()
    assert router.replies[0].ended == "closed"


async def test_the_clients_read_timeout_covers_silence_in_a_stream_async(module: ModuleType) -> None:
    router = FakeRouter(stalling_after(b"one"))
    async with async_client(module, router, timeout=module.Timeout(5, read=1.0)) as client:
        with pytest.raises(module.ReadTimeout):
            async with client.stream("POST", URL) as answer:
                await answer.aread()
        assert router.replies[0].ended == "closed"


async def raise_config_error(router: FakeRouter, request: Any) -> FakeReply:
    raise ConfigError("the engines do not fit")


async def raise_own_timeout(router: FakeRouter, request: Any) -> FakeReply:
    raise TimeoutError("not the client's")


def test_the_routers_exceptions_reach_the_caller_as_they_are(module: ModuleType) -> None:
    with sync_client(module, FakeRouter(raise_config_error)) as client:
        with pytest.raises(ConfigError, match="do not fit") as raised:
            client.post(URL)
    assert isinstance(raised.value, openai.OpenAIError)


async def test_the_routers_exceptions_reach_the_caller_as_they_are_async(module: ModuleType) -> None:
    async with async_client(module, FakeRouter(raise_config_error)) as client:
        with pytest.raises(ConfigError, match="do not fit"):
            await client.post(URL)


async def test_a_timeout_inside_the_router_is_not_taken_for_the_clients(module: ModuleType) -> None:
    async with async_client(module, FakeRouter(raise_own_timeout)) as client:
        with pytest.raises(TimeoutError, match="not the client's"):
            await client.post(URL)


def test_an_error_in_the_middle_of_a_stream_reaches_the_reader(module: ModuleType) -> None:
    async def chunks() -> Any:
        yield b"one"
        raise ConfigError("in between")

    async def script(router: FakeRouter, request: Any) -> FakeReply:
        return FakeReply(router, request, 200, [SSE], chunks())

    with sync_client(module, FakeRouter(script)) as client:
        with pytest.raises(ConfigError, match="in between"), client.stream("POST", URL) as answer:
            answer.read()


def test_error_statuses_are_answers(module: ModuleType) -> None:
    router = FakeRouter(replying(b'{"error": {}}', status=503, headers=[("retry-after", "1")]))
    with sync_client(module, router) as client:
        answer = client.post(URL)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_framing_headers_of_the_engine_do_not_describe_the_answer(module: ModuleType) -> None:
    headers = [("Content-Type", "text/plain"), ("Transfer-Encoding", "chunked"), ("Connection", "close")]
    with sync_client(module, FakeRouter(replying(b"a", b"b", headers=headers))) as client:
        answer = client.post(URL)
    assert dict(answer.headers) == {"content-type": "text/plain"}
    assert answer.text == "ab"


def test_an_encoded_body_is_decoded_by_the_client(module: ModuleType) -> None:
    import gzip

    packed = gzip.compress(b"hello")
    headers = [("content-encoding", "gzip"), ("content-length", str(len(packed)))]
    with sync_client(module, FakeRouter(replying(packed[:7], packed[7:], headers=headers))) as client:
        assert client.post(URL).text == "hello"


# Closing


def test_closing_the_client_closes_the_router(module: ModuleType) -> None:
    router = FakeRouter()
    with sync_client(module, router) as client:
        client.get(URL)
    assert router.closed == 1


async def test_closing_the_async_client_closes_the_router(module: ModuleType) -> None:
    router = FakeRouter()
    async with async_client(module, router) as client:
        await client.get(URL)
    assert router.closed == 1


def test_a_dropped_client_closes_its_router_in_the_background(module: ModuleType) -> None:
    router = FakeRouter()
    client = sync_client(module, router)
    client.get(URL)
    del client
    gc.collect()
    assert router.was_closed.wait(WAIT_S)


def test_a_client_that_was_dropped_while_its_answer_is_read_keeps_the_router_open(module: ModuleType) -> None:
    router = FakeRouter(replying(*CHUNKS, headers=[SSE]))
    client = sync_client(module, router)
    answer = client.send(client.build_request("POST", URL), stream=True)
    del client
    gc.collect()
    assert list(answer.iter_raw()) == CHUNKS
    assert router.closed == 0
    del answer
    gc.collect()
    assert router.was_closed.wait(WAIT_S)


def run_script(body: str) -> subprocess.CompletedProcess[str]:
    here = os.path.dirname(__file__)
    code = f"import sys; sys.path.insert(0, {here!r})\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


PRELUDE = """
import asyncio, os, time, httpx2
from backhaul_router.drive import background_loop
from backhaul_router.drive.embedded import make_async_transport, make_transport
from fake_router import FakeRouter, stalling_after

class Router(FakeRouter):
    async def aclose(self):
        await asyncio.sleep(0)
        print("closed", flush=True)
"""


def test_the_router_of_a_synchronous_client_is_closed_at_exit() -> None:
    done = run_script(
        PRELUDE
        + """
client = httpx2.Client(transport=make_transport(Router(), httpx2))
client.get("http://x/")
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_the_router_of_an_async_client_is_closed_at_exit() -> None:
    done = run_script(
        PRELUDE
        + """
async def main():
    global client
    client = httpx2.AsyncClient(transport=make_async_transport(Router(), httpx2))
    await client.get("http://x/")
asyncio.run(main())
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_exit_does_not_wait_for_an_answer_that_is_still_coming() -> None:
    done = run_script(
        PRELUDE
        + """
client = httpx2.Client(transport=make_transport(Router(stalling_after(b"one")), httpx2))
answer = client.send(client.build_request("POST", "http://x/"), stream=True)
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_exit_inside_a_conversation_closes_once_and_quietly() -> None:
    done = run_script(
        PRELUDE
        + """
import backhaul
def work():
    with backhaul.conversation() as chat:
        answer = client.send(client.build_request("POST", "http://x/"), stream=True)
        chat.end()
        yield answer
client = httpx2.Client(transport=make_transport(Router(stalling_after(b"one")), httpx2))
generator = work()
next(generator)
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")


def test_exit_is_bounded_when_the_router_does_not_close() -> None:
    done = run_script(
        PRELUDE
        + """
background_loop.CLOSE_LIMIT_S = 0.1
class Stuck(FakeRouter):
    async def aclose(self):
        await asyncio.Event().wait()
    def __repr__(self):
        return "<stuck router>"
client = httpx2.Client(transport=make_transport(Stuck(), httpx2))
client.get("http://x/")
"""
    )
    assert done.returncode == 0
    assert "closing <stuck router> took more than 0.1 s" in done.stderr


def test_a_forked_child_has_a_loop_and_a_router_of_its_own() -> None:
    done = run_script(
        PRELUDE
        + """
import sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from backhaul_router.drive import embedded

class Child(FakeRouter):
    def __init__(self, config, *, on_report, tracing):
        super().__init__()
        print("a router of its own, with", config, flush=True)
    async def aclose(self):
        print("child closed", flush=True)

router = Router()
router.config = "the same settings"
client = httpx2.Client(transport=make_transport(router, httpx2))
client.get("http://x/")
if os.fork() == 0:
    embedded.Router = Child
    print("child", client.get("http://x/").status_code, flush=True)
    sys.exit()
os.wait()
print("parent", client.get("http://x/").status_code, len(router.requests), flush=True)
"""
    )
    expected = "a router of its own, with the same settings\nchild 200\nchild closed\nparent 200 2\nclosed\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_forked_child_that_does_not_use_a_client_leaves_its_router_alone() -> None:
    done = run_script(
        PRELUDE
        + """
import sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
client = httpx2.Client(transport=make_transport(Router(), httpx2))
client.get("http://x/")
if os.fork() == 0:
    del client
    sys.exit()
os.wait()
print("parent", client.get("http://x/").status_code, flush=True)
"""
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent 200\nclosed\n", "")
