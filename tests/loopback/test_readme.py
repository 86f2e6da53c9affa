"""README and docs say what is so: their programs run as written, their commands can be typed, their links lead somewhere."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import stand_in
from backhaul_cli import main as cli
from backhaul_connector.launch.cluster import Device, EnginesConfig
from backhaul_connector.launch.command import plan
from backhaul_loopback import loopback_pair
from backhaul_router.report import Reason, ReuseReport
from served import freed, serving

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CHANGELOG.md"]
RUN_ELSEWHERE = {"conversations.md", "failures.md", "integrations.md", "langchain.md", "metrics.md", "tracing.md"}
"""Pages whose programs have tests of their own."""
LIMIT_S = 120.0


@dataclass(frozen=True)
class Snippet:
    """Something to run, as a page has it."""

    text: str
    page: Path
    line: int

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(language: str) -> Iterator[Snippet]:
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            yield Snippet(found[1], page, text.count("\n", 0, found.start()) + 2)


def commands() -> Iterator[Snippet]:
    """Each command of a shell block, and what stands in the text as a command."""
    for block in blocks("sh"):
        for number, line in enumerate(_whole_lines(block.text.replace("\\\n", ""))):
            for part in line.partition("  #")[0].split(" && "):
                if part.strip():
                    yield Snippet(part.strip(), block.page, block.line + number)
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            for command in re.findall(r"`((?:backhaul|make|pip|python) [^`]+)`", line):
                yield Snippet(command, page, number)


def _whole_lines(text: str) -> Iterator[str]:
    """Lines, of which one may go on inside quotes; the rest of those counts as empty."""
    held = ""
    for line in text.splitlines():
        held += line + " "
        if held.count("'") % 2 == 0:
            yield held.strip()
            held = ""
        else:
            yield ""


# --- commands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", list(commands()), ids=str)
def test_commands_can_be_typed_as_they_stand(command: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started: options are parsed, targets and extras looked up."""
    monkeypatch.chdir(ROOT)
    match shlex.split(command.text):
        case ["backhaul", *words]:
            check_options(words)
        case ["make", target, *_]:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", *what]:
            for extras in re.findall(r"\[(.+)\]", " ".join(what)):
                project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
                assert set(extras.split(",")) <= project["optional-dependencies"].keys()
        case ["python", program, *words]:
            usage = subprocess.run([sys.executable, program, "--help"], capture_output=True, text=True, check=True)
            for flag in [word for word in words if word.startswith("--")]:
                assert re.search(rf"{flag}\b", usage.stdout), f"{program} has no {flag}"
        case ["curl", *_]:
            pass  # those of the server's page are run, below
        case ["vllm", "serve", "MODEL", "--kv-transfer-config", transfer]:
            config = json.loads(transfer)
            known = [
                json.loads(command.argv[command.argv.index("--kv-transfer-config") + 1])
                for command in plan(EnginesConfig(), python="python", device=Device.CUDA, cores=2, gpus=["0", "1"])
            ]
            assert any(config.items() <= ours.items() for ours in known)
        case _:
            pytest.fail(f"what is this? {command.text}")


def check_options(words: list[str]) -> None:
    """A command may be named without the options that it needs."""
    own, _ = cli.split(words)
    named_only = not any(word.startswith("-") for word in own)
    try:
        cli.parser(own).parse_args([*own, "--help"] if named_only else own)
    except SystemExit as end:
        if end.code:
            pytest.fail(f"backhaul {' '.join(words)}")


def test_the_options_in_the_servers_table_exist() -> None:
    table = (ROOT / "docs" / "server.md").read_text().partition("## Options of `backhaul serve`")[2]
    rows = re.findall(r"^\| (`--.*?) \|", table.partition("\n## ")[0], re.MULTILINE)
    flags = {flag for row in rows for flag in re.findall(r"--[a-z-]+", row)}
    assert len(flags) >= 10
    assert flags <= options_of("serve")


def options_of(command: str) -> set[str]:
    [commands] = [action for action in cli.parser([command])._actions if isinstance(action, argparse._SubParsersAction)]
    return {flag for action in commands.choices[command]._actions for flag in action.option_strings}


def test_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            path, _, heading = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), f"{page.name}: {target}"
            if heading:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
                assert heading in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


# --- programs -----------------------------------------------------------------------------------------------------------


