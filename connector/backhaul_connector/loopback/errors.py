"""Errors in the shapes of vLLM 0.32's API server (`serve/exception_handling`)."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An HTTP error answer. `type` is vLLM's, which differs between the layers that reject a request."""

    def __init__(self, status: int, type_: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.type = type_
        self.message = message
        self.param = param

    @classmethod
    def invalid(cls, message: str, *, param: str | None = None) -> ApiError:
        """The body does not fit the request's schema: vLLM rejects it before the endpoint runs."""
        text = f"1 validation error:\n  {{'type': 'value_error', 'msg': 'Value error, {message}'}}"
        return cls(400, "Bad Request", text, param=param)

    @classmethod
    def bad_request(cls, message: str, *, param: str | None = None) -> ApiError:
        """The endpoint looked at the request and refused it."""
        return cls(400, "BadRequestError", message, param=param)

    @classmethod
    def unknown_model(cls, model: str) -> ApiError:
        return cls(404, "NotFoundError", f"The model `{model}` does not exist.", param="model")

    @classmethod
    def forbidden(cls, message: str) -> ApiError:
        return cls(403, "PermissionDeniedError", message)

    @classmethod
    def internal(cls, message: str = "Internal server error") -> ApiError:
        """What a failed KV load is told as: vLLM names no cause."""
        return cls(500, "InternalServerError", message)

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}


class EngineDeadError(Exception):
    """The engine core died of an assertion, as vLLM's does; every later request fails with 500, `/health` with 503."""


class KVLoadError(Exception):
    """Blocks could not be read from the peer. Under policy `fail` the request ends with 500."""
