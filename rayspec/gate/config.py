"""What a gate is asked. Field paths are those of `key=value` and of a YAML file."""

from dataclasses import dataclass, field
from typing import Any

from rayspec.sweep.config import EngineConfig, RayConfig
from sglang_ext.settings import Settings, require

IDENTITY = ("report", "require", "off")
MAX_MINUTES = 1440.0


@dataclass(frozen=True, kw_only=True)
class GateConfig(Settings):
    """How two sides are compared. What stands behind `engines:` is for drafters in engines of ours alone."""

    tau_loss: float = 0.02  # share of the baseline's tau whose loss is a regression
    speed_loss: float = 0.05  # share of its output tokens a second
    max_minutes: float = 10.0  # of the whole gate, the start of engines included
    # whether greedy outputs are compared where both sides have the same target; require: a difference is a regression
    identity: str = "report"
    workload: str = "chat"  # as that of a sweep
    concurrency: int = 1  # prompts that are answered at once
    max_new_tokens: int = 64
    temperature: float = 0.0
    ignore_eos: bool = False  # True gives every answer exactly max_new_tokens; endpoints: SGLang's and vLLM's alone
    seed: int = 0  # of the order of the prompts; which side begins is drawn anew in every gate
    request_timeout_s: float = 120.0  # of one answer of an endpoint
    experiment: str = "rayspec-gate"  # MLflow's, with --mlflow
    # engines: None is a champion's own, else the sweep's default
    target: str | None = None
    draft_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    chat_template: bool = True
    engine: EngineConfig = field(default_factory=EngineConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def __post_init__(self) -> None:
        for name in ("tau_loss", "speed_loss"):
            value = getattr(self, name)
            require(0 < value < 1, name, value, "a share between 0 and 1 (0.02 is 2%)")
        minutes = self.max_minutes
        require(0 < minutes <= MAX_MINUTES, "max_minutes", minutes, f"positive and at most {MAX_MINUTES:g}")
        require(self.identity in IDENTITY, "identity", self.identity, f"one of {', '.join(IDENTITY)}")
        is_greedy = self.temperature == 0 or self.identity != "require"
        require(is_greedy, "identity", self.identity, "report or off at a temperature above 0, where outputs are drawn")
        require(1 <= self.concurrency <= 4096, "concurrency", self.concurrency, "in 1..4096")
        require(2 <= self.max_new_tokens <= 10**6, "max_new_tokens", self.max_new_tokens, "in 2..1000000")
        require(0 <= self.temperature <= 100, "temperature", self.temperature, "in 0..100")
        require(0 <= self.seed < 2**32, "seed", self.seed, f"in 0..{2**32 - 1}")
        timeout = self.request_timeout_s
        require(0 < timeout <= 86400, "request_timeout_s", timeout, "positive and at most 86400")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def engine_settings(self) -> dict[str, Any]:
        """Those fields that only engines of ours have, where they differ from the default."""
        plain = GateConfig()
        names = ("target", "draft_steps", "topk", "num_draft_tokens", "chat_template", "engine", "ray")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(plain, name)}
