"""Engines that serve a target over HTTP: vLLM and SGLang, as they are."""
