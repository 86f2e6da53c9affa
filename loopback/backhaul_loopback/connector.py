"""Policy of an engine that runs Backhaul's connector: the decisions about one request after the other.

P locates the common part of a handle and its prompt by what D published, claims it from D, and reads it only if D says
that these blocks hold exactly that. D keeps leases and answers claims. Whatever cannot be read is computed.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from backhaul_connector import handles, locators
from backhaul_connector.claims import Target
from backhaul_connector.handles import Handle
from backhaul_connector.lease_channel import BrokenChannel
from backhaul_protocol import KEY, VERSION
from backhaul_protocol.account import DecodeAccount, PrefillAccount
from backhaul_protocol.lease_channel import Answer, Claim, Decline, Done, Message
from backhaul_protocol.leases import Lease, LeaseOperation
from backhaul_protocol.messages import (
    Asked,
    Published,
    from_decode,
    from_prefill,
    has_token_proof,
    read_asked,
    read_published,
)
from backhaul_protocol.why import DECLINED, Why

from . import transfer
from .blocks import Block, chain_digest
from .clock import Clock
from .config import EngineConfig, Faults
from .errors import KVLoadError
from .lease_channel import LeaseClient
from .leases import Leases
from .metrics import BYTES_PER_TOKEN, ConnectorMetrics
from .reader import ExpiredError, HoldEndedError
from .reuse import Grant, Reuse
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
        blocks: int,
        release: Callable[[Sequence[Block]], None],
        let_go: Callable[[Params], None],
    ) -> None:
        """`blocks`: how many there are. `let_go` tells P that its blocks will not be read."""
        self._config = config
        self._clock = clock
        self._faults = faults
        self._let_go = let_go
        self.metrics = ConnectorMetrics()
        self.leases = Leases(
            engine_id=engine_id,
            clock=clock,
            blocks=blocks,
            max_leased_fraction=config.max_leased_fraction,
            metrics=self.metrics,
            release=release,
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
        handles.normalize(params)
        asked, from_p = read_asked(params), bool(params.get("do_remote_prefill"))
        reuse = seq.reuse = Reuse(
            named=KEY in params, is_prefill_leg=bool(params.get("do_remote_decode")), retain=from_p
        )
        if asked is not None:
            reuse.asked, reuse.retain = asked, asked.retain
        why = None
        if reuse.is_prefill_leg:
            why = self._arrived_on_p(seq, reuse, params) if handles.has_handle(params) else None
        elif reuse.asked.leases is not None:
            reuse.operated = self.leases.operate(reuse.asked.leases, self._config.decoder_kv_blocks_ttl)
            _strip(params)
        else:
            if asked is None and params.get(KEY) is not None:
                reuse.why = Why.MALFORMED
            if reuse.asked.release:
                self.leases.operate(LeaseOperation(release=reuse.asked.release), 0.0)
            if from_p:
                why = self._arrived_on_d(seq, reuse.asked, params)
            else:
                _strip(params)
        if why is not None:
            self._refuse(seq, reuse, why)

    def _arrived_on_p(self, seq: Seq, reuse: Reuse, params: Params) -> Why | None:
        """Why nothing of the handle can be read, if so."""
        if not self._config.bidirectional_kv_xfer:
            return Why.BIDIRECTIONAL_OFF
        handle, offer = _read_handle(params), read_published(params)
        if handle is None:
            return Why.MALFORMED
        if offer is Why.NO_DIGESTS and has_token_proof(params):
            return self._take_proven(seq, reuse, params, handle)
        return offer if isinstance(offer, Why) else self._locate(seq, reuse, handle, offer)

    def _take_proven(self, seq: Seq, reuse: Reuse, params: Params, handle: Handle) -> Why | None:
        """The whole blocks of a handle that the router has compared with the prompt, and cut."""
        size = self._config.block_size
        held = (handle.remote_num_tokens or 0) // size * size
        tokens = min(held, (seq.num_prompt - 1) // size * size)
        ids = handle.cut(size, tokens)
        if ids is None:
            return Why.MALFORMED
        reuse.by_tokens, reuse.offered, reuse.verified = True, held, tokens
        params |= {"remote_block_ids": ids, "remote_num_tokens": tokens}
        return None

    def _locate(self, seq: Seq, reuse: Reuse, handle: Handle, offer: Published) -> Why | None:
        size, published = self._config.block_size, locators.read(offer.digests or "")
        if published is None:
            return Why.MALFORMED
        reuse.offered = len(published) // locators.LOCATOR_BYTES * offer.block_size
        if offer.whole or offer.block_size != size:
            return Why.UNSUPPORTED
        reuse.holder = Target(
            host=handle.remote_host,
            port=offer.lease.port,
            lease=handle.remote_request_id,
            engine=handle.remote_engine_id,
            epoch=offer.epoch,
            shared=offer.lease.shared,
        )
        reuse.located = locators.common(published, seq.digests[: (seq.num_prompt - 1) // size])
        reuse.verified = reuse.located * size
        return None if reuse.located else Why.DIVERGED

    def _arrived_on_d(self, seq: Seq, asked: Asked, params: Params) -> Why | None:
        handle = _read_handle(params)
        ids = None if handle is None else handle.cut(self._config.block_size, seq.num_prompt)
        if ids is None:
            self._let_go(dict(params))
            return Why.MALFORMED
        params["remote_block_ids"] = ids
        differs = asked.prompt_hash is not None and asked.prompt_hash != self._prompt_hash(seq)
        differs |= asked.prompt_tail is not None and asked.prompt_tail != self._prompt_tail(seq).hex()
        if differs or asked.prompt_tokens not in (None, seq.num_prompt):
            self._let_go(dict(params))
            return Why.PROMPT_DIFFERS
        return None

    # -- before blocks are taken -----------------------------------------------------------------------------

    async def claim(self, seq: Seq, num_local: int) -> None:
        """Has D hold what is worth reading beyond the `num_local` tokens that this engine has itself."""
        reuse = seq.reuse
        if reuse is None or reuse.holder is None or not reuse.located or reuse.grant is not None:
            return
        count = reuse.located * self._config.block_size - num_local
        if count <= 0 or count < self._config.kv_recompute_threshold:
            self._refuse(seq, reuse, Why.LOCAL_HIT if count <= 0 else Why.BELOW_THRESHOLD)
            return
        # Not cancelled with the request: a claim that D may have granted has to be given back.
        reuse.claiming = self._spawn(self._claim(seq, reuse, reuse.holder))
        await asyncio.shield(reuse.claiming)

    async def _claim(self, seq: Seq, reuse: Reuse, holder: Target) -> None:
        claim, started, hold_s = uuid.uuid4().hex, self._clock.now(), self._config.hold_s
        message = Claim(
            v=VERSION,
            lease=holder.lease,
            engine=holder.engine,
            epoch=holder.epoch,
            blocks=reuse.located,
            hash=seq.digests[reuse.located - 1],
            hold_s=hold_s,
            claim=claim,
        )
        try:
            answer = await self._client.ask(holder.host, holder.port, message)
        except BrokenChannel:
            answer = Answer(ok=False, why=Why.UNREACHABLE)
        reuse.claim_s += self._clock.now() - started
        tokens = reuse.located * self._config.block_size
        if not answer.ok:
            self._refuse(seq, reuse, answer.why or Why.MALFORMED)
            return
        reuse.grant = Grant(claim, started, started + hold_s)
        if answer.tokens != tokens or [len(ids) for ids in answer.block_ids] != [reuse.located]:
            self._return_claim(reuse, read=False)
            self._refuse(seq, reuse, Why.MALFORMED)
        elif seq.params is not None:
            seq.params |= {
                "remote_block_ids": answer.block_ids,
                "remote_num_tokens": tokens,
                "remote_blocks_expiry_time": None,
            }
            seq.params["remote_port"] = answer.peer["remote_port"]

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
                self._refuse(seq, reuse, Why.LOCAL_HIT)
                return 0
            seq.read_before = grant.ends - min(_MARGIN_S, self._config.hold_s / 5)
            return count
        threshold = self._config.kv_recompute_threshold
        count = transfer.external_tokens(
            params, num_prompt=seq.num_prompt, num_local=seq.num_local, threshold=threshold
        )
        if reuse.by_tokens and not count:
            reuse.why = Why.LOCAL_HIT if 0 < reuse.verified <= seq.num_local else Why.BELOW_THRESHOLD
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
            known = {HoldEndedError: Why.HOLD_ENDED, ExpiredError: Why.EXPIRED}
            reuse.why = known.get(type(error), Why.READ_FAILED)
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

    def ttl_s(self, seq: Seq) -> float:
        """For how long a request's blocks are leased."""
        return (seq.reuse and seq.reuse.asked.retain_s) or self._config.decoder_kv_blocks_ttl

    def retain(self, seq: Seq) -> Sequence[Block]:
        """Leases the whole blocks of a finished request, if they are to be kept. The rest stay the request's."""
        reuse, whole = seq.reuse, seq.num_computed // self._config.block_size
        if reuse is None or reuse.operated is not None or not reuse.retain or not self._config.bidirectional_kv_xfer:
            return ()
        blocks, seq.blocks = seq.blocks[:whole], seq.blocks[whole:]
        leased = whole and self.leases.add(
            seq.request_id,
            blocks,
            seq.digests[:whole],
            block_size=self._config.block_size,
            ttl_s=self.ttl_s(seq),
            shared=reuse.asked.shared,
        )
        return blocks if leased else ()

    def decode_answer(self, seq: Seq, leased: Sequence[Block]) -> dict[str, Any] | None:
        """The `backhaul` object of D's answer; `None` for a router that does not know of it and gets no handle."""
        reuse = seq.reuse
        if reuse is None or not (leased or reuse.named):
            return None
        if reuse.operated is not None:
            return from_decode(leases=reuse.operated.to_dict())
        account = DecodeAccount(seq.num_prompt, received=seq.num_external, local=seq.num_local, why=reuse.why)
        published = None
        if leased:
            digests = locators.pack(seq.digests[: len(leased)])
            if self._faults.lie_digests is not None:
                digests = self._faults.lie_digests(digests)
            published = Published(
                version=VERSION,
                digests=base64.b64encode(digests).decode(),
                block_size=self._config.block_size,
                epoch=self.leases.epoch,
                lease=Lease(port=self.lease_port, ttl_s=self.ttl_s(seq), shared=reuse.asked.shared),
            )
        return from_decode(account.to_dict(len(seq.output)), published)

    def prefill_answer(self, seq: Seq) -> dict[str, Any]:
        """The `backhaul` object of P's answer."""
        reuse = seq.reuse or Reuse()
        account = PrefillAccount(
            seq.num_prompt,
            offered=reuse.offered,
            verified=reuse.verified,
            local=seq.num_local,
            pulled=seq.num_external,
            bytes=seq.num_external * BYTES_PER_TOKEN,
            read_ms=seq.read_s * 1000 if seq.reading else None,
            claim_ms=reuse.claim_s * 1000 if reuse.claiming is not None else None,
            why=reuse.why,
        )
        return from_prefill(account, seq.num_prompt, self._prompt_hash(seq), self._prompt_tail(seq))

    def _prompt_hash(self, seq: Seq) -> str | None:
        """Of the prompt's last whole block, which through the chain stands for all; `None` for a prompt without one."""
        whole = seq.num_prompt // self._config.block_size
        return seq.digests[whole - 1].hex() if whole else None

    def _prompt_tail(self, seq: Seq) -> bytes:
        """Of the whole prompt, what lies behind its last whole block included."""
        whole = seq.num_prompt // self._config.block_size
        rest = seq.keys[whole * self._config.block_size : seq.num_prompt]
        return chain_digest(seq.digests[whole - 1] if whole else b"", rest, "" if whole else seq.salt)

    def exposition(self) -> str:
        return self.metrics.exposition(self._config.model, *self.leases.count())

    def answer(self, message: Message) -> Answer:
        """D's word on what came over its lease channel."""
        return self.leases.answer(message, lambda: {"remote_port": self.side_channel_port})

    # -- inside ----------------------------------------------------------------------------------------------

    def _refuse(self, seq: Seq, reuse: Reuse, why: Why) -> None:
        """Nothing will be read: the lease that was meant for this one read can end, a claim on it too."""
        reuse.why = why
        if seq.params is not None:
            _strip(seq.params)
        self._return_claim(reuse, read=False)
        holder, reuse.located = reuse.holder, 0
        if holder is not None and not holder.shared and why in DECLINED:
            self._tell(holder, Decline(lease=holder.lease))

    def _return_claim(self, reuse: Reuse, *, read: bool) -> None:
        grant, holder = reuse.grant, reuse.holder
        if grant is not None and holder is not None and not grant.returned:
            grant.returned = True
            self._tell(holder, Done(lease=holder.lease, claim=grant.claim, read=read))

    def _tell(self, holder: Target, message: Message) -> None:
        if not self._closed:
            self._spawn(self._send(holder, message))

    async def _send(self, holder: Target, message: Message) -> None:
        try:
            await self._client.ask(holder.host, holder.port, message)
        except BrokenChannel:
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


def _read_handle(params: Params) -> Handle | None:
    """This engine has one KV cache group."""
    handle = handles.read_handle(params)
    return handle if handle is not None and len(handle.remote_block_ids) == 1 else None


def _strip(params: Params) -> None:
    """Leaves nothing to be read; whether the request is P's leg stays."""
    handles.strip(params)
    params["do_remote_prefill"] = False
