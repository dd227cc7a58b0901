"""What a sweep is asked to measure. Field paths are those of configs/sweep/*.yaml."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator

from rayspec.config import MAX_SEED
from rayspec.farm.load import Traffic
from rayspec.metrics import Slo
from rayspec.ray_address import RayAddress
from rayspec.shipped import drafter_label
from rayspec.statistics import looks, sequential_confidence
from rayspec.sweep.head_entry import HeadEntry
from rayspec.sweep.shape import DraftShape, split_shape
from rayspec.sweep.trace import OWN_PROMPTS, TraceConfig
from rayspec.targets.catalogue import DEFAULT_TARGET
from sglang_ext import DRAFT_STEPS
from sglang_ext.settings import Settings, require

MAX_SECONDS = 1e7  # four months; Ray cannot count many times that
MAX_TOKENS = 10**9
MAX_COUNT = 10**6  # of passes, prompts, branches, cores, arrivals a second
MAX_NAME_LENGTH = 200  # the name of a folder is made of it


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """Options of every SGLang engine of the sweep; None leaves the choice to SGLang or to the platform."""

    dtype: str | None = None  # "float32", "bfloat16", ...
    context_length: int | None = None  # tokens of prompt plus answer
    max_total_tokens: int | None = None  # KV slots; small keeps the start fast and the memory low
    mem_fraction_static: float | None = None  # of GPU memory, for weights and cache; of two engines on one GPU, each's
    num_threads: int | None = None  # CPU threads of an engine; None: every core of its machine
    nodes: int = 1  # that one engine spans, its tensor-parallel ranks (extra.tp_size) spread over them evenly
    # that stay in memory with their graphs when another is swapped in, so that they are swapped in again at once
    resident_drafters: int = 0
    start_timeout_s: float = 1200.0  # half a minute on an idle machine, many on a busy one
    block_timeout_s: float = 1800.0  # for one block of one trial
    extra: dict[str, Any] = field(default_factory=dict)  # any other field of SGLang's ServerArgs

    server_fields: ClassVar[tuple[str, ...]] = ("dtype", "context_length", "max_total_tokens", "mem_fraction_static")

    def __post_init__(self) -> None:
        for name, most in (("context_length", MAX_TOKENS), ("max_total_tokens", MAX_TOKENS), ("num_threads", 4096)):
            value = getattr(self, name)
            require(value is None or 1 <= value <= most, f"engine.{name}", value, f"at least 1 and at most {most}")
        require(0 <= self.resident_drafters <= 64, "engine.resident_drafters", self.resident_drafters, "in 0..64")
        for name in ("tp_size", "pp_size", "dp_size", "ep_size"):
            value = self.extra.get(name, 1)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            require(is_number and value >= 1, f"engine.extra.{name}", value, "a whole number of at least 1")
        tp_size = self.extra.get("tp_size", 1)
        is_divisible = self.nodes >= 1 and tp_size % self.nodes == 0
        require(is_divisible, "engine.nodes", self.nodes, f"a divisor of engine.extra.tp_size ({tp_size})")
        fraction = self.mem_fraction_static
        require(fraction is None or 0 < fraction < 1, "engine.mem_fraction_static", fraction, "between 0 and 1")
        for name in ("start_timeout_s", "block_timeout_s"):
            value = getattr(self, name)
            require(0 < value <= MAX_SECONDS, f"engine.{name}", value, f"positive and at most {MAX_SECONDS:g}")
        own = [key for key in self.extra if key in _OWN_FIELDS]
        require(not own, "engine.extra", own, f"without {', '.join(_OWN_FIELDS)}, which the sweep sets itself")
        secret = [key for key in self.extra if key in ("api_key", "admin_api_key", "ssl_keyfile_password")]
        require(not secret, "engine.extra", secret, "without keys, which would be written into MLflow")
        token_map = self.extra.get("speculative_token_map")
        require(
            token_map is None,
            "engine.extra.speculative_token_map",
            token_map,
            "absent, since a drafter's head names its tokens itself; a truncated head is such a list",
        )
        adaptive = [key for key in ("speculative_adaptive", "speculative_adaptive_config") if self.extra.get(key)]
        require(
            not adaptive,
            "engine.extra",
            adaptive,
            "without what changes the draft length while it is measured; draft_steps lists the lengths to compare",
        )
        named = [key for key in self.extra if key in self.server_fields]
        require(
            not named, "engine.extra", named, f"without {', '.join(self.server_fields)}; they stand in engine itself"
        )

    def overrides(self) -> dict[str, Any]:
        """The ServerArgs fields that were set."""
        return {k: getattr(self, k) for k in self.server_fields if getattr(self, k) is not None} | dict(self.extra)


_OWN_FIELDS = (
    "model_path",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "nnodes",
    "node_rank",
    "dist_init_addr",
)


@dataclass(frozen=True, kw_only=True)
class RayConfig(RayAddress):
    """How the sweep reaches Ray and what one engine's actor reserves there."""

    num_cpus: float = 1.0  # reserved, not a limit: an idle engine leaves its cores to the measured one
    num_gpus: float | None = None  # None: half a GPU where the cluster has any, so that two engines share one
    # plain and speculative engine at once; False: they take turns, each start for a round; None: as the GPUs allow
    side_by_side: bool | None = None
    max_failures: int = 3  # times that a cohort starts again after the death of its actor or node

    def __post_init__(self) -> None:
        require(self.max_failures >= 0, "ray.max_failures", self.max_failures, "at least 0")
        super().__post_init__()
        require(0 < self.num_cpus <= MAX_COUNT, "ray.num_cpus", self.num_cpus, f"positive and at most {MAX_COUNT}")
        require(self.num_gpus is None or self.num_gpus >= 0, "ray.num_gpus", self.num_gpus, "at least 0")


