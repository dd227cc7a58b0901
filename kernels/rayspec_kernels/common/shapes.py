"""Sizes at which every operation is checked and timed."""

from typing import NamedTuple


class Shape(NamedTuple):
    name: str
    vocab: int
    hidden: int

    @property
    def rank(self) -> int:
        """SlimSpec's and SpecVocab's: an eighth of the width, as the papers find best."""
        return max(1, self.hidden // 8)


MODELS = (
    Shape("Llama-3.1-8B", 128256, 4096),
    Shape("Qwen3-30B-A3B", 151936, 2048),
    Shape("Gemma-3-27B", 262144, 5376),
)
BATCHES = (1, 64, 4, 16)  # the ends first, since a suite that is out of time leaves out the rest

# for correctness alone: several tiles with a rest, and widths that no block divides where the format allows it
SMALL = (Shape("small", 301, 128), Shape("odd", 173, 72), Shape("wide", 90, 512), Shape("tiny", 17, 8))
SMALL_BATCHES = (1, 3, 19)
