"""The demo's agent: someone on call finds out why checkout fails, with tools, in eight turns of one conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
from backhaul._conversation import Conversation
from backhaul_bench.answers import assemble
from backhaul_router.report import ReuseReport

_SYSTEM = """\
You are the on-call assistant of a web shop. You find out why something fails, with the tools that you are given, and say
what to do about it. Rules:
- Read before you conclude. Quote the line of a log that shows what you say, with its time.
- Name one cause. If there may be several, say which one you would rule out first, and how.
- Say what a human has to decide. You may look at everything and change nothing.
- Answer in three sentences at most. Nobody reads more at this hour.
Services: web (what a browser talks to), checkout (carts and orders), payment (talks to the card networks), stock
(reservations), mail (confirmations). Each runs in two regions, east and west; each logs one line per request that took over
a second, or failed. A deployment goes to west first, and to east thirty minutes later. Databases: orders (checkout writes,
mail reads), ledger (payment only). The pool of database connections holds 40 per process; a request that waits for one
for more than 5 seconds fails with `pool timeout`. Retries: web tries checkout twice, checkout tries payment three times,
with 200 ms, 400 ms and 800 ms between. All times are UTC.
Earlier incidents, and what they were:
""" + "\n".join(
    f"- {day} March, {service}: {what}."
    for day, (service, what) in enumerate(
        (
            ("payment", "a card network answered late, retries of checkout tripled the load, the pool ran out"),
            ("stock", "reservations were not given back after a crash, and everything looked sold out"),
            ("mail", "a template without a variable; orders were fine, customers were not told"),
            ("checkout", "a migration held a lock on orders for eleven minutes, west only"),
            ("web", "a certificate ended at midnight; half of the browsers did not mind"),
            ("payment", "the ledger was full, writes failed and reads went on, so the health check stayed green"),
            ("checkout", "two deployments at once, old code read what new code had written"),
            ("stock", "clocks of west were nine seconds off, reservations ended before they began"),
            ("web", "a cache kept the error page of a minute for an hour"),
            ("mail", "retries without an end, one customer got four hundred confirmations"),
            ("payment", "a pool of 40 met a query of 30 seconds, after an index had been dropped"),
            ("checkout", "a region was drained while the other could not carry the load of both"),
        ),
        2,
    )
)

_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "read_log",
        "description": "The slow and failed requests of one service, newest last.",
        "parameters": {
            "type": "object",
            "properties": {
                "service": {"type": "string", "enum": ["web", "checkout", "payment", "stock", "mail"]},
                "region": {"type": "string", "enum": ["east", "west"]},
            },
            "required": ["service", "region"],
        },
    },
}


def _log(service: str, minute: int, lines: int) -> str:
    failures = ("pool timeout after 5000 ms", "upstream reset, attempt 3 of 3", "slow: 1840 ms", "503 from payment")
    return "\n".join(
        f"10:{minute + i // 4:02d}:{(i * 17 + minute) % 60:02d} {service}-{(i * 7919 + minute) % 97:02d} "
        f"order {(i * 104_729 + minute * 31) % 90_000 + 10_000} {failures[(i + minute) % len(failures)]}"
        for i in range(lines)
    )


@dataclass(frozen=True)
class Step:
    """One turn of the script: what is new in it."""

    what: str
    """In a few words, for the table."""
    says: str
    """The user's message; where `result`, what the tool gives instead."""
    result: bool = False
    calls: bool = False
    """The model may call its tool here."""


SCRIPT = (
    Step(
        "user reports an outage",
        "Alert: 31 % of orders fail since about 10:40, normal is 0.2 %. Customers write that the last step spins and then says "
        "'try again'. Nothing was announced. Start with the checkout service.",
        calls=True,
    ),
    Step("tool: checkout's log", _log("checkout", 40, 13), result=True),
    Step("short question", "Since when?"),
    Step(
        "user adds a trace",
        "Someone on the payments team sent this, is it the same problem? If so, look at their log.\n"
        + _log("payment", 38, 5)
        + "\npool: 40 of 40 connections in use, 212 waiting, oldest transaction open for 1,911 s",
        calls=True,
    ),
    Step("tool: payment's log", _log("payment", 36, 14), result=True),
    Step("short question", "Is it both?"),
    Step(
        "user asks for the rest",
        "There was a deployment of payment to west at 10:09, a migration that adds an index to the ledger. I can roll it back, "
        "or end the one open transaction. Before I do, look at the other region: is east healthy?",
        calls=True,
    ),
    Step("tool: east's log", _log("payment-east", 41, 12), result=True),
)


@dataclass(frozen=True)
class Answer:
    """What the model said, compared as a whole."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments of each tool call."""


@dataclass(frozen=True)
class Turn:
    """One turn that has run."""

    step: Step
    answer: Answer
    report: ReuseReport
    ttft_ms: float
    """Measured here, from the call to the first event of the stream that has a token."""


async def converse(
    client: openai.AsyncOpenAI, conversation: Conversation, *, model: str, salt: str, max_tokens: int
) -> AsyncIterator[Turn]:
    """Plays the script in a conversation that has been entered. `salt` keeps the engines' prefix caches apart."""
    messages: list[Any] = [{"role": "system", "content": _SYSTEM}]
    call_ids: list[str] = []
    for step in SCRIPT:
        messages += _new_messages(step, call_ids)
        began = time.perf_counter()
        stream: Any = await client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[_TOOL],
            tool_choice="auto" if step.calls else "none",
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"cache_salt": salt},
        )
        first: float | None = None
        chunks: list[dict[str, Any]] = []
        async for chunk in stream:
            if chunk.choices:
                first = first or time.perf_counter()
                chunks.append(chunk.model_dump())
        report = conversation.reuse.last
        if report is None or first is None:
            raise openai.OpenAIError(f"the engines ended the turn {step.what!r} without an answer")
        said = assemble(chunks)[0]["message"]
        calls = said.get("tool_calls", [])
        messages.append({"role": "assistant", "content": said["content"], **({"tool_calls": calls} if calls else {})})
        call_ids = [call["id"] for call in calls]
        functions = tuple((call["function"]["name"], call["function"]["arguments"]) for call in calls)
        yield Turn(step, Answer(said["content"], functions), report, (first - began) * 1e3)


def _new_messages(step: Step, call_ids: list[str]) -> list[dict[str, Any]]:
    """A model that called no tool gets the result all the same, from the user: any model can play the part."""
    if not step.result:
        return [{"role": "user", "content": step.says}]
    if not call_ids:
        return [{"role": "user", "content": f"read_log says:\n{step.says}"}]
    first, *rest = call_ids
    return [
        {"role": "tool", "tool_call_id": first, "content": step.says},
        *({"role": "tool", "tool_call_id": call_id, "content": "the same"} for call_id in rest),
    ]
