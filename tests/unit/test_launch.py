"""`backhaul up`: the command lines it makes, what it refuses, and how models are kept."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from backhaul_cli import main as cli
from backhaul_connector.launch import interpreter, models, supervise
from backhaul_connector.launch.command import (
    Connector,
    Device,
    EngineCommand,
    EnginesConfig,
    LaunchError,
    free_ports,
    plan,
    split_cores,
    split_gpus,
)


def commands(
    device: Device = Device.CPU, cores: int = 2, gpus: list[str] | None = None, **fields: object
) -> tuple[EngineCommand, ...]:
    return plan(EnginesConfig(**fields), python="/py", device=device, cores=cores, gpus=gpus)  # type: ignore[arg-type]


def option(command: EngineCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def transfer(command: EngineCommand) -> dict[str, object]:
    config: dict[str, object] = json.loads(option(command, "--kv-transfer-config"))
    return config


# --- command lines ----------------------------------------------------------------------------------------------------


def test_one_prefill_and_one_decode_engine_by_default() -> None:
    assert [(c.name, transfer(c)["kv_role"]) for c in commands()] == [
        ("prefill-0", "kv_producer"),
        ("decode-0", "kv_consumer"),
    ]


def test_settings_of_the_connector_reach_every_engine_and_each_has_a_lease_port_of_its_own() -> None:
    options = ("hold_s=5", "max_leased_fraction=0.5", "lease_port=4100")
    made = commands(prefill_engines=2, decode_engines=2, connector_options=options)
    found: list[Any] = [transfer(command)["kv_connector_extra_config"] for command in made]
    assert [(each["hold_s"], each["max_leased_fraction"]) for each in found] == [(5.0, 0.5)] * 4
    assert [each["lease_port"] for each in found] == [4100, 4101, 4102, 4103]


@pytest.mark.parametrize(
    ("connector", "expected"),
    [
        (
            Connector.BACKHAUL,
            {
                "kv_connector": "BackhaulConnector",
                "kv_connector_module_path": "backhaul_connector.connector",
                "kv_load_failure_policy": "recompute",
            },
        ),
        (Connector.STOCK, {"kv_connector": "NixlConnector", "kv_load_failure_policy": "fail"}),
    ],
)
def test_both_roles_transfer_in_both_directions(connector: Connector, expected: dict[str, str]) -> None:
    for command in commands(connector=connector, decoder_kv_blocks_ttl=25.0, kv_recompute_threshold=10):
        config = transfer(command)
        assert expected.items() <= config.items()
        assert "engine_id" not in config
        assert config["kv_connector_extra_config"] == {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": 25.0,
            "kv_recompute_threshold": 10,
        }


def test_engines_tell_cached_tokens_and_render_prompts() -> None:
    for command in commands():
        assert {"--enable-prompt-tokens-details", "--enable-scale-out"} <= set(command.argv)
        assert command.argv[:3] == ("/py", "-m", "vllm.entrypoints.openai.api_server")


def test_every_engine_has_ports_of_its_own_on_the_loopback_address() -> None:
    engines = commands(prefill_engines=3, decode_engines=2)
    ports = [port for c in engines for port in (c.ports.http, c.ports.side_channel)]
    assert len(set(ports)) == 10
    for command in engines:
        assert command.url == f"http://127.0.0.1:{option(command, '--port')}"
        assert option(command, "--host") == command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(command.ports.side_channel)


def test_prefix_caching_can_be_switched_off_on_prefill_engines_alone() -> None:
    prefill, decode = commands(prefill_prefix_caching=False)
    assert "--no-enable-prefix-caching" in prefill.argv
    assert "--no-enable-prefix-caching" not in decode.argv


def test_on_a_cpu_blocks_have_32_tokens_and_engines_share_the_cores() -> None:
    for command in commands(cores=8):
        assert option(command, "--block-size") == "32"
        assert transfer(command)["kv_buffer_device"] == "cpu"
        assert command.env["OMP_NUM_THREADS"] == "4"
        assert "CUDA_VISIBLE_DEVICES" not in command.env


def test_on_gpus_nothing_of_the_cpu_is_left_and_each_engine_has_a_device() -> None:
    prefill, decode = commands(Device.CUDA)
    assert (prefill.env["CUDA_VISIBLE_DEVICES"], decode.env["CUDA_VISIBLE_DEVICES"]) == ("0", "1")
    for command in (prefill, decode):
        assert not {"--block-size", "--enforce-eager"} & set(command.argv)
        assert "kv_buffer_device" not in transfer(command)
        assert not [name for name in command.env if "CPU" in name or name in ("OMP_NUM_THREADS", "UCX_TLS")]


def test_an_engine_that_is_spread_over_gpus_gets_as_many() -> None:
    prefill, decode = commands(Device.CUDA, gpus=["4", "5", "6", "7"], vllm_args=("-tp", "2"))
    assert (prefill.env["CUDA_VISIBLE_DEVICES"], decode.env["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,7")


def test_too_few_gpus_are_refused_and_a_device_named_twice_is_shared() -> None:
    with pytest.raises(LaunchError, match=r"2 engines need 2 GPUs, and 1 are visible \(0\)"):
        split_gpus(["0"], 2, 1)
    assert split_gpus(["0", "0"], 2, 1) == ["0", "0"]


def test_further_flags_come_last_so_that_they_win() -> None:
    for command in commands(max_model_len=512, dtype="float32", vllm_args=("--max-model-len", "256")):
        assert command.argv[-2:] == ("--max-model-len", "256")
        assert option(command, "--dtype") == "float32"


def test_built_in_models_are_served_under_their_names_and_other_models_as_they_are_called() -> None:
    tiny, _ = commands()
    assert option(tiny, "--served-model-name") == "tiny"
    assert option(tiny, "--model") == models.location("tiny")
    assert option(tiny, "--tool-call-parser") == "hermes"
    other, _ = commands(model="org/model")
    assert option(other, "--model") == "org/model"
    assert not {"--served-model-name", "--max-model-len", "--tool-call-parser"} & set(other.argv)


def test_cores_are_split_evenly_and_shared_in_turn_when_there_are_too_few() -> None:
    assert split_cores([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3, 4]]
    assert split_cores([0, 1], 2) == [[0], [1]]
    assert split_cores([3, 5], 3) == [[3], [5], [3]]


def test_free_ports_lie_below_those_of_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(20_000 <= port < 32_768 for port in ports)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_what_a_shell_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["up", "--dry-run", "--device", "cuda", "--python", "/py", "--", "--seed", "7"])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(line)
        assert words[0] == "env"
        assert words[words.index("/py") :][:3] == ["/py", "-m", "vllm.entrypoints.openai.api_server"]
        assert json.loads(words[words.index("--kv-transfer-config") + 1])
        assert words[-2:] == ["--seed", "7"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prefill-engines", "0"], "prefill_engines=0"),
        (["--decode-engines", "-1"], "decode_engines=-1"),
        (["--decoder-kv-blocks-ttl", "0"], "decoder_kv_blocks_ttl=0.0"),
        (["--connector-option", "hold=3"], "hold=3: NAME=VALUE, where NAME is one of lease_port, claim_timeout_s"),
        (["--connector-option", "hold_s"], "hold_s: NAME=VALUE"),
        (["--connector-option", "hold_s=0"], "hold_s"),
        (["--connector-option", "max_leased_fraction=x"], "max_leased_fraction"),
        (["--connector-option", "lease_port=65535"], "65536"),
        (["--connector-option", "hold_s=3", "--connector", "stock"], "vLLM's own connector has no such settings"),
        (["--kv-recompute-threshold", "-1"], "kv_recompute_threshold=-1"),
        (["--", "--port", "80"], "--port cannot be passed on"),
        (["--", "--kv-transfer-config={}"], "--kv-transfer-config cannot be passed on"),
        (["--python", "/nowhere/python"], "/nowhere/python"),
        (["--python", sys.executable], "has no vLLM"),
        (["--device", "cuda", "--dry-run", "--", "-tp", "many"], "-tp"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["up", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("backhaul up: ")
    assert complaint in err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("backhaul ")


def test_what_is_no_python_is_told_as_that(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="is not a Python that works"):
        interpreter.find(str(script(tmp_path / "python", "exit 3")))


@pytest.mark.parametrize(
    ("vllm", "nixl", "enough"), [("0.32.0", "1.4.0", True), ("0.33.0", "1.4.2", False), ("0.33.1", "1.5.0", True)]
)
def test_a_nixl_too_old_for_the_vllm_is_named(tmp_path: Path, vllm: str, nixl: str, enough: bool) -> None:
    found = json.dumps({"vllm": vllm, "torch": "2.11.0+cpu", "nixl": nixl, "plugin": True})
    python = str(script(tmp_path / "python", f"echo '{found}'"))
    if enough:
        assert (interpreter.find(python).vllm, interpreter.find(python).nixl) == (vllm, nixl)
    else:
        with pytest.raises(LaunchError, match=r"has NIXL 1\.4\.2, and vLLM 0\.33\.0 needs 1\.5 or later"):
            interpreter.find(python)


# --- models -----------------------------------------------------------------------------------------------------------


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "backhaul" / "models"


def test_a_built_in_model_is_built_once(cache: Path, tmp_path: Path) -> None:
    builder = script(tmp_path / "python", f'echo "$2" >> {tmp_path}/built; mkdir "$3"; touch "$3/config.json"')
    for _ in range(2):
        models.ensure("tiny", str(builder), lambda _: None)
    assert (tmp_path / "built").read_text() == "tiny\n"
    assert Path(models.location("tiny"), "config.json").exists()
    assert [path.name for path in cache.iterdir()] == [Path(models.location("tiny")).name]


def test_concurrent_builds_leave_one_whole_model(cache: Path, tmp_path: Path) -> None:
    both = f"touch {tmp_path}/started-$$; until [ $(ls {tmp_path}/started-* | wc -l) -eq 2 ]; do sleep 0.01; done"
    builder = script(tmp_path / "python", f'{both}; mkdir "$3"; touch "$3/$$"')
    with ThreadPoolExecutor() as pool:
        builds = [pool.submit(models.ensure, "tiny", str(builder), lambda _: None) for _ in range(2)]
    assert [build.exception() for build in builds] == [None, None]
    assert len(list(Path(models.location("tiny")).iterdir())) == 1
    assert [path.name for path in cache.iterdir()] == [Path(models.location("tiny")).name]


def test_a_failed_build_leaves_nothing_and_tells_the_builders_last_words(cache: Path, tmp_path: Path) -> None:
    builder = script(tmp_path / "python", 'mkdir "$3"; echo "no module named torch"; exit 1')
    with pytest.raises(models.LaunchError, match="could not build it") as failure:
        models.ensure("tiny", str(builder), lambda _: None)
    assert failure.value.detail == "no module named torch"
    assert list(cache.iterdir()) == []


def test_a_directory_that_is_not_there_is_told_before_engines_start(cache: Path) -> None:
    with pytest.raises(models.LaunchError, match="/nowhere/model: there is no such directory"):
        models.ensure("/nowhere/model", "/py", lambda _: None)


# --- the supervisor ---------------------------------------------------------------------------------------------------

LIMIT_S = 60.0
FAMILY = "(setsid sh -c 'echo $$ >> pids; exec sleep 600' &); sh -c 'echo $$ >> pids; exec sleep 600' & "
"""A child, and a grandchild that left the session: what a signal to one process, or to a group, would miss."""


@contextmanager
def supervised(tmp_path: Path, body: str, grace_s: float = 5.0) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "scratch").mkdir()
    options = [str(tmp_path / "log"), str(grace_s), str(tmp_path / "scratch")]
    command = [sys.executable, "-I", "-S", supervise.__file__, *options, "sh", "-c", body]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path, start_new_session=True) as supervisor:
        yield supervisor


def family(tmp_path: Path) -> list[int]:
    """The process ids of FAMILY, once both are there."""
    pids: list[str] = []
    while len(pids) < 2:
        pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
        time.sleep(0.01)
    return [int(pid) for pid in pids]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_when_the_launcher_is_gone_the_whole_family_ends(tmp_path: Path) -> None:
    with supervised(tmp_path, FAMILY + "wait") as supervisor:
        pids = family(tmp_path)
        supervisor.communicate(b"", timeout=LIMIT_S)
        assert alive(pids) == []


def test_when_the_first_process_ends_the_rest_does_too_and_its_status_is_kept(tmp_path: Path) -> None:
    until_both = "while [ $(cat pids | wc -l) -lt 2 ]; do sleep 0.01; done; "
    with supervised(tmp_path, FAMILY + until_both + "exit 7", grace_s=0.2) as supervisor:
        pids = family(tmp_path)
        assert supervisor.wait(LIMIT_S) == 7
        assert alive(pids) == []


SLOW_TO_START = """
import subprocess, sys, time
from pathlib import Path

