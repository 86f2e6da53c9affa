"""Requests of every shape, in the middle of a conversation that has something to reuse: each is answered as it would be by
an engine alone, errors included, and so is the turn after it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from backhaul_router.report import Reason, Route
from router_turns import CHAT, COMPLETIONS, STORY, Cluster, first_turn, opening, run_cluster, system, user

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
    for name in ("look", "go")
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2},
    "best_of": {"best_of": 2},
    "beam search": {"use_beam_search": True, "n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "echo": {"echo": True},
    "return_token_ids": {"return_token_ids": True},
    "max_tokens": {"max_tokens": 7},
    "max_tokens 1": {"max_tokens": 1},
    "max_completion_tokens": {"max_tokens": 50, "max_completion_tokens": 9},
    "min_tokens": {"min_tokens": 60, "max_tokens": 80},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 70},
    "stop string": {"stop": [" "]},
    "stop string in the first token": {
        "stop": ["A", "B", "C", "D", "F", "G", "H", "L", "M", "O", "P", "R", "S", "T", "W"]
    },
    "stop included": {"stop": ["."], "include_stop_str_in_output": True},
    "stop token": {"stop_token_ids": [32]},
    "tools": {"tools": TOOLS},
    "tool required": {"tools": TOOLS, "tool_choice": "required"},
    "tool named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "go"}}},
    "tool none": {"tools": TOOLS, "tool_choice": "none"},
    "json object": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": SCHEMA},
    "documents": {"documents": [{"title": "t", "text": STORY}]},
    "reasoning_effort": {"reasoning_effort": "low"},
    "template arguments": {"chat_template_kwargs": {"enable_thinking": False}},
    "truncated": {"truncate_prompt_tokens": 100},
    "truncated on the right": {"truncate_prompt_tokens": 100, "truncation_side": "right"},
    "a request id": {"request_id": "mine"},
    "a session id": {"session_id": "c"},
    "a priority": {"priority": 1, "seed": 7, "temperature": 0.0, "top_p": 1.0, "user": "u"},
    "fields nobody knows": {"anything": {"new": [1.5, "é"]}},
    "without generation prompt": {"add_generation_prompt": False, "continue_final_message": True},
    # What engines reject.
    "unknown model": {"model": "another"},
    "model of another type": {"model": 7},
    "n of another type": {"n": "two"},
    "n 0": {"n": 0},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens negative": {"max_tokens": -1},
    "max_tokens of another type": {"max_tokens": "many"},
    "min over max": {"min_tokens": 10, "max_tokens": 5},
    "temperature negative": {"temperature": -1},
    "tools empty": {"tools": []},
    "tool unknown": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}},
    "tool choice without tools": {"tool_choice": "required"},
    "stream_options of another type": {"stream_options": [1]},
    "schema missing": {"response_format": {"type": "json_schema"}},
    "salt empty": {"cache_salt": ""},
    "messages of another type": {"messages": "hi"},
    "messages missing": {"messages": None},
    "no messages": {"messages": []},
    "a message of another type": {"messages": ["hi"]},
    "a role missing": {"messages": [{"content": "hi"}]},
    "a template": {"chat_template": "{{ messages }}"},
    "truncated to too much": {"truncate_prompt_tokens": 10**9},
}


@pytest.mark.parametrize(("stream", "scale_out"), [(False, False), (True, True)], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_every_shape_is_answered_as_by_an_engine_alone(shape: str, stream: bool, scale_out: bool) -> None:
    async with run_cluster(engine={"enable_scale_out": scale_out}) as cluster:
        cluster.released_twice = shape == "min over max"  # D alone rejects it, and tells P itself
        history = await first_turn(cluster)
        odd = {"messages": history, "stream": stream, **SHAPES[shape]}
        answer = await cluster.exact(odd)
        assert answer.reused.status == answer.status
        after = {"messages": [*history, {"role": "assistant", "content": "Yes."}, user("Third. " + STORY)]}
        await cluster.exact(after)
        await cluster.exact(after, conversation=None)


COMPLETION_SHAPES: dict[str, dict[str, Any]] = {
    "text": {},
    "ids": {"prompt": list(range(60, 160))},
    "a batch of texts": {"prompt": [STORY, STORY * 2]},
    "a batch of one": {"prompt": [STORY]},
    "a batch of ids": {"prompt": [list(range(60, 160)), list(range(50))]},
    "echo": {"echo": True},
    "echo alone": {"echo": True, "max_tokens": 0},
    "logprobs": {"logprobs": 1},
    "logprobs of the echo": {"logprobs": 1, "echo": True},
    "suffix": {"suffix": "end"},
    "n": {"n": 3},
    "ids returned": {"return_token_ids": True},
    "without special tokens": {"add_special_tokens": False},
    "truncated": {"truncate_prompt_tokens": 50},
    "ids that do not exist": {"prompt": [5, 100_000]},
    "negative ids": {"prompt": [5, -1]},
    "ids beyond 32 bits": {"prompt": [5, 2**40]},
    "a mixed batch": {"prompt": ["a", 1]},
    "nothing": {"prompt": ""},
    "an empty list": {"prompt": []},
    "no prompt": {"prompt": None},
    "a prompt of another type": {"prompt": {"text": "x"}},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", COMPLETION_SHAPES)
async def test_every_completion_is_answered_as_by_an_engine_alone(shape: str, stream: bool) -> None:
    async with run_cluster() as cluster:
        first = await cluster.exact({"prompt": STORY * 2, "max_tokens": 40}, COMPLETIONS)
        prompt = STORY * 2 + first.json["choices"][0]["text"] + STORY
        odd = {"prompt": prompt, "max_tokens": 20, "stream": stream, **COMPLETION_SHAPES[shape]}
        await cluster.exact(odd, COMPLETIONS)
        await cluster.exact({"prompt": prompt + STORY, "max_tokens": 20}, COMPLETIONS)
        await cluster.exact(odd, COMPLETIONS, conversation=None)


async def reports_of(cluster: Cluster, **shape: Any) -> Any:
    history = await first_turn(cluster)
    return (await cluster.exact({"messages": history, **shape})).reused


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"n": 2}, Reason.MULTIPLE_CHOICES),
        ({"use_beam_search": True}, Reason.MULTIPLE_CHOICES),
        ({"echo": True}, Reason.NO_PROOF),
        ({"prompt_logprobs": 1}, Reason.NO_PROOF),
        ({"truncate_prompt_tokens": 10}, Reason.NO_PROOF),
    ],
)
async def test_what_cannot_be_split_goes_to_decode_alone_and_the_handle_stays(shape: Any, reason: Reason) -> None:
    async with run_cluster() as cluster:
        history = await first_turn(cluster)
        report = (await cluster.exact({"messages": history, **shape})).reused
        assert (report.route, report.reason) == (Route.LOCAL, reason)
        assert (await cluster.exact({"messages": history})).reused.route is Route.WARM
        sent = [r for r in cluster.d.requests_to(CHAT) if shape.keys() <= r.body.keys()]
        assert [r.body.keys() & {"kv_transfer_params"} for r in sent] == [set()]


async def test_a_rejected_turn_leaves_the_handle_for_the_next() -> None:
    async with run_cluster() as cluster:
        history = await first_turn(cluster)
        assert (await cluster.exact({"messages": history, "temperature": -1})).status == 400
        assert (await cluster.exact({"messages": history})).reused.route is Route.WARM


async def test_a_prompt_that_is_too_long_is_the_engines_to_refuse() -> None:
    async with run_cluster(engine={"max_model_len": 600}) as cluster:
        history = await first_turn(cluster)
        reply = await cluster.ask({"messages": [*history, user("x" * 600)]})
        assert reply.status == 400
        assert "maximum context length" in reply.json["error"]["message"]


@pytest.mark.parametrize("scale_out", [True, False], ids=["rendered", "tokenized"])
@pytest.mark.parametrize("part", ["image_url", "input_image", None])
async def test_images_are_never_proven_by_tokens(part: str | None, scale_out: bool) -> None:
    """The two pictures have equal token ids. Without a `type` the engine goes by the key."""

    def picture(name: str) -> dict[str, Any]:
        url = {"image_url": {"url": name}} if part != "input_image" else {"image_url": name}
        return {"role": "user", "content": [{"type": "text", "text": STORY}, {"type": part, **url} if part else url]}

    async with run_cluster(p={"prefix_caching": False}, engine={"enable_scale_out": scale_out}) as cluster:
        answer = await cluster.exact({"messages": [system(), picture("a.png"), user(STORY)]})
        second = {"messages": [system(), picture("b.png"), user(STORY), answer.message, user(STORY)]}
        report = (await cluster.exact(second)).reused
        assert (report.route, report.reason) == (Route.COLD, Reason.NO_PROOF)


@pytest.mark.parametrize("field", ["documents", "reasoning_effort", "tool_choice", "response_format"])
async def test_what_tokenize_ignores_gives_no_proof(field: str) -> None:
    shapes = {
        "documents": {"documents": [{"text": "x"}]},
        "reasoning_effort": {"reasoning_effort": "low"},
        "tool_choice": {"tools": TOOLS, "tool_choice": "none"},
        "response_format": {"response_format": {"type": "text"}},
    }
    async with run_cluster(engine={"enable_scale_out": False}) as cluster:
        report = await reports_of(cluster, **shapes[field])
        assert (report.route, report.reason) == (Route.COLD, Reason.NO_PROOF)


async def test_usage_comes_where_it_was_asked_for() -> None:
    async with run_cluster() as cluster:
        body = {"messages": opening(), "stream": True}
        quiet = await cluster.exact(body)
        assert not any("usage" in event for event in quiet.events)
        asked = await cluster.exact({**body, "stream_options": {"include_usage": True}})
        assert asked.events[-1]["usage"]["backhaul"]["route"] == "warm"
        running = {"include_usage": True, "continuous_usage_stats": True}
        await cluster.exact({**body, "stream_options": running})


async def test_numbers_and_text_reach_the_engine_as_they_were_written() -> None:
    async with run_cluster() as cluster:
        body = (
            b'{"model": "loopback", "messages": [{"role": "user", "content": "\\u00e9\\/\xc3\xa9 '
            + STORY.encode()
            + b'"}],'
            b' "temperature": 0.10, "seed": 12345678901234567890, "logit_bias": {"5": 1e-7}, "x": [1 , 2.50]}'
        )
        answer = await cluster.ask(body)
        assert json.loads((await cluster.direct(body))[1])["choices"] == answer.json["choices"]
        for engine in (cluster.p, cluster.d):
            (received,) = engine.requests_to(CHAT)
            for piece in (b"0.10", b"12345678901234567890", b"1e-7", b"[1 , 2.50]", b"\\u00e9\\/\xc3\xa9"):
                assert piece in received.raw


async def test_a_prompt_of_a_megabyte_is_answered() -> None:
    async with run_cluster(engine={"max_model_len": 2**20, "num_blocks": 2**16}) as cluster:
        prompt = [7] * 60_000
        answer = await cluster.ask({"prompt": prompt, "max_tokens": 3}, COMPLETIONS)
        assert answer.reused.prompt == 60_000
