"""The `backhaul` command: a table of commands, each a module that is imported when it is asked for.

A command's module has `main(options)` and the dataclass `Options`, of which its options are made; or it declares and reads them
by itself, with `add_arguments(parser)` and `run(args, passed_on)`. Both return the exit status.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

from .errors import CommandError
from .options import add_arguments, options_from


class Command(NamedTuple):
    module: str
    help: str
    extra: str = "bench"
    """What of the distribution has what the module needs."""


COMMANDS: Mapping[str, Command] = {
    "up": Command(
        "backhaul_cli.up", "start prefill and decode engines and a router on this machine, until Ctrl-C", "server"
    ),
    "serve": Command("backhaul_cli.serve", "run a router in front of engines, until Ctrl-C", "server"),
    "doctor": Command(
        "backhaul_cli.doctor",
        "try whether engines can exchange KV in both directions, and say what is unsafe",
        "server",
    ),
    "demo": Command(
        "backhaul_demo.demo", "show what reuse does to an agent's turns, on engines that need no accelerator", "demo"
    ),
}
BENCH: Mapping[str, Command] = {
    "ttft": Command(
        "backhaul_bench.ttft_command", "time to first token as a conversation grows: reuse off, warm, local"
    ),
    "overhead": Command(
        "backhaul_bench.overhead_command",
        "what the router adds to a turn, embedded and served, over the engine calls that it makes",
    ),
    "client": Command("backhaul_bench.client", "what a call costs the agent's process: openai's client and ours"),
    "exact": Command(
        "backhaul_bench.exact", "random conversations, edited at random: does reuse ever change an answer"
    ),
    "retokenise": Command(
        "backhaul_bench.retokenise",
        "how often a model's own answer becomes other tokens when it is sent back (vLLM engines)",
    ),
    "exact-histories": Command(
        "backhaul_bench.exact_histories", "what `exact_histories` gains an agent that calls tools (vLLM engines)"
    ),
    "scale": Command(
        "backhaul_bench.scale",
        "what a turn's decisions and a conversation's memory cost, from a thousand to a million conversations "
        "(no engines needed)",
    ),
    "peers": Command(
        "backhaul_bench.peers_command", "backhaul serve beside vllm-router, over the same loopback engines"
    ),
    "digests": Command(
        "backhaul_bench.digests",
        "what proving a long history costs the engines' schedulers, and the wire (no engines needed)",
    ),
    "retention": Command(
        "backhaul_bench.retention", "what it costs to keep what nobody goes on with (no engines needed)"
    ),
    "idle": Command(
        "backhaul_bench.idle",
        "the processor time of an idle decode engine (vLLM, started here), without and with a lease",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit status: 2 after an error, whose last line says what was wrong."""
    own, passed_on = split(sys.argv[1:] if argv is None else list(argv))
    try:
        args = parser(own).parse_args(own)
        return int(args.run(args, passed_on))
    except _told() as error:
        if detail := getattr(error, "detail", ""):
            print(detail, file=sys.stderr)
        print(f"backhaul {own[0]}: {error}", file=sys.stderr)
        return 2


def _told() -> tuple[type[Exception], ...]:
    """Errors whose message says all that there is to say. Asked for when one was raised: to import them takes its time."""
    from backhaul_connector.launch.cluster import LaunchError
    from backhaul_router.errors import ConfigError

    return CommandError, ConfigError, LaunchError


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what follows `--`."""
    if "--" not in argv:
        return argv, []
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """All commands, with the options of the one that `argv` begins with. Raises `CommandError`."""
    made = argparse.ArgumentParser(
        prog="backhaul", description="Multi-turn agents on vLLM prefill/decode clusters.", allow_abbrev=False
    )
    made.add_argument("--version", action="version", version=f"backhaul {version('backhaul')}")
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add(commands, COMMANDS, argv)
    bench = commands.add_parser("bench", help="measure", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    _add(kinds, BENCH, argv[1:] if argv[:1] == ["bench"] else ())
    return made


def _add(
    parsers: argparse._SubParsersAction[argparse.ArgumentParser], commands: Mapping[str, Command], argv: Sequence[str]
) -> None:
    for name, command in commands.items():
        made = parsers.add_parser(name, help=command.help, allow_abbrev=False)
        if [name] != list(argv[:1]):
            continue
        module = _loaded(command)
        made.epilog = getattr(module, "EPILOG", None)
        if hasattr(module, "Options"):
            add_arguments(made, module.Options)
            made.set_defaults(run=functools.partial(_run, module, measures=commands is BENCH))
        else:
            module.add_arguments(made)
            made.set_defaults(run=module.run)


def _loaded(command: Command) -> ModuleType:
    try:
        return importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("aiohttp", "matplotlib", "rich"):
            raise
        raise CommandError(f"this needs {missing}: pip install 'backhaul[{command.extra}]'") from error


def _run(module: ModuleType, args: argparse.Namespace, passed_on: Sequence[str], *, measures: bool) -> int:
    options = options_from(module.Options, args, passed_on)
    try:
        if not measures:
            return int(module.main(options))
        from backhaul_bench import clusters

        with clusters.termination_interrupts():
            return int(module.main(options))
    except KeyboardInterrupt:
        if not measures:
            raise
        clusters.say("stopped")
        return clusters.INTERRUPTED
    except _told():
        raise
    except _of_engines() as error:
        raise CommandError(f"{type(error).__name__}: {error}") from error


def _of_engines() -> tuple[type[Exception], ...]:
    import openai

    return openai.OpenAIError, OSError
