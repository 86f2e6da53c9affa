"""What `backhaul serve` is told: a file, the command line before it, and errors that say what is wrong and where."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backhaul_cli import main as cli
from backhaul_router.drive.logs import LogFormat
from backhaul_router.errors import ConfigError
from backhaul_router.report import Route
from backhaul_router.serve.reload import in_force
from backhaul_router.serve.settings import SETTINGS, TABLES, Settings, load

EXAMPLE = Path(__file__).parents[2] / "examples" / "backhaul.toml"
ENGINES = """
[engines]
prefill = ["http://p:8100"]
decode = ["http://d:8200"]
"""
KEY = "a-key-of-24-characters.."

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        file = tmp_path / "backhaul.toml"
        file.write_text(text)
        return file

    return written


def read(file: Path | None, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    return load(file, flags, environ or {})


def problems(file: Path, environ: dict[str, str] | None = None, **flags: Any) -> list[str]:
    """What is wrong, without the file's name, which every line about it begins with."""
    with pytest.raises(ConfigError) as caught:
        read(file, environ, **flags)
    return [line.removeprefix(f"{file}: ") for line in str(caught.value).splitlines()]


# --- what counts


def test_a_file_says_everything(write: Write) -> None:
    text = """
[server]
port = 9000
log_format = "json"
[router]
route = "cold"
prefill_timeout_s = 7
reuse = false
[limits]
max_concurrent_turns = 3
[tenants.a]
keys = ["0123456789abcdef"]
"""
    found = read(write(ENGINES + text))
    assert found.router.prefill == ("http://p:8100",)
    assert (found.router.route, found.router.prefill_timeout_s, found.router.reuse) == (Route.COLD, 7, False)
    assert (found.server.port, found.server.log_format) == (9000, LogFormat.JSON)
    assert found.limits.max_concurrent_turns == 3
    assert [tenant.name for tenant in found.tenants] == ["a"]


def test_what_a_file_leaves_out_has_its_default(write: Write) -> None:
    found = read(write(ENGINES))
    for one in SETTINGS:
        for part in (found.router, found.server, found.limits):
            if hasattr(part, one.name) and one.name not in ("prefill", "decode"):
                assert getattr(part, one.name) == one.default


def test_options_go_before_the_file(write: Write) -> None:
    file = write(ENGINES + "[server]\nport = 9000\nhost = '::1'\n")
    found = read(file, port=1234, prefill=["http://other:8100"])
    assert (found.server.port, found.server.host) == (1234, "::1")
    assert found.router.prefill == ("http://other:8100",)


def test_secrets_come_from_the_environment() -> None:
    environ = {"BACKHAUL_ADMIN_KEY": KEY, "BACKHAUL_ENGINE_API_KEY": "k"}
    found = read(None, environ, prefill=["http://p:1"], decode=["http://d:1"])
    assert (found.admin_key, found.router.api_key) == (KEY, "k")
    assert KEY not in repr(found)


def test_the_example_can_be_used_and_shows_every_setting_with_its_default() -> None:
    found = read(EXAMPLE)
    assert found.limits.max_concurrent_turns == 256
    text = EXAMPLE.read_text()
    for table, settings in TABLES.items():
        shown = re.search(rf"^\[{table}\]\n(.*?)(?=^# Who|^\[|\Z)", text, re.MULTILINE | re.DOTALL)
        assert shown is not None
        for key, setting in settings.items():
            line = re.search(rf"^(# )?{key} = .*$", shown[1], re.MULTILINE)
            assert line is not None, f"[{table}] {key} is not in the example"
            if line[1] and setting.default is not None:
                assert tomllib.loads(line[0].removeprefix("# ")) == {key: setting.default}


