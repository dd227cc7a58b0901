"""Which prompts are for evaluation, told by the hash of their text: what a training must not hold.

`evaluation_hashes.json` has those of the published sets that every paper reports, so that they are told apart also
where their files are not; of any other set, those of its file.
"""

import hashlib
import json
import re
from collections.abc import Iterable

from rayspec.shipped import ASSETS
from rayspec.workloads.published import evaluation_sets
from rayspec.workloads.records import Conversation

# {set: hashes of its turns, sorted}; tests/rayspec/test_prompt_hashes.py makes them again
PUBLISHED_HASHES = ASSETS / "prompts" / "evaluation_hashes.json"


def prompt_hash(text: str) -> str:
    """Hash of the letters and digits alone, so that case, spaces and punctuation make no other prompt."""
    return hashlib.sha256(re.sub(r"\W+", "", text).casefold().encode()).hexdigest()[:16]


def hashes(conversations: Iterable[Conversation]) -> set[str]:
    """The hash of every turn of the user."""
    return {prompt_hash(turn) for c in conversations for turn in c.turns}


def evaluation_hashes() -> set[str]:
    """Of all prompts that are for evaluation: MT-Bench's, HumanEval's, GSM8K's and Spec-Bench's, those that ship, and
    those of any published set under $RAYSPEC_DATA."""
    published = json.loads(PUBLISHED_HASHES.read_text())
    return {h for found in evaluation_sets() for h in hashes(found)}.union(*published.values())
