"""Where a turn runs, and the reason that is given for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from backhaul_router.fleet.engine import Role
from backhaul_router.fleet.fleet import Fleet
from backhaul_router.ledger import digests
from backhaul_router.ledger.records import Held, Taken
from backhaul_router.report import Proof, Reason, Route
from backhaul_router.turn.placement import NoEngine, Placement, Prompt, needs_ids, pick_engines, place, reusable_blocks
from core_values import BLOCK, D1, D2, P1, P2, branch, config, engine, fleet, held, leased, taken

RAN = list(range(1000, 1256))
"""What the decode engine ran: sixteen blocks."""


def prompt(ids: Sequence[int] | None = None) -> Prompt:
    if ids is None:
        return Prompt(1000)
    return Prompt(1000, len(ids), digests.block_chain(ids, BLOCK), BLOCK)


def left(of: Sequence[int] = RAN, *, common: int = 1, handle: Held | None = None, **fields: Any) -> Taken:
    """A branch that ran `of`, all of which its handle holds."""
    return taken(branch(ids=of, held=handle or held(tokens=len(of)), **fields), common=common)


def put(
    ids: Sequence[int] | None,
    history: Taken,
    on: Fleet | None = None,
    *,
    cfg: dict[str, Any] | None = None,
    **args: Any,
) -> Placement | NoEngine:
    return place(prompt(ids), history, on or fleet(), config(**{"local_max_tokens": 0, **(cfg or {})}), **args)


def placed(ids: Sequence[int] | None, history: Taken, on: Fleet | None = None, **args: Any) -> Placement:
    found = put(ids, history, on, **args)
    assert isinstance(found, Placement)
    return found


LONG = [*RAN, *range(500)]
"""A strict extension by far more than `local` would take."""


# --- warm ----------------------------------------------------------------------------------------------------------------


def test_an_extension_is_warm_and_reads_what_decode_holds() -> None:
    found = placed(LONG, left())
    assert (found.route, found.reason, found.proof, found.blocks) == (Route.WARM, None, Proof.TOKENS, 16)
    assert (found.prefill and found.prefill.url, found.decode.url) == (P1, D1)


@pytest.mark.parametrize(
    ("same", "blocks"),
    [(64, 4), (79, 4), (80, 5), (81, 5), (95, 5), (96, 6), (255, 15), (256, 16)],
)
def test_only_whole_common_blocks_are_read(same: int, blocks: int) -> None:
    ids = [*RAN[:same], *[1] * 300]
    assert placed(ids, left()).blocks == blocks


@pytest.mark.parametrize(("length", "blocks"), [(255, 15), (256, 15), (257, 16), (240, 14), (241, 15)])
def test_prefill_always_has_a_token_to_compute(length: int, blocks: int) -> None:
    """The prompt is a prefix of what ran: shorter, as long, or longer by one."""
    ids = [*RAN, 7][:length]
    assert placed(ids, left()).blocks == blocks


@pytest.mark.parametrize(("holds", "blocks"), [(255, 15), (240, 15), (239, 14), (64, 4)])
def test_no_more_is_read_than_the_handle_holds(holds: int, blocks: int) -> None:
    assert placed(LONG, left(handle=held(tokens=holds))).blocks == blocks


@pytest.mark.parametrize("length", [1, 15, 16])
def test_a_prompt_of_one_block_or_less_reads_nothing(length: int) -> None:
    assert reusable_blocks(prompt(RAN[:length]), branch(ids=RAN), 256) == 0


def test_blocks_of_another_size_are_not_compared() -> None:
    found = Prompt(1000, len(LONG), digests.block_chain(LONG, 32), 32)
    assert reusable_blocks(found, branch(ids=RAN), 256) == 0


@pytest.mark.parametrize(("same", "route"), [(63, Route.COLD), (64, Route.WARM)])
def test_fewer_tokens_than_the_threshold_are_computed(same: int, route: Route) -> None:
    assert placed([*RAN[:same], *[1] * 300], left()).route is route


def test_the_threshold_can_be_moved() -> None:
    ids = [*RAN[:32], *[1] * 300]
    assert placed(ids, left(), cfg={"kv_recompute_threshold": 33}).route is Route.COLD
    assert placed(ids, left(), cfg={"kv_recompute_threshold": 32}).route is Route.WARM
    assert placed([*RAN[:16], *[1] * 300], left(), cfg={"kv_recompute_threshold": 0}).blocks == 1


# --- cold, and why -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [r for r in Reason if r is not Reason.REUSE_OFF])
def test_what_the_ledger_gave_as_the_reason_is_the_reason(reason: Reason) -> None:
    found = placed(LONG, Taken(branch=branch(ids=RAN), reason=reason))
    assert (found.route, found.reason, found.proof, found.blocks) == (Route.COLD, reason, None, 0)


def test_without_ids_there_is_no_proof() -> None:
    assert placed(None, left()).reason is Reason.NO_PROOF


def test_a_fault_of_the_proof_counts_whatever_is_known() -> None:
    assert placed(LONG, left(), no_proof=True).reason is Reason.NO_PROOF


def test_a_history_whose_ids_are_not_on_record_proves_nothing() -> None:
    assert placed(LONG, left(blocks=b"")).reason is Reason.NO_PROOF


def test_a_hybrid_models_handle_cannot_be_cut() -> None:
    groups = held(tokens=256, remote_block_ids=[list(range(16)), [3]])
    assert placed(LONG, left(handle=groups)).reason is Reason.NO_PROOF


def test_a_handle_that_is_good_as_a_whole_only_cannot_be_cut() -> None:
    whole = held(tokens=256, backhaul={"version": 1, "whole": True, "tokens": 256, "digests": "AAAA"})
    assert placed(LONG, left(handle=whole)).reason is Reason.NO_PROOF
    assert placed(None, left(handle=whole), fleet(connector=1)).proof is Proof.CONNECTOR


def test_a_prompt_without_one_common_block_has_diverged() -> None:
    found = placed([1, *LONG], left(common=0))
    assert (found.route, found.reason) == (Route.COLD, Reason.DIVERGED)


def test_an_early_edit_that_leaves_too_little_has_diverged() -> None:
    assert placed([*RAN[:20], *[1] * 300], left(common=0)).reason is Reason.DIVERGED


def test_a_short_history_is_below_the_threshold() -> None:
    short = RAN[:40]
    assert placed([*short, *[1] * 300], left(short)).reason is Reason.BELOW_THRESHOLD


@pytest.mark.parametrize("holds", [1, 15])
def test_a_handle_of_less_than_a_block_is_never_read(holds: int) -> None:
    assert placed(LONG, left(RAN[:holds])).route is Route.COLD


# --- by the connector ----------------------------------------------------------------------------------------------------


def checked(**fields: Any) -> Taken:
    """A history whose handle carries digests, and whose ids nobody knows."""
    return left(handle=leased(tokens=256), blocks=b"", **fields)


def test_a_handle_that_prefill_checks_by_itself_needs_no_ids() -> None:
    found = placed(None, checked(), fleet(connector=1), no_proof=True)
    assert (found.route, found.proof, found.reason) == (Route.WARM, Proof.CONNECTOR, None)


def test_a_stock_prefill_engine_cannot_check_it() -> None:
    assert placed(None, checked()).reason is Reason.NO_PROOF


def test_of_several_prefill_engines_one_that_checks_is_taken_unless_another_had_the_last_turn() -> None:
    on = Fleet([engine(P1), engine(P2, connector=1), engine(D1, connector=1)])
    assert (found := placed(None, checked(prefill=None), on)).prefill is not None
    assert (found.prefill.url, found.route) == (P2, Route.WARM)
    assert (found := placed(None, checked(prefill=P1), on)).prefill is not None
    assert (found.prefill.url, found.route) == (P1, Route.COLD)


@pytest.mark.parametrize(("tokens", "reason"), [(48, Reason.BELOW_THRESHOLD), (64, None)])
def test_a_handle_of_fewer_tokens_than_the_threshold_is_not_offered(tokens: int, reason: Reason | None) -> None:
    history = left(handle=leased(tokens=tokens), blocks=b"")
    assert placed(None, history, fleet(connector=1)).reason is reason


@pytest.mark.parametrize(
    ("bytes_", "common", "route"), [(120, 1, Route.LOCAL), (120, 0, Route.WARM), (2000, 1, Route.WARM)]
)
def test_a_short_suffix_of_the_same_history_is_local(bytes_: int, common: int, route: Route) -> None:
    history = left(handle=leased(tokens=256), blocks=b"", message_bytes=100, common=common)
    found = place(Prompt(bytes_), history, fleet(connector=1), config())
    assert isinstance(found, Placement)
    assert found.route is route


@pytest.mark.parametrize(
    ("p", "d", "digests_", "needed"),
    [(1, 1, True, False), (1, 1, False, True), (None, 1, True, True), (1, None, True, True)],
)
def test_ids_are_needed_where_somebody_does_not_check(
    p: int | None, d: int | None, digests_: bool, needed: bool
) -> None:
    on = Fleet([engine(P1, connector=p), engine(D1, connector=d)])
    taken = checked() if digests_ else left()
    assert needs_ids(taken, on, pick_engines(taken, on)) is needed


def test_ids_are_not_needed_for_a_first_turn_of_engines_that_check() -> None:
    first = Taken(reason=Reason.FIRST_TURN)
    ours, stock = fleet(connector=1), fleet()
    assert not needs_ids(first, ours, pick_engines(first, ours))
    assert needs_ids(first, stock, pick_engines(first, stock))


# --- unsafe pairs --------------------------------------------------------------------------------------------------------


def test_a_pair_that_is_unsafe_is_cold() -> None:
    on = fleet()
    on.pairs.note(P1, D1, "hangs")
    assert placed(LONG, left(), on).reason is Reason.UNSAFE_PAIR
    assert placed([1, *LONG], left(common=0), on).reason is Reason.DIVERGED


def test_another_prefill_engine_reads_where_the_one_before_cannot() -> None:
    on = fleet(P1, P2, D1)
    on.pairs.note(P1, D1, "hangs")
    found = placed(LONG, left(prefill=P1), on)
    assert (found.route, found.prefill and found.prefill.url) == (Route.WARM, P2)


# --- local ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("added", "route"), [(63, Route.LOCAL), (64, Route.LOCAL), (65, Route.WARM)])
def test_a_short_suffix_runs_on_decode_alone(added: int, route: Route) -> None:
    found = placed([*RAN, *[1] * added], left(), cfg={"local_max_tokens": 64})
    assert found.route is route
    if route is Route.LOCAL:
        assert (found.prefill, found.reason, found.proof, found.blocks) == (None, None, Proof.ENGINE, 0)


def test_local_can_be_switched_off() -> None:
    assert placed([*RAN, 1], left(), cfg={"local_max_tokens": 0}).route is Route.WARM
    assert placed(RAN[:240], left(), cfg={"local_max_tokens": 0}).route is Route.WARM


def test_a_history_that_is_not_pinned_may_be_gone_from_decode() -> None:
    unpinned = Taken(branch=branch(ids=RAN), reason=Reason.EXPIRED, common=1)
    found = placed([*RAN, 1], unpinned, cfg={"local_max_tokens": 64})
    assert (found.route, found.reason) == (Route.COLD, Reason.EXPIRED)


def test_a_suffix_is_measured_from_what_is_common() -> None:
    edited = [*RAN[:128], *[1] * 100]
    assert placed(edited, left(), cfg={"local_max_tokens": 64}).route is Route.WARM
    assert placed(edited[:150], left(), cfg={"local_max_tokens": 64}).route is Route.LOCAL


# --- forced routes -------------------------------------------------------------------------------------------------------


def test_local_can_be_forced_where_decode_has_the_history() -> None:
    found = placed(LONG, left(), force=Route.LOCAL)
    assert (found.route, found.prefill, found.proof) == (Route.LOCAL, None, Proof.ENGINE)


def test_a_forced_local_turn_without_a_history_is_cold() -> None:
    found = placed(LONG, Taken(reason=Reason.FIRST_TURN), force=Route.LOCAL)
    assert (found.route, found.reason) == (Route.COLD, Reason.FIRST_TURN)


def test_cold_can_be_forced() -> None:
    found = placed(LONG, left(), force=Route.COLD)
    assert (found.route, found.reason, found.blocks) == (Route.COLD, Reason.REUSE_OFF, 0)
    assert placed(LONG, Taken(reason=Reason.FIRST_TURN), force=Route.COLD).reason is Reason.FIRST_TURN


def test_warm_can_be_forced_where_it_is_exact() -> None:
    short = [*RAN, 1]
    assert placed(short, left(), cfg={"local_max_tokens": 64}, force=Route.WARM).route is Route.WARM
    assert placed([1, *RAN], left(common=0), force=Route.WARM).reason is Reason.DIVERGED


# --- which engines -------------------------------------------------------------------------------------------------------


def test_a_turn_prefers_the_engines_that_had_the_last_one() -> None:
    on = fleet(P1, P2, D1, D2)
    found = placed(LONG, left(decode=D2, prefill=P2), on)
    assert (found.prefill and found.prefill.url, found.decode.url) == (P2, D2)


def test_a_first_turn_goes_to_the_least_busy() -> None:
    on = fleet(P1, P2, D1, D2)
    for busy in (P1, D1):
        engine = on.get(busy)
        assert engine is not None
        on.load.begin(engine.url)
    found = placed(LONG, Taken(reason=Reason.FIRST_TURN), on)
    assert (found.prefill and found.prefill.url, found.decode.url) == (P2, D2)


def test_engines_that_failed_in_this_turn_are_left_out() -> None:
    found = placed(LONG, left(), fleet(P1, P2, D1, D2), without=frozenset({P1, D1}))
    assert (found.prefill and found.prefill.url, found.decode.url, found.route) == (P2, D2, Route.WARM)


def test_the_history_is_not_local_to_another_decode_engine() -> None:
    on = fleet(P1, D1, D2)
    moved = {"cfg": {"local_max_tokens": 64}, "without": frozenset({D1})}
    assert placed([*RAN, 1], left(), on, **moved).route is Route.WARM
    assert placed([*RAN, 1], left(), on, **moved, force=Route.LOCAL).prefill is not None


@pytest.mark.parametrize(("without", "role"), [(P1, Role.PREFILL), (D1, Role.DECODE)])
def test_it_is_told_when_no_engine_of_a_role_is_left(without: str, role: Role) -> None:
    assert put(LONG, left(), without=frozenset({without})) == NoEngine(role)


def test_a_local_turn_needs_no_prefill_engine() -> None:
    gone = frozenset({P1})
    assert placed([*RAN, 1], left(), cfg={"local_max_tokens": 64}, without=gone).route is Route.LOCAL


def test_a_shared_lease_is_read_only_by_an_engine_that_claims_it() -> None:
    """What the record shares with the prompt says nothing of a lease that an earlier turn has left, and that reading does not
    pin."""
    found = placed(LONG, left(handle=leased(tokens=len(RAN))), fleet(P1, D1))
    assert (found.route, found.reason) == (Route.COLD, Reason.NO_PROOF)
    single = placed(LONG, left(handle=leased(tokens=len(RAN), shared=False)), fleet(P1, D1))
    assert (single.route, single.proof) == (Route.WARM, Proof.TOKENS)
