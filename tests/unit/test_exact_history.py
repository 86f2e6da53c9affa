"""The model's own tokens in place of the same text: only where it is the same answer, and certain where it ends."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from backhaul_router.wire.exact_history import AnswerAccumulator, AnswerContent, content_of, content_of_answer, splice

END, NEWLINE, USER, ASSISTANT = 2, 10, 100, 101


def message(**members: Any) -> bytes:
    return json.dumps({"role": "assistant", **members}).encode()


def call(name: str, arguments: str, **more: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("answer", "history"),
    [
        (message(content="Hi."), message(content=[{"type": "text", "text": "Hi."}])),
        (message(content="Hi.\n"), message(content="Hi.")),
        (
            message(content=None, tool_calls=[call("f", '{"a": 1}')]),
            message(content="", tool_calls=[call("f", '{"a":1}')]),
        ),
        (
            message(tool_calls=[call("f", '{"a":  "Z\\u00fcrich", "b": 2}')]),
            message(tool_calls=[call("f", '{"b":2,"a":"Zürich"}')]),
        ),
        (message(tool_calls=[call("f", "")]), message(tool_calls=[call("f", "{}")])),
    ],
    ids=["parts", "whitespace at the end", "no content", "arguments", "no arguments"],
)
def test_the_same_answer_is_known_however_it_is_written(answer, history):
    assert content_of(answer) == content_of(history) is not None


@pytest.mark.parametrize(
    ("answer", "history"),
    [
        (message(content="Hi."), message(content="Hello.")),
        (message(content="Hi."), message(content="")),
        (message(content="x", tool_calls=[call("f", '{"a": 1}')]), message(content="x")),
        (message(tool_calls=[call("f", '{"a": 1}')]), message(tool_calls=[call("f", '{"a": 2}')])),
        (message(tool_calls=[call("f", '{"a": 1}')]), message(tool_calls=[call("g", '{"a": 1}')])),
        (message(tool_calls=[call("f", '{"a": 1}')] * 2), message(tool_calls=[call("f", '{"a": 1}')])),
        (message(tool_calls=[call("f", '{"a": 1}')]), message(tool_calls=[call("f", '{"a": 1')])),
        (message(tool_calls=[call("f", '{"a": 1}')]), message(tool_calls=[call("f", '{"a": 1.0}')])),
        (message(tool_calls=[call("f", '{"a": 1}')]), message(tool_calls=[call("f", '{"a": true}')])),
    ],
)
def test_an_edited_answer_is_another(answer, history):
    assert content_of(answer) != content_of(history)


def test_an_answer_may_come_back_without_its_reasoning_but_not_with_another() -> None:
    answer = content_of(message(content="Hi.", reasoning="Let me think."))
    assert answer is not None
    for reasoning, same in ((None, True), ("Let me think.", True), ("I know.", False)):
        back = content_of(message(content="Hi.", reasoning=reasoning))
        assert back is not None
        assert back.repeats(answer) is same


def choice(finish: str, stop: int | str | None = None) -> dict[str, msgspec.Raw]:
    whole = {"message": json.loads(message(content="Hi.")), "finish_reason": finish, "stop_reason": stop}
    return {"choices": msgspec.Raw(json.dumps([whole]).encode())}


@pytest.mark.parametrize(
    ("finish", "stop", "known"),
    [
        ("stop", None, True),
        ("tool_calls", None, True),
        ("stop", 7, True),
        ("stop", 5, False),
        ("stop", "\n", False),
        ("length", None, False),
    ],
)
def test_an_answer_that_something_else_than_its_own_end_ended_is_not_known(
    finish: str, stop: int | str | None, known: bool
) -> None:
    assert (content_of_answer(choice(finish, stop), stops=(5,)) is not None) is known
    heard = AnswerAccumulator(stops=(5,))
    heard.feed(json.dumps({"choices": [{"delta": {"content": "Hi."}}]}).encode())
    assert heard.said is None
    heard.feed(json.dumps({"choices": [{"delta": {}, "finish_reason": finish, "stop_reason": stop}]}).encode())
    assert (heard.said is not None) is known


def test_arguments_nested_too_deeply_are_compared_as_they_are() -> None:
    deep = message(tool_calls=[call("f", "[" * 5000 + "]" * 5000)])
    assert content_of(deep) == content_of(deep) is not None


@pytest.mark.parametrize(
    "history",
    [
        b'{"role": "user", "content": "Hi."}',
        message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        message(content="Hi.", function_call={"name": "f", "arguments": "{}"}),
        message(content=None, refusal="No."),
        b"no JSON",
    ],
)
def test_what_is_not_compared_is_nothing(history):
    assert content_of(history) is None


def test_a_stream_says_what_the_whole_answer_says():
    heard = AnswerAccumulator()
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning": "Let me think."},
        {"content": "One "},
        {"content": "moment.\n"},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]},
    ):
        heard.feed(json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode())
    heard.feed(b'{"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}')
    heard.feed(b'{"choices": [], "usage": {"prompt_tokens": 1}}')
    whole = message(content="One moment.", tool_calls=[call("f", '{"a": 1}'), call("g", "{}")])
    whole_said = content_of(whole)
    assert heard.said is not None
    assert heard.said.reasoning == "Let me think."
    assert whole_said is not None
    assert whole_said.repeats(heard.said)
    assert whole_said == AnswerContent("One moment.", (("f", b'{"a":1}'), ("g", b"{}")))


def test_a_stream_that_cannot_be_read_says_nothing():
    heard = AnswerAccumulator()
    heard.feed(b'{"choices": [{"delta": {"content": 1}}]}')
    assert heard.said is None


def test_the_answers_own_tokens_replace_its_text():
    before = [USER, 7, END, NEWLINE, ASSISTANT]
    ran = [*before, 30, 31, END]
    closed = [*before, 55, END, NEWLINE]
    rendered = [*closed, USER, 8, END, NEWLINE, ASSISTANT]
    assert splice(ran, rendered, closed) == (*before, 30, 31, END, NEWLINE, USER, 8, END, NEWLINE, ASSISTANT)


def test_earlier_answers_keep_the_tokens_that_they_ran_with():
    ran = [USER, 7, END, NEWLINE, ASSISTANT, 30, 31, END, NEWLINE, USER, 8, END, NEWLINE, ASSISTANT, 40, END]
    closed = [
        USER,
        7,
        END,
        NEWLINE,
        ASSISTANT,
        55,
        END,
        NEWLINE,
        USER,
        8,
        END,
        NEWLINE,
        ASSISTANT,
        66,
        67,
        END,
        NEWLINE,
    ]
    rendered = [*closed, USER, 9]
    assert splice(ran, rendered, closed) == (*ran, NEWLINE, USER, 9)


@pytest.mark.parametrize(
    ("ran", "rendered", "closed"),
    [
        ([5, 6], [1, END, 4], [1, END]),
        ([5, END], [1, 9, 4], [1, END]),
        ([], [1, END, 4], [1, END]),
        ([5, END], [1, END, *range(20, 40), 4], [1, END, *range(20, 40)]),
    ],
    ids=["the answer was cut off", "the template looks ahead", "nothing ran", "the end is too far away"],
)
def test_where_the_end_is_not_certain_nothing_is_replaced(ran, rendered, closed):
    assert splice(ran, rendered, closed) is None
