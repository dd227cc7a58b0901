"""Speculative heads and drafters (plain torch) and the adapter that hosts them in SGLang."""
