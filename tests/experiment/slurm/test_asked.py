from __future__ import annotations

import pytest

from pageahead.experiment.slurm.asked import (
    OptionError,
    merged,
    minutes,
    parse_kind,
    sbatch_options,
)


def test_a_kind_is_its_own_expectation() -> None:
    kind = parse_kind("h200:--gres=gpu:h200:1 --partition hopper")
    assert (kind.name, kind.expected) == ("h200", "h200")
    assert kind.sbatch == {"gres": "gpu:h200:1", "partition": "hopper"}


def test_a_kind_may_expect_another_name() -> None:
    kind = parse_kind("h100-nvl=H100 NVL:--constraint='a&b' --exclusive")
    assert (kind.name, kind.expected) == ("h100-nvl", "H100 NVL")
    assert kind.sbatch == {"constraint": "a&b", "exclusive": True}


def test_a_kind_needs_no_options() -> None:
    assert parse_kind("cpu").sbatch == parse_kind("cpu:").sbatch == {}


@pytest.mark.parametrize("text", ["", "=H200", ":--gres=gpu:1", "a/b", "../x", "-h200", "é"])
def test_a_kind_is_part_of_a_file_name(text) -> None:
    with pytest.raises(OptionError, match="does not begin with a name"):
        parse_kind(text)


def test_short_options_are_the_long_ones() -> None:
    assert sbatch_options("-p hopper -Ame -t=10 -c 8 --mem 1G") == {
        "partition": "hopper",
        "account": "me",
        "time": "10",
        "cpus-per-task": "8",
        "mem": "1G",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hopper", "'hopper' is no option of sbatch"),
        ("-Z 1", "'-Z' is no option of sbatch"),
        ("--", "'--' is no option"),
        ("--mem=1G two", "'two' is no option"),
        ("--array=0-3", "--array is set by `pageahead slurm`"),
        ("--output=x", "--output is set by"),
        ("--comment='x", "No closing quotation"),
    ],
)
def test_what_is_no_option_or_not_to_be_chosen_is_named(text, said) -> None:
    with pytest.raises(OptionError, match=said):
        sbatch_options(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("1:30", 2),
        ("2:00:00", 120),
        ("0:00:01", 1),
        ("1-0", 1440),
        ("1-2:30", 1590),
        ("2-00:00:30", 2881),
    ],
)
def test_time_limits_are_those_of_slurm(text, expected) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "0", "soon", "1h", "1:2:3:4", "-5", "1-", "True"])
def test_what_is_no_time_limit_is_refused(text) -> None:
    with pytest.raises(OptionError):
        minutes(text)


def test_later_options_go_before_earlier_ones() -> None:
    assert merged([{"a": "1", "b": "1"}, {"b": "2"}]) == {"a": "1", "b": "2"}
