"""An agent's own trace goes on through the embedded router: over a provider that the client is given, or the program's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import backhaul
import pytest
from backhaul_loopback import LoopbackPair, loopback_pair
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

pytestmark = pytest.mark.openai

HISTORY: list[Any] = [{"role": "user", "content": "Count."}]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
async def pair() -> AsyncIterator[LoopbackPair]:
    async with loopback_pair() as pair:
        yield pair


def engines(pair: LoopbackPair) -> dict[str, Any]:
    return {"prefill": [pair.prefill.url], "decode": [pair.decode.url]}


def turn_of(exporter: InMemorySpanExporter) -> ReadableSpan:
    (turn,) = [span for span in exporter.get_finished_spans() if span.name.startswith("chat")]
    return turn


async def test_a_call_is_traced_below_the_agents_step(
    pair: LoopbackPair, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    async with backhaul.AsyncOpenAI(**engines(pair), tracer_provider=provider) as client:
        with provider.get_tracer("agent").start_as_current_span("step") as step:
            async with backhaul.conversation("c"):
                await client.chat.completions.create(model=pair.model, messages=HISTORY, max_tokens=4)
    turn = turn_of(exporter)
    assert turn.parent is not None
    assert turn.parent.span_id == step.get_span_context().span_id
    assert turn.kind is SpanKind.CLIENT
    assert (turn.attributes or {})["gen_ai.conversation.id"] == "c"


async def test_so_is_a_synchronous_call_which_runs_in_another_thread(
    pair: LoopbackPair, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    def call() -> int:
        with backhaul.OpenAI(**engines(pair), tracer_provider=provider) as client:
            with provider.get_tracer("agent").start_as_current_span("step") as step:
                client.chat.completions.create(model=pair.model, messages=HISTORY, max_tokens=4)
        return step.get_span_context().span_id

    step = await asyncio.to_thread(call)
    parent = turn_of(exporter).parent
    assert parent is not None
    assert parent.span_id == step


async def test_a_program_that_has_set_a_provider_need_not_pass_it(
    pair: LoopbackPair, provider: TracerProvider, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    async with backhaul.AsyncOpenAI(**engines(pair)) as client:
        await client.chat.completions.create(model=pair.model, messages=HISTORY, max_tokens=4)
    assert turn_of(exporter).parent is None


def test_a_client_of_a_router_elsewhere_has_no_use_for_a_provider(provider: TracerProvider) -> None:
    with pytest.raises(backhaul.ConfigError, match="tracer_provider= configures the embedded router"):
        backhaul.OpenAI(base_url="http://router:8000/v1", api_key="none", tracer_provider=provider)
