# ruff: noqa: E501  # tables with a row a setting
"""Bad inputs by the hundred, as a hostile and a clumsy user would give them: every one is refused with exit status 2 and
a message that names what is wrong; none is a traceback, none hangs, none is accepted in silence.

Jobs are called by their own `main` in this process. `hostile.py` makes wrong values for every setting of every config
by its type; what follows from meaning stands in the tables here.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import ask, complaints, wrong_settings
from safetensors.torch import load_file, save_file
from small_world import World, make_world, tiny_info

from rayspec.calibration.config import CalibrationConfig
from rayspec.export import ExportConfig
from rayspec.sweep.config import SweepConfig
from rayspec.training.drafter_config import DrafterTrainConfig
from rayspec.training.target_config import TargetTrainConfig
from sglang_ext.drafters.checkpoint import check_files, load_drafter, read_info

Case = tuple[list[str], tuple[str, ...]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> World:
    return make_world(tmp_path_factory.mktemp("world"), tiny_target_folder)


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    home = tmp_path / "home"
    monkeypatch.setenv("RAYSPEC_HOME", str(home))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    assert not list(home.glob("**/*.db")), "something was begun"
    assert not list(home.glob("sweeps/*")), "something was begun"


def base(job: str, world: World, out: Path) -> list[str]:
    """Arguments with which the job's plan is in order."""
    if job == "sweep":
        return [
            *("--plan", f"target={world.target}", f"drafters=[{world.drafters}/full]", f"workload={world.prompts}"),
            *("max_new_tokens=16", "draft_steps=[2]"),
        ]
    if job == "train":
        sizes = ("count=6", "batch_size=4", "answer_tokens=10", "max_prompt_tokens=16", "min_prompt_tokens=8")
        return [
            *("--plan", "--config", str(out / "train.yaml"), f"target={world.target}", f"output_dir={out / 'out'}"),
            *(f"{name}.prompts={world.texts}" for name in ("answers", "held_out")),
            *(f"{name}.{size}" for name in ("answers", "held_out") for size in sizes),
            *("recipe.num_steps=4", "recipe.warmup_steps=1"),
        ]
    if job == "calibrate":
        return [
            "--plan",
            "--config",
            str(out / "calibrate.yaml"),
            f"target={world.target}",
            f"output_dir={out / 'out'}",
        ]
    if job == "export":
        return ["--plan", f"drafters=[{world.drafters}/full]", f"output_dir={out / 'out'}"]
    assert job == "train_target", "every job is here"
    return ["--plan", "--config", str(out / "target.yaml"), f"export_dir={out / 'out'}"]


@pytest.fixture
def place(tmp_path: Path, world: World) -> Path:
    (tmp_path / "train.yaml").write_text("heads: [{name: full, draft_head: {kind: full}}]\n")
    (tmp_path / "calibrate.yaml").write_text(
        f"sources: {{raw: {{kind: raw, documents: {world.texts}}}}}\n"
        "calibrations: [{name: a, source: raw, rule: {kind: frspec, top_k: 8}}]\n"
    )
    (tmp_path / "target.yaml").write_text("name: tiny\ntoken_budget: 4096\n")
    return tmp_path


JOBS = ("sweep", "train", "calibrate", "export", "train_target")


@pytest.mark.parametrize("job", JOBS)
def test_what_is_broken_here_is_in_order_otherwise(job: str, world: World, place: Path) -> None:
    answer = ask(job, *base(job, world, place))
    assert (answer.code, answer.trouble) == (0, None), answer


SCHEMAS: dict[str, tuple[type, tuple[str, ...]]] = {
    "sweep": (SweepConfig, ()),
    "train": (DrafterTrainConfig, ()),
    "calibrate": (CalibrationConfig, ()),
    "export": (ExportConfig, ()),
    "train_target": (TargetTrainConfig, ()),
}


@pytest.mark.parametrize("job", JOBS)
def test_every_setting_with_every_wrong_value(job: str, world: World, place: Path) -> None:
    schema, may_be_negative = SCHEMAS[job]
    cases = list(wrong_settings(schema, may_be_negative))
    assert len(cases) >= {"export": 7, "calibrate": 80}.get(job, 150)
    found = complaints(job, base(job, world, place), cases)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


def one(argument: str, *words: str) -> Case:
    return [argument], words


FULL = "draft_head: {kind: full}"


