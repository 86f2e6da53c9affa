"""What is read from a client's body, what the engines are sent, and what never passes in either direction."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from backhaul_router import wire
from backhaul_router.wire import Endpoint, MalformedBody, read_request
from backhaul_router.wire.handle import Params
from core_values import BLOCK, ENGINE_ID, encoded, facts, handle, params
from hypothesis import given
from hypothesis import strategies as st

CHAT, COMPLETIONS = Endpoint.CHAT, Endpoint.COMPLETIONS
MESSAGES = b'"messages":[{"role":"user","content":"hi"}]'


def chat(rest: bytes) -> bytes:
    return b"{" + MESSAGES + b"," + rest + b"}"


# --- splitting and joining -----------------------------------------------------------------------------------------------


def test_values_keep_their_bytes() -> None:
    values = rb'{"a": 1.50, "b": "\u00e9\/", "c": [ 1 , {"x":1,"x":2} ], "d": 12345678901234567890123, "e": 1e999}'
    assert wire.join(wire.split(values)) == (
        rb'{"a":1.50,"b":"\u00e9\/","c":[ 1 , {"x":1,"x":2} ],"d":12345678901234567890123,"e":1e999}'
    )


def test_the_last_of_repeated_keys_counts() -> None:
    assert json.loads(wire.join(wire.split(rb'{"a": 1, "b": 2, "\u0061": 3}'))) == {"a": 3, "b": 2}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"{}"',
        b"{",
        b'{"a": 1',
        b'{"a": 1} {"b": 2}',
        b"{'a': 1}",
        b'{"a": NaN}',
        b'{"a": 01}',
        b'{"a": "\x01"}',
        b'{"a": "\\ud800"}',
        b'{"\xff": 1}',
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_what_is_no_json_object_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedBody, match="not a JSON object"):
        wire.split(body)


@pytest.mark.parametrize(
    "field",
    [
        b'"model": "\xff"',
        b'"user": "\xed\xa0\x80"',  # a lone surrogate: Python's decoder takes it, other decoders do not
        b'"session_id": "\xff"',
        b'"metadata": {"\xff": 1}',
        b'"vllm_xargs": {"\xed\xa0\x80": 1, "kv_transfer_params": {}}',
    ],
)
def test_text_that_is_not_utf_8_is_malformed(field: bytes) -> None:
    with pytest.raises(MalformedBody):
        read_request(CHAT, chat(field))


# --- forbidden keys, in every spelling -----------------------------------------------------------------------------------

HOSTILE = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "conversation_id")
OTHER = (
    "model",
    "n",
    "stream",
    "stream_options",
    "messages",
    "session_id",
    "x",
    "kv_transfer_params ",
    "é",
    "\x00",
    "",
)


@st.composite
def spelled(draw: st.DrawFn) -> str:
    """A key as JSON, any of its characters escaped."""
    key = draw(st.sampled_from(HOSTILE + OTHER))
    escapes = draw(st.lists(st.booleans(), min_size=len(key), max_size=len(key)))
    plain = [json.dumps(c, ensure_ascii=False)[1:-1] for c in key]
    return '"' + "".join(f"\\u{ord(c):04X}" if e else p for c, p, e in zip(key, plain, escapes, strict=True)) + '"'


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.text(st.characters(categories=["Cs"]), min_size=1, max_size=1),
).map(json.dumps) | st.sampled_from(["1e999", "-0", "1.50", '"\\/"', "-1E-400"])


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Objects as text, with repeated and oddly spelled keys and any white space."""
    space = st.sampled_from(["", " ", "\n\t"])
    member = st.builds(lambda k, a, b, v: f"{k}{a}:{b}{v}", spelled(), space, space, values)
    return st.lists(member, max_size=5).map(lambda members: "{" + ",".join(members) + "}")


VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3).map(lambda items: f"[{', '.join(items)}]") | objects(v), max_leaves=8
)


