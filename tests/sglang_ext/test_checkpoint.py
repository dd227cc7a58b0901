"""The checkpoint format: what is written is read back, and everything that does not fit stops with a way out."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_models import FIXTURES
from head_cases import toy_body, toy_target
from safetensors.torch import load_file, save_file

from sglang_ext.drafters.checkpoint import check_files, drafter_shapes, load_drafter, origins, save_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.complete import write_complete
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.drafters.target import TargetInfo, default_taps, vocabulary_sha256
from sglang_ext.fingerprints import weights_sha256
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.heads.truncated import TruncatedConfig

V, H = 96, 16
BODY = toy_body(H, V)
TARGET = toy_target(H, V)


def make(path: Path, spec: dict[str, Any]) -> Eagle3Drafter:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(BODY, head_from_target(parse_head(spec), torch.randn(V, H)))
    save_drafter(path, drafter, TARGET, {"recipe": "none", "commit": "0"})
    return drafter


def edit_config(path: Path, change: Callable[[dict], None]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, change: Callable[[dict], None]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


@pytest.mark.parametrize("spec", [{"kind": "full"}, {"kind": "slimspec", "rank": 3}], ids=["full", "slimspec"])
def test_round_trip(tmp_path: Path, spec: dict[str, Any]) -> None:
    drafter = make(tmp_path / "d", spec)
    loaded, info = load_drafter(tmp_path / "d")
    assert info.head.spec() == spec
    assert info.target == TARGET
    assert info.provenance == {"recipe": "none", "commit": "0"}
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor.bfloat16().float(), rtol=0, atol=0)


def test_saving_again_replaces_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    make(tmp_path / "d", {"kind": "slimspec", "rank": 3})
    make(tmp_path / "d", {"kind": "full"})
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    assert read_info(tmp_path / "d").head.spec() == {"kind": "full"}


def test_an_unloaded_head_is_not_saved(tmp_path: Path) -> None:
    drafter = make(tmp_path / "d", {"kind": "full"})
    drafter.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"lm_head\.weight holds NaN"):
        save_drafter(tmp_path / "d", drafter, TARGET)
    load_drafter(tmp_path / "d")  # the folder of before is whole


TENSOR_FAULTS = {
    "missing": (lambda t: t.pop("norm.weight"), r"missing norm.weight \[16\]"),
    "unknown": (lambda t: t.update(extra=torch.ones(2)), r"unknown extra \[2\]"),
    "shape": (lambda t: t.update({"lm_head.up": torch.ones(V, 4)}), r"lm_head.up has shape \[96, 4\], expected"),
    "other_head": (lambda t: t.update({"lm_head.weight": torch.ones(V, H)}), r"unknown lm_head.weight"),
    "nan": (lambda t: t["midlayer.mlp.up_proj.weight"][3, 5].fill_(float("nan")), r"up_proj.weight holds NaN or Inf"),
    "infinite": (lambda t: t["lm_head.up"][9].fill_(float("-inf")), r"lm_head.up holds NaN or Inf"),
    "integers": (
        lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int32)}),
        r"fc.weight holds torch.int32, expected floating-point numbers",
    ),
    "bytes": (
        lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int8)}),
        r"norm.weight holds torch.int8, expected floating-point numbers",
    ),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_tensors_must_fit(tmp_path: Path, fault: str) -> None:
    make(tmp_path / "d", {"kind": "slimspec", "rank": 3})
    change, message = TENSOR_FAULTS[fault]
    edit_tensors(tmp_path / "d", change)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d")


def test_the_kinds_of_numbers_are_known_without_reading_them(tmp_path: Path) -> None:
    make(tmp_path / "d", {"kind": "slimspec", "rank": 3})
    edit_tensors(tmp_path / "d", lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int64)}))
    with pytest.raises(ValueError, match=r"fc.weight holds torch.int64, expected floating-point numbers"):
        check_files(read_info(tmp_path / "d"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_floating_point_numbers_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    drafter = make(tmp_path / "d", {"kind": "full"})
    edit_tensors(tmp_path / "d", lambda t: t.update({name: value.to(dtype) for name, value in t.items()}))
    check_files(read_info(tmp_path / "d"))
    loaded, _ = load_drafter(tmp_path / "d")
    torch.testing.assert_close(loaded.fc.weight, drafter.fc.weight.bfloat16().float())


CONFIG_FAULTS = {
    "kind": (
        lambda c: c["draft_head"].update(kind="slimspek"),
        "draft_head.kind must be one of .*, got 'slimspek'",
    ),
    "option": (lambda c: c["draft_head"].update(ranks=3), "unknown key 'draft_head.ranks'"),
    "rank": (lambda c: c["draft_head"].update(rank=4), "lm_head.down has shape"),
    "architecture": (lambda c: c.update(architectures=["Other"]), r"architectures must be one of .*RaySpecEagle3"),
    "version": (lambda c: c["rayspec"].update(format_version=99), "format_version is 99, this release reads 1"),
    "target": (
        lambda c: c["rayspec"]["target"].pop("tokenizer_sha256"),
        "target.tokenizer_sha256 has no value",
    ),
    "layers": (lambda c: c.update(num_hidden_layers=2), "num_hidden_layers must be 1"),
    "rope": (lambda c: c["rope_parameters"].update(rope_type="dynamic"), "rope_type must be one of .*, got 'dynamic'"),
    "size": (lambda c: c.pop("intermediate_size"), "config.json has no 'intermediate_size'"),
    "taps": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        r"taps \[1, 2, 3\] in eagle_config, but rayspec.target.tap_layers is \[2, 4, 5\]",
    ),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_config_must_fit(tmp_path: Path, fault: str) -> None:
    make(tmp_path / "d", {"kind": "slimspec", "rank": 3})
    change, message = CONFIG_FAULTS[fault]
    edit_config(tmp_path / "d", change)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d")


def test_missing_folder_and_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_drafter(tmp_path / "nowhere")
    make(tmp_path / "d", {"kind": "full"})
    (tmp_path / "d" / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="no drafter weights"):
        load_drafter(tmp_path / "d")


def as_stock(config: dict) -> None:
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    del config["draft_head"], config["rayspec"]


def test_stock_checkpoint_is_kind_full(tmp_path: Path) -> None:
    drafter = make(tmp_path / "d", {"kind": "full"})
    edit_config(tmp_path / "d", as_stock)
    maps = {"d2t": torch.zeros(V, dtype=torch.long), "t2d": torch.ones(V, dtype=torch.bool)}
    edit_tensors(tmp_path / "d", lambda t: t.update(maps))
    loaded, info = load_drafter(tmp_path / "d")
    assert info.head.spec() == {"kind": "full"}
    assert info.body == BODY
    torch.testing.assert_close(loaded.lm_head.weight, drafter.lm_head.weight.bfloat16().float())


def test_stock_checkpoint_with_a_map_is_no_full_head(tmp_path: Path) -> None:
    make(tmp_path / "d", {"kind": "full"})
    edit_config(tmp_path / "d", as_stock)
    swapped = torch.tensor([1, -1] + [0] * (V - 2))
    edit_tensors(tmp_path / "d", lambda t: t.update(d2t=swapped))
    with pytest.raises(ValueError, match="d2t must be all zeros"):
        load_drafter(tmp_path / "d")


def keep_half(drafter: Eagle3Drafter) -> dict[str, torch.Tensor]:
    """A truncated head over the odd ids, made from the drafter's full one."""
    ids = torch.arange(1, V, 2)
    drafter.lm_head = head_from_target(
        parse_head({"kind": "truncated", "size": V // 2}), drafter.lm_head.weight, {"ids": ids}
    )
    return {"ids": ids, "weight": drafter.lm_head.weight}


def test_truncated_head_goes_through_the_stock_form(tmp_path: Path) -> None:
    drafter = make(tmp_path / "own", {"kind": "full"})
    kept = keep_half(drafter)
    save_drafter(tmp_path / "stock", drafter, TARGET, stock=True)
    stored = load_file(tmp_path / "stock" / WEIGHTS)
    assert torch.equal(stored["d2t"] + torch.arange(V // 2), kept["ids"])
    assert torch.equal(stored["t2d"].nonzero().squeeze(1), kept["ids"])
    assert "lm_head.ids" not in stored
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], V // 2)
    loaded, info = load_drafter(tmp_path / "stock")
    check_files(info)
    assert info.head == TruncatedConfig(size=V // 2)
    assert torch.equal(loaded.lm_head.ids, kept["ids"])
    torch.testing.assert_close(loaded.lm_head.weight, kept["weight"].bfloat16().float())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update(d2t=t["d2t"] * 0), "t2d must be true exactly"),
        (lambda t: t.update(d2t=t["d2t"] + V), "must name distinct ids in 0..95"),
        (lambda t: t.pop("d2t"), "no d2t says of which tokens"),
        (lambda t: t.update(d2t=t["d2t"][:-1].clone()), "they must agree"),
    ],
)
def test_stock_maps_that_lie(tmp_path: Path, edit: Any, message: str) -> None:
    drafter = make(tmp_path / "own", {"kind": "full"})
    keep_half(drafter)
    save_drafter(tmp_path / "stock", drafter, TARGET, stock=True)
    edit_tensors(tmp_path / "stock", edit)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "stock")


