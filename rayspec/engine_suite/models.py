"""A target and drafters of any size with random weights. H = hidden size, V = vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_ext import DRAFT_STEPS
from sglang_ext.drafters import family
from sglang_ext.drafters.base import DrafterConfig
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.rope import Rope
from sglang_ext.drafters.specformer.config import specformer_taps
from sglang_ext.drafters.target import TargetInfo, vocabulary_sha256
from sglang_ext.heads import DraftHead, head_class, head_from_target, parse_head
from sglang_ext.trees import CandidateTree
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.static import NODES, TOPK, StaticTree, greedy_paths

CONTEXT = 4096
PINNED = 64  # tokens that a clustered head always scores
FOLLOWERS = 8  # counted pairs of each token


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocab: int


SHAPES = {
    "llama-3.1-8b": ModelShape(hidden=4096, intermediate=14336, layers=32, heads=32, key_heads=8, vocab=128256),
    "smollm2-135m": ModelShape(hidden=576, intermediate=1536, layers=30, heads=9, key_heads=3, vocab=49152),
    "tiny": ModelShape(hidden=256, intermediate=512, layers=8, heads=4, key_heads=2, vocab=512),
}


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """What an engine drafts with: a chain, or with `topk` above 1 a tree of `nodes` verified nodes with the root;
    `tree` is the drafter's own."""

    head: Mapping[str, Any]
    family: str = "eagle3"
    topk: int = 1
    nodes: int | None = None
    tree: str | None = None


def draftings(shape: ModelShape) -> dict[str, Drafting]:
    """By name: EAGLE-3 chains with heads of every kind, at the papers' sizes for this shape, then other drafters and
    trees, with the full head but for a tree whose rows share what their request has chosen."""
    rank, clusters = shape.hidden // 8, min(512, shape.vocab // 32)
    routed = max(1, clusters * 28 // 128)
    heads: dict[str, dict[str, Any]] = {
        "full": {"kind": "full"},
        "full-int4": {"kind": "full", "weight_format": "int4"},
        "slimspec": {"kind": "slimspec", "rank": rank},
        "slimspec-int4": {"kind": "slimspec", "rank": rank, "weight_format": "int4"},
        "vocabtrim": {"kind": "truncated", "size": shape.vocab // 4},
        "specvocab": {"kind": "specvocab", "rank": rank, "size": min(2048, shape.vocab // 4)},
        "dynaspec": {"kind": "dynaspec", "clusters": clusters, "first": routed, "later": routed, "rule": "fixed",
                     "union": True, "router_width": min(1024, shape.hidden)},
        "coral": {"kind": "coral", "clusters": 8, "top": 2},
    }  # fmt: skip
    full = heads["full"]
    return {name: Drafting(head=head) for name, head in heads.items()} | {
        "eagle3-tree": Drafting(head=full, topk=8, nodes=32),
        "eagle3-slim": Drafting(head=full, topk=8, nodes=32, tree="slim"),
        "dynaspec-tree": Drafting(head={**heads["dynaspec"], "union": "request"}, topk=8, nodes=32),
        "medusa": Drafting(head=full, family="medusa", topk=TOPK, nodes=NODES, tree="static"),
        "medusa-slim": Drafting(head=full, family="medusa", topk=TOPK, nodes=32, tree="slim"),
        "hydra": Drafting(head=full, family="hydra", topk=TOPK, nodes=NODES, tree="static"),
        "specformer": Drafting(head=full, family="specformer"),
    }


def write_target(folder: Path, shape: ModelShape) -> None:
    """Config and tokenizer; SGLang makes the weights (load_format dummy)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "vocab_size": shape.vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(_vocabulary(shape), unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)


def write_drafter(folder: Path, shape: ModelShape, drafting: Drafting) -> None:
    """A drafter of that target's sizes."""
    config = _config(shape, drafting.family)
    heads = config.heads(lambda: _head(drafting.head, shape))
    drafter = family(drafting.family).drafter_class(config, heads, _tree(drafting.tree, shape))
    for name, part in drafter.named_children():
        if name not in ("lm_head", "draft_tree"):
            _fill(part)
    target = TargetInfo(
        name="random",
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        tokenizer_sha256=vocabulary_sha256(_vocabulary(shape)),
        tap_layers=config.tap_layers,
    )
    save_drafter(folder, drafter, target, {"recipe": "random weights"})


def _config(shape: ModelShape, kind: str) -> DrafterConfig:
    config_class: Any = family(kind).config_class  # each kind takes sizes of its own
    sizes: dict[str, Any] = {
        "hidden_size": shape.hidden, "vocab_size": shape.vocab, "max_position_embeddings": CONTEXT,
    }  # fmt: skip
    if kind in ("medusa", "hydra"):
        return config_class(**sizes, positions=DRAFT_STEPS)
    sizes |= {
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "head_dim": shape.hidden // shape.heads,
        "rms_norm_eps": 1e-5,
        "rope": Rope(rope_theta=500000.0),
    }
    if kind == "specformer":
        return config_class(**sizes, positions=DRAFT_STEPS, tap_layers=specformer_taps(shape.layers))
    taps = (2, shape.layers // 2, shape.layers - 1)
    return config_class(**sizes, target_hidden_size=shape.hidden, tap_layers=taps)


def _tree(kind: str | None, shape: ModelShape) -> CandidateTree | None:
    """Of `static` the nodes that are likeliest where each rank is half as often right as the one before. Of `slim`
    every token has been followed by the same number of others."""
    if kind is None:
        return None
    if kind == "static":
        return StaticTree(greedy_paths([[0.5 ** (rank + 1) for rank in range(TOPK)]] * DRAFT_STEPS, NODES - 1))
    V, each = shape.vocab, FOLLOWERS
    ids_Vn = (torch.arange(V)[:, None] + 1 + torch.arange(each) * (V // each)) % V
    ids_P = ids_Vn.sort(dim=1).values.flatten().int()
    options = SlimOptions(pairs=V * each)
    return SlimTree.with_counts(options, torch.arange(V + 1) * each, ids_P, torch.full_like(ids_P, 3))


def _head(spec: Mapping[str, Any], shape: ModelShape) -> DraftHead:
    config = parse_head(spec)
    if "rank" in spec:  # to decompose a matrix so large is slow, and any factors cost the same
        head = head_class(config.kind)(config, shape.hidden, shape.vocab)
        _fill(head)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator(device).manual_seed(0)
        head_VH = torch.randn(shape.vocab, shape.hidden, generator=generator, device=device) * shape.hidden**-0.5
        clusters_V = _clusters(shape.vocab, int(spec.get("clusters", 1)))
        head = head_from_target(config, head_VH.cpu(), {"ids": torch.arange(shape.vocab), "cluster_of": clusters_V})
    head.quantize()
    return head


def _fill(module: nn.Module) -> None:
    """Norms of one, matrices that keep the size of what they multiply."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def _vocabulary(shape: ModelShape) -> dict[str, int]:
    return {f"t{v}": v for v in range(shape.vocab)}


def _clusters(vocab: int, clusters: int) -> Tensor:
    """0 for the pinned tokens, then clusters 1.. of equal size."""
    pinned = min(PINNED, vocab // 8)
    routed = torch.arange(vocab - pinned) % clusters + 1
    return torch.cat([torch.zeros(pinned, dtype=torch.int64), routed])
