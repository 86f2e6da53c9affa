"""One script, of which only the import changes: openai's client on one engine, ours on an embedded router, ours on a served
one. What it prints is the same."""

from __future__ import annotations

import asyncio
import contextlib
import io

import pytest
from backhaul_loopback import LoopbackEngine, loopback_pair
from served import freed, in_thread

pytestmark = pytest.mark.openai

SCRIPT = """
import asyncio, json, openai
from pydantic import BaseModel

class Plan(BaseModel):
    steps: str

TOOL = {"type": "function", "function": {"name": "look", "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}}}
history = [{"role": "system", "content": "You know the way, and say it in few words. " * 12}]

def ask(text):
    history.append({"role": "user", "content": text})
    return {"model": "loopback", "messages": history, "max_tokens": 200}

with OpenAI() as client:
    print([model.id for model in client.models.list()])

    said = client.chat.completions.create(**ask("Where are we?"), seed=1).choices[0]
    history.append(said.message)
    print(said.finish_reason, said.message.content)

    said = client.chat.completions.create(**ask("Look around."), tools=[TOOL]).choices[0]
    history.append(said.message)
    for call in said.message.tool_calls:
        print(said.finish_reason, call.function.name, call.function.arguments)
        history.append({"role": "tool", "tool_call_id": call.id, "content": "a door, a window, a stair"})
    with client.chat.completions.stream(**ask("So, where to?")) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(end=event.delta)
    history.append(stream.get_final_completion().choices[0].message)
    print(stream.get_final_completion().usage is None)

    chunks = client.chat.completions.create(
        **ask("And then?"), stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    history.append({"role": "assistant", "content": text})
    print(text, usage.prompt_tokens, usage.completion_tokens)

    parsed = client.chat.completions.parse(**ask("As JSON."), response_format=Plan)
    print(parsed.choices[0].message.parsed)

    raw = client.chat.completions.with_raw_response.create(**ask("Once more."), temperature=0)
    print(raw.status_code, raw.parse().choices[0].message.content)

    print(client.completions.create(model="loopback", prompt=[5, 6, 7] * 9, max_tokens=9).choices[0].text)
    for wrong in ({"temperature": -1}, {"model": "none"}, {"messages": []}, {"top_p": "x"}):
        try:
            client.chat.completions.create(**{**ask("Hi."), **wrong})
        except openai.APIStatusError as error:
            print(type(error).__name__, error.status_code)
        else:
            print("taken", wrong)

async def again():
    async with AsyncOpenAI() as client:
        async for chunk in await client.chat.completions.create(**ask("And back?"), stream=True):
            print(end=chunk.choices[0].delta.content or "" if chunk.choices else "")
        several = await client.chat.completions.create(**ask("Two ways."), n=2, temperature=0.5, seed=3)
        print([choice.message.content for choice in several.choices])

asyncio.run(again())
"""
OPENAIS = "from openai import AsyncOpenAI, OpenAI"
OURS = "from backhaul import AsyncOpenAI, OpenAI"
EMBEDDED = """
import backhaul, functools
AsyncOpenAI, OpenAI = [functools.partial(c, prefill=[{p!r}], decode=[{d!r}]) for c in (backhaul.AsyncOpenAI, backhaul.OpenAI)]
"""


async def printed(imports: str, base_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OPENAI_BASE_URL", base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        await asyncio.to_thread(exec, imports + SCRIPT, {"__name__": "__main__"})
    return out.getvalue()


async def test_a_script_prints_the_same_with_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LoopbackEngine("decode") as engine:
        theirs = await printed(OPENAIS, f"{engine.url}/v1", monkeypatch)
    async with loopback_pair() as pair:
        engines = EMBEDDED.format(p=pair.prefill.url, d=pair.decode.url)
        assert await printed(engines, "http://nowhere.invalid/v1", monkeypatch) == theirs
        await freed(pair)
    async with loopback_pair() as pair, in_thread(pair) as http:
        url = str(http.base_url).rstrip("/")
        for imports in (OURS, OPENAIS):
            assert await printed(imports, f"{url}/v1", monkeypatch) == theirs
    assert len(theirs.splitlines()) == 13
