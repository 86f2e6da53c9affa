"""The process that looks after workers: when it starts one again, and the address that it holds for them."""

from __future__ import annotations

import socket

import pytest
from backhaul_router.errors import ConfigError
from backhaul_router.serve.listening import let_share, listen, share
from backhaul_router.serve.supervisor import MOST_FAILURES, STEADY_S, Worker


def test_a_worker_that_keeps_ending_is_started_after_longer_and_longer_pauses() -> None:
    worker = Worker(1)
    pauses = [worker.pause_s(1.0) for _ in range(12)]
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses == sorted(pauses)
    assert (pauses[-1], worker.failures > MOST_FAILURES) == (30.0, True)


def test_one_that_fails_for_days_is_still_started_again() -> None:
    assert Worker(1, failures=100_000).pause_s(1.0) == 30.0


def test_one_that_has_served_for_long_is_started_soon() -> None:
    worker = Worker(1, failures=MOST_FAILURES)
    assert (worker.pause_s(STEADY_S + 1), worker.failures) == (0.1, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_an_address_that_workers_share_is_nobody_elses(host: str) -> None:
    """Neither before they listen nor afterwards; the one that holds it gets none of their connections."""
    with listen(host, 0) as holder:
        let_share(holder)
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            listen(host, port)
        with share(holder) as one, share(holder) as other:
            for listener in (one, other):
                listener.listen(100)
                listener.setblocking(False)
            with pytest.raises(ConfigError, match="in use"):
                listen(host, port)
            clients = [socket.create_connection(("::1" if ":" in host else "127.0.0.1", port)) for _ in range(40)]
            counts = [accepted(listener) for listener in (one, other)]
            for client in clients:
                client.close()
    assert sum(counts) == 40
    assert min(counts) > 0  # the system draws lots


def accepted(listener: socket.socket) -> int:
    number = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return number
        number += 1
