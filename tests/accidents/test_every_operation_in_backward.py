"""A backward that updates, and the step after it, broken at every one of their operations in turn.

As `test_every_operation`; after the error comes `zero_grad()`, which lets go of the half step.
"""

from __future__ import annotations

import pytest
import torch

from pageahead import Paging
from pageahead.optim import backward
from tests.accidents.test_every_operation import (
    CHANGED,
    CHUNK,
    FIRST,
    UNCHANGED,
    Breaker,
    Trial,
    _small_is_large,
)
from tests.support import is_cut

__all__ = ["_small_is_large"]  # a fixture


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalers of other tests, if some are left, scale nothing here; to look for them takes long."""
    monkeypatch.setattr(backward, "other_users", lambda optimizer, parameters: None)


pytestmark = pytest.mark.filterwarnings("ignore:zero_grad\\(\\) without step")


class BackwardTrial(Trial):
    """Gradients come from a backward: that of ``(parameter * gradient).sum()`` is `gradient`."""

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().prepare(monkeypatch)
        self.gradients = [parameter.grad for parameter in self.found[1]]
        self.optimizer.zero_grad()

    def run(self) -> None:
        products = [
            (parameter * gradient).sum()
            for parameter, gradient in zip(self.found[1], self.gradients, strict=True)
            if gradient is not None
        ]
        torch.stack(products).sum().backward()
        self.optimizer.step()

    def break_at(self, number: int, operation: str, error: BaseException) -> None:
        self.device.arm(number, error)
        with pytest.raises(type(error)) as caught:
            self.run()
        # Where something was updated already, another error of that type says so.
        assert error in (caught.value, caught.value.__cause__)
        assert self.device.operations[number] == operation
        self.optimizer.zero_grad()


class BackwardBreaker(Breaker):
    def trial(self, seed: int) -> BackwardTrial:
        trial = BackwardTrial(self.name, self.paging, seed, self.kind)
        trial.prepare(self.monkeypatch)
        return trial

    def operations(self) -> list[str]:
        trial = self.trial(0)
        trial.device.arm(None)
        trial.run()
        assert is_cut(trial.optimizer)
        return trial.device.operations


@pytest.mark.parametrize(
    ("write_back", "name", "free_grads"),
    [("before_return", "PagedAdamW8bit", False), ("overlap", "PagedAdamW", True)],
)
@pytest.mark.parametrize("kind", [UNCHANGED, CHANGED, FIRST])
def test_every_operation(
    kind: str, write_back: str, name: str, free_grads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paging = Paging(
        in_backward=True, free_grads=free_grads, write_back=write_back, staging=4 * CHUNK[name]
    )
    breaker = BackwardBreaker(name, paging, kind, monkeypatch)
    broken = breaker.break_each(on_the_way_home=False)
    assert broken["update"] > 3
    assert broken["zero on fetch" if kind == FIRST else "copy on fetch"] > 1
    assert broken["compute waits for caller"] > 3  # for each chunk's gradients
    assert breaker.break_each(on_the_way_home=True)["copy on write_back"] > 3