def as_an_engine_reads(body: bytes | str) -> Any:
    """Python's own decoder, as FastAPI calls it; NaN is made comparable."""
    return json.loads(body, parse_constant=str, parse_float=lambda text: f"float {float(text)}")


def allowed(body: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in body.items() if key not in wire.FORBIDDEN and key != "conversation_id"}
    if isinstance(kept.get("vllm_xargs"), dict):
        kept["vllm_xargs"] = {k: v for k, v in kept["vllm_xargs"].items() if k not in wire.FORBIDDEN}
    return kept


@given(objects(VALUES))
def test_of_any_body_exactly_the_forbidden_keys_are_gone(text: str) -> None:
    body = text.encode("utf-8", "surrogatepass")
    try:
        read = read_request(CHAT, body)
    except MalformedBody:
        return
    assert as_an_engine_reads(wire.join(read.members)) == allowed(as_an_engine_reads(body))


@given(objects(VALUES), st.booleans())
def test_the_engines_get_no_transfer_params_but_ours(text: str, ids_back: bool) -> None:
    try:
        read = read_request(CHAT, text.encode("utf-8", "surrogatepass"))
    except MalformedBody:
        return
    bodies = [
        (wire.prefill_body(read, None, None), {"do_remote_decode": True, "do_remote_prefill": False}),
        (wire.decode_body(read, None, None, ids_back=ids_back), {} if ids_back else None),
        (wire.render_body(read), None),
    ]
    for body, ours in bodies:
        pairs = json.loads(body, object_pairs_hook=list)
        assert [json.loads(json.dumps(dict(v))) for k, v in pairs if k == wire.HANDLE] == [ours][: ours is not None]
        assert not [k for k, _ in pairs if k == "ec_transfer_params"]
        xargs = json.loads(body).get("vllm_xargs")
        assert not (isinstance(xargs, dict) and wire.FORBIDDEN & xargs.keys())


@pytest.mark.parametrize(
    "smuggled",
    [
        rb'"kv_transfer_params": {"do_remote_prefill": true}',
        rb'"kv_transfer_p\u0061rams": {"do_remote_prefill": true}',
        rb'"\u006b\u0076_transfer_params": {}, "kv_transfer_params": {}, "ec_transfer_params": {}',
        rb'"vllm_xargs": {"kv_transfer_params": "x"}',
        rb'"vllm_xargs": {"a": 1, "kv_transfer_param\u0073": {}, "ec_transfer_params": 1}',
        rb'"vllm_xargs": {}, "vllm_x\u0061rgs": {"kv_transfer_params": {}}',
    ],
)
def test_forged_transfer_params_never_travel(smuggled: bytes) -> None:
    sent = wire.render_body(read_request(CHAT, chat(smuggled)))
    assert b"do_remote_prefill" not in sent
    assert not wire.FORBIDDEN & json.loads(sent).keys()
    assert not wire.FORBIDDEN & json.loads(sent).get("vllm_xargs", {}).keys()


def test_what_else_is_in_vllm_xargs_stays() -> None:
    read = read_request(CHAT, chat(rb'"vllm_xargs": {"kv_transfer_params": {}, "mine": [ 1.0 ]}'))
    assert bytes(read.members["vllm_xargs"]) == b'{"mine":[ 1.0 ]}'


def test_transfer_params_in_what_the_user_wrote_are_text() -> None:
    content = '{"kv_transfer_params": {"remote_host": "x"}}'
    read = facts({"messages": [{"role": "user", "content": content}]})
    assert json.loads(wire.render_body(read))["messages"] == [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params": {}, "x": NaN}',
        b'\xef\xbb\xbf{"kv_transfer_params": {}}',
        '{"kv_transfer_params": {}}'.encode("utf-16"),
        b'{"x": "\xed\xa0\x80", "kv_transfer_params": {}}',
        b'{"x": "\\ud800", "kv_transfer_params": {}}',
    ],
)
def test_what_only_the_engine_could_parse_is_not_passed_on_unread(body: bytes) -> None:
    assert wire.HANDLE in json.loads(body)
    with pytest.raises(MalformedBody):
        wire.passed_body(body)


