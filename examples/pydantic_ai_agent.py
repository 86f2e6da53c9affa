"""pydantic-ai: an agent with a tool and a message history, and turns that read their history's KV back.

    pip install 'pydantic-ai-slim[openai]'
    python examples/pydantic_ai_agent.py

It starts two loopback engines, which have no model: with tools, they call the first one whenever the user has spoken. For
engines of yours: `backhaul.AsyncOpenAI(prefill=["http://..."], decode=["http://..."])`, and your model's name.
"""

from __future__ import annotations

import asyncio

import backhaul
from backhaul_loopback import loopback_pair
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

INSTRUCTIONS = """You look after a greenhouse. Read the sensors before you say how a bed is, and name the bed with it.
Tomatoes want 18 to 26 degrees, basil 20 to 28, lettuce 10 to 20. Soil below 30 % wants water, above 70 % wants none.
If two readings contradict each other, say so and ask for a look at the sensor. Answer in one sentence."""
QUESTIONS = ["How are the tomatoes?", "Does the basil want water?", "Which bed should I look at first?"]


def sensors(bed: str) -> str:
    """The last readings of a bed."""
    return "\n".join(f"{6 + 4 * n:02d}:00 {bed}: {17 + 2 * n} degrees, soil {58 - 9 * n} %" for n in range(1, 5))


async def converse(client: backhaul.AsyncOpenAI, model: str) -> list[str]:
    agent = Agent(
        OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)),
        instructions=INSTRUCTIONS,
        tools=[sensors],
    )
    history: list[ModelMessage] = []
    answers = []
    for question in QUESTIONS:
        result = await agent.run(question, message_history=history)
        history = result.all_messages()
        answers.append(result.output)
    return answers


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
