"""Requests of a hostile or clumsy client, and what is said to each: by a server (`REQUESTS`), and by an engine that is
called in the same process (`in_process`), which no JSON schema stands before. V is the target's vocabulary."""

import inspect
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from fixture_models import TARGET

CONFIG = json.loads((TARGET / "config.json").read_text())
V, CONTEXT = CONFIG["vocab_size"], CONFIG["max_position_embeddings"]
HAS_TEMPLATE = "chat_template" in (TARGET / "tokenizer_config.json").read_text()
HUGE = 10**30


class Hostile(NamedTuple):
    """`says` is part of the answer's text. `status` None: any of 4xx; bodies of bytes are sent as they are."""

    name: str
    route: str
    body: Any
    says: str
    status: int | None = 400
    method: str = "POST"


def generate(name: str, says: str, status: int | None = 400, **fields: Any) -> Hostile:
    return Hostile(f"generate-{name}", "/generate", fields, says, status)


def sampling(name: str, says: str, **params: Any) -> Hostile:
    return generate(f"sampling-{name}", says, text="import os", sampling_params={"max_new_tokens": 2} | params)


def completion(name: str, says: str, **fields: Any) -> Hostile:
    body = {"model": "demo", "prompt": "import os", "max_tokens": 2} | fields
    return Hostile(f"completions-{name}", "/v1/completions", body, says)


def chat(name: str, says: str, **fields: Any) -> Hostile:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2} | fields
    return Hostile(f"chat-{name}", "/v1/chat/completions", body, says)


def _prompts() -> Iterator[Hostile]:
    yield generate("empty_text", "the prompt has no tokens", text="")
    yield generate("an_empty_text_of_two", "the prompt has no tokens", text=["import", ""])
    yield generate("no_texts", "the list of prompts is empty", text=[])
    yield generate("nothing", "should be provided")
    yield generate("null_text", "should be provided", text=None)
    yield generate("no_ids", "cannot be empty", input_ids=[])
    yield generate("no_ids_in_a_list", "the prompt has no tokens", input_ids=[[]])
    yield generate("id_too_large", f"the prompt has the token id {V}; ids must be in 0..{V - 1}", input_ids=[1, V])
    yield generate("id_far_too_large", "the prompt has the token id", input_ids=[2**40])
    yield generate("id_beyond_64_bits", "", input_ids=[HUGE])
    yield generate("id_negative", "the prompt has the token id -1", input_ids=[-1])
    yield generate("id_too_large_of_two", f"the prompt has the token id {V}", input_ids=[[1], [V]])
    yield generate("id_a_fraction", "input_ids", input_ids=[1.5])
    yield generate("id_a_string", "input_ids", input_ids=["a"])
    yield generate("ids_too_deep", "", input_ids=[[[1]]])
    yield generate("too_long", "longer than the model's context", input_ids=[1] * (CONTEXT + 9))
    new = {"max_new_tokens": 100}
    yield generate("too_many_new", "context length", input_ids=[1] * (CONTEXT - 48), sampling_params=new)
    yield generate("an_image", "reads text alone", text="a", image_data="nowhere.png")
    yield generate("audio", "reads text alone", text="a", audio_data="nowhere.wav")


