"""Any language that speaks HTTP: an agent against `backhaul serve`, which names its conversation in a header.

    python examples/raw_http.py

It starts two loopback engines, which have no model, and a router as a process of its own. For engines of yours:
`backhaul serve --prefill http://... --decode http://...`, and its URL here.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from backhaul_loopback import loopback_pair

SYSTEM = """You sort the post of a small town. Look an address up before you say which round it belongs to.
Rounds are red, green and blue; red starts at seven, green at eight, blue at nine. Parcels go with the van at ten.
If an address is on no round, say so and keep the letter back. Answer in one sentence."""
QUESTIONS = ["Which round is Mill Lane 3 on?", "And number 8?", "Which of the two gets its post first?"]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The register's lines for an address.",
        "parameters": {"type": "object", "properties": {"address": {"type": "string"}}, "required": ["address"]},
    },
}
http = build_opener(ProxyHandler({}))


def call(method: str, url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
    with http.open(request, timeout=60) as response:
        return json.load(response) if response.status == 200 else None


def look_up(address: str) -> str:
    return "\n".join(f"{address}, box {n}: {('red', 'green', 'blue')[n % 3]} round, since 20{n}1" for n in range(1, 5))


def agent(router: str, model: str, conversation: str) -> list[str]:
    history: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    answers = []
    for question in QUESTIONS:
        history.append({"role": "user", "content": question})
        while True:
            body = {"model": model, "messages": history, "tools": [TOOL], "temperature": 0}
            reply = call("POST", f"{router}/v1/chat/completions", body, **{"X-Conversation-ID": conversation})
            message = reply["choices"][0]["message"]
            history.append(message)
            if not message.get("tool_calls"):
                break
            for wanted in message["tool_calls"]:
                result = look_up(**json.loads(wanted["function"]["arguments"]))
                history.append({"role": "tool", "tool_call_id": wanted["id"], "content": result})
        answers.append(message["content"])
    return answers


def talk(router: str, model: str) -> tuple[list[str], list[dict[str, Any]]]:
    """The answers, and the turns' reports."""
    conversation = str(uuid.uuid4())
    try:
        answers = agent(router, model, conversation)
        return answers, call("GET", f"{router}/backhaul/conversations/{conversation}")["reports"]
    finally:
        call("DELETE", f"{router}/backhaul/conversations/{conversation}")  # the engines let go of its KV


@asynccontextmanager
async def serve(*options: str) -> AsyncIterator[str]:
    """`backhaul serve` on a free port; yields its URL, from the line that it prints."""
    command = (sys.executable, "-u", "-m", "backhaul_cli", "serve", "--port", "0", *options)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().split()
        yield line[1].removesuffix("/v1")
    finally:
        process.terminate()
        await process.communicate()


async def main() -> None:
    async with loopback_pair(connector="backhaul", prefill={"prefix_caching": False}) as pair:
        engines = ("--prefill", pair.prefill.url, "--decode", pair.decode.url)
        async with serve(*engines, "--no-log-turns", "--no-reuse") as router:
            without, _ = await asyncio.to_thread(talk, router, pair.model)
        async with serve(*engines, "--no-log-turns") as router:
            answers, turns = await asyncio.to_thread(talk, router, pair.model)
    for turn in turns:
        pulled, computed, reason = (turn[name] or "" for name in ("pulled", "computed", "reason"))
        print(f"turn {turn['turn']}: {turn['route']:5} pulled {pulled or 0:4}  computed {computed or 0:4}  {reason}")
    print(
        f"{sum(turn['cached'] or 0 for turn in turns)} of {sum(turn['prompt'] for turn in turns)} prompt tokens were reused"
    )
    print("The answers are", "those" if answers == without else "NOT those", "of the run without reuse.")


if __name__ == "__main__":
    asyncio.run(main())