class Slow(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)

subprocess.Popen = Slow
sys.path.insert(0, sys.argv[1])
import supervise
sys.exit(supervise.main(*sys.argv[2:]))
"""


def test_a_command_that_ends_at_once_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    folder = str(Path(supervise.__file__).parent)
    command = [sys.executable, "-I", "-S", "-c", SLOW_TO_START, folder, str(tmp_path / "log"), "5", str(tmp_path / "s")]
    with subprocess.Popen([*command, "sh", "-c", "exit 3"], stdin=subprocess.PIPE) as supervisor:
        assert supervisor.wait(LIMIT_S) == 3


def test_a_family_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    with supervised(tmp_path, "trap '' TERM; " + FAMILY + "while :; do sleep 0.1; done", grace_s=0.2) as supervisor:
        pids = family(tmp_path)
        supervisor.terminate()
        assert supervisor.wait(LIMIT_S) == 128 + 9
        assert alive(pids) == []


def test_a_crash_is_sigkill_for_all_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path, "trap 'echo asked' TERM; " + FAMILY + "wait", grace_s=600) as supervisor:
        pids = family(tmp_path)
        supervisor.communicate(supervise.KILL, timeout=LIMIT_S)
        assert supervisor.returncode == 128 + 9
        assert alive(pids) == []
        assert (tmp_path / "log").read_text() == ""
