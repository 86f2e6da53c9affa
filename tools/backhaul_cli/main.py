"""The `backhaul` command. A sub-command is a function that declares its options and one that runs it; what it needs is
imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from backhaul_router.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from backhaul_connector.launch.cluster import Engines
    from backhaul_router.config import RouterConfig
    from backhaul_router.serve.tenants import Tenants


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
    _add_serve(commands)
    _add_doctor(commands)
    _add_demo(commands)
    _add_bench(commands)
    return parser


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from backhaul_connector.launch import options

    parser = commands.add_parser(
        "up",
        help="start prefill and decode engines and a router on this machine, until Ctrl-C",
        usage="%(prog)s [options] [-- vLLM flags for every engine]",
        allow_abbrev=False,
    )
    options.add_arguments(parser)
    router = parser.add_argument_group("router")
    router.add_argument("--no-router", dest="router", action="store_false", help="start the engines only")
    router.add_argument("--host", default="127.0.0.1", help="where the router listens (default: %(default)s)")
    router.add_argument("--port", type=int, help="(default: 8000, or a free one where that is in use)")
    parser.set_defaults(run=_up)


def _up(args: argparse.Namespace) -> int:
    from backhaul_connector.launch import cluster, options
    from backhaul_router.serve.options import engine_api_key
    from backhaul_router.serve.tenants import Tenants

    try:
        config = options.config_from(args, args.passed_on)
        if args.dry_run or not args.router:
            return cluster.up(config, dry_run=args.dry_run)
        tenants = Tenants.from_options(None)
        engine_api_key()  # before engines take minutes to start
        with _listener(args.host, args.port) as listener:
            return cluster.up(config, run=lambda engines: _route(engines, listener, tenants))
    except cluster.LaunchError as error:
        raise CommandError(str(error), error.detail) from error
    except ConfigError as error:
        raise CommandError(str(error)) from error


@contextlib.contextmanager
def _listener(host: str, port: int | None) -> Iterator[socket.socket]:
    """The router's address, taken before anything is started."""
    server = _server_module("--no-router starts the engines alone")
    if port is None:
        try:
            listener = server.listen(host, server.DEFAULT_PORT)
        except ConfigError:
            listener = server.listen(host, 0)
    else:
        listener = server.listen(host, port)
    with listener:
        yield listener


def _route(engines: Engines, listener: socket.socket, tenants: Tenants) -> None:
    """Runs the router for as long as the engines run. Raises `LaunchError` when one has ended."""
    from backhaul_connector.launch import cluster
    from backhaul_router.serve import server

    def started(url: str) -> None:
        print(cluster.how_to_reach(engines, url), flush=True)

    server.serve_on(listener, _config_for(engines), started=started, check=engines.check, tenants=tenants)


