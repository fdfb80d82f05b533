"""Ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.stop()
