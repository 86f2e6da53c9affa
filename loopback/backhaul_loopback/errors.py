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
    def invalid(cls, message: str, *, param: str) -> ApiError:
        """A field is missing or of another type, which vLLM leaves to pydantic and FastAPI."""
        text = f"1 validation error:\n  {{'type': 'value_error', 'loc': '{param}', 'msg': '{message}'}}"
        return cls(400, "Bad Request", text, param=param)

    @classmethod
    def bad_request(cls, message: str, *, param: str | None = None, value: object = None) -> ApiError:
        """A rule of vLLM's own is broken (`VLLMValidationError`)."""
        named = {"parameter": param, "value": value}
        extras = ", ".join(f"{name}={given}" for name, given in named.items() if given is not None)
        return cls(400, "BadRequestError", f"{message} ({extras})" if extras else message, param=param)

    @classmethod
    def unknown_model(cls, model: str, served: str) -> ApiError:
        message = f"The model `{model}` does not exist. Valid aliases: {served}."
        return cls(404, "NotFoundError", message, param="model")

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
