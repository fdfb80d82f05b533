"""`Paging` and its environment variables."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from pageahead import Paging
from tests.support import ours, parameters, paths, train


def test_defaults() -> None:
    assert Paging() == Paging(
        strategy="streamed",
        hbm_budget="auto",
        staging=None,
        write_back=None,
        allow_oversubscription=False,
    )


def test_write_backs_overlap_by_default_only_in_backward() -> None:
    assert not Paging().overlaps
    assert Paging(in_backward=True).overlaps
    assert Paging(write_back="overlap").overlaps
    assert not Paging(in_backward=True, write_back="before_return").overlaps


def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEAHEAD_HBM_BUDGT", "0")
    with pytest.warns(RuntimeWarning, match="HBM_BUDGT is set, .* Did you mean PAGEAHEAD_HBM_BUDG"):
        Paging()


def test_variables_that_are_no_settings_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEAHEAD_COMMIT", "abc")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Paging()


def test_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Paging().strategy = "lookahead"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Paging("lookahead")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        (
            "strategy",
            "straemed",
            ValueError,
            r"Paging.strategy='straemed' is unknown; there are: 'streamed', 'lookahead', "
            r"'sequential'\. Did you mean 'streamed'\?",
        ),
        ("strategy", "look-ahead", ValueError, r"Did you mean 'lookahead'\?"),
        ("strategy", "zzz", ValueError, r"'sequential'\.$"),
        ("strategy", None, ValueError, "Paging.strategy=None is unknown"),
        (
            "write_back",
            "overlapped",
            ValueError,
            r"'before_return', 'overlap'\. Did you mean 'overlap'\?",
        ),
        ("hbm_budget", -1, ValueError, "hbm_budget=-1: bytes cannot be negative"),
        ("hbm_budget", 1.5, ValueError, r"is a float, so a share .* 0.0 to 1.0. For bytes pass an"),
        ("hbm_budget", -0.1, ValueError, "is a float, so a share"),
        ("hbm_budget", float("nan"), ValueError, "is a float, so a share"),
        ("hbm_budget", "automatic", ValueError, r"there are: 'auto'\. Did you mean 'auto'\?"),
        ("hbm_budget", True, TypeError, r"bytes \(int\), a share \(float\) or 'auto', not True"),
        ("hbm_budget", None, TypeError, r"or 'auto', not None"),
        ("staging", 1000, ValueError, r"staging=1000 is too small.*1048576 bytes \(1 MiB\)"),
        ("staging", 2.0**20, TypeError, r"staging is bytes \(an int\) or None, not 1048576.0"),
        ("staging", True, TypeError, "not True"),
        ("allow_oversubscription", 1, TypeError, "True or False, not 1"),
        ("in_backward", "yes", TypeError, "in_backward is True or False, not 'yes'"),
        ("free_grads", None, TypeError, "free_grads is True or False, not None"),
        ("free_grads", True, ValueError, r"free_grads=True\) needs in_backward=True"),
        ("hbm_reserve", -1, ValueError, "hbm_reserve=-1: bytes cannot be negative"),
        ("hbm_reserve", 0.5, TypeError, r"hbm_reserve is bytes \(an int\) or None, not 0.5"),
    ],
)
def test_invalid_values(field: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Paging(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["lookahead", "sequential"])
def test_only_streamed_state_is_updated_in_backward(strategy: str) -> None:
    with pytest.raises(ValueError, match=f"needs strategy='streamed', not '{strategy}'"):
        Paging(strategy=strategy, in_backward=True)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="stratgy"):
        Paging(stratgy="streamed")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("STRATEGY", "lookahead", Paging(strategy="lookahead")),
        ("HBM_BUDGET", "123", Paging(hbm_budget=123)),
        ("HBM_BUDGET", "0.25", Paging(hbm_budget=0.25)),
        ("HBM_BUDGET", "auto", Paging(hbm_budget="auto")),
        ("STAGING", "2097152", Paging(staging=2_097_152)),
        ("HBM_RESERVE", "5", Paging(hbm_reserve=5)),
        ("IN_BACKWARD", "1", Paging(in_backward=True)),
        ("WRITE_BACK", "overlap", Paging(write_back="overlap")),
        ("ALLOW_OVERSUBSCRIPTION", "1", Paging(allow_oversubscription=True)),
        ("ALLOW_OVERSUBSCRIPTION", "True", Paging(allow_oversubscription=True)),
        ("ALLOW_OVERSUBSCRIPTION", "no", Paging(allow_oversubscription=False)),
    ],
)
def test_environment(
    variable: str, text: str, expected: Paging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PAGEAHEAD_{variable}", text)
    made = Paging()
    assert made == expected
    field = variable.lower()
    assert type(getattr(made, field)) is type(getattr(expected, field))


def test_an_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEAHEAD_STRATEGY", "lookahead")
    monkeypatch.setenv("PAGEAHEAD_STAGING", "not read")
    assert Paging(strategy="sequential", staging=None).strategy == "sequential"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "STRATEGY",
            "fast",
            "PAGEAHEAD_STRATEGY='fast': .* there are: 'streamed', 'lookahead', 'sequential'",
        ),
        (
            "WRITE_BACK",
            "never",
            "PAGEAHEAD_WRITE_BACK='never': .* there are: 'before_return', 'overlap'",
        ),
        (
            "HBM_BUDGET",
            "half",
            r"PAGEAHEAD_HBM_BUDGET='half': expected 'auto', bytes .* or a share",
        ),
        ("HBM_BUDGET", "-1", "bytes cannot be negative"),
        ("HBM_BUDGET", "2.0", "a share of the state"),
        ("STAGING", "64M", "PAGEAHEAD_STAGING='64M': expected bytes"),
        ("STAGING", "5", "too small"),
        (
            "ALLOW_OVERSUBSCRIPTION",
            "maybe",
            "PAGEAHEAD_ALLOW_OVERSUBSCRIPTION='maybe': expected one of 1, true, yes, 0, false, no",
        ),
    ],
)
def test_bad_environment(
    variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"PAGEAHEAD_{variable}", text)
    with pytest.raises(ValueError, match=message):
        Paging()


def test_optimizers_read_the_environment_when_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEAHEAD_STRATEGY", "sequential")
    optimizer = ours("PagedAdamW", parameters(120_000))
    monkeypatch.delenv("PAGEAHEAD_STRATEGY")
    train(optimizer, range(1))
    assert paths(optimizer) == ["sequential"]
    assert optimizer.paging.strategy == "sequential"


@pytest.mark.parametrize("value", ["streamed", {"strategy": "streamed"}, True])
def test_optimizers_take_nothing_but_paging(value: object) -> None:
    with pytest.raises(TypeError, match=r"paging takes a pageahead\.Paging, not"):
        ours("PagedAdamW", parameters(10), paging=value)


def test_budget_in_bytes() -> None:
    assert Paging(hbm_budget="auto").budget_bytes(1000) == 0
    assert Paging(hbm_budget=0.25).budget_bytes(1000) == 250
    assert Paging(hbm_budget=1.0).budget_bytes(1000) == 1000
    assert Paging(hbm_budget=123).budget_bytes(1000) == 123
