"""An engine that could not be trusted with the connector is refused when it starts, by the name of what is missing."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from backhaul_connector import compat, settings
from backhaul_connector.compat import IncompatibleEngine, Need

HERE = "backhaul_connector.lease_table"


def test_a_need_that_is_met_is_not_missing() -> None:
    assert Need(HERE, "LeaseTable", "renew", ("ids", "ttl_s")).missing() is None


@pytest.mark.parametrize(
    ("need", "name"),
    [
        (Need("no.such.module", "X", "y"), "no.such.module.X"),
        (Need(HERE, "Nothing", "y"), "backhaul_connector.lease_table.Nothing"),
        (Need(HERE, "LeaseTable", "steal"), "LeaseTable.steal"),
        (Need(HERE, "LeaseTable", "renew", ("ids", "colour")), "LeaseTable.renew(colour)"),
        (Need(HERE, "LeaseTable", "_colour", attribute=True), "LeaseTable._colour"),
        (Need(HERE, "", "steal"), f"{HERE}.steal"),
        (Need("no.such.module", "", "steal"), "no.such.module"),
    ],
)
def test_a_need_that_is_not_met_is_named(need: Need, name: str) -> None:
    assert need.missing() == name


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0", "dev"])
def test_another_vllm_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    vllm = ModuleType("vllm")
    vllm.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(IncompatibleEngine, match=rf"0\.32 and 0\.33, and this is {version}: .*--connector stock"):
        compat.check()


def test_a_hash_that_can_be_forged_is_refused() -> None:
    compat.check_hashes("sha256")
    compat.check_hashes("sha256_cbor")
    with pytest.raises(IncompatibleEngine, match=r"xxhash can be forged.*--prefix-caching-hash-algo sha256"):
        compat.check_hashes("xxhash")


def test_settings_have_defaults_and_leave_vllms_own_keys_alone() -> None:
    read = settings.read({"kv_recompute_threshold": 5, "hold_s": 10})
    assert (read.hold_s, read.claim_timeout_s, read.lease_port, read.max_leased_fraction) == (10.0, 1.0, 0, 0.8)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hold_s", 0), ("hold_s", "long"), ("claim_timeout_s", -1), ("lease_port", 70000), ("max_leased_fraction", 2)],
)
def test_a_setting_that_is_none_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(settings.BadSetting, match=key):
        settings.read({key: value})
