"""Chained digests: equal exactly as far as what they cover is equal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from backhaul_router.ledger import digests
from hypothesis import given
from hypothesis import strategies as st

# Few distinct values, so that long common prefixes and near misses both happen.
IDS = st.lists(st.sampled_from([0, 1, 255, 256, 65_535, 2**32 - 1]), max_size=40)
PARTS = st.lists(st.sampled_from([b"", b"a", b"b", b"ab"]), max_size=12)
SIZES = st.sampled_from([1, 3, 16])


def same_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(PARTS, PARTS, PARTS)
def test_the_common_prefix_of_two_chains_is_that_of_their_parts(
    start: list[bytes], a: list[bytes], b: list[bytes]
) -> None:
    ours, theirs = start + a, start + b
    assert digests.common(digests.chain(ours), digests.chain(theirs)) == same_prefix(ours, theirs)


@given(SIZES, IDS, IDS, IDS)
def test_common_blocks_are_the_whole_blocks_of_the_common_tokens(
    size: int, start: list[int], a: list[int], b: list[int]
) -> None:
    ours, theirs = start + a, start + b
    found = digests.common(digests.block_chain(ours, size), digests.block_chain(theirs, size))
    assert found == same_prefix(ours, theirs) // size


@given(PARTS, PARTS)
def test_parts_do_not_run_together(a: list[bytes], b: list[bytes]) -> None:
    assert (digests.chain(a) == digests.chain(b)) == (a == b)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (15, 0), (16, 1), (17, 1), (31, 1), (32, 2)])
def test_only_whole_blocks_count(tokens: int, blocks: int) -> None:
    assert digests.count(digests.block_chain(range(tokens), 16)) == blocks


def test_nothing_is_common_with_nothing() -> None:
    assert digests.common(b"", b"") == 0
    assert digests.common(digests.chain([b"a"]), b"") == 0


@pytest.mark.parametrize("ids", [[-1], [2**32], [0] * 15 + [2**40]])
def test_what_is_no_token_id_cannot_be_digested(ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        digests.block_chain(ids, 16)


CHAINED = st.lists(st.integers(0, 3), max_size=4 * digests.SPAN)


@given(st.sampled_from([1, 2]), CHAINED, CHAINED, st.integers(0, 4 * digests.SPAN))
def test_long_sequences_have_the_whole_blocks_of_their_common_tokens_in_common(
    size: int, ids: list[int], other: list[int], shared: int
) -> None:
    other = ids[:shared] + other
    found = digests.common(digests.block_chain(ids, size), digests.block_chain(other, size))
    assert found == same_prefix(ids, other) // size


@given(st.sampled_from([1, 2]), CHAINED, CHAINED, st.integers(0, 4 * digests.SPAN))
def test_what_is_known_of_another_sequence_changes_no_chain(
    size: int, ids: list[int], other: list[int], shared: int
) -> None:
    known = digests.block_chain(ids[:shared] + other, size)
    assert digests.block_chain(ids, size, known) == digests.block_chain(ids, size)


@given(st.sampled_from([1, 2]), CHAINED, CHAINED)
def test_chains_go_on_where_they_ended(size: int, ids: list[int], more: list[int]) -> None:
    before = digests.block_chain(ids, size)
    assert digests.extended(before, ids, more, size) == digests.block_chain(ids + more, size)


def test_blocks_of_a_known_prefix_are_not_hashed_again() -> None:
    ids, span = range(2 * digests.SPAN + 1), digests.SPAN * digests.SIZE
    known = digests.block_chain(ids, 1)
    unlike = b"".join(bytes(span - digests.SIZE) + known[end - digests.SIZE : end] for end in (span, 2 * span))
    assert digests.block_chain(ids, 1, unlike)[: 2 * span] == unlike


@pytest.mark.parametrize("tokens", [1, 511, 512, 1_024, 100_000])
def test_in_blocks_of_16_they_take_at_most_a_byte_a_token(tokens: int) -> None:
    assert len(digests.block_chain(range(tokens), 16)) <= tokens
