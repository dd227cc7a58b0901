"""What SGLang's CUDA operations demand of their tensors, held against what their CPU replacements are given.

Plain torch takes what a CUDA operation refuses, or reads as something else: another dtype, a view, a shorter buffer.
So each replacement in `spec_ops.py` says what the operation that it stands in for checks or, where that is a Triton
kernel, takes for granted in its addresses, and every call on the CPU platform is held against it. What an engine does
here is then something that it could do on a GPU.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

_Operation = TypeVar("_Operation", bound=Callable[..., Any])
_INTEGERS = frozenset({torch.int32, torch.int64, torch.uint32, torch.uint64})
_DTYPES = {
    "int32": frozenset({torch.int32}),
    "int64": frozenset({torch.int64}),
    "float32": frozenset({torch.float32}),
    "integer": _INTEGERS,
    "byte": frozenset({torch.bool, torch.uint8}),
}
_AT_LEAST = ">="


class ContractBrokenError(TypeError):
    """A tensor that the CUDA operation would refuse or misread."""


@dataclass(frozen=True)
class Demand:
    """Of one tensor."""

    text: str
    dtypes: frozenset[torch.dtype]
    sizes: tuple[str, ...]  # names and numbers, products of them, or the least of them behind `>=`
    is_strided: bool  # the operation is told the strides

    @classmethod
    def of(cls, text: str) -> "Demand":
        dtype, *sizes = text.split()
        is_strided = sizes[-1:] == ["strided"]
        return cls(text, _DTYPES[dtype], tuple(sizes[: len(sizes) - is_strided]), is_strided)

    def problem(self, tensor: Tensor, known: dict[str, int]) -> str | None:
        """What is wrong with it; sizes that get a name here are added to `known`."""
        if tensor.dtype not in self.dtypes:
            return f"dtype {tensor.dtype}"
        if tensor.dim() != len(self.sizes):
            return f"shape {list(tensor.shape)}"
        for size, wanted in zip(tensor.shape, self.sizes, strict=True):
            least, factors = wanted.startswith(_AT_LEAST), wanted.removeprefix(_AT_LEAST).split("*")
            if len(factors) == 1 and not least and not factors[0].isdigit():
                known.setdefault(factors[0], size)
            expected = math.prod(int(f) if f.isdigit() else known[f] for f in factors)
            if size < expected if least else size != expected:
                return f"shape {list(tensor.shape)}, where {wanted} is {expected}"
        if not self.is_strided and not tensor.is_contiguous():
            return f"strides {tensor.stride()} (shape {list(tensor.shape)}), which are not contiguous"
        return None


def demands(**texts: str) -> Callable[[_Operation], _Operation]:
    """Hold every call of a replacement against demands on its tensors, by the names of its arguments.

    A demand is a dtype (`integer` and `byte` stand for several) and a size for each dimension: a name, which means the
    same size in all tensors of a call and may be that of an integer argument; a number; products of these; `>=` before
    the least that a buffer must hold. Contiguous, unless `strided` follows. All tensors are on one device; an argument
    that is None is left out.
    """
    contract = {name: Demand.of(text) for name, text in texts.items()}

    def decorate(operation: _Operation) -> _Operation:
        names = tuple(inspect.signature(operation).parameters)
        assert set(contract) <= set(names), f"{operation.__name__} has no such arguments"

        @functools.wraps(operation)
        def checked(*args: Any, **kwargs: Any) -> Any:
            check(operation.__name__, contract, {**dict(zip(names, args, strict=False)), **kwargs})
            return operation(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def check(operation: str, contract: Mapping[str, Demand], given: Mapping[str, Any]) -> None:
    """Raise ContractBrokenError unless the tensors of a call are what the CUDA operation demands."""
    known = {name: value for name, value in given.items() if type(value) is int}
    device: torch.device | None = None
    for name, demand in contract.items():
        tensor = given.get(name)
        if tensor is None:
            continue
        device = device or tensor.device
        problem = demand.problem(tensor, known)
        if problem is None and tensor.device != device:
            problem = f"device {tensor.device}, while others are on {device}"
        if problem is not None:
            raise ContractBrokenError(
                f"{operation} was given {name} with {problem}; SGLang's CUDA operation demands {demand.text}"
            )