def test_a_request_that_is_passed_on_loses_transfer_params_and_their_twin() -> None:
    body = rb'{"input": "x", "kv_transfer_p\u0061rams": {}, "vllm_xargs": {"kv_transfer_params": {}, "k": 1}}'
    assert json.loads(wire.passed_body(body)) == {"input": "x", "vllm_xargs": {"k": 1}}


# --- facts ---------------------------------------------------------------------------------------------------------------


def test_a_plain_request_can_run_in_legs_with_proof() -> None:
    read = facts({"model": "m", "cache_salt": "s", "stream": True, "max_tokens": 5})
    assert (read.model, read.cache_salt, read.stream) == ("m", "s", True)
    assert (read.alone, read.unproven, read.multiple, read.prompt_ids) == (None, None, False, None)


def test_unset_fields_may_be_spelled_out_as_null() -> None:
    null = dict.fromkeys(("model", "stream", "stream_options", "n", "best_of", "cache_salt", "echo", "max_tokens"))
    read = facts({**null, "prompt_logprobs": None, "suffix": None, "return_token_ids": None, "use_beam_search": None})
    assert (read.alone, read.multiple, read.stream, read.wants_usage) == (None, False, False, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 1),
        ("model", ["m"]),
        ("stream", 1),
        ("stream", "true"),
        ("stream_options", []),
        ("stream_options", [1]),
        ("stream_options", "x"),
        ("n", True),
        ("n", 2.0),
        ("n", "2"),
        ("best_of", {}),
        ("use_beam_search", 1),
        ("cache_salt", 5),
        ("echo", "yes"),
        ("return_token_ids", 1),
        ("max_tokens", "5"),
        ("max_completion_tokens", 5.5),
        ("messages", None),
        ("messages", []),
        ("messages", "hi"),
        ("messages", ["hi"]),
        ("messages", [None]),
        ("messages", {"role": "user"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_of_another_type_is_left_to_the_engine_as_it_is(field: str, value: object, stream: bool) -> None:
    read = facts({"stream": stream, field: value})
    assert read.alone == field
    sent = json.loads(wire.decode_body(read, None, None, ids_back=False))
    assert sent[field] == value
    assert wire.HANDLE not in sent


def test_numbers_beyond_any_range_are_left_to_the_engine() -> None:
    read = read_request(CHAT, chat(b'"n": 1e999, "max_tokens": 123456789012345678901234567890'))
    assert read.alone == "n"
    assert bytes(read.members["n"]) == b"1e999"


def test_ids_of_the_body_are_told_with_whatever_type_they_have() -> None:
    read = facts({"conversation_id": "c", "session_id": 7})
    assert read.ids == {"conversation_id": "c", "session_id": 7}
    assert read_request(CHAT, chat(b'"session_id": 1e999')).ids == {"session_id": math.inf}


def test_the_conversation_id_is_ours_and_the_session_id_is_the_engines() -> None:
    read = facts({"conversation_id": "c", "session_id": "s"})
    assert "conversation_id" not in read.members
    assert bytes(read.members["session_id"]) == b'"s"'


@pytest.mark.parametrize("field", [{"n": 2}, {"best_of": 3}, {"use_beam_search": True}])
def test_several_sequences_are_told(field: dict[str, Any]) -> None:
    assert facts(field).multiple


@pytest.mark.parametrize("field", [{"n": 1}, {"best_of": 1}, {"use_beam_search": False}])
def test_one_sequence_is_one_however_it_is_asked_for(field: dict[str, Any]) -> None:
    assert not facts(field).multiple


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 0),
        ("truncate_prompt_tokens", 10),
        ("truncation_side", "left"),
        ("suffix", "x"),
        ("prompt_embeds", "x"),
        ("return_prompt_text", True),
        ("echo", True),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("n", 0),
    ],
)
def test_a_request_whose_prompt_is_not_what_was_compared_goes_to_decode_alone(field: str, value: object) -> None:
    assert facts({field: value}).alone is not None


