"""TLS contexts, with errors that name the file: the server's own, and the one for engines behind `https`."""

from __future__ import annotations

import ssl
from pathlib import Path

from ..errors import ConfigError


def server_context(cert: str, key: str | None) -> ssl.SSLContext:
    """What clients connect to. `cert` is a PEM file with the certificate and those that lead to its authority, `key` one with its
    private key, where that is not in the same file. Raises `ConfigError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert, key)
    return context


def load_certificate(context: ssl.SSLContext, cert: str, key: str | None) -> None:
    """Has connections to come use the files as they are now. Raises `ConfigError`, and leaves the context as it was."""
    for setting, path in (("tls_cert", cert), ("tls_key", key)):
        if path is not None:
            _check_readable(setting, path)
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for one in (trial, context):
        try:
            one.load_cert_chain(cert, key, password=_no_password)
        except ssl.SSLError as error:
            raise ConfigError(f"tls_cert={cert}, tls_key={key or cert}: {_why(error)}") from None


def client_context(ca_file: str | None) -> ssl.SSLContext:
    """For connections to engines. `ca_file` has the certificates of the authorities to trust, in place of the system's. Raises
    `ConfigError`."""
    if ca_file is None:
        return ssl.create_default_context()
    _check_readable("engine_ca_file", ca_file)
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise ConfigError(f"engine_ca_file={ca_file}: there are no certificates in it (PEM)") from None


def _check_readable(setting: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{setting}={path}: {error.strerror or error}") from None


def _no_password() -> str:
    """Instead of a question at the terminal, which nobody may be at."""
    return ""


def _why(error: ssl.SSLError) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    if error.reason in ("BAD_DECRYPT", "BAD_PASSWORD_READ", "PROBLEMS_GETTING_PASSWORD", None):
        return "not a certificate with its key in PEM, without a password"
    return f"not a certificate with its key in PEM ({error.reason})"
