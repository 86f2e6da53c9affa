"""Who may ask: API keys by the names of those who hold them, the tenants.

A value, made from a configuration's table, the environment or a file. It holds digests of the keys and no key, so neither its
`repr` nor an error can show one. Keys are looked up by their digest: how long that takes says nothing about any key.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

KEYS_VARIABLE = "BACKHAUL_API_KEYS"
"""`name=key,name2=key2`; a name that comes twice has two keys."""
MIN_KEY_LENGTH = 16
"""Nothing here slows down somebody who guesses."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NAME_RULE = "a name has 1 to 64 letters, digits, dots, dashes and underscores"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_HASHED = "sha256:"
_FIELDS = ("keys", "max_concurrent_turns")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody with API keys. Nothing is shared between two of them."""

    name: str
    max_concurrent_turns: int | None = None
    """More are answered 429."""


class Tenants:
    """Tenants by the digests of their keys. Empty, it knows nobody and asks for no key."""

    def __init__(self, by_digest: Mapping[bytes, Tenant] | None = None) -> None:
        self._by_digest = dict(by_digest or {})

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(dict.fromkeys(self._by_digest.values()))

    def __repr__(self) -> str:
        return f"<Tenants {', '.join(tenant.name for tenant in self) or 'none'}>"

    def find(self, key: str) -> Tenant | None:
        """Whose key this is."""
        return self._by_digest.get(hashlib.sha256(key.encode(errors="surrogateescape")).digest())

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Tenants:
        """From a table `[tenants]`: each name with a table of `keys` and limits, or with a list of keys alone. A key is plain
        text, or `sha256:` and the hexadecimal digest of one. Raises `ConfigError`, which names everything that is wrong."""
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"tenants: a table of names, not {type(mapping).__name__}")
        reading = _Reading()
        for name, table in mapping.items():
            reading.tenant(name, table)
        return cls(reading.done())

    @classmethod
    def from_text(cls, text: str, source: str = KEYS_VARIABLE) -> Tenants:
        """From `name=key,name2=key2`. Raises `ConfigError`."""
        reading = _Reading()
        for number, part in enumerate(text.split(","), 1):
            name, _, key = (side.strip() for side in part.partition("="))
            reading.entry(f"{source}: entry {number}", name, key)
        return cls(reading.done())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tenants:
        """From a TOML file of tables `[tenants.NAME]`, and of nothing else. Raises `ConfigError`."""
        read = read_toml(path)
        if read.keys() != {"tenants"} or not read["tenants"]:
            raise ConfigError(
                f"{os.fspath(path)}: it has to have tables [tenants.NAME] with keys = [...], and no others"
            )
        return _named(os.fspath(path), read["tenants"])

    @classmethod
    def from_options(cls, file: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Tenants:
        """From a file, or else from the environment, or nobody. Raises `ConfigError`, also where both say something."""
        text = environ.get(KEYS_VARIABLE)
        if file is not None and text:
            raise ConfigError(f"API keys are in {os.fspath(file)} and in {KEYS_VARIABLE}: leave one of them out")
        if file is not None:
            return cls.from_file(file)
        return cls.from_text(text) if text else cls()


NO_TENANTS = Tenants()


def _named(source: str, mapping: Mapping[str, Any]) -> Tenants:
    try:
        return Tenants.from_mapping(mapping)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Raises `ConfigError`, which shows none of the text: it may be a key."""
    file = os.fspath(path)
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at [^)]*\)$", str(error))
        raise ConfigError(f"{file}: not TOML: {place[0].strip('()') if place else 'it ends too early'}") from None


class _Reading:
    """A table on its way to become `Tenants`. Keys are named by their places, never shown."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, Tenant] = {}
        self._problems: list[str] = []

    def done(self) -> dict[bytes, Tenant]:
        if self._problems:
            raise ConfigError("; ".join(self._problems))
        return self._by_digest

    def entry(self, where: str, name: str, key: str) -> None:
        """One `name=key`. The name is not shown either: the two may be the wrong way round."""
        if not _NAME.fullmatch(name):
            self._problems.append(f"{where} is not name=key: {_NAME_RULE}")
        else:
            self._key(where, key, Tenant(name))

    def tenant(self, name: object, table: object) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self._problems.append(f"tenants: one has a name that cannot be one: {_NAME_RULE}")
            return
        where = f"tenants.{name}"
        if _is_list(table):
            table = {"keys": table}
        if not isinstance(table, Mapping):
            self._problems.append(f"{where}: a table with keys = [...], not {type(table).__name__}")
            return
        for field in table.keys() - set(_FIELDS):
            near = difflib.get_close_matches(str(field), _FIELDS, 1)
            hint = f"did you mean {near[0]}" if near else f"there are {' and '.join(_FIELDS)}"
            self._problems.append(f"{where}.{field}: not known; {hint}")
        limit = table.get("max_concurrent_turns")
        if limit is not None and (type(limit) is not int or limit < 1):
            self._problems.append(f"{where}.max_concurrent_turns: a number of 1 or more, not {limit!r}")
            limit = None
        tenant = Tenant(name, limit)
        keys = table.get("keys")
        if not _is_list(keys) or not keys:
            self._problems.append(f"{where}.keys: a list of at least one key")
            return
        for number, key in enumerate(keys, 1):
            self._key(f"{where}.keys: key {number}", key, tenant)

    def _key(self, where: str, key: object, tenant: Tenant) -> None:
        digest = self._digest(where, key)
        if digest is None:
            return
        other = self._by_digest.setdefault(digest, tenant)
        if other.name != tenant.name:
            self._problems.append(f"{where} is another tenant's too: a key belongs to one")

    def _digest(self, where: str, key: object) -> bytes | None:
        if not isinstance(key, str):
            self._problems.append(f"{where} is not a text")
        elif key.startswith(_HASHED):
            if _DIGEST.fullmatch(digest := key.removeprefix(_HASHED)):
                return bytes.fromhex(digest)
            self._problems.append(f"{where}: after {_HASHED} come 64 hexadecimal digits")
        elif len(key) < MIN_KEY_LENGTH or not all("!" <= char <= "~" for char in key):
            self._problems.append(f"{where}: a key has at least {MIN_KEY_LENGTH} characters of ASCII, and no spaces")
        else:
            return hashlib.sha256(key.encode()).digest()
        return None


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
