"""LangGraph: a graph with tools and a sub-graph, each with a history of its own, streamed, on engines that carry KV back.

    pip install '.[langchain]' langgraph       # in a clone of this repository
    python examples/langgraph_agent.py

A thread is a conversation, and a sub-graph another one inside it. The example starts two loopback engines, which have no model:
with tools, they call the first one whenever the user has spoken.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypedDict

from backhaul_langchain import ChatBackhaul
from backhaul_loopback import LoopbackPair, loopback_pair
from langchain_core.messages import AIMessageChunk, AnyMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, tools_condition

COOK = """You plan the meals of a small canteen. Look into the pantry before you name a dish, and use what goes off first.
Eighty people eat at noon, a third of them no meat, five no gluten; the oven holds twelve trays, the steamer is for rice.
Name one dish, what it takes of each thing, and what is left. Answer in two sentences."""
CRITIC = """You read the plans of a canteen's cook and look for one thing that will go wrong: too little, too late, too salty,
or somebody who cannot eat it. You remember what you said of earlier plans, and you do not say it twice.
Answer in one sentence."""
QUESTIONS = ["What is for lunch on Monday?", "And on Tuesday?", "Somebody sent us forty kilos of beans."]


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    """What the cook and the guests say."""
    reviews: Annotated[list[AnyMessage], add_messages]
    """The critic's own history."""


@tool
def pantry(what: str) -> str:
    """How much is left of something, and how long it keeps."""
    return "\n".join(f"{what}, lot {n}: {14 - 3 * n} kg, keeps for {1 + 2 * n} days" for n in range(4))


def graph_of(model: ChatBackhaul) -> Any:
    cook = model.bind_tools([pantry])

    async def plan(state: State) -> Any:
        return {"messages": [await cook.ainvoke([SystemMessage(COOK), *state["messages"]])]}

    async def criticise(state: State) -> Any:
        plan = HumanMessage(f"The cook's plan: {state['messages'][-1].text}")
        review = await model.ainvoke([SystemMessage(CRITIC), *state["reviews"], plan])
        return {"reviews": [plan, review]}

    critic = StateGraph(State).add_node("criticise", criticise).add_edge(START, "criticise").compile()
    graph = StateGraph(State).add_node("plan", plan).add_node("tools", ToolNode([pantry])).add_node("critic", critic)
    graph.add_edge(START, "plan").add_edge("tools", "plan").add_edge("critic", END)
    graph.add_conditional_edges("plan", tools_condition, {"tools": "tools", END: "critic"})
    return graph.compile(checkpointer=InMemorySaver())


async def talk(pair: LoopbackPair, *, reuse: bool) -> tuple[str, list[dict[str, Any]]]:
    """All that was said, and the report of each turn: it comes with the last chunk of a message."""
    model = ChatBackhaul(model=pair.model, prefill=[pair.prefill.url], decode=[pair.decode.url], reuse=reuse)
    graph, config = graph_of(model), RunnableConfig(configurable={"thread_id": "canteen"})
    said, reports = "", []
    try:
        for question in QUESTIONS:
            new = {"messages": [HumanMessage(question)]}
            async for _, (chunk, _) in graph.astream(new, config, stream_mode="messages", subgraphs=True):
                if isinstance(chunk, AIMessageChunk):
                    said += chunk.text + "".join(call["args"] or "" for call in chunk.tool_call_chunks)
                    if "backhaul" in chunk.response_metadata:
                        reports.append(chunk.response_metadata["backhaul"])
    finally:
        await model.aclose()
    return said, reports


async def main() -> None:
    async with loopback_pair(connector="backhaul", prefill={"prefix_caching": False}) as pair:
        without, _ = await talk(pair, reuse=False)
        said, reports = await talk(pair, reuse=True)
    for turn in reports:
        counts = f"pulled {turn['pulled'] or 0:4}  computed {turn['computed'] or 0:4}"
        print(
            f"{turn['conversation']:24} turn {turn['turn']}: {turn['route']:5} {counts}  {turn['reason'] or ''}".rstrip()
        )
    print(
        f"{sum(turn['cached'] for turn in reports)} of {sum(turn['prompt'] for turn in reports)} prompt tokens were reused"
    )
    print("The answers are", "those" if said == without else "NOT those", "of the run without reuse.")


if __name__ == "__main__":
    asyncio.run(main())
