"""A calibration on disk: a folder of calibration.safetensors (the tensors) and calibration.json (how they were made).

Tensors, all int64: `ids` [k], the most useful first, stop tokens in front; `cluster_of` [V], 0 for pinned tokens;
`bigram_indptr` [V + 1], `bigram_ids` [P] and `bigram_counts` [P], how often each token followed another (CSR); and
`counts` [V]. A calibration has `ids`, `cluster_of` or the bigram; the names of the first two are those that
`from_target` of the heads in sglang_ext.heads takes. To give a head what calibration made for it:

    tensors, provenance = load_artifacts(folder, target.info(), target.eos_ids)
    head_from_target(config, target_head_VH, tensors)  # its HeadConfig

V = vocabulary, k = kept tokens, P = distinct pairs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rayspec.shipped import calibration_path
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.folder_kinds import CALIBRATED, CALIBRATION, CALIBRATION_JSON
from sglang_ext.folders import save_tensors, written_whole
from sglang_ext.json_text import parse_json
from sglang_ext.trees.slim import SlimOptions, SlimTree

FORMAT_VERSION = 1
BIGRAM = ("bigram_indptr", "bigram_ids", "bigram_counts")
AGAIN = "make it again with rayspec calibrate"


def load_artifacts(
    path: str | Path, target: TargetInfo | None = None, stop_ids: Iterable[int] = ()
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """(tensors, calibration.json) of a calibration: a folder, or the name of one of the target's.

    Raises ValueError for anything missing, unknown or contradictory, and for a calibration of another vocabulary than
    `target`'s or one that was made without some of its `stop_ids`.
    """
    folder = Path(calibration_path(str(path), *([target.name] if target else [])))
    description = read_description(folder)
    try:
        tensors = load_file(folder / CALIBRATED)
    except (FileNotFoundError, SafetensorError) as error:
        raise ValueError(f"calibration {folder}: {CALIBRATED} cannot be read ({error}); {AGAIN}") from error
    own = description["target"]
    check_tensors(tensors, own["vocab_size"], description["stop_ids"], folder)
    if target is not None:
        for key in ("vocab_size", "tokenizer_sha256"):
            if own[key] != getattr(target, key):
                raise ValueError(
                    f"calibration {folder} was made for target {own['name']!r} with {key} {own[key]}, but target "
                    f"{target.name!r} has {getattr(target, key)}; {AGAIN} target={target.name}"
                )
    lost = sorted(set(stop_ids) - set(description["stop_ids"]))
    if lost:
        raise ValueError(
            f"calibration {folder} does not know the stop tokens {lost}, so drafts could not end there; {AGAIN}, with "
            "the generation config that the target has now"
        )
    return tensors, description


def read_description(folder: Path) -> dict[str, Any]:
    """calibration.json. Raises ValueError if it is missing or of another format."""
    file = folder / CALIBRATION_JSON
    if not file.is_file():
        raise ValueError(f"no calibration at {folder}: {CALIBRATION_JSON} is missing; {AGAIN}")
    try:
        description = parse_json(file.read_bytes())
        version = description["format_version"]
        if version == FORMAT_VERSION:
            own = description["target"]
            _ = own["name"], own["tokenizer_sha256"], range(own["vocab_size"]), set(map(range, description["stop_ids"]))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{file} is no description of a calibration ({error!r}); {AGAIN}") from error
    if version != FORMAT_VERSION:
        raise ValueError(f"{file} has format_version {version}, this release reads {FORMAT_VERSION}; {AGAIN}")
    return description


def check_tensors(tensors: Mapping[str, Tensor], vocab_size: int, stop_ids: Iterable[int], folder: Path) -> None:
    """Raise ValueError unless the tensors are a calibration of that vocabulary that keeps the stop tokens."""
    problems = [f"stop token {i} is not in 0..{vocab_size - 1}" for i in stop_ids if not 0 <= i < vocab_size]
    unknown = sorted(set(tensors) - {"ids", "cluster_of", "counts", *BIGRAM})
    if unknown:
        problems.append(f"unknown tensors {', '.join(unknown)}")
    has_bigram = set(tensors) >= set(BIGRAM)
    if "counts" not in tensors or not (has_bigram or {"ids", "cluster_of"} & set(tensors)):
        problems.append(
            "it needs counts, and ids, cluster_of or the three of a bigram; it has "
            f"{', '.join(sorted(tensors)) or 'nothing'}"
        )
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int64 or tensor.dim() != 1:
            problems.append(f"{name} must be int64 and one-dimensional, got {tensor.dtype} {list(tensor.shape)}")
        elif name in ("counts", "cluster_of") and len(tensor) != vocab_size:
            problems.append(f"{name} must have an entry a token ({vocab_size}), got {len(tensor)}")
        elif name == "bigram_indptr" and len(tensor) != vocab_size + 1:
            problems.append(f"{name} must have an entry a token and one more ({vocab_size + 1}), got {len(tensor)}")
    if not problems:
        if "ids" in tensors:
            problems += _problems_of_ids(tensors["ids"], vocab_size, set(stop_ids))
        if "cluster_of" in tensors:
            problems += _problems_of_clusters(tensors["cluster_of"], stop_ids)
        if has_bigram:
            problems += _problems_of_bigram({name: tensors[name] for name in BIGRAM})
        if bool((tensors["counts"] < 0).any()):
            problems.append("counts must not be negative")
    if problems:
        raise ValueError(f"calibration {folder}: {'; '.join(problems)}; {AGAIN}")


def _problems_of_ids(ids_k: Tensor, vocab_size: int, stop_ids: set[int]) -> list[str]:
    problems = []
    if not 1 <= len(ids_k) <= vocab_size:
        problems.append(f"ids must be 1..{vocab_size} tokens (the vocabulary), got {len(ids_k)}")
    elif not 0 <= int(ids_k.min()) <= int(ids_k.max()) < vocab_size:
        problems.append(f"ids must be in 0..{vocab_size - 1}")
    if len(ids_k.unique()) != len(ids_k):
        problems.append("ids holds a token twice")
    lost = sorted(stop_ids - set(ids_k[: len(stop_ids)].tolist()))
    if lost:
        problems.append(f"the stop tokens {lost} are not in front of ids, so a prefix of it could never end an answer")
    return problems


def _problems_of_clusters(cluster_of_V: Tensor, stop_ids: Iterable[int]) -> list[str]:
    problems = []
    if int(cluster_of_V.min()) < 0:
        problems.append("cluster_of is no partition: it holds a negative cluster")
    elif not bool(cluster_of_V.bincount()[1:].all()) or not bool(cluster_of_V.any()):
        problems.append("cluster_of is no partition into 1..M: a routed cluster is empty")
    loose = [token for token in stop_ids if int(cluster_of_V[token]) != 0]
    if loose:
        problems.append(f"the stop tokens {loose} are not in the pinned cluster 0")
    return problems


def _problems_of_bigram(tensors: Mapping[str, Tensor]) -> list[str]:
    indptr, ids_P, counts_P = (tensors[name] for name in BIGRAM)
    if len(ids_P) != len(counts_P):
        return [f"bigram_ids and bigram_counts must have an entry a pair each, got {len(ids_P)} and {len(counts_P)}"]
    try:
        SlimTree.with_counts(SlimOptions(correlation=False, pairs=len(ids_P)), indptr, ids_P, counts_P)
    except ValueError as error:
        return [str(error).replace("draft_tree.", "")]
    return []


def write_artifacts(
    folder: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any], extras: Mapping[str, bytes]
) -> None:
    """Write a calibration folder whole or not at all; `extras` are further files by name, such as figures.

    Raises ValueError for tensors that `load_artifacts` would refuse, and where anything but a calibration is there.
    """
    check_tensors(tensors, description["target"]["vocab_size"], description["stop_ids"], folder)
    text = json.dumps({"format_version": FORMAT_VERSION, **description}, indent=2) + "\n"
    with written_whole(folder, CALIBRATION) as draft:
        save_tensors({name: t.contiguous() for name, t in tensors.items()}, draft / CALIBRATED)
        (draft / CALIBRATION_JSON).write_text(text)
        for name, content in extras.items():
            (draft / name).write_bytes(content)