# --- what is wrong


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[limits]\nmax_queued_turn = 1", "[limits] max_queued_turn: not known; did you mean max_queued_turns?"),
        ("[server]\nmax_queued_turns = 1", "[server] max_queued_turns: not known; it belongs under [limits]"),
        ("port = 1", "port: not known; it belongs under [server]"),
        ("[sever]\nport = 1", "sever: not known; did you mean server?"),
        ("[zzz]", "zzz: not known; tables: server, engines, router, limits, admin, tenants"),
        ("server = 3", "server: a table, [server], not 3"),
        ("[server]\nport = '8000'", "[server] port: a whole number, not '8000'"),
        ("[server]\nport = 8000.5", "[server] port: a whole number, not 8000.5"),
        ("[server]\nport = true", "[server] port: a whole number, not true"),
        ("[server]\ngrace_s = 'x'", "[server] grace_s: a number, not 'x'"),
        ("[server]\nhost = 1", "[server] host: a text, not 1"),
        ("[router]\nreuse = 1", "[router] reuse: true or false, not 1"),
        ("[router]\nroute = 'hot'", "[router] route: one of cold, warm, local, not 'hot'"),
        ("[router]\nmax_branches = 0", "[router] max_branches: max_branches=0: 1 or more"),
        ("[server]\nport = 70000", "[server] port: port 70000: from 0 to 65535"),
        ("[server]\ngrace_s = inf", "[server] grace_s: grace_s=inf: a number of seconds, 0 or more"),
        ("[server]\ntls_key = 'k'", "[server] tls_key: tls_key=k: a key without a certificate (tls_cert)"),
        (
            "[server]\notlp_endpoint = 'http://u:p@[::1:4318'",
            "[server] otlp_endpoint: otlp_endpoint=http://[::1:4318: a collector's URL looks like http://host:4318",
        ),
        (
            "[server]\notlp_endpoint = 'collector:4318'",
            "[server] otlp_endpoint: otlp_endpoint=collector:4318: a collector's URL looks like http://host:4318",
        ),
        ("[limits]\nqueue_timeout_s = 0", "[limits] queue_timeout_s: queue_timeout_s=0: a number of seconds above 0"),
        ("[admin]\nkey = 'short'", "admin_key: at least 16 characters of ASCII, and no spaces"),
        (
            "[tenants.a]\nkey = 1",
            "tenants.a.key: not known; did you mean keys; tenants.a.keys: a list of at least one key",
        ),
    ],
)
def test_errors_name_table_and_key_and_what_to_do(write: Write, text: str, complaint: str) -> None:
    first, rest = (text, ENGINES) if text.startswith(("port", "server")) else (ENGINES, text)
    assert problems(write(f"{first}\n{rest}")) == [complaint]


def test_engines_that_are_no_list_of_texts_are_one_error(write: Write) -> None:
    file = write("[engines]\nprefill = 'http://p:1'\ndecode = ['http://d:1']")
    assert problems(file) == ["[engines] prefill: a list of texts, not 'http://p:1'"]


def test_an_engine_that_is_no_url_is_told_by_its_place(write: Write) -> None:
    file = write("[engines]\nprefill = ['p:1']\ndecode = ['http://d:1']")
    [found] = problems(file)
    assert found.startswith("[engines] prefill: prefill=: 'p:1' is not an engine's URL")


def test_everything_that_is_wrong_is_told_at_once(write: Write) -> None:
    text = "[server]\nport = 'x'\n[router]\nmax_branches = 0\n[limits]\nmax_queued_turns = -1\nqueues = 1\n"
    assert len(problems(write(ENGINES + text))) == 4


