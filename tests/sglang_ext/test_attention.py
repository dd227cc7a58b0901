"""Layouts of the CPU attention against attention written out token by token."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.adapter.cpu.attention import (
    CpuAttentionBackend,
    CpuDraftDecodeBackend,
    apply_tree_mask,
    context_segment,
)

HEADS, KV_HEADS, DIM, SLOTS, COLUMNS = 4, 2, 8, 64, 24


class Pool:
    """The part of SGLang's KV pool that attention reads."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.keys = torch.randn(SLOTS, KV_HEADS, DIM, generator=generator)
        self.values = torch.randn(SLOTS, KV_HEADS, DIM, generator=generator)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values


LAYER = SimpleNamespace(
    layer_id=0,
    tp_q_head_num=HEADS,
    tp_k_head_num=KV_HEADS,
    qk_head_dim=DIM,
    v_head_dim=DIM,
    scaling=DIM**-0.5,
    sliding_window_size=None,
    is_cross_attention=False,
    logit_cap=0.0,
    attn_type=None,
)


@pytest.fixture
def backend() -> CpuAttentionBackend:
    from sglang.srt.layers.radix_attention import AttentionType

    LAYER.attn_type = AttentionType.DECODER
    table = torch.stack([torch.randperm(SLOTS, generator=torch.Generator().manual_seed(i))[:COLUMNS] for i in range(5)])
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table.int()),
        token_to_kv_pool=Pool(),
        model_config=SimpleNamespace(context_len=COLUMNS),
    )
    return CpuAttentionBackend(runner)


def one_token(
    pool: Pool, query_AD: torch.Tensor, slots: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.empty(HEADS, DIM)
    for head in range(HEADS):
        kv = head // (HEADS // KV_HEADS)
        weights = torch.exp(pool.keys[slots, kv] @ query_AD[head] * DIM**-0.5)
        rest = 0.0 if sinks is None else sinks[head].exp()
        out[head] = weights @ pool.values[slots, kv] / (weights.sum() + rest)
    return out


def run(
    backend: CpuAttentionBackend,
    queries: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`window`: as in SGLang, how many earlier tokens are seen."""
    layer = SimpleNamespace(**(vars(LAYER) | {"sliding_window_size": window}))
    out = backend.forward_extend(
        queries.flatten(1), None, None, layer, SimpleNamespace(), save_kv_cache=False, sinks=sinks
    )
    return out.view(-1, HEADS, DIM)


@pytest.fixture(params=[None, 3, 0, -1], ids=lambda w: f"window_{w}")
def window(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture(params=[False, True], ids=["plain", "sinks"])
def sinks(request: pytest.FixtureRequest) -> torch.Tensor | None:
    return torch.tensor([0.5, -1.0, 2.0, 0.0]) if request.param else None


def seen(slots: torch.Tensor, window: int | None) -> torch.Tensor:
    """Of a path's slots, which a window leaves."""
    return slots if window in (None, -1) else slots[-window - 1 :]


@pytest.mark.parametrize("lengths", [[7], [7, 3, 19]], ids=["one", "ragged"])
@pytest.mark.parametrize("queries", [1, 3], ids=["decode", "chain"])
def test_causal_contexts(
    backend: CpuAttentionBackend, lengths: list[int], queries: int, window: int | None, sinks: torch.Tensor | None
) -> None:
    rows = torch.arange(len(lengths)) + 1
    backend.segments = [context_segment(backend.table_RC, rows, torch.tensor(lengths), queries)]
    q = torch.randn(len(lengths) * queries, HEADS, DIM)
    out = run(backend, q, window, sinks).view(len(lengths), queries, HEADS, DIM)
    for b, length in enumerate(lengths):
        for i in range(queries):
            slots = backend.table_RC[rows[b], : length - queries + i + 1].long()
            q_AD = q.view(len(lengths), queries, HEADS, DIM)[b, i]
            expected = one_token(backend.token_to_kv_pool, q_AD, seen(slots, window), sinks)
            torch.testing.assert_close(out[b, i], expected, rtol=1e-5, atol=1e-5)


def test_tree_mask_hides_siblings(backend: CpuAttentionBackend, window: int | None, sinks: torch.Tensor | None) -> None:
    """And a window goes by a node's distance from the prefix, not by its row."""
    rows, prefix = torch.tensor([2, 4]), torch.tensor([5, 9])
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    segment = context_segment(backend.table_RC, rows, prefix + 4, 4)
    depths = torch.tensor([0, 1, 1, 2])
    apply_tree_mask(segment, prefix, torch.stack([tree, tree]), prefix[:, None] + depths)
    backend.segments = [segment]
    q = torch.randn(8, HEADS, DIM)
    out = run(backend, q, window, sinks).view(2, 4, HEADS, DIM)
    for b in range(2):
        row = backend.table_RC[rows[b]].long()
        for node in range(4):
            own = row[prefix[b] : prefix[b] + 4][tree[node]]
            path = seen(torch.cat([row[: prefix[b]], own]), window)
            expected = one_token(backend.token_to_kv_pool, q.view(2, 4, HEADS, DIM)[b, node], path, sinks)
            torch.testing.assert_close(out[b, node], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", [[6], [6, 2]], ids=["one", "ragged"])
def test_draft_branches_see_their_own_chain(
    backend: CpuAttentionBackend, prefix: list[int], window: int | None, sinks: torch.Tensor | None
) -> None:
    topk, steps = 2, 4
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=backend.table_RC),
        token_to_kv_pool=backend.token_to_kv_pool,
        model_config=SimpleNamespace(context_len=COLUMNS),
    )
    draft = CpuDraftDecodeBackend(runner, topk, steps)
    rows = torch.arange(len(prefix))
    B = len(prefix)
    draft.init_forward_metadata(
        SimpleNamespace(
            seq_lens=torch.tensor(prefix),
            req_pool_indices=rows,
            positions=torch.tensor(prefix).repeat_interleave(topk),
            out_cache_loc=torch.zeros(B * topk * steps, dtype=torch.int64),
        )
    )
    assert len(draft.attn_backends) == steps - 1
    for step, at_step in enumerate(draft.attn_backends):
        q = torch.randn(len(prefix) * topk, HEADS, DIM)
        out = run(at_step, q, window, sinks)
        for b, length in enumerate(prefix):
            row = backend.table_RC[b].long()
            for branch in range(topk):
                chain = row[length + branch * steps : length + branch * steps + step + 1]
                path = seen(torch.cat([row[:length], chain]), window)
                expected = one_token(backend.token_to_kv_pool, q[b * topk + branch], path, sinks)
                torch.testing.assert_close(out[b * topk + branch], expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_computed_is_refused(backend: CpuAttentionBackend) -> None:
    backend.segments = [context_segment(backend.table_RC, torch.tensor([1]), torch.tensor([3]), 1)]
    layer = SimpleNamespace(**(vars(LAYER) | {"logit_cap": 50.0}))
    with pytest.raises(ValueError, match="no soft-capped attention logits, which layer 0 of this model uses"):
        backend.forward_extend(torch.randn(1, HEADS * DIM), None, None, layer, SimpleNamespace(), save_kv_cache=False)
