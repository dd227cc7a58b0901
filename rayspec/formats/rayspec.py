"""A drafter of ours (docs/architecture.md): read to be exported, written when others' are imported."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rayspec.formats.result import Converted, Target
from rayspec.formats.source import Source
from sglang_ext.drafters.checkpoint import read_tensors
from sglang_ext.drafters.checkpoint_config import FORMAT_VERSION, CheckpointInfo, empty_drafter, parse_info
from sglang_ext.fingerprints import weights_sha256


def recognise(source: Source) -> bool:
    return "rayspec" in source.config


def read(source: Source, target: Target) -> Converted:
    info = parse_info(source.config, str(source.path))
    if info.target is None:
        raise ValueError(f"{source.path} is a stock EAGLE-3 drafter; read it as --format specforge")
    info.target.check_served_with(target.frozen.info(target.name, info.target.tap_layers), str(source.path))
    if info.tree is not None:
        raise ValueError(
            f"{source.path}: no other format holds its draft_tree; convert the drafter that it was made from"
        )
    weights_sha256(source.path / "model.safetensors")
    source.used.update(source.weight_files)
    return Converted(config=info.body, head=info.head, tensors=read_tensors(info))


def write(
    drafter: Converted, target: Target, provenance: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    own = target.frozen.info(target.folder.resolve().name, drafter.config.tap_layers)
    head = empty_drafter(CheckpointInfo(path="", body=drafter.config, head=drafter.head, target=own)).lm_head
    ours = {"format_version": FORMAT_VERSION, "target": own.to_dict(), **provenance}
    dtype = target.dtype or drafter.dtype  # SGLang computes in what config.json says, whatever is stored
    config = {"architectures": [drafter.config.architecture], **drafter.config.to_json(), "dtype": dtype}
    return config | {"draft_head": head.spec(), "rayspec": ours}, dict(drafter.tensors)