def test_what_is_one_matrix_goes_through_the_stock_form(tmp_path: Path) -> None:
    """A slim head multiplied out and a quantised one rounded are full heads there."""
    for spec in ({"kind": "slimspec", "rank": 4}, {"kind": "full", "weight_format": "int8"}):
        drafter = make(tmp_path / "own", spec)
        drafter.lm_head.quantize()
        shutil.rmtree(tmp_path / "stock", ignore_errors=True)  # nothing says whose a stock folder is
        save_drafter(tmp_path / "stock", drafter, TARGET, stock=True)
        loaded, info = load_drafter(tmp_path / "stock")
        assert info.head.spec() == {"kind": "full"}
        hidden_TH = torch.randn(5, H)
        # the stored matrix has bfloat16's 8 bits
        torch.testing.assert_close(
            loaded.lm_head.target_logits(hidden_TH), drafter.lm_head.target_logits(hidden_TH), rtol=0.02, atol=0.1
        )


def test_a_stock_drafter_without_taps_has_the_default_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make(tmp_path / "own", {"kind": "full"})
    save_drafter(tmp_path / "stock", drafter, TARGET, stock=True)
    for key in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
        edit_config(tmp_path / "stock", lambda c, key=key: c.pop(key))
    said = logging.getLogger("sglang_ext.drafters.checkpoint_config")
    monkeypatch.setattr(said, "disabled", False)  # an engine in this process may have set up logging anew
    caplog.set_level(logging.WARNING, logger=said.name)
    loaded, info = load_drafter(tmp_path / "stock")
    check_files(info)
    assert info.body.tap_layers is None
    assert loaded.fc.weight.shape == (H, 3 * H)
    assert "the tapped layers are SGLang's default, 2, n // 2 and n - 3" in caplog.text
    edit_config(tmp_path / "stock", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3]))
    assert read_info(tmp_path / "stock").body.tap_layers is None  # SGLang does not read what is named for vLLM alone
    assert "names the layers [1, 2, 3] for vLLM (whose input is tapped), but its default for SGLang" in caplog.text
    edit_config(tmp_path / "stock", lambda c: c.update(num_aux_hidden_states=4))
    with pytest.raises(ValueError, match="num_aux_hidden_states is 4, but eagle_config names no layers"):
        read_info(tmp_path / "stock")


