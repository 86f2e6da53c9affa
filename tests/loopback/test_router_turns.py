"""Conversations through a router: whatever is reused, every answer is that of the client's own body on a fresh engine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from backhaul_router.report import Proof, Reason, Route
from router_turns import (
    BLOCK,
    CHAT,
    COMPLETIONS,
    STORY,
    Cluster,
    Message,
    first_turn,
    opening,
    run_cluster,
    system,
    user,
)

NO_CACHE = {"prefix_caching": False}
"""On P, so that all that it has not to compute was read."""
ROUTES: dict[str, dict[str, Any]] = {
    "warm": {},
    "local": {"route": Route.LOCAL},
    "cold": {"route": Route.COLD},
    "by thresholds": {"local_max_tokens": 64},
}


async def converse(cluster: Cluster, turns: int, *, stream: bool = False, **body: Any) -> None:
    messages = [system()]
    for number in range(turns):
        messages.append(user(f"Question {number}: {STORY}"))
        answer = await cluster.exact({"messages": messages, "stream": stream, **body})
        if stream:
            text = "".join(e["choices"][0]["delta"].get("content") or "" for e in answer.events if e["choices"])
            messages.append({"role": "assistant", "content": text})
        else:
            messages.append(answer.message)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("how", ROUTES)
async def test_five_turns_answer_as_an_engine_alone(how: str, stream: bool) -> None:
    async with run_cluster(p=NO_CACHE, **ROUTES[how]) as cluster:
        await converse(cluster, 5, stream=stream)
        routes = [report.route for report in cluster.reports]
        expected = {"warm": Route.WARM, "by thresholds": Route.WARM, "local": Route.LOCAL, "cold": Route.COLD}[how]
        assert routes == [Route.COLD, *[expected] * 4]
        assert [report.turn for report in cluster.reports] == [1, 2, 3, 4, 5]
        assert cluster.reports[0].reason is Reason.FIRST_TURN


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_from_the_second_turn_on_only_what_is_new_is_computed(stream: bool) -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        await converse(cluster, 4, stream=stream)
        first, *later = cluster.reports
        assert (first.cached, first.offered) == (0, 0)
        earlier = first
        for report in later:
            assert (report.route, report.reason, report.proof) == (Route.WARM, None, Proof.TOKENS)
            assert (earlier.prompt, earlier.generated) != (None, None)
            ran = (earlier.prompt or 0) + (earlier.generated or 0) - 1
            assert report.offered == report.cached == ran // BLOCK * BLOCK
            assert report.computed == (report.prompt or 0) - report.offered
            earlier = report
        assert cluster.p.core.metrics.external_kv_transfer == sum(report.offered for report in later)


async def test_with_a_prefix_cache_on_prefill_only_the_rest_is_read() -> None:
    async with run_cluster() as cluster:
        await converse(cluster, 4)
        assert [r.route for r in cluster.reports] == [Route.COLD, *[Route.WARM] * 3]
        # P computes what is not worth a read of its own.
        assert all(r.offered - (r.cached or 0) < 64 for r in cluster.reports)
        assert cluster.p.core.metrics.external_kv_transfer < sum(r.offered for r in cluster.reports)


@pytest.mark.parametrize("scale_out", [True, False], ids=["rendered", "tokenized"])
async def test_either_way_to_the_ids_gives_a_proof(scale_out: bool) -> None:
    async with run_cluster(engine={"enable_scale_out": scale_out}) as cluster:
        await converse(cluster, 2)
        assert cluster.reports[-1].route is Route.WARM
        path = f"{CHAT}/render" if scale_out else "/tokenize"
        assert len(cluster.p.requests_to(path)) == 2


@pytest.mark.parametrize("ids", [False, True], ids=["text", "ids"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_completions_extend_their_prompt(stream: bool, ids: bool) -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        prompt: Any = list(range(65, 91)) * 8 if ids else STORY * 3
        for _ in range(3):
            body = {"prompt": prompt, "max_tokens": 40}
            await cluster.exact({**body, "stream": stream}, COMPLETIONS)
            answer = json.loads((await cluster.direct({**body, "return_token_ids": ids}, COMPLETIONS))[1])["choices"][0]
            prompt = prompt + answer["token_ids"] + [10] * 70 if ids else prompt + answer["text"] + STORY
        assert [r.route for r in cluster.reports] == [Route.COLD, Route.WARM, Route.WARM]


async def test_a_handle_is_gone_from_decode_once_it_was_read() -> None:
    async with run_cluster() as cluster:
        messages = await first_turn(cluster)
        pinned = cluster.d.pinned_blocks
        await cluster.exact({"messages": messages})
        assert 0 < pinned <= cluster.d.pinned_blocks
        assert len(cluster.d.core.pins) == 1
        assert cluster.p.pinned_blocks == 0


# --- histories that are not what decode ran ------------------------------------------------------------------------------


def edit(index: int, **fields: Any) -> Callable[[list[Message]], None]:
    def change(history: list[Message]) -> None:
        history[index].update(fields)

    return change


def strip(history: list[Message]) -> None:
    del history[2]["reasoning"]


def regenerate(history: list[Message]) -> None:
    del history[2:]


def shorten(history: list[Message]) -> None:
    del history[2:]
    history[1]["content"] = "First: " + STORY[:20]


EDITS: dict[str, tuple[Callable[[list[Message]], Any], int | None]] = {
    "a message edited in the middle": (edit(1, content="Edited: " + STORY), 1),
    "a message removed": (lambda history: history.pop(1), 1),
    "a message inserted": (lambda history: history.insert(1, user("Before that. ")), 1),
    "the first message edited": (edit(0, content=STORY + "But not so here. " + STORY), 0),
    "the first letter edited": (edit(0, content="t" + (STORY * 2)[1:]), 0),
    "the answer's end trimmed": (lambda history: history[2].update(content=history[2]["content"][:-1]), None),
    "the answer's second half trimmed": (lambda history: history[2].update(content=history[2]["content"][:-20]), 2),
    "the answer rewritten": (edit(2, content="Something else entirely, and rather longer than it was before."), 2),
    "the last turn regenerated": (regenerate, None),
    "the last turn shortened": (shorten, 1),
    "a tool added": (lambda history: None, None),
}


@pytest.mark.parametrize(("stream", "cache"), [(False, False), (True, True)], ids=["whole", "streamed, P caches"])
@pytest.mark.parametrize("name", EDITS)
async def test_of_an_edited_history_the_common_blocks_are_read_and_no_more(
    name: str, stream: bool, cache: bool
) -> None:
    change, diverged_at = EDITS[name]
    async with run_cluster(p={"prefix_caching": cache}) as cluster:
        messages = opening()
        first = await cluster.exact({"messages": messages, "return_token_ids": True})
        ran = [*await cluster.ids({"messages": messages}), *first.json["choices"][0]["token_ids"]][:-1]
        history = copy.deepcopy([*messages, first.message, user("Second: " + STORY)])
        change(history)
        tools = [{"type": "function", "function": {"name": "f"}}] if name == "a tool added" else None
        body = {"messages": history, "stream": stream, **({"tools": tools} if tools else {})}
        prompt = await cluster.ids(body)
        same = next(
            (i for i, (a, b) in enumerate(zip(ran, prompt, strict=False)) if a != b), min(len(ran), len(prompt))
        )
        blocks = min(same, len(prompt) - 1) // BLOCK
        report = (await cluster.exact(body)).reused
        if blocks * BLOCK >= 64:
            assert (report.route, report.offered) == (Route.WARM, blocks * BLOCK)
            if not cache:
                assert cluster.p.core.metrics.external_kv_transfer == blocks * BLOCK
        else:
            assert (report.route, report.reason, report.offered) == (Route.COLD, Reason.DIVERGED, 0)
        if diverged_at is not None:
            assert report.diverged_at == diverged_at
        # What P has cached by now is right as well, for other conversations and for none.
        await cluster.exact(body, conversation=None)
        await cluster.exact({"messages": [*history, user("Third.")]}, conversation="another")


async def test_reasoning_that_is_stripped_shortens_what_is_read() -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        thinking = {"role": "assistant", "content": "Well. ", "reasoning": STORY}
        messages = [*opening(), thinking, user("Go on. " + STORY)]
        answer = await cluster.exact({"messages": messages})
        stripped = copy.deepcopy([*messages, answer.message, user("And then? " + STORY)])
        strip(stripped)
        report = (await cluster.exact({"messages": stripped})).reused
        head = await cluster.ids({"messages": messages[:2], "add_generation_prompt": False})
        assert report.route is Route.WARM
        assert len(head) // BLOCK * BLOCK <= report.offered <= len(head) + 2 * BLOCK
        assert report.diverged_at == 2


async def test_a_local_turns_handle_is_read_only_as_far_as_both_histories_agree() -> None:
    """A local turn leaves no handle, so the one before stays; from the edit on its blocks hold another text."""
    async with run_cluster(p=NO_CACHE) as cluster:
        messages = await first_turn(cluster)
        history = [
            *messages[:2],
            {"role": "assistant", "content": "Another answer, as long as the one before it was. "},
        ]
        history.append(user("Why? " + STORY))
        local = await cluster.exact({"messages": history}, route=Route.LOCAL)
        assert local.reused.route is Route.LOCAL
        common = len(await cluster.ids({"messages": messages[:2], "add_generation_prompt": False}))
        warm = await cluster.exact({"messages": [*history, local.message, user("And? " + STORY)]}, route=Route.WARM)
        assert warm.reused.offered <= common + 2 * BLOCK


async def test_two_agents_under_one_id_do_not_read_each_other() -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        agents = [[system(f"You are agent {n}. {STORY * 2}"), user("Begin. " + STORY)] for n in range(2)]
        for turn in range(3):
            for messages in agents:
                answer = await cluster.exact({"messages": messages})
                messages += [answer.message, user(f"Go on, {turn}. {STORY}")]
        assert [r.route for r in cluster.reports[:2]] == [Route.COLD, Route.COLD]
        assert [r.route for r in cluster.reports[2:]] == [Route.WARM] * 4


async def test_salts_keep_conversations_of_one_id_apart() -> None:
    async with run_cluster(p=NO_CACHE) as cluster:
        messages = await first_turn(cluster, {"cache_salt": "a"})
        other = await cluster.exact({"messages": messages, "cache_salt": "b"})
        assert other.reused.reason is Reason.FIRST_TURN
        same = await cluster.exact({"messages": messages, "cache_salt": "a"})
        assert same.reused.route is Route.WARM


# --- what a turn leaves on the engines -----------------------------------------------------------------------------------


async def test_what_a_cold_turn_supersedes_is_released_at_once() -> None:
    async with run_cluster() as cluster:
        messages = await first_turn(cluster)
        await cluster.exact({"messages": messages}, route=Route.COLD)
        await cluster.until(lambda: len(cluster.d.core.pins) == 1)


async def test_a_conversation_that_ends_leaves_nothing() -> None:
    async with run_cluster() as cluster:
        await first_turn(cluster)
        await first_turn(cluster, conversation="other")
        assert len(cluster.d.core.pins) == 2
        await cluster.router.end_conversation("c")
        await cluster.until(lambda: len(cluster.d.core.pins) == 1)
        await cluster.router.end_conversation("never heard of")
        assert (await cluster.exact({"messages": opening()})).reused.reason is Reason.FIRST_TURN


async def test_a_flush_leaves_nothing_to_read() -> None:
    async with run_cluster() as cluster:
        messages = await first_turn(cluster)
        await cluster.router.flush()
        await cluster.until(lambda: cluster.d.usage == 0)
        assert (await cluster.exact({"messages": messages})).reused.reason is Reason.FLUSHED


async def test_closing_the_router_releases_everything() -> None:
    async with run_cluster() as cluster:
        for conversation in "abc":
            await first_turn(cluster, conversation=conversation)
        await cluster.router.aclose()
        await cluster.until(lambda: not any(engine.usage for engine in cluster.engines))


async def test_without_a_conversation_and_without_going_by_histories_nothing_is_kept() -> None:
    async with run_cluster(match_history=False) as cluster:
        answer = await cluster.exact({"messages": opening()}, conversation=None)
        assert answer.reused.reason is Reason.NO_CONVERSATION
        await cluster.until(lambda: cluster.d.usage == 0)


async def test_with_reuse_off_nothing_is_kept() -> None:
    async with run_cluster(reuse=False) as cluster:
        await converse(cluster, 2)
        assert [r.reason for r in cluster.reports] == [Reason.REUSE_OFF] * 2
        await cluster.until(lambda: cluster.d.usage == 0)


async def test_a_stream_whose_handle_is_hidden_leaves_nothing_to_read() -> None:
    async with run_cluster(engine={"stream_handles": "off", "vllm_version": "0.32.0"}) as cluster:
        messages = await first_turn(cluster, conversation="other")
        await cluster.exact({"messages": messages, "stream": True})
        report = (await cluster.exact({"messages": [*messages, user("Third.")]})).reused
        assert (report.route, report.reason) == (Route.COLD, Reason.NO_HANDLE)
        assert cluster.router.fleet.counters.unreachable_pins == 1
        cluster.pinned_until_ttl = True


async def test_a_chat_stream_of_vllm_033_shows_its_handle_without_our_plugin() -> None:
    """Not the ids of the answer: what is proven ends with the prompt."""
    async with run_cluster(engine={"stream_handles": "off", "vllm_version": "0.33.0"}) as cluster:
        messages = await first_turn(cluster, conversation="other")
        await cluster.exact({"messages": messages, "stream": True})
        report = (await cluster.exact({"messages": [*messages, user("Third.")]})).reused
        assert (report.route, report.reason) == (Route.WARM, None)
        assert cluster.router.fleet.counters.unreachable_pins == 0


async def test_a_turn_that_ended_at_a_stop_string_leaves_nothing_to_read() -> None:
    async with run_cluster() as cluster:
        messages = opening()
        answer = await cluster.exact({"messages": messages, "stop": [" "]})
        messages += [answer.message, user("Second. " + STORY)]
        assert (await cluster.exact({"messages": messages})).reused.reason is Reason.NO_HANDLE


async def test_several_engines_of_a_role_work_together() -> None:
    async with run_cluster(prefill=2, decode=2, p=NO_CACHE) as cluster:
        histories = [[system(f"{n} {STORY * 2}"), user("Begin. " + STORY)] for n in range(4)]
        for _ in range(3):
            for n, messages in enumerate(histories):
                answer = await cluster.exact({"messages": messages}, conversation=str(n))
                messages += [answer.message, user("Go on. " + STORY)]
        assert [r.route for r in cluster.reports] == [*[Route.COLD] * 4, *[Route.WARM] * 8]


async def test_one_header_with_two_ids_is_refused() -> None:
    async with run_cluster() as cluster:
        two = [("X-Conversation-ID", "first"), ("x-conversation-id", "second")]
        answer = await cluster.ask({"messages": opening()}, conversation=None, headers=two)
        same = await cluster.ask({"messages": opening()}, conversation=None, headers=[two[0], two[0]])
    assert (answer.status, same.status) == (400, 200)
    assert "is there twice, with two ids" in answer.json["error"]["message"]


async def test_an_answer_names_engines_to_whoever_asks_for_its_report_and_to_nobody_else() -> None:
    async with run_cluster() as cluster:
        plain = await cluster.ask({"messages": opening()})
        asked = await cluster.ask({"messages": opening()}, headers=[("X-Backhaul-Report", "comment")], conversation="b")
    shown, whole = (answer.json["usage"]["backhaul"] for answer in (plain, asked))
    assert shown.keys() == whole.keys()
    assert (shown["prefill_engine"], shown["decode_engine"]) == ("(url withheld)", "(url withheld)")
    assert (whole["prefill_engine"], whole["decode_engine"]) == (cluster.p.url, cluster.d.url)
