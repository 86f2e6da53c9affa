"""What streams look like, and where the plugin puts the handle."""

from __future__ import annotations

import asyncio

from .engines import Engines, Json
from .shapes import HELLO

_PLUGIN = "backhaul_plugin_info"


async def chat_stream_begins_with_the_role_and_ends_with_usage(engines: Engines) -> None:
    options = {"include_usage": True}
    answer = await engines.chat(
        engines.decode_url, HELLO, max_tokens=6, ignore_eos=True, stream=True, stream_options=options
    )
    first, *content, usage = answer.events
    assert answer.headers["content-type"].startswith("text/event-stream")
    head = {"id", "object", "created", "model", "choices"}
    assert first.keys() == head | {"prompt_token_ids", "prompt_text"}
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    handle, weights = ({"kv_transfer_params"}, {"weight_versions"}) if engines.speaks_033 else (set(), set())
    assert all(chunk.keys() == head | handle for chunk in content)
    fields = {"index", "delta", "logprobs", "finish_reason", "token_ids"}
    assert all(chunk["choices"][0].keys() == fields for chunk in content[:-1])
    assert content[-1]["choices"][0].keys() == fields | weights | {"stop_reason"}
    assert content[-1]["choices"][0]["finish_reason"] == "length"
    assert usage.keys() == head | {"usage", "system_fingerprint"}
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert "cached_tokens" in usage["usage"]["prompt_tokens_details"]


async def chat_stream_adds_up_to_the_whole_answer(engines: Engines) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    whole = await engines.chat(engines.decode_url, HELLO, **fields)
    stream = await engines.chat(engines.decode_url, HELLO, stream=True, **fields)
    choices = [event["choices"][0] for event in stream.events]
    assert stream.events[0]["prompt_token_ids"] == whole.json["prompt_token_ids"]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == whole.choice["message"]["content"]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    assert ids == whole.choice["token_ids"]


async def last_chunk_has_the_fingerprint_when_no_usage_follows(engines: Engines) -> None:
    answer = await engines.chat(engines.decode_url, HELLO, max_tokens=3, stream=True)
    assert [("system_fingerprint" in event) for event in answer.events[-2:]] == [False, True]


async def completion_stream_chunks_have_all_fields(engines: Engines) -> None:
    answer = await engines.complete(
        engines.decode_url, "Once", max_tokens=6, ignore_eos=True, stream=True, stream_options={"include_usage": True}
    )
    *content, usage = answer.events
    fields = {"index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"}
    weights = {"weight_versions"} if engines.speaks_033 else set()
    assert all(chunk["choices"][0].keys() == fields | weights for chunk in content)
    assert all(("kv_transfer_params" in chunk) == engines.speaks_033 for chunk in content)
    assert content[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["object"] == "text_completion"
    assert usage["usage"]["completion_tokens"] == 6


async def stream_without_transfer_parameters_has_none(engines: Engines) -> None:
    """0.33 says so with a null, in these very bytes, which the router cuts out."""
    answer = await engines.chat(engines.decode_url, HELLO, max_tokens=4, stream=True)
    assert not any(event.get("kv_transfer_params") for event in answer.events)
    assert "kv_transfer_params" not in answer.text.replace(',"kv_transfer_params":null', "")


async def plugin_puts_handle_and_ids_into_the_finishing_chunk(engines: Engines) -> None:
    if not await _has_plugin(engines):
        return
    prompt = list(range(40, 200))
    for url, body in (
        ("/v1/completions", {"prompt": prompt}),
        ("/v1/chat/completions", {"messages": HELLO}),
    ):
        fields = engines.body(**body, max_tokens=8, ignore_eos=True)
        whole = await engines.post(f"{engines.decode_url}{url}", fields | {"return_token_ids": True})
        first = await engines.post(
            f"{engines.prefill_url}{url}", fields | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        )
        answer = await engines.post(
            f"{engines.decode_url}{url}", fields | {"stream": True, "kv_transfer_params": first.handle}
        )
        (last,) = _finishing(answer.events)
        assert [event for event in answer.events if event.get("kv_transfer_params")] == [last]
        handle = last["kv_transfer_params"]
        assert handle["backhaul"] == {"version": 1, "token_ids": whole.choice["token_ids"]}
        assert handle["do_remote_decode"] is True
        assert handle["remote_num_tokens"] == whole.usage["prompt_tokens"] + 8 - 1
        await engines.release({name: value for name, value in handle.items() if name != "backhaul"})


async def plugin_gives_ids_alone_where_there_is_no_handle(engines: Engines) -> None:
    if not await _has_plugin(engines):
        return
    ids = list(range(40, 90))
    answer = await engines.chat(
        engines.decode_url,
        HELLO,
        max_tokens=5,
        ignore_eos=True,
        stream=True,
        kv_transfer_params={"prompt_token_ids": ids},
    )
    (last,) = _finishing(answer.events)
    assert last["kv_transfer_params"].keys() == {"backhaul"}
    assert len(last["kv_transfer_params"]["backhaul"]["token_ids"]) == 5


async def client_that_leaves_a_stream_leaves_nothing_pinned(engines: Engines) -> None:
    usage = await engines.usage(engines.decode_url)
    prompt = list(range(40, 200))
    handle = (await engines.prefill(prompt)).handle
    body = engines.body(prompt=prompt, max_tokens=3000, ignore_eos=True, stream=True, kv_transfer_params=handle)
    async with engines.open_stream(f"{engines.decode_url}/v1/completions", body) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await asyncio.sleep(0)
    await engines.wait_for_usage(engines.decode_url, usage)


async def _has_plugin(engines: Engines) -> bool:
    return f"\n{_PLUGIN}{{" in (await engines.get(f"{engines.decode_url}/metrics")).text


def _finishing(events: list[Json]) -> list[Json]:
    return [event for event in events if event["choices"] and event["choices"][0]["finish_reason"]]
