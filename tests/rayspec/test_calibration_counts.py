"""What is counted: text, answers, drafts. The pipeline itself runs in tests/jobs/test_calibrate.py."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from answerers import answer_in_process

from rayspec.calibration import counting
from rayspec.calibration.config import CalibrationConfig, NamedRule
from rayspec.calibration.counting import add_up, add_up_pairs, pair_ids, partial_counts
from rayspec.calibration.prepare import prepare
from rayspec.calibration.rules.clusters import KMeans
from rayspec.calibration.sources.drafts import DraftSettings, answer_columns, answer_rows, proposals
from rayspec.calibration.sources.kinds import Context, DraftTokens, RawText, TargetAnswers
from rayspec.calibration.sources.texts import counter_of, pair_counter_of
from rayspec.config import load_config
from rayspec.training.acceptance import _rollout
from rayspec.training.data.answers import AnswersConfig, AnswerSet, read_answers
from rayspec.training.data.sources import CorpusConfig
from rayspec.training.frozen_target import FrozenTarget
from sglang_ext.drafters.checkpoint import save_drafter
from sglang_ext.drafters.eagle3 import Eagle3Drafter
from sglang_ext.drafters.eagle3.config import Eagle3Options
from sglang_ext.drafters.eagle3.training import config_for
from sglang_ext.drafters.training import Batch
from sglang_ext.heads import head_from_target, parse_head


@pytest.fixture(scope="module")
def work_folder(tiny_target: FrozenTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As rayspec train leaves it."""
    folder = tmp_path_factory.mktemp("work")
    config = AnswersConfig(count=6, min_prompt_tokens=6, max_prompt_tokens=9, answer_tokens=12, batch_size=4)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 257, (6 + n % 4,), generator=generator).tolist() for n in range(6)]
    answer_in_process(folder / "answers", tiny_target, config, prompts)
    return folder


@pytest.fixture(scope="module")
def context(tiny_target: FrozenTarget, work_folder: Path) -> Context:
    return Context(
        target_folder=tiny_target.folder,
        target_name="tiny",
        tokenizer_sha256=tiny_target.info().tokenizer_sha256,
        work_folder=work_folder,
        corpus=CorpusConfig(),
    )


@pytest.fixture(scope="module")
def answers(work_folder: Path) -> AnswerSet:
    return read_answers(work_folder / "answers")


