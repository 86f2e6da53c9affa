"""KV connector for vLLM: leases, claims and proofs (`connector`), patches (`vllm_patches`), how engines start (`launch`)."""
