"""Where prompts come from, that none is in two sets, and which tokens of a conversation are learnt."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chats import HARMONY, SYSTEM, TURNS, Scripted, chat_tokenizer
from transformers import PreTrainedTokenizerFast

from rayspec.training import prepare
from rayspec.training.checks import check_answers
from rayspec.training.data.answers import AnswersConfig, Prompt, TargetName, make_answers, read_answers
from rayspec.training.data.chat import ChatTemplate
from rayspec.training.data.prompts import check_source, given_prompts, own_prompts
from rayspec.training.data.shards import Row, write_shard
from rayspec.training.data.sources import CorpusConfig
from rayspec.training.drafter_config import DrafterEntry, DrafterTrainConfig
from rayspec.training.frozen_target import FrozenTarget, target_sha256
from rayspec.workloads import load_workload
from rayspec.workloads.prompt_hashes import prompt_hash
from sglang_ext.heads import parse_head

CONFIG = AnswersConfig(
    count=2, min_prompt_tokens=8, max_prompt_tokens=60, answer_tokens=12, batch_size=2, greedy_share=1.0, openings=[""]
)


@pytest.fixture
def chat(tiny_target_folder: Path) -> ChatTemplate:
    return ChatTemplate.of(chat_tokenizer(tiny_target_folder, SYSTEM + TURNS))


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    turns = [["Name a fruit."], ["Name a nut.", "Another one?"], ["x" * 200], ["Name a tree."]]
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps({"turns": t}) + "\n" for t in turns))
    return file


def found(config: AnswersConfig, folder: Path, tokenizer: Any, chat: ChatTemplate | None = None, **options: Any) -> Any:
    if config.prompts == "self":
        return own_prompts(config, "answers", folder, chat, Scripted(tokenizer), **options)
    return given_prompts(config, "answers", CorpusConfig(), tokenizer, chat, **options)


def test_an_opening_is_not_how_an_evaluated_prompt_begins() -> None:
    """Of those that ship, here; five words of it, whatever stands between them."""
    (prompt, *_) = [c.turns[0] for c in load_workload("chat") if c.id == "coding-02"]
    assert prompt.startswith("Write a SQL query that finds customers")
    for opening in ("Write a SQL query that", "write a SQL query, that finds", f"{prompt} Please."):
        with pytest.raises(
            ValueError, match=r"held_out.openings has '.*', and coding-02 of an evaluation set begins so"
        ):
            check_source(replace(CONFIG, openings=["", opening]), "held_out")
    for opening in ("Write a SQL query", "Write a SQL query which", "finds customers who placed more"):
        check_source(replace(CONFIG, openings=["", opening]), "held_out")


def test_pieces_of_a_folder_of_texts(tiny_target: FrozenTarget, text_folder: Path, tmp_path: Path) -> None:
    config = replace(CONFIG, prompts=str(text_folder), count=10, min_prompt_tokens=10)
    prompts = found(config, tmp_path, tiny_target.tokenizer)
    assert len(prompts) == 10
    assert all(10 <= len(p.ids) <= 60 and p.ids == tiny_target.tokenizer.encode(p.text) for p in prompts)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is a folder without files; put text files there"):
        found(replace(config, prompts=str(tmp_path / "empty")), tmp_path, tiny_target.tokenizer)


def test_pieces_of_text_are_in_no_other_set(text_folder: Path, tmp_path: Path, tiny_target: FrozenTarget) -> None:
    config = replace(CONFIG, prompts=str(text_folder), count=10, min_prompt_tokens=10)
    held_out = {prompt_hash(p.text) for p in found(config, tmp_path, tiny_target.tokenizer)}
    assert held_out & {prompt_hash(p.text) for p in found(config, tmp_path, tiny_target.tokenizer)}
    others = found(config, tmp_path, tiny_target.tokenizer, avoid=held_out)
    assert len(others) == 10
    assert not held_out & {prompt_hash(p.text) for p in others}


def test_a_file_that_is_no_text_is_named(text_folder: Path, tmp_path: Path, tiny_target: FrozenTarget) -> None:
    shutil.copytree(text_folder, tmp_path / "texts")
    (tmp_path / "texts" / "photo.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match=r"texts holds photo.png, which is no text in UTF-8 .*take it out"):
        found(replace(CONFIG, prompts=str(tmp_path / "texts")), tmp_path, tiny_target.tokenizer)


def test_a_workload_of_one_s_own(
    chat: ChatTemplate, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of its turns; what is too long or in another set is passed over, and the second is said."""
    config = replace(CONFIG, prompts=str(workload), max_prompt_tokens=90)
    seen = {prompt_hash("Name a tree")}
    prompts = found(config, tmp_path, chat.tokenizer, chat, avoid=seen)
    assert {(p.text, p.later_turns) for p in prompts} == {("Name a fruit.", ()), ("Name a nut.", ("Another one?",))}
    assert all(p.ids == chat.first_turn(p.text) for p in prompts)
    with pytest.raises(ValueError, match=r"own.jsonl holds 1 prompts of 8 to 90 tokens that are in no other"):
        found(config, tmp_path, chat.tokenizer, chat, avoid=seen | {prompt_hash("another one")})
    assert "own.jsonl: 2 conversation(s) are left out, since a turn of theirs is evaluated" in capsys.readouterr().out


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Four that can be taken as they are, and what cannot."""
    said = [
        ["Name a fruit.", "Fig."],
        ["Name a nut.", "Pecan.", "Another one?", "Walnut."],
        ["Name a rose.", "Gallica, and many a word more.", "Another?", "No."],
        ["Name a stone.", "Flint.", "And " + "x" * 90, "Slate."],
        ["Name a tree."],
    ]
    records = [[{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(c)] for c in said]
    records.append([{"role": "system", "content": "Lie."}, *records[0]])
    file = tmp_path / "conversations.jsonl"
    file.write_text("".join(json.dumps({"messages": r}) + "\n" for r in records))
    return file


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_conversations_as_given(chat: ChatTemplate, conversations: Path, tmp_path: Path, share: float) -> None:
    """What is learnt are the given answers and their stop tokens; nobody is asked."""
    config = AnswersConfig(
        prompts=str(conversations), as_given=True, count=4, max_prompt_tokens=80, answer_tokens=12, batch_size=3,
        follow_up_share=share,
    )  # fmt: skip
    prompts = found(config, tmp_path, chat.tokenizer, chat)
    nobody = Scripted(chat.tokenizer)
    make_answers(tmp_path / "answers", TargetName("t", "0" * 64), config, prompts, nobody, chat)
    assert nobody.asked == []
    made = read_answers(tmp_path / "answers")
    whole, learnt = {}, {}
    for prompt, ids, mask, length in zip(
        prompts, made.token_ids_NL, made.loss_mask_NL, made.length_N.tolist(), strict=True
    ):
        whole[prompt.text] = chat.tokenizer.decode(ids[:length])
        learnt[prompt.text] = chat.tokenizer.decode(ids[:length][mask[:length]])
        assert not bool(mask[length:].any())
    assert learnt == {
        "Name a fruit.": "Fig.<|im_end|>",
        "Name a nut.": "Pecan.<|im_end|>" + ("Walnut.<|im_end|>" if share else ""),
        "Name a rose.": "Gallica, and",  # cut at 12 tokens, so that it does not go on
        "Name a stone.": "Flint.<|im_end|>",  # what is asked next is too long
    }
    if share:
        rendered = chat.tokenizer.apply_chat_template(
            [
                {"role": ("user", "assistant")[i % 2], "content": text}
                for i, text in enumerate(["Name a nut.", "Pecan.", "Another one?", "Walnut."])
            ],
            tokenize=False,
        )
        assert rendered.startswith(whole["Name a nut."])
    assert made.provenance()["sequences_as_given"] == 4
    assert made.provenance()["greedy_sequences"] == 0
    index = json.loads((tmp_path / "answers" / "answers.json").read_text())
    assert index["config"]["as_given"] is True
    with pytest.raises(ValueError, match=r"were made with answers.as_given=True, not"):
        make_answers(tmp_path / "answers", TargetName("t", "0" * 64), replace(config, as_given=False), prompts, nobody)
    with pytest.raises(ValueError, match="holds 4 prompts of 8 to 80 tokens with an answer and without a message of"):
        found(replace(config, count=5), tmp_path, chat.tokenizer, chat)


def test_options_that_are_off_are_in_no_answers_json() -> None:
    assert "as_given" not in CONFIG.provenance()


def test_what_has_no_answers_cannot_be_taken_as_given(workload: Path, text_folder: Path) -> None:
    with pytest.raises(ValueError, match="as_given takes conversations with their answers, but prompts=self has the"):
        AnswersConfig(as_given=True)
    for name, value in (("temperature", 0.5), ("greedy_share", 1.0)):
        with pytest.raises(ValueError, match=f"{name} says how the target answers, but with as_given it does not"):
            AnswersConfig(as_given=True, prompts=str(workload), **{name: value})
    with pytest.raises(ValueError, match=r"no record of answers.prompts=.*own.jsonl has an answer"):
        check_source(AnswersConfig(as_given=True, prompts=str(workload)), "answers")
    for text in ("training", str(text_folder)):
        with pytest.raises(ValueError, match=rf"answers.as_given takes .*, but answers.prompts={text} is text"):
            check_source(AnswersConfig(as_given=True, prompts=text), "answers")


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ValueError, match=r"answers.prompts must be self, a workload, a folder of text files, training"):
        check_source(replace(CONFIG, prompts="nowhere"), "answers")
    for name in ("mt_bench", "gsm8k:4", "chat:2, humaneval"):
        with pytest.raises(ValueError, match=r"answers.prompts=.* is for evaluation, and a drafter trained on it"):
            check_source(replace(CONFIG, prompts=name), "answers")


def test_messages_need_a_chat_template(tiny_target: FrozenTarget, workload: Path, tmp_path: Path) -> None:
    for source in ("self", str(workload)):
        with pytest.raises(ValueError, match="messages of a chat, but the target's tokenizer has no chat template"):
            found(replace(CONFIG, prompts=source), tmp_path, tiny_target.tokenizer)


def test_the_sets_of_a_training_share_no_prompt_with_each_other_nor_with_evaluation(
    tiny_target: FrozenTarget, tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target says for both sets the same, and what ships for evaluation, too, first and as a second turn."""
    measured = load_workload("chat")[0].turns[0]
    tokenizer = chat_tokenizer(tiny_target_folder)
    target = replace(tiny_target, tokenizer=tokenizer)
    fig, elm, oak = (f"Tell me about the {tree}<|im_end|>" for tree in ("fig tree", "elm tree", "oak tree"))
    said = [measured + "<|im_end|>", fig]
    second = [measured + "<|im_end|>", "Why?<|im_end|>"], ["So.<|im_end|>"]
    answers = ["It is.<|im_end|>"] * 2
    answer = Scripted(tokenizer, said, ["It is red.<|im_end|>"], said, [fig, elm], [elm, oak], answers, *second)

    class Engines:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Scripted:
            return answer

        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(prepare, "answer_engines", Engines)
    config = DrafterTrainConfig(
        target=str(tiny_target_folder),
        work_dir=str(tmp_path),
        answers=replace(CONFIG, max_prompt_tokens=200, follow_up_share=1.0),
        held_out=replace(CONFIG, count=1, max_prompt_tokens=200),
        drafters=[DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))],
    )
    prepare.make_all_answers(config, target)
    chat = ChatTemplate.of(tokenizer)
    for name, texts in (("held_out", [fig]), ("answers", [elm, oak])):
        rows = read_answers(tmp_path / name)
        wanted = [chat.first_turn(text.removesuffix("<|im_end|>")) for text in texts]
        starts = [ids[:n].tolist() for ids, n in zip(rows.token_ids_NL, rows.prompt_length_N, strict=True)]
        assert starts == wanted
    texts = [tokenizer.decode(ids) for ids in read_answers(tmp_path / "answers").token_ids_NL]
    assert ["Why?" in text for text in texts] == [False, True]
    assert not any(measured in text for text in texts)


