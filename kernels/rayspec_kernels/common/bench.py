"""How every operation is checked and timed: one harness, so that figures of different operations compare.

A `Case` is one operation at one size, with its inputs, what it must move and compute, and the torch compositions that
it competes with. It is checked against float64 before it is timed; nothing is timed that is wrong. Timing replays a
CUDA graph of calls on inputs that rotate through more memory than the L2 cache holds, so that each call finds them cold
(calls so small that hundreds fit are timed warm, and say so). What calls write may stay in the cache.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch

Inputs = tuple[Any, ...]
KERNEL = "kernel"  # the launch that the dispatch chooses
NO_ROOM = "does not fit into this card's memory"
_MAX_SETS, _WARM_SETS = 640, 16  # sets of inputs that rotate
_WARM_UP_S = 0.02
_ROUNDS = 9
# The ceilings come first. After 0.02 s a copy on an H200 reached 2.77 TB/s, and then heads of the same run read 4.1 to
# 4.4: a clock that was not up yet may be why, which is a guess.
_CEILINGS_WARM_UP_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """`bytes`: what one call must read and write at least, each byte once; `flops`: multiply-adds counted as two.
    `alternatives`: the same result from our kernels launched otherwise, to see whether the dispatch chooses well."""

    op: str
    shape: str
    batch: int
    variant: str
    bytes: int
    flops: int
    make: Callable[[torch.Generator], Inputs]
    kernel: Callable[..., Any]
    check: Callable[[Inputs, Any], None]  # raises AssertionError
    rivals: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    alternatives: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant} {self.shape} B={self.batch}"


@dataclass(frozen=True)
class Ceilings:
    """What this card reaches: bytes read plus written of a large copy, and bfloat16 products of 8192 x 8192."""

    copy_bytes_per_s: float
    gemm_flops_per_s: float


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call, launches within a graph included."""

    op: str
    shape: str
    batch: int
    variant: str
    bytes: int
    flops: int
    seconds: float
    spread: float  # (slowest - fastest) / median of the rounds
    floor_s: float  # by the card's ceilings; what reads more than it writes may beat a copy's bandwidth a little
    is_cold: bool
    rivals_s: dict[str, float]
    alternatives_s: dict[str, float]

    @property
    def share_of_floor(self) -> float:
        """1 is the floor; where memory is the floor, the share of the copy's bandwidth."""
        return self.floor_s / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def tensors(inputs: Inputs) -> Iterator[torch.Tensor]:
    """All of them, also those within tuples."""
    for one in inputs:
        if isinstance(one, torch.Tensor):
            yield one
        elif one is not None:
            yield from tensors(one)


