"""Counts against published tables and against PyTorch's own counter."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_models import DRAFTERS, TARGET
from synthetic import synthetic_request
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rayspec.costs import ModelCosts, TargetCost, cost_metrics, drafter_cost, mbsu, read_costs, step_flops, target_cost
from rayspec.farm.load import Traffic
from rayspec.records import BlockRecord, Measured, StepSeconds
from rayspec.sweep.candidate import Candidate, Head
from rayspec.sweep.config import SweepConfig
from rayspec.sweep.plan.trials import Trial
from rayspec.sweep.record.results import score
from rayspec.sweep.shape import DraftShape
from sglang_ext.drafters import family, parse_drafter
from sglang_ext.drafters.checkpoint import load_drafter, save_drafter
from sglang_ext.drafters.counting import DecoderCost, StepShape, head_cost, known_shortlist
from sglang_ext.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from sglang_ext.drafters.rope import Rope
from sglang_ext.drafters.shared.features.cost import FeatureCost
from sglang_ext.drafters.specformer import SpecFormerConfig, SpecFormerDrafter, specformer_taps
from sglang_ext.drafters.target import TargetInfo
from sglang_ext.heads import DraftHead, head_from_target, parse_head
from sglang_ext.trees.static import StaticProposer, StaticTree, chain_paths

V = 128_256
LLAMA_3B = 3_212_749_824  # parameters of Llama-3.2-3B, tied
LLAMA_8B = 8_030_261_248  # of Llama-3.1-8B


def eagle_params(hidden: int, intermediate: int, vocabulary: int) -> int:
    """An EAGLE drafter of a Llama-3 target: embedding, fc, one layer with 8 key heads of 128, LM head."""
    layer = hidden * (2 * hidden + 2 * 1024) + 3 * hidden * intermediate + 2 * hidden
    return V * hidden + 2 * hidden * hidden + hidden + layer + vocabulary * hidden


@pytest.mark.parametrize(
    ("tau", "head", "published"),
    [
        (3.237, V, 1.52),
        (3.193, 32768, 1.809),
        (2.937, V, 1.379),
        (2.860, 5000, 1.725),
        (3.638, V, 1.708),
        (3.434, 32768, 1.945),
    ],
    ids=["dolly_full", "dolly_trimmed", "xlam_full", "xlam_trimmed", "coding_full", "coding_trimmed"],
)
def test_mbsu_gives_vocabtrim_s_table_of_the_3b_target(tau: float, head: int, published: float) -> None:
    drafter = eagle_params(3072, 8192, head)
    assert mbsu(tau, 4 * drafter, LLAMA_3B) == pytest.approx(published, abs=0.002)


@pytest.mark.parametrize(("tau", "head", "published"), [(3.134, V, 1.910), (3.096, 32768, 2.140)])
def test_mbsu_gives_vocabtrim_s_table_of_the_8b_target(tau: float, head: int, published: float) -> None:
    drafter = eagle_params(4096, 14336, head)
    assert mbsu(tau, 4 * drafter, LLAMA_8B) == pytest.approx(published, rel=0.006)


@pytest.mark.parametrize(("tau", "published"), [(3.675, 2.642)])
def test_mbsu_of_the_independent_drafter(tau: float, published: float) -> None:
    assert mbsu(tau, 4 * 314_000_000, LLAMA_3B) == pytest.approx(published, abs=0.002)


def counted_flops(run: object) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()  # type: ignore[operator]
    return counter.get_total_flops()


@pytest.mark.parametrize("rows", [1, 7])
def test_target_flops_are_those_that_pytorch_counts(rows: int) -> None:
    """The counter takes attention as full, so that every row meets as many keys as there are rows."""
    cost = target_cost(str(TARGET))
    model = AutoModelForCausalLM.from_pretrained(TARGET, attn_implementation="eager", dtype=torch.float32)
    assert cost.params == sum(p.numel() for p in model.parameters())
    assert cost.decoder is not None
    ids = torch.arange(rows)[None]
    assert counted_flops(lambda: model(ids)) == cost.decoder.flops(rows, rows)


@pytest.mark.parametrize("kind", ["full", "slimspec"])
@pytest.mark.parametrize("rows", [1, 5])
def test_drafter_flops_are_those_that_pytorch_counts(kind: str, rows: int) -> None:
    path = str(DRAFTERS[kind])
    cost = drafter_cost(path)
    drafter, info = load_drafter(path)
    H = info.body.hidden_size
    taps, embed = torch.randn(1, rows, H * len(info.body.tap_layers)), torch.randn(1, rows, H)
    positions = torch.arange(rows)[None]
    assert counted_flops(lambda: drafter.fuse(taps)) == rows * cost.fuse_flops
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of a CPU is not in the counter's list
        layer = counted_flops(lambda: drafter.step(embed, embed, positions, []))
    assert layer == cost.layer.flops(rows, rows)
    assert counted_flops(lambda: drafter.lm_head.best(embed[0], 0)) == cost.head.cost(rows).flops
    expected = sum(p.numel() for p in drafter.parameters())
    assert cost.params == expected


@pytest.mark.parametrize(
    ("kind", "options"), [("medusa", {}), ("hydra", {}), ("hydra", {"prefix_layer": True, "mlp_layers": 3})]
)
@pytest.mark.parametrize("shared_head", [True, False])
def test_last_hidden_flops_are_those_that_pytorch_counts(
    kind: str, options: dict[str, Any], shared_head: bool, tmp_path: Path
) -> None:
    V, H = 80, 16
    own = family(kind)
    layer = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    layer |= {"rms_norm_eps": 1e-5, "rope": Rope().to_json()}
    sizes = {"hidden_size": H, "vocab_size": V, "max_position_embeddings": 256, **layer}
    config = own.config_class.from_options(
        parse_drafter({"kind": kind, "positions": 3, "shared_head": shared_head, **options}), sizes
    )
    head = config.heads(lambda: head_from_target(parse_head({"kind": "slimspec", "rank": 4}), torch.randn(V, H)))
    paths = [(0,), (1,), (2,), (0, 0), (1, 0), (0, 1), (0, 0, 0), (1, 0, 0)]
    target = TargetInfo(name="toy", hidden_size=H, vocab_size=V, tokenizer_sha256="", tap_layers=())
    drafter = own.drafter_class(config, head, StaticTree(paths))
    save_drafter(tmp_path / "d", drafter, target)
    cost = drafter_cost(str(tmp_path / "d"))
    assert cost.params == sum(p.numel() for p in drafter.parameters())
    embedding = torch.randn(V, H)
    for shape, nodes in (
        (StepShape(draft_steps=2, num_draft_tokens=3), chain_paths(2)),
        (StepShape(draft_steps=3, topk=3, num_draft_tokens=9), paths),
        (StepShape(draft_steps=3, topk=2, num_draft_tokens=5), ((0,), (1,), (0, 0), (1, 0))),  # of two levels
    ):
        proposer = StaticProposer(nodes, torch.device("cpu"))

        def step(proposer: StaticProposer = proposer, verified: int = shape.num_draft_tokens) -> None:
            hidden_1TH = torch.randn(1, verified, H)
            carried_1TH = drafter.context(hidden_1TH) if options else hidden_1TH
            proposer.propose(drafter, carried_1TH[:, -1], torch.tensor([3]), lambda i: embedding[i])

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of a CPU is not in the counter's list
            assert counted_flops(step) == cost.drafting(shape, keys=shape.num_draft_tokens), shape


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_positions_that_do_not_draft_are_not_read(kind: str) -> None:
    own, sizes = family(kind), {"hidden_size": 16, "vocab_size": 80, "max_position_embeddings": 256}
    config = own.config_class.from_options(parse_drafter({"kind": kind, "positions": 3}), sizes)
    heads = config.heads(lambda: head_from_target(parse_head({"kind": "full"}), torch.randn(80, 16)))
    drafter = own.drafter_class(config, heads)
    cost = own.count(drafter, 2)
    of_one = cost.read_bytes(StepShape(draft_steps=1, num_draft_tokens=2), 0)
    of_all = cost.read_bytes(StepShape(draft_steps=3, num_draft_tokens=4), 0)
    later = sum(p.numel() for i in (1, 2) for part in drafter.parts(i) for p in part.parameters())
    head = cost.head.at(0).cost(1).bytes
    assert later > 0
    assert of_all - of_one == 2 * later + 2 * head


@pytest.mark.parametrize("options", [{}, {"position_projection": False}, {"shared_head": False}])
def test_specformer_flops_are_those_that_pytorch_counts(options: dict[str, bool], tmp_path: Path) -> None:
    V, H, rows = 80, 16, 5
    config = SpecFormerConfig(
        hidden_size=H,
        vocab_size=V,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope=Rope(),
        tap_layers=specformer_taps(6),
        **options,
    )
    head = config.heads(lambda: head_from_target(parse_head({"kind": "slimspec", "rank": 4}), torch.randn(V, H)))
    target = TargetInfo(name="toy", hidden_size=H, vocab_size=V, tokenizer_sha256="", tap_layers=config.tap_layers)
    drafter = SpecFormerDrafter(config, head)
    save_drafter(tmp_path / "d", drafter, target)
    cost = drafter_cost(str(tmp_path / "d"))
    assert cost.params == sum(p.numel() for p in drafter.parameters())
    proposer = StaticProposer(chain_paths(3), torch.device("cpu"))

    def step() -> None:
        context = drafter.context(torch.randn(1, rows, 4 * H))[:, -1]
        proposer.propose(drafter, context, torch.tensor([3]), lambda i: torch.zeros(len(i), H))

    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel of a CPU is not in the counter's list
        counted = counted_flops(step)
    assert counted == cost.drafting(StepShape(draft_steps=3, num_draft_tokens=rows), keys=rows)


def test_a_step_is_the_sum_of_its_passes() -> None:
    target = DecoderCost(flops_per_row=100, flops_per_row_and_key=1)
    assert step_flops(target, None, StepShape(), keys=10) == 110
    drafter = drafter_cost(str(DRAFTERS["slimspec"]))
    chain = step_flops(target, drafter, StepShape(draft_steps=3, topk=1, num_draft_tokens=4), keys=10)
    own = drafter.layer.flops(4 + 2, 10) + 4 * drafter.fuse_flops + 3 * drafter.head.cost(1).flops
    assert chain == 4 * 110 + own


def test_metrics_of_a_trial(make_request: object) -> None:
    request = make_request("a", (0, 0, 8), 0.1)  # type: ignore[operator]
    target, drafter = target_cost(str(TARGET)), drafter_cost(str(DRAFTERS["full"]))
    shape = StepShape(draft_steps=2, topk=1, num_draft_tokens=3)
    m = cost_metrics({"tau": 3.0}, [request], shape, target, drafter)
    assert target.decoder is not None
    keys = request.prompt_tokens + request.output_tokens / 2
    assert m["gflops_per_token"] == pytest.approx(step_flops(target.decoder, drafter, shape, keys) / 3 / 1e9)
    # of a dense head in 16 bits the rule of the tables, but for the states and logits that go in and out
    by_params = mbsu(3.0, 2 * (drafter.params + target.embedding_params), target.params)
    assert m["mbsu"] == pytest.approx(by_params, rel=5e-3)
    assert m["budget_kappa"] == 3.0
    tree = StepShape(draft_steps=2, topk=4, num_draft_tokens=9)
    assert cost_metrics({"tau": 3.0}, [request], tree, target, drafter)["budget_kappa"] == pytest.approx(3 * 2 / 8)
    counted = StepShape(draft_steps=2, topk=4, num_draft_tokens=9, counted=5.0)  # of 9 that were asked for
    asked = StepShape(draft_steps=2, topk=4, num_draft_tokens=5)
    assert cost_metrics({"tau": 3.0}, [request], counted, target, drafter) == cost_metrics(
        {"tau": 3.0}, [request], asked, target, drafter
    )
    assert "mbsu" not in cost_metrics({}, [request], StepShape(), target, None)
    assert cost_metrics({}, [request], shape, target, drafter) == {}  # no tau


TOY_V, TOY_H = 512, 64
CLUSTERS_V = torch.arange(TOY_V).clamp(min=0) % 17  # sixteen of 30 or 31 tokens, and the pinned one
ROUTED = {"kind": "dynaspec", "clusters": 16, "first": 4, "later": 1, "rule": "fixed", "router_width": 8}
HEADS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "int4": {"kind": "full", "weight_format": "int4"},
    "constant": {"kind": "truncated", "size": 200},
    "shrinking": {"kind": "truncated", "size": 200, "step_sizes": [200, 200, 60]},
    "routed": ROUTED,
    "routed_union": {**ROUTED, "union": "request"},
    "routed_first": {**ROUTED, "first": 16},
}


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FeatureCost]:
    folder = tmp_path_factory.mktemp("drafters")
    body = Eagle3Config(
        hidden_size=TOY_H,
        vocab_size=TOY_V,
        max_position_embeddings=64,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        target_hidden_size=TOY_H,
        tap_layers=(2, 4, 5),
        rope=Rope(),
    )
    target = TargetInfo(
        name="toy", hidden_size=TOY_H, vocab_size=TOY_V, tokenizer_sha256="abc", tap_layers=body.tap_layers
    )
    found = {}
    for name, spec in HEADS.items():
        maps = {"ids": torch.arange(TOY_V), "cluster_of": CLUSTERS_V}
        drafter = Eagle3Drafter(body, head_from_target(parse_head(spec), torch.randn(TOY_V, TOY_H), maps))
        for part in drafter.children():
            if part is not drafter.lm_head:
                for parameter in part.parameters():
                    torch.nn.init.ones_(parameter)
        drafter.lm_head.quantize()
        save_drafter(folder / name, drafter, target)
        cost = drafter_cost(str(folder / name))
        assert isinstance(cost, FeatureCost)
        found[name] = cost
    return found


def step_of(cost: FeatureCost, *scored: float) -> tuple[float, float]:
    """(bytes that the head moves, FLOPs of drafting) of a step of three drafts."""
    step = StepShape(draft_steps=3, num_draft_tokens=4, scored=scored)
    assert cost.read_bytes(step, 1000) == 3 * (cost.body_bytes + 1000) + head_cost(cost.head, step.rows, step).bytes
    return head_cost(cost.head, step.rows, step).bytes, cost.drafting(step, keys=10)


def test_a_head_in_fewer_bits_reads_fewer_bytes_for_the_same_products(costs: dict[str, FeatureCost]) -> None:
    (full, flops), (four, same) = step_of(costs["full"]), step_of(costs["int4"])
    assert flops == same
    assert 0.25 < four / full < 0.31  # 4 bits of 16, scales, states and logits
    request = StepShape(draft_steps=3, num_draft_tokens=4)
    assert costs["full"].read_bytes(request, 0) - costs["int4"].read_bytes(request, 0) == full - four


def test_a_head_that_shrinks_with_the_draft_step_costs_less_at_later_ones(costs: dict[str, FeatureCost]) -> None:
    bytes_, flops = step_of(costs["shrinking"])
    assert bytes_ == sum(n * (2 * TOY_H + 8) + 2 * (n + TOY_H) for n in (200, 200, 60))
    assert step_of(costs["constant"])[1] - flops == 2 * TOY_H * (200 - 60)


def test_a_routed_head_costs_what_it_was_seen_to_score(costs: dict[str, FeatureCost]) -> None:
    estimated, measured = step_of(costs["routed"]), step_of(costs["routed"], 100.0, 50.0, 40.0)
    pinned = int((CLUSTERS_V == 0).sum())
    more = sum(pinned + n * (TOY_V - pinned) // 16 for n in (4, 1, 1)) - (100 + 50 + 40)
    assert more > 0
    assert estimated[1] - measured[1] == 2 * TOY_H * more
    assert estimated[0] - measured[0] == more * (2 * TOY_H + 2 + 8)
    assert step_of(costs["full"], 100.0, 50.0, 40.0) == step_of(costs["full"])  # nothing to choose


TREE = {"draft_steps": 3, "topk": 4, "num_draft_tokens": 9}


@pytest.mark.parametrize(("head", "later"), [("routed", 4 * (2 * TOY_H + 2 + 8)), ("routed_union", 2 * (TOY_H + 4))])
def test_a_tree_costs_at_each_position_what_was_scored_there(
    costs: dict[str, FeatureCost], head: str, later: int
) -> None:
    """One row at the root, four of them later, and a budget that falls: 100 tokens, then 70, then 50. `later`: bytes of
    a token that a later position scores, gathered by each row, or read once and its four logits written."""
    own = costs[head].head
    assert isinstance(own, DraftHead)

    def moved(*scored: float) -> int:
        return head_cost(own, [1, 4, 4], StepShape(**TREE, scored=scored)).bytes

    root = 2 * TOY_H + 2 + 8
    assert moved(100, 70, 50) - moved(99, 70, 50) == root
    assert moved(100, 70, 50) - moved(100, 69, 50) == later
    assert moved(100, 70, 50) - moved(100, 70, 49) == later
    mean = (100 + 4 * 70 + 4 * 50) / 9  # of all rows: only where each row gathers its own is that the same
    assert (moved(mean, mean, mean) < 0.95 * moved(100, 70, 50)) == (head == "routed_union")


def clocked(**counted: Any) -> StepSeconds:
    return StepSeconds(steps=8, requests=8, verified_tokens=72, head_s=0, draft_s=0, verify_s=0, **counted)


def scored_trial(drafter: FeatureCost, clock: StepSeconds | None, head: str = "routed") -> Mapping[str, float]:
    """Metrics of a tree's trial, whose blocks have this clock."""
    candidate = Candidate(
        label=head,
        path="/routed",
        head=Head(kind="dynaspec"),
        draft_steps=3,
        shape=DraftShape(topk=4, num_draft_tokens=9),
    )
    trial = Trial(candidate=candidate, traffic=Traffic(concurrency=1))
    requests = (synthetic_request("a", (0, 4, 4, 0), 0.1),)
    block = BlockRecord(index=0, prompt_block=0, measured=Measured(wall_s=1, requests=requests, step_seconds=clock))
    models = ModelCosts(target=target_cost(str(TARGET)), drafters={head: drafter})
    (result,) = score(SweepConfig(), {trial: [block]}, {}, {}, models)
    return result.metrics