def _config_for(engines: Engines) -> RouterConfig:
    from backhaul_router.config import RouterConfig
    from backhaul_router.serve.options import engine_api_key

    ttl = engines.config.decoder_kv_blocks_ttl
    return RouterConfig(
        prefill=tuple(engine.url for engine in engines.prefill),
        decode=tuple(engine.url for engine in engines.decode),
        decoder_kv_blocks_ttl=ttl,
        lease_margin_s=min(10.0, ttl / 4),
        kv_recompute_threshold=engines.config.kv_recompute_threshold,
        api_key=engine_api_key(),
    )


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from backhaul_router.serve import options as serve_options

    parser = commands.add_parser("serve", help="run a router in front of engines, until Ctrl-C", allow_abbrev=False)
    serve_options.add_arguments(parser)
    parser.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    from backhaul_router.drive import logs
    from backhaul_router.serve import options as serve_options

    try:
        settings = serve_options.settings_from(args)
        if args.check:
            settings.check_files()
            print("the configuration can be used")
            return 0
        server = _server_module()
        try:
            with logs.to_stderr(settings.server.log_format):
                server.serve(settings, lambda: serve_options.settings_from(args))
        except server.WorkersFailed as error:
            raise CommandError(str(error)) from error
    except ConfigError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:  # before there was anything to finish
        pass
    print("stopped", flush=True)
    return 0


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="try whether engines can exchange KV in both directions, and say what is unsafe",
        epilog="Exit status: 0 all good, 1 works with warnings, 2 unsafe or unusable, 3 an engine does not answer; the highest "
        "that applies. The engines' API key comes from BACKHAUL_ENGINE_API_KEY.",
        allow_abbrev=False,
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", action="extend", nargs="+", required=True, metavar="URL", help="base URLs of the engines"
        )
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=_file_or_stdout,
        help="write the diagnosis as JSON; - prints it instead of the table",
    )
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="limit of each request (default: %(default)s)"
    )
    parser.add_argument(
        "--kv-recompute-threshold",
        type=int,
        default=64,
        metavar="TOKENS",
        help="what the engines were started with (default: %(default)s)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    import asyncio
    import json

    from backhaul_router.config import RouterConfig
    from backhaul_router.engines import doctor
    from backhaul_router.serve.options import engine_api_key

    try:
        config = RouterConfig(
            prefill=args.prefill,
            decode=args.decode,
            prefill_timeout_s=args.timeout,
            kv_recompute_threshold=args.kv_recompute_threshold,
            api_key=engine_api_key(),
        )
    except ConfigError as error:
        raise CommandError(str(error)) from error
    diagnosis = asyncio.run(
        doctor.diagnose(
            config.prefill,
            config.decode,
            timeout_s=args.timeout,
            threshold=config.kv_recompute_threshold,
            api_key=config.api_key,
        )
    )
    text = json.dumps(diagnosis.to_dict(), indent=2)
    print(text if args.json == "-" else doctor.table(diagnosis))
    if isinstance(args.json, Path):
        args.json.write_text(text + "\n")
    return int(diagnosis.severity)


def _server_module(otherwise: str = "") -> ModuleType:
    try:
        from backhaul_router.serve import server
    except ModuleNotFoundError as error:
        hint = f"; {otherwise}" if otherwise else ""
        raise CommandError(f"the router's server needs {error.name}: pip install 'backhaul[server]'{hint}") from error
    return server


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="show what reuse does to an agent's turns, on engines that need no accelerator",
        allow_abbrev=False,
    )
    _add_engines(parser)
    _add_connector(parser)
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the turns' reports")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    with _installed("demo"):
        from backhaul_demo import demo
    from backhaul_connector.launch.cluster import Connector

    names = ("engines", "model", "python", "json")
    options = demo.Options(connector=Connector(args.connector), **{name: getattr(args, name) for name in names})
    with _engine_trouble():
        return demo.main(options)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    _add_bench_ttft(kinds)
    _add_bench_overhead(kinds)
    _add_bench_client(kinds)
    _add_bench_exact(kinds)
    _add_bench_retokenise(kinds)
    _add_bench_exact_histories(kinds)
    _add_bench_scale(kinds)
    _add_bench_peers(kinds)
    _add_bench_digests(kinds)
    _add_bench_retention(kinds)
    _add_bench_idle(kinds)


def _add_bench_ttft(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "ttft",
        help="time to first token as a conversation grows: reuse off, warm, local",
        usage="%(prog)s [options] [-- vLLM flags for every engine]",
        allow_abbrev=False,
    )
    _add_engines(parser)
    _add_connector(parser)
    parser.add_argument(
        "--setup", default="qwen3-32b", metavar="NAME", help="loopback: the cost model (default: %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=_numbers, metavar="N,N,...", help="prompt lengths")
    parser.add_argument("--new-tokens", type=int, metavar="N", help="what each turn adds to its history")
    parser.add_argument("--repeats", type=int, metavar="N")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the rows")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write two plots, as PNG and SVG")
    parser.set_defaults(run=_bench_ttft)


