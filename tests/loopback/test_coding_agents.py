"""Sessions of coding agents, in the shapes of their requests, against the router: each turn is answered as one engine answers
the same body, runs warm where its history allows it, and shows nothing of a handle."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from backhaul_router.report import Proof, Reason, ReuseReport, Route
from router_turns import CHAT, STORY, Answer, Cluster, comparable, run_cluster

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
Json = dict[str, Any]

READ_SCHEMA = {"type": "object", "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}
LIST_SCHEMA = {"type": "object", "properties": {"pattern": {"type": "string"}}, "required": ["pattern"]}
FILE = "1\timport cache\n2\n3\tcache.keep(blocks)\n" * 4
EPHEMERAL = {"type": "ephemeral"}
SESSION = "6e1b79b5-d532-4b38-b272-ea91cc73da41"


@pytest.fixture(params=["stock", "backhaul"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    async with run_cluster(engine={"connector": request.param}, p={"prefix_caching": False}) as cluster:
        yield cluster


def proof(cluster: Cluster) -> Proof:
    return Proof.CONNECTOR if cluster.d.config.connector == "backhaul" else Proof.TOKENS


# --- answers, however they came --------------------------------------------------------------------------------------


def events(raw: bytes) -> list[Json]:
    """The data of a stream's named events."""
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def anthropic_content(raw: bytes) -> list[Json]:
    """The content blocks that a stream adds up to."""
    blocks: list[Json] = []
    stream = events(raw)
    assert (stream[0]["type"], stream[-1]["type"]) == ("message_start", "message_stop")
    for event in stream:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                blocks[-1]["text"] += event["delta"]["text"]
            case "content_block_delta":
                blocks[-1]["partial"] = blocks[-1].get("partial", "") + event["delta"]["partial_json"]
    for block in blocks:
        if "partial" in block:
            block["input"] = json.loads(block.pop("partial"))
    return blocks


def without_ids(value: Any) -> Any:
    """Without what is drawn anew for every answer."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        return {key: without_ids(one) for key, one in value.items() if key not in ("id", "item_id", "sequence_number")}
    return value


async def anthropic_turn(cluster: Cluster, body: Json, **how: Any) -> tuple[list[Json], ReuseReport]:
    """A streamed turn, as an agent has it: content blocks, equal to the engine's own."""
    answer = await cluster.ask({**body, "stream": True}, MESSAGES, **how)
    assert answer.status == 200, answer.raw
    status, raw = await cluster.direct({**body, "stream": True}, MESSAGES)
    content = anthropic_content(answer.raw)
    assert (200, content) == (status, anthropic_content(raw))
    return content, answer.reused


async def responses_turn(cluster: Cluster, body: Json, **how: Any) -> tuple[list[Json], ReuseReport]:
    """A streamed turn: output items, and every event but the last, equal to the engine's own."""
    answer = await cluster.ask({**body, "stream": True}, RESPONSES, **how)
    assert answer.status == 200, answer.raw
    status, raw = await cluster.direct({**body, "stream": True}, RESPONSES)
    assert status == 200
    ours, theirs = events(answer.raw), events(raw)
    assert without_ids([one for one in ours if "response" not in one]) == without_ids(
        [one for one in theirs if "response" not in one]
    )
    done, expected = ours[-1]["response"], theirs[-1]["response"]
    assert ours[-1]["type"] == "response.completed"
    assert done.keys() == expected.keys() - {"kv_transfer_params", "ec_transfer_params"}
    assert done["input_messages"] is None
    for name in ("output", "status", "model", "tools", "instructions"):
        assert without_ids(done[name]) == without_ids(expected[name]), name
    return done["output"], answer.reused


def check_warm(cluster: Cluster, report: ReuseReport) -> None:
    assert (report.route, report.reason, report.proof) == (Route.WARM, None, proof(cluster))
    assert report.cached
    if proof(cluster) is Proof.CONNECTOR:  # by token ids an answer that comes back as other tokens shows, too
        assert report.diverged_at is None


# --- on /v1/messages -------------------------------------------------------------------------------------------------

TOOLS = [
    {"name": "Read", "description": "Reads a file.", "input_schema": READ_SCHEMA},
    {"name": "Glob", "description": "Finds files.", "input_schema": LIST_SCHEMA},
]


