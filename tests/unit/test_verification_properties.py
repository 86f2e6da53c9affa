"""What may be reused of a sequence for a prompt, over random tokens, edits and block sizes: never a token that differs, never
less than what the rules allow, whichever core decides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from backhaul_connector import locators
from backhaul_connector.handles import Handle
from backhaul_connector.lease_table import Grant, LeaseTable
from backhaul_protocol.lease_channel import Claim
from backhaul_router import wire
from backhaul_router.ledger import digests
from backhaul_router.ledger.records import Held
from backhaul_router.report import Reason, Route
from backhaul_router.turn.placement import Placement, Prompt, place, reusable_blocks
from core_values import branch, config, fleet, held, taken
from hypothesis import given
from hypothesis import strategies as st

BLOCKS = st.sampled_from([1, 2, 16, 32])
# Few distinct values, so that a wrong token is often the right one of another place.
IDS = st.lists(st.sampled_from([0, 1, 2, 2**32 - 1]), max_size=200)


@st.composite
def edited(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A sequence that D ran, and a prompt that was made of it by some cuts, insertions and changed tokens."""
    ran = draw(IDS) or [1]
    prompt = list(ran)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(prompt)))
        match draw(st.sampled_from(["cut", "insert", "change", "end", "extend"])):
            case "cut":
                del prompt[at : at + draw(st.integers(0, 40))]
            case "insert":
                prompt[at:at] = draw(IDS)
            case "change" if at < len(prompt):
                prompt[at] ^= 1
            case "end":
                del prompt[at:]
            case _:
                prompt += draw(IDS)
    return ran, prompt or [0]  # engines refuse prompts without a token


