"""OpenAI Agents SDK: an agent with a tool and a session, and turns that read their history's KV back.

    pip install openai-agents
    python examples/openai_agents_sdk.py

It starts two loopback engines, which have no model: with tools, they call the first one whenever the user has spoken. For
engines of yours: `backhaul.AsyncOpenAI(prefill=["http://..."], decode=["http://..."])`, and your model's name.
"""

from __future__ import annotations

import asyncio

import backhaul
from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool, set_tracing_disabled
from backhaul_loopback import loopback_pair

set_tracing_disabled(True)  # traces go to api.openai.com otherwise

INSTRUCTIONS = """You plan trips by train. Ask the timetable before you name a departure, and name the platform with it.
Times are local. A change needs ten minutes, twenty with a bicycle. Night trains must be booked the day before; say so.
If there is no connection, say so and name the nearest station that has one. Answer in one sentence."""
QUESTIONS = ["When does the first train to Lisbon leave?", "And from there to Porto?", "Is there a night train back?"]


@function_tool
def timetable(destination: str) -> str:
    """Departures to a destination."""
    return "\n".join(f"{6 + 3 * n:02d}:{7 * n + 5:02d} to {destination}, platform {n}, one change" for n in range(1, 5))


async def converse(client: backhaul.AsyncOpenAI, model: str) -> list[str]:
    agent = Agent(
        name="Planner",
        instructions=INSTRUCTIONS,
        tools=[timetable],
        model=OpenAIChatCompletionsModel(model, openai_client=client),
    )
    session = SQLiteSession("trip")  # in memory
    try:
        return [(await Runner.run(agent, question, session=session)).final_output for question in QUESTIONS]
    finally:
        session.close()


async def talk(prefill: str, decode: str, model: str, *, reuse: bool) -> tuple[list[str], backhaul.Conversation]:
    async with (
        backhaul.AsyncOpenAI(prefill=[prefill], decode=[decode], reuse=reuse) as client,
        backhaul.conversation() as chat,
    ):
        return await converse(client, model), chat


async def main() -> None:
    async with loopback_pair(connector="backhaul", prefill={"prefix_caching": False}) as pair:
        engines = (pair.prefill.url, pair.decode.url, pair.model)
        without, _ = await talk(*engines, reuse=False)
        answers, chat = await talk(*engines, reuse=True)
    for turn in chat.reuse.turns:
        print(
            f"turn {turn.turn}: {turn.route:5} pulled {turn.pulled or 0:4}  computed {turn.computed or 0:4}  {turn.reason or ''}"
        )
    print(f"{chat.reuse.total.reused} of {chat.reuse.total.prompt} prompt tokens were reused")
    print("The answers are", "those" if answers == without else "NOT those", "of the run without reuse.")


if __name__ == "__main__":
    asyncio.run(main())