def sweep_cases(world: World) -> list[Case]:
    d, t = world.drafters, world.target
    return [
        *(one(f"name={name}", "name") for name in ("''", '"a\\nb"', "x" * 201, "'  '")),
        *(one(f"experiment={name}", "experiment") for name in ("''", '"a\\tb"', "x" * 201)),
        *(one(f"target={name}", "target") for name in ("''", "~nobody-of-this-name/x", "nowhere", "no/such/model", "a b")),
        *(one(f"target={name}", "target") for name in ("x" * 300, "/" + "x" * 300, "a/b/c/d", str(world.prompts), "..")),
        *(one(f"drafters=[{name}]", "drafter") for name in ("''", "/", "~nobody-of-this-name/x", "x" * 300, "nowhere")),
        *(one(f"drafters=[{d}/full@{shape}]", "full@") for shape in ("0x0", "1x3", "2x1", "2x999", "9x" + "9" * 30, "x")),
        one(f"drafters=[{d}/full,{d}/full/]", "different names"),
        *(one(f"baseline={name}", "baseline") for name in ("''", "nowhere")),
        one("draft_steps=[0]", "draft_steps"),
        one("draft_steps=[2,2]", "draft_steps"),
        one("draft_steps=[1000]", "draft_steps"),
        one("topk=300", "num_draft_tokens"),
        (["topk=300", "num_draft_tokens=4"], ("topk",)),
        *(one(f"num_draft_tokens={n}", "num_draft_tokens") for n in (0, 2, 99)),
        *(one(f"concurrency=[{n}]", "concurrency") for n in (0, -1, "''")),
        *(one(f"request_rate=[{r}]", "request_rate") for r in (0, -2, ".inf", ".nan", "1e-300", "1e-9")),
        one("request_rate=[1.0000001,1.0000002]", "request_rate"),
        *(one(f"temperature={x}", "temperature") for x in (".inf", ".nan", "-0.1", "1e999", "-.inf")),
        *(one(f"seed={x}", "seed") for x in (-1, 2**32, 10**17)),
        *(one(f"max_new_tokens={n}", "max_new_tokens") for n in (0, 1, 127, 5000, 10**9)),
        *(one(f"warmup_tokens={n}", "warmup_tokens" if n == 0 else "new ones") for n in (0, 5000)),
        *(one(f"block_prompts={n}", "block_prompts") for n in (0, "all")),
        *(one(f"repeats={n}", "repeats") for n in (0, "'1 2'")),
        one("long_prompts=keep", "long_prompts", "refuse or drop"),
        one("stop.max_seconds=10", "stop.max_seconds", "stop.ci_width"),
        *(one(f"stop.ci_width={x}", "stop.ci_width") for x in (0, 0.1)),  # the second: too few blocks
        (["stop.ci_width=0.1", "repeats=21"], ("stop.max_repeats",)),
        *(one(f"search.algorithm={a}", "search.algorithm") for a in ("gird", "Grid", "''")),
        *(one(f"search.algorithm={a}", "search.samples") for a in ("random", "optuna")),
        (["search.algorithm=random", "search.samples=99"], ("search.samples must be at most",)),
        one("search.samples=3", "search.samples must be unset"),
        one("search.early_stop={}", "search.early_stop.grace_passes", "passes"),
        one("search.early_stop={grace_passes: 0}", "grace_passes"),
        *(one(f"slo.{limit}=0", f"slo.{limit}") for limit in ("ttft_ms", "tpot_ms")),
        *(one(f"engine.dtype={x}", "engine.dtype", "bfloat16") for x in ("float7", "torch.float32", "''", "int8")),
        *(one(f"engine.context_length={n}", "engine.context_length") for n in (0, 129, 10**10)),
        *(one(f"engine.context_length={n}", "do not fit") for n in (8, 31)),
        *(one(f"engine.max_total_tokens={n}", "do not fit" if n else "max_total_tokens") for n in (0, 16)),
        *(one(f"engine.mem_fraction_static={x}", "mem_fraction_static") for x in (0, 1, 80)),
        *(one(f"engine.num_threads={n}", "num_threads") for n in (0, 5000)),
        *(one(f"engine.{name}_timeout_s={x}", f"{name}_timeout_s") for name in ("start", "block") for x in (0, "1e300")),
        *(one(f"engine.extra.tp_size={x}", "tp_size") for x in (0, -1, 1.5, "two", "true", "[1]")),
        *(one(f"engine.extra.{name}_size=0", f"{name}_size") for name in ("pp", "dp", "ep")),
        (["engine.nodes=2"], ("engine.nodes", "tp_size")),
        (["engine.nodes=0"], ("engine.nodes",)),
        *(one(f"engine.extra.{name}=1", name, "no argument of SGLang") for name in ("tpsize", "tp-size", "nonsense")),
        *(one(f"engine.extra.{name}", name.split("=")[0]) for name in ("disable_cuda_graph=2", "max_running_requests=x")),
        *(one(f"engine.extra.{name}=x", name) for name in ("model_path", "nnodes", "dtype", "context_length")),
        *(one(f"ray.address={x}", "ray.address") for x in ("''", "nowhere", "http://a:1", "host:port", "ray://host")),
        *(one(f"ray.{name}={x}", name) for name, x in (("num_cpus", 0), ("num_gpus", -1), ("max_failures", -1))),
        *(one(f"workload={x}", "workload") for x in ("''", "','", "mtbench", "~nobody-of-this-name/x", "x" * 300, "/", "::")),
        *(one(f"workload={world.prompts}:{x}", "prompts") for x in ("0", "9" * 30, "99", "2:poems", "-1", "1.5")),
        one(f"workload={world.prompts},{world.prompts}", "more than once"),
        one(f"workload={t}", "workload"),
        one(f"workload={d}/full/model.safetensors", "model.safetensors:1"),
    ]  # fmt: skip