@pytest.mark.parametrize("stream_options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_is_not_wanted_unless_it_is_asked_for(stream_options: object) -> None:
    assert not facts({"stream": True, "stream_options": stream_options}).wants_usage


@pytest.mark.parametrize("value", [True, 1, "true"])
def test_usage_is_wanted_however_the_engine_lets_it_be_spelled(value: object) -> None:
    read = facts({"stream": True, "stream_options": {"include_usage": value}})
    assert read.wants_usage
    assert json.loads(wire.decode_body(read, None, None, ids_back=False))["stream_options"] == {"include_usage": value}


def test_messages_are_the_bytes_that_came() -> None:
    read = read_request(CHAT, rb'{"messages": [ {"role" : "user", "content":"\u00e9"} , {"role":"user"}]}')
    assert read.messages == (rb'{"role" : "user", "content":"\u00e9"}', b'{"role":"user"}')


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
        ([{"image_url": "x"}], "content"),  # the engine tells the kind by the key (vLLM's has_non_text_content)
        ([{"type": "text", "text": "a", "uuid": "u", "image_url": "x"}], "content"),
        ([{"type": 5}], "content"),
        ([5], "content"),
    ],
)
def test_what_is_not_text_cannot_be_proven_by_tokens(content: object, what: str) -> None:
    read = facts({"messages": [{"role": "user", "content": content}]})
    assert read.alone is None
    assert read.unproven == what


@pytest.mark.parametrize(
    "content",
    [None, "a", [], ["a", "b"], [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]],
)
def test_text_can_be_proven(content: object) -> None:
    assert facts({"messages": [{"role": "user"}, {"role": "user", "content": content}]}).unproven is None


@pytest.mark.parametrize(
    ("prompt", "messages", "ids"),
    [
        (b'"\\u00e9"', (b'"\\u00e9"',), None),
        (b"[1, 2]", (b"[1, 2]",), (1, 2)),
    ],
)
def test_a_completion_prompt_is_one_message(prompt: bytes, messages: object, ids: object) -> None:
    read = read_request(COMPLETIONS, b'{"prompt": ' + prompt + b"}")
    assert (read.messages, read.prompt_ids, read.alone) == (messages, ids, None)


@pytest.mark.parametrize("prompt", [None, [], ["a", "b"], ["a"], [[1, 2]], [True], [1.5], {"a": 1}, 5])
def test_a_prompt_batch_or_an_odd_prompt_goes_alone(prompt: object) -> None:
    assert facts({"prompt": prompt}, COMPLETIONS).alone == "prompt"


def test_a_longer_prompt_is_known_to_continue_a_shorter_one() -> None:
    def parts(prompt: object) -> tuple[bytes, ...]:
        return facts({"prompt": prompt}, COMPLETIONS).parts

    for first, more in (("story " * 100, "and on"), (list(range(500)), [7, 8])):
        short, long = parts(first), parts(first + more)  # type: ignore[operator]
        assert len(short) >= 2
        assert long[: len(short)] == short
    assert parts("short") == ()


# --- what the engines are sent -------------------------------------------------------------------------------------------

WORKED_OUT = {"do_remote_decode": True, "do_remote_prefill": False}


def test_prefill_makes_one_token_and_keeps_what_shapes_the_prompt() -> None:
    read = facts(
        {
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 100,
            "max_completion_tokens": 50,
            "min_tokens": 10,
            "n": 1,
            "stop": ["x"],
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
            "request_id": "mine",
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "temperature": 0.5,
            "cache_salt": "s",
            "session_id": "c",
        }
    )
    assert json.loads(wire.prefill_body(read, None, None)) == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "temperature": 0.5,
        "cache_salt": "s",
        "session_id": "c",
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": WORKED_OUT,
    }


def test_prefill_is_given_the_handle_verbatim_with_its_flags_set() -> None:
    given = params(unknown={"deep": [1.50]}, do_remote_decode=False, do_remote_prefill=True)
    sent = json.loads(wire.prefill_body(facts(), (1, 2, 3), wire.split(encoded(given))))["kv_transfer_params"]
    assert sent == {**given, **WORKED_OUT, "prompt_token_ids": [1, 2, 3]}


