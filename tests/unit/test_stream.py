"""What a stream's events lose and gain on their way to the client, and that everything else passes byte for byte."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from backhaul_router import wire
from backhaul_router.wire.stream import Listeners, StreamFilter
from core_values import encoded, params
from hypothesis import given
from hypothesis import strategies as st

DONE = b"data: [DONE]\n\n"
NOTE = b'{"route":"warm"}'
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "later": 1.5}


def event(data: object, *, end: bytes = b"\n\n") -> bytes:
    return b"data: " + encoded(data) + end


def chunk(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields}


def last(**fields: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **fields}


def with_handle(**extension: Any) -> dict[str, Any]:
    given = params("req")
    return last(kv_transfer_params={**given, "backhaul": {"version": 1, **extension}} if extension else given)


USAGE_EVENT = {"id": "c", "choices": [], "usage": USAGE}


class Watched:
    """A filter and what it noted."""

    def __init__(self, *, wants_usage: bool = False) -> None:
        self.counted: list[wire.Usage | None] = []
        self.filter = StreamFilter(Listeners(self.counted.append, wants_usage=wants_usage))

    def feed(self, *pieces: bytes) -> bytes:
        return b"".join(map(self.filter.feed, pieces))


def parsed(data: bytes) -> list[Any]:
    *events, rest = data.split(b"\n\n")
    assert rest == b""
    return [json.loads(e.removeprefix(b"data: ")) for e in events]


# --- what passes ---------------------------------------------------------------------------------------------------------

ORDINARY = [
    event(chunk("plain")),
    event(chunk("é日🎈")),
    rb'data: {"choices":[{"delta":{"content":"\u00e9\/"},"logprobs":{"x":-0.10}}]}' + b"\n\n",
    event(chunk("crlf"), end=b"\r\n\r\n"),
    event(chunk("x" * 2**20)),
    event(chunk('"usage": {"prompt_tokens": 1}, "kv_transfer_params": {}, "error": 1')),
    event({"id": "c", "choices": [{"logprobs": {"content": [{"token": "usage"}, {"token": "error"}]}}]}),
    event(
        {"id": "c", "choices": [{"delta": {"tool_calls": [{"function": {"arguments": '{"kv_transfer_params":1}'}}]}}]}
    ),
    event(chunk("data: [DONE]")),
    event(chunk("a", usage=None)),
    b": ping\n\n",
    b"event: custom\nid: 7\ndata: {}\n\n",
    b"data:\n\n",
    b'data: not json "usage" "error" "kv_transfer_params"\n\n',
    event([1, "usage"]),
    event(last()),
]


@pytest.mark.parametrize("passed", ORDINARY, ids=lambda e: e[:60].decode(errors="replace"))
def test_ordinary_events_pass_byte_for_byte(passed: bytes) -> None:
    watched = Watched()
    assert watched.feed(passed) == passed
    assert (watched.filter.events, watched.filter.error, watched.filter.handle, watched.counted) == (1, None, None, [])


def test_null_parameters_are_cut_out_without_reading_the_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 puts them into every chunk."""
    monkeypatch.setattr(wire, "split", None)
    for at in ({"choices": []}, chunk("a")):
        for after in ({}, {"weight_versions": None}):
            assert Watched().feed(event({**at, "kv_transfer_params": None, **after})) == event({**at, **after})
    quoted = event(chunk('"a","kv_transfer_params":null'))
    assert Watched().feed(quoted) == quoted


EVENTS = st.sampled_from(
    [
        *(e for e in ORDINARY if len(e) < 1000),
        event(with_handle(token_ids=[1, 2])),
        event(with_handle()),
        event(chunk("null", kv_transfer_params=None)),
        event(USAGE_EVENT),
        event(chunk("running", usage=USAGE)),
        event({"error": {"message": "out of memory"}}),
    ]
)


