"""The states of Gemma 3's layers, of which SGLang gives a drafter a part.

Between two layers the residual stream is in two tensors, what the last layer added and the sum of all before it, and
the next layer's first norm adds them (on CUDA in place, in both). SGLang keeps the first of the two. Here the sum is
taken before a layer runs, and is given in its place; the target's own computation stays as it is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor


def take_sums(original: Callable[..., Any], target: Any, layer_ids: list[int] | None = None) -> None:
    """AROUND Gemma3ForCausalLM.set_eagle3_layers_to_capture. Raises ValueError for the output of the last layer, which
    is no layer's input."""
    original(target, layer_ids)
    model = target.model
    if len(model.layers) in model.layers_to_capture:
        raise ValueError(
            f"the drafter taps the output of layer {len(model.layers)}, the last one, which rayspec does not give of a "
            "Gemma 3 target; serve a drafter that taps earlier layers"
        )
    model.rayspec_states = {}
    for layer in model.layers_to_capture:
        model.layers[layer].register_forward_pre_hook(partial(_take, model.rayspec_states, layer), with_kwargs=True)


def _take(states: dict[int, Tensor], layer: int, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    added_TG, before_TG = named["hidden_states"], named["residual"]
    # the first layer has no sum yet, and goes on to write into the embeddings
    states[layer] = added_TG.clone() if before_TG is None else added_TG + before_TG


def give_sums(original: Callable[..., Any], model: Any, *arguments: Any, **named: Any) -> Any:
    """AROUND Gemma3TextModel.forward: (last hidden state, states of the layers that a drafter taps)."""
    output = original(model, *arguments, **named)
    states = getattr(model, "rayspec_states", None)
    if states is None:  # no drafter reads them
        return output
    assert states, "SGLang calls the tapped layers, and each call takes its sum"
    return output[0], [states.pop(layer) for layer in sorted(states)]
