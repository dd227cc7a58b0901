"""Medusa, BPD and Hydra as modules: what each position reads, and the trees that are made of their candidates."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_cases import SPECS, STOPS, TARGET_HEAD_VH, H, V, make_head, seeded
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaModel

from rayspec_kernels.common.draft_tree import build_chain_reference
from sglang_ext.drafters import family, parse_drafter
from sglang_ext.drafters.checkpoint import check_files, load_drafter, save_drafter
from sglang_ext.drafters.checkpoint_config import read_info
from sglang_ext.drafters.hydra import HydraDrafter
from sglang_ext.drafters.medusa import MedusaDrafter
from sglang_ext.drafters.rope import Rope
from sglang_ext.drafters.shared.last_hidden import LastHiddenDrafter
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.heads import DraftHead
from sglang_ext.trees import parse_draft_tree
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.static import StaticProposer, StaticTree, chain_paths, greedy_paths, read_paths

POSITIONS = 3
EMBED_VH = seeded(V, H, seed=30).float()
LAYER = {
    **{"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    **{"rms_norm_eps": 1e-5, "rope": Rope(rope_theta=500.0).to_json()},
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "medusa": ("medusa", {}),
    "hydra": ("hydra", {}),
    "hydra++": ("hydra", {"prefix_layer": True, "mlp_layers": 3}),
}
PATHS = ((0,), (1,), (0, 0), (3,), (0, 2), (1, 0), (0, 0, 1), (0, 2, 0))


def embed(ids: Tensor) -> Tensor:
    return EMBED_VH[ids]


def make_drafter(
    name: str, spec: dict[str, Any] = SPECS["full"], *, shared_head: bool = False, random: bool = True
) -> LastHiddenDrafter:
    kind, options = KINDS[name]
    sizes = {"hidden_size": H, "vocab_size": V, "max_position_embeddings": 256, **LAYER}
    config = family(kind).config_class.from_options(
        parse_drafter({"kind": kind, "positions": POSITIONS, "shared_head": shared_head, **options}), sizes
    )
    heads = iter(range(POSITIONS))

    def make() -> DraftHead:
        return make_head(spec, TARGET_HEAD_VH + (0.5 * seeded(V, H, seed=40 + next(heads)) if random else 0.0))

    drafter = family(kind).drafter_class(config, config.heads(make))
    if random:
        generator = torch.Generator().manual_seed(7)
        for name, parameter in drafter.named_parameters():
            if not name.startswith("lm_head."):
                torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return drafter


def rows(T: int) -> tuple[Tensor, Tensor]:
    """(hidden [T, H], roots [T])"""
    return seeded(T, H, seed=50).float(), torch.arange(T) + 1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_untrained_drafter_proposes_what_the_target_would_say_next(kind: str) -> None:
    drafter = make_drafter(kind, random=False)
    hidden_TH, root_T = rows(5)
    own_TKH = drafter.begin(hidden_TH, POSITIONS)
    if kind == "hydra++":  # whose last norm takes the size of a row, and no more
        hidden_TH = drafter.context(hidden_TH[None])[0]
        hidden_TH = hidden_TH / (hidden_TH.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    for step in range(POSITIONS):
        path_TdH = embed(root_T[:, None].expand(-1, step + 1))
        state_TH = drafter.state(step, own_TKH[:, step], path_TdH)
        logits_TV = drafter.lm_head.at(step).candidates(state_TH, step).logits_TS
        torch.testing.assert_close(logits_TV, hidden_TH @ TARGET_HEAD_VH.float().T)


def literal_medusa(drafter: MedusaDrafter, hidden_H: Tensor, step: int) -> Tensor:
    """z_i = W_i (h + SiLU(A_i h + b_i)), one row, in float64."""
    block, weight_VH = drafter.blocks[step], drafter.lm_head.at(step).weight
    a_H = block.weight.double() @ hidden_H.double() + block.bias.double()
    return weight_VH.double() @ (hidden_H.double() + a_H * a_H.sigmoid())


def literal_norm(x_H: Tensor, norm: Any) -> Tensor:
    return x_H / (x_H.square().mean() + norm.eps).sqrt() * norm.weight.double()


def literal_hydra(drafter: HydraDrafter, hidden_H: Tensor, path: list[int], step: int) -> Tensor:
    """Of the row that is carried; Hydra++'s goes on through the rest of its layer."""
    h_H = hidden_H.double()
    if drafter.config.prefix_layer:
        x_H = literal_norm(h_H, drafter.mlp_norm)
        gate, up, down = (getattr(drafter.mlp, f"{n}_proj").weight.double() for n in ("gate", "up", "down"))
        h_H = literal_norm(h_H + down @ ((gate @ x_H) * (gate @ x_H).sigmoid() * (up @ x_H)), drafter.norm)
    parts = [h_H]
    for token in path:
        e_H = EMBED_VH[token].double()
        parts.append(e_H / (e_H.square().mean() + torch.finfo(torch.float32).eps).sqrt())
    x_K = torch.cat(parts)
    a_H = drafter.blocks[step].weight.double() @ x_K + drafter.blocks[step].bias.double()
    state_H = drafter.residuals[step].weight.double() @ x_K + a_H * a_H.sigmoid()
    for layer in drafter.further[step]:
        a_H = layer.weight.double() @ state_H + layer.bias.double()
        state_H = state_H + a_H * a_H.sigmoid()
    return drafter.lm_head.at(step).weight.double() @ state_H


