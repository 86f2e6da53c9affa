"""Server-sent events: whatever the pieces, the same events come out, and every byte is in one of them."""

from __future__ import annotations

import time

import pytest
from backhaul_router.wire.sse import EventSplitter, data_of
from hypothesis import given
from hypothesis import strategies as st

ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
LINE = st.sampled_from(
    [b"data: {}", b"data:", b": ping", b"event: x", "data: é日🎈".encode(), b"data: \\n\\n", b"id: 1"]
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Events, each with its end, and at last one without."""
    events = []
    for _ in range(draw(st.integers(0, 5))):
        end = draw(st.sampled_from(ENDS))
        line_end = end[: len(end) // 2]
        events.append(line_end.join(draw(st.lists(LINE, min_size=1, max_size=3))) + end)
    return [*events, draw(st.sampled_from([b"", b"data: cut o"]))]


@given(streams(), st.data())
def test_the_pieces_do_not_matter(stream: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(stream)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    splitter = EventSplitter()
    events: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        events += splitter.feed(whole[start:end])
    assert [*events, splitter.rest()] == stream


@given(streams())
def test_single_bytes_do(stream: list[bytes]) -> None:
    splitter = EventSplitter()
    events = [event for byte in b"".join(stream) for event in splitter.feed(bytes([byte]))]
    assert [*events, splitter.rest()] == stream


def test_an_event_comes_out_as_soon_as_it_is_complete() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") == []
    assert splitter.feed(b"\ndata: 2") == [b"data: 1\n\n"]
    assert splitter.feed(b"\n\ndata: 3\n\nda") == [b"data: 2\n\n", b"data: 3\n\n"]
    assert splitter.rest() == b"da"
    assert splitter.rest() == b""


@pytest.mark.alone
def test_a_large_event_in_small_pieces_takes_linear_time() -> None:
    event = b"data: " + b"x" * 2**20 + b"\n\n"
    splitter = EventSplitter()
    started = time.process_time()
    events = [e for i in range(0, len(event), 64) for e in splitter.feed(event[i : i + 64])]
    assert events == [event]
    assert time.process_time() - started < 2  # in quadratic time it would be minutes


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"data: {}\r\n\r\n", b"{}"),
        (b"data: {}\r\r", b"{}"),
        (b"event: e\ndata: 1\ndata: 2\n\n", b"1\n2"),
        (b": comment\n\n", None),
        (b"event: e\nid: 5\n\n", None),
        (b"\n\n", None),
        (b": ping\ndata: 1\n\n", b"1"),
    ],
)
def test_the_payload_of_an_event(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data
