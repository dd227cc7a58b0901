import json
from pathlib import Path

import pytest
import torch
from fixture_models import DRAFTERS, HIDDEN, VOCABULARY
from hostile import ask
from safetensors.torch import load_file

from rayspec.config import load_config
from rayspec.export import ExportConfig, prepare, write
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.heads import head_from_target, parse_head


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The full drafter over the even half of its vocabulary, whose body it shares."""
    folder = tmp_path_factory.mktemp("own") / "half"
    drafter, info = load_drafter(DRAFTERS["full"])
    assert info.target is not None
    ids = torch.arange(0, VOCABULARY, 2)
    drafter.lm_head = head_from_target(
        parse_head({"kind": "truncated", "size": len(ids)}), drafter.lm_head.weight.data, {"ids": ids}
    )
    save_drafter(folder, drafter, info.target, {"recipe": "half"}, share_with=DRAFTERS["full"])
    return folder


def test_written_read_back_and_left_alone(half: Path, tmp_path: Path) -> None:
    settings = (f"drafters=[{DRAFTERS['full']},{half}]", f"output_dir={tmp_path / 'out'}")
    planned = ask("export", *settings, "--plan")
    assert planned.code == 0, planned
    assert planned.out.count("to write") == 2
    assert f"{VOCABULARY // 2} rows of {VOCABULARY}" in planned.out
    assert not (tmp_path / "out").exists()

    done = ask("export", *settings)
    assert done.code == 0, done
    for name, own in (("full", DRAFTERS["full"]), ("half", half)):
        (ours, _), (stock, info) = load_drafter(own), load_drafter(tmp_path / "out" / name)
        assert info.is_stock
        named = json.loads((tmp_path / "out" / name / "config.json").read_text())
        taps = list(ours.config.tap_layers)
        assert named["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in taps]  # as SGLang reads it
        assert named["eagle_aux_hidden_state_layer_ids"] == taps  # as vLLM does
        assert stock.state_dict().keys() == ours.state_dict().keys()
        assert all(torch.equal(t, ours.state_dict()[n]) for n, t in stock.state_dict().items())
        hidden_TH = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(0))
        for got, expected in zip(
            stock.lm_head.propose(hidden_TH, 0, 8), ours.lm_head.propose(hidden_TH, 0, 8), strict=True
        ):
            assert torch.equal(got, expected)
    stored = {name: load_file(tmp_path / "out" / name / "model.safetensors") for name in ("full", "half")}
    assert {"d2t", "t2d"} <= set(stored["half"])
    assert not {"d2t", "t2d"} & set(stored["full"])  # vLLM has no place for them where all tokens are kept
    origin = json.loads((tmp_path / "out" / "half" / "export.json").read_text())
    assert origin["draft_head"] == {"kind": "truncated", "size": VOCABULARY // 2, "step_sizes": None}
    assert (origin["drafter"], origin["recipe"]) == ("half", "half")

    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = ask("export", *settings)
    assert again.code == 0, again
    assert again.out.count("already exported") == 2
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}


def test_a_slim_head_is_exported_as_its_product(tmp_path: Path) -> None:
    config = ExportConfig(drafters=[str(DRAFTERS["slimspec"])], output_dir=str(tmp_path))
    (export,) = prepare(config)
    write(export)
    (ours, _), (stock, info) = load_drafter(DRAFTERS["slimspec"]), load_drafter(tmp_path / "slimspec-r32")
    assert info.head.spec() == {"kind": "full"}
    product_VH = ours.lm_head.up @ ours.lm_head.down
    assert torch.equal(stock.lm_head.weight, product_VH.bfloat16().float())
    assert prepare(config)[0].is_done


def test_an_export_of_an_earlier_form_is_not_taken_for_one_of_today(half: Path, tmp_path: Path) -> None:
    config = ExportConfig(drafters=[str(half)], output_dir=str(tmp_path))
    write(prepare(config)[0])
    file = tmp_path / "half" / "export.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "form"}))
    with pytest.raises(ValueError, match="in the form of an earlier release, which vLLM reads wrongly; delete it"):
        prepare(config)


def test_what_must_not_be_replaced(half: Path, tmp_path: Path) -> None:
    refused = ask("export", f"drafters=[{half}]", f"output_dir={half.parent}")
    assert refused.is_refusal, refused
    assert "is there already and is no export; choose another output_dir" in refused.err
    load_drafter(half)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "export.json").write_text('{"drafter": "half"}')
    with pytest.raises(ValueError, match=r"holds an export of 'half' as it was before; delete it"):
        prepare(ExportConfig(drafters=[str(half)], output_dir=str(tmp_path)))
    for damaged in ("[]", "5", "{", "[" * 9000):
        (tmp_path / "half" / "export.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"half/export\.json is damaged .*; delete .*half, or choose another"):
            prepare(ExportConfig(drafters=[str(half)], output_dir=str(tmp_path)))


def test_what_the_stock_form_cannot_hold_is_refused_in_the_plan(tmp_path: Path) -> None:
    drafter, info = load_drafter(DRAFTERS["full"])
    assert info.target is not None
    spec = {"kind": "coral", "clusters": 8, "top": 2}
    drafter.lm_head = head_from_target(
        parse_head(spec), drafter.lm_head.weight.data, {"cluster_of": torch.arange(VOCABULARY) % 9}
    )
    save_drafter(tmp_path / "coral", drafter, info.target)
    planned = ask("export", f"drafters=[{DRAFTERS['full']},{tmp_path / 'coral'}]", "--plan")
    assert planned.is_refusal, planned
    assert "a stock EAGLE-3 checkpoint holds one matrix" in planned.err
    assert "'kind': 'coral'" in planned.err
    write(prepare(ExportConfig(drafters=[str(DRAFTERS["full"])], output_dir=str(tmp_path / "out")))[0])
    with pytest.raises(ValueError, match="is a stock EAGLE-3 checkpoint already; serve it as it is"):
        prepare(ExportConfig(drafters=[str(tmp_path / "out" / "full")], output_dir=str(tmp_path / "twice")))


def test_a_mistyped_job_is_explained() -> None:
    with pytest.raises(ValueError, match="unknown key 'drafter'; known: drafters, output_dir"):
        load_config(ExportConfig, None, ["drafter=full"])
    with pytest.raises(ValueError, match="drafters is empty; name some"):
        load_config(ExportConfig, None)
    with pytest.raises(ValueError, match="different names to lie side by side, got 'full' more than once"):
        ExportConfig(drafters=["full", "elsewhere/full"])
