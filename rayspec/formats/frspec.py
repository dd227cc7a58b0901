"""FR-Spec's token lists (thunlp/FR-Spec, fr/fr.py), which SGLang takes as --speculative-token-map: freq_<size>.pt.

A pickled list (or tensor) of ids, the most frequent first. fr.py appends the ids of the encoded stop token even where
they are in the list already, so that some stand twice. Also read: safetensors with one integer tensor. Becomes a
calibration, whose stop tokens stand in front; how often each token came is not published, and is 0 there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rayspec.formats.result import Target, Tokens
from rayspec.formats.source import PICKLED, Source


def recognise(source: Source) -> bool:
    return source.path.is_file() and source.path.suffix in (*PICKLED, ".safetensors")


def read(source: Source, target: Target) -> Tokens:
    if not source.path.is_file():
        raise ValueError(f"{source.path} is a folder; name the one list to take, such as {source.path}/freq_32768.pt")
    found = source.load()
    if isinstance(found, Mapping) and len(found) == 1:
        (found,) = found.values()
    if isinstance(found, list) and all(type(i) is int for i in found):
        found = torch.tensor(found, dtype=torch.int64)
    if not isinstance(found, Tensor) or found.dim() != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(f"{source.path} must be a list of token ids, got {type(found).__name__}")
    vocabulary, stops = target.frozen.model.config.vocab_size, list(target.frozen.eos_ids)
    listed = found.tolist()
    outside = [i for i in listed if not 0 <= i < vocabulary]
    if outside or not listed:
        raise ValueError(
            f"{source.path} holds {outside[0] if outside else 'no ids'}; ids must be in 0..{vocabulary - 1} (the "
            f"vocabulary of {target.name}); name its own target"
        )
    once = list(dict.fromkeys(listed))
    added = [i for i in stops if i not in set(once)]
    notes = [f"{len(once)} different ids of {len(listed)}; the stop tokens {stops} stand in front"]
    if added:
        notes.append(f"the stop tokens {added} were not in the list, and are added to it")
    ids = torch.tensor([*stops, *(i for i in once if i not in set(stops))], dtype=torch.int64)
    return Tokens(ids=ids, notes=tuple(notes))
