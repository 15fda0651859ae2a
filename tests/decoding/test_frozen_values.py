"""Values of sampling and decoding are frozen: they can be shared between threads, hashed, and compared."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import is_dataclass
from typing import Any

import outrider.decoding
import outrider.sampling

COUNTERS = {"Stats", "AuditTrail", "LossSums"}  # written to while a generation runs


def pure_dataclasses() -> list[Any]:
    packages = (outrider.sampling, outrider.decoding)
    names = [f"{each.__name__}.{module.name}" for each in packages for module in pkgutil.iter_modules(each.__path__)]
    modules = [importlib.import_module(name) for name in names]
    return [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and is_dataclass(each) and each.__module__ == module.__name__
    ]


def test_all_dataclasses_but_the_counters_are_frozen() -> None:
    found: list[Any] = pure_dataclasses()
    assert {each.__name__ for each in found if not each.__dataclass_params__.frozen} == COUNTERS
    assert len(found) > 30
