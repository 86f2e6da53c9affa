"""LangChain: an agent with a tool and a checkpointer, and turns that read their history's KV back.

    pip install '.[langchain]' langchain       # in a clone of this repository
    python examples/langchain_agent.py

It starts two loopback engines, which have no model: with tools, they call the first one whenever the user has spoken. For
engines of yours: `ChatBackhaul(model="...", prefill=["http://..."], decode=["http://..."])`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from backhaul_langchain import ChatBackhaul
from backhaul_loopback import LoopbackPair, loopback_pair
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

PROMPT = """You answer questions about the trains of a small line. Look into the timetable before you name a time.
Trains stop at Alder, Birch, Cedar and Dune, in this order; the ferry to the island leaves from Dune ten minutes after a train.
A train that is more than five minutes late does not reach the ferry: say so, and name the next one. Answer in one sentence."""
QUESTIONS = ["When does a train leave Birch?", "Does it reach the ferry?", "And if I start in Cedar?"]


@tool
def timetable(station: str) -> str:
    """The trains that leave a station, with their delays."""
    return "\n".join(f"{station} {8 + n:02d}:{12 + 9 * n} to Dune, {n * n} minutes late" for n in range(4))


async def converse(model: ChatBackhaul) -> list[AIMessage]:
    """What the model said, turn by turn: each question is two turns, one that calls the tool and one that has its result."""
    agent = create_agent(model, [timetable], system_prompt=PROMPT, checkpointer=InMemorySaver())
    config: RunnableConfig = {"configurable": {"thread_id": "passenger-7"}}
    messages: list[AnyMessage] = []
    for question in QUESTIONS:
        state: Any = await agent.ainvoke({"messages": [{"role": "user", "content": question}]}, config)
        messages = state["messages"]
    return [message for message in messages if isinstance(message, AIMessage)]


async def talk(pair: LoopbackPair, *, reuse: bool) -> list[AIMessage]:
    model = ChatBackhaul(model=pair.model, prefill=[pair.prefill.url], decode=[pair.decode.url], reuse=reuse)
    try:
        return await converse(model)
    finally:
        await model.aclose()


async def main() -> None:
    async with loopback_pair(connector="backhaul", prefill={"prefix_caching": False}) as pair:
        without = await talk(pair, reuse=False)
        answers = await talk(pair, reuse=True)
    reports = [answer.response_metadata["backhaul"] for answer in answers]
    for turn in reports:
        counts = f"pulled {turn['pulled'] or 0:4}  computed {turn['computed'] or 0:4}"
        print(f"turn {turn['turn']}: {turn['route']:5} {counts}  {turn['reason'] or ''}".rstrip())
    print(
        f"{sum(turn['cached'] for turn in reports)} of {sum(turn['prompt'] for turn in reports)} prompt tokens were reused"
    )
    same = [(a.text, a.tool_calls) for a in answers] == [(a.text, a.tool_calls) for a in without]
    print("The answers are", "those" if same else "NOT those", "of the run without reuse.")


if __name__ == "__main__":
    asyncio.run(main())
