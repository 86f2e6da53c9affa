"""Diagnostics behind `backhaul doctor`: asks every engine what it is, probes every pair, and says what is unsafe."""

from __future__ import annotations

import asyncio
import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..engine_key import ENGINE_KEY_VARIABLE
from ..errors import ConfigError
from ..fleet.engine import Engine, Role, check_fit
from .client import EngineClient
from .describe import Unreachable, describe
from .http_client import HttpClient
from .pair_probe import ProbeResult, Verdict, probe_pair


class Severity(enum.IntEnum):
    """Severity of a finding; the worst is the command's exit status."""

    GOOD = 0
    WARNING = 1
    """Turns run and are right, but reuse less than they could."""
    UNSAFE = 2
    """Turns would hang or fail, or none can run."""
    UNREACHABLE = 3
    """An engine does not answer, so nothing is known of it."""


@dataclass(frozen=True)
class Finding:
    """Diagnostic: what is wrong, and what to do about it."""

    severity: Severity
    where: str
    what: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """Facts that one engine shows of itself; `None` where it does not."""

    url: str
    role: Role
    answers: bool
    version: str | None = None
    models: tuple[str, ...] = ()
    block_size: int | None = None
    connector: str | None = None
    """`backhaul`, `stock`, or `none` where a probe showed that it keeps nothing for others."""
    bidirectional: bool | None = None
    ttl_s: float | None = None
    renders: bool | None = None
    streams_handles: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Report of a diagnosis: facts of engines and pairs, and the findings."""

    engines: tuple[EngineFacts, ...]
    pairs: tuple[ProbeResult, ...]
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        return max((finding.severity for finding in self.findings), default=Severity.GOOD)

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; findings name their severity."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        for shown, finding in zip(found["findings"], self.findings, strict=True):
            shown["severity"] = finding.severity.name.lower()
        return {"severity": self.severity.name.lower(), **found}


async def diagnose(
    prefill: Sequence[str],
    decode: Sequence[str],
    *,
    timeout_s: float = 10.0,
    threshold: int = 64,
    api_key: str | None = None,
    client: EngineClient | None = None,
) -> Diagnosis:
    """Examines engines by their URLs. What it makes them keep it also has them release. `timeout_s` limits each request,
    `threshold` is the engines' `kv_recompute_threshold`."""
    own = client or HttpClient(connect_timeout_s=min(5.0, timeout_s), api_key=api_key)
    wanted = [(url, Role.PREFILL) for url in prefill] + [(url, Role.DECODE) for url in decode]
    try:
        found: dict[str, Engine] = {}
        findings: list[Finding] = []
        answers = await asyncio.gather(*(_describe(own, url, role, timeout_s) for url, role in wanted))
        for (url, _), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Engine):
                found[url] = answer
                findings += _of_engine(answer)
            else:
                findings.append(answer)
        misfits = _misfits(found.values())
        findings += misfits
        pairs: list[ProbeResult] = []
        if not misfits:  # engines of two models or builds cannot hold a conversation
            for p, d in itertools.product(prefill, decode):
                if p in found and d in found:
                    pairs.append(await probe_pair(own, found[p], found[d], threshold=threshold, timeout_s=timeout_s))
        findings += _fixed_ids(pairs)
        for pair in pairs:
            findings += _of_pair(pair, found[pair.prefill], found[pair.decode])
    finally:
        if client is None:
            await own.aclose()
    engines = tuple(_facts(url, role, found.get(url), pairs) for url, role in wanted)
    return Diagnosis(engines=engines, pairs=tuple(pairs), findings=tuple(findings))


async def _describe(client: EngineClient, url: str, role: Role, timeout_s: float) -> Engine | Finding:
    try:
        return await describe(client, url, role, timeout_s)
    except Unreachable as error:
        advice = "start the engine, or correct its URL; see its log and its /health"
        return Finding(Severity.UNREACHABLE, url, str(error), advice)
    except ConfigError as error:
        key = "401" in str(error) or "403" in str(error)
        advice = f"put the engines' key into {ENGINE_KEY_VARIABLE}" if key else "run another engine there"
        return Finding(Severity.UNSAFE, url, str(error), advice)


def _of_engine(engine: Engine) -> Iterable[Finding]:
    def warning(what: str, advice: str) -> Finding:
        return Finding(Severity.WARNING, engine.url, what, advice)

    ours = engine.connector is not None
    if engine.block_size is None:
        yield warning("its /metrics do not tell the KV block size, so nothing can be proven", "let /metrics be read")
    if engine.role is Role.DECODE and not engine.streams_handles:
        pins = "" if ours else ", and each pins its blocks until the TTL"
        yield warning(
            f"{engine.silent_streams} hide the handle: those turns leave nothing to reuse{pins}",
            "install this package beside vLLM there: it brings a vLLM plugin",
        )
    if not ours and not engine.renders:
        yield warning(
            "it does not render for others (403 without --enable-scale-out): some requests cannot be proven",
            "start it with --enable-scale-out, or with our connector",
        )


def _misfits(engines: Iterable[Engine]) -> list[Finding]:
    found = []
    for first, other in itertools.combinations(engines, 2):
        try:
            check_fit((first, other))
        except ConfigError as error:
            advice = "serve one model with one vLLM build and one block size"
            found.append(Finding(Severity.UNSAFE, f"{first.url}, {other.url}", str(error), advice))
    return found