def _bench_ttft(args: argparse.Namespace) -> int:
    with _installed("bench"):
        from backhaul_bench import command
    from backhaul_connector.launch.cluster import Connector

    options = command.Options(
        engines=args.engines,
        setup=args.setup,
        model=args.model,
        python=args.python,
        connector=Connector(args.connector),
        vllm_args=tuple(args.passed_on),
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        json=args.json,
        out=args.out,
    )
    with _engine_trouble():
        try:
            return command.main(options)
        except command.OptionsError as error:
            raise CommandError(str(error)) from error


def _add_bench_overhead(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "overhead",
        help="what the router adds to a turn, embedded and served, over the engine calls that it makes",
        allow_abbrev=False,
    )
    parser.add_argument("--body-bytes", type=_numbers, metavar="N,N,...", help="(default: 2000,200000)")
    parser.add_argument("--concurrency", type=_numbers, metavar="N,N,...", help="turns at a time (default: 1,32)")
    parser.add_argument(
        "--turns", type=int, metavar="N", help="for each figure; large bodies get a quarter (default: 200)"
    )
    _add_connector(parser)
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the rows")
    parser.set_defaults(run=_bench_overhead)


def _bench_overhead(args: argparse.Namespace) -> int:
    with _installed("bench"):
        from backhaul_bench import command, overhead
    given = {name: getattr(args, name) for name in ("body_bytes", "concurrency", "turns", "connector", "json")}
    options = command.OverheadOptions(**{name: value for name, value in given.items() if value is not None})
    try:
        return command.measure_overhead(options)
    except (command.OptionsError, overhead.NotWarm, OSError) as error:
        raise CommandError(str(error)) from error


def _add_bench_client(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "client",
        help="what a call costs the agent's process: openai's client and ours",
        epilog="Exit status: 1 if the two sent different bodies.",
        allow_abbrev=False,
    )
    parser.add_argument("--messages", type=_numbers, metavar="N,N,...", help="in a history (default: 2,20,200)")
    parser.add_argument("--repeats", type=_count, metavar="N", help="for each figure (default: 50)")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the rows")
    parser.set_defaults(run=_bench_client)


def _bench_client(args: argparse.Namespace) -> int:
    with _installed("bench"):
        from backhaul_bench import client
    given = {name: getattr(args, name) for name in ("messages", "repeats", "json")}
    options = client.Options(**{name: value for name, value in given.items() if value is not None})
    if min(options.messages) < 1:
        raise CommandError("--messages: 1 or more")
    return client.main(options)


def _add_bench_scale(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "scale",
        help="what a turn's decisions and a conversation's memory cost, from a thousand to a million conversations "
        "(no engines needed)",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--conversations", type=_numbers, metavar="N,N,...", help="(default: 1000,10000,100000,1000000)"
    )
    parser.add_argument(
        "--tokens", type=_count, default=1_024, metavar="N", help="of each history (default: %(default)s)"
    )
    parser.add_argument(
        "--turns", type=_count, default=400, metavar="N", help="measured at each step (default: %(default)s)"
    )
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the rows")
    parser.set_defaults(run=_bench_scale)


def _bench_scale(args: argparse.Namespace) -> int:
    with _installed("bench"):
        from backhaul_bench import scale
    if args.conversations is not None and min(args.conversations) < 1:
        raise CommandError("--conversations: 1 or more")
    if args.tokens < 1_024:
        raise CommandError(f"--tokens {args.tokens}: 1024 or more, so that a handle is worth reading")
    steps = {} if args.conversations is None else {"conversations": args.conversations}
    return scale.main(scale.Options(**steps, tokens=args.tokens, turns=args.turns, json=args.json))