def train_cases(world: World, out: Path) -> list[Case]:
    def heads(*entries: str) -> str:
        return f"heads=[{', '.join('{' + entry + '}' for entry in entries)}]"

    def medusa(tree: str = "", options: str = "positions: 2") -> str:
        own = f", tree: {{{tree}}}" if tree else ""
        return heads(f"name: a, drafter: {{kind: medusa, {options}}}, {FULL}{own}")

    (out / "file").write_text("a file")
    (out / "empty").mkdir()
    for name, text in (("deep", "[" * 100_000), ("number", "3"), ("no_paths", '[["a"]]'), ("orphan", "[[0, 1]]")):
        (out / f"{name}.json").write_text(text)
    return [
        *(one(heads(f"name: {name}, {FULL}"), "name") for name in ("''", "a/b", "/", "x/..")),
        one(heads(f"name: a, {FULL}", f"name: a, {FULL}"), "heads[].name must be unique"),
        *(one(heads(f"name: a, draft_head: {{kind: {kind}}}"), "kind") for kind in ("fulll", "3", "[full]", "null", "{a: b}")),
        one(heads("name: a, draft_head: {}"), "kind"),
        *(one(heads(f"name: a, draft_head: {{kind: slimspec, rank: {r}}}"), "rank") for r in (0, -1, 33, 1.5, "x", "null", ".nan")),
        *(one(heads(f"name: a, draft_head: {{kind: full, weight_format: {f}}}"), "weight_format") for f in ("int2", 8)),
        one(heads("name: a, draft_head: {kind: full, weight_format: int4, group_size: 3}"), "group_size"),
        *(one(heads(f"name: a, draft_head: {{kind: truncated, size: {n}}}"), "size") for n in (0, 258, "x")),
        one(heads("name: a, draft_head: {kind: truncated, size: 8}"), "ids", "jobs/calibrate.py"),
        one(heads("name: a, draft_head: {kind: truncated, size: 8, step_sizes: [9]}"), "step_sizes"),
        one(heads("name: a, draft_head: {kind: coral, clusters: 4, top: 1}"), "cluster map"),
        one(heads("name: a, draft_head: {kind: coral, clusters: 4, top: 5}"), "top"),
        one(heads("name: a, draft_head: {kind: rdk, base: {kind: rdk}}"), "base"),
        one(heads("name: a, draft_head: {kind: rdk, base: {kind: truncated, size: 8}}"), "ids"),
        one(heads("name: a, draft_head: {kind: rdk, base: 3}"), "base"),
        *(one(heads(f"name: a, base: {b}, {FULL}"), "base") for b in ("nowhere", "''", "~nobody-of-this-name/x", "x" * 300)),
        one(heads(f"name: a, base: {world.drafters}/medusa, {FULL}"), "heads[a].base", "medusa"),
        one(heads(f"name: a, artifacts: nowhere, {FULL}"), "nowhere"),
        one(heads(f"name: a, artifacts: {world.drafters}/full, {FULL}"), "calibration"),
        one(heads("name: a, freeze_head: true, draft_head: {kind: slimspec, rank: 8}"), "freeze_head"),
        *(one(heads(f"name: a, drafter: {{kind: {k}}}, {FULL}"), "drafter.kind") for k in ("meduza", "[medusa]", "3", "null")),
        *(one(medusa(options=f"positions: {n}"), "positions") for n in (0, -1, 1.5, "x", 10**9, "true")),
        *(one(medusa(f"kind: {k}"), "tree.kind") for k in ("statik", "[static]", "3", "null")),
        *(one(medusa(f"kind: static, nodes: {n}"), "nodes") for n in (0, 1, 999, "x")),
        *(one(medusa(f"kind: static, topk: {n}"), "topk") for n in (0, -1, "x")),
        *(one(medusa(f"kind: static, file: {out}/{f}"), "no tree in") for f in ("deep.json", "number.json", "no_paths.json", "orphan.json", "none.json")),
        *(one(medusa(f"kind: slim, correlation: false, {o}"), "tree") for o in ("hypotheses: 0", "smoothing: 0", "strength: -1", "unseen: two", "nonsense: 1", "strength: .nan")),
        one(medusa("kind: slim"), "bigram"),
        one(medusa("kind: slim, bigram: nowhere"), "nowhere"),
        *(one(heads(f"name: a, drafter: {{kind: independent, {o}}}, {FULL}"), "drafter") for o in ("hidden_size: 33", "hidden_size: -5", "num_layers: 0", "num_layers: 100000", "head_dim: 7", "rope_theta: .inf", "num_key_value_heads: 3", "rms_norm_eps: 0", "nonsense: 1")),
        *(one(f"recipe.{name}={x}", name) for name, x in (("lr", 0), ("lr", -1), ("muon_lr", 0), ("clip_norm", 0), ("beta1", 1), ("beta1", 2), ("beta2", 2), ("beta2", -0.1), ("weight_decay", -1), ("intermediate_size", -5), ("intermediate_size", 0), ("intermediate_size", 10**12), ("num_steps", 0), ("batch_size", 0), ("batch_size", 10**12), ("ttt_steps", 0), ("ttt_decay", 0), ("ttt_decay", 1.5), ("chunk_rows", 0), ("seed", -1), ("seed", 10**12), ("warmup_steps", 4), ("final_lr_share", 2), ("optimizer", "sgd"), ("csra_weight", -1), ("csra_temperature", 0))),
        (["recipe.csra_weight=1", "recipe.ttt_steps=1"], ("recipe.csra_weight",)),
        *(one(f"answers.{name}={x}", f"answers.{name}") for name, x in (("count", 0), ("batch_size", 0), ("answer_tokens", 0), ("greedy_share", 2), ("temperature", 0), ("seed", -1), ("seed", 10**12), ("min_prompt_tokens", 0), ("max_prompt_tokens", 1), ("prompts", "nowhere"), ("prompts", "''"), ("prompts", out / "empty"))),
        one("answers.prompts=self", "answers.prompts", "chat template"),
        one("answers.min_prompt_tokens=2", "answers.min_prompt_tokens must be at least 5"),
        one("answers.answer_tokens=1000", "answers", "128"),
        one("held_out.greedy_share=0", "held_out.greedy_share"),
        one("held_out.min_prompt_tokens=2", "held_out.min_prompt_tokens"),
        (["evaluation.draft_steps=9", "held_out.min_prompt_tokens=12"], ("held_out.answer_tokens",)),
        *(one(f"evaluation.{name}=0", f"evaluation.{name}") for name in ("draft_steps", "every", "sequences")),
        *(one(f"engines.{name}={x}", f"engines.{name}") for name, x in (("count", 0), ("num_cpus", 0), ("dtype", "float7"), ("extra.nonsense", 1), ("max_running_requests", 0), ("start_timeout_s", 0))),
        *(one(f"target={x}", "target") for x in ("nowhere", "''", "~nobody-of-this-name/x", "/", "x" * 300, world.drafters / "full", world.prompts)),
        *(one(f"output_dir={out}/file{x}", "file") for x in ("", "/below")),
        one(f"work_dir={out}/file", "work_dir", "file"),
        *(one(f"{name}=0", name) for name in ("checkpoint_every", "log_every", "num_threads")),
    ]  # fmt: skip


