"""Training of Medusa, Hydra and SpecFormer: what a row reads, what learns, the tree found, and what is stored."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from answerers import short_answers
from fixture_models import CALIBRATIONS
from safetensors.torch import load_file

from rayspec import export
from rayspec.artifacts import BIGRAM, write_artifacts
from rayspec.calibration.counting import add_up_pairs, pair_ids, partial_counts
from rayspec.config import load_config
from rayspec.training.acceptance import measure
from rayspec.training.data.answers import AnswersConfig, AnswerSet
from rayspec.training.drafter import train_drafter
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig, EvaluationConfig
from rayspec.training.drafter_runs import is_exported, plan
from rayspec.training.frozen_target import FrozenTarget
from rayspec.training.origin import new_drafter
from rayspec.training.recipe import Recipe
from rayspec.training.tree_acceptance import measure_tree
from rayspec.training.trees import parse_tree, rank_accuracy
from rayspec.training.ttt import backward_batch, roll_out
from sglang_ext.drafters import parse_drafter
from sglang_ext.drafters.checkpoint import load_drafter
from sglang_ext.drafters.training import Batch
from sglang_ext.folder_kinds import WEIGHTS
from sglang_ext.heads import parse_head
from sglang_ext.settings import build
from sglang_ext.trees.slim import SlimOptions, SlimTree
from sglang_ext.trees.static import StaticTree, chain_paths, greedy_paths

RECIPE = Recipe(num_steps=6, batch_size=4, warmup_steps=2, bfloat16=False, chunk_rows=16)
TREE = {"kind": "static", "nodes": 6, "topk": 3, "sequences": 4}
MEDUSA = DrafterEntry(
    name="medusa",
    draft_head=parse_head({"kind": "full"}),
    drafter=parse_drafter({"kind": "medusa", "positions": 3}),
    tree=parse_tree(TREE),
)
HYDRA = replace(MEDUSA, name="hydra", drafter=parse_drafter({"kind": "hydra", "positions": 3}))
SPECFORMER = replace(
    MEDUSA, name="specformer", drafter=parse_drafter({"kind": "specformer", "positions": 3}), tree=None
)
PREFIX = replace(
    HYDRA,
    name="hydra-prefix",
    drafter=parse_drafter({"kind": "hydra", "positions": 3, "prefix_layer": True, "mlp_layers": 2}),
)
HEADS = {"medusa": MEDUSA, "hydra": HYDRA, "hydra-prefix": PREFIX}
KINDS = {**HEADS, "specformer": SPECFORMER}
PATHS = greedy_paths([[0.5, 0.3, 0.2, 0.1, 0.1, 0.1]] * 3, 24)


@pytest.fixture(scope="session")
def answers(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> AnswerSet:
    folder = tmp_path_factory.mktemp("data") / "answers"
    return short_answers(folder, tiny_target, 8)


def random_drafter(target: FrozenTarget, head: DrafterEntry, answers: AnswerSet) -> Any:
    drafter = new_drafter(target, head, RECIPE, answers)
    generator = torch.Generator().manual_seed(3)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return drafter


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_row_reads_the_hidden_state_and_the_tokens_before_it(
    kind: str, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    """Position i at row p, which predicts x_{p+1}, drafts from x_{p-1-i}; the root of that draft is x_{p-i}."""
    drafter = random_drafter(tiny_target, KINDS[kind], answers)
    batch = Batch.of(answers, torch.tensor([5, 0]))
    rows = roll_out(drafter, tiny_target, batch, 3)
    for n in (0, 7, len(batch.position_N) - 1):
        b, p = int(batch.sequence_N[n]), int(batch.position_N[n])
        for i in range(3):
            # literally: the prompt as a server would have it, up to the token before the root
            known = batch.ids_BT[b : b + 1, : p - i]
            out = tiny_target.model.get_decoder()(input_ids=known, output_hidden_states=True)
            hidden_1H = out.last_hidden_state[:, -1]
            if kind == "specformer":
                layers = [out.hidden_states[j] for j in (0, 4, 7)]
                hidden_1H = drafter.context(torch.cat([*layers, out.last_hidden_state], dim=-1))[:, -1]
            if kind == "hydra-prefix":
                hidden_1H = drafter.context(out.last_hidden_state)[:, -1]
            path_1dH = tiny_target.embed(batch.ids_BT[b : b + 1, p - i : p + 1])
            own_1H = drafter.begin(hidden_1H, 3)[:, i]
            torch.testing.assert_close(rows.hidden_KNH[i, n], drafter.state(i, own_1H, path_1dH)[0])
        assert int(batch.next_ids_N[n]) == int(batch.ids_BT[b, p + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_weighted_cross_entropies(
    kind: str, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    batch = Batch.of(answers, torch.tensor([1, 2, 6]))
    chunked, whole = (random_drafter(tiny_target, KINDS[kind], answers) for _ in range(2))
    loss = backward_batch(chunked, tiny_target, batch, num_steps=3, decay=0.5, chunk_rows=7)
    rows = roll_out(whole, tiny_target, batch, 3)
    p_NV = tiny_target.distribution(rows.last_hidden_NG, torch.float32)
    total = torch.zeros(())
    for i, hidden_NH in enumerate(rows.hidden_KNH):
        logits_NV = hidden_NH @ whole.lm_head.at(i).weight.T
        cross_entropy = -(p_NV * logits_NV.log_softmax(dim=-1)).sum(dim=-1).mean()
        torch.testing.assert_close(loss.head_K[i], cross_entropy.detach(), rtol=1e-4, atol=1e-4)
        total = total + 0.5**i * cross_entropy
    total.backward()
    for (name, ours), reference in zip(chunked.named_parameters(), whole.parameters(), strict=True):
        assert reference.grad is not None
        assert reference.grad.abs().max() > 0, name
        torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-3, atol=1e-5, msg=name)


@torch.no_grad()
def test_rank_accuracy_counts_what_each_rank_gets_right(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    drafter = random_drafter(tiny_target, HYDRA, answers)
    found = rank_accuracy(drafter, tiny_target, answers, topk=4, sequences=3, recipe=RECIPE)
    greedy = (answers.temperature_N == 0).nonzero().squeeze(1)[:3]
    right, total = [[0] * 4 for _ in range(3)], 0
    for n in greedy.tolist():
        batch = Batch.of(answers, torch.tensor([n]))
        rows = roll_out(drafter, tiny_target, batch, 3)
        total += len(batch.position_N)
        for i in range(3):
            order = (rows.hidden_KNH[i] @ drafter.lm_head.at(i).weight.T).argsort(dim=-1, descending=True)
            for r in range(4):
                right[i][r] += int((order[:, r] == batch.next_ids_N).sum())
    assert found == [[count / total for count in counts] for counts in right]


def run_config(folder: Path, *heads: DrafterEntry, **changes: Any) -> DrafterTrainConfig:
    base = DrafterTrainConfig(
        target=str(folder / "tiny"),
        output_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        drafters=list(heads),
        answers=AnswersConfig(prompts="training", min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14),
        held_out=AnswersConfig(prompts="held_out", min_prompt_tokens=8, max_prompt_tokens=20, answer_tokens=14),
        recipe=RECIPE,
        evaluation=EvaluationConfig(draft_steps=5, every=4, sequences=2),  # more steps than there are positions
        checkpoint_every=2,
        log_every=2,
        mlflow=False,
    )
    return replace(base, **changes)


@pytest.fixture(scope="module")
def trained(tiny_target: FrozenTarget, answers: AnswerSet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for head in KINDS.values():
        train_drafter(run_config(folder, head), head, tiny_target, answers, answers)
    return folder


@pytest.mark.parametrize("kind", HEADS)
def test_training_learns_and_exports(
    kind: str, trained: Path, tiny_target: FrozenTarget, answers: AnswerSet, draw_training: Any
) -> None:
    drafter, info = load_drafter(trained / "out" / kind)
    report = json.loads((trained / "out" / kind / "training.json").read_text())
    assert report["history"][-1]["loss"] < report["history"][0]["loss"]
    assert [key for key in report["history"][0] if key.startswith("loss_step_")] == [f"loss_step_{i}" for i in range(3)]
    assert len(draw_training(report)) > 1000
    assert info.kind == HEADS[kind].family.kind
    assert info.target == tiny_target.info("tiny", ())
    assert info.provenance["drafter"] == HEADS[kind].drafter.entry()
    assert is_exported(run_config(trained, HEADS[kind]), HEADS[kind], tiny_target.sha256)
    assert len(report["held_out"]["u"]) == 3
    again = measure(drafter, tiny_target, answers, num_steps=3, batch_size=4, chunk_rows=16)
    assert again.u == pytest.approx(report["held_out"]["u"], abs=0.03)  # stored in bfloat16
    accuracy = rank_accuracy(drafter, tiny_target, answers, topk=3, sequences=4, recipe=RECIPE)
    assert len(info.tree.paths) == len(greedy_paths(accuracy, 5)) == 5


def test_specformer_learns_and_exports(trained: Path, tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    drafter, info = load_drafter(trained / "out" / "specformer")
    report = json.loads((trained / "out" / "specformer" / "training.json").read_text())
    assert report["history"][-1]["loss"] < report["history"][0]["loss"]
    assert info.target == tiny_target.info("tiny", (0, 4, 7, 8))
    assert info.provenance["drafter"] == {
        "kind": "specformer",
        **{"positions": 3, "shared_head": True, "causal": False, "position_projection": True},
    }
    again = measure(drafter, tiny_target, answers, num_steps=3, batch_size=4, chunk_rows=16)
    assert again.u == pytest.approx(report["held_out"]["u"], abs=0.03)  # stored in bfloat16
    assert is_exported(run_config(trained, SPECFORMER), SPECFORMER, tiny_target.sha256)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_head_in_bfloat16_is_trained_on_and_its_tree_measured(
    kind: str, tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    """Its rows are in the target's precision, the body in float32: what a position reads is in the body's."""
    entry = replace(KINDS[kind], freeze_head=True)
    recipe = replace(RECIPE, num_steps=1, warmup_steps=0, bfloat16=True)
    target = replace(tiny_target, model=copy.deepcopy(tiny_target.model).bfloat16())
    drafter = new_drafter(target, entry, recipe, answers)
    assert {p.dtype for p in drafter.lm_head.parameters()} == {torch.bfloat16}
    rows = roll_out(drafter, target, Batch.of(answers, torch.tensor([0])), 3)
    assert rows.hidden_KNH.dtype == torch.float32
    train_drafter(run_config(tmp_path, entry, recipe=recipe), entry, target, answers, answers)
    held_out = json.loads((tmp_path / "out" / kind / "training.json").read_text())["held_out"]
    assert (held_out["tree"]["tau"] >= 1) if entry.tree else "tree" not in held_out


@pytest.mark.parametrize(("kind", "least"), [("specformer", 0.7), ("hydra-prefix", 1.0)])
@torch.no_grad()
def test_an_untrained_drafter_with_attention_proposes_what_the_target_says_next(
    kind: str, least: float, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    drafter = new_drafter(tiny_target, KINDS[kind], RECIPE, answers)
    batch = Batch.of(answers, torch.arange(4))
    rows = roll_out(drafter, tiny_target, batch, 3)
    for i in range(3):
        says_NH = tiny_target.last_hidden(batch.ids_BT)[batch.sequence_N, batch.position_N - 1 - i]
        said_N = (says_NH @ tiny_target.head_VG.T).argmax(dim=-1)
        drafted_N = drafter.lm_head.at(i).best(rows.hidden_KNH[i], i).squeeze(1)
        # SpecFormer's start is near to the target, not equal to it
        assert (said_N == drafted_N).float().mean() >= least


@pytest.mark.parametrize("kind", ["hydra", "hydra-prefix"])
def test_an_interrupted_training_goes_on_as_if_it_had_not_been(
    kind: str, trained: Path, tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 4:
            raise Stop

    entry = HEADS[kind]
    config = run_config(tmp_path, entry, target=str(trained / "tiny"))
    with pytest.raises(Stop):
        train_drafter(config, entry, tiny_target, answers, answers, on_step=stop)
    train_drafter(config, entry, tiny_target, answers, answers)
    whole, parts = (load_file(folder / "out" / kind / WEIGHTS) for folder in (trained, tmp_path))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_an_exported_drafter_is_known_again_and_another_one_refused(
    trained: Path, tiny_target: FrozenTarget, tiny_target_folder: Path
) -> None:
    config = run_config(trained, MEDUSA)
    assert is_exported(config, MEDUSA, tiny_target.sha256)
    spelled_out = replace(MEDUSA, drafter=parse_drafter({"kind": "medusa", "positions": 3, "shared_head": False}))
    assert is_exported(config, spelled_out, tiny_target.sha256)
    for other in (
        replace(MEDUSA, tree=parse_tree({**TREE, "nodes": 5})),
        replace(MEDUSA, drafter=parse_drafter({"kind": "medusa"})),
    ):
        with pytest.raises(ValueError, match=r"holds a drafter with (tree|drafter)"):
            is_exported(config, other, tiny_target.sha256)
    lines = plan(replace(config, target=str(tiny_target_folder)))
    assert any(line.startswith(f"medusa {MEDUSA.drafter} {{'kind': 'full'}} -> ") for line in lines)


def test_another_tree_and_another_head_on_a_trained_base(
    trained: Path, tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path
) -> None:
    (trained / "tree.json").write_text(json.dumps(chain_paths(3)))
    tree = {"kind": "static", "file": str(trained / "tree.json")}
    chain = replace(MEDUSA, name="chain", base="medusa", tree=parse_tree(tree))
    routed = replace(
        MEDUSA, name="routed", base="medusa", draft_head=parse_head({"kind": "specvocab", "rank": 4, "size": 20})
    )
    for head in (chain, routed):
        train_drafter(run_config(trained, head), head, tiny_target, answers, answers)
    base, made = (load_drafter(trained / "out" / name)[0] for name in ("medusa", "chain"))
    assert made.draft_tree.paths == chain_paths(3)
    assert load_file(trained / "out" / "chain" / WEIGHTS) == {}  # all is the base's
    assert all(torch.equal(t, made.state_dict()[name]) for name, t in base.state_dict().items())
    assert set(load_file(trained / "out" / "routed" / WEIGHTS)) == {
        f"lm_head.{i}.{name}" for i in range(3) for name in ("down", "up")
    }
    wrong = replace(chain, name="wrong", drafter=parse_drafter({"kind": "medusa", "positions": 2}))
    with pytest.raises(ValueError, match="leave those options as they are there"):
        train_drafter(run_config(trained, wrong), wrong, tiny_target, answers, answers)
    wrong = replace(chain, name="wrong", drafter=parse_drafter({"kind": "hydra", "positions": 3}))
    with pytest.raises(ValueError, match=r"of kind medusa, but drafter\.kind is hydra"):
        train_drafter(run_config(trained, wrong), wrong, tiny_target, answers, answers)


def test_slim_on_a_trained_base(trained: Path, tiny_target: FrozenTarget, answers: AnswerSet, tmp_path: Path) -> None:
    V, info = len(tiny_target.head_VG), tiny_target.info("tiny")
    pairs = add_up_pairs([partial_counts(pair_ids(np.arange(9), np.arange(9) + 1))], V, "toy")
    target = {"name": "tiny", "vocab_size": V, "tokenizer_sha256": info.tokenizer_sha256}
    tensors = dict(zip((*BIGRAM, "counts"), (*pairs, pairs.second_V), strict=True))
    write_artifacts(tmp_path / "pairs", tensors, {"target": target, "stop_ids": [0], "rule": {"kind": "bigram"}}, {})
    tree = {"kind": "slim", "bigram": str(tmp_path / "pairs"), "hypotheses": 3, "unseen": "zero"}
    slim = replace(MEDUSA, name="slim", base="medusa", tree=parse_tree(tree))
    plain = replace(MEDUSA, name="slim-r1", base="medusa", tree=parse_tree({"kind": "slim", "correlation": False}))
    for head in (slim, plain):
        train_drafter(run_config(trained, head), head, tiny_target, answers, answers)
    made, info = load_drafter(trained / "out" / "slim")
    assert (info.tree.pairs, info.tree.hypotheses, info.tree.unseen) == (9, 3, "zero")
    assert torch.equal(made.draft_tree.bigram_ids.long(), pairs.ids_P)
    assert set(load_file(trained / "out" / "slim" / WEIGHTS)) == {f"draft_tree.{name}" for name in BIGRAM}
    assert load_drafter(trained / "out" / "slim-r1")[1].tree.pairs == 0
    wrong = replace(
        slim, name="wrong", tree=parse_tree({"kind": "slim", "bigram": str(CALIBRATIONS / "vocabtrim-2048")})
    )
    with pytest.raises(ValueError, match="was made for target"):
        train_drafter(run_config(trained, wrong), wrong, tiny_target, answers, answers)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "slim": ({"drafter": {"kind": "medusa"}, "tree": {"kind": "slim"}}, "name the calibration of the pairs"),
    "slim_unseen": (
        {"drafter": {"kind": "medusa"}, "tree": {"kind": "slim", "bigram": "b", "unseen": "two"}},
        "unseen must be one of zero, one, smoothed",
    ),
    "slim_hydra": (
        {"drafter": {"kind": "hydra"}, "tree": {"kind": "slim", "bigram": "b"}},
        "of kind hydra, which reads the path",
    ),
    "kind": (
        {"drafter": {"kind": "meduza"}},
        "drafter.kind must be one of eagle3, eagle, medusa, hydra.*, got 'meduza'",
    ),
    "option": ({"drafter": {"kind": "medusa", "heads": 4}}, "unknown key 'drafter.heads'"),
    "positions": ({"drafter": {"kind": "hydra", "positions": 0}}, r"drafter.positions must be in 1\.\.\d+, got 0"),
    "prefix_medusa": ({"drafter": {"kind": "medusa", "prefix_layer": True}}, "unknown key 'drafter.prefix_layer'"),
    "prefix_slim": (
        {"drafter": {"kind": "hydra", "prefix_layer": True}, "tree": {"kind": "slim", "bigram": "b"}},
        "of kind hydra, which reads the path",
    ),
    "prefix_type": ({"drafter": {"kind": "hydra", "prefix_layer": 1}}, "prefix_layer must be true or false"),
    "mlp_layers": ({"drafter": {"kind": "hydra", "mlp_layers": 0}}, r"drafter.mlp_layers must be in 1\.\.64, got 0"),
    "tree_kind": ({"drafter": {"kind": "medusa"}, "tree": {"kind": "eagle2"}}, "tree.kind must be one of static, slim"),
    "tree_option": ({"drafter": {"kind": "medusa"}, "tree": {"kind": "static", "node": 3}}, "unknown key 'tree.node'"),
    "tree_nodes": ({"drafter": {"kind": "medusa"}, "tree": {"kind": "static", "nodes": 1}}, "nodes must be at least 2"),
    "eagle_tree": ({"tree": {"kind": "static"}}, "which builds its tree as it drafts"),
    "specformer_tree": (
        {"drafter": {"kind": "specformer"}, "tree": {"kind": "static"}},
        r"served as a chain; leave drafters\[x\]\.tree out",
    ),
    "eagle_options": (
        {"drafter": {"kind": "eagle3", "positions": 2}},
        "unknown key 'drafter.positions'; known under drafter: none",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_configs_are_refused(fault: str) -> None:
    changes, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        build(DrafterEntry, {"name": "x", "draft_head": {"kind": "full"}, **changes})


def test_there_is_no_stock_form(trained: Path) -> None:
    with pytest.raises(ValueError, match="SGLang has no stock form of a medusa drafter"):
        export.prepare(export.ExportConfig(drafters=[str(trained / "out" / "medusa")]))


def test_csra_needs_an_eagle_body() -> None:
    with pytest.raises(ValueError, match=r"which drafters\[medusa\] has not"):
        DrafterTrainConfig(drafters=[MEDUSA], recipe=Recipe(csra_weight=0.1))


def test_from_yaml(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "drafters:\n- {name: m, draft_head: {kind: full}, drafter: {kind: medusa}, tree: {kind: static, nodes: 8}}\n"
    )
    head = load_config(DrafterTrainConfig, str(tmp_path / "c.yaml"), []).drafters[0]
    assert head.asked() == {
        "drafter": {"kind": "medusa", "positions": 4, "shared_head": False},
        "tree": {"kind": "static", "nodes": 8, "topk": 10, "sequences": 64, "file": None},
    }


@pytest.mark.parametrize("kind", ["static", "slim"])
@torch.no_grad()
def test_tree_acceptance_is_that_of_literal_decoding(
    kind: str, trained: Path, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    drafter, _ = load_drafter(trained / "out" / "medusa")
    tree = StaticTree(PATHS) if kind == "static" else SlimTree(SlimOptions(correlation=False, hypotheses=9), 257)
    proposer = tree.fit(3, 6, len(PATHS) + 1 if kind == "static" else 32, torch.device("cpu"))
    found = measure_tree(drafter, proposer, tiny_target, answers, draft_steps=3)
    emitted = nodes = steps = 0
    for n in (answers.temperature_N == 0).nonzero().squeeze(1).tolist():
        ids = answers.token_ids_NL[n, : int(answers.length_N[n])].tolist()
        place = int(answers.prompt_length_N[n])
        while place < len(ids) - 3:
            hidden = tiny_target.last_hidden(torch.tensor([ids[:place]]))[:, -1]
            draft = proposer.propose(drafter, hidden, torch.tensor([ids[place]]), tiny_target.embed)
            node, accepted = 0, 0
            while True:  # as a server walks the links
                child = int(draft.links.first_child_BN[0, node])
                while child != -1 and int(draft.tokens_BN[0, child]) != ids[place + accepted + 1]:
                    child = int(draft.links.next_sibling_BN[0, child])
                if child == -1:
                    break
                node, accepted = child, accepted + 1
            emitted, steps, place = emitted + 1 + accepted, steps + 1, place + 1 + accepted
            nodes += proposer.num_nodes if draft.num_nodes_B is None else int(draft.num_nodes_B[0])
    assert found.steps == steps
    assert found.tau == pytest.approx(emitted / steps)
    assert found.nodes == pytest.approx(nodes / steps)
    assert found.tau > 1, "something was to be accepted"


def test_measuring_a_tree_leaves_the_head_as_it_was(tiny_target: FrozenTarget, answers: AnswerSet) -> None:
    """Hydra tells its head how many rows a tree has at each level; what follows has one a request again."""
    drafter = random_drafter(tiny_target, HYDRA, answers)
    proposer = StaticTree(PATHS).fit(3, 6, len(PATHS) + 1, torch.device("cpu"))
    assert proposer.rows_by_level()[1] > 1
    measure_tree(drafter, proposer, tiny_target, answers, draft_steps=3)
    assert [drafter.lm_head.at(step).rows_of_a_request(step) for step in range(3)] == [1, 1, 1]
