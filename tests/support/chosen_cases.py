"""A pytest plugin: which cases of a parametrized test `make test` runs; it marks the others `slow`.

    @pytest.mark.diagonal   as few cases as contain each value of each parameter, those of fixtures included
    @pytest.mark.few(3)     three of the cases (of the diagonal, if there is one), evenly spread from the first to the last

A test, a class or a module has the mark, and each test in it is counted for itself. Cases with a mark `slow`, `faults` or `soak` of
their own are not counted. A case that is the only one collected, as when the command line names it, is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
            chosen = diagonal_of([case.callspec.indices for case in cases])  # type: ignore[attr-defined]
        if few is not None:
            chosen = [chosen[place] for place in evenly_spread(few.args[0], len(chosen))]
        for place in set(range(len(cases))).difference(chosen):
            cases[place].add_marker("slow")


def diagonal_of(cases: Sequence[Mapping[str, int]]) -> list[int]:
    """Places of cases that together contain each value of each parameter; ascending.

    cases: per case, the number of the value that each parameter has. The parameter with most values has each of them once, and the
    other parameters' values take turns, as on the diagonal of a square; further cases follow where the cases are no whole product.
    """
    values = {(name, value) for case in cases for name, value in case.items()}
    num_values = Counter(name for name, _ in values)
    longest = max(num_values, key=lambda name: num_values[name])
    uses: Counter[tuple[str, int]] = Counter()
    chosen: list[int] = []

    def choose(places: Sequence[int]) -> None:
        """The one with most values that are not there yet, of equal ones that whose values were used least."""
        best = max(
            places,
            key=lambda place: (
                sum(not uses[pair] for pair in cases[place].items()),
                -sum(uses[pair] for pair in cases[place].items()),
            ),
        )
        uses.update(cases[best].items())
        chosen.append(best)

    with_value: dict[int, list[int]] = {}
    for place, case in enumerate(cases):
        if longest in case:
            with_value.setdefault(case[longest], []).append(place)
    for value in sorted(with_value):
        choose(with_value[value])
    while any(not uses[pair] for pair in values):
        choose(range(len(cases)))
    return sorted(chosen)


def evenly_spread(number: int, among: int) -> list[int]:
    """`number` places of `among`, the first and the last with them; all where there are no more."""
    if number >= among:
        return list(range(among))
    if number == 1:
        return [0]
    return [round(place * (among - 1) / (number - 1)) for place in range(number)]
