"""The `backhaul` command. A sub-command is a function that declares its options and one that runs it; what it needs is
imported when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version


class CommandError(Exception):
    """A command cannot do what it was told. The message is one line; `detail` may be more, such as the end of a log."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns the exit status: 2 after an error, whose last line says what was wrong."""
    own, passed_on = _split(sys.argv[1:] if argv is None else list(argv))
    args = _parser().parse_args(own)
    args.passed_on = passed_on
    try:
        return int(args.run(args))
    except CommandError as error:
        if error.detail:
            print(error.detail, file=sys.stderr)
        print(f"backhaul {args.command}: {error}", file=sys.stderr)
        return 2


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what follows `--`."""
    if "--" not in argv:
        return argv, []
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="backhaul", description="Multi-turn agents on vLLM prefill/decode clusters.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"backhaul {version('backhaul')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_up(commands)
    return parser


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from backhaul_connector import options

    parser = commands.add_parser(
        "up",
        help="start prefill and decode engines on this machine, until Ctrl-C",
        usage="%(prog)s [options] [-- vLLM flags for every engine]",
        allow_abbrev=False,
    )
    options.add_arguments(parser)
    parser.set_defaults(run=_up)


def _up(args: argparse.Namespace) -> int:
    from backhaul_connector import launch, options

    try:
        return launch.up(options.config_from(args, args.passed_on), dry_run=args.dry_run)
    except launch.LaunchError as error:
        raise CommandError(str(error), error.detail) from error


if __name__ == "__main__":
    sys.exit(main())
