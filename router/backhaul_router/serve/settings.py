"""What `backhaul serve` is told: a TOML file, the command line, which goes before it, and the environment, which has the secrets.

Each setting is a field of a value (`RouterConfig`, `ServerSettings`, `Limits`), so that a new field is in the file and on the
command line by itself. A file is checked whole: an error has a line for everything that is wrong in it, by table and key.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import RouterConfig
from ..drive.logs import LogFormat
from ..engine_key import ENGINE_KEY_VARIABLE
from ..engines.tls import client_context, server_context
from ..errors import ConfigError
from .admission import Limits
from .otlp import traces_url
from .tenants import Tenants, read_toml

REDIS_URL_VARIABLE = "BACKHAUL_REDIS_URL"
"""Counts where neither the file nor an option has it."""
ADMIN_KEY_VARIABLE = "BACKHAUL_ADMIN_KEY"
MAX_WORKERS = 256
MIN_ADMIN_KEY_LENGTH = 16
"""Nothing slows down somebody who guesses."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Of the process that serves. None of them changes while it runs, but for what is in the certificate's files."""

    host: str = "127.0.0.1"
    port: int = 8000
    grace_s: float = 30.0
    """How long requests may take to finish at the end."""
    shutdown_delay_s: float = 0.0
    """How long the router goes on as before once it was told to stop, but for `/ready`."""
    workers: int = 1
    """Processes that serve one address. Several share what they know of conversations on `redis_url`."""
    tls_cert: str | None = None
    tls_key: str | None = None
    """`None`: the key is in the certificate's file."""
    log_format: LogFormat = LogFormat.TEXT
    log_turns: bool = True
    """A line for each turn."""
    metrics_public: bool = True
    """False: `/metrics` answers to loopback addresses only."""
    otlp_endpoint: str | None = None
    """An OpenTelemetry collector's URL; `None` leaves it to OpenTelemetry's own variables."""
    api_keys: str | None = None
    """A file with tables `[tenants.NAME]`, in place of those in the configuration file."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port {self.port}: from 0 to {2**16 - 1}")
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ConfigError(f"workers={self.workers}: from 1 to {MAX_WORKERS}")
        for name in ("grace_s", "shutdown_delay_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}: a number of seconds, 0 or more")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError(f"tls_key={self.tls_key}: a key without a certificate (tls_cert)")
        if self.otlp_endpoint is not None:
            traces_url(self.otlp_endpoint)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything."""

    router: RouterConfig = field(repr=False)
    server: ServerSettings
    limits: Limits
    tenants: Tenants
    admin_key: str | None = field(default=None, repr=False)

    def check_files(self) -> None:
        """Opens the files that they name. Raises `ConfigError`."""
        if self.server.tls_cert is not None:
            server_context(self.server.tls_cert, self.server.tls_key)
        if self.router.engine_ca_file is not None:
            client_context(self.router.engine_ca_file)


@dataclass(frozen=True)
class Setting:
    """One that the file and, mostly, the command line can have."""

    name: str
    """That of the field; with dashes it is the option."""
    table: str
    key: str
    kind: Any
    """`bool`, `int`, `float`, `str`, an enumeration, or `list` for texts."""
    default: Any

    @property
    def secret(self) -> bool:
        """Never on the command line, nor in an error."""
        return self.name in ("api_key", "admin_key")

    def why_not(self, value: object) -> str | None:
        """What is wrong with its type; `None` for one that fits."""
        kind, ok = self.kind, isinstance(value, self.kind)
        if kind is list:
            ok = isinstance(value, list) and all(isinstance(one, str) for one in value)
            wanted = "a list of texts"
        elif kind in _WANTED:
            ok = isinstance(value, (int, float) if kind is float else kind)
            ok = ok and (kind is bool or not isinstance(value, bool))
            wanted = _WANTED[kind]
        else:
            choices = [str(one) for one in kind]
            ok, wanted = value in choices, f"one of {', '.join(choices)}"
        return None if ok else f"{wanted}, not {_shown(value, secret=self.secret)}"


_WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _kind(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is tuple:
        return list
    known = hint in _WANTED or (isinstance(hint, type) and issubclass(hint, enum.StrEnum))
    return hint if known else str


def _settings_of(of: type, table: str) -> list[Setting]:
    hints = typing.get_type_hints(of)
    found = []
    for one in dataclasses.fields(of):
        where = _IN_ENGINES.get(one.name) if of is RouterConfig else None
        default = None if one.default is dataclasses.MISSING else one.default
        in_table, key = ("engines", where) if where else (table, one.name)
        found.append(Setting(one.name, in_table, key, _kind(hints[one.name]), default))
    return found


_IN_ENGINES = {"prefill": "prefill", "decode": "decode", "engine_ca_file": "ca_file", "api_key": "api_key"}
SETTINGS: tuple[Setting, ...] = (
    *_settings_of(RouterConfig, "router"),
    *_settings_of(ServerSettings, "server"),
    *_settings_of(Limits, "limits"),
    Setting("admin_key", "admin", "key", str, None),
)
_TENANTS = "tenants"
TABLES: Mapping[str, Mapping[str, Setting]] = {
    table: {one.key: one for one in SETTINGS if one.table == table}
    for table in ("server", "engines", "router", "limits", "admin")
}


def load(
    file: str | os.PathLike[str] | None, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Settings:
    """What the file, the command line's options by their settings' names, and the environment come to. Raises `ConfigError`, with
    a line for each thing that is wrong."""
    reading = _Reading(None if file is None else os.fspath(file), flags)
    reading.secret("api_key", ENGINE_KEY_VARIABLE, environ)
    reading.fallback("redis_url", REDIS_URL_VARIABLE, environ)
    reading.secret("admin_key", ADMIN_KEY_VARIABLE, environ)
    return reading.settings(environ)


class _Reading:
    """Settings on their way, and what is wrong with them."""

    def __init__(self, file: str | None, flags: Mapping[str, Any]) -> None:
        self._file = file
        self._values: dict[str, Any] = {}
        self._tenants: Any = None
        self._broken: set[str] = set()
        self._problems: list[str] = []
        for table, content in (read_toml(file) if file is not None else {}).items():
            self._table(table, content)
        self._in_file = self._values.keys() - flags.keys()
        self._values.update(flags)

    def secret(self, name: str, variable: str, environ: Mapping[str, str]) -> None:
        value = environ.get(variable)
        if value and name in self._values:
            self._problem(f"{self._place(name)}: {variable} in the environment is set too: leave one of them out")
        elif value:
            self._values[name] = value

    def fallback(self, name: str, variable: str, environ: Mapping[str, str]) -> None:
        if value := environ.get(variable):
            self._values.setdefault(name, value)

    def settings(self, environ: Mapping[str, str]) -> Settings:
        router = self._made(RouterConfig, prefill=(), decode=())
        server = self._made(ServerSettings)
        limits = self._made(Limits)
        tenants = self._made_tenants(server, environ)
        key = self._values.get("admin_key")
        if key is not None and (len(key) < MIN_ADMIN_KEY_LENGTH or not all("!" <= char <= "~" for char in key)):
            self._problem(f"admin_key: at least {MIN_ADMIN_KEY_LENGTH} characters of ASCII, and no spaces")
        if server is not None and server.workers > 1 and self._values.get("redis_url") is None:
            place = self._place("workers") if "workers" in self._in_file else "workers"
            self._problem(
                f"{place}: {server.workers} workers share conversations on a Redis or Valkey server: name one with redis_url "
                f"(--redis-url redis://HOST:6379/0, or {REDIS_URL_VARIABLE}), or leave workers at 1"
            )
        if self._problems or router is None or server is None or limits is None or tenants is None:
            raise ConfigError("\n".join(self._problems))
        return Settings(router=router, server=server, limits=limits, tenants=tenants, admin_key=key)

    def _table(self, table: str, content: Any) -> None:
        if table == _TENANTS:
            self._tenants = content
            return
        known = TABLES.get(table)
        if known is None:
            near = [one.table for one in SETTINGS if one.key == table] if not isinstance(content, dict) else []
            hint = f"it belongs under [{near[0]}]" if near else _nearest(table, [*TABLES, _TENANTS], "tables")
            self._problem(f"{table}: not known; {hint}")
            return
        if not isinstance(content, dict):
            self._problem(f"{table}: a table, [{table}], not {_shown(content)}")
            return
        for key, value in content.items():
            setting = known.get(key)
            if setting is None:
                elsewhere = next((one for one in SETTINGS if one.key == key), None)
                hint = f"it belongs under [{elsewhere.table}]" if elsewhere else _nearest(key, known, "settings")
                self._problem(f"[{table}] {key}: not known; {hint}")
            elif (why := setting.why_not(value)) is not None:
                self._problem(f"[{table}] {key}: {why}")
                self._broken.add(setting.name)
            else:
                self._values[setting.name] = value

    def _made(self, of: Any, **least: Any) -> Any:
        """The value of that type, or `None` where it cannot be."""
        names = [one.name for one in dataclasses.fields(of)]
        given = least | {name: self._values[name] for name in names if name in self._values}
        for one in SETTINGS:
            if one.name in given and isinstance(one.kind, type) and issubclass(one.kind, enum.StrEnum):
                given[one.name] = one.kind(given[one.name])
        try:
            return of(**given)
        except ConfigError as error:
            message = str(error)
            name = re.match(r"\w+", message)
            if name is not None and name[0] in self._broken:
                return None
            if name is not None and name[0] in self._in_file:
                message = f"{self._place(name[0])}: {message}"
            self._problems.append(message)
            return None

    def _made_tenants(self, server: ServerSettings | None, environ: Mapping[str, str]) -> Tenants | None:
        keys_file = self._values.get("api_keys")
        try:
            if self._tenants is None:
                return Tenants.from_options(keys_file, environ)
            if Tenants.from_options(None, environ) or keys_file is not None:
                raise ConfigError(f"[tenants] in {self._file}, and API keys elsewhere too: leave one of them out")
            return Tenants.from_mapping(self._tenants)
        except ConfigError as error:
            self._problems.append(str(error))
            return None

    def _place(self, name: str) -> str:
        setting = next(one for one in SETTINGS if one.name == name)
        return f"{self._file}: [{setting.table}] {setting.key}"

    def _problem(self, message: str) -> None:
        self._problems.append(
            f"{self._file}: {message}" if self._file and not message.startswith(self._file) else message
        )


def _nearest(word: str, known: Sequence[str] | Mapping[str, Any], what: str) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"{what}: {', '.join(known)}"


def _shown(value: object, *, secret: bool = False) -> str:
    kind = {dict: "a table", list: "a list", bool: "true or false", str: "a text"}.get(type(value))
    if secret or isinstance(value, dict | list):
        return kind or "a number"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