def test_answers_that_are_there_are_looked_up(
    tiny_target: FrozenTarget, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """They may be of before a set lay on this machine."""
    measured = load_workload("chat")[0].turns[0]
    target = chat_target(tiny_target_folder, tmp_path / "chat")
    config = DrafterTrainConfig(
        target=str(tmp_path / "chat"),
        work_dir=str(tmp_path),
        answers=replace(CONFIG, max_prompt_tokens=52),
        held_out=replace(CONFIG, max_prompt_tokens=52),
        drafters=[DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))],
    )
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers_prompts").mkdir()
    for prompt in ("Name a fruit.", f"Be brief.\n\n{measured}"):
        write_shard(tmp_path / "answers", 0, [Row(0, prompt, 1, 0.0, [1, 2], [False, True])])
        if prompt == "Name a fruit.":
            check_answers(config, target)
        else:
            with pytest.raises(ValueError, match=r"answers-00000.parquet holds a prompt that is for evaluation"):
                check_answers(config, target)
    (tmp_path / "answers" / "answers-00000.parquet").unlink()
    (tmp_path / "answers_prompts" / "prompts-00000.jsonl").write_text(json.dumps({"turns": [measured]}) + "\n")
    with pytest.raises(ValueError, match=r"answers_prompts holds a prompt that is for evaluation .*or choose another"):
        check_answers(config, target)


