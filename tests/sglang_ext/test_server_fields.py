"""SGLang's arguments as read from its source are those that it has."""

import json
import subprocess
import sys

import pytest

from sglang_ext.adapter.server_fields import check_overrides, server_fields

KINDS = """
import json
from typing import get_type_hints
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs
print("@" + json.dumps({f.name: repr(get_type_hints(ServerArgs).get(f.name)) for f in record_fields(ServerArgs)}))
"""


def test_names_and_simple_types_are_those_of_server_args() -> None:
    done = subprocess.run([sys.executable, "-c", KINDS], capture_output=True, text=True, check=True)
    theirs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("@"))[1:])
    ours = server_fields()
    assert set(ours) <= set(theirs)
    assert set(theirs) - set(ours) <= {"custom_sigquit_handler"}
    for name, field in ours.items():
        if field.kind is not None:
            kind = field.kind.__name__
            assert theirs[name] in (f"<class '{kind}'>", f"typing.Optional[{kind}]"), name


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
