# ruff: noqa: E501  # tables with a row a setting
"""Settings of the right type that make no sense, job by job: (arguments, words that the refusal must hold)."""

from __future__ import annotations

import gzip
from pathlib import Path

from hostile import FULL, Case, one
from small_world import World


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
        *(one(f"request_rate=[{r}]", "request_rate") for r in (0, -2, ".inf", ".nan", "1e-300", "1e-9", "1e300")),
        one("request_rate=[1.0000001,1.0000002]", "request_rate"),
        *(one(f"trace.path={x}", "trace") for x in ("''", "nowhere.csv", "~nobody-of-this-name/x", "x" * 300, str(t), str(world.prompts))),
        *(one(f"trace.speed=[{x}]", "trace.speed") for x in (0, -1, ".inf", ".nan", "1e300", "1e-300")),
        *(one(f"trace.{name}={x}", f"trace.{name}") for name in ("start_s", "duration_s") for x in (-1, ".nan", "1e300")),
        *(one(f"trace.unit={x}", "trace.unit") for x in ("us", "''", "S")),
        one("workload=trace", "trace.path"),
        *(one(f"temperature={x}", "temperature") for x in (".inf", ".nan", "-0.1", "1e999", "-.inf", "1e300")),
        *(one(f"{name}={10**12}", name) for name in ("repeats", "block_prompts", "warmup_tokens")),
        one("ray.num_cpus=1e300", "ray.num_cpus"),
        one("ray.address=h:99999", "ray.address"),
        *(one(f"engine.extra={{{key}: correct-horse}}", "engine.extra", "MLflow") for key in ("api_key", "admin_api_key")),
        (["engine=4", "engine.dtype=float32"], ("engine", "mapping")),
        *(one(f"name={x}", "name", "quotes") for x in ("12:30:00", "1_000", "1e10")),
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
        return f"drafters=[{', '.join('{' + entry + '}' for entry in entries)}]"

    def medusa(tree: str = "", options: str = "positions: 2") -> str:
        own = f", tree: {{{tree}}}" if tree else ""
        return heads(f"name: a, drafter: {{kind: medusa, {options}}}, {FULL}{own}")

    (out / "file").write_text("a file")
    (out / "empty").mkdir()
    for name, text in (("deep", "[" * 100_000), ("number", "3"), ("no_paths", '[["a"]]'), ("orphan", "[[0, 1]]")):
        (out / f"{name}.json").write_text(text)
    return [
        *(one(heads(f"name: {name}, {FULL}"), "name") for name in ("''", "a/b", "/", "x/..")),
        one(heads(f"name: a, {FULL}", f"name: a, {FULL}"), "drafters[].name must be unique"),
        *(one(heads(f"name: a, draft_head: {{kind: {kind}}}"), "kind") for kind in ("fulll", "3", "[full]", "null", "{a: b}")),
        one(heads("name: a, draft_head: {}"), "kind"),
        *(one(heads(f"name: a, draft_head: {{kind: slimspec, rank: {r}}}"), "rank") for r in (0, -1, 33, 1.5, "x", "null", ".nan")),
        *(one(heads(f"name: a, draft_head: {{kind: full, weight_format: {f}}}"), "weight_format") for f in ("int2", 8)),
        one(heads("name: a, draft_head: {kind: full, weight_format: int4, group_size: 3}"), "group_size"),
        *(one(heads(f"name: a, draft_head: {{kind: truncated, size: {n}}}"), "size") for n in (0, 258, "x")),
        one(heads("name: a, draft_head: {kind: truncated, size: 8}"), "ids", "rayspec calibrate"),
        one(heads("name: a, draft_head: {kind: truncated}"), "draft_head.size", "rayspec calibrate"),
        one(heads("name: a, draft_head: {kind: rdk, base: {kind: truncated}}"), "draft_head.base.size"),
        one(heads("name: a, draft_head: {kind: truncated, size: 8, step_sizes: [9]}"), "step_sizes"),
        one(heads("name: a, draft_head: {kind: coral, clusters: 4, top: 1}"), "cluster map"),
        one(heads("name: a, draft_head: {kind: coral, clusters: 4, top: 5}"), "top"),
        one(heads("name: a, draft_head: {kind: rdk, base: {kind: rdk}}"), "base"),
        one(heads("name: a, draft_head: {kind: rdk, base: {kind: truncated, size: 8}}"), "ids"),
        one(heads("name: a, draft_head: {kind: rdk, base: 3}"), "base"),
        *(one(heads(f"name: a, base: {b}, {FULL}"), "base") for b in ("nowhere", "''", "~nobody-of-this-name/x", "x" * 300)),
        one(heads(f"name: a, base: {world.drafters}/medusa, {FULL}"), "drafters[a].base", "medusa"),
        one(heads(f"name: a, artifacts: nowhere, {FULL}"), "nowhere"),
        one(heads(f"name: a, artifacts: {world.drafters}/full, {FULL}"), "calibration"),
        one(heads("name: a, train_body: true, draft_head: {kind: full}"), "train_body", "base"),
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
        *(one(f"recipe.{name}={x}", name) for name, x in (("lr", 0), ("lr", -1), ("muon_lr", 0), ("clip_norm", 0), ("beta1", 1), ("beta1", 2), ("beta2", 2), ("beta2", -0.1), ("weight_decay", -1), ("intermediate_size", -5), ("intermediate_size", 0), ("intermediate_size", 10**12), ("num_steps", 0), ("batch_size", 0), ("batch_size", 10**12), ("ttt_steps", 0), ("ttt_decay", 0), ("ttt_decay", 1.5), ("ttt_reduction", "max"), ("chunk_rows", 0), ("seed", -1), ("seed", 10**12), ("warmup_steps", 4), ("final_lr_share", 2), ("optimizer", "sgd"), ("csra_weight", -1), ("csra_temperature", 0))),
        (["recipe.csra_weight=1", "recipe.ttt_steps=1"], ("recipe.csra_weight",)),
        *(one(f"answers.{name}={x}", f"answers.{name}") for name, x in (("count", 0), ("batch_size", 0), ("answer_tokens", 0), ("greedy_share", 2), ("temperature", 0), ("seed", -1), ("seed", 10**12), ("min_prompt_tokens", 0), ("max_prompt_tokens", 1), ("prompts", "nowhere"), ("prompts", "''"), ("prompts", out / "empty"))),
        one("answers.prompts=self", "answers.prompts", "chat template"),
        one("answers.min_prompt_tokens=2", "answers.min_prompt_tokens must be at least 5"),
        one("answers.answer_tokens=1000", "answers", "128"),
        one("held_out.greedy_share=0", "held_out.greedy_share"),
        one("held_out.min_prompt_tokens=2", "held_out.min_prompt_tokens"),
        (["evaluation.draft_steps=9", "held_out.min_prompt_tokens=12"], ("held_out.answer_tokens",)),
        *(one(f"evaluation.{name}=0", f"evaluation.{name}") for name in ("draft_steps", "every", "sequences")),
        (["evaluation.served_prompts=-1"], ("evaluation.served_prompts",)),
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
    files = sorted(file for file in out.glob("*.jsonl*") if file.name != "gate.jsonl")  # another job's
    assert len(files) == 10
    return [
        *(one(f"sources.raw.documents={x}", "documents") for x in (*documents, *files)),
        *(one(f"sources.raw={x}", "sources.raw") for x in ("3", "[raw]", "{kind: [raw]}", "{kind: rawer}")),
        *(one(f"sources.raw.{x}", "sources.raw") for x in ("nonsense=1", "documents=[a]", "kind=3")),
        *(one(f"sources.more={{kind: target, {x}}}", "sources.more") for x in ("sequences: 0", "sequences: x", "answers: [a]")),
        *(one(f"sources.{n}={{kind: draft, draft_steps: 0}}", f"sources.{n}.draft_steps") for n in ("d", "draft")),
        *(([f"sources.more={{kind: target, answers: {x}}}", rule("kind: vocabtrim, top_k: 8", "more")], ("answers",)) for x in ("nowhere", world.target, "x" * 300)),
        *(one(f"sources.more={{kind: draft, {x}}}", "sources.more") for x in ("draft_steps: 0", "draft_steps: 1000", "batch_size: 0", "temperature: -1", "seed: -1")),
        *(one(f"sources.more={{kind: draft_text, {x}}}", "sources.more") for x in ("tokens: 0", "tokens: 5000", "draft_steps: 2", "batch_size: 0", "temperature: -1")),
        *(one(rule(f"kind: {k}"), "kind") for k in ("frspek", "[frspec]", "3", "null", "{a: b}")),
        *(one(rule(f"kind: frspec, top_k: {n}"), "top_k") for n in (0, -1, 258, "x", 1.5, "null")),
        one(rule("kind: frspec"), "top_k"),
        one(rule("kind: frspec, top_k: 8, nonsense: 1"), "nonsense"),
        one(rule("kind: vocabtrim, top_k: 3, top_p: 0.5"), "vocabtrim"),
        one(rule("kind: vocabtrim, seed: 1"), "calibrations[0].rule.seed"),
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


def gate_cases(world: World, out: Path) -> list[Case]:
    d = world.drafters
    return [
        *(([f"--{flag}", x], (flag.replace("-", "_"),)) for flag in ("tau-loss", "speed-loss") for x in ("0", "1", "-1", "nan", "x")),
        *((["--max-minutes", x], ("max_minutes",)) for x in ("0", "-1", "inf", "nan", "x", "9" * 30)),
        *(one(f"{name}=0", name) for name in ("concurrency", "max_new_tokens", "draft_steps", "topk", "request_timeout_s")),
        *(one(f"{name}={'9' * 12}", name) for name in ("concurrency", "max_new_tokens", "draft_steps", "topk", "seed")),
        *(one(f"temperature={x}", "temperature") for x in ("-0.1", "101", "x")),
        *(one(f"identity={x}", "identity") for x in ("maybe", "''")),
        (["identity=require", "temperature=1"], ("identity",)),
        *(one(f"workload={x}", "workload") for x in ("nowhere", "''", f"{world.prompts}", "x" * 300)),
        *(one(f"target={x}", "target") for x in ("nowhere", "''", "~nobody-of-this-name/x", "/", "x" * 300, world.prompts)),
        one("engine.extra.nonsense=1", "nonsense"),
        (["--json", str(out / "none" / "x.json")], ("--json",)),
        (["--baseline-model", "x"], ("--baseline-model",)),
        (["--candidate-key-file", str(d)], ("key files",)),
    ]  # fmt: skip


def cases_of(job: str, world: World, out: Path) -> list[Case]:
    if job == "sweep":
        return sweep_cases(world)
    return {"train": train_cases, "calibrate": calibrate_cases, "export": export_cases, "gate": gate_cases}[job](
        world, out
    )
