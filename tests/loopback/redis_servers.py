"""A Redis or Valkey server of a test's own."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")
START_S = 10.0


@dataclass
class RedisServer:
    """Without persistence, unless `persists`: it then writes what happens once a second, as many do."""

    folder: Path
    port: int
    persists: bool = False
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Returns when it answers."""
        assert PROGRAM is not None
        save = ("--appendonly", "yes", "--appendfsync", "always") if self.persists else ("--appendonly", "no")
        command = [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            [*command, *save], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        deadline = time.monotonic() + START_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"{PROGRAM} did not start on port {self.port}")
            time.sleep(0.005)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """It stands still: connections stay open, and nothing is answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """One command; the first bytes of its answer."""
        with socket.create_connection(("127.0.0.1", self.port), 5.0) as connection:
            connection.sendall(" ".join(words).encode() + b"\r\n")
            return connection.recv(65536)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def redis_server(*, persists: bool = False) -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), free_port(), persists)
        server.start()
        try:
            yield server
        finally:
            server.kill()
