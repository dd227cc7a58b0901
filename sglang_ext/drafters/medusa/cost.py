"""What a verify step costs a Medusa drafter: what it costs every drafter that reads the last hidden state alone."""

from sglang_ext.drafters.shared.last_hidden.cost import count

__all__ = ["count"]