@dataclass(frozen=True, kw_only=True)
class StopConfig(Settings):
    """When to end the passes over the workload after the first `repeats`. Without `ci_width` there are no others."""

    ci_width: float | None = None  # end once every speed-up's interval is narrower: high - low as a share of the value
    max_repeats: int = 20  # or after this many passes
    max_seconds: float | None = None  # or after this time of measuring in the sweep; its cohorts share it evenly

    def __post_init__(self) -> None:
        require(self.ci_width is None or self.ci_width > 0, "stop.ci_width", self.ci_width, "positive")
        require(self.max_repeats >= 1, "stop.max_repeats", self.max_repeats, "at least 1")
        is_used = self.ci_width is not None or self.max_seconds is None
        require(self.max_seconds is None or self.max_seconds > 0, "stop.max_seconds", self.max_seconds, "positive")
        require(is_used, "stop.max_seconds", self.max_seconds, "unset without stop.ci_width, which alone adds passes")


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig(Settings):
    """Give up hopeless candidates by their speed-up over plain decoding, after `grace_passes` passes, then after each
    `reduction_factor` times as many."""

    grace_passes: int = 1
    reduction_factor: int = 3  # random, optuna: the best 1/reduction_factor of the candidates go on (ASHA)

    def __post_init__(self) -> None:
        require(self.grace_passes >= 1, "search.early_stop.grace_passes", self.grace_passes, "at least 1")
        factor = self.reduction_factor
        require(factor >= 2, "search.early_stop.reduction_factor", factor, "at least 2")


@dataclass(frozen=True, kw_only=True)
class SearchConfig(Settings):
    """Which candidates (drafter and draft steps) are measured, and how many side by side."""

    algorithm: str = "grid"  # every one; `random`: some, by seed; `optuna`: some, chosen by what was measured
    samples: int | None = None  # random, optuna: how many candidates
    candidates_per_cohort: int | None = None  # grid: candidates that share a pair of engines; None: all of equal steps
    max_concurrent: int | None = None  # cohorts at once; None: as many as there are GPUs for, without a GPU one
    early_stop: EarlyStopConfig | None = None

    def __post_init__(self) -> None:
        require(self.algorithm in ALGORITHMS, "search.algorithm", self.algorithm, f"one of {', '.join(ALGORITHMS)}")
        for name in ("samples", "candidates_per_cohort", "max_concurrent"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"search.{name}", value, "at least 1")
        if self.algorithm == "grid":
            require(self.samples is None, "search.samples", self.samples, "unset for algorithm=grid, which takes all")
        else:
            require(self.samples is not None, "search.samples", self.samples, f"given for {self.algorithm}")
            each = self.candidates_per_cohort
            require(each in (None, 1), "search.candidates_per_cohort", each, f"unset for algorithm={self.algorithm}")


ALGORITHMS = ("grid", "random", "optuna")