REFUSED = {
    "specvocab": {"kind": "specvocab", "rank": 4, "size": 9},
    "dynaspec": {"kind": "dynaspec", "clusters": 3, "first": 1, "later": 1, "router_width": 4},
    "coral": {"kind": "coral", "clusters": 3, "top": 1},
    "rdk": {"kind": "rdk", "base": {"kind": "full"}},
    "truncated by step": {"kind": "truncated", "size": 9, "step_sizes": [9, 5]},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_the_stock_form_refuses_what_it_cannot_express(tmp_path: Path, kind: str) -> None:
    drafter = make(tmp_path / "own", {"kind": "full"})
    maps = {"ids": torch.arange(V), "cluster_of": torch.arange(V) % 4}
    drafter.lm_head = head_from_target(parse_head(REFUSED[kind]), drafter.lm_head.weight.data, maps)
    with pytest.raises(ValueError, match=r"holds one matrix for every draft step .* serve it with rayspec"):
        save_drafter(tmp_path / "stock", drafter, TARGET, stock=True)
    assert [p.name for p in tmp_path.iterdir()] == ["own"]


def test_a_body_is_stored_once(tmp_path: Path) -> None:
    drafter = make(tmp_path / "full", {"kind": "full"})
    keep_half(drafter)
    save_drafter(tmp_path / "half", drafter, TARGET, share_with=tmp_path / "full")
    stored = load_file(tmp_path / "half" / WEIGHTS)
    assert set(stored) == {"lm_head.ids", "lm_head.weight"}
    loaded, info = load_drafter(tmp_path / "half")
    check_files(info)
    assert [shares.drafter for shares in info.shares] == ["../full"]
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name].float(), tensor.bfloat16().float(), msg=name)


