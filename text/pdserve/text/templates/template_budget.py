"""`BudgetedEnvironment`: Jinja's sandbox with limits on the size of values and the time of one rendering.

The sandbox prevents access to Python's internals, but allows `'a' * 10**9`. Here each rendering has a
budget: characters of all values that it makes, and CPU time of its thread. Operations whose result can be much larger than
their operands are measured before they run: `*`, `+`, `**`, `%`, `~`, filters, methods of strings. Loops, macros and outputs are
counted as they run. Operations that are not measured (comparisons, subscripts, tests) take time proportional to their operands at
most, and the next measured operation checks the time.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from types import NoneType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_VALUE_CHARS = 16 << 20
"""Characters of one value, and of the rendered text: as many as the largest message from a client has bytes."""
MAX_WORK_CHARS = 256 << 20
"""Characters of all values that one rendering makes."""
MAX_CPU_S = 2.0
"""CPU time of the thread that renders."""
MAX_NUMBER_BITS = 4096
_MAX_WIDTH = 1000
"""Characters of a padded or indented piece of text."""
_SCALAR_CHARS = 8
_LARGE_CHARS = 4096
_LOOK_EVERY = 64
_PERCENT = re.compile(r"%[^%a-zA-Z]*")
_STRINGS = (str, bytes)
_LISTS = (list, tuple, set, frozenset, range)
_UNSIZED = (Iterator, KeysView, ValuesView, ItemsView)
"""Types that must be converted to a list to be measured."""
_VIEWS = (KeysView, ValuesView, ItemsView)
_SCALARS = (float, NoneType, Undefined)
"""With strings and whole numbers all values that are no containers: functions, iterators and other objects have no text, since
Python writes their addresses."""


class TemplateTooCostly(Exception):
    """The rendering would exceed its budget; the message names the limit."""


class _Budget:
    def __init__(self) -> None:
        self._chars_left = MAX_WORK_CHARS
        self._until = time.thread_time() + MAX_CPU_S
        self._num_spent = 0

    def spend(self, num_chars: int) -> None:
        """Raises: TemplateTooCostly."""
        self._chars_left -= num_chars
        self._num_spent += 1
        # reading the clock costs more than most operations
        if num_chars < _LARGE_CHARS and self._chars_left >= 0 and self._num_spent % _LOOK_EVERY:
            return
        if num_chars > MAX_VALUE_CHARS:
            raise TemplateTooCostly(f"a value of {num_chars} characters, at most {MAX_VALUE_CHARS} are allowed")
        if self._chars_left < 0:
            raise TemplateTooCostly(f"more than {MAX_WORK_CHARS} characters in all")
        self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        """Raises: TemplateTooCostly."""
        if time.thread_time() > self._until:
            raise TemplateTooCostly(f"more than {MAX_CPU_S:g} s of CPU time")

    def size(self, value: Any) -> int:
        """Approximate number of characters of a value as text.

        Raises: TemplateTooCostly if it exceeds the limit; SecurityError for a value whose text would show memory addresses.
        """
        if isinstance(value, _STRINGS):
            return len(value)
        total, waiting, num_seen = 0, [value], 0
        while waiting:
            one = waiting.pop()
            num_seen += 1
            if not num_seen % _LARGE_CHARS:
                self.look_at_the_clock()
            if isinstance(one, _STRINGS):
                total += len(one) + _SCALAR_CHARS
            elif isinstance(one, int):
                total += _SCALAR_CHARS + one.bit_length() // 3
            else:
                total += _SCALAR_CHARS
                if isinstance(one, Mapping):
                    waiting.extend(one.keys())
                    waiting.extend(one.values())
                elif isinstance(one, (*_LISTS, *_VIEWS)):
                    waiting.extend(one)
                elif not isinstance(one, _SCALARS):
                    raise SecurityError(f"a value of type {type(one).__name__} has no text")
            if total > MAX_VALUE_CHARS or len(waiting) > MAX_VALUE_CHARS:
                self.spend(max(total, len(waiting)))
        return total


_rendering = threading.local()


def _budget() -> _Budget:
    """Budget of the current rendering. There is none during compilation, so that the compiler does not compute constants."""
    budget: _Budget | None = getattr(_rendering, "budget", None)
    if budget is None:
        raise TemplateTooCostly("nothing may be computed while a template is compiled")
    return budget


@contextmanager
def rendering() -> Iterator[None]:
    """Give one rendering in this thread a budget of its own."""
    _rendering.budget = _Budget()
    try:
        yield
    finally:
        _rendering.budget = None


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates render only within `rendering()`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, optimized=False, **options)
        # one call can make text of any length
        del self.globals["lipsum"]

    def measure_filters(self) -> None:
        """Call once, after all filters are registered."""
        self.filters = {name: _measured(name, function) for name, function in self.filters.items()}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """As the sandbox does, after measuring the operands."""
        plain = operator == "+" and type(left) is str and type(right) is str
        _budget().spend(len(left) + len(right) if plain else _result_size(operator, left, right))
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """As the sandbox does, after measuring a method of a string or number."""
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        budget = _budget()
        if isinstance(owner, (*_STRINGS, int)):
            if args and isinstance(args[0], _UNSIZED):
                args = (list(args[0]), *args[1:])
            budget.spend(_method_size(budget, __obj.__name__, owner, args, kwargs))
        return _counted(budget, super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """As in the sandbox, only for formats whose text bounds the length of the result."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            budget = _budget()
            layout = value.__self__.replace("{{", "")
            if re.search(r"\{[^{}]*\{", layout):
                raise TemplateTooCostly("a format whose width is a value")
            _refuse_widths("".join(re.findall(r"\{[^{}]*\}", layout)))
            budget.spend(len(layout) + layout.count("{") * (_MAX_WIDTH + budget.size([*args, *kwargs.values()])))
            return wrapped(*args, **kwargs)

        return checked

    def joined(self, *parts: Any) -> str:
        """The result of `~` on its operands."""
        budget = _budget()
        budget.spend(sum([len(part) if type(part) is str else budget.size(part) for part in parts]))
        return "".join(map(str, parts))

    def passed(self, num_chars: int) -> str:
        """Count the start of the body of a loop or macro, which has `num_chars` characters."""
        _budget().spend(num_chars)
        return ""

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metered().visit(source), *args, **kwargs)


