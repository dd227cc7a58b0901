"""Loading of typed configs, and every sweep config that ships."""

from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rayspec.calibration.config import CalibrationConfig
from rayspec.config import flatten, load_config, to_yaml
from rayspec.export import ExportConfig
from rayspec.sweep.config import SweepConfig
from rayspec.training.drafter_config import DrafterTrainConfig
from sglang_ext.settings import Settings, build

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "sweep").glob("*.yaml"))


@dataclass(frozen=True, kw_only=True)
class Inner(Settings):
    depth: int = 1
    label: str = ""

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"inner.depth must be at least 1, got {self.depth}")


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    name: str = "x"
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    inner: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=lambda: Inner(depth=7, label="its own"))


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    file = tmp_path / "outer.yaml"
    file.write_text("name: from_file\ninner:\n  depth: 3\n")
    return file


def test_later_layers_win(yaml_file: Path) -> None:
    config = load_config(Outer, yaml_file, ["inner.depth=5", "sizes=[7]"])
    assert config == Outer(name="from_file", sizes=[7], inner=Inner(depth=5))


def test_a_mapping_does_not_hide_what_was_given_before(yaml_file: Path) -> None:
    yaml_file.write_text("inner: 4\n")
    with pytest.raises(ValueError, match="inner is given a mapping and 4; give one of them"):
        load_config(Outer, yaml_file, ["inner.depth=2"])
    with pytest.raises(ValueError, match=r"the command line.*: inner is given a mapping and 1"):
        load_config(Outer, None, ["inner=1", "inner.depth=2"])


def test_interpolations_see_the_defaults() -> None:
    assert load_config(Outer, None, ["inner.label=${name}-${other.depth}"]).inner.label == "x-7"


def test_a_nested_setting_is_named_where_it_stands() -> None:
    with pytest.raises(ValueError, match=r"held_out\.count must be at least 1, got 0"):
        load_config(DrafterTrainConfig, None, ["held_out.count=0", "drafters=[{name: a, draft_head: {kind: full}}]"])


def test_what_is_not_given_of_a_nested_config_keeps_its_defaults_there() -> None:
    assert load_config(Outer, None, ["other.label=x"]).other == Inner(depth=7, label="x")


def test_without_file_the_defaults_hold() -> None:
    assert load_config(Outer, None) == Outer()


