"""`backhaul serve`: a router in front of engines that run already."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import ModuleType

from backhaul_router.drive import logs
from backhaul_router.serve.options import add_arguments, settings_from

from .errors import CommandError

__all__ = ["add_arguments", "run", "server_module"]


def run(args: argparse.Namespace, passed_on: Sequence[str]) -> int:
    """Until a signal ends it. Raises `ConfigError` or `CommandError`."""
    try:
        settings = settings_from(args)
        if args.check:
            settings.check_files()
            print("the configuration can be used")
            return 0
        server = server_module()
        try:
            with logs.to_stderr(settings.server.log_format):
                server.serve(settings, lambda: settings_from(args))
        except server.WorkersFailed as error:
            raise CommandError(str(error)) from error
    except KeyboardInterrupt:  # before there was anything to finish
        pass
    print("stopped", flush=True)
    return 0


def server_module(otherwise: str = "") -> ModuleType:
    """The server, which needs an extra. Raises `CommandError` without it; `otherwise` says what can be done instead."""
    try:
        from backhaul_router.serve import server
    except ModuleNotFoundError as error:
        hint = f"; {otherwise}" if otherwise else ""
        raise CommandError(f"the router's server needs {error.name}: pip install 'backhaul[server]'{hint}") from error
    return server
