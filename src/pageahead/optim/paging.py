"""`Paging`: how an optimizer's state is to move. Validated when made, never changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

__all__ = ["STRATEGIES", "WRITE_BACKS", "Paging"]

PREFIX = "PAGEAHEAD_"
OTHERS = (
    "PAGEAHEAD_COMMIT",
    "PAGEAHEAD_FAULTS_OUT",
    "PAGEAHEAD_TEST_CUDA12",
    "PAGEAHEAD_UNTESTED_BITSANDBYTES",
)
"""Variables that are no settings: of evidence, of tests, of the version check."""

STRATEGIES = ("streamed", "lookahead", "sequential")
WRITE_BACKS = ("before_return", "overlap")
MINIMUM_STAGING = 1 << 20


def _setting(name: str, default: object, parse: Callable[[str], object]) -> Any:
    """A dataclass field whose default is the environment's ``PAGEAHEAD_<NAME>``, if set."""
    variable = f"{PREFIX}{name.upper()}"

    def value() -> object:
        text = os.environ.get(variable)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{variable}={text!r}: {error}") from None

    return field(default_factory=value)


def _parse_choice(name: str, allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        _one_of(name, text, allowed)
        return text

    return parse


def _parse_bool(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError("expected one of 1, true, yes, 0, false, no")
    return known[text.lower()]


def _parse_bytes(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected bytes (an integer)") from None


def _parse_budget(text: str) -> int | float | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected 'auto', bytes (an integer) or a share (0.0 to 1.0)") from None


@dataclass(frozen=True, kw_only=True)
class Paging:
    """How state moves. A field that is not given is read from ``PAGEAHEAD_<FIELD>`` if that is set.

    Attributes:
        strategy: ``streamed`` (page-locked host memory, copied through a ring of slots),
            ``lookahead`` (managed memory, prefetched one parameter ahead) or ``sequential``
            (managed memory, bitsandbytes' own order).
        hbm_budget: how much of the pageable state may stay on the device: bytes (`int`), a share of
            its bytes (`float`, 0 to 1) or ``"auto"``: what is free after the first backward, and
            at later steps, beyond `hbm_reserve` (``streamed`` on a GPU; otherwise 0).
        hbm_reserve: bytes of device memory that ``"auto"`` leaves free, for what may grow between
            two steps. None: as many as the first backward's activations took, so that a batch may
            be twice as long as the first; at least 1 GiB.
        staging: bytes of device memory for the ring; None chooses it from the state's size.
        write_back: ``before_return`` (everything is complete when `step` returns) or ``overlap``
            (state may still be on its way home; `state_dict` waits for it). None chooses
            ``overlap`` with `in_backward`, so that state goes home beside the next forward, and
            ``before_return`` otherwise.
        in_backward: update each parameter as soon as backward has its gradient; `step` finishes
            what is left. Only ``streamed``.
        free_grads: with `in_backward`, free each gradient once its parameter is updated.
        allow_oversubscription: let managed memory exceed what the GPU has free. Can hang the GPU.

    Raises:
        ValueError: a value is not one of those above; the message lists them.
        TypeError: a value has the wrong type.
    """

    strategy: str = _setting("strategy", "streamed", _parse_choice("strategy", STRATEGIES))
    hbm_budget: int | float | str = _setting("hbm_budget", "auto", _parse_budget)
    hbm_reserve: int | None = _setting("hbm_reserve", None, _parse_bytes)
    staging: int | None = _setting("staging", None, _parse_bytes)
    write_back: str | None = _setting("write_back", None, _parse_choice("write_back", WRITE_BACKS))
    in_backward: bool = _setting("in_backward", False, _parse_bool)
    free_grads: bool = _setting("free_grads", False, _parse_bool)
    allow_oversubscription: bool = _setting("allow_oversubscription", False, _parse_bool)

    def __post_init__(self) -> None:
        _warn_of_unknown_variables()
        _one_of("strategy", self.strategy, STRATEGIES)
        if self.write_back is not None:
            _one_of("write_back", self.write_back, WRITE_BACKS)
        self._check_budget()
        if self.staging is not None:
            if isinstance(self.staging, bool) or not isinstance(self.staging, int):
                raise TypeError(f"Paging.staging is bytes (an int) or None, not {self.staging!r}")
            if self.staging < MINIMUM_STAGING:
                raise ValueError(
                    f"Paging.staging={self.staging} is too small: the ring needs at least "
                    f"{MINIMUM_STAGING} bytes (1 MiB)"
                )
        for name in ("in_backward", "free_grads", "allow_oversubscription"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Paging.{name} is True or False, not {getattr(self, name)!r}")
        if self.in_backward and self.strategy != "streamed":
            raise ValueError(
                f"Paging(in_backward=True) needs strategy='streamed', not {self.strategy!r}"
            )
        if self.free_grads and not self.in_backward:
            raise ValueError(
                "Paging(free_grads=True) needs in_backward=True: only updates that run during "
                "backward are done before the gradients are all there"
            )

    def _check_budget(self) -> None:
        reserve = self.hbm_reserve
        if reserve is not None:
            if isinstance(reserve, bool) or not isinstance(reserve, int):
                raise TypeError(f"Paging.hbm_reserve is bytes (an int) or None, not {reserve!r}")
            if reserve < 0:
                raise ValueError(f"Paging.hbm_reserve={reserve}: bytes cannot be negative")
        budget = self.hbm_budget
        if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
            raise TypeError(
                f"Paging.hbm_budget is bytes (int), a share (float) or 'auto', not {budget!r}"
            )
        if isinstance(budget, str):
            _one_of("hbm_budget", budget, ("auto",))
        elif isinstance(budget, float) and not 0.0 <= budget <= 1.0:
            raise ValueError(
                f"Paging.hbm_budget={budget} is a float, so a share of the state: 0.0 to 1.0. "
                f"For bytes pass an int."
            )
        elif budget < 0:
            raise ValueError(f"Paging.hbm_budget={budget}: bytes cannot be negative")

    @property
    def overlaps(self) -> bool:
        """Whether state may still be on its way home when `step` returns."""
        return self.write_back == "overlap" or (self.write_back is None and self.in_backward)

    def budget_bytes(self, state_bytes: int) -> int:
        """Bytes of state that may stay on the device, of `state_bytes` that could be paged."""
        if isinstance(self.hbm_budget, str):
            return 0
        if isinstance(self.hbm_budget, float):
            return int(self.hbm_budget * state_bytes)
        return self.hbm_budget


def _warn_of_unknown_variables() -> None:
    """A misspelt variable would change nothing, and nobody would know."""
    known = [f"{PREFIX}{one.name.upper()}" for one in fields(Paging)]
    for variable in os.environ:
        if variable.startswith(PREFIX) and variable not in (*known, *OTHERS):
            close = get_close_matches(variable, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            warnings.warn(
                f"{variable} is set, but there is no such setting.{hint} There are: "
                f"{', '.join(known)}.",
                RuntimeWarning,
                stacklevel=4,
            )


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value in allowed:
        return
    close = get_close_matches(str(value), allowed, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(repr(one) for one in allowed)
    raise ValueError(f"Paging.{name}={value!r} is unknown; there are: {listed}.{hint}")