def test_unknown_key_names_source_key_and_what_is_known(yaml_file: Path) -> None:
    yaml_file.write_text("inner:\n  dept: 3\n")
    with pytest.raises(ValueError, match=rf"{yaml_file}: unknown key 'inner.dept'; known under inner: depth"):
        load_config(Outer, yaml_file)
    with pytest.raises(ValueError, match="the command line: unknown key 'nam'; known: name, sizes, inner, other"):
        load_config(Outer, None, ["nam=1"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("inner.depth=0", "inner.depth must be at least 1, got 0"),
        ("inner.depth=deep", "the command line: inner.depth must be a whole number, got 'deep'"),
        ("sizes=3", r"sizes must be a list, \[a, b\], got 3"),
        ("inner", "expected key=value"),
        ("--config=x", "expected key=value"),
        ("sizes=[1", "no valid YAML"),
    ],
)
def test_bad_value_is_refused(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(Outer, None, [override])


@pytest.mark.parametrize("value", ["${oc.env:A_SECRET}", "${oc.env:A_SECRET,x}", "at-${oc.${name}:A_SECRET}"])
def test_a_variable_of_the_environment_does_not_get_in(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every setting is written into MLflow."""
    monkeypatch.setenv("A_SECRET", "correct-horse")
    file = tmp_path / "c.yaml"
    file.write_text(f"name: env\ninner: {{label: '{value}'}}\n")
    message = r"label: .*\$\{oc.env:A_SECRET\} would put the variable's value.* into MLflow and the report; give the"
    for path, overrides in ((file, []), (None, ["name=env", f"inner.label={value}"])):
        with pytest.raises(ValueError, match=message) as error:
            load_config(Outer, path, overrides)
        assert "correct-horse" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "no config file"), ("a: [", "no valid YAML"), ("- a", "got a list")]
)
def test_bad_file_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "bad.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(Outer, file)


def test_resolved_yaml_reads_back(tmp_path: Path) -> None:
    heads = "heads=[{kind: slimspec, rank: [8, 16]}, {kind: rdk, base: {kind: truncated, size: 64}, artifacts: raw}]"
    config = load_config(SweepConfig, None, ["draft_steps=[2,4]", "engine.extra.max_running_requests=8", heads])
    assert [len(entry.asked) for entry in config.heads] == [2, 1]
    training = load_config(DrafterTrainConfig, "configs/train/drafters.yaml")
    for value in (config, training):
        (tmp_path / "resolved.yaml").write_text(to_yaml(value))
        assert load_config(type(value), tmp_path / "resolved.yaml") == value


def test_flatten_gives_yaml_paths() -> None:
    assert flatten(Outer()) == {"name": "x", "sizes": "1, 2", "inner.depth": "1", "inner.label": "", **OTHER}


OTHER = {"other.depth": "7", "other.label": "its own"}
SCHEMAS = (SweepConfig, DrafterTrainConfig, CalibrationConfig, ExportConfig)


def nested(kind: Any) -> Iterator[type]:
    """All dataclasses that a config is made of."""
    if is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from nested(hint)
    for part in get_args(kind):
        yield from nested(part)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_level_of_a_config_refuses_what_it_does_not_know(schema: type) -> None:
    assert [part for part in nested(schema) if not issubclass(part, Settings)] == []


def test_nothing_is_converted() -> None:
    for number in (2026, 45000, 1e10):  # what YAML makes of 2026, 12:30:00 and 1e10
        with pytest.raises(ValueError, match=r"name must be text, got .*; put it in quotes"):
            build(Outer, {"name": number})
    for sizes in (["1"], [True], [1.0], [None]):
        with pytest.raises(ValueError, match=r"sizes\[0\] must be a whole number, got "):
            build(Outer, {"sizes": sizes})
    with pytest.raises(ValueError, match="name must be text, got True"):
        build(Outer, {"name": True})
    with pytest.raises(ValueError, match=r"unknown key 'x\.name'; known under x: sizes, inner, other"):
        build(Outer, {"name": "mine"}, "x", given={"name": "given"})


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.stem)
def test_every_sweep_config_loads(file: Path) -> None:
    assert load_config(SweepConfig, file).drafters


def test_open_loop_alone_needs_no_concurrency() -> None:
    config = load_config(SweepConfig, None, ["concurrency=[]", "request_rate=[0.5,2]"])
    assert [t.label for t in config.traffic()] == ["r0.5", "r2"]


def test_the_level_of_an_interval_allows_for_the_looks_at_it() -> None:
    assert SweepConfig().confidence() == 0.95
    assert SweepConfig(repeats=3).looks() == [3]
    config = load_config(SweepConfig, None, ["stop.ci_width=0.05", "stop.max_repeats=10"])
    assert config.looks() == [1, 2, 3, 5, 8, 10]
    assert config.confidence() == pytest.approx(1 - 0.05 / 6)


def test_sweep_configs_are_found() -> None:
    assert "demo.yaml" in [f.name for f in CONFIGS]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafters=[full,full]"], "drafters must be without repetition"),
        (["drafters=[a/full,b/full]"], "drafters must be of different names"),
        (["drafters=[slimspec-r64]"], "baseline must be one of the drafters' names"),
        (["draft_steps=[]"], "draft_steps must be a list of at least one entry"),
        (["concurrency=[1,0]"], "concurrency must be at least 1 everywhere"),
        (["concurrency=[]"], "concurrency must be a list of at least one entry"),
        (["request_rate=[2.0,0.0]"], "request_rate must be positive everywhere"),
        (["request_rate=[2.0,2.0]"], "request_rate must be without repetition"),
        (["slo.ttft_ms=0"], "slo.ttft_ms must be positive, or absent for no limit, got 0"),
        (["slo.ttft=200"], "unknown key 'slo.ttft'; known under slo: ttft_ms, tpot_ms"),
        (["stop.ci_width=0"], "stop.ci_width must be positive, got 0"),
        (["stop.ci_width=0.1", "stop.max_repeats=2", "repeats=3"], r"stop.max_repeats must be at least repeats \(3\)"),
        (["stop.max_seconds=-1", "stop.ci_width=0.1"], "stop.max_seconds must be positive, got -1"),
        (["stop.width=0.1"], "unknown key 'stop.width'; known under stop: ci_width, max_repeats, max_seconds"),
        (["chat_template=maybe"], "chat_template must be true or false, got 'maybe'"),
        (["search.algorithm=genetic"], "search.algorithm must be one of grid, random, optuna, got 'genetic'"),
        (["search.algorithm=random"], "search.samples must be given for random"),
        (["search.samples=4"], "search.samples must be unset for algorithm=grid"),
        (["search.algorithm=optuna", "search.samples=0"], "search.samples must be at least 1, got 0"),
        (["search.candidates_per_cohort=0"], "search.candidates_per_cohort must be at least 1"),
        (
            ["search.algorithm=random", "search.samples=2", "search.candidates_per_cohort=3"],
            "search.candidates_per_cohort must be unset for algorithm=random, got 3",
        ),
        (["search.early_stop.grace_passes=0"], "search.early_stop.grace_passes must be at least 1"),
        (["search.early_stop.reduction_factor=1"], "search.early_stop.reduction_factor must be at least 2"),
        (["search.early_stop.grace=2"], "unknown key 'search.early_stop.grace'"),
        (["ray.max_failures=-1"], "ray.max_failures must be at least 0, got -1"),
        (["topk=4"], "num_draft_tokens must be given for a tree"),
        (["topk=4", "draft_steps=[2]", "num_draft_tokens=99"], r"num_draft_tokens must be in 2\.\.21"),
        (["num_draft_tokens=3"], "num_draft_tokens must be unset for a chain"),
        (["drafters=[full,full@8x999]"], r"drafters: the nodes of 'full@8x999' must be in 2\.\.201 for topk=8"),
        (["drafters=[full,full@1x3]"], r"'full@1x3' is a tree of 1 candidate\(s\); at least 2"),
        (["drafters=[full@8x20]"], r"baseline must be one of the drafters' names \(full@8x20\), got 'full'"),
        (["engine.mem_fraction_static=1.5"], "engine.mem_fraction_static must be between 0 and 1"),
        (["engine.extra.model_path=x"], "engine.extra must be without model_path"),
        (["engine.extra.speculative_adaptive=true"], r"engine.extra must be without .* draft_steps lists the lengths"),
        (["engine.extra.speculative_adaptive_config=policy.json"], r"got \['speculative_adaptive_config'\]"),
        (["engine.extra.speculative_token_map=ids.pt"], "engine.extra.speculative_token_map must be absent"),
    ],
)
def test_sweep_config_refuses(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(SweepConfig, None, overrides)