def _fixed_ids(pairs: Iterable[ProbeResult]) -> Iterable[Finding]:
    """One for each decode engine."""
    for url, engine_id in {pair.decode: pair.fixed_id for pair in pairs if pair.fixed_id is not None}.items():
        what = f"its engine_id is fixed ({engine_id!r}): what an earlier process held looks valid after a restart"
        advice = "leave engine_id out of --kv-transfer-config: vLLM then makes a new one at every start"
        yield Finding(Severity.WARNING, url, what, advice)


_P_CHANNEL = "P's side channel (VLLM_NIXL_SIDE_CHANNEL_HOST and port) must be reachable from D; see D's log"
_PAIR_ADVICE = {
    Verdict.HANGS: (
        Severity.UNSAFE,
        "P does not answer when it is given D's handle",
        'start P with bi-directional mode: kv_connector_extra_config {"bidirectional_kv_xfer": true}',
    ),
    Verdict.READ_FAILS: (
        Severity.UNSAFE,
        "P cannot read D's blocks",
        "D's side channel (VLLM_NIXL_SIDE_CHANNEL_HOST and port) must be reachable from P; see P's log for NIXL errors",
    ),
    Verdict.NO_PREFILL_HANDLE: (
        Severity.UNSAFE,
        "P keeps nothing for D, so no turn can run",
        "start P with a KV connector as kv_producer (`backhaul up --dry-run` prints the flags)",
    ),
    Verdict.PREFILL_FAILS: (Severity.UNSAFE, "P does not answer a plain request", "see P's log"),
    Verdict.DECODE_FAILS: (Severity.UNSAFE, "D does not answer a request with P's handle", _P_CHANNEL),
    Verdict.NO_DECODE_HANDLE: (
        Severity.WARNING,
        "D keeps nothing for P, so every turn is cold",
        'start D with a KV connector as kv_consumer and {"bidirectional_kv_xfer": true}',
    ),
    Verdict.NOT_READ: (
        Severity.WARNING,
        "P answered and read nothing, so every turn is cold",
        "look at the reason; P's kv_recompute_threshold may be above --kv-recompute-threshold",
    ),
    Verdict.UNSEEN: (
        Severity.WARNING,
        "P answered and does not say whether it read",
        "start P with --enable-prompt-tokens-details",
    ),
}


def _of_pair(pair: ProbeResult, prefill: Engine, decode: Engine) -> Iterable[Finding]:
    where = f"{pair.prefill} reads from {pair.decode}"
    if pair.verdict in _PAIR_ADVICE:
        severity, what, advice = _PAIR_ADVICE[pair.verdict]
        yield Finding(severity, where, f"{what}: {pair.detail or pair.verdict}", advice)
    if pair.received == 0:
        yield Finding(Severity.WARNING, where, "D computed the prompt again instead of reading it from P", _P_CHANNEL)
    if (prefill.connector is None) is not (decode.connector is None):
        what = "one of them runs our connector and the other does not: reuse needs a proof by token ids"
        yield Finding(Severity.WARNING, where, what, "run our connector on both")
    for what in pair.left_pinned:
        yield Finding(Severity.WARNING, where, what, "nothing: the blocks are free when their TTL ends")


def _facts(url: str, role: Role, engine: Engine | None, pairs: Sequence[ProbeResult]) -> EngineFacts:
    if engine is None:
        return EngineFacts(url=url, role=role, answers=False)
    is_prefill = role is Role.PREFILL
    own = [pair for pair in pairs if (pair.prefill if is_prefill else pair.decode) == url]
    verdicts = {pair.verdict for pair in own}
    off = Verdict.HANGS if is_prefill else Verdict.NO_DECODE_HANDLE
    connector = "stock" if engine.connector is None else "backhaul"
    if is_prefill and Verdict.NO_PREFILL_HANDLE in verdicts:
        connector = "none"
    return EngineFacts(
        url=url,
        role=role,
        answers=True,
        version=engine.version,
        models=engine.models,
        block_size=engine.block_size,
        connector=connector,
        bidirectional=True if Verdict.WARM in verdicts else False if off in verdicts else None,
        ttl_s=None if is_prefill else next((pair.ttl_s for pair in own if pair.ttl_s is not None), None),
        renders=engine.renders,
        streams_handles=None if is_prefill else engine.streams_handles,
    )


# --- as text ---------------------------------------------------------------------------------------------------------------


def table(diagnosis: Diagnosis) -> str:
    """The diagnosis for a terminal."""
    engines = [("engine", "role", "vLLM", "model", "block", "connector", "both ways", "TTL", "renders", "streams")]
    engines += [
        (
            facts.url,
            str(facts.role),
            facts.version or "no answer",
            ", ".join(facts.models) or "-",
            _shown(facts.block_size),
            facts.connector or "-",
            _shown(facts.bidirectional),
            "-" if facts.ttl_s is None else f"{round(facts.ttl_s, 1):g} s",
            _shown(facts.renders),
            _shown(facts.streams_handles),
        )
        for facts in diagnosis.engines
    ]
    pairs = [("P", "D", "verdict", "offered", "read", "ms")]
    pairs += [
        (pair.prefill, pair.decode, str(pair.verdict), str(pair.offered), _shown(pair.pulled), f"{pair.ms:.0f}")
        for pair in diagnosis.pairs
    ]
    parts = [_columns(engines)]
    if diagnosis.pairs:
        parts.append(_columns(pairs))
    parts += [
        f"{finding.severity.name}  {finding.where}\n  {finding.what}\n  -> {finding.advice}"
        for finding in sorted(diagnosis.findings, key=lambda finding: -finding.severity)
    ]
    if not diagnosis.findings:
        parts.append("all good: every prefill engine reads what every decode engine holds")
    return "\n\n".join(parts)


def _shown(value: int | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