class TerminalAgent:
    """Keeps a history and marks it for caching as agents for Anthropic's API do: the system prompt, and the last message,
    whose mark moves on with every request; a line on billing that is never the same twice stands first."""

    def __init__(self, system: str, **fields: Any) -> None:
        self.history: list[Json] = []
        self._system = system
        self._fields = fields
        self._requests = 0

    def says(self, *blocks: Json) -> None:
        self.history.append({"role": "user", "content": list(blocks)})

    def request(self) -> Json:
        self._requests += 1
        billing = f"x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={self._requests:05x};"
        messages = copy.deepcopy(self.history)
        last = messages[-1]
        last["content"][-1]["cache_control"] = EPHEMERAL
        return {
            "max_tokens": 96,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are an agent for the terminal.", "cache_control": EPHEMERAL},
                {"type": "text", "text": self._system, "cache_control": EPHEMERAL},
            ],
            "messages": messages,
            "tools": TOOLS,
            "metadata": {"user_id": f"user_1_account__session_{SESSION}"},
            **self._fields,
        }

    def hears(self, content: list[Json]) -> None:
        self.history.append({"role": "assistant", "content": content})


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def result(call: Json, words: str) -> Json:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": [text(words)]}


async def test_a_session_over_anthropics_api_is_warm_through_tools_thinking_and_text(cluster: Cluster) -> None:
    session = {"conversation": None, "headers": [("X-Claude-Code-Session-Id", SESSION), ("anthropic-beta", "x")]}
    agent = TerminalAgent(STORY * 3, thinking={"type": "adaptive"}, temperature=0)
    agent.says(text("<system-reminder>Today is Monday.</system-reminder>"), text("Where are blocks kept?"))
    content, report = await anthropic_turn(cluster, agent.request(), **session)
    assert (report.route, report.reason) == (Route.COLD, Reason.FIRST_TURN)
    (call,) = content
    assert (call["type"], call["name"]) == ("tool_use", "Read")

    thought = {"type": "thinking", "thinking": "I should read the file.", "signature": "c2ln"}
    agent.hears([thought, call])
    agent.says(result(call, FILE))
    content, report = await anthropic_turn(cluster, agent.request(), **session)
    check_warm(cluster, report)
    assert [block["type"] for block in content] == ["text"]

    agent.hears(content)
    agent.says(text("Now find the tests. " + STORY))
    content, report = await anthropic_turn(cluster, agent.request(), **session)
    check_warm(cluster, report)
    assert content[0]["type"] == "tool_use"
    assert report.conversation is not None
    assert SESSION in report.conversation
    assert report.turn == 3


async def test_whole_answers_are_warm_too_and_say_what_was_cached(cluster: Cluster) -> None:
    agent = TerminalAgent(STORY * 3)
    agent.says(text("Where are blocks kept?"))
    for turn in range(2):
        answer = await cluster.ask(agent.request(), f"{MESSAGES}?beta=true")
        status, raw = await cluster.direct(agent.request(), MESSAGES)
        assert (answer.status, answer.json["content"]) == (status, json.loads(raw)["content"])
        assert answer.json.keys() == json.loads(raw).keys()
        if turn:
            check_warm(cluster, answer.reused)
            usage = answer.json["usage"]
            assert usage["cache_read_input_tokens"] == answer.reused.cached
            assert usage["backhaul"]["route"] == "warm"
        (call,) = answer.json["content"]
        agent.hears([call])
        agent.says(result(call, FILE), text("Go on. " + STORY))


async def test_a_sub_agent_and_a_compaction_under_the_session_s_id_leave_it_what_it_has(cluster: Cluster) -> None:
    """They begin with the same tools, of which a stock engine's handle serves the first who reads it."""
    agent, helper = TerminalAgent(STORY * 3), TerminalAgent("You only search. " + STORY * 2)
    agent.says(text("Where are blocks kept?"))
    helper.says(text("Find every file about blocks."))
    shared = proof(cluster) is Proof.CONNECTOR
    for turn in range(3):
        for one in (agent, helper):
            content, report = await anthropic_turn(cluster, one.request())
            if turn and shared:
                check_warm(cluster, report)
            one.hears(content)
            one.says(
                *(result(block, FILE) for block in content if block["type"] == "tool_use"), text("Go on. " + STORY)
            )

    compacting = TerminalAgent("You summarise conversations. " + STORY)
    compacting.history = [*agent.history[:-1], {"role": "user", "content": [text("Summarise all of this.")]}]
    await anthropic_turn(cluster, compacting.request() | NO_TOOLS)
    content, report = await anthropic_turn(cluster, agent.request())
    if shared:
        check_warm(cluster, report)

    agent.history = []
    agent.says(text("This session goes on from an earlier one: " + STORY), text("Where are blocks kept?"))
    await anthropic_turn(cluster, agent.request())


