"""The ways in which a clustered head can score its tokens, against the dense product over the whole vocabulary.

    python docs/experiments/clustered.py --hidden-size 256 --vocab-size 16384

`own`: each row gathers its own clusters; `union`: the rows gather all their clusters once; both in shapes that hold the
worst case, as a graph wants them. `chosen`: the rows gather once what they have really chosen, of which each row's rest
is struck out, as a packed head does on a CPU; `all`: the whole vocabulary, of which the rest is struck out; `head`:
what `candidates` does, routing left out. Numbers are multiples of the dense product's time, medians over rounds in
which the ways take turns, printed only if all ways agree. On a CPU they are CPU time of one thread, which other
processes on the machine distort less.
"""

import argparse
import platform
from collections.abc import Callable
from functools import partial
from statistics import median
from time import thread_time
from typing import Any

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as default_timer

from sglang_ext.heads import head_from_target, parse_head
from sglang_ext.heads.base import Candidates
from sglang_ext.heads.clustered import ClusteredHead

ROUNDS = 7
MIN_ROUND_S = 0.02
SPECS: tuple[dict[str, Any], ...] = (
    {"kind": "dynaspec", "clusters": 128, "first": 24, "later": 24, "rule": "fixed", "router_width": 64},
    {"kind": "dynaspec", "clusters": 128, "first": 6, "later": 6, "rule": "fixed", "router_width": 64},
    {"kind": "coral", "clusters": 8, "top": 2},
)
UNEVEN = 8  # the largest cluster of uneven ones, by their mean; k-means over SmolLM2's head makes it 9


def make_head(
    spec: dict[str, Any], vocab_size: int, hidden_size: int, device: str, *, is_even: bool = True
) -> ClusteredHead:
    """Random rows and 64 pinned tokens; the last cluster is 1.5 times the mean, as the calibration of the demo allows,
    or `UNEVEN` times."""
    generator = torch.Generator().manual_seed(0)
    pinned, M = 64, spec["clusters"]
    share_M = torch.linspace(0.5, 1.5, M) if M > 8 else torch.ones(M)
    if not is_even:
        share_M = torch.linspace(-UNEVEN / 2, UNEVEN / 2, M).exp()
    sizes_M = (share_M / share_M.sum() * (vocab_size - pinned)).floor().long()
    sizes_M = sizes_M.clamp(min=1)
    sizes_M[0 if is_even else -1] += vocab_size - pinned - int(sizes_M.sum())
    cluster_of = torch.zeros(vocab_size, dtype=torch.int64)
    order_V = torch.randperm(vocab_size, generator=generator)
    cluster_of[order_V[pinned:]] = torch.arange(1, M + 1).repeat_interleave(sizes_M)
    weight_VH = torch.randn(vocab_size, hidden_size, generator=generator)
    head = head_from_target(parse_head(spec), weight_VH, {"cluster_of": cluster_of})
    assert isinstance(head, ClusteredHead), "the specs are of clustered kinds"
    head = head.requires_grad_(False).to(device)
    if device == "cpu":
        head.pack()
    return head


def ways(head: ClusteredHead, rows: int, device: str) -> dict[str, Callable[[], Any]]:
    """What is timed, by name; every row draws its clusters at random, which overlap less than a router's."""
    generator = torch.Generator().manual_seed(rows)
    budget, M = head.config.budget(0), head.config.clusters
    hidden_TH = torch.randn(rows, head.hidden_size, generator=generator).to(device)
    scores_TM = torch.rand(rows, M, generator=generator).to(device)
    chosen_Tm = scores_TM.topk(budget).indices
    head.cluster_scores = lambda hidden_TH, routed: scores_TM  # type: ignore[method-assign]
    return {
        "dense": partial(head.project, hidden_TH, "weight"),
        "own": partial(head._score_rows, hidden_TH, chosen_Tm),
        "union": partial(head._score_union, hidden_TH, chosen_Tm, 1),
        "chosen": partial(head._score_chosen, hidden_TH, chosen_Tm, rows),
        "all": partial(head._score_all, hidden_TH, chosen_Tm, rows),
        "head": partial(head.candidates, hidden_TH),
    }


def check(calls: dict[str, Callable[[], Any]], vocab_size: int) -> None:
    """Raise AssertionError unless every way finds the full product's logits on the tokens of each row."""

    def by_token(candidates: Candidates) -> Tensor:
        logits_TS, ids = candidates
        if ids is None:
            return logits_TS
        out_TV = logits_TS.new_full((len(logits_TS), vocab_size), -6e4)
        return out_TV.scatter_reduce_(1, ids.expand_as(logits_TS), logits_TS, "amax")

    dense_TV = calls["dense"]()
    own_TV = by_token(calls["own"]()) > -3e4
    for name in ("own", "union", "chosen", "all", "head"):
        # float32 sums in another order; logits are of order sqrt(hidden size)
        torch.testing.assert_close(by_token(calls[name]())[own_TV], dense_TV[own_TV], rtol=1e-4, atol=1e-3)


def measure(head: ClusteredHead, rows: int, device: str) -> dict[str, float]:
    """{way: multiple of the dense product's time}, and the dense product's seconds under its own name."""
    calls = ways(head, rows, device)
    check(calls, head.vocab_size)
    clock = default_timer if device == "cuda" else thread_time  # the first waits for the device
    timers = {name: Timer("call()", globals={"call": call}, timer=clock) for name, call in calls.items()}
    number = {name: max(1, int(MIN_ROUND_S / timer.timeit(1).mean)) for name, timer in timers.items()}
    rounds = [{name: timer.timeit(number[name]).mean for name, timer in timers.items()} for _ in range(ROUNDS)]
    dense_s = median(r["dense"] for r in rounds)
    return {"dense": dense_s} | {
        name: median(r[name] / r["dense"] for r in rounds) for name in calls if name != "dense"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    print(f"{name}, torch {torch.__version__}, float32, H = {options.hidden_size}, V = {options.vocab_size}\n")
    print("| head | columns a row | rows | dense µs | own | union | chosen | all | head |")
    print("|---|---|---|---|---|---|---|---|---|")
    with torch.inference_mode():
        for spec, is_even in [*((spec, True) for spec in SPECS), *((spec, False) for spec in SPECS[:2])]:
            head = make_head(spec, options.vocab_size, options.hidden_size, options.device, is_even=is_even)
            columns = len(head._pinned_P) + head.config.budget(0) * head._members_MC.shape[1]
            label = f"{spec['kind']} {head.config.budget(0)} of {spec['clusters']}{'' if is_even else ', uneven'}"
            for rows in options.rows:
                times = measure(head, rows, options.device)
                ratios = " | ".join(f"{times[way]:.2f}" for way in ("own", "union", "chosen", "all", "head"))
                print(f"| {label} | {columns} | {rows} | {times['dense'] * 1e6:.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
