"""Arguments of SGLang that a user names are checked by its source (test_internals holds that reading against it)."""

import pytest

from sglang_ext.adapter.server_fields import check_overrides


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"tpsize": 2}, "engine.extra.tpsize is no argument of SGLang.*tp_size"),
        ({"tp_size": "2"}, "engine.extra.tp_size must be of type int"),
        ({"tp_size": True}, "must be of type int"),
        ({"tp_size": None}, "must be of type int"),
        ({"mem_fraction_static": "x"}, "must be of type float"),
        ({"kv_cache_dtype": "int2"}, "must be one of auto, "),
        ({"disable_cuda_graph": 1}, "must be of type bool"),
    ],
)
def test_what_server_args_does_not_take_is_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_overrides(overrides, "engine.extra")


def test_what_it_takes_passes() -> None:
    check_overrides(
        {"tp_size": 2, "mem_fraction_static": 1, "kv_cache_dtype": "auto", "max_running_requests": None}, "engine.extra"
    )
