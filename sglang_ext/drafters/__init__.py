"""Drafters (plain torch), family by family, and their checkpoint format."""

from sglang_ext.drafters.base import DrafterOptions
from sglang_ext.drafters.family import DEFAULT, Family, body_for, families, family, parse_drafter

__all__ = ["DEFAULT", "DrafterOptions", "Family", "body_for", "families", "family", "parse_drafter"]