def test_an_option_that_is_wrong_is_not_blamed_on_the_file(write: Write) -> None:
    assert problems(write(ENGINES + "[router]\nmax_branches = 3"), max_branches=0) == ["max_branches=0: 1 or more"]


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        (f"[admin]\nkey = ['{KEY}']", {}),
        (f"[admin]\nkey = '{KEY}'", {"BACKHAUL_ADMIN_KEY": KEY}),
        (f"[engines]\napi_key = ['{KEY}']", {}),
        (f'[engines]\napi_key = "{KEY}\\u00e9"', {}),
        ("", {"BACKHAUL_ENGINE_API_KEY": f"{KEY}\n"}),
        (f"[admin]\nkey = '{KEY}", {}),
        (f"[tenants]\na = ['{KEY}']", {"BACKHAUL_API_KEYS": f"a={KEY}"}),
        (f"[tenants]\na = ['{KEY}', '{KEY}', 1]", {}),
    ],
)
def test_no_error_shows_a_key(write: Write, text: str, environ: dict[str, str]) -> None:
    found = problems(write(text), environ, prefill=["http://p:1"], decode=["http://d:1"])
    assert KEY not in str(found)
    assert found


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"a = ", "not TOML"), (b"\xff", "not UTF-8"), (None, "No such file")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    file = tmp_path / "backhaul.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{re.escape(str(file))}: {complaint}"):
        read(file)


# --- the command


def test_check_says_that_a_file_can_be_used(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--config", str(write(ENGINES)), "--check"]) == 0
    assert "can be used" in capsys.readouterr().out


def test_check_says_everything_that_is_wrong(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write("[server]\nport = 'x'\nhots = 'h'\n")
    assert cli.main(["serve", "--config", str(file), "--check", "--decode", "http://d:1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"backhaul serve: {file}: [server] port:")
    assert "did you mean host?" in said
    assert "prefill= is empty" in said


@pytest.mark.parametrize("engine", ["http://[::1:8100", "http://[foo]:8100"])
def test_check_says_which_url_is_none(write: Write, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    file = write(f"[engines]\nprefill = ['{engine}']\ndecode = ['http://d:1']\n")
    assert cli.main(["serve", "--config", str(file), "--check"]) == 2
    assert f"[engines] prefill: prefill=: {engine!r} is not an engine's URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("[server]\ntls_cert = '{missing}'", "tls_cert={missing}: No such file"),
        ("[server]\ntls_cert = '{file}'", "not a certificate with its key in PEM"),
        ("[engines]\nca_file = '{file}'\nprefill = ['http://p:1']\ndecode = ['http://d:1']", "no certificates in it"),
    ],
)
def test_check_opens_the_files_that_are_named(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str], setting: str, complaint: str
) -> None:
    names = {"missing": tmp_path / "missing.pem", "file": tmp_path / "some.pem"}
    names["file"].write_text("nothing")
    engines = "" if "[engines]" in setting else ENGINES
    assert cli.main(["serve", "--config", str(write(engines + setting.format(**names))), "--check"]) == 2
    assert complaint.format(**names) in capsys.readouterr().err


# --- workers


SEVERAL: dict[str, Any] = {"prefill": ["http://p:1"], "decode": ["http://d:1"], "workers": 2}


def test_several_workers_need_a_ledger_that_they_share() -> None:
    with pytest.raises(ConfigError, match=r"^workers: 2 workers share .*--redis-url redis://HOST:6379/0") as caught:
        load(None, SEVERAL, {})
    assert "\n" not in str(caught.value)
    assert load(None, SEVERAL, {"BACKHAUL_REDIS_URL": "redis://127.0.0.1/0"}).server.workers == 2


@pytest.mark.parametrize("workers", [0, 1000])
def test_a_number_of_workers_that_cannot_be(workers: int) -> None:
    with pytest.raises(ConfigError, match=f"workers={workers}: from 1 to 256"):
        load(None, {**SEVERAL, "workers": workers, "redis_url": "redis://127.0.0.1/0"}, {})


def test_a_worker_that_is_started_later_follows_what_a_reload_changed_and_no_more() -> None:
    engines = {name: SEVERAL[name] for name in ("prefill", "decode")}
    before = load(None, {**engines, "max_body_bytes": 1, "max_branches": 2, "port": 1}, {})
    after = load(None, {**engines, "max_body_bytes": 9, "max_branches": 9, "port": 9}, {})
    now = in_force(before, after)
    assert (now.router.max_body_bytes, now.router.max_branches, now.server.port) == (9, 2, 1)