def _add_bench_peers(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "peers", help="backhaul serve beside vllm-router, over the same loopback engines", allow_abbrev=False
    )
    parser.add_argument(
        "--vllm-router", type=Path, required=True, metavar="PATH", help="the program, such as .../bin/vllm-router"
    )
    parser.add_argument("--body-bytes", type=_numbers, metavar="N,N,...", help="(default: 2000,200000)")
    parser.add_argument("--concurrency", type=_numbers, metavar="N,N,...", help="requests at a time (default: 1,32)")
    parser.add_argument(
        "--turns",
        type=_count,
        metavar="N",
        help="for each figure; large bodies get a quarter (default: 200); of the conversation (default: 6)",
    )
    parser.add_argument(
        "--conversation",
        nargs="?",
        const="qwen3-32b",
        metavar="SETUP",
        help="instead: time to first token of a growing conversation, on engines of a cost model (default: %(const)s)",
    )
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the rows")
    parser.set_defaults(run=_bench_peers)


def _bench_peers(args: argparse.Namespace) -> int:
    with _installed("bench"):
        from backhaul_bench import peers, peers_conversation, setups
    names = ["vllm_router", "turns", "json"]
    if not args.conversation:
        names += ["body_bytes", "concurrency"]
    elif args.body_bytes or args.concurrency:
        raise CommandError("--conversation goes without --body-bytes and --concurrency")
    elif args.conversation not in setups.SETUPS:
        raise CommandError(f"--conversation {args.conversation}: use one of {', '.join(setups.SETUPS)}")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    try:
        if args.conversation:
            setup = setups.SETUPS[args.conversation]
            return peers_conversation.main(peers_conversation.Options(setup=setup, **given))
        options = peers.Options(**given)
        if min(options.concurrency) < 1 or min(options.body_bytes) < 2_000:
            raise CommandError("--concurrency: 1 or more; --body-bytes: 2000 or more")
        return peers.main(options)
    except (peers.PeerError, OSError) as error:
        raise CommandError(str(error)) from error


