"""What the engine does when it runs Backhaul's connector: the decisions about one request after the other.

P locates the common part of a handle and its prompt by what D published, claims it from D, and reads it only if D says
that these blocks hold exactly that. D keeps leases and answers claims. Whatever cannot be read is computed.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from . import account, asks, transfer
from .asks import Asked, HandleFields
from .blocks import Block, chain_digest
from .clock import Clock
from .config import EngineConfig, Faults
from .connector_metrics import ConnectorMetrics
from .errors import KVLoadError
from .lease_channel import Answer, Claim, Decline, Done, LeaseClient, Question, UnreachableError
from .leased import DecodeLease, DecodeLeases
from .metrics import BYTES_PER_TOKEN
from .reader import ExpiredError, HoldEndedError
from .reuse import Grant, Holder, Reuse
from .sequence import Seq
from .transfer import Params

_MARGIN_S = 2.0
"""How long before the end of D's hold a read has to be over, for what lies between the two clocks."""


class Connector:
    def __init__(
        self,
        config: EngineConfig,
        clock: Clock,
        faults: Faults,
        *,
        engine_id: str,
        max_blocks: int,
        release: Callable[[Sequence[Block]], None],
        let_go: Callable[[Params], None],
    ) -> None:
        """`let_go` tells P that its blocks will not be read."""
        self._config = config
        self._clock = clock
        self._faults = faults
        self._let_go = let_go
        self.metrics = ConnectorMetrics()
        self.leases = DecodeLeases(
            engine_id=engine_id, clock=clock, max_blocks=max_blocks, metrics=self.metrics, release=release
        )
        self.lease_port = config.lease_port
        self.side_channel_port = config.side_channel_port
        self._client = LeaseClient(config.claim_timeout_s)
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    # -- a request comes -------------------------------------------------------------------------------------

    def arrived(self, seq: Seq) -> None:
        """Decides what the request may read, and takes everything else out of its parameters. `seq` has its digests."""
        params = seq.params
        if not params:
            return
        asks.normalize(params)
        asked, bad = asks.read_asked(params.get("backhaul"))
        from_p = bool(params.get("do_remote_prefill"))
        reuse = seq.reuse = Reuse(
            asked or Asked(),
            named="backhaul" in params,
            is_prefill_leg=bool(params.get("do_remote_decode")),
            retain=from_p if asked is None else asked.retain,
        )
        self._obey(reuse)
        if reuse.is_prefill_leg:
            why = self._arrived_on_p(seq, reuse, params, bad) if asks.names_blocks(params) else None
        elif from_p:
            why = self._arrived_on_d(seq, reuse, params)
        else:
            why = None
            asks.strip(params)
        if why is not None:
            self._refuse(seq, reuse, why)
        elif bad is not None:
            reuse.why = bad

    def _obey(self, reuse: Reuse) -> None:
        for lease_id in reuse.asked.release:
            self.leases.release(lease_id)
        if reuse.asked.leases is not None:
            reuse.orders = self.leases.carry_out(reuse.asked.leases, self._config.decoder_kv_blocks_ttl)

    def _arrived_on_p(self, seq: Seq, reuse: Reuse, params: Params, bad: str | None) -> str | None:
        """Why nothing of the handle can be read, if so."""
        asked, handle = reuse.asked, asks.read_handle(params)
        if not self._config.bidirectional_kv_xfer:
            return "bidirectional_off"
        if handle is None:
            return "malformed"
        if bad is not None:
            return bad
        if asked.digests is not None:
            return self._locate(seq, reuse, handle)
        if asked.proof != "tokens":
            return "no_digests"
        return self._take_proven(seq, reuse, params, handle)

    def _take_proven(self, seq: Seq, reuse: Reuse, params: Params, handle: HandleFields) -> str | None:
        """The whole blocks of a handle that the router has compared with the prompt, and cut."""
        size = self._config.block_size
        held = handle.remote_num_tokens // size * size
        tokens = min(held, (seq.num_prompt - 1) // size * size)
        ids = asks.cut(handle, size, tokens)
        if ids is None:
            return "malformed"
        reuse.by_tokens, reuse.offered, reuse.verified = True, held, tokens
        params |= {"remote_block_ids": ids, "remote_num_tokens": tokens}
        return None

    def _locate(self, seq: Seq, reuse: Reuse, handle: HandleFields) -> str | None:
        asked, locators, size = reuse.asked, reuse.asked.locators, self._config.block_size
        if asked.whole or asked.block_size != size:
            return "unsupported"
        if locators is None or asked.lease is None or asked.epoch is None:
            return "malformed"
        reuse.holder = Holder(
            engine_id=handle.remote_engine_id,
            lease=handle.remote_request_id,
            host=handle.remote_host,
            port=asked.lease.port,
            epoch=asked.epoch,
            shared=asked.lease.shared,
        )
        reuse.offered = len(locators) * size
        for locator, digest in zip(locators, seq.digests[: (seq.num_prompt - 1) // size], strict=False):
            if not digest.startswith(locator):
                break
            reuse.located += 1
        reuse.verified = reuse.located * size
        return None if reuse.located else "diverged"

    def _arrived_on_d(self, seq: Seq, reuse: Reuse, params: Params) -> str | None:
        asked, handle, size = reuse.asked, asks.read_handle(params), self._config.block_size
        if handle is None:
            if (sender := asks.sender_of(params)) is not None:
                self._let_go(sender)
            return "malformed"
        ids = asks.cut(handle, size, seq.num_prompt)
        if ids is None:
            self._let_go(dict(params))
            return "malformed"
        params["remote_block_ids"] = ids
        differs = asked.prompt_hash is not None and asked.prompt_hash != self._prompt_hash(seq)
        differs |= asked.prompt_tail is not None and asked.prompt_tail != self._prompt_tail(seq)
        if differs or asked.prompt_tokens not in (None, seq.num_prompt):
            self._let_go(dict(params))
            return "prompt_differs"
        return None

    # -- before blocks are taken -----------------------------------------------------------------------------

    async def claim(self, seq: Seq, num_local: int) -> None:
        """Has D hold what is worth reading beyond the `num_local` tokens that this engine has itself."""
        reuse = seq.reuse
        if reuse is None or reuse.holder is None or not reuse.located or reuse.grant is not None:
            return
        count = reuse.located * self._config.block_size - num_local
        if count <= 0 or count < self._config.kv_recompute_threshold:
            self._refuse(seq, reuse, "local_hit" if count <= 0 else "below_threshold")
            return
        # Not cancelled with the request: a claim that D may have granted has to be given back.
        reuse.claiming = self._spawn(self._claim(seq, reuse, reuse.holder))
        await asyncio.shield(reuse.claiming)

    async def _claim(self, seq: Seq, reuse: Reuse, holder: Holder) -> None:
        claim, started, hold_s = uuid.uuid4().hex, self._clock.now(), self._config.hold_s
        question = Claim(
            v=asks.WIRE_VERSION,
            lease=holder.lease,
            engine=holder.engine_id,
            epoch=holder.epoch,
            blocks=reuse.located,
            hash=seq.digests[reuse.located - 1],
            hold_s=hold_s,
            claim=claim,
        )
        try:
            answer = await self._client.ask(holder.host, holder.port, question)
        except UnreachableError:
            answer = Answer(False, "unreachable")
        reuse.claim_s += self._clock.now() - started
        tokens = reuse.located * self._config.block_size
        if not answer.ok:
            self._refuse(seq, reuse, answer.why or "malformed")
            return
        reuse.grant = Grant(claim, started, started + hold_s)
        if answer.tokens != tokens or [len(ids) for ids in answer.block_ids or ()] != [reuse.located]:
            self._return_claim(reuse, read=False)
            self._refuse(seq, reuse, "malformed")
        elif seq.params is not None:
            seq.params |= {
                "remote_block_ids": answer.block_ids,
                "remote_num_tokens": tokens,
                "remote_blocks_expiry_time": None,
            }
            if answer.peer is not None and "port" in answer.peer:
                seq.params["remote_port"] = answer.peer["port"]

    def external_tokens(self, seq: Seq) -> int | None:
        """Tokens to read, once the engine's own are known; `None` when D's hold is nearly over: claim again."""
        reuse, params = seq.reuse, seq.params
        if reuse is None or not params:
            return 0
        if (grant := reuse.grant) is not None and not grant.returned:
            if self._clock.now() > (grant.granted + grant.ends) / 2:
                self._return_claim(reuse, read=False)
                reuse.grant = None
                return None
            count = reuse.verified - seq.num_local
            if count <= 0:
                self._refuse(seq, reuse, "local_hit")
                return 0
            seq.read_before = grant.ends - min(_MARGIN_S, self._config.hold_s / 5)
            return count
        threshold = self._config.kv_recompute_threshold
        count = transfer.external_tokens(
            params, num_prompt=seq.num_prompt, num_local=seq.num_local, threshold=threshold
        )
        if reuse.by_tokens and not count:
            reuse.why = "local_hit" if 0 < reuse.verified <= seq.num_local else "below_threshold"
        return count

    # -- what became of the read -----------------------------------------------------------------------------

    def read_ended(self, seq: Seq, ok: bool) -> None:
        """A read that had begun is over, whether its request is still there or not."""
        if seq.reuse is not None:
            self._return_claim(seq.reuse, read=ok)

    def loaded(self, seq: Seq, error: KVLoadError | None) -> None:
        """The request has the KV that it gets, and goes on to compute the rest."""
        reuse = seq.reuse
        if reuse is None:
            return
        if error is not None:
            known = {HoldEndedError: "hold_ended", ExpiredError: "expired"}
            reuse.why = known.get(type(error), "read_failed")
        if not reuse.is_prefill_leg:
            return
        metrics, pulled = self.metrics, seq.num_external
        metrics.local_tokens += seq.num_local
        metrics.offered_tokens += reuse.offered
        metrics.verified_tokens += reuse.verified
        metrics.pulled_tokens += pulled
        metrics.pulled_bytes += pulled * BYTES_PER_TOKEN
        if reuse.offered or reuse.why is not None:
            metrics.verifications[reuse.why or "verified"] += 1

    def ended(self, seq: Seq) -> None:
        """The request is over; a claim for a read that never began is given back."""
        reuse = seq.reuse
        if reuse is None or seq.reading:
            return
        if reuse.claiming is not None and not reuse.claiming.done():
            reuse.claiming.add_done_callback(lambda _: self._return_claim(reuse, read=False))
        else:
            self._return_claim(reuse, read=False)

    # -- answers ---------------------------------------------------------------------------------------------

    def retain(self, seq: Seq) -> DecodeLease | None:
        """Leases the whole blocks of a finished request, if they are to be kept. The rest stay the request's."""
        reuse, whole = seq.reuse, seq.num_computed // self._config.block_size
        if reuse is None or reuse.orders is not None or not reuse.retain or not whole:
            return None
        if not self._config.bidirectional_kv_xfer:
            return None
        blocks, seq.blocks = seq.blocks[:whole], seq.blocks[whole:]
        return self.leases.add(
            seq.request_id,
            blocks,
            seq.digests[:whole],
            tokens=whole * self._config.block_size,
            ttl_s=reuse.asked.retain_s or self._config.decoder_kv_blocks_ttl,
            shared=reuse.asked.shared,
        )

    def decode_answer(self, seq: Seq, lease: DecodeLease | None) -> dict[str, Any] | None:
        """The `backhaul` object of D's answer; `None` for a router that does not know of it and gets no handle."""
        reuse = seq.reuse
        if reuse is None or (lease is None and not reuse.named):
            return None
        answer: dict[str, Any] = {"version": asks.WIRE_VERSION}
        if reuse.orders is not None:
            return answer | {"leases": reuse.orders}
        if lease is not None:
            digests = asks.publish(lease.digests)
            if self._faults.lie_digests is not None:
                digests = self._faults.lie_digests(digests)
            answer |= {
                "digests": base64.b64encode(digests).decode(),
                "block_size": self._config.block_size,
                "epoch": self.leases.epoch,
                "lease": {
                    "port": self.lease_port,
                    "ttl_s": lease.deadline - self._clock.now(),
                    "shared": lease.shared,
                },
            }
        return answer | {"account": account.of_decode(seq)}

    def prefill_answer(self, seq: Seq) -> dict[str, Any]:
        """The `backhaul` object of P's answer."""
        return {
            "version": asks.WIRE_VERSION,
            "account": account.of_prefill(seq),
            "prompt_hash": self._prompt_hash(seq),
            "prompt_tail": self._prompt_tail(seq),
            "prompt_tokens": seq.num_prompt,
        }

    def _prompt_hash(self, seq: Seq) -> str | None:
        """Of the prompt's last whole block, which through the chain stands for all; `None` for a prompt without one."""
        whole = seq.num_prompt // self._config.block_size
        return seq.digests[whole - 1].hex() if whole else None

    def _prompt_tail(self, seq: Seq) -> str:
        """Of the whole prompt, what lies behind its last whole block included."""
        whole = seq.num_prompt // self._config.block_size
        rest = seq.keys[whole * self._config.block_size : seq.num_prompt]
        return chain_digest(seq.digests[whole - 1] if whole else b"", rest, "" if whole else seq.salt).hex()

    def exposition(self) -> str:
        leases = self.leases
        return self.metrics.exposition(
            model=self._config.model, leases=len(leases), leased_blocks=leases.num_blocks, oldest_s=leases.oldest_s
        )

    def answer(self, question: Question) -> Answer:
        """D's word on a question that came over its lease channel."""
        match question:
            case Claim():
                found = self.leases.claim(question)
                if isinstance(found, str):
                    return Answer(False, found)
                ids = [block.id for block in found.blocks[: question.blocks]]
                tokens = question.blocks * self._config.block_size
                return Answer(True, block_ids=[ids], tokens=tokens, peer={"port": self.side_channel_port})
            case Done():
                self.leases.done(question)
            case Decline():
                self.leases.decline(question.lease)
        return Answer(True)

    # -- inside ----------------------------------------------------------------------------------------------

    def _refuse(self, seq: Seq, reuse: Reuse, why: str) -> None:
        """Nothing will be read: the lease that was meant for this one read can end, a claim on it too."""
        reuse.why = why
        if seq.params is not None:
            asks.strip(seq.params)
        self._return_claim(reuse, read=False)
        holder, reuse.located = reuse.holder, 0
        if holder is not None and not holder.shared and why in ("diverged", "below_threshold", "local_hit"):
            self._tell(holder, Decline(lease=holder.lease))

    def _return_claim(self, reuse: Reuse, *, read: bool) -> None:
        grant, holder = reuse.grant, reuse.holder
        if grant is not None and holder is not None and not grant.returned:
            grant.returned = True
            self._tell(holder, Done(lease=holder.lease, claim=grant.claim, read=read))

    def _tell(self, holder: Holder, message: Question) -> None:
        if not self._closed:
            self._spawn(self._send(holder, message))

    async def _send(self, holder: Holder, message: Question) -> None:
        try:
            await self._client.ask(holder.host, holder.port, message)
        except UnreachableError:
            return  # D lets go by itself when the hold or the lease runs out

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def aclose(self) -> None:
        """Ends what is going on; from now on nobody is told anything, as when a process dies."""
        self._closed = True
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._client.aclose()