def calibrate_cases(world: World, out: Path) -> list[Case]:
    def rule(text: str, source: str = "raw") -> str:
        return f"calibrations=[{{name: a, source: {source}, rule: {{{text}}}}}]"

    (out / "latin").mkdir()
    (out / "latin" / "a.txt").write_bytes(b"\xe9\xff")
    (out / "empty").mkdir()
    for name, content in (
        ("no_json.jsonl", b"hello\n"),
        ("number.jsonl", b"3\n"),
        ("no_text.jsonl", b'{"txt": "a"}\n'),
        ("null_text.jsonl", b'{"text": null}\n'),
        ("deep.jsonl", b'{"text": ' + b"[" * 100_000 + b"\n"),
        ("digits.jsonl", b'{"text": ' + b"9" * 5000 + b"}\n"),
        ("latin.jsonl", b'{"text": "\xe9"}\n'),
        ("plain.jsonl.gz", b'{"text": "a"}\n'),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:20]),
        ("none.jsonl", b""),
    ):
        (out / name).write_bytes(content)
    documents = ("nowhere", "''", out / "empty", out / "latin", world.prompts.with_suffix(".txt"), "x" * 300)
    files = sorted(out.glob("*.jsonl*"))
    assert len(files) == 10
    return [
        *(one(f"sources.raw.documents={x}", "documents") for x in (*documents, *files)),
        *(one(f"sources.raw={x}", "sources.raw") for x in ("3", "[raw]", "{kind: [raw]}", "{kind: rawer}")),
        *(one(f"sources.raw.{x}", "sources.raw") for x in ("nonsense=1", "documents=[a]", "kind=3")),
        *(one(f"sources.more={{kind: target, {x}}}", "sources.more") for x in ("sequences: 0", "sequences: x", "answers: [a]")),
        *(one(f"sources.more={{kind: target, answers: {x}}}", "answers") for x in ("nowhere", world.target, "x" * 300)),
        *(one(f"sources.more={{kind: draft, {x}}}", "sources.more") for x in ("draft_steps: 0", "draft_steps: 1000", "batch_size: 0", "temperature: -1", "seed: -1")),
        *(one(rule(f"kind: {k}"), "kind") for k in ("frspek", "[frspec]", "3", "null", "{a: b}")),
        *(one(rule(f"kind: frspec, top_k: {n}"), "top_k") for n in (0, -1, 258, "x", 1.5, "null")),
        one(rule("kind: frspec"), "top_k"),
        one(rule("kind: frspec, top_k: 8, nonsense: 1"), "nonsense"),
        *(one(rule(f"kind: vocabtrim, {x}"), "vocabtrim") for x in ("top_k: 3, top_p: 0.5", "seed: 1")),
        *(one(rule(f"kind: vocabtrim, top_p: {p}"), "top_p") for p in (0, 1.5, -1, ".nan", "x")),
        *(one(rule(f"kind: vocabtrim, min_count: {n}"), "min_count") for n in (0, "x")),
        *(one(rule(f"kind: kmeans, clusters: 4, {x}"), x.split(":")[0]) for x in ("max_size: 0.5", "max_size: .inf", "iterations: 0", "iterations: 1000000000", "seed: -1", "pinned: -1", "pinned: 300", "drafter: nowhere", "drafter: [a]")),
        *(one(rule(f"kind: kmeans, clusters: {n}"), "clusters") for n in (0, 300, "x")),
        one(rule("kind: kmeans, clusters: 4, drafter: " + str(world.drafters / "medusa")), "medusa"),
        one(rule("kind: bcl"), "source must be of kind target"),
        one(rule("kind: frspec, top_k: 8", "web"), "source must be one of sources"),
        *(one(f"calibrations=[{{name: {n}, source: raw, rule: {{kind: frspec, top_k: 8}}}}]", "name") for n in ("''", "a/b", "/")),
        *(one(f"calibrations={x}", "calibrations") for x in ("[]", "[3]", "{a: b}", "[{name: a}]", "[null]")),
        *(one(f"target={x}", "target") for x in ("nowhere", "''", "~nobody-of-this-name/x", "/", "x" * 300, world.drafters / "full", world.prompts)),
        *(one(f"held_out={x}", "answers") for x in ("nowhere", world.target, world.prompts)),
        *(one(f"{name}=0", name) for name in ("ray.blocks", "num_threads")),
        *(one(f"corpus.{name}={x}", f"corpus.{name}") for name, x in (("min_bytes", 0), ("max_bytes", 1), ("held_out_percent", 0), ("held_out_percent", 51), ("package_cap_bytes", 1), ("held_out_cap_bytes", 1), ("stdlib_repeats", 0))),
    ]  # fmt: skip


def export_cases(world: World, out: Path) -> list[Case]:
    return [
        *(one(f"drafters=[{x}]", "drafter") for x in ("''", "nowhere", "/", "~nobody-of-this-name/x", "x" * 300)),
        *(one(f"drafters=[{world.drafters}/{x}]", x) for x in ("medusa", "independent", "stock", "none")),
        one("drafters=[]", "drafters is empty"),
        one(f"drafters=[{world.drafters}/full,{world.drafters}/full]", "different names"),
        one(f"drafters=[{world.target}]", "LlamaForCausalLM"),
        one(f"drafters=[{world.prompts}]", "prompts.jsonl"),
        one(f"output_dir={world.drafters}", "full"),  # where the drafter itself is
    ]


def target_cases(out: Path) -> list[Case]:
    bad = {
        "name": ("''", "..", ".", "a/b", "x" * 300, '"a\\nb"'),
        "token_budget": (0, 4095, -1),
        "export_dir": ("''",),
        "seed": (-1, 10**12),
        "tokenizer_bytes": (0,),
        "batch_tokens": (0, 1000, -1024),
        "seq_len": (0, 3, -1, 2048),
        "long_seq_len": (0, 3, 2048),
        "long_fraction": (-0.1, 1, 2),
        "decay_fraction": (-0.1, 1),
        "optimizer": ("sgd", "''"),
        "matrix_lr": (0, -1),
        "embedding_lr": (0, -1),
        "weight_decay": (-1,),
        "warmup_tokens": (-1,),
        "grad_clip": (0, -1),
        "num_threads": (0, 5000),
        "eval_every_s": (0,),
        "checkpoint_every_s": (0,),
        "held_out_tokens": (0,),
        "model.vocab_size": (0, 256, 65537),
        "model.hidden_size": (0, -1, 10**12),
        "model.num_layers": (0, 10**9),
        "model.num_heads": (0, 3),
        "model.num_kv_heads": (0, 3),
        "model.head_dim": (0, 7),
        "model.intermediate_size": (0,),
        "model.rope_theta": (0, -1),
        "model.max_position_embeddings": (0, 128),
        "corpus.held_out_percent": (0, 51),
        "corpus.min_bytes": (0,),
    }
    # a width that the heads do not divide is a Llama all the same; so is any head_dim that is even
    return [one(f"{name}={value}", name.split(".")[-1]) for name, values in bad.items() for value in values]


