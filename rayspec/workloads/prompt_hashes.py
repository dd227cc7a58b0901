"""Which prompts are for evaluation, told by the hash of their text: what a training must not hold.

`evaluation_hashes.json` has those of the published sets that every paper reports, so that they are told apart also
where their files are not; of any other set, those of its file. What is found is a prompt as it stands, or as a
paragraph of a longer text; one that is reworded, or in the middle of a paragraph, is not.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable

from rayspec.shipped import ASSETS
from rayspec.workloads.published import evaluation_sets, load_named
from rayspec.workloads.records import Conversation

REPORTED = ("gsm8k", "humaneval", "mt_bench", "spec_bench")
# {set: hashes of its turns, sorted, with spaces between}; with the sets under $RAYSPEC_DATA it is written anew by
#   python -c "from rayspec.workloads import prompt_hashes as p; p.PUBLISHED_HASHES.write_text(p.published_hashes())"
PUBLISHED_HASHES = ASSETS / "prompts" / "evaluation_hashes.json"
FENCE = re.compile(r"^\s*(```|~~~)\w*\s*$", re.MULTILINE)
PARAGRAPHS = re.compile(r"\n\s*\n")


def prompt_hash(text: str) -> str:
    """Hash of the letters and digits alone, so that case, spaces, punctuation, composed accents and the fences of code
    make no other prompt."""
    bare = re.sub(r"\W+", "", unicodedata.normalize("NFKC", FENCE.sub("", text)))
    return hashlib.sha256(bare.casefold().encode()).hexdigest()[:16]


def part_hashes(text: str) -> set[str]:
    """Of the text, and of each of its paragraphs."""
    return {prompt_hash(part) for part in (text, *PARAGRAPHS.split(text))}


def hashes(conversations: Iterable[Conversation]) -> set[str]:
    """The hash of every turn of the user."""
    return {prompt_hash(turn) for c in conversations for turn in c.turns}


def evaluation_hashes() -> set[str]:
    """Of all prompts that are for evaluation: MT-Bench's, HumanEval's, GSM8K's and Spec-Bench's, those that ship, and
    those of any published set under $RAYSPEC_DATA."""
    published = json.loads(PUBLISHED_HASHES.read_text()).values()
    return {h for found in evaluation_sets() for h in hashes(found)}.union(*(of_set.split() for of_set in published))


def published_hashes() -> str:
    """The text of PUBLISHED_HASHES. Raises ValueError where a set is not there."""
    return json.dumps({name: " ".join(sorted(hashes(load_named(name)))) for name in REPORTED}, indent=1) + "\n"