def _add_bench_digests(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "digests",
        help="what proving a long history costs the engines' schedulers, and the wire (no engines needed)",
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=_count, default=131_072, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--block-size", type=_count, default=16, metavar="TOKENS", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=_count, default=30, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=_bench_digests)


def _bench_digests(args: argparse.Namespace) -> int:
    with _installed("bench"):
        from backhaul_bench import digests
    if args.tokens < args.block_size:
        raise CommandError(f"--tokens {args.tokens}: at least one block of {args.block_size}")
    names = ("tokens", "block_size", "repeats", "json")
    return digests.main(digests.Options(**{name: getattr(args, name) for name in names}))


def _add_bench_retention(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "retention",
        help="what it costs to keep what nobody goes on with (no engines needed)",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--fit", type=_count, default=8, metavar="N", help="requests that D has room for (default: %(default)s)"
    )
    parser.add_argument("--requests", type=_count, default=80, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the rows")
    parser.set_defaults(run=_bench_retention)


def _bench_retention(args: argparse.Namespace) -> int:
    with _installed("bench"):
        from backhaul_bench import retention
    options = retention.Options(**{name: getattr(args, name) for name in ("fit", "requests", "json")})
    try:
        return retention.main(options)
    except retention.TurnFailed as error:
        raise CommandError(str(error)) from error


def _add_bench_idle(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "idle", help="the processor time of an idle decode engine (vLLM, started here), without and with a lease"
    )
    _add_model(parser, "tiny")
    _add_connector(parser)
    parser.add_argument("--seconds", type=_count, default=10, metavar="S", help="for each line (default: %(default)s)")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the rows")
    parser.set_defaults(run=_bench_idle)


def _bench_idle(args: argparse.Namespace) -> int:
    with _installed("bench"):
        from backhaul_bench import idle
    from backhaul_connector.launch.cluster import Connector

    names = ("model", "python", "seconds", "json")
    options = idle.Options(connector=Connector(args.connector), **{name: getattr(args, name) for name in names})
    with _engine_trouble():
        return idle.main(options)


def _add_bench_exact(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "exact",
        help="random conversations, edited at random: does reuse ever change an answer",
        epilog="Exit status: 1 if any answer was wrong.",
        allow_abbrev=False,
    )
    _add_engines(parser)
    parser.add_argument("--proof", choices=("tokens", "connector"), default="tokens", help="(default: %(default)s)")
    parser.add_argument("--conversations", type=_count, default=1000, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="(default: %(default)s)")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the counts, and wrong answers in full")
    parser.set_defaults(run=_bench_exact)


def _bench_exact(args: argparse.Namespace) -> int:
    from backhaul_bench import exact
    from backhaul_router.report import Proof

    names = ("engines", "model", "python", "conversations", "seed", "json")
    options = exact.Options(proof=Proof(args.proof), **{name: getattr(args, name) for name in names})
    with _engine_trouble():
        return exact.main(options)


def _add_bench_exact_histories(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "exact-histories",
        help="what `exact_histories` gains an agent that calls tools (vLLM engines)",
        allow_abbrev=False,
    )
    _add_model(parser, "smollm2")
    parser.add_argument(
        "--conversations", type=_count, default=8, metavar="N", help="of eight turns (default: %(default)s)"
    )
    _add_connector(parser)
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=_bench_exact_histories)


def _bench_exact_histories(args: argparse.Namespace) -> int:
    from backhaul_bench import exact_histories

    names = ("model", "python", "conversations", "connector", "json")
    with _engine_trouble():
        return exact_histories.main(exact_histories.Options(**{name: getattr(args, name) for name in names}))


def _add_bench_retokenise(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = kinds.add_parser(
        "retokenise",
        help="how often a model's own answer becomes other tokens when it is sent back (vLLM engines)",
        allow_abbrev=False,
    )
    _add_model(parser, "smollm2")
    parser.add_argument(
        "--conversations", type=_count, default=12, metavar="N", help="of six turns (default: %(default)s)"
    )
    parser.add_argument("--answer-tokens", type=_count, default=120, metavar="N", help="at most (default: %(default)s)")
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write the answers that differ")
    parser.set_defaults(run=_bench_retokenise)


def _bench_retokenise(args: argparse.Namespace) -> int:
    from backhaul_bench import retokenise

    names = ("model", "python", "conversations", "answer_tokens", "json")
    with _engine_trouble():
        return retokenise.main(retokenise.Options(**{name: getattr(args, name) for name in names}))


def _add_engines(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines",
        choices=("loopback", "vllm"),
        default="loopback",
        help="loopback: no model, times from a cost model; vllm: real ones, started here (default: %(default)s)",
    )
    parser.add_argument(
        "--model", default="tiny", metavar="DIR_OR_NAME", help="vllm: as for `up` (default: %(default)s)"
    )
    parser.add_argument("--python", metavar="PATH", help="vllm: the Python that has it (default: this one)")


def _add_model(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--model", default=default, metavar="DIR_OR_NAME", help="as for `up` (default: %(default)s)")
    parser.add_argument("--python", metavar="PATH", help="the Python that has vLLM (default: this one)")


def _add_connector(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connector",
        choices=("backhaul", "stock"),
        default="backhaul",
        help="what moves KV: backhaul's own, or vLLM's (default: %(default)s)",
    )


def _new_file(text: str) -> Path:
    """Refused before minutes of measuring, not after them."""
    path = Path(text)
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no file can be written there")
    return path


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a number of 1 or more")
    return int(text)


def _file_or_stdout(text: str) -> Path | str:
    return text if text == "-" else _new_file(text)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers with commas between, such as 512,1024") from None


@contextlib.contextmanager
def _installed(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "matplotlib"):
            raise
        raise CommandError(f"this needs {error.name}: pip install 'backhaul[{extra}]'") from error


@contextlib.contextmanager
def _engine_trouble() -> Iterator[None]:
    import openai
    from backhaul_connector.launch import cluster

    try:
        yield
    except cluster.LaunchError as error:
        raise CommandError(str(error), error.detail) from error
    except (openai.OpenAIError, OSError) as error:
        raise CommandError(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