def literal_logits(drafter: Any, hidden_H: Tensor, path: list[int], step: int) -> Tensor:
    if isinstance(drafter, MedusaDrafter):
        return literal_medusa(drafter, hidden_H, step)
    return literal_hydra(drafter, hidden_H, path, step)


@pytest.mark.parametrize(
    "paths", [PATHS, chain_paths(3), ((0,),), ((2,), (2, 1))], ids=["tree", "chain", "one", "gaps"]
)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_tree_holds_the_candidates_of_its_rank_paths(kind: str, paths: tuple[tuple[int, ...], ...]) -> None:
    drafter = make_drafter(kind)
    hidden_BH, root_B = rows(3)
    tokens_BN, links, _ = StaticProposer(paths, torch.device("cpu")).propose(drafter, hidden_BH, root_B, embed)
    nodes = [(), *sorted(paths, key=lambda p: (len(p), p))]
    for b in range(3):
        found = {(): int(root_B[b])}
        for n, path in enumerate(nodes[1:], start=1):
            before = [found[path[:i]] for i in range(len(path))]
            logits_V = literal_logits(drafter, hidden_BH[b], before, len(path) - 1)
            found[path] = int(logits_V.argsort(descending=True)[path[-1]])
            assert int(tokens_BN[b, n]) == found[path], path
            assert int(links.depth_BN[b, n]) == len(path)
            seen = {nodes[j] for j in links.mask_BNN[b, n].nonzero().squeeze(1).tolist()}
            assert seen == {path[:i] for i in range(len(path) + 1)}


@torch.no_grad()
def test_the_children_of_a_node_are_linked_best_first() -> None:
    _, links, _ = StaticProposer(PATHS, torch.device("cpu")).propose(make_drafter("medusa"), *rows(1), embed)
    nodes = [(), *sorted(PATHS, key=lambda p: (len(p), p))]
    for n, path in enumerate(nodes):
        children, child = [], int(links.first_child_BN[0, n])
        while child != -1:
            children.append(nodes[child])
            child = int(links.next_sibling_BN[0, child])
        assert children == [p for p in nodes[1:] if p[:-1] == path]


