"""A home folder in which everything that configs name seems to have been made: real sizes and names, and no numbers.

Weights are files of holes, since a plan reads names and shapes alone.
"""

import gzip
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_models import TARGET
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, PreTrainedConfig

from rayspec.artifacts import BIGRAM, write_artifacts
from rayspec.calibration.config import CalibrationConfig
from rayspec.calibration.vocabulary import Vocabulary
from rayspec.config import load_config
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import completed
from rayspec.training.trees import SlimTreeConfig
from sglang_ext.drafters import body_for
from sglang_ext.drafters.checkpoint_config import config_json
from sglang_ext.heads import build_head
from sglang_ext.trees.slim import SlimTree
from sglang_ext.trees.static import StaticTree

CONFIGS = Path(__file__).parents[2] / "configs"
NAME = "smollm2-135m"
PAIRS = 5
BCL_SIZE = 8000  # whatever the rule would choose
DTYPES = {torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


@contextmanager
def planned_home(home: Path) -> Iterator[Path]:
    """This folder as the home, with the published sets, within the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYSPEC_HOME", str(home))
        patch.setenv("RAYSPEC_DATA", str(home / "data"))
        make_workloads(home / "data")
        yield home


def make_target(home: Path, name: str = NAME, config: PreTrainedConfig | None = None) -> Path:
    """A target of these sizes, by default SmolLM2-135M's, with the tokenizer of the tests' target, filled up, and no
    weights."""
    folder = home / "models" / name
    config = config or LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_theta=100000.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.architectures = config.architectures or ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    turn = "{{ m['role'] }}: {{ m['content'] }}" + tokenizer.eos_token + "\n"
    tokenizer.chat_template = (
        "{% for m in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    words = stored["model"]["vocab"]
    words |= {f"unused{i}": i for i in set(range(config.vocab_size)) - set(words.values())}  # type: ignore[attr-defined]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    save_file({"nothing": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def make_drafter(home: Path, target: FrozenTarget, entry: DrafterEntry, config: DrafterTrainConfig) -> None:
    """What training such an entry would leave. Raises ValueError for sizes that cannot be."""
    own, body = entry.family, body_for(target, entry.drafter, config.recipe)
    sizes = {"hidden_size": body.hidden_size, "vocab_size": body.vocab_size}
    spec = completed(config, entry, target).draft_head
    tree = _tree(entry, body.vocab_size)
    with torch.device("meta"):  # weights of real sizes take seconds to fill
        drafter = own.drafter_class(body, body.heads(lambda: build_head(spec, **sizes)), tree)
    folder = home / "drafters" / config.target_name / entry.name
    folder.mkdir(parents=True)
    made_for = target.info(config.target_name, body.tap_layers)
    (folder / "config.json").write_text(json.dumps(config_json(drafter, made_for, {})))
    write_holes(folder / "model.safetensors", drafter.state_dict())


def make_shipped_drafter(home: Path, target: FrozenTarget) -> None:
    """`full`, on which configs stand that train further."""
    shipped = load_config(DrafterTrainConfig, CONFIGS / "train" / "drafters.yaml")
    make_drafter(home, target, next(e for e in shipped.drafters if e.name == "full"), shipped)


def _tree(entry: DrafterEntry, vocab_size: int) -> Any:
    asked = entry.tree
    if asked is None:
        return None
    if isinstance(asked, SlimTreeConfig):
        return SlimTree(asked.options(PAIRS if asked.correlation else 0), vocab_size)
    paths = [p for depth in range(1, 5) for p in product(range(asked.topk), repeat=depth) if sum(p) + depth < 12]
    likeliest = sorted(paths, key=lambda p: (sum(p) + len(p), len(p)))[: asked.nodes - 1]
    return StaticTree(sorted(likeliest, key=len))


def write_holes(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of these names, shapes and kinds of numbers that takes no room on a disk."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        is_real = tensor.is_floating_point() and tensor.itemsize > 1
        size = tensor.numel() * (2 if is_real else tensor.itemsize)
        dtype = "BF16" if is_real else DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)


def make_calibrations(home: Path, target: FrozenTarget, config: CalibrationConfig) -> None:
    """What each rule would leave, of made-up counts."""
    name = config.target_name
    vocabulary = Vocabulary.load(str(target.folder), name)
    for calibration in config.calibrations:
        calibration.rule.check(vocabulary)
        folder = home / "calibrations" / name / calibration.name
        if folder.exists():
            continue
        about = {"name": name, "vocab_size": vocabulary.size, "tokenizer_sha256": vocabulary.tokenizer_sha256}
        description = {
            "name": calibration.name,
            "rule": calibration.entry,
            "target": about,
            "stop_ids": list(vocabulary.stop_ids),
        }
        tensors = {**_made_by(calibration.entry, vocabulary), "counts": torch.ones(vocabulary.size, dtype=torch.int64)}
        write_artifacts(folder, tensors, description, {})


def _made_by(rule: Mapping[str, Any], vocabulary: Vocabulary) -> dict[str, Tensor]:
    stops = list(vocabulary.stop_ids)
    if rule["kind"] in ("frspec", "vocabtrim", "bcl"):
        others = [i for i in range(vocabulary.size) if i not in stops]
        return {"ids": torch.tensor((stops + others)[: rule.get("top_k") or BCL_SIZE])}
    if rule["kind"] in ("kmeans", "contiguous"):
        cluster_of = 1 + torch.arange(vocabulary.size) % rule["clusters"]
        cluster_of[stops] = 0
        return {"cluster_of": cluster_of}
    assert rule["kind"] == "bigram", f"no made-up calibration of kind {rule['kind']}"
    indptr = torch.full((vocabulary.size + 1,), PAIRS)
    indptr[:PAIRS] = torch.arange(PAIRS)
    return dict(zip(BIGRAM, (indptr, torch.arange(PAIRS), torch.ones(PAIRS, dtype=torch.int64)), strict=True))


def make_workloads(data: Path) -> None:
    """Published sets under $RAYSPEC_DATA, of the sizes and categories that the real ones have."""
    tasks = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
    others = ("translation", "summarization", "qa", "math_reasoning", "rag")
    mt_bench = [{"question_id": i, "category": tasks[i % 8], "turns": ["Say a.", "Now b."]} for i in range(80)]
    more = [{"question_id": 80 + i, "category": others[i % 5], "turns": [f"Question {i}?"]} for i in range(400)]
    _write(data / "mt_bench" / "question.jsonl", mt_bench)
    _write(data / "spec_bench" / "question.jsonl", [*mt_bench, *more])
    _write(data / "gsm8k" / "test.jsonl", [{"question": f"How many is {i}?", "answer": "4"} for i in range(200)])
    code = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n"} for i in range(164)]
    _write(data / "humaneval" / "HumanEval.jsonl.gz", code)
    said = [[{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}."}] for i in range(800)]
    _write(data / "ultrachat" / "train_sft.jsonl", [{"messages": messages} for messages in said])


def _write(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