@pytest.fixture(scope="module")
def drafter(tiny_target: FrozenTarget) -> Eagle3Drafter:
    drafter = Eagle3Drafter(
        config_for(tiny_target, Eagle3Options()), head_from_target(parse_head({"kind": "full"}), tiny_target.head_VG)
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return drafter.requires_grad_(False)


def test_parts_add_up_whatever_the_split() -> None:
    ids = np.random.default_rng(0).integers(0, 50, 1000)
    parts = [partial_counts(part) for part in np.array_split(ids, 7)]
    joined = {key: np.concatenate([part[key] for part in parts[:3]]) for key in ("id", "count")}
    counts_V = add_up([joined, *parts[3:], partial_counts(ids[:0])], 60, "toy")
    assert counts_V.dtype == torch.int64
    assert counts_V.tolist() == np.bincount(ids, minlength=60).tolist()


@pytest.mark.parametrize("at_once", [1, 10**9], ids=["merged_often", "merged_once"])
def test_parts_of_pairs_add_up(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "PENDING_PAIRS", at_once)
    ids = np.random.default_rng(0).integers(0, 30, 2000)
    keys = pair_ids(ids[:-1], ids[1:])
    found = add_up_pairs([partial_counts(part) for part in np.array_split(keys, 9)], 40, "toy")
    dense_VV = np.zeros((40, 40), dtype=int)
    np.add.at(dense_VV, (ids[:-1], ids[1:]), 1)
    assert found.indptr.tolist() == [0, *(dense_VV > 0).sum(axis=1).cumsum()]
    assert found.ids_P.tolist() == dense_VV.nonzero()[1].tolist()
    assert found.counts_P.tolist() == dense_VV[dense_VV > 0].tolist()
    assert found.second_V.tolist() == dense_VV.sum(axis=0).tolist()


def test_pairs_must_be_of_the_targets_tokens_and_not_none() -> None:
    with pytest.raises(ValueError, match=r"sources.toy holds token 60, but the target has 60 tokens"):
        add_up_pairs([partial_counts(pair_ids(np.array([3]), np.array([60])))], 60, "toy")
    with pytest.raises(ValueError, match=r"sources.toy holds no pair"):
        add_up_pairs([], 60, "toy")


def test_counts_must_be_of_the_targets_tokens_and_not_none() -> None:
    with pytest.raises(ValueError, match=r"sources.toy holds token 60, but the target has 60 tokens"):
        add_up([partial_counts(np.array([3, 60]))], 60, "toy")
    with pytest.raises(ValueError, match=r"sources.toy holds no token"):
        add_up([], 60, "toy")


def test_pairs_of_documents_do_not_cross_from_one_to_the_next(tiny_target: FrozenTarget) -> None:
    texts = ["ab", "", "c", "abab"]
    part = pair_counter_of(tiny_target.tokenizer.backend_tokenizer)({"text": np.array(texts, dtype=object)})
    a, b = tiny_target.tokenizer.encode("ab")
    found = dict(zip(part["id"].tolist(), part["count"].tolist(), strict=True))
    assert found == {int(k): n for k, n in zip(pair_ids(np.array([a, b]), np.array([b, a])), (3, 1), strict=True)}


def test_documents_are_counted_as_they_are(tiny_target: FrozenTarget) -> None:
    """No stop token between or around them; bytes and text alike."""
    texts = ["def f():\n    return 1\n", "", "naïve 日本\n"]
    wanted = Counter(i for text in texts for i in tiny_target.tokenizer.encode(text, add_special_tokens=False))
    assert not set(tiny_target.eos_ids) & set(wanted)
    count = counter_of(tiny_target.tokenizer.backend_tokenizer)
    for batch in ({"text": np.array(texts)}, {"bytes": np.array([t.encode() for t in texts], dtype=object)}):
        part = count(batch)
        assert dict(zip(part["id"].tolist(), part["count"].tolist(), strict=True)) == wanted
    with pytest.raises(ValueError, match="has no text"):
        count({"text": np.array(["a", None], dtype=object)})


def test_raw_text_is_described_by_its_content(context: Context, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text("a")
        (tmp_path / name / "sub" / "b.txt").write_text("b")
    first, second = (RawText(documents=str(tmp_path / name)).describe(context) for name in ("one", "two"))
    assert first == {"documents": "one", "files": 2, "sha256": second["sha256"]}
    (tmp_path / "two" / "a.txt").write_text("c")
    assert RawText(documents=str(tmp_path / "two")).describe(context)["sha256"] != first["sha256"]
    with gzip.open(tmp_path / "texts.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "a"}) + "\n")
    assert RawText(documents=str(tmp_path / "texts.jsonl.gz")).describe(context)["documents"] == "texts.jsonl.gz"


def test_what_is_no_text_is_refused(context: Context, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    for documents, message in (
        ("empty", "holds no file"),
        ("binary", "a.bin is no UTF-8 text"),
        ("prompts.jsonl", r'every line of .*prompts.jsonl must be a JSON object such as \{"text"'),
        ("nowhere", "must be training, held_out, a folder of text files or a .jsonl file"),
    ):
        with pytest.raises(ValueError, match=message):
            RawText(documents=str(tmp_path / documents)).describe(context)


def test_answers_are_read_with_their_limit_and_for_their_target(context: Context, answers: AnswerSet) -> None:
    source = TargetAnswers()
    assert source.describe(context)["sha256"] == answers.sha256
    few = TargetAnswers(sequences=2)
    assert len(few.read(context)) == 2
    assert few.describe(context)["answer_tokens"] == int(answers.loss_mask_NL[:2].sum())
    other = replace(context)
    vars(other)["target_sha256"] = "0" * 64  # as of a target that was trained again
    with pytest.raises(ValueError, match="come from another target"):
        source.describe(other)
    with pytest.raises(ValueError, match="no answers in"):
        TargetAnswers(answers="/nowhere").describe(context)


def test_answers_survive_the_pipeline(answers: AnswerSet) -> None:
    columns = {name: np.array(column, dtype=object) for name, column in answer_columns(answers).items()}
    back = answer_rows({k: v if v.ndim == 1 else np.array([list(r) for r in v]) for k, v in columns.items()})
    for name in ("token_ids_NL", "loss_mask_NL", "prompt_length_N", "length_N"):
        assert torch.equal(getattr(back, name), getattr(answers, name))


def test_greedy_proposals_are_what_acceptance_is_measured_on(
    drafter: Eagle3Drafter, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    batch = Batch.of(answers, torch.arange(len(answers)))
    settings = DraftSettings(steps=3, temperature=0.0, seed=0)
    ids_KN = proposals(drafter, tiny_target, answers, settings, torch.Generator())
    match_KN, *_ = _rollout(drafter, tiny_target, batch, num_steps=3, chunk_rows=7)
    assert ids_KN.shape == (3, answers.num_answer_tokens)
    assert torch.equal(ids_KN == batch.next_ids_N, match_KN)


def test_drawn_proposals_follow_the_temperature(
    drafter: Eagle3Drafter, tiny_target: FrozenTarget, answers: AnswerSet
) -> None:
    def draw(temperature: float, seed: int = 0) -> torch.Tensor:
        settings = DraftSettings(steps=2, temperature=temperature, seed=0)
        return proposals(drafter, tiny_target, answers, settings, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1e-4), draw(0.0))
    assert torch.equal(draw(1.0), draw(1.0))
    assert not torch.equal(draw(1.0), draw(1.0, seed=1))


def test_a_drafter_is_found_by_the_name_that_the_target_was_given(
    drafter: Eagle3Drafter,
    tiny_target: FrozenTarget,
    work_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a source and of a rule; a model of the hub lies in a folder of another name."""
    monkeypatch.setenv("RAYSPEC_HOME", str(tmp_path / "home"))
    (tmp_path / "named").symlink_to(tiny_target.folder)
    save_drafter(tmp_path / "home" / "drafters" / "named" / "mine", drafter, tiny_target.info("named"))
    config = CalibrationConfig(
        target=str(tmp_path / "named"),
        work_dir=str(work_folder),
        sources={"draft": DraftTokens(drafter="mine", draft_steps=3)},
        calibrations=[NamedRule(name="clusters", source="draft", rule=KMeans(clusters=4, drafter="mine"))],
    )
    prepared = prepare(config)
    assert prepared.sources["draft"]["drafter"] == "mine"
    (calibration,) = config.calibrations
    stored_VH = drafter.lm_head.at(0).get_parameter("weight").bfloat16().float()
    assert torch.equal(prepared.drafter(calibration).head_VH, stored_VH)


def test_drafts_are_described_by_all_that_decides_them(
    drafter: Eagle3Drafter, tiny_target: FrozenTarget, context: Context, tmp_path: Path
) -> None:
    save_drafter(tmp_path / "mine", drafter, tiny_target.info())
    source = DraftTokens(drafter=str(tmp_path / "mine"), draft_steps=3)
    found = source.describe(context)
    assert found["drafter"] == "mine"
    assert found["sha256"] != replace(source, temperature=1.0).describe(context)["sha256"]
    assert found["sha256"] == replace(source, batch_size=3).describe(context)["sha256"]
    drawn = replace(source, temperature=1.0)  # by batches
    assert drawn.describe(context)["sha256"] != replace(drawn, batch_size=3).describe(context)["sha256"]
    with pytest.raises(ValueError, match="draft_steps=6 needs prompts of at least 7 tokens"):
        replace(source, draft_steps=6).describe(context)
    info = replace(tiny_target.info(), tokenizer_sha256="another")
    save_drafter(tmp_path / "other", drafter, info)
    with pytest.raises(ValueError, match="whose tokenizer is another"):
        DraftTokens(drafter=str(tmp_path / "other")).describe(context)


RULE = "calibrations=[{name: a, source: raw, rule: {kind: frspec, top_k: 4}}]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "calibrations is empty"),
        ([RULE, "outputdir=x"], "unknown key 'outputdir'"),
        (
            [RULE, "sources.raw.kind=raw", "sources.raw.dokuments=x"],
            r"unknown key 'sources.raw.dokuments'",
        ),
        ([RULE, "sources.raw.kind=rawr"], r"sources.raw.kind must be one of raw, target, draft, draft_text, got"),
        ([RULE, "ray.blocks=0"], "ray.blocks must be at least 1"),
        ([RULE.replace("name: a", "name: a/b")], "must be a plain folder name"),
        ([RULE.replace("]", ", {name: a, source: raw, rule: {kind: frspec, top_k: 5}}]")], "'a' more than once"),
        ([RULE.replace("source: raw", "source: text")], r"a.source must be one of sources \(raw\), got 'text'"),
        ([RULE.replace("frspec, top_k: 4", "bcl")], "a.source must be of kind target for the rule 'bcl', got 'raw'"),
        ([RULE, "sources.raw.kind=target", "sources.raw.sequences=0"], "sources.raw.sequences must be at least 1"),
    ],
)
def test_wrong_config_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(CalibrationConfig, None, overrides)
