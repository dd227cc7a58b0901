"""Drafters (plain torch), family by family, and their checkpoint format."""

from sglang_ext.drafters.family import DEFAULT, DrafterOptions, Family, families, family, parse_drafter

__all__ = ["DEFAULT", "DrafterOptions", "Family", "families", "family", "parse_drafter"]
