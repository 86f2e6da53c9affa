"""Who has which API keys: what a configuration may say, and that no error and no `repr` shows a key."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from backhaul_router.errors import ConfigError
from backhaul_router.serve.tenants import KEYS_VARIABLE, Tenant, Tenants

ALICE, ALICES_NEXT, BOB = "alice-0123456789", "alice-9876543210", "bob-0123456789abc"


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def test_a_tenant_is_found_by_each_of_its_keys() -> None:
    tenants = Tenants.from_mapping({"alice": {"keys": [ALICE, ALICES_NEXT]}, "bob": [BOB]})
    assert [tenants.find(key) for key in (ALICE, ALICES_NEXT)] == [Tenant("alice")] * 2
    assert tenants.find(BOB) == Tenant("bob")
    assert [tenants.find(key) for key in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), "\udcff", hashed(ALICE))] == [
        None
    ] * 6


def test_a_file_need_not_hold_the_key_itself() -> None:
    tenants = Tenants.from_mapping(
        {"alice": {"keys": [hashed(ALICE), "sha256:" + hashed(BOB).removeprefix("sha256:").upper()]}}
    )
    assert tenants.find(ALICE) == Tenant("alice")
    assert tenants.find(BOB) == Tenant("alice")


def test_a_key_of_hexadecimal_digits_is_a_key_and_no_digest() -> None:
    key = "0" * 64
    assert Tenants.from_mapping({"a": [key]}).find(key) == Tenant("a")


def test_a_tenant_has_limits() -> None:
    tenants = Tenants.from_mapping({"alice": {"keys": [ALICE], "max_concurrent_turns": 3}})
    assert tenants.find(ALICE) == Tenant("alice", max_concurrent_turns=3)
    assert list(tenants) == [Tenant("alice", 3)]


def test_nobody_is_nobody() -> None:
    assert not Tenants()
    assert not Tenants.from_mapping({})
    assert Tenants().find(ALICE) is None


WRONG: dict[str, tuple[Any, str]] = {
    "no table of names": ([ALICE], "tenants: a table of names, not list"),
    "no name": ({"": [ALICE]}, "a name has 1 to 64"),
    "a name with a space": ({"a b": [ALICE]}, "a name has 1 to 64"),
    "a name that is too long": ({"a" * 65: [ALICE]}, "a name has 1 to 64"),
    "a key for a table": ({"a": ALICE}, "tenants.a: a table with keys = [...], not str"),
    "no keys": ({"a": {"keys": []}}, "tenants.a.keys: a list of at least one key"),
    "a key for a list": ({"a": {"keys": ALICE}}, "tenants.a.keys: a list of at least one key"),
    "a field misspelt": ({"a": {"keys": [ALICE], "max_concurent_turns": 1}}, "did you mean max_concurrent_turns"),
    "a field that is none": ({"a": {"keys": [ALICE], "quux": 1}}, "tenants.a.quux: not known; there are keys and"),
    "a limit of nothing": ({"a": {"keys": [ALICE], "max_concurrent_turns": 0}}, "a number of 1 or more, not 0"),
    "a limit that is no number": ({"a": {"keys": [ALICE], "max_concurrent_turns": True}}, "1 or more, not True"),
    "a key that is no text": ({"a": [5]}, "tenants.a.keys: key 1 is not a text"),
    "a short key": ({"a": [ALICE, "secret"]}, "tenants.a.keys: key 2: a key has at least 16"),
    "a key with a space": ({"a": ["secret secret secret"]}, "key 1: a key has at least 16 characters of ASCII"),
    "half a digest": ({"a": ["sha256:secret"]}, "after sha256: come 64 hexadecimal digits"),
    "a key of two tenants": ({"a": [ALICE], "b": [hashed(ALICE)]}, "tenants.b.keys: key 1 is another tenant's too"),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_cannot_be_is_refused_and_no_key_is_shown(how: str) -> None:
    mapping, message = WRONG[how]
    with pytest.raises(ConfigError) as error:
        Tenants.from_mapping(mapping)
    assert message in str(error.value)
    assert ALICE not in str(error.value)
    assert "secret" not in str(error.value)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"tenants\.a\.keys: .*; tenants\.b: "):
        Tenants.from_mapping({"a": {}, "b": 5})


def test_no_key_shows_in_a_repr() -> None:
    tenants = Tenants.from_mapping({"alice": [ALICE], "bob": [BOB]})
    assert repr(tenants) == "<Tenants alice, bob>"
    assert ALICE not in repr(tenants.find(ALICE))


def test_the_environment_names_keys() -> None:
    tenants = Tenants.from_options(None, {KEYS_VARIABLE: f"alice={ALICE}, bob={hashed(BOB)},alice={ALICES_NEXT}="})
    assert tenants.find(ALICES_NEXT + "=") == tenants.find(ALICE) == Tenant("alice")
    assert tenants.find(BOB) == Tenant("bob")
    assert not Tenants.from_options(None, {KEYS_VARIABLE: ""})
    assert not Tenants.from_options(None, {})


@pytest.mark.parametrize("text", [ALICE, f"{ALICE}=alice", f"alice={ALICE},", f"a={ALICE},b={ALICE}", "alice="])
def test_an_environment_that_is_wrong_says_which_entry_is(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{KEYS_VARIABLE}: entry [12]") as error:
        Tenants.from_text(text)
    assert ALICE not in str(error.value)


def test_a_file_names_keys_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f'[tenants.alice]\nkeys = ["{hashed(ALICE)}"]\nmax_concurrent_turns = 2\n')
    assert Tenants.from_options(file, {}).find(ALICE) == Tenant("alice", 2)
    with pytest.raises(ConfigError, match="leave one of them out"):
        Tenants.from_options(file, {KEYS_VARIABLE: f"a={BOB}"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'[tenants.a]\nkeys = ["{ALICE}"', r"not TOML: at "),
        (f'[tenants.a]\nkeys = ["{ALICE}"]\n{ALICE}', "not TOML"),
        (f'[tenant.a]\nkeys = ["{ALICE}"]', "it has to have tables"),
        ("", "it has to have tables"),
        ('[tenants.a]\nkeys = ["secret"]', r"keys\.toml: tenants\.a\.keys: key 1"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        Tenants.from_file(file)
    assert str(file) in str(error.value)
    assert ALICE not in str(error.value)
    assert "secret" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\.toml: No such file"):
        Tenants.from_file(tmp_path / "keys.toml")
