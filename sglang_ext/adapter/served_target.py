"""What the running server serves, in the terms in which a drafter names its target."""

from contextlib import suppress
from functools import lru_cache

from sglang_ext.adapter.patches import on_cpu_platform
from sglang_ext.adapter.target_hosts import check_tree
from sglang_ext.drafters.target import TargetInfo, vocabulary_sha256


@lru_cache(maxsize=8)
def _describe(model: str, tokenizer: str, revision: str | None, trusted: bool) -> tuple[int, int, int, str]:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trusted).get_text_config()
    vocabulary = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trusted).get_vocab()
    return config.hidden_size, config.vocab_size, config.num_hidden_layers, vocabulary_sha256(vocabulary)


def served_target(tap_layers: tuple[int, ...], with_output: bool = False) -> TargetInfo:
    """The target of this SGLang process, as `target_info`."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    hidden, vocab, layers, fingerprint = _describe(
        args.model_path, args.tokenizer_path or args.model_path, args.revision, args.trust_remote_code
    )
    named = TargetInfo(
        name=args.model_path, hidden_size=hidden, vocab_size=vocab, tokenizer_sha256=fingerprint, tap_layers=tap_layers
    )
    check_taps(named, layers, with_output)
    return named


def check_taps(target: TargetInfo, layers: int, with_output: bool) -> None:
    """Raise ValueError where a drafter's taps lie outside of a target of so many layers. `with_output`: the first may
    be the embedding's output and the last must be the target's."""
    tap_layers = target.tap_layers
    inputs = tap_layers[:-1] if with_output else tap_layers
    if with_output and tap_layers[-1] != layers:
        raise ValueError(
            f"the drafter taps the output of layer {tap_layers[-1]} as its target's last, but the target "
            f"{target.name} has {layers} layers; serve it with its own target"
        )
    first = 0 if with_output else 1
    outside = [tap for tap in inputs if not first <= tap < layers]
    if outside:
        raise ValueError(
            f"the drafter taps layer {outside[0]}, but the target {target.name} has layers {first}..{layers - 1}; "
            "serve it with its own target"
        )


def check_tree_of_windows() -> None:
    """Raise ValueError where this server would verify trees in windows that are not the target's (`check_tree`)."""
    from sglang.srt.runtime_context import attention_backends, get_server_args, get_spec
    from transformers import AutoConfig

    args, topk = get_server_args(), get_spec().speculative_eagle_topk or 1
    if topk > 1 and not on_cpu_platform():  # whose attention goes by position
        config = AutoConfig.from_pretrained(
            args.model_path, revision=args.revision, trust_remote_code=args.trust_remote_code
        )
        check_tree(config.get_text_config(), topk, attention_backends())


@lru_cache(maxsize=8)
def _stop_ids(model: str, tokenizer: str, revision: str | None, trusted: bool) -> frozenset[int]:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    found = [AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trusted).eos_token_id]
    found.append(AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trusted).eos_token_id)
    with suppress(OSError):  # not every model has one
        found.append(GenerationConfig.from_pretrained(model, revision=revision).eos_token_id)
    ids = [i for entry in found for i in (entry if isinstance(entry, list) else [entry])]
    return frozenset(i for i in ids if i is not None)


def served_stop_ids() -> frozenset[int]:
    """The tokens that end an answer of the served target: of its tokenizer, its config and its generation config."""
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    return _stop_ids(args.model_path, args.tokenizer_path or args.model_path, args.revision, args.trust_remote_code)
