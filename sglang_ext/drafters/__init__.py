"""Drafters (plain torch) and their checkpoint format."""
