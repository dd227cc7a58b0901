"""Speculative heads and drafters (plain torch) and the adapter that hosts them in SGLang."""

DRAFT_STEPS = 4  # drafts of a step where nothing else is said
COUNT_SHORTLISTS = "RAYSPEC_COUNT_SHORTLISTS"  # environment: 1 has an engine on an accelerator count what heads score
