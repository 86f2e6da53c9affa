"""Public face: The router, for programs that embed it themselves."""

from .drive.router import Reply, Request, Router

__all__ = ["Reply", "Request", "Router"]
