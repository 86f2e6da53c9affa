"""A turn's prefill leg, step by step as vLLM's scheduler asks: what is claimed, read or given back, and why not."""

from __future__ import annotations

import time
from typing import Any

import pytest
from backhaul_connector.claims import Claim, Claims, Target
from backhaul_connector.prefill_side import Prefill, PrefillSide
from backhaul_protocol.lease_channel import Answer
from legs import BLOCK, Request, handle, hashes, shape

READING = (4 * BLOCK, True)
ASK_AGAIN = (None, False)
NOTHING = (0, False)
PEER = {"remote_port": 777, "tp_size": 2, "other": 9}


class Channel(Claims):
    """Claims that are answered when the test says so."""

    def __init__(self) -> None:
        self.timeout_s = 10.0
        self.hold_s = 30.0
        self.made: list[Claim] = []
        self.finished: list[tuple[Claim, bool]] = []
        self.declined: list[Target] = []

    def claim(self, target: Target, blocks: int, last_hash: bytes, tail: bytes | None = None) -> Claim:
        self.made.append(Claim(target, blocks, last_hash, self.hold_s, tail))
        return self.made[-1]

    def grant(self, *, age_s: float = 0.0, **other: Any) -> None:
        claim = self.made[-1]
        blocks = claim.message.blocks
        fields: dict[str, Any] = {"block_ids": [list(range(50, 50 + blocks))], "tokens": blocks * BLOCK, "peer": PEER}
        claim.settle(Answer(ok=True, **{**fields, **other}), time.monotonic() - age_s)

    def refuse(self, why: str) -> None:
        self.made[-1].settle(Answer(ok=False, why=why), 0.0)

    def done(self, claim: Claim, *, read: bool) -> None:
        self.finished.append((claim, read))

    def decline(self, target: Target) -> None:
        self.declined.append(target)


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def side(channel: Channel) -> PrefillSide:
    return PrefillSide(shape(), channel)


def admitted(side: PrefillSide, prompt: str = "abcdef", **params: Any) -> tuple[Request, Prefill]:
    request = Request(prompt, {**handle("abcdxyz"), **params})
    return request, side.admit(request, request.kv_transfer_params)


def why(side: PrefillSide, request: Request, prefill: Prefill) -> object:
    account: dict[str, Any] = side.answer(request, prefill)["backhaul"]["account"]
    assert (account["pulled"] > 0) == (account["why"] is None)
    assert "remote_block_ids" not in request.kv_transfer_params
    return account["why"]


def test_a_claim_is_made_waited_for_and_used(side: PrefillSide, channel: Channel) -> None:
    request, prefill = admitted(side)
    assert side.match(request, prefill, 0) == ASK_AGAIN
    assert side.match(request, prefill, 0) == ASK_AGAIN
    (claim,) = channel.made
    assert claim.target == Target("d-host", 4000, "lease", "D", "e", shared=True)
    assert (claim.message.blocks, claim.message.hash) == (4, hashes("abcd", 4 * BLOCK)[-1])
    channel.grant()
    assert side.match(request, prefill, 0) == READING
    params = request.kv_transfer_params
    assert (params["remote_block_ids"], params["remote_num_tokens"]) == ([[50, 51, 52, 53]], 4 * BLOCK)
    assert (params["remote_port"], params["tp_size"], "other" in params) == (777, 2, False)
    assert side.start(request, prefill, 4 * BLOCK) == pytest.approx(claim.ends - 2.0)
    side.ended(prefill, failed=False)
    assert channel.finished == [(claim, True)]
    answer = side.answer(request, prefill)["backhaul"]
    account = answer["account"]
    assert account == {
        "prompt": 101,
        "offered": 7 * BLOCK,
        "verified": 4 * BLOCK,
        "local": 0,
        "pulled": 4 * BLOCK,
        "computed": 101 - 4 * BLOCK,
        "bytes": 4000,
        "read_ms": account["read_ms"],
        "claim_ms": account["claim_ms"],
        "why": None,
    }
    assert (answer["prompt_tokens"], answer["prompt_hash"]) == (101, hashes("abcdef", 96)[-1].hex())
    assert side.counts["backhaul_verifications", "verified"] == 1


def test_a_claim_that_nobody_answers_is_not_waited_for_any_longer(side: PrefillSide, channel: Channel) -> None:
    """As when its thread waits for the resolver."""
    request, prefill = admitted(side)
    assert side.match(request, prefill, 0) == ASK_AGAIN
    channel.made[0].made -= 5.0
    assert side.match(request, prefill, 0) == ASK_AGAIN
    channel.made[0].made -= 6.0
    assert side.match(request, prefill, 0) == NOTHING
    assert channel.finished == [(channel.made[0], False)]
    assert prefill.account.claim_ms is None
    assert why(side, request, prefill) == "unreachable"