def _no_requests() -> Iterator[Hostile]:
    yield generate("number_for_text", "text", text=5)
    yield generate("embeddings", "disable-radix-cache", input_embeds=[[0.1] * 256])
    yield Hostile("no_json", "/generate", b"{", "JSON")
    yield Hostile("no_numbers", "/generate", {"text": "a", "sampling_params": {"temperature": float("nan")}}, "JSON")
    yield Hostile("no_text", "/generate", b"\xff\xfe", "", None)
    yield Hostile("deep_json", "/generate", b'{"text": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", "", None)
    yield Hostile("a_list", "/generate", [1, 2], "")
    yield Hostile("nothing_at_all", "/generate", b"", "")
    yield Hostile("wrong_method", "/generate", None, "", 405, "DELETE")
    yield Hostile("unknown_route", "/generatee", {}, "", 404)


def _lists() -> Iterator[Hostile]:
    two = {"text": ["a", "b"]}
    yield generate(
        "one_setting_for_two", "sampling_params is a list of 1, but there are 2", **two, sampling_params=[{}]
    )
    yield generate("three_for_two", "sampling_params is a list of 3", **two, sampling_params=[{}, {}, {}])
    yield generate("no_settings", "sampling_params is an empty list", **two, sampling_params=[])
    yield generate("settings_a_list", "sampling_params is a list", text="a", sampling_params=[{}])
    yield generate("a_list_of_rids", "rid is a list, but there is one prompt", text="a", rid=["x"])
    yield generate("a_health_check", "rid must not begin with HEALTH_CHECK", text="a", rid="HEALTH_CHECK_me")
    yield generate("settings_a_string", "", text="a", sampling_params="hot")
    yield generate("unequal_n", "same for all", **two, sampling_params=[{"n": 1}, {"n": 2}])
    yield generate("three_logprobs", "return_logprob is a list of 3", **two, return_logprob=[True] * 3)
    yield generate("logprobs_a_list", "return_logprob", text="a", return_logprob=[True, False])
    yield generate("one_start", "logprob_start_len is a list of 1", **two, logprob_start_len=[0], return_logprob=True)
    yield generate("one_top", "top_logprobs_num is a list of 1", **two, top_logprobs_num=[1], return_logprob=True)
    yield generate("one_adapter", "lora_path is a list of 1", **two, lora_path=[None])
    yield generate("one_rid", "rids length mismatch", **two, rid=["x"])
    yield generate("a_rid_twice", "Duplicate request IDs", **two, rid=["x", "x"])


def _logprobs() -> Iterator[Hostile]:
    ask = {"text": "import os", "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    yield generate("top_of_more_than_all", f"top_logprobs_num must be in 0..{V}", **ask, top_logprobs_num=V + 1)
    yield generate("top_of_far_more", "top_logprobs_num", **ask, top_logprobs_num=2**40)
    yield generate("top_negative", "top_logprobs_num", **ask, top_logprobs_num=-1)
    yield generate("start_too_late", "logprob_start_len", **ask, logprob_start_len=99)
    yield generate("start_negative", "logprob_start_len must be", **ask, logprob_start_len=-7)
    yield generate("of_ids_outside", "out-of-vocabulary", **ask, token_ids_logprob=[V])
    yield generate("of_negative_ids", "out-of-vocabulary", **ask, token_ids_logprob=[-1])
    yield generate("pooled_outside", "must be positions in the prompt", **ask, token_indices_to_pool=[10**6])
    yield generate("delimited_outside", "must be positions in the prompt", **ask, multi_item_delimiter_indices=[-9])
    yield completion("logprobs_of_too_many", "top_logprobs_num", logprobs=V + 1)
    yield completion("negative_logprobs", "top_logprobs_num", logprobs=-3)


def _numbers() -> Iterator[Hostile]:
    yield sampling("temperature_negative", "temperature", temperature=-1)
    yield sampling("temperature_a_string", "", temperature="hot")
    yield sampling("top_p_zero", "top_p", top_p=0)
    yield sampling("min_p_two", "min_p", min_p=2)
    yield sampling("top_k_zero", "top_k", top_k=0)
    yield sampling("top_k_huge", "top_k must be at most", top_k=2**40)
    yield sampling("max_new_tokens_negative", "max_new_tokens", max_new_tokens=-1)
    yield sampling("max_new_tokens_huge", "", max_new_tokens=HUGE)
    yield sampling("max_new_tokens_a_string", "", max_new_tokens="2")
    yield sampling("max_new_tokens_a_fraction", "", max_new_tokens=1.5)
    yield sampling("min_above_max", "min_new_tokens", min_new_tokens=5)
    yield sampling("min_new_tokens_huge", "min_new_tokens", min_new_tokens=2**40, max_new_tokens=None)
    yield sampling("n_zero", "sampling_params.n must be in 1..1024", n=0)
    yield sampling("n_negative", "sampling_params.n must be in 1..1024", n=-1)
    yield sampling("n_huge", "sampling_params.n must be in 1..1024", n=10**9)
    yield sampling("beam_zero", "beam", beam_width=0)
    yield sampling("beams", "eam", beam_width=4, n=2)
    yield sampling("seed_huge", "", sampling_seed=2**70)
    yield sampling("stream_interval_negative", "stream_interval must be at least 1", stream_interval=-2)
    yield sampling("bias_huge", "logit_bias must be finite", logit_bias={"5": 1e300}, temperature=1)
    yield sampling("bias_of_an_id_outside", "logit_bias", logit_bias={str(V): 1.0})
    yield sampling("bias_of_a_word", "", logit_bias={"os": 1.0})
    yield sampling("unknown_setting", "", temprature=1)
    yield sampling("internal_setting", "", is_normalized=True, temperature=0)
    yield sampling("unserved_setting", "choice", choice=["a", "b"])
    yield sampling("custom_too_deep", "custom_params", custom_params={"a": {"b": {"c": 1}}})
    yield completion("temperature_negative", "temperature", temperature=-1)
    yield completion("bias_of_an_id_outside", "logit_bias", logit_bias={str(10**9): 1})
    yield completion("n_huge", "n must be in 1..1024", n=10**9)
    yield completion("max_tokens_negative", "", max_tokens=-5)
    yield completion("seed_huge", "seed", seed=2**70)
    for name, value in {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1}.items():
        yield sampling(name, f"{name} is {value}, but this server speculates", **{name: value})
        yield completion(name, f"{name} is {value}, but this server speculates", **{name: value})
    yield sampling("min_new_tokens", "min_new_tokens is 1, but this server speculates", min_new_tokens=1)


def _not_in_json() -> Iterator[Hostile]:
    for value in (float("nan"), float("inf")):
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            yield sampling(f"{name}_{value}", name, **{name: value})
        yield sampling(f"bias_{value}", "logit_bias must be finite", logit_bias={"5": value}, temperature=1)


def _stops_and_grammars() -> Iterator[Hostile]:
    yield sampling("stop_regex_open", "stop_regex is no regular expression", stop_regex="(")
    yield sampling("stop_regex_of_two", "stop_regex is no regular expression", stop_regex=["a", "*"])
    yield sampling("stop_regex_huge_count", "", stop_regex="a{99999999999999999999}")
    yield sampling("stop_regex_long", "limit", stop_regex="a" * 300)
    yield sampling("stop_regex_a_number", "", stop_regex=3)
    yield sampling("stop_regex_endless", "a repeat without an upper limit", stop_regex="( | | | | | | | | )*b")
    yield sampling("stop_regex_of_many_ways", "ways to match", stop_regex=["a", "(a|aa){20}b"])
    yield sampling("stop_many", "at most 32", stop=["x"] * 40)
    yield sampling("stop_a_number", "", stop=5)
    yield sampling("stop_id_outside", f"stop_token_ids has the token id {V}", stop_token_ids=[V])
    yield sampling("stop_id_negative", "stop_token_ids has the token id -1", stop_token_ids=[-1])
    yield sampling("stop_id_huge", "", stop_token_ids=[HUGE])
    yield sampling("regex_open", "", regex="(")
    yield sampling("schema_no_json", "", json_schema="{")
    yield sampling("schema_of_nothing", "", json_schema='{"type": "nothing"}')
    yield sampling("ebnf_wrong", "", ebnf="root ::= (")
    yield sampling("two_grammars", "Only one", regex="a", ebnf='root ::= "a"')
    yield sampling("structural_tag_wrong", "", structural_tag="{}")
    yield completion("schema_wrong", "", response_format={"type": "json_schema"})
    yield completion("stop_regex_open", "stop_regex", stop_regex="(")
    yield completion("stop_regex_endless", "a repeat without an upper limit", stop_regex=".*b")


def _openai() -> Iterator[Hostile]:
    streamed = {"stream": True, "sampling_params": {"max_new_tokens": 2}}
    yield generate(
        "stream_id_outside", '{"error":{"message":"the prompt has the token id', 200, input_ids=[V], **streamed
    )
    yield completion("stream_id_outside", "the prompt has the token id", prompt=[V], stream=True)
    yield completion("stream_of_stop_regex", "no regular expression", stop_regex="(", stream=True)
    yield completion("empty", "", prompt="")
    yield completion("empty_list", "", prompt=[])
    yield completion("an_empty_one", "", prompt=["a", ""])
    yield completion("a_health_check", "rid must not begin with HEALTH_CHECK", rid="HEALTH_CHECK_me")
    yield completion("a_list_of_rids", "rid is a list, but there is one prompt", rid=["x"])
    yield completion("ids_outside", "the prompt has the token id", prompt=[V, 1])
    yield completion("a_number", "", prompt=7)
    yield completion("best_of_nothing", "", prompt=None)
    if not HAS_TEMPLATE:
        yield chat("without_a_template", "chat_template is not set")
        yield chat("stream_without_a_template", "chat_template is not set", stream=True)
    yield chat("nothing", "", messages=[])
    yield chat("unknown_role", "", messages=[{"role": "nobody", "content": 1}])
    yield chat("own_template", "chat_template", chat_template_kwargs={"chat_template": "{{ messages }}"})
    for name in ("tokenize", "add_generation_prompt"):
        yield chat(f"template_{name}", f"and {name} is none; leave it out", chat_template_kwargs={name: True})
    yield Hostile("messages", "/v1/messages", {"model": "demo", "messages": [], "max_tokens": 1}, "")
    yield Hostile("embeddings", "/v1/embeddings", {"model": "demo", "input": "a"}, "")
    yield Hostile("encode", "/encode", {"text": "a"}, "no embedding model")
    yield Hostile("classify", "/classify", {"text": "a"}, "no embedding model")
    yield Hostile("rerank", "/v1/rerank", {"query": "a", "documents": ["b"]}, "")
    score = {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": [V]}
    yield Hostile("score_outside", "/v1/score", score, "")
    for odd in ([-1], [V], [[1], [-1]]):
        yield Hostile(f"detokenize_{odd}", "/detokenize", {"model": "demo", "tokens": odd}, "tokens has the token id")
    yield Hostile("detokenize_huge", "/detokenize", {"model": "demo", "tokens": [HUGE]}, "")
    yield Hostile("encode_no_ids", "/encode", {"input_ids": []}, "no embedding model")
    yield Hostile("classify_mixed_ids", "/classify", {"input_ids": [[1], []]}, "no embedding model")
    yield Hostile("v1_classify", "/v1/classify", {"model": "demo", "input": [5]}, "no embedding model")
    yield Hostile("v1_classify_nothing", "/v1/classify", {"model": "demo", "input": []}, "empty")
    for stream in (True, False):
        odd = {"model": "demo", "stream": stream, "options": {"temperature": -1, "num_predict": 4}}
        messages = {"messages": [{"role": "user", "content": "a"}]}
        says = "temperature" if HAS_TEMPLATE else "chat_template"
        yield Hostile(f"ollama_generate_{stream}", "/api/generate", odd | {"prompt": "a"}, "temperature")
        yield Hostile(f"ollama_chat_{stream}", "/api/chat", odd | messages, says)
    yield Hostile("tokenize_nothing", "/tokenize", {"model": "demo", "prompt": None}, "")
    yield Hostile("unknown_model", "/v1/models/nobody", None, "", 404, "GET")
    instances = {"instances": [{"text": "a"}]}
    wrong = instances | {"parameters": {"sampling_params": {"top_p": "x"}}}
    yield Hostile("vertex_setting", "/vertex_generate", wrong, "sampling_params.top_p")
    inner = instances | {"parameters": {"sampling_params": {"is_normalized": True, "temperature": 0}}}
    for name, odd in {
        "no_prompt": {"instances": [{}]},
        "half_a_prompt": {"instances": [{"text": "a"}, {}]},
        "a_number": {"instances": [{"text": 5}]},
        "half_of_ids": {"instances": [{"input_ids": [1]}, {"text": "a"}]},
        "unknown": instances | {"parameters": {"nobody": 1}},
        "twice": instances | {"parameters": {"text": "b"}},
    }.items():
        yield Hostile(f"vertex_{name}", "/vertex_generate", odd, "")
    yield Hostile("vertex_internal", "/vertex_generate", inner, "is_normalized")


def _inner_fields() -> Iterator[Hostile]:
    ask = {"text": "import os", "sampling_params": {"max_new_tokens": 2}}
    yield generate("overrides", "positional_embed_overrides", **ask, positional_embed_overrides={"embeds": [1]})
    yield generate("overrides_a_list", "positional_embed_overrides", **ask, positional_embed_overrides=["x", [1]])
    yield generate("session_unknown", "does not exist", **ask, session_params={"id": "nobody"})
    yield generate("session_of_nothing", "", **ask, session_params={"nobody": 1})
    yield generate("session_id_a_number", "", **ask, session_params={"id": 5})
    yield generate("session_replaced", "replace needs the rid", **ask, session_params={"id": "a", "replace": True})
    yield generate("two_sessions", "cannot both", **ask, session_id="a", session_params={"id": "b"})
    yield generate("hidden_states", "return", **ask, return_hidden_states=True)
    yield generate("logit_processor", "custom logit processor", **ask, custom_logit_processor="x")
    yield generate("adapter", "", **ask, lora_path="nobody")
    yield generate("rank_outside", "out of range", **ask, routed_dp_rank=7)
    yield generate("priority_huge", "", **ask, priority=HUGE)
    yield generate("mask_of_all", "return_sampling_mask", **ask, return_sampling_mask=True)
    yield generate("thinking", "enable-strict-thinking", **ask, max_thinking_tokens=3)
    yield generate("watermark_wrong", "", **ask, watermark={"key": "x"})
    yield generate("experts_start_negative", "", **ask, return_routed_experts=True, routed_experts_start_len=-5)


def _administration() -> Iterator[Hostile]:
    records = tuple(f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))
    for route in (
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/start_profile",
        "/stop_profile",
        *records,
    ):
        yield Hostile(route[1:], route, {}, "not offered by rayspec's CPU platform")
    yield Hostile("profile_by_get", "/start_profile", None, "not offered by rayspec's CPU platform", 400, "GET")
    disk = {"model_path": "/nowhere"}
    yield Hostile("weights_from_nowhere", "/update_weights_from_disk", disk, "", 400)
    yield Hostile("adapter_from_nowhere", "/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}, "", 400)
    yield Hostile("abort_nothing", "/abort_request", {"rid": 5}, "", 400)
    yield Hostile("flush_never", "/flush_cache?timeout=-1", None, "", 400)


REQUESTS: tuple[Hostile, ...] = (
    *_prompts(),
    *_no_requests(),
    *_lists(),
    *_logprobs(),
    *_numbers(),
    *_stops_and_grammars(),
    *_openai(),
    *_inner_fields(),
    *_administration(),
)


def in_process() -> list[Hostile]:
    """Those of /generate as arguments of `sglang.Engine.generate`."""
    from sglang import Engine

    known = inspect.signature(Engine.generate).parameters
    found = []
    for request in (*_prompts(), *_lists(), *_logprobs(), *_numbers(), *_not_in_json(), *_stops_and_grammars()):
        if request.route == "/generate":
            arguments = {"prompt" if name == "text" else name: value for name, value in request.body.items()}
            found += [request._replace(body=arguments)] if set(arguments) <= set(known) else []
    return found