async def run(program: str, *options: str, cwd: Path = ROOT) -> str:
    """What a program prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-", *options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=cwd,
    )
    out, err = await asyncio.wait_for(process.communicate(program.encode()), LIMIT_S)
    assert (process.returncode, err) == (0, b""), err.decode()
    return out.decode()


def told_to(program: str, **urls: str) -> str:
    """The program with the addresses of a test's engines, whose ports are free ones, for those of the page."""
    pages = {"prefill": "http://127.0.0.1:8100", "decode": "http://127.0.0.1:8200", "router": "http://127.0.0.1:8000"}
    for name, url in urls.items():
        assert pages[name] in program
        program = program.replace(pages[name], url)
    return program


@pytest.mark.openai
@pytest.mark.parametrize("block", [b for b in blocks("python") if b.page.name not in RUN_ELSEWHERE], ids=str)
async def test_programs_run_as_they_stand(block: Snippet) -> None:
    """But for the engines' ports."""
    async with loopback_pair(model="smollm2") as pair:
        out = await run(told_to(block.text, prefill=pair.prefill.url, decode=pair.decode.url))
        await freed(pair)
    check_quick_start(out)


def check_quick_start(out: str) -> None:
    first, second, total = out.splitlines()
    assert first.startswith("cold: 0 of ")
    assert first.endswith("reason first_turn")
    assert re.match(r"(warm|local): [1-9]\d* of ", second)
    assert "turns=2" in total


def remote_client() -> str:
    """The README's line for a client of a served router."""
    [line] = set(re.findall(r"`(AsyncOpenAI\(base_url=[^`]+\))`", (ROOT / "README.md").read_text()))
    return line


def first_program() -> str:
    """The README's quick start."""
    return next(blocks("python")).text


def test_the_servers_page_has_the_same_client() -> None:
    assert f"client = {remote_client()}\n" in (ROOT / "docs" / "server.md").read_text()


@pytest.mark.openai
async def test_the_quick_start_takes_a_routers_url_in_the_place_of_engines() -> None:
    program, replaced = re.subn(r"AsyncOpenAI\(prefill=.*\)$", remote_client(), first_program(), flags=re.MULTILINE)
    assert replaced == 1
    async with loopback_pair(model="smollm2") as pair, serving(pair) as router:
        out = await run(told_to(program, router=router.url))
        await freed(pair)
    check_quick_start(out)


@pytest.mark.openai
async def test_the_quick_start_from_its_first_command_on(tmp_path: Path) -> None:
    """The engines are loopback engines under a stand-in for the Python that has vLLM, on the ports that were free."""
    [command] = {
        c.text for c in commands() if c.text.startswith("backhaul up --model smollm2") and "--no" not in c.text
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "backhaul_cli", *shlex.split(command)[1:]),
        *("--python", str(stand_in.make(tmp_path)), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert process.stdout is not None
    try:
        told = ""
        while "Ctrl-C" not in told:
            line = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
            assert line, told
            told += line.decode()
        urls = dict(re.findall(r"^(prefill|decode) +(\S+)$", told, re.MULTILINE))
        out = await run(told_to(first_program(), **urls))
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    check_quick_start(out)
    assert (process.returncode, rest) == (0, b"stopped\n")


async def test_what_the_servers_page_does_with_curl() -> None:
    """In the page's order, by another HTTP client: curl may not be there."""
    lines = [
        shlex.split(command.text)[1:]
        for command in commands()
        if command.text.startswith("curl ") and command.page.name == "server.md"
    ]
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    parser.add_argument("-X", dest="method")
    answers = []
    async with loopback_pair(model="smollm2") as pair, serving(pair) as router:
        for line in lines:
            asked = parser.parse_args(line)
            answers.append(
                await router.http.request(
                    asked.method or ("POST" if asked.data else "GET"),
                    told_to(asked.url, router=router.url),
                    headers=[tuple(header.split(": ", 1)) for header in asked.headers],
                    content=asked.data,
                )
            )
        await freed(pair)
    assert [answer.status_code for answer in answers] == [200, 200, 204]
    assert answers[1].json()["reports"][0]["reason"] == "first_turn"


# --- tables -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "heading"), [("README.md", "### The report"), ("docs/server.md", "## A report's keys")], ids=str
)
def test_what_a_page_says_of_reports_is_what_they_hold(page: str, heading: str) -> None:
    section = (ROOT / page).read_text().partition(heading)[2].partition("\n#")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named <= set(ReuseReport.__struct_fields__)
    assert set(Reason) <= set(re.findall(r"`(\w+)`", section))


def test_the_servers_page_names_every_key_of_a_report() -> None:
    section = (ROOT / "docs" / "server.md").read_text().partition("## A report's keys")[2]
    assert set(ReuseReport.__struct_fields__) <= set(re.findall(r"`(\w+)`", section))