def generator(device: torch.device, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def check(case: Case, device: torch.device) -> dict[str, str]:
    """{launch: what is wrong with it}, of `KERNEL` and of the alternatives, on fresh random inputs; empty is right.

    Uninitialised memory holds NaN. Whatever a launch raises is what is wrong with it. An alternative without memory for
    it is `NO_ROOM`, which is not wrong; OutOfMemoryError of the kernel, or of the inputs, goes on.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        inputs = case.make(generator(device))
        found = {
            name: _wrong(case, launch, inputs) for name, launch in {KERNEL: case.kernel, **case.alternatives}.items()
        }
        return {name: wrong for name, wrong in found.items() if wrong}
    finally:
        torch.use_deterministic_algorithms(False)


def without(case: Case, launches: Collection[str]) -> Case:
    """The case without these alternatives."""
    kept = {name: launch for name, launch in case.alternatives.items() if name not in launches}
    return replace(case, alternatives=kept)


def _wrong(case: Case, launch: Callable[..., Any], inputs: Inputs) -> str:
    try:
        case.check(inputs, launch(*inputs))
    except torch.OutOfMemoryError:
        if launch is case.kernel:
            raise
        return NO_ROOM
    except Exception as error:  # a compiler's, a launch's, a device's: none may cost the results of other cases
        return described(error)
    return ""


def described(error: Exception) -> str:
    """Short: the compiler's messages carry whole programs."""
    return f"{type(error).__name__}: {str(error)[:500]}"


def is_lost(device: torch.device) -> bool:
    """Whether an illegal access or the like has ended every further call of this process on the device."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def measure(case: Case, ceilings: Ceilings, device: torch.device) -> tuple[Timing, dict[str, str]]:
    """The kernel's time with those of rivals and alternatives, and {name: why} of what of these could not be timed: it
    does not cost the kernel its own. Assumes that `check` found nothing wrong."""
    num_sets, is_cold = _num_sets(case.bytes, device)
    sets = [case.make(generator(device)) for seed in range(num_sets)]
    seconds, spread = _graph_seconds(case.kernel, sets)
    floor_s = max(case.bytes / ceilings.copy_bytes_per_s, case.flops / ceilings.gemm_flops_per_s)
    rivals_s, no_rivals = _others_seconds(case.rivals, sets)
    alternatives_s, no_alternatives = _others_seconds(case.alternatives, sets)
    timing = Timing(case.op, case.shape, case.batch, case.variant, case.bytes, case.flops, seconds, spread, floor_s,
                    is_cold, rivals_s, alternatives_s)  # fmt: skip
    return timing, no_rivals | no_alternatives


def _others_seconds(
    calls: Mapping[str, Callable[..., Any]], sets: list[Inputs]
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds by name, and why those that raise have none."""
    seconds, failed = {}, {}
    for name, call in calls.items():
        try:
            seconds[name] = _graph_seconds(call, sets)[0]
        except torch.OutOfMemoryError:
            failed[name] = NO_ROOM
        except Exception as error:  # cuBLAS's for lack of memory is none of torch's
            failed[name] = f"not timed: {described(error)}"
        if name in failed:
            with suppress(RuntimeError):  # of a device that is lost
                torch.cuda.empty_cache()  # what it had, the next one may need
    return seconds, failed


def _num_sets(call_bytes: int, device: torch.device) -> tuple[int, bool]:
    """(so many that three times the L2 cache passes before an input comes again, whether they are that many)."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    wanted = math.ceil(3 * cache / call_bytes)
    return (max(1, wanted), True) if wanted <= _MAX_SETS else (_WARM_SETS, False)


def _graph_seconds(call: Callable[..., Any], sets: list[Inputs], warm_up_s: float = _WARM_UP_S) -> tuple[float, float]:
    """(median, spread) of one call. The calls of a graph run one after the other, as those of a draft step do."""
    calls = len(sets) * max(1, 16 // len(sets))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for inputs in sets[:2]:
            call(*inputs)  # compiles, and lets libraries allocate their workspaces
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(*sets[i % len(sets)])
    until = time.monotonic() + warm_up_s
    while time.monotonic() < until:  # an idle card's clock is slow
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # keeps the card busy while the host launches the one that counts
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return median(times), (max(times) - min(times)) / median(times)


def ceilings(device: torch.device) -> Ceilings:
    """Measured on this card, now: random data, since products of zeros run faster than real ones."""
    source = torch.randn(2**29, device=device)  # 2 GiB
    target = torch.empty_like(source)
    copy_s, _ = _graph_seconds(lambda a, b: b.copy_(a), [(source, target)], warm_up_s=_CEILINGS_WARM_UP_S)
    del target, source
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    gemm_s, _ = _graph_seconds(torch.mm, [(a, b)], warm_up_s=_CEILINGS_WARM_UP_S)
    return Ceilings(2 * 4 * 2**29 / copy_s, 2 * 8192**3 / gemm_s)


def run(cases: Iterable[Case]) -> None:
    """Check and time, for `python -m rayspec_kernels.<op>.bench`; says so where there is no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here, so nothing can be timed; rayspec gpu-suite --interpret checks results")
    device = torch.device("cuda")
    measured = ceilings(device)
    print(f"{torch.cuda.get_device_name()}: copy {measured.copy_bytes_per_s / 1e12:.2f} TB/s, "
          f"bf16 products {measured.gemm_flops_per_s / 1e12:.0f} TFLOP/s")  # fmt: skip
    for case in cases:
        wrong = check(case, device)
        if set(wrong.values()) - {NO_ROOM}:
            raise SystemExit(f"{case.name} is wrong: {wrong}")
        timing, failed = measure(without(case, wrong), measured, device)
        rivals = ", ".join(f"{name} {s * 1e6:.1f}" for name, s in (timing.rivals_s | timing.alternatives_s).items())
        print(f"{case.name:60} {timing.seconds * 1e6:8.1f} us, {timing.share_of_floor:4.0%} of the floor; {rivals}")
        for name, why in (wrong | failed).items():
            print(f"  {name}: {why}")
