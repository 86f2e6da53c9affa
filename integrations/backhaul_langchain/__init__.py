"""LangChain chat models that run on a Backhaul router."""

from .chat_models import ChatBackhaul

__all__ = ["ChatBackhaul"]