def test_decode_is_given_the_handle_verbatim_and_told_to_read() -> None:
    given = params(unknown={"deep": [1.50]}, remote_registration_generation=4)
    body = json.loads(wire.decode_body(facts({"max_tokens": 9}), (1, 2), encoded(given), ids_back=True))
    assert body["kv_transfer_params"] == {
        **given,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "prompt_token_ids": [1, 2],
    }
    assert (body["max_tokens"], body["return_token_ids"]) == (9, True)


def test_a_stream_is_asked_for_usage_but_not_for_ids() -> None:
    body = json.loads(wire.decode_body(facts({"stream": True}), None, None, ids_back=True))
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
    assert "return_token_ids" not in body
    assert body["kv_transfer_params"] == {}


def test_the_clients_own_stream_options_stay() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "other": 1}
    body = json.loads(wire.decode_body(facts({"stream": True, "stream_options": options}), None, None, ids_back=True))
    assert body["stream_options"] == options


def test_an_answer_that_is_not_streamed_gets_no_stream_options() -> None:
    assert "stream_options" not in json.loads(wire.decode_body(facts(), None, None, ids_back=True))


def test_token_ids_take_the_place_of_a_completions_prompt() -> None:
    read = facts({"model": "m", "prompt": "abc"}, COMPLETIONS)
    for body in (
        wire.prefill_body(read, (1, 2), None),
        wire.decode_body(read, (1, 2), encoded(params()), ids_back=False),
    ):
        assert json.loads(body)["prompt"] == [1, 2]
        assert "prompt_token_ids" not in json.loads(body)["kv_transfer_params"]


def test_decode_alone_gets_no_transfer_params_at_all() -> None:
    assert wire.HANDLE not in json.loads(wire.decode_body(facts(), None, None, ids_back=False))


def test_a_release_names_no_model_and_asks_for_a_read() -> None:
    given = params(unknown=[1.50])
    sent = json.loads(wire.release_body(encoded(given)))
    assert sent["model"] == "backhaul-release"
    assert sent["kv_transfer_params"] == {**given, "do_remote_prefill": True, "do_remote_decode": False}


# --- handles -------------------------------------------------------------------------------------------------------------


def test_a_handle_says_where_and_how_much() -> None:
    found = handle("req-1", tokens=40, remote_prefill_cached_tokens=16)
    assert (found.engine_id, found.request_id, found.tokens) == (ENGINE_ID, "req-1", 40)
    assert (found.blocks, found.groups, found.cached) == (3, 1, 16)


def test_unknown_fields_and_numbers_are_carried_verbatim() -> None:
    raw = encoded(params())[:-1] + b',"later": [1.50, 12345678901234567890123], "remote_blocks_expiry_time":1.10}'
    found = wire.read_params(raw).handle
    assert found is not None
    assert b'"later": [1.50, 12345678901234567890123]' in found.params
    assert b'"remote_blocks_expiry_time":1.10' in found.params


def test_our_extension_is_taken_out_of_a_handle() -> None:
    raw = encoded({**params(), "backhaul": {"version": 1, "token_ids": [5, 6], "more": 1}})
    read = wire.read_params(raw)
    found, ids = read.handle, read.token_ids
    assert found is not None
    assert json.loads(found.params) == params()
    assert ids == (5, 6)


def test_generated_ids_come_without_a_handle_too() -> None:
    read = wire.read_params(encoded({"backhaul": {"version": 1, "token_ids": [5]}}))
    assert (read.handle, read.token_ids) == (None, (5,))


