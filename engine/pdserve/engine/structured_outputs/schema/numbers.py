"""Numbers of JSON as grammars: with bounds, multiples, and a limited number of digits.

Numbers have at most 15 digits, so that no reader that keeps them as doubles rounds one across a bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from math import ceil, floor

from pdserve.engine.structured_outputs.schema.ebnf import Rules, group, literal, one_of

DIGITS = 15
"""Digits of an integer, and of a number before its exponent."""
FRACTION_DIGITS = 6
"""Digits after the point of a number that has bounds, unless a bound has more."""
WHOLE_DIGITS = DIGITS - FRACTION_DIGITS
"""Digits before the point of a number that has bounds and a fraction."""
MAX_MULTIPLE = 10_000
FREE_INTEGER = f'"0" | "-"? [1-9] [0-9]{{0,{DIGITS - 1}}}'
FREE_NUMBER = (
    f'"-"? ("0" | [1-9] [0-9]{{0,{WHOLE_DIGITS - 1}}}) ("." [0-9]{{1,{FRACTION_DIGITS}}})? ([eE] [+\\-]? [0-9]{{1,2}})? '
    f'| "-"? [1-9] [0-9]{{{WHOLE_DIGITS},{DIGITS - 1}}}'
)
_DIGIT = "[0-9]"


@dataclass(frozen=True)
class Range:
    """Values from `least` to `most`, without the ends that are excluded. None: no bound."""

    least: Decimal | None = None
    most: Decimal | None = None
    excludes_least: bool = False
    excludes_most: bool = False

    @property
    def is_free(self) -> bool:
        return self.least is None and self.most is None

    @property
    def is_empty(self) -> bool:
        if self.least is None or self.most is None:
            return False
        return self.least > self.most or (self.least == self.most and (self.excludes_least or self.excludes_most))

    def negated(self) -> Range:
        """The range of the negative values."""
        least = None if self.most is None else -self.most
        most = None if self.least is None else -self.least
        return Range(least, most, self.excludes_most, self.excludes_least)

    def integers(self) -> tuple[int, int]:
        """First and last integer within; of an open side, the last with `DIGITS` digits."""
        free = 10**DIGITS - 1
        least, most = -free, free
        if self.least is not None:
            least = floor(self.least) + 1 if self.excludes_least else ceil(self.least)
        if self.most is not None:
            most = ceil(self.most) - 1 if self.excludes_most else floor(self.most)
        return least, most


def integer(rules: Rules, values: Range, multiple: int = 1) -> str | None:
    """An integer within the range that is a multiple. None if there is none. Raises: TooLarge."""
    if values.is_free and multiple == 1:
        return rules.add(FREE_INTEGER)
    least, most = values.integers()
    ways = _between(rules, max(least, 0), most, multiple)
    ways += [f'"-" {way}' for way in _between(rules, max(-most, 1), -least, multiple)]
    return rules.add(one_of(ways)) if ways else None


def _between(rules: Rules, least: int, most: int, multiple: int) -> list[str]:
    """Expressions of the multiples from `least` to `most`, which are not negative."""
    ways: list[str] = []
    for length in range(len(str(least)), len(str(most)) + 1) if least <= most else ():
        first, last = max(least, 10 ** (length - 1) if length > 1 else 0), min(most, 10**length - 1)
        way = _digits(rules, str(first), str(last), multiple, 0, {}) if first <= last else None
        if way is not None:
            ways.append(way)
    return ways


def _digits(
    rules: Rules, first: str, last: str, multiple: int, residue: int, made: dict[tuple[str, str, int], str | None]
) -> str | None:
    """The digits from `first` to `last`, equally long, that complete a multiple after digits with this residue."""
    key = first, last, residue
    if key in made:
        return made[key]
    length = len(first)
    is_free = first == "0" * length and last == "9" * length
    if multiple == 1 and is_free:
        return f"{_DIGIT}{{{length}}}" if length else '""'
    if not length:
        return '""' if residue == 0 else None
    ends: dict[str, list[int]] = {}
    for digit in range(int(first[0]), int(last[0]) + 1):
        lower = first[1:] if digit == int(first[0]) else "0" * (length - 1)
        upper = last[1:] if digit == int(last[0]) else "9" * (length - 1)
        rest = _digits(rules, lower, upper, multiple, (residue * 10 + digit) % multiple, made)
        if rest is not None:
            ends.setdefault(rest, []).append(digit)
    ways = [f"[{''.join(map(str, digits))}]" + ("" if rest == '""' else f" {rest}") for rest, digits in ends.items()]
    made[key] = rules.add(one_of(ways)) if ways else None
    return made[key]


def number(rules: Rules, values: Range) -> str | None:
    """A number within the range, without exponent if the range has a bound. None if there is none."""
    if values.is_free:
        return rules.add(FREE_NUMBER)
    ways = _not_negative(rules, values)
    ways += [f'"-" {way}' for way in _not_negative(rules, values.negated())]
    return rules.add(one_of(ways)) if ways else None


def _not_negative(rules: Rules, values: Range) -> list[str]:
    """Expressions of the values from 0 on."""
    least, excludes_least = max(values.least or Decimal(0), Decimal(0)), values.excludes_least
    if values.least is None or values.least < 0:
        excludes_least = False
    most, excludes_most = values.most, values.excludes_most
    if most is None:
        most, excludes_most = Decimal(10 ** max(DIGITS, len(str(int(least))) + 1)), True
    if least > most or (least == most and (excludes_least or excludes_most)):
        return []
    whole = Decimal(10**WHOLE_DIGITS)
    ways: list[str] = []
    if least < whole:
        upper, excludes = (most, excludes_most) if most < whole else (whole, True)
        ways += _with_fraction(rules, least, upper, excludes_least, excludes)
    if most >= whole:
        above = Range(max(least, whole), most, excludes_least and least >= whole, excludes_most)
        ways += _between(rules, *above.integers(), 1)
    return ways


def _with_fraction(rules: Rules, least: Decimal, most: Decimal, excludes_least: bool, excludes_most: bool) -> list[str]:
    first, last = floor(least), floor(most)
    lower, upper = _fraction_of(least), _fraction_of(most)
    longest = max(FRACTION_DIGITS, len(lower), len(upper))
    ways: list[str] = []
    if first == last:
        ways += _fraction(rules, str(first), lower, upper, longest, excludes_least, excludes_most)
        return ways
    ways += _fraction(rules, str(first), lower, None, longest, excludes_least, False)
    between = _between(rules, first + 1, last - 1, 1)
    if between:
        ways.append(f'{group(between)} ("." {_DIGIT}{{1,{longest}}})?')
    ways += _fraction(rules, str(last), None, upper, longest, False, excludes_most)
    return ways


def _fraction_of(value: Decimal) -> str:
    """The digits after the point, without zeros at the end."""
    return f"{value - floor(value):f}"[2:].rstrip("0")


def _fraction(
    rules: Rules,
    whole: str,
    lower: str | None,
    upper: str | None,
    longest: int,
    excludes_lower: bool,
    excludes_upper: bool,
) -> list[str]:
    """Expressions of a whole part with the fractions between two; None: no bound on that side."""

    def rest(lower: str | None, upper: str | None, left: int) -> tuple[str, bool]:
        """The digits that may follow, as an expression or "" for none, and whether the number may end here."""
        if lower is None and upper is None:
            return (f"{_DIGIT}{{1,{left}}}" if left else ""), True
        above = lower is None or (not lower and not excludes_lower)
        below = upper is None or (bool(upper) or not excludes_upper)
        if not left:
            return "", above and below
        ways: dict[str, list[int]] = {}
        low, high = int((lower or "0")[0]) if lower is not None else 0, 9
        if upper is not None:
            high = int(upper[0]) if upper else 0
        for digit in range(low, high + 1):
            next_lower = None if lower is None or digit > low else lower[1:]
            next_upper = None if upper is None or digit < high else upper[1:]
            digits, may_end = rest(next_lower, next_upper, left - 1)
            if may_end:
                ways.setdefault('""', []).append(digit)
            if digits:
                ways.setdefault(digits, []).append(digit)
        made = [
            f"[{''.join(map(str, digits))}]" + ("" if after == '""' else f" {after}") for after, digits in ways.items()
        ]
        return (rules.add(one_of(made)) if made else ""), above and below

    digits, may_end = rest(lower, upper, longest)
    whole = literal(whole)
    return ([whole] if may_end else []) + ([f'{whole} "." {digits}'] if digits else [])
