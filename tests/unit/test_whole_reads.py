"""Engines whose layers have sliding windows: what one keeps is read up to its very last token, or not at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from backhaul_connector.decode_side import Decode, DecodeSide
from backhaul_connector.handles import Handle
from backhaul_connector.lease_table import Grant, LeaseTable
from backhaul_connector.prefill_side import PrefillSide
from backhaul_connector.shape import NULL_BLOCK, Shape
from backhaul_protocol.account import DecodeAccount
from backhaul_protocol.messages import Asked
from hypothesis import assume, given
from hypothesis import strategies as st
from legs import BLOCK, Request, handle, hashes, shape
from test_prefill_side import ASK_AGAIN, NOTHING, Channel

WINDOW = 2 * BLOCK


def hybrid(**other: Any) -> Shape:
    """One group that keeps all, one with a window."""
    made: Shape = shape(groups=2, block_bytes=[1000, 10], windows=(0, WINDOW), **other)
    return made


def kept_by_vllm(tokens: int, window: int, block: int = BLOCK, first_id: int = 100) -> list[int]:
    """A group's list in vLLM's handle: the window's blocks, and one more before them, which may have been freed."""
    blocks = -(-tokens // block)
    freed = max(0, tokens - window + 1) // block
    ids = [NULL_BLOCK if i < freed else first_id + i for i in range(blocks)]
    return ids[-(-(-window // block) + 1) :]


def finished(leases: LeaseTable, prompt: str = "abcdef", generated: int = 20) -> tuple[Request, dict[str, Any]]:
    """A turn that D has run, and its handle."""
    d = DecodeSide(hybrid(), leases, ttl_s=480.0, port=4000, prompt_from_p=lambda tokens: tokens)
    request = Request(prompt, {}, generated=generated)
    request.block_hashes = hashes(prompt + "ghi", request.num_tokens)
    asked = Asked(version=1, shared=True)
    decode = Decode(DecodeAccount(request.num_prompt_tokens), asked, retain=True)
    tokens = d.kept_tokens(request, decode)
    assert tokens is not None
    assert tokens == request.num_tokens - 1
    blocks = -(-tokens // BLOCK)
    out = handle(prompt, remote_num_tokens=tokens)
    out["remote_block_ids"] = [list(range(1, blocks + 1)), kept_by_vllm(tokens, WINDOW)]
    return request, d.keep(request, decode, tokens, out["remote_block_ids"], out)


class Next(Request):
    """A prompt that goes on where a turn stopped."""

    def __init__(self, before: Request, params: Any, *, ids: list[int] | None = None, new: int = 30) -> None:
        self.ids = [*before.all_token_ids, *range(500, 500 + new)] if ids is None else ids
        super().__init__(before.prompt, params)
        self.block_hashes = before.block_hashes

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.ids)

    @property
    def all_token_ids(self) -> list[int]:
        return self.ids


@pytest.fixture
def leases() -> LeaseTable:
    return LeaseTable("D", 1000)


@pytest.fixture
def channel() -> Channel:
    return Channel()


def test_what_is_published_ends_with_the_last_token_and_begins_with_its_window(leases: LeaseTable) -> None:
    _, made = finished(leases)
    tokens = 6 * BLOCK + 5 + 20 - 1
    assert (made["backhaul"]["whole"], made["backhaul"]["tokens"], made["remote_num_tokens"]) == (True, tokens, tokens)
    first = (tokens - WINDOW + 1) // BLOCK
    assert made["remote_block_ids"] == [list(range(1, 9)), [100 + i for i in range(first, 8)]]


def test_a_prompt_that_goes_on_is_read_to_the_last_token(leases: LeaseTable, channel: Channel) -> None:
    request, made = finished(leases)
    tokens = made["backhaul"]["tokens"]
    p, prompt = (
        PrefillSide(hybrid(), channel),
        Next(request, {**made, "do_remote_decode": True, "remote_num_tokens": 0}),
    )
    prefill = p.admit(prompt, prompt.kv_transfer_params)
    assert p.match(prompt, prefill, 0) == ASK_AGAIN
    message = channel.made[0].message
    granted = leases.claim(msgspec.structs.replace(message, epoch=leases.epoch, lease="r", engine="D"))
    assert granted == Grant(made["remote_block_ids"], tokens)
    channel.grant(block_ids=granted.block_ids, tokens=granted.tokens)
    assert p.match(prompt, prefill, 0) == (tokens, True)
    assert prompt.kv_transfer_params["remote_num_tokens"] == tokens
    p.start(prompt, prefill, tokens)
    assert prefill.account.bytes == 8 * 1000 + 3 * 10
    assert (prefill.account.offered, prefill.account.verified, prefill.account.pulled) == (tokens, tokens, tokens)


@pytest.mark.parametrize(
    "change", ["the last token", "the first behind the last whole block", "ends there", "ends before"]
)
def test_a_prompt_that_does_not_go_on_exactly_there_is_not_read(
    leases: LeaseTable, channel: Channel, change: str
) -> None:
    request, made = finished(leases)
    tokens = made["backhaul"]["tokens"]
    ids = [*request.all_token_ids, *range(500, 530)]
    match change:
        case "the last token":
            ids[tokens - 1] += 1
        case "the first behind the last whole block":
            ids[tokens // BLOCK * BLOCK] += 1
        case "ends there":
            ids = ids[:tokens]
        case _:
            ids = ids[: tokens - 1]
    p, prompt = PrefillSide(hybrid(), channel), Next(request, dict(made), ids=ids)
    prefill = p.admit(prompt, prompt.kv_transfer_params)
    found = p.match(prompt, prefill, 0)
    if change.startswith("ends"):
        assert (found, prefill.account.why) == (NOTHING, "diverged")
        return
    message = channel.made[0].message
    asked = msgspec.structs.replace(message, epoch=leases.epoch, lease="r", engine="D")
    assert leases.claim(asked) == "differs"
    assert leases.claim(msgspec.structs.replace(asked, tail=None)) == "differs", "not even without a tail"


@pytest.mark.parametrize("wrong", [{"tokens": None}, {"tokens": 5}, {"tokens": 10_000}])
def test_an_offer_that_contradicts_itself_is_malformed(
    leases: LeaseTable, channel: Channel, wrong: dict[str, Any]
) -> None:
    request, made = finished(leases)
    p = PrefillSide(hybrid(), channel)
    prompt = Next(request, {**made, "backhaul": {**made["backhaul"], **wrong}})
    assert p.admit(prompt, prompt.kv_transfer_params).account.why == "malformed"


def test_an_engine_that_can_cut_does_not_read_what_cannot_be_cut(leases: LeaseTable, channel: Channel) -> None:
    request, made = finished(leases)
    prompt = Next(request, dict(made))
    assert PrefillSide(shape(groups=2), channel).admit(prompt, prompt.kv_transfer_params).account.why == "unsupported"


def test_nothing_is_kept_where_a_block_of_the_window_was_freed(leases: LeaseTable) -> None:
    """As when vLLM had gone on by more tokens than the answer has."""
    d = DecodeSide(hybrid(), leases, ttl_s=480.0, port=4000, prompt_from_p=lambda tokens: tokens)
    request = Request("abcdef", {})
    out = handle("abcdef", remote_num_tokens=100, remote_block_ids=[list(range(1, 8)), [NULL_BLOCK, NULL_BLOCK, 107]])
    made = d.keep(request, Decode(DecodeAccount(101), Asked(version=1), retain=True), 100, out["remote_block_ids"], out)
    assert (made.keys(), made["backhaul"].keys()) == ({"backhaul"}, {"version", "account"})
    assert leases.sweep() == {"r"}


@given(
    st.sampled_from([1, 4, 16]),
    st.integers(1, 90),
    st.integers(1, 200),
    st.integers(0, 20),
)
def test_a_window_is_cut_from_its_end_and_never_without_a_block_that_the_next_token_attends_to(
    block: int, window: int, tokens: int, more: int
) -> None:
    """vLLM's list reaches to `tokens + more`, of which the last few may not have been run for good."""
    one = Shape(block, 1, [1], 0, True, None, windows=(window,))
    ids = kept_by_vllm(tokens + more, window, block)
    cut = one.cut(Handle([ids], "e", "r", "h", 1, remote_num_tokens=tokens + more), tokens)
    attended = {100 + position // block for position in range(max(0, tokens - window + 1), tokens)}
    if cut is None:
        assert more > 0
        return
    assert attended <= set(cut[0])
    assert cut[0] == [100 + i for i in range(one.first_needed(0, tokens), -(-tokens // block))]
    assert one.is_exactly(cut, tokens)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 3))
def test_groups_are_cut_together_or_not_at_all(tokens: int, held: int, missing: int) -> None:
    assume(missing < -(-held // BLOCK))
    full = list(range(1, -(-held // BLOCK) + 1 - missing))
    found = hybrid().cut(Handle([full, kept_by_vllm(held, WINDOW)], "e", "r", "h", 1, remote_num_tokens=held), tokens)
    if held < tokens or missing:
        assert found is None
    elif held == tokens:
        assert found is not None
