"""LangChain chat models that run on a Backhaul router."""