@torch.no_grad()
def test_bpd_is_medusa_with_one_candidate_a_position() -> None:
    drafter, (hidden_BH, root_B) = make_drafter("medusa"), rows(4)
    chain = StaticProposer(chain_paths(3), torch.device("cpu")).propose(drafter, hidden_BH, root_B, embed)
    tree = StaticTree(PATHS).fit(3, 10, len(PATHS) + 1, torch.device("cpu")).propose(drafter, hidden_BH, root_B, embed)
    best = [0, 1, 4, 7]  # (), (0,), (0, 0), and (0, 0, 1), whose sibling of rank 0 the tree does not have
    assert torch.equal(chain.tokens_BN[:, :3], tree.tokens_BN[:, best[:3]])
    expected = build_chain_reference(4, 4, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(chain.links, expected, strict=True))


@torch.no_grad()
def test_hydra_reads_the_path_and_medusa_does_not() -> None:
    hidden_TH, _ = rows(1)
    for kind, depends in (("hydra", True), ("medusa", False)):
        drafter = make_drafter(kind)
        for step in range(POSITIONS):
            path = torch.arange(step + 1)[None] + 5
            before = drafter.state(step, hidden_TH, embed(path))
            for place in range(step + 1):
                changed = path.clone()
                changed[0, place] = 40
                assert torch.equal(drafter.state(step, hidden_TH, embed(changed)), before) != depends


@pytest.mark.parametrize(
    "name", [name for name in SPECS if not name.endswith("_union")]
)  # its distribution is a batch's
@pytest.mark.parametrize("shared_head", [False, True], ids=["own", "shared"])
@torch.no_grad()
def test_any_head_may_project(name: str, shared_head: bool) -> None:
    """Of a request in a batch as alone, and the candidates of a node are the head's own best ones."""
    drafter = make_drafter("hydra", SPECS[name], shared_head=shared_head)
    hidden_BH, root_B = rows(3)
    proposer = StaticProposer(((0,), (1,), (1, 0), (1, 1)), torch.device("cpu"))
    tokens_BN = proposer.propose(drafter, hidden_BH, root_B, embed).tokens_BN
    for b in range(3):
        alone = proposer.propose(drafter, hidden_BH[b : b + 1], root_B[b : b + 1], embed).tokens_BN
        assert torch.equal(alone[0], tokens_BN[b])
        path_1dH = embed(torch.tensor([[int(root_B[b]), int(tokens_BN[b, 2])]]))
        head = drafter.lm_head.at(1)
        routed = head.route(path_1dH[:, -1], hidden_BH[b : b + 1], 1) if head.routes else None
        best = head.propose(drafter.state(1, hidden_BH[b : b + 1], path_1dH), 1, 2, routed)
        assert tokens_BN[b, 3:].tolist() == best.token_ids_Tk[0].tolist()


@torch.no_grad()
def test_a_prefix_layer_is_a_decoder_layer_of_llama() -> None:
    """As in the authors' code (hydra/model/hydra_heads/prefix_mlp_head.py): a Llama of one layer with its last norm,
    over the hidden states in place of embeddings. Hugging Face's, of whole sequences, and some tokens at a time with a
    cache, as a server runs it."""
    drafter = make_drafter("hydra++")
    assert isinstance(drafter, HydraDrafter)
    llama = llama_of(drafter)
    hidden_BTH = seeded(2, 9, H, seed=60).float()
    carried_BTH = drafter.context(hidden_BTH)
    found_BTH = drafter.begin(carried_BTH.flatten(0, 1), POSITIONS)[:, 1].unflatten(0, (2, 9))
    torch.testing.assert_close(found_BTH, llama(inputs_embeds=hidden_BTH).last_hidden_state, rtol=1e-4, atol=1e-4)
    cache, pieces = DynamicCache(), []
    for piece in hidden_BTH.split([4, 1, 3, 1], dim=1):
        pieces.append(llama(inputs_embeds=piece, past_key_values=cache, use_cache=True).last_hidden_state)
    torch.testing.assert_close(found_BTH, torch.cat(pieces, dim=1), rtol=1e-4, atol=1e-4)
    changed_BTH = hidden_BTH.clone()
    changed_BTH[:, 5] += 1.0
    differs_BT = (drafter.context(changed_BTH) != carried_BTH).any(dim=-1)
    assert differs_BT.tolist() == [[t >= 5 for t in range(9)]] * 2