@given(st.lists(EVENTS, max_size=6), st.booleans(), st.booleans(), st.data())
def test_the_pieces_do_not_matter(events: list[bytes], wants_usage: bool, noted: bool, data: st.DataObject) -> None:
    stream = b"".join([*events, DONE])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, cut, single = (Watched(wants_usage=wants_usage) for _ in range(3))
    expected = whole.feed(stream)
    assert cut.feed(*pieces) == expected
    assert single.feed(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    end, *others = (watched.filter.ended(NOTE if noted else None) for watched in (whole, cut, single))
    assert others == [end, end]
    assert end.endswith(DONE)
    for other in (cut.filter, single.filter):
        assert (other.handle, other.generated, other.error) == (
            whole.filter.handle,
            whole.filter.generated,
            whole.filter.error,
        )
        assert other.finished
        assert other.events == len(events) + 1


def test_each_event_goes_out_with_the_piece_that_completes_it() -> None:
    watched = Watched()
    first, second = event(chunk("1")), event(chunk("2"))
    assert [watched.feed(p) for p in (first[:-1], first[-1:], second[:9], second[9:] + first)] == [
        b"",
        first,
        b"",
        second + first,
    ]


def test_the_end_is_held_back() -> None:
    watched = Watched()
    assert watched.feed(event(last())) == event(last())
    assert not watched.filter.finished
    assert watched.feed(DONE) == b""
    assert watched.filter.finished


# --- handles -------------------------------------------------------------------------------------------------------------


def test_handle_and_ids_are_taken_out_of_the_last_event() -> None:
    watched = Watched()
    assert parsed(watched.feed(event(with_handle(token_ids=[7, 8])))) == [last()]
    assert watched.filter.handle is not None
    assert json.loads(watched.filter.handle.params) == params("req")
    assert watched.filter.generated == (7, 8)


def test_ids_are_read_where_there_is_no_handle() -> None:
    watched = Watched()
    extension = {"backhaul": {"version": 1, "token_ids": [7]}}
    assert parsed(watched.feed(event(last(kv_transfer_params=extension)))) == [last()]
    assert (watched.filter.handle, watched.filter.generated) == (None, (7,))


def test_a_null_that_comes_with_every_chunk_is_taken_out_and_forgets_nothing() -> None:
    watched = Watched()
    null = event(chunk("a", kv_transfer_params=None))
    assert parsed(watched.feed(null, event(with_handle(token_ids=[7])), null)) == [chunk("a"), last(), chunk("a")]
    assert watched.filter.handle is not None
    assert watched.filter.generated == (7,)


def test_encoder_cache_params_are_taken_out_too() -> None:
    assert parsed(Watched().feed(event(chunk("a", ec_transfer_params={"host": "x"})))) == [chunk("a")]


@pytest.mark.parametrize("odd", ["x", 1, [1], {**params(), "remote_port": [1]}, {"backhaul": 1}])
def test_a_handle_of_an_unknown_shape_is_not_shown_either(odd: object) -> None:
    watched = Watched()
    with pytest.raises(msgspec.DecodeError):
        watched.feed(event(last(kv_transfer_params=odd)))


def test_a_handle_in_an_event_that_is_no_json_is_not_shown() -> None:
    with pytest.raises(wire.MalformedBody):
        Watched().feed(b'data: {"x": NaN, "kv_transfer_params": ' + encoded(params()) + b"}\n\n")


# --- usage ---------------------------------------------------------------------------------------------------------------


def test_usage_that_only_the_router_asked_for_is_swallowed() -> None:
    watched = Watched()
    assert watched.feed(event(last()), event(USAGE_EVENT), DONE) == event(last())
    assert watched.filter.ended(NOTE) == DONE
    assert [usage and (usage.prompt_tokens, usage.completion_tokens) for usage in watched.counted] == [(5, 2)]


def test_usage_that_the_client_asked_for_is_annotated() -> None:
    watched = Watched(wants_usage=True)
    assert watched.feed(event(USAGE_EVENT), DONE) == b""
    ended = watched.filter.ended(NOTE)
    assert ended.endswith(DONE)
    assert parsed(ended.removesuffix(DONE)) == [{**USAGE_EVENT, "usage": {**USAGE, "backhaul": {"route": "warm"}}}]


def test_a_client_that_asks_for_it_gets_the_note_in_a_comment_too() -> None:
    watched = Watched()
    watched.feed(event(USAGE_EVENT), DONE)
    assert watched.filter.ended(NOTE, comment=True) == b": backhaul " + NOTE + b"\n\n" + DONE
    assert Watched().filter.ended(comment=True) == DONE


def test_usage_passes_untouched_where_there_is_nothing_to_note() -> None:
    watched = Watched(wants_usage=True)
    watched.feed(event(USAGE_EVENT, end=b"\r\n\r\n"))
    assert watched.filter.ended() == event(USAGE_EVENT, end=b"\r\n\r\n") + DONE
    assert len(watched.counted) == 1


def test_usage_that_is_not_the_last_event_passes_in_its_place() -> None:
    watched = Watched(wants_usage=True)
    assert watched.feed(event(USAGE_EVENT), event(last()), DONE) == event(USAGE_EVENT) + event(last())
    assert watched.filter.ended(NOTE) == DONE


def test_running_usage_passes_untouched() -> None:
    running = event(chunk("a", usage=USAGE))
    assert Watched(wants_usage=True).feed(running) == running


# --- errors --------------------------------------------------------------------------------------------------------------


def test_an_engines_error_event_is_noticed_and_passed_on() -> None:
    error = {"error": {"message": "out of memory", "code": 500}}
    watched = Watched()
    assert watched.feed(event(error)) == event(error)
    assert watched.filter.error is not None
    assert wire.error_message(watched.filter.error) == "out of memory"


def test_an_error_event_that_quotes_a_handle_is_replaced() -> None:
    watched = Watched()
    quoting = event({"error": {"message": "load failed: {'remote_host': '10.0.0.5', 'remote_block_ids': [[7, 8]]}"}})
    shown = watched.feed(quoting)
    assert b"10.0.0.5" not in shown
    assert b"it quotes a handle" in shown
    assert watched.filter.error is not None


def test_a_choice_that_speaks_of_an_error_is_none() -> None:
    watched = Watched()
    watched.feed(event(chunk("a", error=None)))
    assert watched.filter.error is None


def test_an_event_that_never_ends_is_never_shown() -> None:
    assert Watched().feed(b'data: {"kv_transfer_params": {"remote_host"', b': "x"') == b""