NO_TOOLS: Json = {"tools": None}


async def test_disabled_thinking_is_proven_by_the_connector_alone(cluster: Cluster) -> None:
    """The renderer of vLLM takes another reasoning effort for it than serving does, on some models."""
    agent = TerminalAgent(STORY * 3, thinking={"type": "disabled"})
    for turn in range(2):
        agent.says(text(f"Question {turn}: {STORY}"))
        content, report = await anthropic_turn(cluster, agent.request() | NO_TOOLS)
        agent.hears(content)
        if turn and proof(cluster) is Proof.CONNECTOR:
            check_warm(cluster, report)
        elif turn:
            assert report.route is Route.COLD
        assert not [r for e in cluster.engines for r in e.requests_to(f"{MESSAGES}/render")]


async def test_errors_on_messages_have_anthropics_shape(cluster: Cluster) -> None:
    for body, status in (
        (b"{", 400),
        ({"messages": "hello", "max_tokens": 3}, 400),
        ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "model": "unknown"}, 404),
    ):
        answer = await cluster.ask(body, MESSAGES)
        assert answer.status == status
        if status == 404 or body == b"{":
            assert answer.json["type"] == "error"
            assert answer.json["error"].keys() == {"type", "message"}
    await cluster.kill(cluster.d)
    answer = await cluster.ask({"messages": [{"role": "user", "content": STORY}], "max_tokens": 3}, MESSAGES)
    assert (answer.status, answer.json["error"]["type"]) == (502, "api_error")
    cluster.pinned_until_ttl = True


async def test_a_message_stream_that_breaks_ends_with_an_error_event(cluster: Cluster) -> None:
    cluster.d.faults.die_after_bytes = 700
    body = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 96, "stream": True}
    answer = await cluster.ask(body, MESSAGES)
    *_, last = events(answer.raw)
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    assert answer.reused.error == "decode_failed"
    cluster.d.faults.clear()


# --- on /v1/responses ------------------------------------------------------------------------------------------------

SHELL: Json = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


