"""The conversation is that of the framework which makes the call, with its stock client and no code of ours in the agent.

openai's client is imported from where it is defined, so that these tests, whose frameworks need openai 3, run with that alone.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict

import agents
import httpx2
import pytest
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner
from backhaul._client import AsyncOpenAI as RemoteClient
from backhaul_loopback import LoopbackPair, loopback_pair
from backhaul_router.config import RouterConfig
from backhaul_router.drive.embedded import make_async_transport, make_transport
from backhaul_router.drive.router import Router
from backhaul_router.report import ReuseReport, Route
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from openai._client import AsyncOpenAI
from opentelemetry import baggage, context
from pydantic import SecretStr
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = "http://embedded.invalid/v1"
SYSTEM = "You are a patient agent that answers at length. " * 8

agents.set_trace_processors([])


@dataclass
class Embedded:
    """HTTP clients on an embedded router, as anybody can make them, and what it reports."""

    pair: LoopbackPair
    asynchronous: httpx2.AsyncClient
    synchronous: httpx2.Client
    reports: list[ReuseReport] = field(default_factory=list)

    def named(self) -> list[tuple[str | None, str | None, str | None]]:
        return [(r.conversation, r.identity_source, r.parent) for r in self.reports]

    @property
    def routes(self) -> list[Route]:
        return [report.route for report in self.reports]

    @property
    def chat_openai(self) -> ChatOpenAI:
        return ChatOpenAI(
            model=self.pair.model,
            base_url=URL,
            api_key=SecretStr("none"),
            http_async_client=self.asynchronous,
            http_client=self.synchronous,
            max_retries=0,
            max_completion_tokens=24,
        )

    @property
    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=URL, api_key="none", http_client=self.asynchronous, max_retries=0)


@pytest.fixture
async def embedded() -> AsyncIterator[Embedded]:
    async with loopback_pair(prefill={"prefix_caching": False}) as pair:
        reports: list[ReuseReport] = []
        config = RouterConfig(
            prefill=(pair.prefill.url,), decode=(pair.decode.url,), local_max_tokens=0, check_pairs=False
        )
        routers = [Router(config, on_report=reports.append) for _ in range(2)]
        async with httpx2.AsyncClient(transport=make_async_transport(routers[0], httpx2)) as asynchronous:
            synchronous = httpx2.Client(transport=make_transport(routers[1], httpx2))
            yield Embedded(pair, asynchronous, synchronous, reports)
            await asyncio.to_thread(synchronous.close)


# --- LangGraph -----------------------------------------------------------------------------------------------------------


class State(TypedDict):
    messages: Annotated[list[AnyMessage], operator.add]


def graph_of(model: ChatOpenAI, *, asynchronous: bool = True) -> Any:
    """One node that calls the model, and one that is a graph of its own, with another system prompt."""

    async def acall(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    def call(state: State) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    async def acritic(state: State) -> dict[str, Any]:
        await model.ainvoke([SystemMessage("You are a critic. " * 20), *state["messages"][1:]])
        return {"messages": []}

    inner = StateGraph(State).add_node("judge", acritic).add_edge(START, "judge").compile()
    graph = StateGraph(State).add_node("agent", acall if asynchronous else call).add_edge(START, "agent")
    if asynchronous:
        graph.add_node("critic", inner).add_edge("agent", "critic").add_edge("critic", END)
    return graph.compile(checkpointer=InMemorySaver())


def thread(name: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": name}}


async def test_a_langgraph_thread_is_a_conversation_and_its_sub_graph_a_child(embedded: Embedded) -> None:
    graph = graph_of(embedded.chat_openai)
    for question in ([SystemMessage(SYSTEM), HumanMessage("Who are you?")], [HumanMessage("And then? " * 10)]):
        await graph.ainvoke({"messages": question}, thread("t1"))
    assert (
        embedded.named()
        == [
            ("langgraph:t1", "framework:langgraph", None),
            ("langgraph:t1/critic", "framework:langgraph", "langgraph:t1"),
        ]
        * 2
    )
    assert embedded.routes == [Route.COLD, Route.COLD, Route.WARM, Route.WARM]


async def test_langgraph_threads_are_conversations_of_their_own_in_synchronous_code_too(embedded: Embedded) -> None:
    graph = graph_of(embedded.chat_openai, asynchronous=False)

    def talk() -> None:
        for name in ("t1", "t2", "t1"):
            graph.invoke({"messages": [SystemMessage(SYSTEM), HumanMessage("Go on. " * 10)]}, thread(name))

    await asyncio.to_thread(talk)
    assert [r.conversation for r in embedded.reports] == ["langgraph:t1", "langgraph:t2", "langgraph:t1"]
    assert embedded.routes == [Route.COLD, Route.COLD, Route.WARM]


# --- pydantic-ai ---------------------------------------------------------------------------------------------------------


def pydantic_agent(embedded: Embedded, instructions: str = SYSTEM) -> PydanticAgent[None, str]:
    provider = OpenAIProvider(base_url=URL, api_key="none", http_client=embedded.asynchronous)
    return PydanticAgent(OpenAIChatModel(embedded.pair.model, provider=provider), instructions=instructions)


async def test_a_pydantic_ai_conversation_goes_on_over_runs_and_in_streams(embedded: Embedded) -> None:
    agent = pydantic_agent(embedded)
    first = await agent.run("Who are you?", model_settings={"max_tokens": 24})
    async with agent.run_stream(
        "And then? " * 10, message_history=first.all_messages(), model_settings={"max_tokens": 24}
    ) as second:
        await second.get_output()
    conversation = f"pydantic-ai:{first.conversation_id}"
    assert embedded.named() == [(conversation, "framework:pydantic-ai", None)] * 2
    assert embedded.routes == [Route.COLD, Route.WARM]


async def test_a_pydantic_ai_agent_that_another_calls_is_a_conversation_of_its_own(embedded: Embedded) -> None:
    outer = await pydantic_agent(embedded).run("Who are you?")
    inner = await pydantic_agent(embedded, "You are another. " * 20).run("Who are you?")
    assert [r.conversation for r in embedded.reports] == [
        f"pydantic-ai:{outer.conversation_id}",
        f"pydantic-ai:{inner.conversation_id}",
    ]


# --- OpenAI Agents SDK ---------------------------------------------------------------------------------------------------


async def run_agent(embedded: Embedded, asked: Any, **config: Any) -> Any:
    model = OpenAIChatCompletionsModel(embedded.pair.model, embedded.openai)
    agent = Agent(name="agent", instructions=SYSTEM, model=model)
    return await Runner.run(agent, asked, run_config=RunConfig(**config))


async def talk_with_agent(embedded: Embedded, **config: Any) -> None:
    """Two runs, of which the second goes on from the first."""
    first = await run_agent(embedded, "Who are you?", **config)
    await run_agent(embedded, [*first.to_input_list(), {"role": "user", "content": "And then? " * 10}], **config)


async def test_a_group_of_traces_of_the_agents_sdk_is_a_conversation(embedded: Embedded) -> None:
    await talk_with_agent(embedded, group_id="chat-1")
    assert embedded.named() == [("openai-agents:chat-1", "framework:openai-agents", None)] * 2
    assert embedded.routes == [Route.COLD, Route.WARM]


async def test_a_run_of_the_agents_sdk_that_goes_on_from_another_joins_its_conversation(embedded: Embedded) -> None:
    await talk_with_agent(embedded)
    first, second = embedded.reports
    assert (first.conversation or "").startswith("openai-agents:trace_")
    assert second.conversation == first.conversation
    assert (first.identity_source, second.identity_source) == ("framework:openai-agents", "history")
    assert embedded.routes == [Route.COLD, Route.WARM]


async def test_without_tracing_a_run_of_the_agents_sdk_goes_by_its_history(embedded: Embedded) -> None:
    await talk_with_agent(embedded, tracing_disabled=True, group_id="chat-1")
    assert [r.identity_source for r in embedded.reports] == ["history", "history"]
    assert embedded.routes == [Route.COLD, Route.WARM]


# --- OpenTelemetry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["session.id", "gen_ai.conversation.id"])
async def test_opentelemetrys_baggage_names_a_conversation(embedded: Embedded, key: str) -> None:
    token = context.attach(baggage.set_baggage(key, "s-1"))
    try:
        await embedded.openai.chat.completions.create(
            model=embedded.pair.model, messages=[{"role": "user", "content": "Hello"}]
        )
    finally:
        context.detach(token)
    assert embedded.named() == [("otel:s-1", "framework:opentelemetry", None)]


async def test_outside_of_everything_a_stock_client_goes_by_its_history(embedded: Embedded) -> None:
    await embedded.openai.chat.completions.create(
        model=embedded.pair.model, messages=[{"role": "user", "content": "Hello"}]
    )
    assert [r.identity_source for r in embedded.reports] == ["history"]


# --- a router elsewhere --------------------------------------------------------------------------------------------------


async def headers_sent(config: dict[str, Any]) -> httpx2.Headers:
    """Of a request that our client makes to a router elsewhere, inside a LangChain call with `config`."""
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return httpx2.Response(200, json={"id": "1", "object": "chat.completion", "choices": []})

    http = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    async with RemoteClient(base_url="http://router/v1", api_key="none", http_client=http) as client:

        async def ask(_: None) -> None:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])

        await RunnableLambda(ask).ainvoke(None, config)
    return requests[0].headers


async def test_our_client_tells_a_router_elsewhere() -> None:
    in_sub_graph = {"thread_id": "t", "checkpoint_ns": "critic:0f-1|judge:0f-2"}
    headers = await headers_sent({"configurable": in_sub_graph})
    assert headers["x-conversation-id"] == "langgraph:t/critic"
    assert headers["x-backhaul-parent"] == "langgraph:t"


@pytest.mark.parametrize("config", [{}, {"configurable": {"thread_id": "naïve"}}], ids=["no thread", "not ASCII"])
async def test_what_cannot_be_told_is_left_to_the_history(config: dict[str, Any]) -> None:
    headers = await headers_sent(config)
    assert "x-conversation-id" not in headers