class NoEngines:
    def __init__(self, *_: Any) -> None:
        raise AssertionError("an engine was started")


def test_too_few_prompts_are_known_before_anything_is_written(
    tiny_target_folder: Path, workload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan, and by the run before its engines start for the held-out prompts, which the target writes."""
    target = chat_target(tiny_target_folder, tmp_path / "chat")
    monkeypatch.setattr(prepare, "answer_engines", NoEngines)
    config = DrafterTrainConfig(
        target=str(tmp_path / "chat"),
        work_dir=str(tmp_path / "work"),
        answers=replace(CONFIG, prompts=str(workload), count=4, max_prompt_tokens=52),
        held_out=replace(CONFIG, count=1, max_prompt_tokens=52),
        drafters=[DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))],
    )
    for refused in (lambda: prepare.plan_prepare(config), lambda: prepare.make_all_answers(config, target)):
        with pytest.raises(
            ValueError, match=r"own.jsonl holds 3 prompts of 8 to 52 tokens .* not answers.count=4; low"
        ):
            refused()
    assert not (tmp_path / "work").exists()
    enough = replace(config, answers=replace(config.answers, count=3))
    assert "answers: 3 sequences" in "\n".join(prepare.plan_prepare(enough))


def test_prompts_that_the_target_has_written_are_in_no_other_set(
    tiny_target_folder: Path, workload: Path, tmp_path: Path
) -> None:
    """A run that goes on finds the same prompts as one that does not: those on the disk are left out of the others."""
    target = chat_target(tiny_target_folder, tmp_path / "chat")
    config = DrafterTrainConfig(
        target=str(tmp_path / "chat"),
        work_dir=str(tmp_path / "work"),
        answers=replace(CONFIG, prompts=str(workload), count=2),
        held_out=replace(CONFIG, count=1),
        drafters=[DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))],
    )
    chat = ChatTemplate.of(target.tokenizer)
    given, avoid = prepare.given_sets(config, target.tokenizer, chat)
    first, *_ = given["answers"]
    assert prompt_hash(first.text) in avoid
    folder = tmp_path / "work" / "held_out_prompts"
    folder.mkdir(parents=True)
    (folder / "prompts-00000.jsonl").write_text(json.dumps({"turns": [first.text]}) + "\n")
    assert first.text not in [p.text for p in prepare.given_sets(config, target.tokenizer, chat)[0]["answers"]]


def test_answers_as_given_need_no_engine(
    tiny_target_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the held-out set is complete."""
    target = chat_target(tiny_target_folder, tmp_path / "chat")
    config = DrafterTrainConfig(
        target=str(tmp_path / "chat"),
        work_dir=str(tmp_path / "work"),
        answers=AnswersConfig(
            prompts=str(conversations), as_given=True, count=2, max_prompt_tokens=80, answer_tokens=12, batch_size=2
        ),
        held_out=replace(CONFIG, count=1),
        drafters=[DrafterEntry(name="full", draft_head=parse_head({"kind": "full"}))],
    )
    chat = ChatTemplate.of(target.tokenizer)
    own = [Prompt("Name a bird.", chat.first_turn("Name a bird."))]
    said = Scripted(target.tokenizer, ["wren<|im_end|>"])
    name = TargetName("chat", target.sha256)
    make_answers(tmp_path / "work" / "held_out", name, config.held_out, own, said)
    monkeypatch.setattr(prepare, "answer_engines", NoEngines)
    prepare.make_all_answers(config, target)
    assert len(read_answers(tmp_path / "work" / "answers")) == 2


def chat_target(tiny: Path, folder: Path) -> FrozenTarget:
    """The tiny target as a chat model, in a folder of its own."""
    shutil.copytree(tiny, folder)
    chat_tokenizer(tiny).save_pretrained(folder)
    return replace(FrozenTarget.without_weights(folder), sha256=target_sha256(folder))


def test_a_message_may_end_by_a_token_that_is_only_marked_as_special(tiny_target_folder: Path, tmp_path: Path) -> None:
    """As in GPT-OSS, whose tokenizer names the end of an answer and not that of a message."""
    tokenizer = chat_tokenizer(tiny_target_folder, HARMONY)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), chat_template=HARMONY)
    assert end not in saved.all_special_ids
    chat = ChatTemplate.of(saved)
    assert chat.user_stop == end
    messages = [{"role": "user", "content": "Why?"}]
    asked = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.first_turn("Why?") == saved.encode(asked, add_special_tokens=False)