def same(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- the router's proof by tokens -----------------------------------------------------------------------------------------


def prompt_of(ids: Sequence[int], block: int) -> Prompt:
    return Prompt(1000, len(ids), digests.block_chain(ids, block), block)


def record_of(ids: Sequence[int], block: int, **fields: Any) -> Any:
    return branch(ids=ids, block_size=block, blocks=digests.block_chain(ids, block), **fields)


@given(edited(), BLOCKS, st.integers(0, 250))
def test_by_tokens_the_whole_common_blocks_that_decode_holds_and_no_others(
    pair: tuple[list[int], list[int]], block: int, holds: int
) -> None:
    ran, ids = pair
    found = reusable_blocks(prompt_of(ids, block), record_of(ran, block), holds) * block
    assert ids[:found] == ran[:found]
    assert found == min(same(ran, ids), holds, len(ids) - 1) // block * block


@given(edited(), BLOCKS, IDS)
def test_it_makes_no_difference_by_way_of_which_sequence_a_prompt_was_hashed(
    pair: tuple[list[int], list[int]], block: int, answer: list[int]
) -> None:
    ran, ids = pair
    prompt = digests.block_chain(ids, block, digests.block_chain(ran, block))
    assert prompt == digests.block_chain(ids, block)
    assert digests.extended(prompt, ids, answer, block) == digests.block_chain([*ids, *answer], block)


@given(edited(), BLOCKS, st.integers(0, 150), st.booleans())
def test_a_warm_turn_reads_at_least_the_threshold_and_another_says_why_not(
    pair: tuple[list[int], list[int]], block: int, threshold: int, cut_short: bool
) -> None:
    ran, ids = pair
    holds = -(-len(ran) // 2) if cut_short else len(ran)
    history = taken(record_of(ran, block, held=held(tokens=holds)), common=1)
    settings = config(local_max_tokens=0, kv_recompute_threshold=threshold)
    found = place(prompt_of(ids, block), history, fleet(block_size=block), settings)
    assert isinstance(found, Placement)
    blocks = min(same(ran, ids), holds, len(ids) - 1) // block
    if found.route is Route.WARM:
        assert found.blocks == blocks > 0
        assert blocks * block >= threshold
    else:
        assert found.reason in (Reason.DIVERGED, Reason.BELOW_THRESHOLD, Reason.NO_PROOF)
        assert blocks == 0 or blocks * block < threshold


@given(edited(), BLOCKS, st.integers(2, 4))
def test_several_groups_of_blocks_are_never_read_in_part(
    pair: tuple[list[int], list[int]], block: int, groups: int
) -> None:
    """Without the connector on both sides: a group that holds the sequence's end alone cannot be cut."""
    ran, ids = pair
    hybrid: Held = held(tokens=len(ran), remote_block_ids=[list(range(len(ran) // block + 1)), *[[1]] * (groups - 1)])
    history = taken(record_of(ran, block, held=hybrid), common=1)
    found = place(prompt_of(ids, block), history, fleet(block_size=block), config(local_max_tokens=0))
    assert isinstance(found, Placement)
    assert found.route is Route.COLD


@given(st.integers(1, 60), st.data(), BLOCKS)
def test_a_cut_handle_ends_where_its_token_count_says(whole: int, data: st.DataObject, block: int) -> None:
    blocks = data.draw(st.integers(1, whole))
    handle = held(tokens=whole * block, remote_block_ids=[list(range(7, 7 + whole))], unknown={"kept": 1}).handle
    cut = json.loads(wire.join(wire.cut_handle(handle, blocks, block)))
    before = json.loads(handle.params)
    assert cut["remote_num_tokens"] == blocks * block
    assert cut["remote_block_ids"] == [before["remote_block_ids"][0][:blocks]]
    changed = {"remote_num_tokens", "remote_block_ids"}
    assert {key: value for key, value in cut.items() if key not in changed | {"backhaul"}} == {
        key: value for key, value in before.items() if key not in changed | {"backhaul"}
    }


# --- the connector's proof by block hashes --------------------------------------------------------------------------------


def block_hashes(ids: Sequence[int], block: int, salt: str = "") -> list[bytes]:
    """Chained as vLLM chains them: each covers its block, all before it, and what else the first block's key holds."""
    chain, last = [], salt.encode()
    for end in range(block, len(ids) + 1, block):
        last = hashlib.sha256(last + repr(ids[end - block : end]).encode()).digest()
        chain.append(last)
    return chain


@given(edited(), BLOCKS)
def test_locators_lead_to_the_whole_common_blocks(pair: tuple[list[int], list[int]], block: int) -> None:
    ran, ids = pair
    published = locators.read(locators.publish(block_hashes(ran, block)))
    assert published is not None
    assert locators.common(published, block_hashes(ids, block)) == same(ran, ids) // block


@given(IDS, BLOCKS)
def test_another_salt_or_adapter_shares_no_block(ids: list[int], block: int) -> None:
    published = locators.read(locators.publish(block_hashes(ids, block, "a")))
    assert published is not None
    assert locators.common(published, block_hashes(ids, block, "b")) == 0


@given(IDS, BLOCKS, st.binary(max_size=200))
def test_forged_locators_lead_no_further_than_the_prompts_own_blocks(ids: list[int], block: int, forged: bytes) -> None:
    hashes = block_hashes(ids, block)
    found = locators.common(forged, hashes)
    assert b"".join(one[: locators.LOCATOR_BYTES] for one in hashes[:found]) == forged[: found * locators.LOCATOR_BYTES]


@given(st.text(max_size=40))
def test_what_is_no_list_of_locators_is_none_and_no_error(text: str) -> None:
    read = locators.read(text)
    assert read is None or len(read) % locators.LOCATOR_BYTES == 0


@given(edited(), st.sampled_from([(16, 1), (32, 2), (48, 3)]))
def test_hashes_of_smaller_units_are_taken_at_block_ends(
    pair: tuple[list[int], list[int]], sizes: tuple[int, int]
) -> None:
    """vLLM may hash in smaller units than it stores."""
    ran, ids = pair
    block, units = sizes
    ours, theirs = (
        locators.whole_blocks(block_hashes(one, block // units), units, len(one) // block) for one in (ids, ran)
    )
    assert (len(ours), len(theirs)) == (len(ids) // block, len(ran) // block)
    published = locators.read(locators.publish(theirs))
    assert published is not None
    assert locators.common(published, ours) == same(ran, ids) // block


@given(edited(), BLOCKS, st.integers(1, 20), st.data())
def test_a_claim_is_granted_only_for_blocks_that_hold_the_prompts_own_tokens(
    pair: tuple[list[int], list[int]], block: int, asked: int, data: st.DataObject
) -> None:
    """Whatever the locators said: P names its own hash of the last block that it wants, and D compares all of it."""
    ran, ids = pair
    theirs, mine = block_hashes(ran, block), block_hashes(ids, block)
    if not theirs or not mine:
        return
    asked = min(asked, len(mine))
    table = LeaseTable("D", 10_000)
    lists = [data.draw(st.permutations(range(len(theirs)))) for _ in range(data.draw(st.integers(1, 3)))]
    table.add("lease", theirs, lists, lists[0], block_size=block, ttl_s=60.0, shared=True)
    answer = table.claim(Claim(1, "lease", "D", table.epoch, asked, mine[asked - 1], hold_s=1.0, claim="c"))
    if ids[: asked * block] == ran[: asked * block]:
        assert answer == Grant([list(group[:asked]) for group in lists], asked * block)
    else:
        assert answer == ("differs" if asked <= len(theirs) else "malformed")


@given(BLOCKS, st.integers(1, 400), st.integers(1, 400), st.lists(st.integers(-2, 0), min_size=1, max_size=3))
def test_the_groups_of_a_handle_are_cut_together_or_not_at_all(
    block: int, held_tokens: int, wanted: int, missing: list[int]
) -> None:
    """A group with fewer blocks than the handle's tokens need holds the end of the sequence alone."""
    whole = -(-held_tokens // block)
    lists = [list(range(max(0, whole + less))) for less in missing]
    handle = Handle(lists, "engine", "request", "host", 1, remote_num_tokens=held_tokens)
    cut = handle.cut(block, wanted)
    if wanted > held_tokens or any(missing):
        assert cut is None
    else:
        assert cut == [group[: -(-wanted // block)] for group in lists]
