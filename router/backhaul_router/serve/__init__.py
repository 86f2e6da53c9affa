"""The router as a server: ASGI application, settings, tenants, admission, metrics."""