@pytest.mark.parametrize("extension", [{"version": 2, "token_ids": "AAEC"}, {}, {"token_ids": [1]}, {"version": "2"}])
def test_an_extension_of_an_unknown_version_tells_nothing(extension: object) -> None:
    read = wire.read_params(encoded({**params(), "backhaul": extension}))
    found, ids = read.handle, read.token_ids
    assert found is not None
    assert json.loads(found.params) == params()
    assert ids is None


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"null",
        b"{}",
        encoded(params(remote_block_ids=[])),
        encoded(params(remote_block_ids=[[]])),
        encoded(params(remote_block_ids=[[], []])),
        encoded(params(remote_block_ids=None)),
        encoded(params(transfer_mode="push")),
        *(
            encoded({k: v for k, v in params().items() if k != missing})
            for missing in (
                "remote_block_ids",
                "remote_engine_id",
                "remote_request_id",
                "remote_host",
                "remote_port",
            )
        ),
    ],
)
def test_what_holds_no_blocks_is_no_handle(raw: bytes | None) -> None:
    assert wire.read_params(raw) == Params()


@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_a_cut_handle_is_cut_in_its_count_and_in_every_list(blocks: int) -> None:
    given = params(remote_block_ids=[list(range(8)), list(range(10, 18))], unknown=1.50)
    found = wire.read_params(encoded(given)).handle
    assert found is not None
    assert json.loads(wire.join(wire.cut_handle(found, blocks, BLOCK))) == {
        **given,
        "remote_block_ids": [list(range(blocks)), list(range(10, 10 + blocks))],
        "remote_num_tokens": blocks * BLOCK,
    }


# --- rendering -----------------------------------------------------------------------------------------------------------


def test_rendered_ids_of_every_renderer_are_read() -> None:
    assert wire.read_rendered(b'{"token_ids": [1, 2], "features": null}') == (1, 2)
    assert wire.read_rendered(b' [{"token_ids": [1, 2]}]') == (1, 2)
    assert wire.read_rendered(b'{"count": 2, "tokens": [1, 2]}') == (1, 2)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"token_ids": []}',
        b'{"token_ids": ["a"]}',
        b'[{"token_ids": [1]}, {"token_ids": [2]}]',
        b'{"token_ids": [1], "features": {"mm_hashes": {}}}',
    ],
)
def test_what_is_not_ids_alone_gives_none(body: bytes) -> None:
    assert wire.read_rendered(body) is None


def test_tokenize_is_asked_for_what_shapes_the_prompt() -> None:
    asked = {
        "messages": [{"role": "user", "content": "hi", "name": "n", "reasoning": "r"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"a": 1},
        "add_generation_prompt": True,
    }
    body = wire.tokenize_body(facts({**asked, "stream": True, "temperature": 0.1, "seed": None, "documents": None}))
    assert body is not None
    assert json.loads(body) == {"model": "m", **asked}


@pytest.mark.parametrize(
    "field",
    [
        {"documents": [{"text": "x"}]},
        {"reasoning_effort": "low"},
        {"tool_choice": "none"},
        {"response_format": {"type": "json_object"}},
        {"mm_processor_kwargs": {}},
        {"vllm_xargs": {"a": 1}},
        {"anything_new": 1},
        {"messages": [{"role": "user", "content": "hi", "reasoning_content": "r"}]},
        {"messages": [{"role": "user", "content": "hi", "tools": []}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "anything_new": 1}]},
    ],
)
def test_tokenize_is_not_asked_where_it_would_ignore_a_field(field: dict[str, Any]) -> None:
    assert wire.tokenize_body(facts(field)) is None


def test_tokenize_takes_a_completions_prompt() -> None:
    body = wire.tokenize_body(facts({"model": "m", "prompt": "abc", "max_tokens": 5}, COMPLETIONS))
    assert body is not None
    assert json.loads(body) == {"model": "m", "prompt": "abc"}


# --- what comes back -----------------------------------------------------------------------------------------------------