def cases_of(job: str, world: World, out: Path) -> list[Case]:
    if job == "sweep":
        return sweep_cases(world)
    if job == "train_target":
        return target_cases(out)
    return {"train": train_cases, "calibrate": calibrate_cases, "export": export_cases}[job](world, out)


@pytest.mark.parametrize("job", JOBS)
def test_values_that_make_no_sense(job: str, world: World, place: Path) -> None:
    cases = cases_of(job, world, place)
    found = complaints(job, base(job, world, place), cases)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


CONFIG_FILES: dict[str, bytes] = {
    "number": b"42",
    "text": b"hello",
    "yes": b"true",
    "list": b"- a",
    "set": b"!!set {name}",
    "not_utf8": "name: é".encode("latin1"),
    "utf16": "name: x".encode("utf16"),
    "zero_byte": b"name: \0",
    "bytes": bytes(range(256)),
    "gzip": gzip.compress(b"name: x"),
    "deep": b"name: " + b"[" * 20_000,
    "deep_and_closed": b"name: {a: " + b"[" * 5000 + b"]" * 5000 + b"}",
    "digits": b"seed: " + b"9" * 5000,
    "python_object": b"name: !!python/object/apply:os.system ['true']",
    "date": b"name: !!timestamp 2020-01-01",
    "twice": b"name: a\nname: b",
    "two_documents": b"name: a\n---\nname: b",
    "number_as_key": b"1: 2",
    "null_as_key": b"null: 2",
    "list_as_key": b"[1]: 2",
    "alias_of_itself": b"name: &a [*a]",
    "tab": b"\tname: x",
    "unclosed": b"name: [",
    "unknown_key": b"nmae: x",
    "missing": b"name: ???",
    "interpolation": b"name: ${nowhere}",
    "interpolation_of_itself": b"name: ${name}",
}


@pytest.mark.parametrize("job", JOBS)
def test_config_files_that_are_none(job: str, world: World, place: Path) -> None:
    arguments = [a for a in base(job, world, place) if a != "--config" and not a.endswith(".yaml")]
    files = [place / f"{name}.bad" for name in CONFIG_FILES]
    for file in files:
        file.write_bytes(CONFIG_FILES[file.stem])
    places = [place, place / "none.yaml", place / ("x" * 300), Path("/dev/null"), Path("/proc/self/mem")]
    cases = [(["--config", str(file)], (str(file)[:200],)) for file in (*files, *places)]
    cases += [(list(arguments), words) for arguments, words in COMMAND_LINES]
    found = complaints(job, arguments, cases)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


COMMAND_LINES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("--nonsense",), ("--nonsense",)),
    (("--plan=yes",), ("--plan",)),
    (("--config",), ("--config",)),
    (("name",), ("expected key=value",)),
    (("=x",), ("expected key=value",)),
    (("-x=1",), ("-x",)),
    (("nonsense=1",), ("unknown key 'nonsense'",)),
    (("nonsense.below=1",), ("unknown key 'nonsense'",)),
    (("a..b=1",), ("unknown key",)),
    ((".=1",), ("unknown key",)),
    (("name=[1",), ("no valid YAML",)),
    (("name=!!python/object/apply:os.system [x]",), ("no valid YAML",)),
    (("x=" + "[" * 5000 + "]" * 5000,), ("nested too deep",)),
    (("x=" + "9" * 5000,), ("4300 digits",)),
)


PROMPTS: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n\n",
    "no_json": b"{'turns': ['a']}\n",
    "cut": b'{"prompt": "a"',
    "number": b"3\n",
    "null": b"null\n",
    "list": b"[1]\n",
    "text": b'"a"\n',
    "no_prompt": b'{"promt": "a"}\n',
    "many_keys": json.dumps({f"key{i}" * 50: 1 for i in range(99)}).encode(),
    "prompt_is_null": b'{"prompt": null}\n',
    "prompt_is_number": b'{"prompt": 3}\n',
    "prompt_is_blank": b'{"prompt": " "}\n',
    "half_a_pair": b'{"prompt": "\\ud800"}\n',
    "turns_is_text": b'{"turns": "a"}\n',
    "turns_is_empty": b'{"turns": []}\n',
    "turns_is_object": b'{"turns": {"a": "b"}}\n',
    "turn_is_list": b'{"turns": [["a"]]}\n',
    "messages_is_text": b'{"messages": "a"}\n',
    "message_is_text": b'{"messages": ["a"]}\n',
    "message_without_content": b'{"messages": [{"role": "user"}]}\n',
    "content_is_null": b'{"messages": [{"role": "user", "content": null}]}\n',
    "role_is_list": b'{"messages": [{"role": ["user"], "content": "a"}]}\n',
    "unknown_role": b'{"messages": [{"role": "tool", "content": "a"}]}\n',
    "answer_first": b'{"messages": [{"role": "assistant", "content": "a"}]}\n',
    "no_user": b'{"messages": [{"role": "system", "content": "a"}]}\n',
    "id_is_list": b'{"id": [1], "prompt": "a"}\n',
    "id_is_null": b'{"id": null, "prompt": "a"}\n',
    "id_is_true": b'{"id": true, "prompt": "a"}\n',
    "id_is_empty": b'{"id": "", "prompt": "a"}\n',
    "id_has_a_newline": b'{"id": "a\\nb", "prompt": "a"}\n',
    "id_is_long": b'{"id": "' + b"x" * 5000 + b'", "prompt": "a"}\n',
    "id_of_5000_digits": b'{"id": ' + b"9" * 5000 + b', "prompt": "a"}\n',
    "id_of_4000_digits": b'{"id": ' + b"9" * 4000 + b', "prompt": "a"}\n',
    "id_is_float": b'{"id": 1.5, "prompt": "a"}\n',
    "id_is_nan": b'{"id": NaN, "prompt": "a"}\n',
    "repeated_id": b'{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n',
    "category_is_number": b'{"category": 3, "prompt": "a"}\n',
    "category_is_empty": b'{"category": "", "prompt": "a"}\n',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"\n",
    "deep_object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n",
    "latin1": '{"prompt": "é"}\n'.encode("latin1"),
    "utf16": '{"prompt": "a"}\n'.encode("utf16"),
    "zero_bytes": b"\0" * 100,
    "gzip_without_its_ending": gzip.compress(b'{"prompt": "a"}\n'),
    "one_that_does_not_fit": json.dumps({"prompt": "a" * 200}).encode(),
    "a_second_turn_that_does_not_fit": json.dumps({"turns": ["a" * 60, "b" * 60]}).encode(),
}


