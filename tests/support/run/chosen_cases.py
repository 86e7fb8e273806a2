"""A pytest plugin: which cases of a parametrized test `make test` runs; it marks the others `slow`.

    @pytest.mark.diagonal      as few cases as contain each value of each parameter, those of fixtures included
    @pytest.mark.diagonal(2)   each value twice, with other values of the other parameters
    @pytest.mark.few(3)        three of the cases (of the diagonal, if there is one), evenly spread from the first to the last

A test, a class or a module has the mark, and each test in it is counted for itself. Cases with a mark `slow`, `faults` or `soak` of
their own are not counted. A case that is the only one collected, as when the command line names it, is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations

import pytest

_OTHER_RUNS = ("slow", "faults", "soak")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not any(map(item.get_closest_marker, _OTHER_RUNS)):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        diagonal, few = (cases[0].get_closest_marker(name) for name in ("diagonal", "few"))
        chosen = list(range(len(cases)))
        if diagonal is not None:
            chosen = diagonal_of([values_of(case) for case in cases], *diagonal.args)
        if few is not None:
            chosen = [chosen[place] for place in evenly_spread(few.args[0], len(chosen))]
        for place in set(range(len(cases))).difference(chosen):
            cases[place].add_marker("slow")


def values_of(case: pytest.Item) -> dict[str, Hashable]:
    """Values of a case by its `parametrize` marks and its fixtures with parameters; the same objects are the same value."""
    params: dict[str, object] = dict(case.callspec.params)  # type: ignore[attr-defined]
    values: dict[str, Hashable] = {}
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        values[",".join(names)] = tuple(id(params.pop(name)) for name in names)
    return values | {name: id(value) for name, value in params.items()}


def diagonal_of(cases: Sequence[Mapping[str, Hashable]], times: int = 1) -> list[int]:
    """Places of cases that together contain each value of each parameter so many times, or in all its cases; ascending.

    The parameter with most values has each of them so often, and the values of the others take turns, as on the diagonal of a
    square; further cases follow where the cases are no whole product. cases: per case, parameter -> its value.
    """
    values = Counter(pair for case in cases for pair in case.items())
    num_values = Counter(name for name, _ in values)
    longest = max(num_values, key=lambda name: num_values[name])
    uses: Counter[tuple[str, Hashable]] = Counter()
    together: set[tuple[tuple[str, Hashable], ...]] = set()
    chosen: dict[int, None] = {}

    def merit(place: int) -> tuple[int, int, int]:
        """Values used too rarely, values that were not used together, and how rarely its values were used."""
        pairs = [*cases[place].items()]
        rare = sum(uses[pair] < min(rounds, values[pair]) for pair in pairs)
        return rare, sum(two not in together for two in combinations(pairs, 2)), -sum(uses[pair] for pair in pairs)

    def choose(places: Iterable[int]) -> None:
        left = [place for place in places if place not in chosen]
        if left:
            best = max(left, key=merit)
            chosen[best] = None
            uses.update(cases[best].items())
            together.update(combinations(cases[best].items(), 2))

    with_value: dict[Hashable, list[int]] = {}
    for place, case in enumerate(cases):
        if longest in case:
            with_value.setdefault(case[longest], []).append(place)
    for rounds in range(1, times + 1):
        for places in with_value.values():
            choose(places)
        while any(uses[pair] < min(rounds, number) for pair, number in values.items()):
            choose(range(len(cases)))
    return sorted(chosen)


def evenly_spread(number: int, among: int) -> list[int]:
    """`number` places of `among`, the first and the last with them; all where there are no more."""
    if number >= among:
        return list(range(among))
    if number == 1:
        return [0]
    return [round(place * (among - 1) / (number - 1)) for place in range(number)]
