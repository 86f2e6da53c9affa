"""From a request to token ids, and back in by `prompt_token_ids`."""

from __future__ import annotations

from .engines import Engines, Json

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
HISTORY = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is the tallest tree?"},
    {"role": "assistant", "content": "A coast redwood."},
    {"role": "user", "content": [{"type": "text", "text": "And how tall?"}]},
]
CALLED = [
    {"role": "user", "content": "Look it up."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "116 metres"},
]
REQUESTS: dict[str, dict[str, Json]] = {
    "plain": {"messages": HISTORY},
    "tools": {"messages": CALLED, "tools": TOOLS, "tool_choice": "none"},
    "documents": {"messages": HISTORY, "documents": [{"title": "Trees", "text": "They grow."}]},
    "reasoning_effort": {"messages": HISTORY, "reasoning_effort": "low"},
    "reasoning": {"messages": [*HISTORY[:2], {**HISTORY[2], "reasoning_content": "Hyperion."}, HISTORY[3]]},
    "truncated": {"messages": HISTORY, "truncate_prompt_tokens": 12},
    "template variables": {"messages": HISTORY, "chat_template_kwargs": {"enable_thinking": False}},
    "continued": {"messages": HISTORY[:3], "continue_final_message": True, "add_generation_prompt": False},
}


async def chat_renderer_gives_the_ids_that_serving_runs(engines: Engines) -> None:
    for name, request in REQUESTS.items():
        rendered = await engines.post(f"{engines.decode_url}/v1/chat/completions/render", engines.body(**request))
        assert rendered.status == 200, (name, rendered.text)
        served = await _served(engines, **request)
        assert rendered.json["token_ids"] == served, name


async def completion_renderer_gives_the_ids_that_serving_runs(engines: Engines) -> None:
    body = engines.body(prompt="Once upon a time", max_tokens=1, return_token_ids=True)
    rendered = await engines.post(f"{engines.prefill_url}/v1/completions/render", body)
    served = await engines.post(f"{engines.prefill_url}/v1/completions", body)
    (only,) = rendered.json
    assert only["token_ids"] == served.choice["prompt_token_ids"]


async def renderer_says_that_there_is_nothing_but_text(engines: Engines) -> None:
    rendered = await engines.post(
        f"{engines.decode_url}/v1/chat/completions/render", engines.body(messages=HISTORY, max_tokens=3)
    )
    assert rendered.json["features"] is None
    assert rendered.json["sampling_params"]["max_tokens"] == 3
    assert rendered.json["request_id"].startswith("chatcmpl-")


async def tokenize_agrees_on_messages_and_tools(engines: Engines) -> None:
    for request in ({"messages": HISTORY}, {"messages": CALLED, "tools": TOOLS}):
        answer = await engines.post(f"{engines.decode_url}/tokenize", {"model": engines.model, **request})
        assert answer.json.keys() == {"count", "max_model_len", "tokens", "token_strs"}
        assert answer.json["tokens"] == await _served(engines, **request)
        assert answer.json["count"] == len(answer.json["tokens"])


async def tokenize_ignores_fields_that_serving_honours(engines: Engines) -> None:
    for name in ("documents", "reasoning_effort", "truncated"):
        request = REQUESTS[name]
        answer = await engines.post(f"{engines.decode_url}/tokenize", {"model": engines.model, **request})
        assert answer.status == 200
        plain = await engines.post(f"{engines.decode_url}/tokenize", {"model": engines.model, "messages": HISTORY})
        assert answer.json["tokens"] == plain.json["tokens"], name
        assert answer.json["tokens"] != await _served(engines, **request), name


async def forwarded_ids_win_over_the_messages(engines: Engines) -> None:
    ids = list(range(40, 120))
    answer = await engines.chat(
        engines.decode_url,
        HISTORY,
        max_tokens=4,
        return_token_ids=True,
        kv_transfer_params={"prompt_token_ids": ids},
    )
    assert answer.json["prompt_token_ids"] == ids
    assert answer.usage["prompt_tokens"] == len(ids)


async def forwarded_ids_alone_leave_no_handle_and_nothing_pinned(engines: Engines) -> None:
    usage = await engines.usage(engines.decode_url)
    answer = await engines.chat(
        engines.decode_url, HISTORY, max_tokens=4, kv_transfer_params={"prompt_token_ids": list(range(40, 120))}
    )
    assert answer.json["kv_transfer_params"] is None
    await engines.wait_for_usage(engines.decode_url, usage)


async def detokenize_reverses_tokenize(engines: Engines) -> None:
    body = {"model": engines.model, "prompt": "Once upon a time", "add_special_tokens": False}
    tokens = (await engines.post(f"{engines.decode_url}/tokenize", body)).json["tokens"]
    answer = await engines.post(f"{engines.decode_url}/detokenize", {"model": engines.model, "tokens": tokens})
    assert answer.json == {"prompt": "Once upon a time"}


async def _served(engines: Engines, **request: Json) -> list[int]:
    answer = await engines.post(
        f"{engines.decode_url}/v1/chat/completions", engines.body(**request, max_tokens=1, return_token_ids=True)
    )
    assert answer.status == 200, answer.text
    return answer.json["prompt_token_ids"]
