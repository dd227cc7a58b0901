"""Plain decoding on the CPU platform against Hugging Face: the base that every speculative test stands on."""

from engines import Ids, Oracle


def test_plain_equals_hugging_face(oracle: Oracle, hf_answers: list[Ids]) -> None:
    assert len(hf_answers) >= 50
    assert oracle.answers == hf_answers