def test_weights_that_stay_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read, digest = tmp_path / WEIGHTS, [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: read.append(0) or digest(*arguments))

    def write(content: bytes, age_s: float) -> str:
        file.write_bytes(content)
        os.utime(file, (time.time() - age_s,) * 2)
        return hashlib.sha256(content).hexdigest()

    first = write(b"one", age_s=60)
    assert [weights_sha256(file), weights_sha256(file)] == [first, first]
    assert len(read) == 1
    second = write(b"two", age_s=30)
    assert [weights_sha256(file), weights_sha256(file)] == [second, second]
    assert len(read) == 2
    just_now = write(b"tri", age_s=0)
    assert [weights_sha256(file), weights_sha256(file)] == [just_now, just_now]
    assert len(read) == 4, "it may change again within the tick of the clock"


def test_where_tensors_come_from(tmp_path: Path) -> None:
    drafter = make(tmp_path / "full", {"kind": "full"})
    keep_half(drafter)
    for name in ("one", "two"):
        save_drafter(tmp_path / name, drafter, TARGET, share_with=tmp_path / "full")
    full, one, two = (origins(read_info(tmp_path / name)) for name in ("full", "one", "two"))
    body = {name for name in drafter.state_dict() if not name.startswith("lm_head.")}
    assert set(one) == set(drafter.state_dict())
    assert common(one, two) >= body
    assert common(one, full) == body
    edit_tensors(tmp_path / "full", lambda t: t.update({"fc.weight": t["fc.weight"] + 1}))
    drafter.fc.weight.data += 1
    save_drafter(tmp_path / "three", drafter, TARGET, share_with=tmp_path / "full")
    three = origins(read_info(tmp_path / "three"))
    assert common(one, three) == set(), "the weights have changed between the two"
    with pytest.raises(ValueError, match="whose weights have changed since"):
        origins(read_info(tmp_path / "one"))


def test_a_stock_checkpoint_with_other_weights_has_another_origin(tmp_path: Path) -> None:
    """By which a swap knows that what runs is not what lies there, and ranks that they have different files."""
    save_drafter(tmp_path / "stock", make(tmp_path / "full", {"kind": "full"}), TARGET, stock=True)
    info = read_info(tmp_path / "stock")
    assert info.is_stock
    before = origins(info)
    edit_tensors(tmp_path / "stock", lambda t: t.update({"fc.weight": t["fc.weight"] + 1}))
    after = origins(info)
    assert set(before) == set(after) == {WEIGHTS}
    assert before != after


def common(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name, origin in one.items() if other.get(name) == origin}