def stored(folder: Path) -> list[list[tuple[int, bool]]]:
    rows = read_answers(folder)
    return [
        list(zip(ids[:n].tolist(), mask[:n].tolist(), strict=True))
        for ids, mask, n in zip(rows.token_ids_NL, rows.loss_mask_NL, rows.length_N, strict=True)
    ]


def marked(chat: ChatTemplate, *turns: str) -> list[tuple[int, bool]]:
    """Questions and answers in turn; an answer ends with its stop token."""
    ids = [(i, False) for i in chat.first_turn(turns[0])]
    for n, text in enumerate(turns[1:], start=1):
        ids += [(i, n % 2 == 1) for i in (chat.encode(text) if n % 2 else chat.next_turn(text))]
    return ids


def test_only_answers_are_learnt_and_a_second_turn_follows_an_ended_one(chat: ChatTemplate, tmp_path: Path) -> None:
    """The user's turns come from the workload, or from the target in the user's place."""
    config = replace(CONFIG, count=4, batch_size=4, follow_up_share=1.0)
    texts = ["Name a fruit.", "Name a nut.", "Name a tree.", "Name a bird."]
    prompts = [Prompt(t, chat.first_turn(t), ("Sure?",) if "nut" in t else ()) for t in texts]
    answer = Scripted(
        chat.tokenizer,
        ["fig<|im_end|>", "acorn<|im_end|>", "goes on and on"[:12], "wren<|im_end|>"],
        ["Why so?<|im_end|>", "never ended"],  # of the fruit and the bird; the tree's answer was cut off
        ["Sweet.<|im_end|>", "Yes.<|im_end|>"],
    )
    make_answers(tmp_path / "a", TargetName("chat", "0"), config, prompts, answer, chat)
    assert stored(tmp_path / "a") == [
        marked(chat, "Name a fruit.", "fig<|im_end|>", "Why so?", "Sweet.<|im_end|>"),
        marked(chat, "Name a nut.", "acorn<|im_end|>", "Sure?", "Yes.<|im_end|>"),
        marked(chat, "Name a tree.", "goes on and on"[:12]),
        marked(chat, "Name a bird.", "wren<|im_end|>"),
    ]
    first, follow_ups, second = answer.asked
    assert [r.stop_ids for r in first + second] == [()] * 6
    assert [r.stop_ids for r in follow_ups] == [(chat.user_stop,)] * 2
    opened = [*chat.first_turn("Name a fruit."), *chat.encode("fig<|im_end|>" + chat.reopen)]
    assert list(follow_ups[0].prompt_ids) == opened
    assert all(r.temperature == 0 for r in first + second)
    assert all(r.temperature > 0 for r in follow_ups)


