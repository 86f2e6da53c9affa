"""Handles: what they say, what a read of one gives, and when blocks are held and let go.

Prompts are token ids in a range that every vocabulary has. Answers are compared with those of an engine that computed
the prompt itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from .engines import Engines, Json

_HANDLE = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
}


def handle_fields(engines: Engines) -> set[str]:
    """0.33 counts how often an engine has registered its KV with NIXL, which it does anew after each sleep."""
    return _HANDLE | ({"remote_registration_generation"} if engines.speaks_033 else set())


def _prompt(length: int, seed: int = 1) -> list[int]:
    return [40 + (i * (7 + 2 * seed) + i * i * seed) % 80 for i in range(length)]


async def prefill_handle_tells_d_where_the_prompts_kv_lies(engines: Engines) -> None:
    prompt, size = _prompt(300), await engines.block_size()
    answer = await engines.prefill(prompt)
    handle = answer.handle
    assert handle.keys() == handle_fields(engines) | {"remote_prefill_cached_tokens"}
    assert (handle["do_remote_prefill"], handle["do_remote_decode"]) == (True, False)
    assert handle["remote_num_tokens"] == 300
    assert [len(group) for group in handle["remote_block_ids"]] == [-(-300 // size)]
    assert handle["remote_blocks_expiry_time"] is None
    assert handle["remote_prefill_cached_tokens"] == answer.cached == 0
    assert (handle["tp_size"], handle["dcp_size"], handle["pp_size"], handle["transfer_mode"]) == (1, 1, 1, "pull")
    await engines.decode_and_drop(prompt, handle)


async def decode_handle_covers_prompt_and_answer_but_for_the_last_token(engines: Engines) -> None:
    prompt, size = _prompt(300), await engines.block_size()
    answer = await engines.turn(prompt, max_tokens=40)
    handle = answer.handle
    assert handle.keys() == handle_fields(engines)
    assert (handle["do_remote_prefill"], handle["do_remote_decode"]) == (False, True)
    assert handle["remote_num_tokens"] == 300 + 40 - 1
    assert [len(group) for group in handle["remote_block_ids"]] == [-(-339 // size)]
    assert isinstance(handle["remote_blocks_expiry_time"], float)
    await engines.release(handle)


async def decode_on_p_s_blocks_answers_as_if_it_had_computed_them(engines: Engines) -> None:
    prompt = _prompt(310)
    answer = await engines.turn(prompt)
    assert answer.choice["token_ids"] == await engines.reference(prompt)
    await engines.release(answer.handle)


async def decode_reports_p_s_cached_tokens_when_they_are_forwarded(engines: Engines) -> None:
    prompt = _prompt(200)
    handle = (await engines.prefill(prompt)).handle | {"remote_prefill_cached_tokens": 123}
    answer = await engines.decode(prompt, handle)
    assert answer.cached == 123
    await engines.release(answer.handle)


async def warm_turn_reads_the_whole_history_and_is_right(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    first = _prompt(300)
    one = await engines.turn(first)
    second = [*first, *one.choice["token_ids"], *_prompt(50, seed=2)]
    p = await engines.prefill(second, one.handle)
    assert p.cached == one.handle["remote_num_tokens"] == 323
    two = await engines.decode(second, p.handle)
    assert two.choice["token_ids"] == await engines.reference(second)
    await engines.release(two.handle)
    await engines.wait_for_usage(engines.decode_url, before)


async def cut_handle_of_another_branch_is_right(engines: Engines) -> None:
    first, size = _prompt(320), await engines.block_size()
    one = await engines.turn(first)
    common = 6 * size
    second = [*first[:common], *_prompt(150, seed=3)]
    p = await engines.prefill(second, _cut(one.handle, 6, size))
    assert p.cached == common
    two = await engines.decode(second, p.handle)
    assert two.choice["token_ids"] == await engines.reference(second)
    await engines.release(two.handle)


async def cut_handle_frees_all_of_its_blocks_once_it_was_read(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    first, size = _prompt(320), await engines.block_size()
    one = await engines.turn(first)
    await engines.prefill_and_drop([*first[: 4 * size], 41], _cut(one.handle, 4, size))
    await engines.wait_for_usage(engines.decode_url, before)


async def handle_of_another_prompt_is_read_without_a_word(engines: Engines) -> None:
    one = await engines.turn(_prompt(300))
    other = _prompt(350, seed=4)
    p = await engines.prefill(other, one.handle)
    assert p.cached == one.handle["remote_num_tokens"]
    two = await engines.decode(other, p.handle)
    assert two.choice["token_ids"] != await engines.reference(other)
    await engines.release(two.handle)


async def handle_longer_than_the_prompt_is_read_from_the_wrong_end(engines: Engines) -> None:
    first = _prompt(400)
    one = await engines.turn(first)
    shorter = first[:200]
    p = await engines.prefill(shorter, one.handle)
    two = await engines.decode(shorter, p.handle)
    assert two.choice["token_ids"] != await engines.reference(shorter)
    await engines.release(two.handle)


async def second_read_of_a_handle_is_answered_and_counted(engines: Engines) -> None:
    name = "vllm:nixl_num_notifications_after_expiry_total"
    before = await engines.metric(engines.decode_url, name)
    first = _prompt(300)
    one = await engines.turn(first)
    second = [*first, *one.choice["token_ids"], *_prompt(40, seed=2)]
    for _ in range(2):
        await engines.prefill_and_drop(second, one.handle, cache_salt=uuid.uuid4().hex)
    assert await engines.wait_for_more(engines.decode_url, name, before) == before + 1


async def refused_request_frees_the_handle_at_once(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    answer = await engines.turn(_prompt(300))
    assert await engines.wait_for_more(engines.decode_url, "vllm:kv_cache_usage_perc", before) > before
    refused = await engines.release(answer.handle)
    assert refused.status == 404
    await engines.wait_for_usage(engines.decode_url, before)


async def read_below_the_threshold_is_skipped_and_frees_the_handle(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    answer = await engines.turn(_prompt(300))
    p = await engines.prefill(_prompt(20, seed=5), answer.handle)
    assert p.cached == 0
    await engines.wait_for_usage(engines.decode_url, before)
    await engines.decode_and_drop(_prompt(20, seed=5), p.handle)


async def stop_string_leaves_no_handle_and_nothing_pinned(engines: Engines) -> None:
    before = await engines.usage(engines.decode_url)
    prompt = _prompt(200)
    text = (await engines.complete(engines.decode_url, prompt, max_tokens=24, ignore_eos=True)).choice["text"]
    stop = text[3:6]
    handle = (await engines.prefill(prompt)).handle
    answer = await engines.decode(prompt, handle, stop=[stop])
    assert (answer.choice["finish_reason"], answer.choice["stop_reason"]) == ("stop", stop)
    assert answer.choice["text"] == text[: text.index(stop)]
    assert answer.json["kv_transfer_params"] is None
    await engines.wait_for_usage(engines.decode_url, before)


async def stop_token_leaves_a_handle(engines: Engines) -> None:
    prompt = _prompt(200)
    ids = await engines.reference(prompt)
    handle = (await engines.prefill(prompt)).handle
    answer = await engines.decode(prompt, handle, stop_token_ids=[ids[9]])
    generated = answer.choice["token_ids"]
    assert answer.choice["finish_reason"] == "stop"
    assert generated[-1] == ids[9]
    assert answer.handle["remote_num_tokens"] == 200 + len(generated) - 1
    await engines.release(answer.handle)


async def expired_handle_is_declined_with_500(engines: Engines) -> None:
    name = "vllm:nixl_num_kv_expired_reqs_total"
    expired = await engines.metric(engines.prefill_url, name)
    first = _prompt(300)
    one = await engines.turn(first)
    stale = one.handle | {"remote_blocks_expiry_time": one.handle["remote_blocks_expiry_time"] - 10_000}
    refused = await engines.complete(engines.prefill_url, [*first, 41], max_tokens=1, kv_transfer_params=stale)
    assert refused.status == 500
    assert refused.error == {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
    assert await engines.wait_for_more(engines.prefill_url, name, expired) == expired + 1
    await engines.release(one.handle)


async def handle_of_a_restarted_engine_is_a_500(engines: Engines) -> None:
    first = _prompt(300)
    one = await engines.turn(first)
    gone = one.handle | {"remote_engine_id": str(uuid.uuid4())}
    refused = await engines.complete(engines.prefill_url, [*first, 41], max_tokens=1, kv_transfer_params=gone)
    assert (refused.status, refused.error["message"]) == (500, "Internal server error")
    await engines.release(one.handle)


async def d_s_prefix_cache_has_what_a_released_turn_left(engines: Engines) -> None:
    prompt, size = _prompt(300), await engines.block_size()
    one = await engines.turn(prompt)
    await engines.release(one.handle)
    longer = [*prompt, *one.choice["token_ids"], *_prompt(30, seed=2)]
    again = await engines.complete(engines.decode_url, longer, max_tokens=24, ignore_eos=True, return_token_ids=True)
    assert again.cached == 323 // size * size
    assert again.choice["token_ids"] == await engines.reference(longer)


async def cache_salt_keeps_prefix_caches_apart(engines: Engines) -> None:
    prompt = _prompt(300)
    for salt, cached in (("one", False), ("one", True), ("two", False)):
        answer = await engines.complete(engines.decode_url, prompt, max_tokens=1, cache_salt=f"{engines.salt}-{salt}")
        assert (answer.cached > 0) == cached, salt


async def bytes_read_are_counted_by_the_reader(engines: Engines) -> None:
    name = "vllm:nixl_bytes_transferred_count"
    before = await engines.metric(engines.decode_url, name)
    await engines.turn_and_release(_prompt(200))
    assert await engines.wait_for_more(engines.decode_url, name, before) == before + 1


def _cut(handle: Json, blocks: int, size: int) -> Json:
    """The handle for its leading blocks: token count and every list of blocks together."""
    lists: Sequence[list[int]] = handle["remote_block_ids"]
    return handle | {"remote_block_ids": [ids[:blocks] for ids in lists], "remote_num_tokens": blocks * size}