def test_only_what_is_not_there_already_is_read(side: PrefillSide, channel: Channel) -> None:
    request, prefill = admitted(side)
    side.match(request, prefill, BLOCK)
    channel.grant()
    assert side.match(request, prefill, 2 * BLOCK) == (2 * BLOCK, True)


@pytest.mark.parametrize(("local", "reason"), [(4, "local_hit"), (5, "local_hit"), (3, "below_threshold")])
def test_too_little_to_read_is_not_claimed(side: PrefillSide, channel: Channel, local: int, reason: str) -> None:
    request, prefill = admitted(side, **handle("abcdxyz", shared=False))
    assert side.match(request, prefill, local * BLOCK) == NOTHING
    assert channel.made == []
    assert [target.lease for target in channel.declined] == ["lease"]
    assert why(side, request, prefill) == reason


@pytest.mark.parametrize("reason", ["released", "expired", "differs", "unreachable", "epoch"])
def test_a_refused_claim_is_computed_instead(side: PrefillSide, channel: Channel, reason: str) -> None:
    request, prefill = admitted(side)
    side.match(request, prefill, 0)
    channel.refuse(reason)
    assert side.match(request, prefill, 0) == NOTHING
    assert side.match(request, prefill, 0) == NOTHING
    assert channel.declined == []
    assert why(side, request, prefill) == reason


@pytest.mark.parametrize(
    "lie", [{"tokens": 3 * BLOCK}, {"block_ids": [[1, 2, 3]]}, {"block_ids": []}, {"block_ids": [[1, 2, 3, 4]] * 2}]
)
def test_a_grant_of_other_blocks_than_asked_for_is_not_used(
    side: PrefillSide, channel: Channel, lie: dict[str, Any]
) -> None:
    request, prefill = admitted(side)
    side.match(request, prefill, 0)
    channel.grant(**lie)
    assert side.match(request, prefill, 0) == NOTHING
    assert [read for _, read in channel.finished] == [False]
    assert why(side, request, prefill) == "malformed"


def test_a_grant_that_waited_too_long_for_its_request_is_asked_for_again(side: PrefillSide, channel: Channel) -> None:
    request, prefill = admitted(side)
    side.match(request, prefill, 0)
    channel.grant(age_s=16.0)
    assert side.match(request, prefill, 0) == ASK_AGAIN
    assert len(channel.made) == 2
    assert channel.finished == [(channel.made[0], False)]
    channel.grant()
    assert side.match(request, prefill, 0) == READING


def test_a_request_does_not_wait_for_ever_for_a_grant_that_comes_in_time(side: PrefillSide, channel: Channel) -> None:
    """As with a short `hold_s` and long steps."""
    request, prefill = admitted(side)
    assert side.match(request, prefill, 0) == ASK_AGAIN
    channel.grant(age_s=16.0)
    assert side.match(request, prefill, 0) == ASK_AGAIN
    channel.grant(age_s=16.0)
    assert side.match(request, prefill, 0) == NOTHING
    assert channel.finished == [(claim, False) for claim in channel.made]
    assert why(side, request, prefill) == "hold_ended"


def test_a_request_that_waits_for_blocks_keeps_its_claim_fresh(side: PrefillSide, channel: Channel) -> None:
    request, prefill = admitted(side)
    for _ in range(5):
        assert side.match(request, prefill, 0) == ASK_AGAIN
        channel.grant()
        assert side.match(request, prefill, 0) == READING
        channel.made[-1].ends -= 16.0


def test_a_request_that_ends_before_its_read_gives_the_claim_back(side: PrefillSide, channel: Channel) -> None:
    request, prefill = admitted(side)
    side.match(request, prefill, 0)
    side.abandon(prefill)
    side.abandon(prefill)
    assert channel.finished == [(channel.made[0], False)]


def test_after_a_failed_read_the_prompt_is_computed_and_never_promised_again(
    side: PrefillSide, channel: Channel
) -> None:
    request, prefill = admitted(side)
    side.match(request, prefill, 0)
    channel.grant()
    side.match(request, prefill, 0)
    side.start(request, prefill, 4 * BLOCK)
    request.kv_transfer_params["_remote_blocks_processed"] = True
    side.ended(prefill, failed=True)
    assert channel.finished == [(channel.made[0], False)]
    assert side.match(request, prefill, BLOCK) == NOTHING
    account = side.answer(request, prefill)["backhaul"]["account"]
    assert (account["pulled"], account["bytes"], account["local"], account["why"]) == (0, 0, BLOCK, "read_failed")