def test_a_trial_costs_what_its_blocks_counted_at_each_position(costs: dict[str, FeatureCost]) -> None:
    counted = clocked(
        scoring_rows=9,
        scored_tokens=580,
        scoring_rows_by_position=(1, 4, 4),
        scored_tokens_by_position=(100, 280, 200),
    )
    found, shape = scored_trial(costs["routed_union"], counted), StepShape(**TREE, scored=(100, 70, 50))
    assert found["shortlist_mean"] == pytest.approx(580 / 9)
    target = target_cost(str(TARGET))
    drafted_bytes = costs["routed_union"].read_bytes(shape, 2 * target.embedding_params)
    assert found["mbsu"] == pytest.approx(mbsu(found["tau"], drafted_bytes, 2 * target.params))


@pytest.mark.parametrize(
    "clock", [None, clocked(scoring_rows=9, scored_tokens=580)], ids=["uncounted", "of_an_older_journal"]
)
def test_a_routed_head_without_counts_by_position_has_no_costs(
    costs: dict[str, FeatureCost], clock: StepSeconds | None
) -> None:
    """A mean over all positions was put at each of them, which a tree's rows are not spread over evenly."""
    found = scored_trial(costs["routed"], clock)
    assert not {"mbsu", "gflops_per_token"} & set(found)
    assert "budget_kappa" in found
    assert {"mbsu", "gflops_per_token"} <= set(scored_trial(costs["shrinking"], clock, "shrinking"))


