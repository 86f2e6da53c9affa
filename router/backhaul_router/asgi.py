"""Public face: The router as an ASGI application."""

from .serve.asgi import App, make_app

__all__ = ["App", "make_app"]
