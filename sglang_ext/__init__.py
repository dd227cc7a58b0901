"""Speculative heads and drafters (plain torch) and the adapter that hosts them in SGLang."""

DRAFT_STEPS = 4  # drafts of a step where nothing else is said