@pytest.mark.parametrize(
    ("head", "mean", "most"),
    [
        ("full", TOY_V, TOY_V),
        ("int4", TOY_V, TOY_V),
        ("constant", 200, 200),
        ("shrinking", (200 + 4 * 200 + 4 * 60) / 9, 200),
        ("routed", None, None),
    ],
)
def test_what_a_head_scores_for_every_row_needs_no_count(
    costs: dict[str, FeatureCost], head: str, mean: float | None, most: int | None
) -> None:
    """As on an accelerator, which counts nothing; what was counted stays."""
    known = scored_trial(costs[head], None, head)
    assert (known.get("shortlist_mean"), known.get("shortlist_max")) == (mean, most)
    counted = scored_trial(costs[head], clocked(scoring_rows=2, scored_tokens=7, most_scored=4), head)
    assert (counted["shortlist_mean"], counted["shortlist_max"]) == (3.5, 4)


def test_a_draft_of_all_clusters_has_a_known_shortlist_at_its_positions_alone(costs: dict[str, FeatureCost]) -> None:
    """16 of 16 at the first position, one later."""
    head = costs["routed_first"]
    assert known_shortlist(head, StepShape(draft_steps=1, num_draft_tokens=2)) == {
        "shortlist_mean": TOY_V,
        "shortlist_max": TOY_V,
    }
    assert known_shortlist(head, StepShape(draft_steps=2, num_draft_tokens=3)) is None


