"""Clients, proxy and weight updates for unmodified engines that serve a target over HTTP: vLLM and SGLang."""
