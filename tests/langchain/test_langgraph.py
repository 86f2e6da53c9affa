"""`ChatBackhaul` in graphs and agents: a thread is a conversation, a sub-graph one of its own.

Runs with openai 3 alone, where the frameworks are; so nothing here imports the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any, TypedDict

import pytest
from backhaul_langchain import ChatBackhaul
from backhaul_loopback import LoopbackPair, loopback_pair
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Send
from pydantic import BaseModel
from served import in_thread

SYSTEM = "You are a patient agent that answers at length. " * 8
THREAD: RunnableConfig = {"configurable": {"thread_id": "t1"}}


@pytest.fixture(params=["embedded", "remote"])
async def model(request: pytest.FixtureRequest) -> AsyncIterator[ChatBackhaul]:
    async with loopback_pair() as pair, in_thread(pair, local_max_tokens=0) as router:
        where: dict[str, Any] = {"base_url": str(router.base_url.join("/v1"))}
        if request.param == "embedded":
            where = {"prefill": [pair.prefill.url], "decode": [pair.decode.url], "local_max_tokens": 0}
        model = ChatBackhaul(model=pair.model, **where)
        yield model
        await model.aclose()


def report_of(message: Any) -> dict[str, Any]:
    report: dict[str, Any] = message.response_metadata["backhaul"]
    return report


def asking(*messages: Any) -> Any:
    return {"messages": [HumanMessage(message) for message in messages]}


def chatbot(model: ChatBackhaul, *, pass_config: bool = False) -> Any:
    async def answer(state: MessagesState, config: RunnableConfig) -> Any:
        messages = [SystemMessage(SYSTEM), *state["messages"]]
        return {"messages": [await (model.ainvoke(messages, config) if pass_config else model.ainvoke(messages))]}

    return StateGraph(MessagesState).add_node("answer", answer).add_edge(START, "answer").add_edge("answer", END)


@pytest.mark.parametrize("pass_config", [False, True], ids=["context", "config"])
async def test_the_turns_of_a_thread_are_read_back(model: ChatBackhaul, pass_config: bool) -> None:
    graph = chatbot(model, pass_config=pass_config).compile(checkpointer=InMemorySaver())
    await graph.ainvoke(asking("Hi."), THREAD)
    state = await graph.ainvoke(asking("And now?"), THREAD)
    reports = [report_of(message) for message in state["messages"] if isinstance(message, AIMessage)]
    assert [(r["conversation"], r["turn"], r["route"]) for r in reports] == [
        ("langgraph:t1", 1, "cold"),
        ("langgraph:t1", 2, "warm"),
    ]


async def test_a_sub_graph_is_a_conversation_of_its_own_inside_the_thread(model: ChatBackhaul) -> None:
    outer = chatbot(model)
    outer.add_node("research", chatbot(model).compile()).add_edge("answer", "research")
    state = await outer.compile(checkpointer=InMemorySaver()).ainvoke(asking("Hi."), THREAD)
    reports = [report_of(message) for message in state["messages"] if isinstance(message, AIMessage)]
    assert [(r["conversation"], r["parent"]) for r in reports] == [
        ("langgraph:t1", None),
        ("langgraph:t1/research", "langgraph:t1"),
    ]


class Found(TypedDict):
    found: Annotated[list[AnyMessage], add_messages]


async def test_sub_agents_side_by_side_each_continue_their_own_history(model: ChatBackhaul) -> None:
    async def look(state: dict[str, Any]) -> Any:
        messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(f"Look into {state['what']}.")]
        first = await model.ainvoke(messages)
        second = await model.ainvoke([*messages, first, HumanMessage("Go on.")])
        return {"found": [second]}

    graph = StateGraph(Found).add_node("look", look).add_edge("look", END)
    graph.add_conditional_edges(START, lambda _: [Send("look", {"what": what}) for what in ("stars", "ships", "trees")])
    state = await graph.compile().ainvoke({"found": []}, THREAD)
    assert {report_of(message)["conversation"] for message in state["found"]} == {"langgraph:t1"}
    assert [report_of(message)["route"] for message in state["found"]] == ["warm"] * 3


@tool
def look(where: str) -> str:
    """Look somewhere."""
    return f"There is a table in {where}. " * 4


async def test_an_agents_steps_and_turns_are_read_back(model: ChatBackhaul) -> None:
    agent = create_agent(model, [look], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    await agent.ainvoke(asking("Look around."), THREAD)
    state = await agent.ainvoke(asking("And what is beside it?"), THREAD)
    reports = [report_of(message) for message in state["messages"] if isinstance(message, AIMessage)]
    assert [report["turn"] for report in reports] == [1, 2, 3, 4]
    assert [report["route"] for report in reports] == ["cold", "warm", "warm", "warm"]
    assert {report["conversation"] for report in reports} == {"langgraph:t1"}


async def test_a_synchronous_agent_is_the_same(model: ChatBackhaul) -> None:
    agent = create_agent(model, [look], system_prompt=SYSTEM, checkpointer=InMemorySaver())
    state = await asyncio.to_thread(agent.invoke, asking("Look around."), THREAD)
    reports = [report_of(message) for message in state["messages"] if isinstance(message, AIMessage)]
    assert [(r["conversation"], r["route"]) for r in reports] == [("langgraph:t1", "cold"), ("langgraph:t1", "warm")]


async def test_a_streamed_agent_shows_the_report_with_each_messages_last_chunk(model: ChatBackhaul) -> None:
    agent = create_agent(model, [look], system_prompt=SYSTEM)
    shown = [
        chunk.response_metadata["backhaul"]
        async for chunk, _ in agent.astream(asking("Look around."), THREAD, stream_mode="messages")
        if isinstance(chunk, AIMessageChunk) and "backhaul" in chunk.response_metadata
    ]
    assert [(report["turn"], report["route"]) for report in shown] == [(1, "cold"), (2, "warm")]


async def test_an_agents_structured_answer_comes_through_a_tool() -> None:
    """A schema on the whole answer would keep vLLM from calling the others."""
    async with loopback_pair() as pair:
        model = ChatBackhaul(model=pair.model, prefill=[pair.prefill.url], decode=[pair.decode.url])
        agent = create_agent(model, response_format=Answer)
        state = await agent.ainvoke(asking("Look around."), THREAD)
        assert isinstance(state["structured_response"], Answer)
        assert all(b"response_format" not in request.raw for request in chat_requests(pair))
        await model.aclose()


class Answer(BaseModel):
    """Where it is."""

    where: str


def chat_requests(pair: LoopbackPair) -> list[Any]:
    return pair.decode.requests_to("/v1/chat/completions")