def llama_of(drafter: HydraDrafter) -> LlamaModel:
    shape = drafter.config.layer
    assert shape is not None
    config = LlamaConfig(
        hidden_size=H,
        vocab_size=V,
        num_hidden_layers=1,
        max_position_embeddings=256,
        rope_parameters=shape.rope.to_json(),
        attn_implementation="eager",
        **{name: value for name, value in LAYER.items() if name != "rope"},
    )
    names = {"context_norm": "layers.0.input_layernorm", "context_attn": "layers.0.self_attn", "norm": "norm"}
    names |= {"mlp_norm": "layers.0.post_attention_layernorm", "mlp": "layers.0.mlp"}
    own = {name.partition(".") for name in drafter.state_dict() if name.partition(".")[0] in names}
    weights = {f"{names[part]}.{rest}": drafter.state_dict()[f"{part}.{rest}"] for part, _, rest in own}
    llama = LlamaModel(config).eval()
    missing, unknown = llama.load_state_dict(weights, strict=False)
    assert (missing, unknown) == (["embed_tokens.weight"], [])
    return llama


@pytest.mark.parametrize("reads_path", [False, True])
def test_siblings_are_drawn_from_the_distribution_of_their_level_or_parent(reads_path: bool) -> None:
    """By hand: nodes are 0; (0) (1) (2) = 1 2 3; (0 0) (0 1) (2 0) = 4 5 6; (2 0 0) = 7."""
    paths = ((0,), (1,), (2,), (0, 0), (2, 0), (0, 1), (2, 0, 0))
    parent_n, children_nC, distribution_n = StaticProposer(paths, torch.device("cpu")).siblings(reads_path)
    assert parent_n.tolist() == [0, 1, 3, 6]
    assert children_nC.tolist() == [[1, 2, 3], [4, 5, -1], [6, -1, -1], [7, -1, -1]]
    assert distribution_n.tolist() == ([0, 1, 2, 3] if reads_path else [0, 1, 1, 2])


def test_trees_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"children of the ranks \[0, 1, 3\]; siblings can be drawn where they have all"
    ):
        StaticProposer(PATHS, torch.device("cpu")).siblings(False)
    StaticTree(PATHS).check_can_be_drawn()
    with pytest.raises(ValueError, match="a draft_tree of kind slim has depends on the drafted tokens"):
        SlimTree(SlimOptions(hypotheses=3, correlation=False), V).check_can_be_drawn()


def test_the_greedy_tree_is_the_best_of_all() -> None:
    accuracy = [[0.5, 0.25, 0.06], [0.4, 0.3, 0.05], [0.45, 0.1, 0.01]]
    everything = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]

    def worth(path: tuple[int, ...]) -> float:
        product = 1.0
        for position, rank in enumerate(path):
            product *= accuracy[position][rank]
        return product

    for nodes in (1, 4, 9, len(everything)):
        paths = greedy_paths(accuracy, nodes)
        assert len(set(paths)) == nodes
        StaticTree(paths)  # every path after its own beginning
        best = sorted(map(worth, everything), reverse=True)[:nodes]
        assert sum(map(worth, paths)) == pytest.approx(sum(best))
    with pytest.raises(ValueError, match="only 39 nodes of 3 positions"):
        greedy_paths(accuracy, len(everything) + 1)


def test_a_tree_is_cut_to_steps_candidates_and_nodes() -> None:
    tree, cpu = StaticTree(PATHS), torch.device("cpu")
    assert tree.fit(2, 10, 4, cpu).num_nodes == 4
    assert [len(level.rank_n) for level in tree.fit(2, 10, 4, cpu).levels] == [2, 1]  # the first three paths
    assert [len(level.rank_n) for level in tree.fit(2, 2, 5, cpu).levels] == [2, 2]  # (3,) and (0, 2) need more
    with pytest.raises(ValueError, match="draft_tree has 4 nodes within 1 draft steps and 10 candidates"):
        tree.fit(1, 10, 5, cpu)


