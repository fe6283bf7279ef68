"""Matrices of cases: CI runs a sample of them, `pytest -m faults -n0` the rest as well."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(every: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Returns all cases as parameters of a test, of which those that are not in the sample are marked `faults`."""
    every = list(every)
    assert all(case in every for case in sample)
    return [case if case in sample else pytest.param(case, marks=pytest.mark.faults) for case in every]


def wants_all(request: pytest.FixtureRequest) -> bool:
    """Returns whether this session runs cases outside the sample in the module of a fixture, which then has to measure
    all.
    """
    return any(item.path == request.path and item.get_closest_marker("faults") for item in request.session.items)
