"""Engines on Ray.

`runtime` hosts one SGLang engine and knows no Ray; `load` sends it a block of prompts; `head_latency` times heads
alone; `processes` keeps what an engine starts in hand; `actor` is the thin Ray shell around `runtime`, and the caller's
handle.
"""