def test_prompts_files_that_are_none(world: World, place: Path) -> None:
    cases: list[Case] = []
    for name, content in PROMPTS.items():
        (place / f"{name}.jsonl").write_bytes(content)
        cases.append(one(f"workload={place}/{name}.jsonl", f"{name}"))
    (place / "plain.jsonl.gz").write_bytes(b'{"prompt": "a"}\n')
    (place / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 99)[:20])
    cases += [one(f"workload={place}/{name}.jsonl.gz", name) for name in ("plain", "cut")]
    found = complaints("sweep", base("sweep", world, place), cases)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


def test_prompts_that_do_not_fit_are_dropped_where_asked(world: World, place: Path) -> None:
    lines = [json.dumps({"id": i, "prompt": "a" * (200 if i % 2 else 20)}) for i in range(8)]
    (place / "some.jsonl").write_text("\n".join(lines))
    arguments = [*base("sweep", world, place), f"workload={place}/some.jsonl"]
    refused = ask("sweep", *arguments)
    assert "4 of 8 prompts of workload" in refused.err
    assert "long_prompts=drop leaves them out" in refused.err
    answer = ask("sweep", *arguments, "long_prompts=drop")
    assert answer.code == 0, answer
    assert "4 prompts are too long and left out" in answer.out
    assert "Every trial answers 4 prompts" in answer.out


def test_streams_that_a_block_cannot_fill_earn_a_warning(world: World, place: Path) -> None:
    answer = ask("sweep", *base("sweep", world, place), "concurrency=[1,5,8]")
    assert answer.code == 0, answer
    assert "warning: concurrency [5, 8], but a block has 4 prompts" in answer.out
    assert "warning" not in ask("sweep", *base("sweep", world, place), "concurrency=[1,8]", "block_prompts=8").out


# --- folders of others


ODD: tuple[Any, ...] = (None, True, 3, -1, 0, 1.5, 10**30, 1e308, "x", "", [], [1], ["x"], [None], {}, {"a": 1})


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, child in pairs:
        yield from leaves(child, (*path, key))


def mutations(value: Any) -> Iterator[tuple[str, Any]]:
    """(what was done, the value with one thing of it odd or gone)."""
    for path in leaves(value):
        for odd in (*ODD, "gone"):
            changed = json.loads(json.dumps(value))
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            if odd == "gone":
                del parent[path[-1]]
            else:
                parent[path[-1]] = odd
            yield f"{'.'.join(map(str, path))}={odd!r}", changed
    for odd in ODD:
        if not isinstance(odd, dict):
            yield f"whole={odd!r}", odd


def strangely(read: Callable[[], object], named: str) -> str | None:
    """What is wrong with the way in which something odd is read: nothing, where it is taken, or refused by its name."""
    try:
        read()
    except ValueError as error:
        return None if named in str(error) else f"UNCLEAR {error!s:.300}"
    except BaseException as error:
        return f"TRACEBACK {type(error).__name__}: {error!s:.300}"
    return None


@pytest.mark.parametrize("name", ["full", "medusa", "independent", "stock"])
def test_drafters_with_an_odd_config(name: str, world: World) -> None:
    folder = world.copy_of(world.drafters / name, f"odd-{name}")
    config = json.loads((folder / "config.json").read_text())
    found, refused = [], 0

    def read() -> None:
        nonlocal refused
        refused += 1
        info = read_info(folder)
        check_files(info)
        refused -= 1

    cases = list(mutations(config))
    for what, changed in cases:
        (folder / "config.json").write_text(json.dumps(changed))
        trouble = strangely(read, str(folder))
        found += [f"{what}: {trouble}"] if trouble else []
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found[:60])
    assert refused > 200  # of names that SGLang alone reads, anything goes


JSON_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "cut": b"{",
    "list": b"[]",
    "deep": b"[" * 100_000,
    "nan": b'{"architectures": NaN}',
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
    "latin1": '{"a": "é"}'.encode("latin1"),
    "zero": b"\0" * 50,
}


