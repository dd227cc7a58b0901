"""Drafters (plain torch), family by family, and their checkpoint format."""

from sglang_ext.drafters.family import DEFAULT, Family, families, family

__all__ = ["DEFAULT", "Family", "families", "family"]