class _Metered(NodeTransformer):
    """Code generator that adds calls to measure operations for which the sandbox has no hook."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._begin(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._begin(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._begin(node)

    def _begin(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        num_chars = sum(len(data.data) for part in node.body for data in _data_of(part))
        passed = _call("passed", [nodes.Const(num_chars, lineno=node.lineno)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(passed, lineno=node.lineno))
        return node


def _data_of(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Measure the value of `{{ }}` before it becomes text."""
    budget = _budget()
    budget.spend(len(value) if type(value) is str else budget.size(value))
    return value


def _counted(budget: _Budget, value: Any) -> Any:
    if isinstance(value, (*_STRINGS, *_LISTS)):
        budget.spend(len(value))
    return value


_WRITERS = frozenset(("tojson", "string", "join", "pprint", "xmlattr", "urlencode", "format", "escape", "e", "sum"))
"""Filters whose result is text, or a sum, of all parts of a value."""
_OF_TEXT = _WRITERS - {"sum"} | frozenset(
    (
        *("capitalize", "center", "filesizeformat", "forceescape", "indent", "lower", "replace", "safe", "striptags"),
        *("title", "trim", "truncate", "upper", "urlize", "wordcount", "wordwrap"),
    )
)
"""Filters that make text of whatever they get."""
_ANY_NUMBER = frozenset(("default", "d", "int", "float", "truncate"))
"""Filters whose result does not grow with a number among their arguments."""


