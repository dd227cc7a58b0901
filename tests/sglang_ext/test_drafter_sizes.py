"""`recipe.intermediate_size`: the drafters whose layer it sizes, and those that refuse it."""

from types import SimpleNamespace
from typing import Any

import pytest

from rayspec.training.recipe import Recipe
from sglang_ext.drafters import body_for, families, parse_drafter
from sglang_ext.drafters.rope import Rope

SIZES = {
    **{"hidden_size": 64, "target_hidden_size": 64, "vocab_size": 100, "max_position_embeddings": 128},
    **{"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "rms_norm_eps": 1e-5,
}
TARGET: Any = SimpleNamespace(sizes=lambda: SIZES, rope=Rope(rope_theta=500.0), num_layers=8, taps=(2, 4, 5))
SIZED = ({"kind": "eagle3"}, {"kind": "eagle"}, {"kind": "specformer"}, {"kind": "hydra", "prefix_layer": True})
REFUSED = {
    "medusa": ({"kind": "medusa"}, "leave it out"),
    "hydra": ({"kind": "hydra"}, "or set drafter.prefix_layer"),
    "independent": ({"kind": "independent"}, "set drafter.intermediate_size"),
}


@pytest.mark.parametrize("entry", SIZED, ids=lambda entry: entry["kind"])
def test_a_layer_has_the_size_of_the_recipe(entry: dict[str, Any]) -> None:
    options = parse_drafter(entry)
    for size, expected in ((None, 96), (200, 200)):
        body: Any = body_for(TARGET, options, Recipe(intermediate_size=size))
        assert getattr(body, "layer", body).intermediate_size == expected


@pytest.mark.parametrize(("entry", "way_out"), REFUSED.values(), ids=REFUSED)
def test_a_drafter_without_such_a_layer_refuses_it(entry: dict[str, Any], way_out: str) -> None:
    options = parse_drafter(entry)
    body_for(TARGET, options, Recipe())
    with pytest.raises(ValueError, match=rf"recipe.intermediate_size=200 sizes .* kind '{entry['kind']}'.*{way_out}"):
        body_for(TARGET, options, Recipe(intermediate_size=200))


def test_every_family_is_one_of_the_two() -> None:
    assert {entry["kind"] for entry in SIZED} | REFUSED.keys() == families().keys()
