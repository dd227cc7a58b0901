"""SLiM's choice from the tree that SGLang's draft loop expands, and the checkpoint that asks for it.

B = requests, D = draft steps, W = nodes in the loop's beam and children of each, C = candidates, N = nodes.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_cases import TARGET_HEAD_VH, V, make_head, toy_body
from safetensors.torch import load_file
from test_last_hidden import PATHS
from test_tree_slim import TENSOR_FAULTS, log_r, make_tree
from torch import Tensor

from rayspec.export import ExportConfig, prepare
from rayspec_kernels.common.draft_tree import build_tree_reference
from rayspec_kernels.tree_prune.reference import expansion_scores_reference
from sglang_ext.adapter.algorithms import algorithm_of, swap_group
from sglang_ext.drafters.checkpoint import check_files, load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.trees import Draft, Expansion
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.slim_pruner import SlimPruner
from sglang_ext.trees.static import StaticTree

CPU = torch.device("cpu")
BODY = toy_body()
TARGET = TargetInfo(
    name="toy", hidden_size=BODY.hidden_size, vocab_size=V, tokenizer_sha256="", tap_layers=BODY.tap_layers
)
Tokens = tuple[int, ...]  # of a path, from the first draft on


class Loop:
    """SGLang's own draft loop over made-up distributions: `expansion` is what it recorded, `eagle2` what it would
    verify."""

    def __init__(self, B: int, D: int, W: int, num_nodes: int, seed: int = 0) -> None:
        from sglang.srt.speculative.eagle_utils import organize_draft_results
        from sglang.srt.speculative.spec_utils import select_top_k_tokens

        from sglang_ext.adapter.workers.eagle import _expansion

        generator = torch.Generator().manual_seed(seed)
        self.root_B = torch.randint(V, (B,), generator=generator)
        recorded, scores, rows = [], None, B
        for step in range(D):
            best = (2 * torch.randn(rows, V, generator=generator)).softmax(dim=-1).topk(W, dim=-1)
            _, _, scores, tree = select_top_k_tokens(step, best.values, best.indices, None, scores, W)
            recorded.append(tree)
            rows = B * W
        lists = tuple(map(list, zip(*recorded, strict=True)))
        self.expansion: Expansion = _expansion(*lists)
        self.parents_BP, self.selected_BM, self.tokens_BM = organize_draft_results(*lists, num_nodes)

    def candidates(self, b: int) -> dict[Tokens, float]:
        """Path of tokens from the first draft on -> product of the draft probabilities, of every candidate."""
        W, found = self.W, []
        parents, tokens = self.expansion.parents_BP[b].tolist(), self.expansion.tokens_BC[b].tolist()
        for c, token in enumerate(tokens):
            entry = c // W
            found.append((*(found[parents[entry]] if entry else ()), token))
        return dict(zip(found, self.expansion.p_BC[b].tolist(), strict=True))

    @property
    def W(self) -> int:
        beam = self.expansion.parents_BP.shape[1] or 1
        return self.expansion.tokens_BC.shape[1] // beam


def paths(draft: Draft, b: int) -> list[Tokens]:
    """Of every node but the root, by the mask; also that links, depths and padding say the same."""
    assert draft.num_nodes_B is not None
    used = int(draft.num_nodes_B[b])
    tokens, links = draft.tokens_BN[b].tolist(), draft.links
    found = [tuple(tokens[m] for m in links.mask_BNN[b, n].nonzero().squeeze(1).tolist()[1:]) for n in range(used)]
    assert [len(path) for path in found] == links.depth_BN[b, :used].tolist()
    walked: dict[int, Tokens] = {0: ()}
    waiting = [0]
    while waiting:
        node = waiting.pop()
        child = int(links.first_child_BN[b, node])
        while child != -1:
            walked[child] = (*walked[node], tokens[child])
            waiting.append(child)
            child = int(links.next_sibling_BN[b, child])
    assert [walked[n] for n in range(used)] == found
    assert len(walked) == used, "padding is linked to nothing"
    return found[1:]


SHAPES = [(1, 3), (2, 4), (4, 3), (6, 2)]


@pytest.mark.parametrize(("D", "W"), SHAPES)
def test_without_correlation_all_hypotheses_are_eagle2s_own_tree_token_for_token(D: int, W: int) -> None:
    B, N = 5, min(W + (D - 1) * W * W, 14) + 1
    loop = Loop(B, D, W, N)
    tree = SlimTree(SlimOptions(correlation=False, hypotheses=N - 1), V)
    draft = tree.pruner(D, W, N, CPU).prune(loop.root_B, loop.expansion)
    assert torch.equal(draft.tokens_BN, torch.cat([loop.root_B[:, None], loop.tokens_BM], dim=1))
    eagle2 = build_tree_reference(loop.parents_BP, loop.selected_BM, W)
    assert all(torch.equal(a, b) for a, b in zip(draft.links, eagle2, strict=True))
    assert draft.num_nodes_B is not None
    assert draft.num_nodes_B.tolist() == [N] * B


@pytest.mark.parametrize("unseen", ["one", "zero", "smoothed"])
@pytest.mark.parametrize("count", [1, 5, 20])
@pytest.mark.parametrize(("D", "W"), SHAPES)
def test_the_tree_holds_the_best_candidates_of_brute_force(D: int, W: int, count: int, unseen: str) -> None:
    loop, N, bonus = Loop(4, D, W, 4), 60, 0.3
    tree = make_tree(hypotheses=count, unseen=unseen, length_bonus=bonus)
    draft = tree.pruner(D, W, N, CPU).prune(loop.root_B, loop.expansion)
    log_r_VV = log_r(tree).double()
    for b in range(4):
        scores = {}
        for path, p in loop.candidates(b).items():
            pairs = itertools.pairwise((int(loop.root_B[b]), *path))
            scores[path] = torch.tensor(p).double().log() + sum(log_r_VV[x, y] + bonus for x, y in pairs)
        possible = [path for path, score in scores.items() if score > float("-inf")]
        best = sorted(possible, key=lambda path: -scores[path])[:count]
        found = paths(draft, b)
        assert set(found) == {path[: i + 1] for path in best for i in range(len(path))}
        assert len(found) == len(set(found))


def test_a_child_outranks_its_parent_and_brings_it_along() -> None:
    loop = Loop(8, 4, 3, 4)
    pruner = make_tree(hypotheses=1).pruner(4, 3, 5, CPU)
    assert isinstance(pruner, SlimPruner)
    score_BM, parent_BM = expansion_scores_reference(
        loop.root_B, loop.expansion, pruner.correlations, length_bonus=0.0, topk=3, depth=4
    )
    assert bool((score_BM > score_BM.gather(1, parent_BM)).any()), "r above 1 was to be seen"
    draft = pruner.prune(loop.root_B, loop.expansion)
    lengths = [len(paths(draft, b)) for b in range(8)]
    assert lengths == [len(paths(draft, b)[-1]) for b in range(8)]  # one hypothesis with all of its beginnings
    assert max(lengths) > 1


def test_more_hypotheses_contain_fewer_and_few_nodes_cut_them() -> None:
    loop = Loop(4, 4, 4, 4)
    drafts = [
        make_tree(hypotheses=count).pruner(4, 4, 60, CPU).prune(loop.root_B, loop.expansion) for count in (1, 4, 16, 52)
    ]
    found = [[set(paths(draft, b)) for draft in drafts] for b in range(4)]
    for of_request in found:
        assert all(fewer <= more for fewer, more in itertools.pairwise(of_request))
        assert of_request[0] < of_request[-1]
        assert len(of_request[-1]) == 52, "all candidates"
    cut = make_tree(hypotheses=52).pruner(4, 4, 9, CPU).prune(loop.root_B, loop.expansion)
    assert all(set(paths(cut, b)) <= found[b][-1] and len(paths(cut, b)) <= 8 for b in range(4))
    with pytest.raises(ValueError, match="raise num_draft_tokens"):
        make_tree().pruner(4, 4, 4, CPU)


def test_a_request_has_the_same_tree_in_a_batch_as_alone() -> None:
    loop, pruner = Loop(5, 3, 4, 4), make_tree(hypotheses=6).pruner(3, 4, 12, CPU)
    together = pruner.prune(loop.root_B, loop.expansion)
    for b in range(5):
        alone = pruner.prune(loop.root_B[b : b + 1], Expansion(*(x[b : b + 1] for x in loop.expansion)))
        assert torch.equal(alone.tokens_BN[0], together.tokens_BN[b])
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone.links, together.links, strict=True))


@pytest.mark.parametrize("unseen", ["one", "zero"])
def test_a_step_verifies_no_more_nodes_than_its_largest_tree_has(unseen: str) -> None:
    from sglang.srt.layers.attention.verify_mask import VerifyMask
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    from sglang_ext.adapter.activation import has_accelerator
    from sglang_ext.adapter.workers.tree_verify import tree_verify_input

    loop, hypotheses = Loop(6, 3, 4, 4), 6 if unseen == "one" else 1
    draft = make_tree(hypotheses=hypotheses, unseen=unseen).pruner(3, 4, 20, CPU).prune(loop.root_B, loop.expansion)
    assert draft.num_nodes_B is not None
    used, seq_lens_B = draft.num_nodes_B.tolist(), torch.arange(6) + 10
    mask = VerifyMask(buffer=torch.empty(0, dtype=torch.bool), mode=TreeMaskMode.QLEN_ONLY, max_bs=0, is_read=True)
    runner = SimpleNamespace(attn_backend=SimpleNamespace(verify_mask=mask))
    given = tree_verify_input(SimpleNamespace(seq_lens=seq_lens_B), draft, runner, draft_steps=3, topk=4)
    width = 20 if has_accelerator() else max(used)
    assert len(set(used)) > 1
    assert given.draft_token_num == given.num_tokens_per_req == width
    assert given.max_tree_depth == min(4, width)
    assert given.retrieve_next_token.shape == given.retrieve_next_sibling.shape == (6, width)
    assert torch.equal(given.draft_token.view(6, width), draft.tokens_BN[:, :width])
    assert torch.equal(given.custom_mask.view(6, width, width), draft.links.mask_BNN[:, :width, :width])
    assert torch.equal(given.positions.view(6, width) - seq_lens_B[:, None], draft.links.depth_BN[:, :width])


def eagle3(tree: Any = None) -> Eagle3Drafter:
    torch.manual_seed(0)
    return Eagle3Drafter(BODY, make_head({"kind": "full"}, TARGET_HEAD_VH), tree)


def test_checkpoint(tmp_path: Path) -> None:
    save_drafter(tmp_path / "plain", eagle3(), TARGET)
    made = eagle3(make_tree(hypotheses=7, unseen="smoothed"))
    save_drafter(tmp_path / "slim", made, TARGET, share_with=tmp_path / "plain")
    loaded, info = load_drafter(tmp_path / "slim")
    check_files(info)
    assert isinstance(loaded.draft_tree, SlimTree)
    assert isinstance(made.draft_tree, SlimTree)
    assert loaded.draft_tree.options == made.draft_tree.options
    assert torch.equal(log_r(loaded.draft_tree), log_r(made.draft_tree))
    assert set(load_file(tmp_path / "slim" / WEIGHTS)) == {
        f"draft_tree.bigram_{name}" for name in ("indptr", "ids", "counts")
    }
    assert read_info(tmp_path / "plain").tree is None
    for topk in (1, 4):  # one algorithm and one family, so that one engine serves both
        assert algorithm_of(tmp_path / "slim", topk) == algorithm_of(tmp_path / "plain", topk) == "EAGLE3"
    assert swap_group("EAGLE3") == "eagle3"


def test_a_tree_made_before_the_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"draft_tree\.kind 'static' does not fit .* builds its tree as it drafts"):
        eagle3(StaticTree(PATHS))
    save_drafter(tmp_path / "d", eagle3(SlimTree(SlimOptions(correlation=False), V)), TARGET)
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    for tree, message in (
        ({"kind": "static", "paths": [[0]]}, "d: draft_tree.kind 'static' .*; use draft_tree.kind slim"),
        ({"kind": "oak"}, r"d: draft_tree\.kind must be one of static, slim, got 'oak'"),
    ):
        (tmp_path / "d" / "config.json").write_text(json.dumps(config | {"draft_tree": tree}))
        with pytest.raises(ValueError, match=message):
            check_files(read_info(tmp_path / "d"))


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_faulty_counts_are_refused(fault: str, tmp_path: Path) -> None:
    damage, message = TENSOR_FAULTS[fault]
    tree = make_tree()
    damage(tree.bigram_indptr, tree.bigram_ids, tree.bigram_counts)
    save_drafter(tmp_path / "d", eagle3(tree), TARGET)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d")


def test_there_is_no_stock_form(tmp_path: Path) -> None:
    drafter = eagle3(make_tree())
    save_drafter(tmp_path / "d", drafter, TARGET)
    with pytest.raises(ValueError, match="no stock form of a draft_tree; export the drafter that it was made from"):
        prepare(ExportConfig(drafters=[str(tmp_path / "d")], output_dir=str(tmp_path / "out")))
    with pytest.raises(ValueError, match="a stock checkpoint has no draft_tree"):
        save_drafter(tmp_path / "stock", drafter, TARGET, stock=True)


def test_the_order_of_the_choice_is_that_of_the_products() -> None:
    """Two different products of float32 are never taken for equal."""
    p_BC = torch.tensor([[1e-30, 1e-30]])
    p_BC[0, 1] = torch.nextafter(p_BC[0, 0], torch.tensor(1.0))
    expansion = Expansion(torch.empty(1, 0, dtype=torch.int64), p_BC, torch.tensor([[4, 5]]))
    tree = SlimTree(SlimOptions(correlation=False, hypotheses=1), V)
    draft = tree.pruner(1, 2, 3, CPU).prune(torch.tensor([3]), expansion)
    assert paths(draft, 0) == [(5,)]


def test_shapes_of_an_expansion() -> None:
    loop = Loop(2, 3, 4, 4)
    sizes: list[tuple[int, ...]] = [tuple(x.shape) for x in loop.expansion]
    assert sizes == [(2, 9), (2, 36), (2, 36)]
    assert all(isinstance(x, Tensor) for x in loop.expansion)
