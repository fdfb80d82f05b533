"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bitsandbytes.optim import GlobalOptimManager

import pageahead.device.cpu  # noqa: F401  (bitsandbytes' updates, too, need it: pitfall 37)


@pytest.fixture(autouse=True)
def optim_manager() -> Iterator[GlobalOptimManager]:
    """bitsandbytes' process-wide overrides, empty before and after each test.

    They are kept by ``(group, index)`` and by ``id(parameter)``, so one test's overrides would
    change the state width in another.
    """
    manager = GlobalOptimManager.get_instance()
    manager.initialize()
    yield manager
    manager.initialize()
