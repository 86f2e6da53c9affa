"""The conversation API over loopback engines, with the router inside the process and served: forks, hints, keeping leases,
the collapse detector."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import backhaul
import openai
import pytest
from backhaul import Reason, Route
from backhaul._keepalive import KeepAlive
from backhaul_loopback import LoopbackEngine, LoopbackPair, loopback_pair
from backhaul_router.drive import background_loop
from served import freed, in_thread

STORY = "The cache keeps the keys and values of every token that the engine ran, block by block. "
SYSTEM = {"role": "system", "content": "You are patient. " + STORY * 8}
OURS: dict[str, Any] = {"connector": "backhaul", "claim_timeout_s": 20.0}
Messages = list[dict[str, Any]]

both = pytest.mark.parametrize("way", ["embedded", "served"])


@dataclass
class Agent:
    """A client of a pair."""

    client: backhaul.AsyncOpenAI
    pair: LoopbackPair

    async def say(self, history: Messages, text: str = STORY * 2, **options: Any) -> str:
        """One turn; the question and the answer are put into the history."""
        history.append({"role": "user", "content": text})
        request: dict[str, Any] = {"model": self.pair.model, "messages": history, "max_tokens": 48, **options}
        answer: Any = await self.client.chat.completions.create(**request)
        content: str = answer.choices[0].message.content
        history.append({"role": "assistant", "content": content})
        return content

    @property
    def pinned(self) -> int:
        return self.pair.decode.pinned_blocks


@asynccontextmanager
async def agent(
    way: str = "embedded", *, engines: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Agent]:
    given = {"local_max_tokens": 0, **settings}
    engine = {"prefill": {"prefix_caching": False}, **(OURS if engines is None else engines)}
    async with loopback_pair(**engine) as pair:
        if way == "embedded":
            urls = {"prefill": [pair.prefill.url], "decode": [pair.decode.url]}
            async with backhaul.AsyncOpenAI(**urls, **given) as client:
                yield Agent(client, pair)
        else:
            async with in_thread(pair, **given) as http:
                base_url = f"{str(http.base_url).rstrip('/')}/v1"
                async with backhaul.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
                    yield Agent(client, pair)
        await freed(pair)


def turns(chat: backhaul.Conversation) -> list[tuple[Route, Reason | None]]:
    return [(turn.route, turn.reason) for turn in chat.reuse.turns]


FIRST = (Route.COLD, Reason.FIRST_TURN)
WARM = (Route.WARM, None)


# --- forks ---------------------------------------------------------------------------------------------------------------


@both
async def test_forks_read_what_their_parent_left_side_by_side(way: str) -> None:
    async with agent(way) as own:
        async with backhaul.conversation() as chat:
            history: Messages = [SYSTEM]
            await own.say(history)

            async def branch(number: int) -> backhaul.Conversation:
                async with chat.fork() as child:
                    mine = list(history)
                    await own.say(mine, f"Idea {number}: {STORY}")
                    await own.say(mine, f"And then {number}? {STORY}")
                    return child

            children = await asyncio.gather(*(branch(number) for number in range(3)))
            await own.say(history)
        assert turns(chat) == [FIRST, WARM]
        assert [turns(child) for child in children] == [[WARM, WARM]] * 3
        reports = [child.reuse.turns[0] for child in children]
        assert {(report.turn, report.parent) for report in reports} == {(1, chat.id)}
        assert all(report.pulled for report in reports)
        assert chat.children == tuple(children)
        assert chat.reuse.total.turns == 2
        assert chat.reuse.total_with_children.turns == 8
        assert chat.reuse.collapse is None
        assert not any(child.reuse.collapse for child in children)


async def test_on_stock_engines_the_first_fork_gets_it_and_the_answers_are_right_all_the_same() -> None:
    async with agent(engines={}) as own:
        async with backhaul.conversation() as chat:
            history: Messages = [SYSTEM]
            await own.say(history)
            answers = []
            for number in range(2):
                async with chat.fork() as child:
                    answers.append(await own.say(list(history), "What now? " + STORY))
                    assert turns(child) == [WARM if number == 0 else (Route.COLD, Reason.IN_USE)]
            assert answers[0] == answers[1]


async def test_the_answers_of_forks_are_those_of_one_engine() -> None:
    async with agent() as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        await own.say(history)
        async with chat.fork():
            mine = list(history)
            answer = await own.say(mine, "Else: " + STORY)
        async with openai.AsyncOpenAI(base_url=f"{own.pair.decode.url}/v1", api_key="none") as direct:
            request: Any = {"model": own.pair.model, "messages": mine[:-1], "max_tokens": 48}
            expected = await direct.chat.completions.create(**request)
        own.pair.decode.forget_lease()
        assert expected.choices[0].message.content == answer


async def test_a_nested_conversation_with_the_same_instructions_is_no_fork() -> None:
    async with agent() as own, backhaul.conversation() as chat:
        await own.say([SYSTEM])
        async with backhaul.conversation() as inner:
            await own.say([SYSTEM], "Another task: " + STORY)
        assert inner.reuse.last is not None
        assert (turns(inner), inner.reuse.last.parent) == ([FIRST], chat.id)


# --- the last turn -------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("stream", [False, True])
async def test_a_last_turn_reuses_and_leaves_nothing(way: str, stream: bool) -> None:
    async with agent(way) as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        await own.say(history)
        assert own.pinned
        with chat.last_turn():
            if stream:
                request: Any = {"model": own.pair.model, "messages": [*history, {"role": "user", "content": STORY}]}
                async for _ in await own.client.chat.completions.create(**request, max_tokens=8, stream=True):
                    pass
            else:
                await own.say(history)
        await freed(own.pair)
        assert turns(chat) == [FIRST, WARM]
        assert chat.reuse.last is not None
        assert chat.reuse.last.handle_remaining_s is None


@pytest.mark.parametrize("engines", [OURS, {}], ids=["ours", "stock"])
@pytest.mark.parametrize("header", ["X-Backhaul-Last-Turn", "X-Dynamo-Session-Final"])
async def test_a_call_can_say_so_by_itself(engines: dict[str, Any], header: str) -> None:
    async with agent(engines=engines) as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        await own.say(history)
        await own.say(history, extra_headers={header: "true"})
        await freed(own.pair)
        assert turns(chat) == [FIRST, WARM]
        sent = [request for engine in (own.pair.prefill, own.pair.decode) for request in engine.received]
        assert not [name for request in sent for name in request.headers if "last-turn" in name or "final" in name]


async def test_a_last_turn_that_failed_can_be_tried_again() -> None:
    async with agent() as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        await own.say(history)
        own.pair.prefill.faults.status, own.pair.prefill.faults.times = 500, 4
        with chat.last_turn():
            with pytest.raises(openai.InternalServerError):
                await own.client.with_options(max_retries=0).chat.completions.create(
                    model=own.pair.model, messages=[*history, {"role": "user", "content": STORY}]
                )
            own.pair.prefill.faults.clear()
            assert own.pinned
            await own.say(history)
        assert turns(chat)[-1] == WARM
        await freed(own.pair)


async def test_hints_are_about_their_own_conversation() -> None:
    async with agent() as own, backhaul.conversation() as chat:
        with chat.last_turn():
            async with backhaul.conversation():
                await own.say([SYSTEM])
                assert own.pinned


# --- pauses --------------------------------------------------------------------------------------------------------------


@both
async def test_leases_are_kept_over_a_pause(way: str) -> None:
    async with agent(way) as own, backhaul.conversation() as chat:
        await own.say([SYSTEM])
        paused = await chat.apause(1800)
        assert (paused.released, paused.why) == (0, None)
        assert paused.kept_s is not None
        assert 1790 < paused.kept_s <= 1800
        short = await chat.apause(5)
        assert short.kept_s is not None
        assert short.kept_s > 1790


@both
async def test_a_pause_that_is_too_long_releases_now_and_says_why(way: str) -> None:
    async with agent(way) as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        await own.say(history)
        paused = await chat.apause(40_000)
        await freed(own.pair)
        assert (paused.kept_s, paused.released) == (None, 1)
        assert paused.why is not None
        assert "longer than the 3600 s" in paused.why
        await own.say(history)
        assert turns(chat) == [FIRST, (Route.COLD, Reason.EXPIRED)]


@both
async def test_stock_engines_keep_what_lasts_long_enough_and_nothing_else(way: str) -> None:
    async with agent(way, engines={}) as own, backhaul.conversation() as chat:
        await own.say([SYSTEM])
        assert (await chat.apause(60)).released == 0
        paused = await chat.apause(600)
        await freed(own.pair)
        assert (paused.kept_s, paused.released) == (None, 1)
        assert "a stock decode engine cannot be asked to keep it" in str(paused.why)


@pytest.mark.parametrize(
    ("engines", "seconds", "kept_s"),
    [(OURS, 1800, 1800), (OURS, 20, 470), (OURS, 4000, None), ({}, 60, 470), ({}, 600, None)],
    ids=["ours", "ours, short", "ours, too long", "stock, short", "stock, too long"],
)
async def test_a_call_can_say_that_a_pause_follows(
    engines: dict[str, Any], seconds: float, kept_s: float | None
) -> None:
    async with agent(engines=engines) as own, backhaul.conversation() as chat:
        await own.say([SYSTEM], extra_headers={"X-Backhaul-Pause": str(seconds)})
        assert chat.reuse.last is not None
        remaining_s = chat.reuse.last.handle_remaining_s
        if kept_s is None:
            assert remaining_s is None
            await freed(own.pair)
        else:
            assert remaining_s is not None
            assert kept_s - 5 < remaining_s <= kept_s
            assert own.pinned


@both
async def test_a_pause_that_is_none_is_refused(way: str) -> None:
    async with agent(way) as own, backhaul.conversation() as chat:
        with pytest.raises(openai.BadRequestError, match="above 0 and at most 86,400"):
            await own.say([SYSTEM], extra_headers={"X-Backhaul-Pause": "for ever"})
        with pytest.raises(ValueError, match="at most 86,400"):
            await chat.apause(100_000)
        assert (await chat.apause(60)).kept_s is None


async def test_pausing_where_it_would_block_the_loop_is_refused() -> None:
    with pytest.raises(RuntimeError, match="await apause"):
        backhaul.conversation().pause(60)


# --- keeping leases ------------------------------------------------------------------------------------------------------

QUICK = 1000
"""Times: the keeper's clock here. Engines and routers keep real time, so that a machine under load does not matter."""


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = KeepAlive(
        lambda: time.monotonic() * QUICK, lambda delay_s, call: background_loop.shared().later(delay_s / QUICK, call)
    )
    monkeypatch.setattr("backhaul._conversation.keeper", keeper)