def test_a_second_turn_that_is_evaluated_is_not_asked(chat: ChatTemplate, tmp_path: Path) -> None:
    config = replace(CONFIG, count=2, batch_size=2, follow_up_share=1.0)
    prompts = [Prompt(text, chat.first_turn(text)) for text in ("Name a fruit.", "Name a bird.")]
    answer = Scripted(
        chat.tokenizer,
        ["fig<|im_end|>", "wren<|im_end|>"],
        ["Why so?<|im_end|>", "Sure?<|im_end|>"],
        ["Yes.<|im_end|>"],
    )
    make_answers(tmp_path / "a", TargetName("chat", "0"), config, prompts, answer, chat, {prompt_hash("why so")})
    assert stored(tmp_path / "a") == [
        marked(chat, "Name a fruit.", "fig<|im_end|>"),
        marked(chat, "Name a bird.", "wren<|im_end|>", "Sure?", "Yes.<|im_end|>"),
    ]


def test_an_answer_ends_as_the_template_says_once_the_conversation_goes_on(
    tiny_target_folder: Path, tmp_path: Path
) -> None:
    """GPT-OSS ends its answers by <|return|>, and its template those of the past by what ends a message. The token that
    the target did not write is not learnt."""
    tokenizer = chat_tokenizer(tiny_target_folder, HARMONY, eos="<|return|>")
    chat = ChatTemplate.of(tokenizer)
    fig, elm, why = (f"<|channel|>final<|message|>{text}<|return|>" for text in ("fig", "elm", "Sweet."))
    config = replace(CONFIG, answer_tokens=60, follow_up_share=1.0)
    prompts = [Prompt(text, chat.first_turn(text)) for text in ("Name a fruit.", "Name a tree.")]
    answer = Scripted(tokenizer, [fig, elm], ["Why so?<|im_end|>", "never ended"], [why])
    make_answers(tmp_path / "a", TargetName("chat", "0"), config, prompts, answer, chat)
    said = ["Name a fruit.", "fig", "Why so?", "Sweet."]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.count("<|im_end|>") == 5
    long, short = stored(tmp_path / "a")
    assert [i for i, _ in long] == chat.encode(text.removesuffix("<|im_end|>") + "<|return|>")
    learnt = chat.encode(fig.removesuffix("<|return|>") + why)
    assert [i for i, is_learnt in long if is_learnt] == learnt
    assert short == marked(chat, "Name a tree.", elm), "which did not go on"
    opened = tokenizer.apply_chat_template(messages[:3], tokenize=False).removesuffix("Why so?<|im_end|>")
    assert list(answer.asked[1][0].prompt_ids) == chat.encode(opened)


