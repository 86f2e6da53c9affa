"""HTTP clients to a router elsewhere, as openai makes them, on one TLS context: to load the certificates takes many milliseconds,
and applications make their models often."""

from __future__ import annotations

import functools
from typing import Any

from backhaul._http import openais_http_module
from openai._base_client import AsyncHttpxClientWrapper, SyncHttpxClientWrapper


def client() -> Any:
    return SyncHttpxClientWrapper(verify=_tls())


def async_client() -> Any:
    return AsyncHttpxClientWrapper(verify=_tls())


@functools.cache
def _tls() -> Any:
    return openais_http_module().create_ssl_context()