def asked_to_renew(engine: LoopbackEngine) -> int:
    """How often."""
    params = [request.body.get("kv_transfer_params") or {} for request in engine.received if request.body]
    return sum("renew" in ((said.get("backhaul") or {}).get("leases") or {}) for said in params)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


@both
async def test_leases_of_an_open_conversation_are_renewed_until_it_is_left(way: str, hurried: None) -> None:
    async with agent(way) as own:
        async with backhaul.conversation() as chat:
            history: Messages = [SYSTEM]
            await own.say(history)
            await until(lambda: chat.renewals >= 3)
            assert asked_to_renew(own.pair.decode) >= 3
            await own.say(history)
        assert turns(chat) == [FIRST, WARM]
        assert chat.failed_renewals == 0
        await freed(own.pair)


async def test_without_keep_alive_leases_end_with_their_ttl() -> None:
    async with agent(decoder_kv_blocks_ttl=0.3, lease_margin_s=0.1) as own:
        async with backhaul.conversation(keep_alive=False) as chat:
            await own.say([SYSTEM])
            await freed(own.pair)
        assert (chat.renewals, asked_to_renew(own.pair.decode)) == (0, 0)


async def test_a_renewal_that_fails_is_counted_and_the_turns_go_on(
    hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with agent() as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        await own.say(history)
        own.pair.decode.faults.status = 500
        await until(lambda: chat.failed_renewals)
        own.pair.decode.faults.clear()
        await own.say(history)
    assert "could not be renewed" in caplog.text


# --- totals and collapses ------------------------------------------------------------------------------------------------


@both
async def test_the_process_counts_by_model_and_hears_of_every_turn(way: str) -> None:
    before = backhaul.totals()
    heard: list[backhaul.ReuseReport] = []
    mine: list[backhaul.ReuseReport] = []
    remove = backhaul.on_turn(heard.append)
    async with agent(way) as own:
        async with backhaul.conversation(on_turn=mine.append) as chat:
            history: Messages = [SYSTEM]
            await own.say(history)
            await own.say(history)
        remove()
        async with backhaul.conversation():
            await own.say([SYSTEM])
        model = own.pair.model
    assert heard == mine == chat.reuse.turns
    assert chat.reuse.total.by_model[model].turns == 2
    known = before.by_model[model].turns if model in before.by_model else 0
    assert backhaul.totals().by_model[model].turns == known + 3
    assert backhaul.totals().turns == before.turns + 3


@both
@pytest.mark.parametrize("heard", [False, True])
async def test_turns_outside_of_conversations_count_too(way: str, heard: bool) -> None:
    before = backhaul.totals()
    turns: list[backhaul.ReuseReport] = []
    remove = backhaul.on_turn(turns.append) if heard else lambda: None
    async with agent(way) as own:
        history: Messages = [SYSTEM]
        for stream in (False, True):
            request: Any = {"model": own.pair.model, "messages": history, "stream": stream, "max_tokens": 8}
            answer = await own.client.chat.completions.create(**request, extra_headers={"X-Conversation-ID": "c1"})
            if stream:
                async for _ in answer:
                    pass
            history = [*history, {"role": "assistant", "content": "x"}, {"role": "user", "content": STORY}]
    remove()
    after = backhaul.totals()
    assert (after.turns - before.turns, after.routes[Route.COLD] > before.routes.get(Route.COLD, 0)) == (2, True)
    assert after.prompt > before.prompt
    assert [(turn.conversation, turn.turn, turn.total_ms > 0) for turn in turns] == (
        [("c1", 1, True), ("c1", 2, True)] if heard else []
    )


@both
async def test_a_listener_that_raises_breaks_no_turn(way: str, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(report: backhaul.ReuseReport) -> None:
        raise KeyError("no room")

    remove = backhaul.on_turn(refuse)
    async with agent(way) as own, backhaul.conversation(on_turn=refuse) as chat:
        assert await own.say([SYSTEM])
        assert chat.reuse.total.turns == 1
    remove()
    assert caplog.text.count("the turn is not affected") == 2


@both
@pytest.mark.parametrize("index", [0, 1, 3])
async def test_an_edited_message_is_named_by_the_collapse(way: str, index: int) -> None:
    async with agent(way) as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        for _ in range(3):
            await own.say(history, STORY * 6)
        assert chat.reuse.collapse is None
        history[index] = {**history[index], "content": "Changed: " + STORY}
        await own.say(history, STORY * 6)
        collapse = chat.reuse.collapse
        assert collapse is not None
        assert (collapse.turn, collapse.reason, collapse.message) == (4, "diverged", index)
        assert collapse.tokens_lost >= 256
        await own.say(history, STORY * 6)
        assert chat.reuse.collapse is None


@both
async def test_a_summary_in_the_place_of_the_history_is_a_compaction(way: str) -> None:
    async with agent(way) as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        for _ in range(4):
            await own.say(history, STORY * 12)
        await own.say([SYSTEM, {"role": "user", "content": "So far: nothing."}], "Go on.")
        assert chat.reuse.collapse is not None
        assert chat.reuse.collapse.reason == "compacted"


async def test_another_agent_under_the_same_id_is_no_collapse() -> None:
    async with agent() as own, backhaul.conversation() as chat:
        history: Messages = [SYSTEM]
        for _ in range(2):
            await own.say(history, STORY * 6)
        await own.say([{"role": "system", "content": "You are brisk. " + STORY * 8}])
        assert chat.reuse.collapse is None


async def test_a_lease_that_ended_is_an_expiry() -> None:
    async with (
        agent(decoder_kv_blocks_ttl=0.3, lease_margin_s=0.1) as own,
        backhaul.conversation(keep_alive=False) as chat,
    ):
        history: Messages = [SYSTEM]
        await own.say(history, STORY * 20)
        await freed(own.pair)
        await own.say(history)
        assert chat.reuse.collapse is not None
        assert chat.reuse.collapse.reason == "expired"


# --- the server's endpoints ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "answer"),
    [
        ("c%2F1/renew", 200, 470.0),
        ("c%2F1/renew?ttl_s=60", 200, 50.0),
        ("nobody/renew", 200, None),
        ("c%2F1/renew?ttl_s=0", 400, "ttl_s= takes a number of seconds above 0 and at most 86,400"),
        ("c%2F1/renew?ttl_s=nan", 400, "ttl_s= takes a number"),
        ("c%2F1/pause", 400, "seconds= takes a number"),
        ("c%2F1/else", 405, "POST is not for"),
    ],
)
async def test_renewing_on_a_served_router(path: str, status: int, answer: float | str | None) -> None:
    async with loopback_pair(**OURS) as pair, in_thread(pair) as http:
        request = {"model": pair.model, "messages": [SYSTEM], "max_tokens": 4}
        turn = await http.post("/v1/chat/completions", json=request, headers={"X-Conversation-ID": "c/1"})
        assert turn.status_code == 200
        said = await http.post(f"/backhaul/conversations/{path}")
        assert said.status_code == status
        if status == 200:
            assert said.json()["remaining_s"] == pytest.approx(answer)
        else:
            assert str(answer) in said.json()["error"]["message"]


async def test_a_renewal_that_an_engine_refuses_is_a_502() -> None:
    async with loopback_pair(**OURS) as pair, in_thread(pair) as http:
        request = {"model": pair.model, "messages": [SYSTEM], "max_tokens": 4}
        await http.post("/v1/chat/completions", json=request, headers={"X-Conversation-ID": "c"})
        pair.decode.faults.status = 500
        said = await http.post("/backhaul/conversations/c/renew")
        pair.decode.faults.clear()
        assert (said.status_code, said.json()["error"]["code"]) == (502, "lease_failed")
