"""rayspec: sweep, compare and serve speculative draft heads on SGLang."""

__version__ = "0.1.0"