class RepositoryAgent:
    """Keeps items and sends all of them with every request, as agents for OpenAI's Responses API do that store nothing."""

    def __init__(self, instructions: str) -> None:
        self.items: list[Json] = []
        self._instructions = instructions

    def says(self, words: str) -> None:
        content = [{"type": "input_text", "text": words}]
        self.items.append({"type": "message", "role": "user", "content": content})

    def request(self, **fields: Any) -> Json:
        return {
            "instructions": self._instructions,
            "input": copy.deepcopy(self.items),
            "tools": [SHELL, {"type": "web_search", "external_web_access": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0199f2d1-thread",
            "max_output_tokens": 96,
            **fields,
        }

    def hears(self, output: list[Json]) -> None:
        self.items += [{key: value for key, value in item.items() if value is not None} for item in output]


async def test_a_session_over_the_responses_api_is_warm_through_calls_reasoning_and_text(cluster: Cluster) -> None:
    agent = RepositoryAgent(STORY * 3)
    agent.says("<environment_context><cwd>/repository</cwd></environment_context>")
    agent.says("Where are blocks kept?")
    output, report = await responses_turn(cluster, agent.request(), conversation=None)
    assert (report.route, report.reason) == (Route.COLD, Reason.FIRST_TURN)
    (call,) = output
    assert (call["type"], call["name"]) == ("function_call", "shell")

    reasoning = [{"type": "reasoning_text", "text": "I should look into it."}]
    agent.items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": reasoning})
    agent.hears(output)
    agent.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": FILE})
    output, report = await responses_turn(cluster, agent.request(), conversation=None)
    check_warm(cluster, report)
    assert [item["type"] for item in output] == ["message"]

    agent.hears(output)
    agent.says("Now run the tests. " + STORY)
    output, report = await responses_turn(cluster, agent.request(), conversation=None)
    check_warm(cluster, report)
    assert output[0]["type"] == "function_call"
    assert (report.identity_source, report.turn) == ("body:prompt_cache_key", 3)


async def test_whole_responses_are_warm_too_and_say_what_was_cached(cluster: Cluster) -> None:
    agent = RepositoryAgent(STORY * 3)
    for turn in range(2):
        agent.says(f"Question {turn}: {STORY}")
        body = agent.request(tools=[])
        answer = await cluster.ask(body, RESPONSES)
        status, raw = await cluster.direct(body, RESPONSES)
        assert answer.status == status == 200, answer.raw
        assert without_ids(answer.json["output"]) == without_ids(json.loads(raw)["output"])
        if turn:
            check_warm(cluster, answer.reused)
            assert answer.json["usage"]["input_tokens_details"]["cached_tokens"] == answer.reused.cached
        agent.hears(answer.json["output"])


async def test_the_ids_that_a_client_asked_for_are_shown(cluster: Cluster) -> None:
    agent = RepositoryAgent(STORY)
    agent.says("Where are blocks kept?")
    body = agent.request(enable_response_messages=True)
    answer = await cluster.ask(body, RESPONSES)
    _, raw = await cluster.direct(body, RESPONSES)
    for name in ("input_messages", "output_messages"):
        assert answer.json[name] == json.loads(raw)[name]


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True, "store": True},
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"truncation": "auto"},
        {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
        {"tools": [{"type": "mcp", "server_label": "docs"}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"max_output_tokens": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_what_cannot_be_split_goes_to_the_decode_engine_alone(fields: Mapping[str, Any]) -> None:
    async with run_cluster() as cluster:
        agent = RepositoryAgent(STORY)
        agent.says("Where are blocks kept?")
        body = agent.request(**fields)
        answer = await cluster.ask(body, RESPONSES)
        status, raw = await cluster.direct(body, RESPONSES)
        assert answer.status == status
        if status == 200:
            assert without_ids(answer.json["output"]) == without_ids(json.loads(raw)["output"])
        assert not cluster.p.requests_to(RESPONSES)
        assert (answer.reused.route, answer.reused.reason) == (Route.LOCAL, Reason.NO_PROOF)


async def test_a_prefill_engine_stores_no_response(cluster: Cluster) -> None:
    await cluster.ask({"input": STORY, "store": True, "metadata": {"a": "b"}}, RESPONSES)
    (sent,) = cluster.p.requests_to(RESPONSES)
    assert sent.body["store"] is False
    assert cluster.d.requests_to(RESPONSES)[0].body["store"] is True


async def test_an_engine_that_does_not_say_which_ids_it_ran_proves_nothing() -> None:
    """So it is with models whose messages the engine renders by itself, whatever ids it is sent."""
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        agent = RepositoryAgent(STORY * 3)
        hidden = {"enable_response_messages": False}
        original = cluster.router.client.open

        async def without_ids_asked(call: Any) -> Any:
            body = {**json.loads(call.body), **hidden}
            return await original(type(call)(call.url, json.dumps(body).encode(), call.headers, call.timeout_s))

        cluster.router.client.open = without_ids_asked  # type: ignore[method-assign]
        for turn in range(2):
            agent.says(f"Question {turn}: {STORY}")
            output, report = await responses_turn(cluster, agent.request(tools=[]))
            assert report.route is Route.COLD
            if turn:
                assert report.reason is Reason.NO_PROOF
            agent.hears(output)


async def test_stock_engines_without_our_plugin_show_handles_in_the_streams_of_responses_alone() -> None:
    hidden = {"stream_handles": "off"}
    async with run_cluster(p={"prefix_caching": False}, d=hidden) as cluster:
        agent = RepositoryAgent(STORY * 3)
        for turn in range(3):
            agent.says(f"Question {turn}: {STORY}")
            output, report = await responses_turn(cluster, agent.request(tools=[]))
            if turn:
                check_warm(cluster, report)
            agent.hears(output)
        assert cluster.router.fleet.counters.unreachable_pins == 0
    async with run_cluster(d=hidden) as cluster:
        other = TerminalAgent(STORY * 3)
        for turn in range(2):
            other.says(text(f"Question {turn}: {STORY}"))
            content, report = await anthropic_turn(cluster, other.request() | NO_TOOLS)
            assert report.reason is (Reason.NO_HANDLE if turn else Reason.FIRST_TURN)
            other.hears(content)
        assert cluster.router.fleet.counters.unreachable_pins == 2
        cluster.pinned_until_ttl = True


async def test_a_request_that_goes_on_from_a_response_belongs_to_its_conversation(cluster: Cluster) -> None:
    """vLLM keeps no responses unless it is told to, and says so; the router knows whose request it was."""
    for stream in (False, True):
        answer = await cluster.ask({"input": STORY, "stream": stream}, RESPONSES, conversation=f"c{stream}")
        response = events(answer.raw)[-1]["response"] if stream else answer.json
        follow = {"input": "And?", "previous_response_id": response["id"]}
        answer = await cluster.ask(follow, RESPONSES, conversation=None)
        assert answer.status == 404
        assert (answer.reused.conversation, answer.reused.identity_source) == (
            f"c{stream}",
            "body:previous_response_id",
        )


async def test_a_response_stream_that_breaks_ends_with_an_error_event(cluster: Cluster) -> None:
    cluster.pinned_until_ttl = True  # where the engine had finished, nobody has its handle
    cluster.d.faults.die_after_bytes = 4000
    answer = await cluster.ask({"input": STORY, "stream": True}, RESPONSES)
    *_, last = events(answer.raw)
    assert (last["type"], last["code"]) == ("error", "decode_failed")
    assert last["error"]["message"] == last["message"]
    cluster.d.faults.clear()


async def test_a_response_that_fails_before_its_first_token_is_an_error_with_a_status(cluster: Cluster) -> None:
    """The events that come before an engine has done anything are held back, so that there is still a status to tell."""
    cluster.d.faults.die_after_bytes = 1500
    answer = await cluster.ask({"input": STORY, "stream": True}, RESPONSES)
    assert (answer.status, answer.json["error"]["code"]) == (502, "decode_failed")
    cluster.d.faults.clear()


# --- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_read_that_fails_is_run_again_cold(path: str) -> None:
    async with run_cluster(p={"prefix_caching": False}) as cluster:
        terminal, repository = TerminalAgent(STORY * 3), RepositoryAgent(STORY * 3)
        for turn in range(2):
            cluster.p.faults.fail_kv_loads = turn
            terminal.says(text(f"Question {turn}: {STORY}"))
            repository.says(f"Question {turn}: {STORY}")
            if path == MESSAGES:
                content, report = await anthropic_turn(cluster, terminal.request() | NO_TOOLS)
                terminal.hears(content)
            else:
                output, report = await responses_turn(cluster, repository.request(tools=[]))
                repository.hears(output)
        assert (report.route, report.reason, report.retries) == (Route.COLD, Reason.READ_FAILED, 1)
        cluster.released_twice = True


# --- on /v1/chat/completions -----------------------------------------------------------------------------------------


async def test_a_session_over_the_chat_api_is_warm_through_tools(cluster: Cluster) -> None:
    tools = [{"type": "function", "function": {"name": "bash", "parameters": LIST_SCHEMA}}]
    history: list[Json] = [{"role": "system", "content": STORY * 3}, {"role": "user", "content": "Run the tests."}]
    session = [("X-Session-Id", "ses_1"), ("x-session-affinity", "ses_1")]
    for turn in range(3):
        body = {"messages": history, "tools": tools, "tool_choice": "auto", "max_tokens": 96}
        answer: Answer = await cluster.exact(body, CHAT, conversation=None, headers=session)
        if turn:
            check_warm(cluster, answer.reused)
        assert comparable(answer.json["choices"][0])["finish_reason"] in ("tool_calls", "stop", "length")
        history.append(answer.message)
        calls = answer.message.get("tool_calls") or ()
        history += [{"role": "tool", "tool_call_id": call["id"], "content": FILE} for call in calls]
        if not calls:
            history.append({"role": "user", "content": "Go on. " + STORY})
