"""Operators are registered once: a second registration of a name frees the first, which its callers still hold."""

from importlib import import_module
from pkgutil import iter_modules

import pytest
from torch._library.custom_ops import OPDEFS, CustomOpDef

import rayspec_kernels

OPERATORS = [
    value
    for module in iter_modules(rayspec_kernels.__path__)
    for value in vars(import_module(f"rayspec_kernels.{module.name}")).values()
    if isinstance(value, CustomOpDef)
]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator._qualname)
def test_callers_hold_what_is_registered(operator: CustomOpDef) -> None:
    assert OPDEFS[operator._qualname] is operator