def broken_drafters(world: World) -> dict[str, Callable[[Path], object]]:
    def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
        def break_(folder: Path) -> None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")

        return break_

    def config(**entries: Any) -> Callable[[Path], object]:
        def break_(folder: Path) -> None:
            found = json.loads((folder / "config.json").read_text())
            found["rayspec"].update(entries)
            (folder / "config.json").write_text(json.dumps(found))

        return break_

    other = tiny_info(world.target, (2, 4, 5))
    strange = {**other.to_dict(), "tokenizer_sha256": "0" * 64}
    deeper = {**other.to_dict(), "tap_layers": [2, 4, 99]}
    return {
        "no_weights": lambda d: (d / "model.safetensors").unlink(),
        "weights_are_a_folder": lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").mkdir()),
        "weights_cut": lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-9]),
        "weights_empty": lambda d: (d / "model.safetensors").write_bytes(b""),
        "weights_are_text": lambda d: (d / "model.safetensors").write_text("hello" * 99),
        "tensor_gone": weights(lambda t: t.pop("fc.weight")),
        "tensor_too_much": weights(lambda t: t.update(extra=torch.zeros(3))),
        "tensor_of_other_shape": weights(lambda t: t.update({"fc.weight": torch.zeros(3, 3)})),
        "of_another_target": config(target=strange),
        "taps_outside": config(target=deeper),
        "shares_nothing": config(shares=[{"drafter": "nowhere", "sha256": "0", "tensors": ["fc.weight"]}]),
        "shares_itself": config(shares=[{"drafter": ".", "sha256": "0", "tensors": []}]),
        "shares_zero_byte": config(shares=[{"drafter": "a\0b", "sha256": "0", "tensors": []}]),
        **{
            f"config_{name}": (lambda d, text=text: (d / "config.json").write_bytes(text))
            for name, text in JSON_TEXTS.items()
        },
    }


def test_a_broken_drafter_is_named_and_does_not_stop_the_others(world: World, place: Path) -> None:
    found = []
    for name, break_ in broken_drafters(world).items():
        folder = world.copy_of(world.drafters / "full", name)
        break_(folder)
        settings = base("sweep", world, place)
        both = ask("sweep", *settings, f"drafters=[{world.drafters}/full,{folder}]")
        if both.code != 0 or f"{name} cannot be measured" not in both.out:
            found.append(f"{name} beside a whole one: {both.trouble or both.err or both.out}"[:900])
        jobs: dict[str, list[str]] = {
            "sweep": [f"drafters=[{folder}]", f"baseline={name}"],
            "export": [f"drafters=[{folder}]"],
            "train": [f"heads=[{{name: a, base: {folder}, {FULL}}}]"],
        }
        for job, arguments in jobs.items():
            if not (job == "export" and name in ("of_another_target", "taps_outside")):  # which an export does not know
                found += complaints(job, base(job, world, place), [(arguments, (name,))])
    assert not found, "\n".join(found)


def test_drafters_that_cannot_serve_what_is_asked(world: World, place: Path) -> None:
    d = world.drafters
    wide = world.folder / "wide-target"
    cases: list[Case] = [
        ([f"drafters=[{d}/medusa]", "baseline=medusa", "draft_steps=[3]"], ("2 positions", "draft_steps")),
        ([f"drafters=[{d}/medusa@4x9]", "baseline=medusa@4x9"], ("draft_tree", "num_draft_tokens")),
        ([f"drafters=[{d}/stock]", "baseline=stock", f"target={wide}"], ("target", "wide-target")),
        ([f"drafters=[{d}/full]", f"target={wide}"], ("trained for target",)),
    ]
    from transformers import LlamaConfig, LlamaForCausalLM

    copy = world.copy_of(world.target, "wide-target")
    shape = json.loads((copy / "config.json").read_text()) | {"hidden_size": 64, "num_hidden_layers": 6}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(copy)
    found = complaints("sweep", base("sweep", world, place), cases)
    assert not found, "\n".join(found)


def test_a_base_of_no_numbers(world: World, place: Path) -> None:
    for value in (math.nan, math.inf):
        folder = world.copy_of(world.drafters / "full", "no-numbers")
        tensors = load_file(folder / "model.safetensors")
        tensors["fc.weight"][0, 0] = value
        save_file(tensors, folder / "model.safetensors")
        answer = ask("train", *base("train", world, place), f"heads=[{{name: a, base: {folder}, {FULL}}}]")
        assert answer.is_refusal, answer
        assert "NaN or Inf" in answer.err
        assert str(folder) in answer.err


def broken_targets() -> dict[str, Callable[[Path], object]]:
    def config(**entries: Any) -> Callable[[Path], object]:
        def break_(folder: Path) -> None:
            found = json.loads((folder / "config.json").read_text()) | entries
            (folder / "config.json").write_text(json.dumps(found))

        return break_

    def index(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}})
        )

    weights = "model.safetensors"
    return {
        "no_config": lambda t: (t / "config.json").unlink(),
        "no_tokenizer": lambda t: (t / "tokenizer.json").unlink(),
        "tokenizer_cut": lambda t: (t / "tokenizer.json").write_text("{"),
        "tokenizer_empty": lambda t: (t / "tokenizer.json").write_text("{}"),
        "no_weights": lambda t: (t / weights).unlink(),
        "pickled_weights": lambda t: (t / weights).rename(t / "pytorch_model.bin"),
        "weights_cut": lambda t: (t / weights).write_bytes((t / weights).read_bytes()[:-9]),
        "weights_empty": lambda t: (t / weights).write_bytes(b""),
        "a_file_of_the_index_is_missing": index,
        "index_is_none": lambda t: (t / "model.safetensors.index.json").write_text("3"),
        "no_model_type": config(model_type=None, architectures=None),
        "unknown_model_type": config(model_type="nonsense"),
        "hidden_size_is_text": config(hidden_size="x"),
        "hidden_size_is_zero": config(hidden_size=0),
        "vocab_size_is_null": config(vocab_size=None),
        "vocab_size_is_negative": config(vocab_size=-5),
        "no_layers": config(num_hidden_layers=0),
        **{
            f"config_{name}": (lambda t, text=text: (t / "config.json").write_bytes(text))
            for name, text in JSON_TEXTS.items()
            if name not in ("nan", "digits")
        },
    }


def test_broken_targets(world: World, place: Path) -> None:
    found = []
    for name, break_ in broken_targets().items():
        folder = world.copy_of(world.target, f"target-{name}")
        break_(folder)
        for job in ("sweep", "train", "calibrate"):
            reads_weights = job != "calibrate"  # which counts text with the tokenizer
            about_weights = name in ("no_weights", "pickled_weights", "weights_cut", "weights_empty") or "index" in name
            if reads_weights or not (about_weights or name in ("no_layers", "hidden_size_is_zero")):
                words = (f"target-{name}",)
                found += complaints(job, base(job, world, place), [([f"target={folder}"], words)])
    assert not found, f"{len(found)}\n" + "\n".join(found)


def test_broken_calibrations(world: World, place: Path) -> None:
    from rayspec.calibration.artifacts import DESCRIPTION, load_artifacts, write_artifacts
    from rayspec.training.frozen_target import FrozenTarget

    target = FrozenTarget.without_weights(world.target)
    info = target.info()
    description = {
        "name": "c",
        "rule": {"kind": "frspec"},
        "target": {"name": "tiny", "vocab_size": info.vocab_size, "tokenizer_sha256": info.tokenizer_sha256},
        "stop_ids": [0],
    }
    folder = place / "calibration"
    tensors = {"ids": torch.arange(8), "counts": torch.zeros(info.vocab_size, dtype=torch.int64)}
    write_artifacts(folder, tensors, description, {})
    entry = "name: a, artifacts: {}, draft_head: {{kind: {}}}"
    good = ask("train", *base("train", world, place), f"heads=[{{{entry.format(folder, 'truncated, size: 8')}}}]")
    assert good.code == 0, good
    cases: list[Case] = [
        one(f"heads=[{{{entry.format(folder, 'truncated, size: 9')}}}]", "size 9", "got 8"),
        one(f"heads=[{{{entry.format(folder, 'coral, clusters: 4, top: 1')}}}]", "cluster map"),
        one(f"heads=[{{{entry.format(folder, 'rdk, base: {kind: truncated, size: 9}')}}}]", "size 9"),
    ]
    found = complaints("train", base("train", world, place), cases)
    stored = json.loads((folder / DESCRIPTION).read_text())
    for what, changed in mutations(stored):
        (folder / DESCRIPTION).write_text(json.dumps(changed))
        trouble = strangely(lambda: load_artifacts(folder, info, target.eos_ids), str(folder))
        found += [f"{what}: {trouble}"] if trouble else []
    for name, text in JSON_TEXTS.items():
        (folder / DESCRIPTION).write_bytes(text)
        trouble = strangely(lambda: load_artifacts(folder, info), str(folder))
        found += [f"{name}: {trouble}"] if trouble else []
    assert not found, f"{len(found)}\n" + "\n".join(found[:60])


def test_the_suite_of_kernels(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for name, text in {**JSON_TEXTS, "object": b"{}", "odd": b'{"provenance": 3}', "number": b"3"}.items():
        (tmp_path / name).mkdir()
        for file in ("results.json", "engines.json"):
            (tmp_path / name / file).write_bytes(text)
    stored = [tmp_path / name for name in (*JSON_TEXTS, "object", "odd", "number")]
    cases: list[Case] = [
        *((["--report", str(folder)], ("--report",)) for folder in (tmp_path / "none", tmp_path / "file", *stored)),
        *((["--engines", "--report", str(folder)], ("--report",)) for folder in stored),
        (["--ops", "nonsense"], ("--ops",)),
        (["--ops"], ("--ops",)),
        (["--interpret", "--ops", "head_topk", "--out", str(tmp_path / "file")], ("file",)),
        (["--interpret", "--ops", "head_topk", "--out", str(tmp_path / "file" / "below")], ("file",)),
        (["--tau", "full=3"], ("--tau must be given with --engines",)),
        (["--shape", "tiny"], ("--shape must be given with --engines",)),
        (["--batches", "1"], ("--batches must be given with --engines",)),
        (["--engines", "--shape", "nonsense"], ("--shape must be one of",)),
        (["--engines", "nonsense", "--shape", "tiny"], ("--engines must be of",)),
        (["--engines", "--shape", "tiny", "--tau", "nonsense=2"], ("--tau must be of",)),
        *((["--engines", "--tau", x], ("--tau",)) for x in ("full", "full=", "full=0.5", "full=nan", "full=inf", "=2", "full=x")),
        *((["--engines", "--batches", x], ("--batches",)) for x in ("0", "-1", "x", "1.5", "9" * 30)),
        (["--engines", "--interpret"], ("--interpret",)),
        (["--engines", "--ops", "head_topk"], ("--ops",)),
        (["--report", str(tmp_path), "--out", str(tmp_path)], ("--report", "--out")),
        (["--report", str(tmp_path), "--interpret"], ("--report", "--interpret")),
        (["--nonsense"], ("--nonsense",)),
    ]  # fmt: skip
    found = complaints("gpu_suite", [], cases)
    assert not found, f"{len(found)} of {len(cases)}\n" + "\n".join(found)


def test_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case] = [
        (["--model", "x"], ("--promote",)),
        (["--traffic", "c1"], ("--promote",)),
        (["--force"], ("--promote",)),
        (["--nonsense"], ("--nonsense",)),
        (["--sweep"], ("--sweep",)),
        (["positional"], ("positional",)),
    ]
    found = complaints("report", [], cases)
    for uri in ("nonsense://x", "nonsense", "http://", "sqlite://", "postgresql://", "\0", "://"):
        if "\0" not in uri:  # which no variable can hold
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            found += [f"{uri}: {c}" for c in complaints("report", [], [([], ("MLFLOW_TRACKING_URI",))])]
    assert not found, f"{len(found)}\n" + "\n".join(found)


def test_loaded_drafters_are_whole(world: World) -> None:
    """The drafters that everything here is broken from."""
    for name in ("full", "medusa", "independent", "stock"):
        drafter, _ = load_drafter(world.drafters / name)
        assert all(bool(t.isfinite().all()) for t in drafter.state_dict().values() if t.is_floating_point())