@dataclass(frozen=True, kw_only=True)
class SweepConfig(Settings):
    """Trials: drafters x draft_steps x traffic (each concurrency, each request rate and each speed of the trace, at
    each temperature), and a trial without speculation under each traffic."""

    name: str = "sweep"  # name of the parent run
    experiment: str = "rayspec-sweep"  # MLflow experiment
    target: str = DEFAULT_TARGET  # a fetched target, a folder, or a Hugging Face name
    # shipped names or checkpoint folders; NAME@chain and NAME@8x32 (topk x num_draft_tokens) have a shape of their own
    drafters: list[str] = field(default_factory=lambda: ["full"])
    # to make on a drafter that is there: {kind, options, drafter, artifacts}, each value one or a list (docs/farm.md)
    heads: list[Annotated[HeadEntry, PlainValidator(HeadEntry.parse)]] = field(default_factory=list)
    baseline: str = "full"  # the drafter that the others are compared with; one of `drafters`
    draft_steps: list[int] = field(default_factory=lambda: [DRAFT_STEPS])  # draft forwards per verify step
    topk: int = 1  # branches per draft step; 1 is a chain
    num_draft_tokens: int | None = None  # verified tokens per step with the root; None: draft_steps + 1 for a chain
    concurrency: list[int] = field(default_factory=lambda: [1])  # closed-loop streams; may be [] beside another traffic
    request_rate: list[float] = field(default_factory=list)  # open loop: Poisson arrivals of conversations per second
    trace: TraceConfig | None = None  # open loop: recorded requests at their own times
    workload: str = "chat:32"  # name or JSONL path, with :count:category; several with commas; trace: the trace's own
    long_prompts: str = "refuse"  # those that do not fit into an engine; drop: leave them out
    chat_template: bool = True  # send turns through the target's chat template, where it has one
    block_prompts: int = 4  # prompts per block; all trials measure a block back to back, so it is the unit of pairing
    repeats: int = 1  # passes over the workload, or the fewest of them with stop.ci_width
    stop: StopConfig = field(default_factory=StopConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    slo: Slo = field(default_factory=Slo)  # limits in milliseconds that make a request count as good
    max_new_tokens: int = 64
    temperature: float | list[float] = 0.0  # 0 is greedy; only then is the output compared with the plain engine's
    ignore_eos: bool = False  # True gives every request exactly max_new_tokens
    warmup_tokens: int = 8  # generated and thrown away before every block
    keep_output_ids: bool = True  # False: the stored requests say how many tokens an answer has, not which
    traces: int = 3  # requests of each trial that MLflow shows as traces, without the prompts' text; 0: none
    canary: bool = True  # ask the fastest drafters what rayspec serve asks before it gives a version traffic
    head_latency: bool = True  # time each head alone, while the engines idle
    seed: int = 0  # order of the prompts, SGLang's random_seed, bootstrap
    engine: EngineConfig = field(default_factory=EngineConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        for name in ("name", "experiment", "target", "baseline", "workload"):
            text = getattr(self, name)
            most = MAX_NAME_LENGTH if name in ("name", "experiment") else 4096
            require(text.isprintable() and 1 <= len(text.strip()) <= most, name, text, f"1 to {most} characters")
        for name in ("drafters", "draft_steps", "concurrency", "request_rate"):
            values = getattr(self, name)
            is_optional = name == "request_rate" or (name == "concurrency" and (self.request_rate or self.trace))
            require(bool(is_optional) or len(values) > 0, name, values, "a list of at least one entry")
            require(len(set(values)) == len(values), name, values, "without repetition")
        labels = [drafter_label(d) for d in self.drafters]
        require(len(set(labels)) == len(labels), "drafters", labels, "of different names (last part of the path)")
        require(all(labels), "drafters", self.drafters, "shipped names, or paths that end in a name")
        require(self.baseline in labels, "baseline", self.baseline, f"one of the drafters' names ({', '.join(labels)})")
        for name in ("draft_steps", "concurrency"):
            require(min(getattr(self, name), default=1) >= 1, name, getattr(self, name), "at least 1 everywhere")
        rates = self.request_rate
        is_rate = all(0 < r <= MAX_COUNT for r in rates)
        require(is_rate, "request_rate", rates, f"positive everywhere, and at most {MAX_COUNT}")
        loads = [f"{r:g}" for r in rates]
        require(len(set(loads)) == len(loads), "request_rate", rates, "different in their first six digits")
        slowest = self.block_prompts / min(rates, default=float("inf"))
        require(
            slowest < self.engine.block_timeout_s,
            "request_rate",
            rates,
            f"so high that the block_prompts={self.block_prompts} conversations of a block have arrived within "
            f"engine.block_timeout_s={self.engine.block_timeout_s:g}",
        )
        if self.workload == OWN_PROMPTS and self.trace is None:
            raise ValueError("workload=trace sends what a trace says, but there is none; name its file in trace.path")
        require(self.long_prompts in ("refuse", "drop"), "long_prompts", self.long_prompts, "refuse or drop")
        require(0 <= self.seed <= MAX_SEED, "seed", self.seed, f"in 0..{MAX_SEED}")
        for name in ("topk", "block_prompts", "repeats", "warmup_tokens"):
            value = getattr(self, name)
            require(1 <= value <= MAX_COUNT, name, value, f"at least 1 and at most {MAX_COUNT}")
        require(self.max_new_tokens >= 2, "max_new_tokens", self.max_new_tokens, "at least 2 (the first is prefill's)")
        require(0 <= self.traces <= MAX_COUNT, "traces", self.traces, f"0, or up to {MAX_COUNT} a trial")
        asked = self.temperatures()
        require(len(asked) > 0, "temperature", self.temperature, "a number, or a list of at least one")
        is_in_range = all(0 <= t <= 100 for t in asked)
        require(is_in_range, "temperature", self.temperature, "at least 0 and at most 100")
        is_told_apart = len({f"{t:g}" for t in asked}) == len(asked)
        require(is_told_apart, "temperature", self.temperature, "different in their first six digits")
        is_in_order = self.stop.ci_width is None or self.stop.max_repeats >= self.repeats
        require(is_in_order, "stop.max_repeats", self.stop.max_repeats, f"at least repeats ({self.repeats})")
        early, passes = self.search.early_stop, self.max_passes()
        if early is not None:
            allowed = f"less than the passes that there may be ({passes}; repeats, or stop.max_repeats)"
            require(early.grace_passes < passes, "search.early_stop.grace_passes", early.grace_passes, allowed)
        for entry in self.drafters:
            problem = self.shape_of(entry)[1].problem(self.draft_steps)
            setting = "num_draft_tokens" if split_shape(entry)[1] is None else f"drafters: the nodes of {entry!r}"
            require(problem is None, setting, *(problem or ("", "")))

    def shape_of(self, drafter: str) -> tuple[str, DraftShape]:
        """Name or folder of an entry of `drafters`, and how much of its drafts is verified."""
        name, own = split_shape(drafter)
        return name, own or DraftShape(topk=self.topk, num_draft_tokens=self.num_draft_tokens)

    def traffic(self) -> list[Traffic]:
        """How requests come, in the order of measurement."""
        asked = self.temperatures()
        return [
            traffic
            for t in (asked if len(asked) > 1 else [None])
            for traffic in (
                *(Traffic(concurrency=c, temperature=t) for c in self.concurrency),
                *(Traffic(request_rate=r, temperature=t) for r in self.request_rate),
                *(Traffic(trace_speed=x, temperature=t) for x in (self.trace.speed if self.trace else [])),
            )
        ]

    def temperatures(self) -> list[float]:
        """The temperatures in the order of measurement."""
        return self.temperature if isinstance(self.temperature, list) else [self.temperature]

    def temperature_of(self, traffic: Traffic) -> float:
        """The temperature of requests under this traffic."""
        return self.temperatures()[0] if traffic.temperature is None else traffic.temperature

    def max_passes(self) -> int:
        """Passes over the workload that there may be."""
        return self.stop.max_repeats if self.stop.ci_width is not None else self.repeats

    def milestones(self) -> list[int]:
        """The numbers of passes after which hopeless candidates are given up."""
        early = self.search.early_stop
        found = [early.grace_passes] if early else []
        while early and found[-1] * early.reduction_factor < self.max_passes():
            found.append(found[-1] * early.reduction_factor)
        return [m for m in found if m < self.max_passes()]

    def looks(self) -> list[int]:
        """The numbers of passes after which the intervals are looked at."""
        return sorted({*looks(self.repeats, self.max_passes()), *self.milestones()})

    def confidence(self) -> float:
        """The level of each interval, so that the reported one covers in 95% whenever the passes ended."""
        return sequential_confidence(0.95, len(self.looks()))