ANSWER = {
    "id": "chatcmpl-1",
    "choices": [
        {"index": 0, "message": {"content": "kv_transfer_params"}, "token_ids": [7, 8], "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    "prompt_token_ids": [1, 2, 3],
    "kv_transfer_params": params(),
    "ec_transfer_params": {"x": 1},
}


def answered(*, keep_token_ids: bool = False, note: bytes | None = None, **fields: Any) -> dict[str, Any]:
    members = wire.split(encoded(ANSWER | fields))
    asked = read_request(CHAT, chat(b'"return_token_ids": true' if keep_token_ids else b'"stream": false'))
    shown = wire.client_answer(asked.api, members, shows_ids=asked.wants_token_ids)
    seen: dict[str, Any] = json.loads(wire.join(wire.noted(shown, note)))
    return seen


def test_the_client_sees_no_handle_and_no_ids_that_it_did_not_ask_for() -> None:
    expected = {k: v for k, v in ANSWER.items() if k not in wire.FORBIDDEN}
    expected["prompt_token_ids"] = None
    expected["choices"] = [{**ANSWER["choices"][0], "token_ids": None}]  # type: ignore[index]
    assert answered() == expected


def test_the_client_sees_the_ids_that_it_asked_for() -> None:
    seen = answered(keep_token_ids=True)
    assert (seen["prompt_token_ids"], seen["choices"][0]["token_ids"]) == ([1, 2, 3], [7, 8])
    assert not wire.FORBIDDEN & seen.keys()


def test_a_completions_choice_loses_its_prompts_ids_too() -> None:
    choice = {"text": "x", "token_ids": [7], "prompt_token_ids": [1]}
    assert answered(choices=[choice])["choices"] == [{"text": "x", "token_ids": None, "prompt_token_ids": None}]


def test_our_note_stands_in_usage_beside_what_was_there() -> None:
    note = b'{"route":"warm"}'
    assert answered(note=note)["usage"] == {**ANSWER["usage"], "backhaul": {"route": "warm"}}  # type: ignore[dict-item]
    assert answered(note=note, usage=None)["usage"] is None


def test_other_bytes_of_an_answer_are_not_touched() -> None:
    body = rb'{"choices": [ {"logprob": -0.10, "s":"\u00e9"} ], "x": 1.50, "kv_transfer_params": null}'
    assert (
        wire.join(wire.client_answer(CHAT.api, wire.split(body), shows_ids=True))
        == rb'{"choices":[ {"logprob": -0.10, "s":"\u00e9"} ],"x":1.50}'
    )


def test_token_counts_are_read() -> None:
    usage = wire.read_usage(encoded(ANSWER["usage"]))
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached) == (3, 2, 1)
    assert wire.read_usage(None) is None
    assert wire.read_usage(b"null") is None
    bare = wire.read_usage(b'{"prompt_tokens": 3, "prompt_tokens_details": null}')
    assert bare is not None
    assert bare.cached is None


def test_prompt_ids_are_found_where_each_endpoint_puts_them() -> None:
    def ids(body: dict[str, Any]) -> object:
        return wire.read_ids(wire.read_answer(CHAT.api, encoded(body)).ran)

    assert ids({"choices": [{}], "prompt_token_ids": [1]}) == (1,)
    assert ids({"choices": [{"prompt_token_ids": [2]}]}) == (2,)
    assert ids({"choices": [{}]}) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "plain"}', "plain"),
        (b'{"detail": "x"}', '{"detail": "x"}'),
        (b"<html>\xff", "<html>\ufffd"),
        (b'{"error": {}}', '{"error": {}}'),
        (b"[]", "[]"),
    ],
)
def test_an_engines_error_is_quoted_whatever_its_shape(body: bytes, message: str) -> None:
    assert wire.error_message(body) == message


def test_a_long_error_is_shortened() -> None:
    assert len(wire.error_message(b"x" * 10_000)) == 500


def test_handles_nested_in_a_responses_event_are_taken_out() -> None:
    event = {"type": "response.completed", "response": {"id": "r", "kv_transfer_params": params(), "output": []}}
    assert json.loads(wire.without_handles(encoded(event))) == {
        "type": "response.completed",
        "response": {"id": "r", "output": []},
    }
    assert wire.without_handles(b"[DONE]") == b"[DONE]"