TREE_FAULTS: dict[str, tuple[Any, str]] = {
    "twice": ([[0], [0]], r"holds \[0\] twice"),
    "orphan": ([[0], [1, 0]], r"\[1, 0\] without \[1\]"),
    "negative": ([[-1]], "ranks from 0 on"),
    "float": ([[0.0]], "ranks from 0 on"),
    "empty": ([], "is empty"),
    "root": ([[]], "ranks from 0 on"),
}


@pytest.mark.parametrize("fault", TREE_FAULTS)
def test_faulty_trees_are_refused(fault: str, tmp_path: Path) -> None:
    paths, message = TREE_FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        parse_draft_tree({"kind": "static", "paths": paths})
    (tmp_path / "tree.json").write_text(json.dumps(paths))
    with pytest.raises(ValueError, match=message):
        read_paths(tmp_path / "tree.json")


def test_trees_of_files_and_of_unknown_kinds(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(json.dumps(PATHS))
    assert read_paths(tmp_path / "tree.json") == PATHS
    with pytest.raises(ValueError, match="no tree in"):
        read_paths(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"draft_tree.kind must be one of static, slim, got 'statik'"):
        parse_draft_tree({"kind": "statik"})
    with pytest.raises(ValueError, match=r"unknown key 'draft_tree\.nodes'; known under draft_tree: paths"):
        parse_draft_tree({"kind": "static", "paths": [[0]], "nodes": 1})
    assert parse_draft_tree(StaticTree(PATHS).spec()) == StaticTree(PATHS).options


TARGET = TargetInfo(name="toy", hidden_size=H, vocab_size=V, tokenizer_sha256="abc", tap_layers=())


def save(folder: Path, kind: str, spec: dict[str, Any], shared_head: bool = False) -> LastHiddenDrafter:
    drafter = make_drafter(kind, spec, shared_head=shared_head)
    drafter.draft_tree = StaticTree(PATHS)
    save_drafter(folder, drafter, TARGET, {"recipe": "none"})
    return drafter


@pytest.mark.parametrize("shared_head", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("spec", ["full", "slimspec", "truncated_by_step", "dynaspec"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tmp_path: Path, kind: str, spec: str, shared_head: bool) -> None:
    drafter = save(tmp_path / "d", kind, SPECS[spec], shared_head)
    check_files(read_info(tmp_path / "d"))
    loaded, info = load_drafter(tmp_path / "d", stop_ids=STOPS)
    assert (info.kind, info.target, info.body) == (KINDS[kind][0], TARGET, drafter.config)
    assert loaded.draft_tree.paths == PATHS
    assert loaded.lm_head.spec() == drafter.lm_head.spec()
    for name, tensor in drafter.state_dict().items():
        stored = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        torch.testing.assert_close(loaded.state_dict()[name], stored, rtol=0, atol=0)


CONFIG_FAULTS: dict[str, tuple[Callable[[dict], Any], str]] = {
    "positions": (lambda c: c["drafter"].update(positions=4), r"missing lm_head\.3\.weight"),
    "none": (lambda c: c["drafter"].update(positions=0), r"drafter.positions must be in 1\.\.\d+, got 0"),
    "type": (lambda c: c["drafter"].update(positions="3"), "drafter.positions must be a whole number"),
    "bool": (lambda c: c["drafter"].update(shared_head=1), "drafter.shared_head must be true or false"),
    "option": (lambda c: c["drafter"].update(layers=2), "unknown key 'drafter.layers'; known under drafter: positions"),
    "absent": (lambda c: c.pop("drafter"), "config.json has no 'drafter'"),
    "shared": (lambda c: c["drafter"].update(shared_head=True), r"missing lm_head\.weight"),
    "other": (lambda c: c.update(architectures=["RaySpecHydra"]), r"missing residuals\.0\.weight"),
    "hidden": (lambda c: c.update(hidden_size=H + 1), "must equal the target's"),
    "taps": (lambda c: c["rayspec"]["target"].update(tap_layers=[2]), "tap_layers must be empty"),
    "tree": (lambda c: c["draft_tree"].update(paths=[[0, 0]]), r"\[0, 0\] without \[0\]"),
    "eagle": (lambda c: c.update(architectures=["RaySpecEagle3"]), "d: "),
}


PREFIX_FAULTS: dict[str, tuple[Callable[[dict], Any], str]] = {
    "none": (lambda c: c["drafter"].pop("prefix_layer"), r"unknown context_attn\.k_proj\.weight"),
    "type": (lambda c: c["drafter"].update(prefix_layer="yes"), "drafter.prefix_layer must be true or false"),
    "layers": (
        lambda c: c.update(num_hidden_layers=2),
        "num_hidden_layers must be 1 for a Hydra drafter with a prefix",
    ),
    "absent": (lambda c: c.pop("intermediate_size"), "config.json has no 'intermediate_size'"),
    "shape": (lambda c: c.update(intermediate_size=41), r"mlp\.gate_proj\.weight"),
    "shared": (lambda c: c.update(num_key_value_heads=3), r"num_attention_heads \(4\) must be a multiple of"),
    "odd": (lambda c: c.update(head_dim=5), r"drafter\.layer\.head_dim must be even"),
    "rope": (lambda c: c["rope_parameters"].update(rope_type="dynamic"), "rope_type must be one of default, linear"),
    "deep": (lambda c: c["drafter"].update(mlp_layers=4), r"missing further\.0\.2\.bias"),
    "flat": (lambda c: c["drafter"].update(mlp_layers=0), r"drafter.mlp_layers must be in 1\.\.64, got 0"),
    "own": (lambda c: c["drafter"].update(layer={}), r"unknown key 'drafter.layer'; known under drafter: positions"),
}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("medusa", fault) for fault in CONFIG_FAULTS] + [("hydra++", fault) for fault in PREFIX_FAULTS],
)
def test_config_must_fit(tmp_path: Path, kind: str, fault: str) -> None:
    save(tmp_path / "d", kind, SPECS["full"])
    change, message = (CONFIG_FAULTS if kind == "medusa" else PREFIX_FAULTS)[fault]
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    change(config)
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d")


def test_a_hydra_drafter_without_the_options_of_hydra_plus_plus_is_stored_as_ever(tmp_path: Path) -> None:
    drafter = save(tmp_path / "d", "hydra", SPECS["full"])
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert config["drafter"] == {"positions": POSITIONS, "shared_head": False}
    assert (config["num_hidden_layers"], "rope_parameters" in config) == (0, False)
    assert {name.partition(".")[0] for name in drafter.state_dict()} == {"residuals", "blocks", "lm_head"}
    plain = {"kind": "hydra", "positions": 4, "shared_head": False}
    assert parse_drafter({"kind": "hydra"}).entry() == plain
    assert parse_drafter({"kind": "hydra", "prefix_layer": True}).entry() == {**plain, "prefix_layer": True}


def test_a_drafter_that_shares_all_but_its_tree_stores_nothing_twice(tmp_path: Path) -> None:
    drafter = save(tmp_path / "base", "medusa", SPECS["full"])
    drafter.draft_tree = StaticTree(PATHS[:2])
    save_drafter(tmp_path / "other", drafter, TARGET, share_with=tmp_path / "base")
    assert (tmp_path / "other" / WEIGHTS).stat().st_size < 200
    loaded, _ = load_drafter(tmp_path / "other")
    assert loaded.draft_tree.paths == PATHS[:2]
    assert torch.equal(loaded.blocks[1].weight, drafter.blocks[1].weight.bfloat16().float())
