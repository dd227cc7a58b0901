"""What SGLang's CUDA operations demand of their tensors, held against what their CPU replacements are given.

Plain torch takes what a CUDA operation refuses, or reads as something else: another dtype, a view, a shorter buffer.
So each replacement in `spec_ops.py` and `fused_ops.py`, and each pass of `attention.py`, says what the operation that
it stands in for checks or, where that is a Triton kernel, takes for granted in its addresses, and every call on the CPU
platform is held against it. What an engine does here is then something that it could do on a GPU.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_Operation = TypeVar("_Operation", bound=Callable[..., Any])
_INTEGERS = frozenset({torch.int32, torch.int64, torch.uint32, torch.uint64})
_DTYPES = {
    "int32": frozenset({torch.int32}),
    "int64": frozenset({torch.int64}),
    "float32": frozenset({torch.float32}),
    "integer": _INTEGERS,
    "slot": frozenset({torch.int32, torch.int64}),
    "byte": frozenset({torch.bool, torch.uint8}),
    "floating": frozenset({torch.float16, torch.bfloat16, torch.float32}),
}
_AT_LEAST = ">="
_LAYOUTS = ("strided", "rows")


class ContractBrokenError(TypeError):
    """A tensor that the CUDA operation would refuse or misread."""


class Form(NamedTuple):
    """What a demand looks at of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...] | None  # None where it is contiguous
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        strides = None if tensor.is_contiguous() else tensor.stride()
        return cls(tensor.dtype, tensor.shape, strides, tensor.device)


@dataclass(frozen=True)
class Demand:
    """What an operation requires of one tensor."""

    text: str
    dtypes: frozenset[torch.dtype]
    sizes: tuple[str, ...]  # names and numbers, products of them, or the least of them behind `>=`
    layout: str | None  # None: contiguous; "strided": the operation is told the strides; "rows": all but the last, of 1

    @classmethod
    def of(cls, text: str) -> "Demand":
        dtype, *sizes = text.split()
        layout = sizes.pop() if sizes[-1] in _LAYOUTS else None
        return cls(text, _DTYPES[dtype], tuple(sizes), layout)

    def problem(self, form: Form, known: dict[str, int]) -> str | None:
        """What is wrong with it; sizes that get a name here are added to `known`."""
        if form.dtype not in self.dtypes:
            return f"dtype {form.dtype}"
        if len(form.shape) != len(self.sizes):
            return f"shape {list(form.shape)}"
        for size, wanted in zip(form.shape, self.sizes, strict=True):
            least, factors = wanted.startswith(_AT_LEAST), wanted.removeprefix(_AT_LEAST).split("*")
            if len(factors) == 1 and not least and not factors[0].isdigit():
                known.setdefault(factors[0], size)
            expected = math.prod(int(f) if f.isdigit() else known[f] for f in factors)
            if size < expected if least else size != expected:
                return f"shape {list(form.shape)}, where {wanted} is {expected}"
        if form.strides is None or self.layout == "strided":
            return None
        if self.layout is None or form.strides[-1] != 1:
            what = "contiguous" if self.layout is None else "those of contiguous rows"
            return f"strides {form.strides} (shape {list(form.shape)}), which are not {what}"
        return None


class Contract:
    """The demands of one operation. What was found of tensors of the same forms is remembered: a decode step mostly
    asks what the step before did."""

    def __init__(self, operation: str, texts: Mapping[str, str]) -> None:
        self.operation = operation
        self.demands = {name: Demand.of(text) for name, text in texts.items()}
        self._broken = functools.lru_cache(maxsize=256)(self._first_broken)

    def check(self, given: Mapping[str, Any]) -> None:
        """Raise ContractBrokenError unless the tensors of a call are what the CUDA operation demands."""
        forms = tuple((name, Form.of(given[name])) for name in self.demands if given.get(name) is not None)
        sizes = tuple((name, value) for name, value in given.items() if type(value) is int)
        if broken := self._broken(forms, sizes):
            raise ContractBrokenError(broken)

    def _first_broken(self, forms: tuple[tuple[str, Form], ...], sizes: tuple[tuple[str, int], ...]) -> str | None:
        known, device = dict(sizes), forms[0][1].device if forms else None
        for name, form in forms:
            problem = self.demands[name].problem(form, known)
            if problem is None and form.device != device:
                problem = f"device {form.device}, while others are on {device}"
            if problem is not None:
                demanded = self.demands[name].text
                return f"{self.operation} was given {name} with {problem}; SGLang's CUDA operation demands {demanded}"
        return None


def demands(**texts: str) -> Callable[[_Operation], _Operation]:
    """Hold every call of a replacement against demands on its tensors, by the names of its arguments.

    A demand is a dtype (`integer`, `slot`, `byte` and `floating` stand for several) and a size for each dimension: a
    name, which means the same size in all tensors of a call and may be that of an integer argument; a number; products
    of these; `>=` before the least that a buffer must hold. Contiguous, unless `strided` follows, or `rows` where only
    the last dimension must be. All tensors are on one device; an argument that is None is left out.
    """

    def decorate(operation: _Operation) -> _Operation:
        names = tuple(inspect.signature(operation).parameters)
        assert set(texts) <= set(names), f"{operation.__name__} has no such arguments"
        contract = Contract(operation.__name__, texts)

        @functools.wraps(operation)
        def checked(*args: Any, **kwargs: Any) -> Any:
            contract.check({**dict(zip(names, args, strict=False)), **kwargs})
            return operation(*args, **kwargs)

        checked.contract = contract  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate
