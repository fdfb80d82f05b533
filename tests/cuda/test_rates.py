"""The rates that chunk sizes are chosen from are this GPU's."""

from __future__ import annotations

import pytest
import torch

from pageahead.device import device_for
from pageahead.optim.rates import TYPICAL, rates_of


@pytest.mark.parametrize("name", ["adam", "lion", "ademamix"])
def test_rates_are_measured_once(name: str) -> None:
    device = device_for(torch.device("cuda", torch.cuda.current_device()))
    rates = rates_of(device, name)
    assert rates is not TYPICAL
    assert 1e9 < rates.link_bytes_per_second < 1e12
    assert all(1e-13 < seconds < 1e-9 for seconds in rates.update_seconds.values())
    assert rates_of(device, name) is rates