def _measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, preceded by a measurement of its operands."""
    num_contexts = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        contexts, operands = args[:num_contexts], list(args[num_contexts:])
        if name in _WRITERS and isinstance(operands[0], _UNSIZED):
            operands[0] = list(operands[0])
        if name in _OF_TEXT:
            for operand in (*operands, *kwargs.values()):
                budget.size(operand)
        budget.spend(_filter_size(budget, name, operands, kwargs))
        return _counted(budget, function(*contexts, *operands, **kwargs))

    return measured


def _filter_size(budget: _Budget, name: str, operands: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Approximate upper bound of the characters of a filter's result. Raises: TemplateTooCostly for a width above the limit."""
    value, options = operands[0], [*operands[1:], *kwargs.values()]
    widths = [option for option in options if isinstance(option, int)]
    if name not in _ANY_NUMBER and widths and max(widths) > _MAX_WIDTH:
        raise TemplateTooCostly(f"the filter {name} with {max(widths)}, at most {_MAX_WIDTH} is allowed")
    texts = [option for option in options if isinstance(option, _STRINGS)]
    longest = max(map(len, texts), default=0)
    num_chars = budget.size(value) if name in _WRITERS or isinstance(value, _STRINGS) else 0
    match name:
        case "replace" if isinstance(value, _STRINGS) and len(texts) == 2:
            return num_chars + _replaced_size(value, *texts)
        case "indent" if isinstance(value, _STRINGS):
            return num_chars + (str(value).count("\n") + 1) * max(longest, *widths, 4)
        case "wordwrap":
            return num_chars * max(longest, 2)
        case "format" if isinstance(value, _STRINGS):
            return _result_size("%", value, options)
        case "join" if isinstance(value, (*_STRINGS, *_LISTS, Mapping)):
            return num_chars + len(value) * longest
        case "tojson" if widths:
            return num_chars * (1 + max(widths) * _depth(value) // _SCALAR_CHARS)
        case "sum" if any(isinstance(option, _LISTS) for option in options) and isinstance(value, _LISTS):
            return num_chars * len(value)
    return num_chars + longest


def _depth(value: Any) -> int:
    """Nesting depth of lists and objects."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            item
            for one in level
            if isinstance(one, (Mapping, *_LISTS))
            for item in (one.values() if isinstance(one, Mapping) else one)
        ]
    return depth


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Upper bound of the characters of an operation's result. Raises: TemplateTooCostly for a number above the limit."""
    budget = _budget()
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_NUMBER_BITS:
            raise TemplateTooCostly(f"a number of {bits} bits, at most {MAX_NUMBER_BITS} are allowed")
        return _SCALAR_CHARS
    match operator:
        case "*":
            sequence, times = (right, left) if isinstance(left, int) else (left, right)
            return (
                len(sequence) * max(0, times)
                if isinstance(sequence, (*_STRINGS, *_LISTS)) and isinstance(times, int)
                else 0
            )
        case "+" if isinstance(left, (*_STRINGS, *_LISTS)) and isinstance(right, (*_STRINGS, *_LISTS)):
            return len(left) + len(right)
        case "%" if isinstance(left, str):
            layout = "".join(_PERCENT.findall(left))
            if "*" in layout:
                raise TemplateTooCostly("a format whose width is a value")
            _refuse_widths(layout)
            return len(left) + left.count("%") * (_MAX_WIDTH + budget.size(right))
        case "%" if isinstance(left, bytes):
            raise TemplateTooCostly("a format of bytes")
    return _SCALAR_CHARS


def _refuse_widths(layout: str) -> None:
    for digits in re.findall(r"\d{4,}", layout):
        if len(digits) > len(str(_MAX_WIDTH)) or int(digits) > _MAX_WIDTH:
            raise TemplateTooCostly(f"a format with the width {digits:.20}, at most {_MAX_WIDTH} is allowed")


def _replaced_size(text: Any, old: Any, new: Any) -> int:
    return len(text) + (text.count(old) if type(old) is type(text) else 0) * len(new)


def _method_size(budget: _Budget, name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Upper bound of the characters of the result of a method of a string or number. Raises: TemplateTooCostly."""
    values = [*args, *kwargs.values()]
    widths = [value for value in values if isinstance(value, int)]
    if widths and max(widths) > MAX_VALUE_CHARS:
        raise TemplateTooCostly(f"the method {name} with {max(widths)}")
    if isinstance(owner, int):
        return max(widths, default=0)
    match name:
        case "replace" if len(args) >= 2 and all(isinstance(arg, _STRINGS) for arg in args[:2]):
            return _replaced_size(owner, args[0], args[1])
        case "join" if args:
            items = args[0]
            num_items = len(items) if isinstance(items, (*_STRINGS, *_LISTS, Mapping)) else 0
            return budget.size(items) + num_items * len(owner)
        case "expandtabs":
            return len(owner) * max(1, *widths, 8)
        case "translate":
            return len(owner) * max(1, budget.size(values))
        case "ljust" | "rjust" | "center" | "zfill":
            return max(len(owner), *widths, 0)
    return len(owner)
