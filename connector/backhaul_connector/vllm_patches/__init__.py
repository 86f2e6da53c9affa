"""What is changed inside vLLM where a release lacks it: the plugin that vLLM loads, and the patches that it applies."""