def test_a_conversation_ends_where_a_sequence_has_no_room(chat: ChatTemplate, tmp_path: Path) -> None:
    """Engines are started for sequences of so many tokens; a longer one would end the whole run."""
    config = replace(CONFIG, count=2, batch_size=2, follow_up_share=0.0)
    turns = ("Sure?",), ("Sure? " * config.most_tokens,)
    prompts = [Prompt("Name a fruit.", chat.first_turn("Name a fruit."), later) for later in turns]
    answer = Scripted(chat.tokenizer, ["fig<|im_end|>", "elm<|im_end|>"], ["Yes.<|im_end|>"])
    make_answers(tmp_path / "a", TargetName("chat", "0"), config, prompts, answer, chat)
    assert stored(tmp_path / "a") == [
        marked(chat, "Name a fruit.", "fig<|im_end|>", "Sure?", "Yes.<|im_end|>"),
        marked(chat, "Name a fruit.", "elm<|im_end|>"),
    ]
    assert all(len(r.prompt_ids) + config.answer_tokens <= config.most_tokens for r in answer.asked[1])


def test_follow_ups_are_a_share_of_the_conversations(chat: ChatTemplate, tmp_path: Path) -> None:
    config = replace(CONFIG, count=4, batch_size=4, follow_up_share=0.5)
    prompts = [Prompt("Why?", chat.first_turn("Why?"))] * 4
    answer = Scripted(chat.tokenizer, ["So.<|im_end|>"] * 4, ["How?<|im_end|>"] * 2, ["Thus.<|im_end|>"] * 2)
    make_answers(tmp_path / "a", TargetName("chat", "0"), config, prompts, answer, chat)
    long, short = (
        marked(chat, "Why?", "So.<|im_end|>", "How?", "Thus.<|im_end|>"),
        marked(chat, "Why?", "So.<|im_end|>"),
    )
    assert stored(tmp_path / "a") == [short, long, short, long]
