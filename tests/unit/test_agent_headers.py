"""What coding agents and APIs send of their own accord names a conversation; what is malformed is passed over."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from backhaul_router.identity import frameworks
from backhaul_router.identity.identify import IdentityError, identify, with_parent
from backhaul_router.identity.ids import MAX_ID_BYTES, Identity
from backhaul_router.identity.response_ids import ResponseIds
from backhaul_router.wire import Endpoint
from core_values import facts
from hypothesis import given
from hypothesis import strategies as st

SESSION = "5f0c1a52-9c0e-4f0f-8a55-0d6c9f1f2b11"
CODEX = {"user-agent": "codex_cli_rs/0.150.0 (Debian 13; x86_64) xterm", "originator": "codex_cli_rs"}
CLAUDE = {"user-agent": "claude-cli/2.1.150 (external, cli)", "x-claude-code-session-id": SESSION}
S, T = "claude-code", "codex"


def found(headers: dict[str, str], body: dict[str, Any] | None = None) -> Identity | None:
    """As the router reads it."""
    return identify(headers, facts(body or {}).ids)


HEADERS: list[tuple[str, dict[str, str], Identity]] = [
    ("Claude Code", CLAUDE, Identity(f"{S}:{SESSION}", "header:x-claude-code-session-id")),
    (
        "a sub-agent of Claude Code",
        {**CLAUDE, "x-claude-code-agent-id": "a1"},
        Identity(f"{S}:{SESSION}/a1", "header:x-claude-code-session-id", f"{S}:{SESSION}"),
    ),
    (
        "a sub-agent's sub-agent",
        {**CLAUDE, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"},
        Identity(f"{S}:{SESSION}/a2", "header:x-claude-code-session-id", f"{S}:{SESSION}/a1"),
    ),
    (
        "Codex, whose first thread is the session",
        {**CODEX, "session-id": "s", "thread-id": "s", "x-client-request-id": "s"},
        Identity(f"{T}:s", "header:session-id"),
    ),
    (
        "a sub-agent of Codex",
        {**CODEX, "session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"},
        Identity(f"{T}:s/t", "header:session-id", f"{T}:s"),
    ),
    (
        "a sub-agent's sub-agent of Codex",
        {**CODEX, "session-id": "s", "thread-id": "u", "x-codex-parent-thread-id": "t"},
        Identity(f"{T}:s/u", "header:session-id", f"{T}:s/t"),
    ),
    ("an older Codex", {**CODEX, "session_id": "s", "conversation_id": "s"}, Identity(f"{T}:s", "header:session_id")),
    ("a Codex thread alone", {**CODEX, "conversation_id": "t"}, Identity(f"{T}:t", "header:conversation_id")),
    (
        "OpenCode",
        {"x-session-affinity": "ses_1", "x-parent-session-id": "ses_0"},
        Identity("session-affinity:ses_1", "header:x-session-affinity", "session-affinity:ses_0"),
    ),
    ("a later OpenCode", {"x-opencode-session": "ses_1"}, Identity("opencode:ses_1", "header:x-opencode-session")),
    ("Amp", {"x-amp-thread-id": "T-1"}, Identity("amp:T-1", "header:x-amp-thread-id")),
    (
        "a client of Dynamo's",
        {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p"},
        Identity("dynamo:s", "header:x-dynamo-session-id", "dynamo:p"),
    ),
    ("any tool", {"x-my-tool-session-id": "s"}, Identity("my-tool:s", "header:x-my-tool-session-id")),
    (
        "Codex with nothing else",
        {**CODEX, "x-client-request-id": "s"},
        Identity("client-request-id:s", "header:x-client-request-id"),
    ),
    (
        "pi",
        {"originator": "pi", "x-client-request-id": "s"},
        Identity("client-request-id:s", "header:x-client-request-id"),
    ),
    ("baggage", {"baggage": "a=b,session.id=s%201;p=1 "}, Identity("otel:s 1", "baggage:session.id")),
    (
        "baggage with both names",
        {"baggage": "session.id=s, gen_ai.conversation.id=c"},
        Identity("otel:c", "baggage:gen_ai.conversation.id"),
    ),
]


@pytest.mark.parametrize(("headers", "expected"), [h[1:] for h in HEADERS], ids=[h[0] for h in HEADERS])
def test_headers_name_a_conversation(headers: dict[str, str], expected: Identity) -> None:
    assert found(headers) == expected


USER = f"user_{'0f' * 32}_account_{SESSION}_session_{SESSION}"
BODIES: list[tuple[str, dict[str, Any], Identity]] = [
    ("a cache key", {"prompt_cache_key": "k"}, Identity("prompt-cache-key:k", "body:prompt_cache_key")),
    ("a conversation", {"conversation": "conv_1"}, Identity("conversation:conv_1", "body:conversation")),
    ("its object", {"conversation": {"id": "conv_1"}}, Identity("conversation:conv_1", "body:conversation")),
    ("a user id", {"metadata": {"user_id": USER}}, Identity(f"{S}:{SESSION}", "body:metadata.user_id")),
    (
        "a user id as JSON",
        {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": SESSION})}},
        Identity(f"{S}:{SESSION}", "body:metadata.user_id"),
    ),
]


@pytest.mark.parametrize(("body", "expected"), [b[1:] for b in BODIES], ids=[b[0] for b in BODIES])
def test_bodies_name_a_conversation(body: dict[str, Any], expected: Identity) -> None:
    assert found({}, body) == expected


@pytest.mark.parametrize("endpoint", Endpoint)
def test_bodies_of_every_endpoint_do(endpoint: Endpoint) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "prompt": "hi", "prompt_cache_key": "k"}
    assert identify({}, facts(body, endpoint).ids) == Identity("prompt-cache-key:k", "body:prompt_cache_key")


@pytest.mark.parametrize(
    "headers",
    [
        {"user-agent": "OpenAI/Python 3.57", "session-id": "s", "thread-id": "t", "conversation_id": "c"},
        {"user-agent": "OpenAI/Python 3.57", "x-client-request-id": "3f"},
        {"user-agent": "pilot/1", "x-client-request-id": "3f"},
        {"x-auth-session-id": "s"},
        {"x-user-session-id": "s"},
        {"x-parent-session-id": "s"},
        {"x--session-id-": "s"},
        {"authorization": "Bearer s", "x-api-key": "s", "cookie": "session_id=s"},
        {"baggage": "userId=s"},
        {"baggage": "session.id=" + "s" * 9000},
    ],
    ids=str,
)
def test_what_may_be_anothers_id_or_a_credential_names_nothing(headers: dict[str, str]) -> None:
    assert found(headers) is None


@pytest.mark.parametrize(
    "body",
    [
        {"user": "u"},
        {"prompt_cache_key": 7},
        {"prompt_cache_key": ""},
        {"conversation": {"id": ["c"]}},
        {"conversation": ["c"]},
        {"metadata": {"user_id": "u-1"}},
        {"metadata": {"user_id": {"session_id": "s"}}},
        {"metadata": {"user_id": '{"session_id": 7}'}},
        {"metadata": {"user_id": '{"session_id": "s"'}},
        {"metadata": "session"},
        {"previous_response_id": "resp_unknown"},
    ],
    ids=str,
)
def test_fields_of_another_shape_name_nothing(body: dict[str, Any]) -> None:
    assert found({}, body) is None


@pytest.mark.parametrize("bad", ["s" * 257, "a\tb", "\x9b"])
def test_an_id_that_cannot_be_one_is_passed_over_for_the_next_source(bad: str) -> None:
    body = {"prompt_cache_key": "k"}
    for name in ("x-claude-code-session-id", "x-session-affinity", "x-tool-session-id"):
        assert found({name: bad}, body) == Identity("prompt-cache-key:k", "body:prompt_cache_key")


def test_an_id_is_never_cut() -> None:
    space = len("amp:")
    fits = "t" * (MAX_ID_BYTES - space)
    assert found({"x-amp-thread-id": fits}) == Identity(f"amp:{fits}", "header:x-amp-thread-id")
    assert found({"x-amp-thread-id": fits + "t"}) is None


def test_a_parent_that_cannot_be_one_is_left_out() -> None:
    headers = {"x-dynamo-session-id": "s", "x-dynamo-parent-session-id": "p" * 300}
    assert found(headers) == Identity("dynamo:s", "header:x-dynamo-session-id")


# --- which goes first ----------------------------------------------------------------------------------------------------

FRAMEWORK = Identity("langgraph:t", "framework:langgraph")
IN_ORDER: list[tuple[str, dict[str, Any]]] = [
    ("header:x-session-id", {"headers": {"x-session-id": "c"}}),
    ("scope", {"scope": "c"}),
    ("framework:langgraph", {"framework": FRAMEWORK}),
    ("header:x-claude-code-session-id", {"headers": {"x-claude-code-session-id": "c"}}),
    ("header:session-id", {"headers": {**CODEX, "session-id": "c"}}),
    ("header:x-session-affinity", {"headers": {"x-session-affinity": "c"}}),
    ("header:x-any-session-id", {"headers": {"x-any-session-id": "c"}}),
    ("header:x-client-request-id", {"headers": {**CODEX, "x-client-request-id": "c"}}),
    ("body:prompt_cache_key", {"body": {"prompt_cache_key": "c"}}),
    ("body:conversation", {"body": {"conversation": "c"}}),
    ("body:previous_response_id", {"body": {"previous_response_id": "r"}}),
    ("body:metadata.user_id", {"body": {"metadata": {"user_id": '{"session_id":"c"}'}}}),
    ("baggage:session.id", {"headers": {"baggage": "session.id=c"}}),
]


@pytest.mark.parametrize("first", range(len(IN_ORDER)), ids=[source for source, _ in IN_ORDER])
def test_of_all_that_a_request_says_the_first_in_order_counts(first: int) -> None:
    responses = ResponseIds()
    responses.note("r", "c")
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}
    around: dict[str, Any] = {}
    for _, says in reversed(IN_ORDER[first:]):
        headers |= says.get("headers", {})
        body |= says.get("body", {})
        around |= {name: value for name, value in says.items() if name in ("scope", "framework")}
    identity = identify(headers, facts(body).ids, responses=responses, **around)
    assert identity is not None
    assert identity.source == IN_ORDER[first][0]


def test_the_explicit_id_of_a_tool_that_sends_one_keeps_its_parent() -> None:
    headers = {"x-session-id": "ses_1", "x-session-affinity": "ses_1", "x-parent-session-id": "ses_0"}
    assert found(headers) == Identity("ses_1", "header:x-session-id", "ses_0")


def test_a_named_parent_goes_before_a_tools() -> None:
    identity = found({**CLAUDE, "x-claude-code-agent-id": "a"})
    named = with_parent(identity, {"x-backhaul-parent": "p"}, None)
    assert named is not None
    assert named.parent == "p"


# --- responses -----------------------------------------------------------------------------------------------------------


def test_a_response_is_known_by_its_id_within_its_tenant() -> None:
    known = ResponseIds()
    known.note("r", "c", "a")
    assert (known.conversation_of("r", "a"), known.conversation_of("r", "b")) == ("c", None)


def test_the_response_that_was_named_longest_ago_is_forgotten_first() -> None:
    known = ResponseIds(max_responses=2)
    known.note("1", "c")
    known.note("2", "c")
    assert known.conversation_of("1") == "c"
    known.note("3", "c")
    known.note("x" * 300, "c")
    assert [known.conversation_of(name) for name in "123"] == ["c", None, "c"]
    assert len(known) == 2


# --- whatever is sent ----------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(sorted({name for _, headers, _ in HEADERS for name in headers})) | st.text(max_size=30).map(
    str.lower
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12) | st.just("id"), inner, max_size=3)
    ),
    max_leaves=5,
)
FIELDS = st.sampled_from(["prompt_cache_key", "conversation", "previous_response_id", "metadata.user_id"])


@given(
    st.dictionaries(
        NAMES.filter(lambda name: name != "x-session-id"), st.text(max_size=400) | st.text("ab/|:", max_size=400)
    ),
    st.dictionaries(FIELDS, JSON),
)
def test_nothing_that_is_sent_raises_and_every_id_is_bounded(
    headers: dict[str, str], fields: dict[str, object]
) -> None:
    try:
        identity = identify(headers, fields, responses=ResponseIds())
    except IdentityError:
        assert headers.get("x-conversation-id")
        return
    for id in (identity.conversation, identity.parent) if identity is not None else ():
        assert id is None or (0 < len(id.encode()) <= MAX_ID_BYTES and id.isprintable())


# --- frameworks that have changed ----------------------------------------------------------------------------------------


class Changed:
    """A module without what is looked for."""


@pytest.mark.parametrize("module", sorted(frameworks._READERS))
def test_a_framework_that_has_changed_costs_the_discovery_and_is_told_once(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in frameworks._READERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, Changed())
    monkeypatch.setattr(frameworks, "_warned", set())
    assert [frameworks.discover(), frameworks.discover()] == [None, None]
    (record,) = caplog.records
    assert module in record.getMessage()


def test_frameworks_that_are_not_loaded_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in frameworks._READERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert frameworks.discover() is None
