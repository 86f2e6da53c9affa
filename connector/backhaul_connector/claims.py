"""Thread pool for a prefill engine's claims, which are made away from its scheduler's thread.

The scheduler asks for a claim and looks in again at its next steps; a pool of threads does the talking. A claim that its
request no longer wants is given back as soon as it is granted, so that no hold outlives its request by more than an answer's
time. What is to be said to one holder waits in a line of its own, for a few threads at most, so that a holder that is gone
delays nobody else; and when it gives one no answer, whoever waited behind that one is not kept waiting again.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from backhaul_protocol import VERSION
from backhaul_protocol import lease_channel as wire
from backhaul_protocol.lease_channel import Answer, Decline, Done, Message
from backhaul_protocol.why import Why

from .lease_channel import BrokenChannel, LeaseClient, WrongAnswer

WORKERS = 64
WORKERS_PER_HOLDER = 4

logger = logging.getLogger("vllm.backhaul_connector.leases")


@dataclass(frozen=True)
class Target:
    """A lease, and where it can be claimed."""

    host: str
    port: int
    lease: str
    engine: str
    epoch: str
    shared: bool


class Claim:
    """One claim on its way, or answered. `ends` is when its hold is over, on this process's monotonic clock."""

    def __init__(self, target: Target, blocks: int, last_hash: bytes, hold_s: float, tail: bytes | None = None) -> None:
        self.target = target
        self.id = uuid.uuid4().hex
        self.message = wire.Claim(
            v=VERSION,
            lease=target.lease,
            engine=target.engine,
            epoch=target.epoch,
            blocks=blocks,
            hash=last_hash,
            hold_s=hold_s,
            claim=self.id,
            tail=tail,
        )
        self.answer: Answer | None = None
        self.made = time.monotonic()
        self.ends = 0.0
        self.took_ms = 0.0
        self.unwanted = False
        self._lock = threading.Lock()

    @property
    def granted(self) -> bool:
        return self.answer is not None and self.answer.ok

    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def settle(self, answer: Answer, began: float) -> bool:
        """Takes the answer; whether anyone still wants it."""
        with self._lock:
            self.ends = began + self.message.hold_s
            self.took_ms = (time.monotonic() - began) * 1e3
            self.answer = answer
            return not self.unwanted

    def give_up(self) -> bool:
        """Nobody will use the claim; whether there is a granted one to be given back now."""
        with self._lock:
            self.unwanted = True
            return self.granted


@dataclass
class _Line:
    """What is still to be said to one holder."""

    waiting: deque[Callable[[_Line], object]] = field(default_factory=deque)
    workers: int = 0
    broke: float = float("-inf")
    """When it last gave no answer."""


class Claims:
    """The pool. Its methods return at once."""

    def __init__(self, *, timeout_s: float, hold_s: float) -> None:
        self.timeout_s = timeout_s
        self.hold_s = hold_s
        self._client = LeaseClient(timeout_s)
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="backhaul-claims")
        self._lines: dict[tuple[str, int], _Line] = {}
        self._misunderstood: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def claim(self, target: Target, blocks: int, last_hash: bytes, tail: bytes | None = None) -> Claim:
        claim = Claim(target, blocks, last_hash, self.hold_s, tail)
        self._submit(target, lambda line: self._claim(line, claim))
        return claim

    def is_overdue(self, claim: Claim) -> bool:
        """Whether an answer has been waited for long enough, whatever it is that a thread is busy with: looking up a name,
        say, has no time limit."""
        return claim.answer is None and time.monotonic() - claim.made > self.timeout_s

    def _claim(self, line: _Line, claim: Claim) -> None:
        if claim.unwanted:
            return
        began = time.monotonic()
        answer = self._ask(line, claim.target, claim.message, claim.made) or Answer(ok=False, why=Why.UNREACHABLE)
        if not claim.settle(answer, began) and answer.ok:
            self._ask(line, claim.target, Done(claim.target.lease, claim.id, read=False), time.monotonic())

    def done(self, claim: Claim, *, read: bool) -> None:
        """The read is over, or will never begin."""
        if claim.give_up():
            self._tell(claim.target, Done(claim.target.lease, claim.id, read=read))

    def decline(self, target: Target) -> None:
        """Lets the holder free a lease that it keeps for this reader alone."""
        if not target.shared:
            self._tell(target, Decline(target.lease))

    def _tell(self, target: Target, message: Message) -> None:
        made = time.monotonic()
        self._submit(target, lambda line: self._ask(line, target, message, made))

    def _ask(self, line: _Line, target: Target, message: Message, made: float) -> Answer | None:
        """`None` where the holder gives no answer, or gave none since the message was `made`."""
        if line.broke > made:
            return None
        try:
            return self._client.ask(target.host, target.port, message)
        except WrongAnswer as error:
            self._misunderstand(target, error)
            return Answer(ok=False, why=Why.MALFORMED)
        except BrokenChannel as error:
            logger.warning("Backhaul: the holder of lease %s gave no answer: %s", target.lease, error)
        except Exception:
            logger.exception("Backhaul: the holder of lease %s could not be asked", target.lease)
        line.broke = time.monotonic()
        return None

    def _misunderstand(self, target: Target, error: WrongAnswer) -> None:
        """Told once of each holder."""
        with self._lock:
            first = (target.host, target.port) not in self._misunderstood
            self._misunderstood.add((target.host, target.port))
        if first:
            logger.error(
                "Backhaul: the holder of lease %s answers in words that this release does not know: run all engines with the"
                " same release. What it holds is computed: %s",
                target.lease,
                error,
            )

    def _submit(self, target: Target, task: Callable[[_Line], object]) -> None:
        address = target.host, target.port
        with self._lock:
            if self._closed:
                return
            line = self._lines.setdefault(address, _Line())
            line.waiting.append(task)
            if line.workers < WORKERS_PER_HOLDER:
                line.workers += 1
                self._pool.submit(self._work, address, line)

    def _work(self, address: tuple[str, int], line: _Line) -> None:
        while True:
            with self._lock:
                if self._closed or not line.waiting:
                    line.workers -= 1
                    if not line.workers:
                        del self._lines[address]
                    return
                task = line.waiting.popleft()
            task(line)

    def close(self) -> None:
        """Ends what is under way; takes no longer than the threads need to notice."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()
