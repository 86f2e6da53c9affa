"""Public face: Tenants and their API keys, for a server that is put together by hand."""

from .serve.tenants import Tenants

__all__ = ["Tenants"]
