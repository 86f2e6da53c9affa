"""Monkey patches of vLLM where a release lacks something: the plugin that vLLM loads, and the patches that it applies."""