def test_shared_tensors_that_changed_or_went(tmp_path: Path) -> None:
    drafter = make(tmp_path / "full", {"kind": "full"})
    keep_half(drafter)
    save_drafter(tmp_path / "half", drafter, TARGET, share_with=tmp_path / "full")
    edit_tensors(tmp_path / "full", lambda t: t.update({"fc.weight": t["fc.weight"] + 1}))
    with pytest.raises(ValueError, match="whose weights have changed since"):
        load_drafter(tmp_path / "half")
    edit_tensors(tmp_path / "half", lambda t: t.update({"fc.weight": drafter.fc.weight.data.bfloat16()}))
    make(tmp_path / "full", {"kind": "full"})
    with pytest.raises(ValueError, match="which the drafter has itself"):
        load_drafter(tmp_path / "half")
    shutil.rmtree(tmp_path / "full")
    with pytest.raises(ValueError, match=r"keep the folders\s+side by side"):
        load_drafter(tmp_path / "half")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 32, "hidden size 16, but the served target 'served' has 32"),
        ("vocab_size", 97, "vocabulary size 96"),
        ("tokenizer_sha256", "xyz", "tokenizer abc"),
        ("tap_layers", (2, 3, 4), "tapped layers"),
    ],
)
def test_wrong_target(field: str, value: Any, message: str) -> None:
    served = TargetInfo(**{**TARGET.to_dict(), "tap_layers": (2, 4, 5), "name": "served", field: value})
    with pytest.raises(ValueError, match=message):
        TARGET.check_served_with(served, "d")


def test_the_right_target_may_have_another_name() -> None:
    TARGET.check_served_with(TargetInfo(**{**TARGET.to_dict(), "tap_layers": (2, 4, 5), "name": "mirror"}), "d")


def test_vocabulary_fingerprint_is_of_pairs_not_of_order() -> None:
    assert vocabulary_sha256({"a": 0, "b": 1}) == vocabulary_sha256({"b": 1, "a": 0})
    assert vocabulary_sha256({"a": 0, "b": 1}) != vocabulary_sha256({"a": 1, "b": 0})


def test_default_taps_need_three_different_layers() -> None:
    assert default_taps(8) == (2, 4, 5)
    assert default_taps(32) == (2, 16, 29)
    for layers in (1, 4, 6):
        with pytest.raises(ValueError, match="no three different default taps"):
            default_taps(layers)


def test_a_complete_copy_stands_alone(tmp_path: Path) -> None:
    drafter = make(tmp_path / "full", {"kind": "full"})
    keep_half(drafter)
    save_drafter(tmp_path / "half", drafter, TARGET, share_with=tmp_path / "full", extras={"notes.md": "kept"})
    shared = load_drafter(tmp_path / "half")[0].state_dict()
    write_complete(tmp_path / "half", tmp_path / "elsewhere" / "alone")
    shutil.rmtree(tmp_path / "full")
    loaded, info = load_drafter(tmp_path / "elsewhere" / "alone")
    assert info.shares == ()
    assert {k: v.tolist() for k, v in loaded.state_dict().items()} == {k: v.tolist() for k, v in shared.items()}
    assert (tmp_path / "elsewhere" / "alone" / "notes.md").read_text() == "kept"
    with pytest.raises(ValueError, match="exists; name a new folder"):
        write_complete(tmp_path / "half", tmp_path / "elsewhere" / "alone")


def test_a_copy_that_cannot_be_complete_leaves_nothing(tmp_path: Path) -> None:
    drafter = make(tmp_path / "full", {"kind": "full"})
    keep_half(drafter)
    save_drafter(tmp_path / "half", drafter, TARGET, share_with=tmp_path / "full")
    edit_tensors(tmp_path / "full", lambda t: t.update({"fc.weight": t["fc.weight"] + 1}))
    with pytest.raises(ValueError, match="whose weights have changed since"):
        write_complete(tmp_path / "half", tmp_path / "out" / "alone")
    assert not (tmp_path / "out" / "alone").exists()
    assert not list(tmp_path.glob("out/.*"))


@pytest.mark.parametrize("folder", sorted((FIXTURES / "drafters").iterdir()), ids=lambda folder: folder.name)
def test_shapes_are_those_of_the_loaded_drafter(folder: Path) -> None:
    loaded, shapes = load_drafter(folder, torch.bfloat16)[0], drafter_shapes(folder, torch.bfloat16)
    weights, unread = dict(loaded.named_parameters()), dict(shapes.named_parameters())
    assert {n: (t.shape, t.dtype) for n, t in unread.items()} == {n: (t.shape, t.dtype) for n, t in weights.items()}
    assert all(t.is_meta for name, t in unread.items() if not name.startswith("draft_tree."))
    assert loaded.state_dict().keys() == shapes.state_dict().keys()
