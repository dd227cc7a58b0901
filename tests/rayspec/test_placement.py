"""How many GPUs a cohort's engines reserve, and when they take turns."""

import pytest

from rayspec.config import load_config
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.placement import MEMORY_SHARE, Placement, place


def placed(gpus: list[float], *overrides: str) -> Placement:
    return place(load_config(SweepConfig, None, list(overrides)), gpus)


@pytest.mark.parametrize(
    ("gpus", "overrides", "bundle", "side_by_side"),
    [
        ([], [], {"CPU": 2}, True),
        ([0, 1], [], {"CPU": 2, "GPU": 1}, True),
        ([2], ["ray.num_gpus=1"], {"CPU": 2, "GPU": 2}, True),
        ([1], ["ray.side_by_side=false"], {"CPU": 1, "GPU": 1}, False),
        ([8], ["engine.extra.tp_size=4"], {"CPU": 2, "GPU": 8}, True),
        ([4], ["engine.extra.dp_size=2"], {"CPU": 2, "GPU": 4}, True),
        ([8], ["engine.extra.pp_size=2", "engine.extra.tp_size=4"], {"CPU": 1, "GPU": 8}, False),
        ([4], ["engine.extra={tp_size: 2, dp_size: 2, enable_dp_attention: true}"], {"CPU": 2, "GPU": 4}, True),
        ([8, 8], ["engine.extra.tp_size=8"], {"CPU": 1, "GPU": 8}, False),
        ([8, 8], ["engine.extra.tp_size=8", "engine.nodes=2"], {"CPU": 2, "GPU": 8}, True),
    ],
    ids=[
        "cpu",
        "shared",
        "one_each",
        "asked_for",
        "half_a_node",
        "data_parallel",
        "pipeline",
        "dp_attention",
        "all_of_a_node",
        "over_two_nodes",
    ],
)
def test_what_a_cohort_reserves(
    gpus: list[float], overrides: list[str], bundle: dict[str, float], side_by_side: bool
) -> None:
    placement = placed(gpus, *overrides)
    assert placement.bundle == bundle
    assert placement.side_by_side is side_by_side


def test_two_engines_of_a_gpu_add_up() -> None:
    """Whichever comes first: SGLang takes its fraction of what is free when it starts."""
    placement = placed([1])
    first = placement.memory_fraction(others=0)["mem_fraction_static"]
    second = placement.memory_fraction(others=1)["mem_fraction_static"]
    assert first == MEMORY_SHARE
    assert second * (1 - first) == pytest.approx(MEMORY_SHARE, abs=1e-3)
    assert placed([1], "engine.mem_fraction_static=0.3").memory_fraction(others=1) == {"mem_fraction_static": 0.429}
    for alone in ([2], ["ray.num_gpus=1"]), ([], []):
        assert placed(*alone[:1], *alone[1]).memory_fraction(others=1) == {}


@pytest.mark.parametrize(
    "cause",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.42.",
    ],
    ids=["torch", "cublas", "cache", "weights"],
)
def test_want_of_memory_is_known_by_what_torch_and_sglang_say_of_it(cause: str) -> None:
    way_out = "in a new sweep with ray.side_by_side=false they take turns"
    shared, alone = placed([1]), placed([2], "ray.num_gpus=1")
    assert shared.with_way_out(f"{cause}\nthe log").endswith(f"{way_out}\nthe log")
    assert alone.with_way_out(cause) == cause
    assert shared.with_way_out("OSError: no such file") == "OSError: no such file"


@pytest.mark.parametrize(
    ("gpus", "overrides", "message"),
    [
        ([2], ["engine.extra.tp_size=4"], r"need 4 GPUs of a node .* more than 2; raise engine.nodes"),
        (
            [4],
            ["engine.extra.tp_size=4", "ray.side_by_side=true"],
            r"need 8 GPUs .* more than 4; leave ray.side_by_side out",
        ),
        ([], ["ray.num_gpus=1"], r"need 1 GPUs .* more than 0"),
        ([1], ["ray.num_gpus=0.25"], r"ray.num_gpus must be 0 or 0.5 or more, got 0.25: .*; leave it out"),
        ([1], ["ray.num_gpus=0.5", "ray.side_by_side=false"], r"must be 0 or above 0.5 with ray.side_by_side=false"),
        ([8], ["ray.num_gpus=1", "engine.extra.tp_size=4"], r"has 4 ranks with a GPU each, got 1; leave it out"),
        ([1], ["engine.mem_fraction_static=0.6"], r"must be below 0.5, got 0.6; set ray.side_by_side=false"),
    ],
    ids=["too_wide", "two", "none_there", "four_of_a_gpu", "two_in_turn", "less_than_a_rank", "more_than_half"],
)
def test_what_no_node_has_is_refused(gpus: list[float], overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placed(gpus, *overrides)