@pytest.mark.parametrize(
    ("change", "settings", "has_bytes"),
    [
        ({}, {}, True),
        ({}, {"load_format": "dummy", "quantization": None}, True),
        ({}, {"quantization": "unquant"}, True),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, {}, False),
        ({}, {"quantization": "fp8"}, False),
        ({}, {"load_format": "bitsandbytes"}, False),
        ({}, {"speculative_draft_model_quantization": "fp8"}, False),
    ],
    ids=["as_it_is", "dummy", "unquantised", "checkpoint", "setting", "load_format", "drafter"],
)
def test_bytes_of_quantised_weights_are_not_counted(
    change: dict[str, Any], settings: dict[str, Any], has_bytes: bool, tmp_path: Path, make_request: object
) -> None:
    """At 16 bits they would be too many of the target's, and the MBSU too large; its products are the same."""
    (tmp_path / "config.json").write_text(json.dumps(json.loads((TARGET / "config.json").read_text()) | change))
    counted = read_costs(str(tmp_path), {"full": str(DRAFTERS["full"])}, settings=settings)
    assert counted is not None
    request = make_request("a", (0, 0, 8), 0.1)  # type: ignore[operator]
    shape = StepShape(draft_steps=2, num_draft_tokens=3)
    found = cost_metrics({"tau": 3.0}, [request], shape, counted.target, counted.drafters["full"])
    assert ("mbsu" in found) == has_bytes
    assert {"gflops_per_token", "budget_kappa"} <= set(found)


def test_modelopt_s_own_file_says_that_a_target_is_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((TARGET / "config.json").read_bytes())
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert not target_cost(str(tmp_path)).is_read_whole


def test_experts_have_no_costs_here(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 1, "vocab_size": 16}
    MixtralConfig(**tiny, num_local_experts=2).save_pretrained(tmp_path)
    mixture = target_cost(str(tmp_path))
    assert (mixture.decoder, mixture.is_read_whole) == (None, False)
    LlamaConfig(**tiny, tie_word_embeddings=True).save_pretrained(tmp_path)
    cost = target_cost(str(tmp_path))
    assert cost.params == sum(p.numel() for p in LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path)).parameters())
    assert cost.embedding_params == 16 * 8
    assert cost.is_read_whole


def test_a_trial_of_a_mixture_of_experts_has_neither(costs: dict[str, FeatureCost], make_request: object) -> None:
    target = TargetCost(params=10**9, embedding_params=10**6, decoder=None, is_read_whole=False)
    request = make_request("a", (0, 0, 8), 0.1)  # type: ignore[operator]
    shape = StepShape(draft_steps=2, num_draft_tokens=3)
    assert set(cost_metrics({"tau": 3.0}, [request], shape, target, costs["full"])) == {"budget_kappa"}