def test_what_was_read_and_taken_away_again_is_no_reuse(side: PrefillSide, channel: Channel) -> None:
    """As when vLLM preempts a request: it asks anew, from the first token."""
    request, prefill = admitted(side)
    side.match(request, prefill, 0)
    channel.grant()
    side.match(request, prefill, 0)
    side.start(request, prefill, 4 * BLOCK)
    request.kv_transfer_params["_remote_blocks_processed"] = True
    side.ended(prefill, failed=False)
    assert side.match(request, prefill, BLOCK) == NOTHING
    account = side.answer(request, prefill)["backhaul"]["account"]
    assert (account["pulled"], account["local"], account["why"]) == (0, BLOCK, "read_failed")
    assert account["computed"] == account["prompt"] - BLOCK


def test_a_read_that_ends_with_its_hold_says_so(side: PrefillSide, channel: Channel) -> None:
    request, prefill = admitted(side)
    side.match(request, prefill, 0)
    channel.grant(age_s=5.0)
    assert side.match(request, prefill, 0) == READING
    side.start(request, prefill, 4 * BLOCK)
    channel.made[0].ends -= 24.0
    side.ended(prefill, failed=True)
    assert prefill.account.why == "hold_ended"


def test_what_vllm_does_not_read_after_all_is_given_back(side: PrefillSide, channel: Channel) -> None:
    request, prefill = admitted(side)
    side.match(request, prefill, 0)
    channel.grant()
    side.match(request, prefill, 0)
    assert side.start(request, prefill, 0) is None
    assert channel.finished == [(channel.made[0], False)]
    assert why(side, request, prefill) == "unsupported"


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (handle("xbcd"), "diverged"),
        (handle("abcd", remote_port="x"), "malformed"),
        (handle("abcd", backhaul=None), "no_digests"),
        (handle("abcd", backhaul={"version": 1, "digests": "!!!!"}), "malformed"),
        (handle("abcd", backhaul={"version": 1, "proof": "tokens"}, remote_block_ids=[[1, 2]]), "malformed"),
        (handle("abcd", backhaul={"version": 1, "proof": "tokens"}, remote_block_ids=[[1, 2, 3, 4]] * 2), "malformed"),
    ],
)
def test_what_cannot_be_read_is_stripped_at_once(
    side: PrefillSide, channel: Channel, params: dict[str, Any], reason: str
) -> None:
    request, prefill = admitted(side, **params)
    assert side.match(request, prefill, 0) == NOTHING
    assert channel.made == []
    assert why(side, request, prefill) == reason


@pytest.mark.parametrize(
    ("other", "reason"), [({"bidirectional": False}, "bidirectional_off"), ({"unsupported": "x"}, "unsupported")]
)
def test_an_engine_that_does_not_read_says_why(channel: Channel, other: dict[str, Any], reason: str) -> None:
    side = PrefillSide(shape(**other), channel)
    request, prefill = admitted(side)
    assert why(side, request, prefill) == reason


def test_the_whole_prompt_is_never_read_since_one_token_must_be_computed(side: PrefillSide, channel: Channel) -> None:
    request = Request("abcd", handle("abcdxyz"), extra_tokens=0)
    prefill = side.admit(request, request.kv_transfer_params)
    side.match(request, prefill, 0)
    assert channel.made[0].message.blocks == 3


def test_a_stock_handle_is_cut_to_what_the_router_has_proven(side: PrefillSide, channel: Channel) -> None:
    request, prefill = admitted(side, **handle("abcdef", backhaul={"version": 1, "proof": "tokens"}))
    assert side.match(request, prefill, 0) == (6 * BLOCK, True)
    assert request.kv_transfer_params["remote_block_ids"] == [[0, 1, 2, 3, 4, 5]]
    assert channel.made == []
    assert side.start(request, prefill, 6 * BLOCK) is None


def test_a_first_turn_offers_nothing(side: PrefillSide) -> None:
    request = Request("abc", {"do_remote_decode": True, "remote_block_ids": None})
    prefill = side.admit(request, request.kv_transfer_params)
    assert side.match(request, prefill, 0) == NOTHING
    account = side.answer(request, prefill)["backhaul"]["account"]
    assert (account["offered"], account["why"]) == (0, None)
    assert not side.counts
