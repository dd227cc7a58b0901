"""A head split over ranks answers as the whole one: scores and ids exactly, the normaliser up to its last rounding."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matrices import whole_numbers
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed, multiprocessing

from rayspec_kernels.common.best import Best, best_reference
from rayspec_kernels.common.closeness import FLOAT32_SUMS, assert_close
from rayspec_kernels.common.quantized import quantize_reference
from rayspec_kernels.common.shards import merge_shards, of_shard
from rayspec_kernels.head_topk.kernel import head_topk_kernel
from rayspec_kernels.head_topk.reference import head_topk_reference
from rayspec_kernels.indexed_head.kernel import indexed_head_kernel
from rayspec_kernels.slim_head.kernel import slim_head_kernel

CUTS = {
    "one_shard": (0, 300),
    "two_halves": (0, 150, 300),
    "unequal": (0, 7, 200, 300),
    "smaller_than_k": (0, 1, 4, 299, 300),
}


def same(out: Best, whole: Best) -> None:
    torch.testing.assert_close(out.scores_Bk, whole.scores_Bk, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.ids_Bk, whole.ids_Bk)
    torch.testing.assert_close(out.log_norm_B, whole.log_norm_B, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("k", [1, 5, 16])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_dense_head(cuts: tuple[int, ...], k: int, device: torch.device) -> None:
    """Whole numbers: equal scores within and across shards, and sums that are exact however they are tiled."""
    x_BH = whole_numbers(3, 16, dtype=torch.bfloat16, device=device)
    weight_VH = whole_numbers(300, 16, dtype=torch.bfloat16, device=device)
    shards = [
        of_shard(head_topk_kernel(x_BH, weight_VH[start:end], min(k, end - start)), start, k)
        for start, end in pairwise(cuts)
    ]
    assert {shard.scores_Bk.shape for shard in shards} == {(3, k)}
    whole = head_topk_kernel(x_BH, weight_VH, k)
    same(merge_shards(shards, k), whole)
    same(merge_shards(shards[::-1], k), whole)  # whoever comes first
    exact = head_topk_reference(x_BH.double(), weight_VH.double(), k)
    assert k == 1 or len(exact.scores_Bk[0].unique()) < k, "no ties: the test would show nothing"
    assert torch.equal(whole.ids_Bk, exact.ids_Bk)
    assert_close(merge_shards(shards, k).log_norm_B[:, None], exact.log_norm_B[:, None], FLOAT32_SUMS)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_low_rank_head(cuts: tuple[int, ...], device: torch.device) -> None:
    """Rows of `up` are split; every rank has `down` whole."""
    x_BH = whole_numbers(2, 16, dtype=torch.bfloat16, device=device)
    down_rH = whole_numbers(3, 16, dtype=torch.bfloat16, device=device)
    up_Vr = whole_numbers(300, 3, dtype=torch.bfloat16, device=device)
    shards = [
        of_shard(slim_head_kernel(x_BH, down_rH, up_Vr[start:end], min(6, end - start)), start, 6)
        for start, end in pairwise(cuts)
    ]
    same(merge_shards(shards, 6), slim_head_kernel(x_BH, down_rH, up_Vr, 6))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("cuts", [(0, 120, 300), (0, 7, 200, 300)])
def test_shared_rows(cuts: tuple[int, ...], device: torch.device) -> None:
    """A rank lists the chosen rows that it holds, by their place in its shard; -1 ends its list."""
    x_BH = whole_numbers(2, 16, dtype=torch.bfloat16, device=device)
    weight_VH = whole_numbers(300, 16, dtype=torch.bfloat16, device=device)
    ids_L = torch.arange(10, 260, 3, dtype=torch.int32, device=device)  # none of the first shard of seven rows
    shards = []
    for start, end in pairwise(cuts):
        mine = ids_L[(ids_L >= start) & (ids_L < end)] - start
        padded = torch.nn.functional.pad(mine, (0, len(ids_L) - len(mine)), value=-1)
        shards.append(of_shard(indexed_head_kernel(x_BH, weight_VH[start:end], padded, 5), start, 5))
    if cuts[1] == 7:
        assert shards[0].ids_Bk.tolist() == [[-1] * 5] * 2
        assert shards[0].log_norm_B.tolist() == [float("-inf")] * 2
    same(merge_shards(shards, 5), indexed_head_kernel(x_BH, weight_VH, ids_L, 5))


def test_rows_in_fewer_bits(device: torch.device) -> None:
    x_BH = whole_numbers(2, 64, dtype=torch.bfloat16, device=device)
    weight = quantize_reference(whole_numbers(90, 64, dtype=torch.float32, device=device), "int8")
    rows = torch.arange(90, device=device)
    shards = [
        of_shard(head_topk_kernel(x_BH, weight.rows(rows[start:end]), 4), start, 4)
        for start, end in ((0, 30), (30, 90))
    ]
    same(merge_shards(shards, 4), head_topk_kernel(x_BH, weight, 4))


def test_every_third_row(device: torch.device) -> None:
    x_BH = whole_numbers(2, 16, dtype=torch.bfloat16, device=device)
    weight_VH = whole_numbers(200, 16, dtype=torch.bfloat16, device=device)
    shards = [of_shard(head_topk_kernel(x_BH, weight_VH[i::3].contiguous(), 5), i, 6, stride=3) for i in range(3)]
    assert shards[2].ids_Bk[:, :5].max() > 66, "no rows of the last third: the test would show nothing"
    assert shards[0].ids_Bk[:, 5].tolist() == [-1, -1], "none stays none"
    same(merge_shards(shards, 5), head_topk_kernel(x_BH, weight_VH, 5))


SPECIAL = float("-inf"), float("inf"), float("nan"), 0.0, -0.0, 1.0


@pytest.mark.parametrize("cuts", [(0, 3, 12), (0, 1, 2, 12), (0, 6, 12)])
@pytest.mark.parametrize("k", [1, 4, 12])
def test_faults_and_nothing_but_minus_infinity(cuts: tuple[int, ...], k: int) -> None:
    """Rows of every special value, each also alone: a shard of nothing but -inf has a normaliser of -inf and keeps the
    ids that it has."""
    pick = torch.randint(len(SPECIAL), (40, 12), generator=torch.Generator().manual_seed(0))
    pick[:6] = torch.arange(6)[:, None]
    pick[6:12, :3] = 0  # the first shard of three
    scores_BV = torch.tensor(SPECIAL)[pick]
    shards = [
        of_shard(best_reference(scores_BV[:, start:end], min(k, end - start)), start, k)
        for start, end in pairwise(cuts)
    ]
    same(merge_shards(shards, k), best_reference(scores_BV, k))


def test_fewer_candidates_than_are_kept() -> None:
    """By hand: two shards know of one token each; a token of score -inf still comes before none."""
    nothing = float("-inf")
    left = Best(torch.tensor([[nothing, nothing]]), torch.tensor([[3, -1]]), torch.tensor([nothing]))
    right = Best(torch.tensor([[2.0, nothing]]), torch.tensor([[1, -1]]), torch.tensor([2.0]))
    merged = merge_shards([left, of_shard(right, 10, 3)], 4)
    assert merged.scores_Bk.tolist() == [[2.0, nothing, nothing, nothing]]
    assert merged.ids_Bk.tolist() == [[11, 3, -1, -1]]
    assert merged.log_norm_B.tolist() == [2.0]


def test_what_is_refused() -> None:
    best = best_reference(torch.ones(1, 4), 3)
    with pytest.raises(ValueError, match="at least the 3 candidates of the shard, got 2"):
        of_shard(best, 0, 2)
    with pytest.raises(ValueError, match=r"must be in 1\.\.6"):
        merge_shards([best, best], 7)


def test_it_is_traced_whole() -> None:
    """No branch and no shape depends on values."""
    shards = [of_shard(best_reference(torch.randn(2, 9), 3), start, 3) for start in (0, 9)]
    traced = torch.compile(merge_shards, backend="eager", fullgraph=True)
    same(traced(shards, 3), merge_shards(shards, 3))


def _rank(rank: int, folder: str, x_BH: Tensor, weight_VH: Tensor, cuts: tuple[int, ...], k: int) -> None:
    torch.set_num_threads(1)  # a forked process has none of its parent's threads, and would wait for them
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=len(cuts) - 1)
    start, end = cuts[rank : rank + 2]
    own = of_shard(head_topk_reference(x_BH, weight_VH[start:end], min(k, end - start)), start, k)
    gathered = []
    for part in own:
        parts = [torch.empty_like(part) for _ in cuts[1:]]
        distributed.all_gather(parts, part)
        gathered.append(parts)
    merged = merge_shards([Best(*shard) for shard in zip(*gathered, strict=True)], k)
    save_file({name: part.contiguous() for name, part in merged._asdict().items()}, f"{folder}/{rank}.safetensors")
    distributed.destroy_process_group()


def test_over_two_processes(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    x_BH, weight_VH = (whole_numbers(rows, 16, dtype=torch.float32, device=cpu) for rows in (3, 50))
    arguments = (str(tmp_path), x_BH, weight_VH, (0, 3, 50), 5)
    multiprocessing.start_processes(_rank, arguments, nprocs=2, start_method="fork")  # spawned, they import all again
    for rank in (0, 1):
        same(Best(**load_file(tmp_path / f"{rank}.safetensors")), head_topk_reference(x_BH, weight_VH, 5))
