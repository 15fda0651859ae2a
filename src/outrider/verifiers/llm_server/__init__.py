"""The verifier for vLLM and SGLang servers."""
