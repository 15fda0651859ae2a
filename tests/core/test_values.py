"""Values of the core are frozen: they can be shared between threads, hashed, and compared."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import is_dataclass
from typing import Any

import outrider.core

COUNTERS = {"Stats", "AuditTrail", "Losses"}  # written to while a generation runs


def dataclasses_of_core() -> list[Any]:
    names = [each.name for each in pkgutil.iter_modules(outrider.core.__path__)]
    modules = [importlib.import_module(f"outrider.core.{name}") for name in names]
    return [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and is_dataclass(each) and each.__module__ == module.__name__
    ]


def test_all_dataclasses_but_the_counters_are_frozen() -> None:
    found: list[Any] = dataclasses_of_core()
    assert {each.__name__ for each in found if not each.__dataclass_params__.frozen} == COUNTERS
    assert len(found) > 30
