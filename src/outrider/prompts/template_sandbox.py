"""Rendering of chat templates as in transformers, with bounds on time and memory.

A template is a foreign program in a checkpoint. jinja2's sandbox keeps it from files and from Python's internals, but
does not limit memory and time. So its syntax tree is changed before compilation: each loop step, call, constructed text
and written text is charged to a budget.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from math import prod
from typing import Any, Final, cast

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS: Final = 1_000_000  # of loops and calls; constructed values cost one per 1,024 characters
MAX_CHARACTERS: Final = 2**22  # of a value, and of the whole output
MAX_WIDTH: Final = 100_000  # of a field, an indentation or a batch
MAX_BITS: Final = 2**14  # of a whole number
_WIDE: Final = re.compile(r"\d{6}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")  # a width of a million, or from a value

_WIDENING: Final = ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "tojson", "wordwrap", "zfill")


class Budget:
    """The remaining budget of one rendering."""

    def __init__(self) -> None:
        self._steps, self._characters = MAX_STEPS, MAX_CHARACTERS

    def spend(self, steps: int = 1) -> None:
        """Charge steps. Raise TemplateError if too few are left."""
        self._steps -= steps
        if self._steps < 0:
            raise TemplateError(f"it takes more than {MAX_STEPS} steps")

    def write(self, text: str) -> None:
        """Charge a written text. Raise TemplateError if too few characters are left."""
        self.spend()
        self._characters -= len(text)
        if self._characters < 0:
            raise TemplateError(f"it writes more than {MAX_CHARACTERS} characters")


_budget: ContextVar[Budget] = ContextVar("budget")


def render(source: str, **values: object) -> str:
    """Render a template with these values. Like any program, it may raise anything."""
    template = _compiled(source)
    before = _budget.set(Budget())
    try:
        return template.render(**values)
    finally:
        _budget.reset(before)


@lru_cache(16)
def _compiled(source: str) -> Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationExtension, loopcontrols])
    tree = _CountingTransformer().visit(environment.parse(source))
    return Template.from_code(environment, environment.compile(tree), environment.make_globals(None))


class _Sandbox(ImmutableSandboxedEnvironment):
    """transformers' environment of chat templates, with bounded operators, calls and filters."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda text: datetime.now().strftime(text),
        }
        self.filters |= {"tojson": _tojson}
        self.filters = {name: _limit_output(name, function) for name, function in self.filters.items()}
        counting = (_charge_items, _charge_value, _charge_text, _charge_output)
        self.filters |= {function.__name__: function for function in counting}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return _charge_value(context, super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            _check_growth(method.__name__, text, (*args, *kwargs.values()))
        return _charge_value(__context, super().call(__context, __obj, *args, **kwargs))


class _GenerationExtension(Extension):
    """`{% generation %}`, with which templates mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _CountingTransformer(NodeTransformer):
    """Pass loop sequences, constructed values and output through counting filters."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _apply_filter("_charge_items", cast(nodes.Expr, node.iter))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_apply_filter("_charge_output", each) for each in node.nodes]
        return node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        is_block = node.node is None  # {% filter … %} has no value
        return node if is_block else _apply_filter("_charge_value", node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_apply_filter("_charge_text", each) for each in node.nodes]
        return _apply_filter("_charge_value", node)


def _apply_filter(name: str, node: nodes.Expr) -> nodes.Expr:
    counted = nodes.Filter(node, name, [], [], None, None)
    counted.set_lineno(node.lineno)
    return counted


# The environment's own functions ------------------------------------------------------------------------------


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# Filters that count. One with a context is never run while a template is compiled ------------------------------


@pass_context
def _charge_items(context: Context, value: Iterable[object]) -> list[object]:
    return list(_iterate(value))


def _iterate(value: Iterable[object]) -> Iterator[object]:
    for item in value:
        _budget.get().spend()
        yield item


@pass_context
def _charge_value(context: Context, value: object) -> object:
    if isinstance(value, Iterator):
        return _iterate(value)
    if isinstance(value, str | list | tuple):
        _check_size(len(value))
        _budget.get().spend(1 + len(value) // 1024)
    return value


@pass_context
def _charge_text(context: Context, value: object) -> str:
    _size(value)
    return str(value)


@pass_context
def _charge_output(context: Context, value: object) -> str:
    text = _charge_text(context, value)
    _budget.get().write(text)
    return text


def _limit_output(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a check of its output's size. jinja2 passes an environment first to some filters."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        value = args[at]
        if name == "join" and isinstance(value, Iterator):
            value = list(value)
        _check_growth(name, value, (*args[at + 1 :], *kwargs.values()))
        return function(*args[:at], value, *args[at + 1 :], **kwargs)

    return limited


# Bounds on the result of one operation ---------------------------------------------------------------------------


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateError(f"it makes a value of more than {MAX_CHARACTERS} characters")


def _size(value: object) -> int:
    """Return the approximate number of characters of a value as text. A list may hold another many times."""
    if isinstance(value, str):
        return len(value)
    size, pending = 0, [value]
    while pending:  # no recursion, whose cost depends on the caller's stack
        each = pending.pop()
        if isinstance(each, dict):
            each = [*each, *each.values()]
        if isinstance(each, list | tuple):
            _budget.get().spend(len(each))
            pending += each
            size += 2
        else:
            size += len(each) if isinstance(each, str) else 8
        _check_size(size)
    return size


def _check_operation(operator: str, left: Any, right: Any) -> None:
    sizes = [len(value) for value in (left, right) if isinstance(value, str | list | tuple)]
    numbers = [value for value in (left, right) if isinstance(value, int)]
    if operator == "%" and isinstance(left, str):
        _check_growth("format", left, (right,))
    elif operator == "+" and sizes:
        _check_size(sum(sizes))
    elif operator == "*" and sizes and numbers:
        _check_size(sizes[0] * numbers[0])
    elif len(numbers) == 2:
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TemplateError(f"it makes a number of more than {MAX_BITS} bits")


def _check_growth(name: str, value: object, arguments: tuple[object, ...]) -> None:
    """Raise TemplateError if a text's method, or the filter of that name, would return too long a text."""
    widths = [each for each in arguments if isinstance(each, int)]
    if name in _WIDENING and max(widths, default=0) > MAX_WIDTH:
        raise TemplateError(f"{name} with {max(widths)}: at most {MAX_WIDTH} are allowed")
    size = _size(value)
    if name == "tojson":
        _check_size(size * (1 + max(widths, default=0)))
    elif name == "join":  # of the text between, or of the parts
        counts = [len(each) for each in (value, *arguments) if isinstance(each, str | list | tuple)]
        _check_size(size + sum(map(_size, arguments)) + prod(counts))
    elif not isinstance(value, str):
        return
    elif name in ("format", "format_map"):
        if _WIDE.search(value):
            raise TemplateError("it formats with a field that is too wide, or whose width is a value")
        _check_size(len(value) + sum(map(_size, arguments)) * (1 + value.count("{") + value.count("%")))
    elif name == "replace" and len(arguments) >= 2:
        _check_size(len(value) + value.count(str(arguments[0])) * _size(arguments[1]))
    elif name in ("translate", "wordwrap"):
        _check_size(len(value) * max(map(_size, arguments), default=1))
    elif name in _WIDENING:
        _check_size(len(value) + (1 + len(re.findall(r"[\n\t]", value))) * max(widths, default=8))
