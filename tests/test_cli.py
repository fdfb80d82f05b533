from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import pageahead
from pageahead import cli
from pageahead.experiment import bench
from pageahead.experiment.cells import PRESETS
from pageahead.experiment.runner import WorkerError
from pageahead.optim.paging import STRATEGIES

run = CliRunner().invoke


@pytest.fixture
def options(monkeypatch):
    """What `bench` was asked to do, instead of doing it; it says that all went well."""
    seen: list[bench.Options] = []
    monkeypatch.setattr(bench, "run", lambda options, output, log: seen.append(options) or True)
    return seen


def test_version() -> None:
    result = run(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"pageahead {pageahead.__version__}\n"


def test_python_m_pageahead() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pageahead", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"pageahead {pageahead.__version__}\n"


def test_defaults(options) -> None:
    assert run(cli.app, ["bench"]).exit_code == 0
    (asked,) = options
    assert asked.preset is PRESETS["quick"]
    assert list(asked.cells) == list(PRESETS["quick"].cells)
    assert asked.strategies == ["streamed", "lookahead"]
    assert asked.device == "auto"
    assert asked.out is None


def test_everything_given_and_recorded_without_the_folder(options, tmp_path) -> None:
    out = tmp_path / "run.jsonl"
    words = "bench --preset source --device cpu --select llama --strategy sequential --out"
    assert run(cli.app, [*words.split(), str(out)]).exit_code == 0
    (asked,) = options
    assert [cell.name for cell in asked.cells] == ["adamw8/llama-3.2-1b"]
    assert asked.strategies == ["sequential"]
    assert asked.out == out
    assert asked.argv == [*words.split(), "run.jsonl"]


def test_choices_are_those_there_are() -> None:
    assert [one.value for one in cli.PresetName] == list(PRESETS)
    assert [one.value for one in cli.StrategyName] == list(STRATEGIES)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "slow"], ["'slow'", "quick", "source"]),
        (["--strategy", "magic"], ["'magic'", "streamed", "lookahead", "sequential"]),
        (["--device", "tpu"], ["'tpu'", "auto", "cuda"]),
        (["--select", "sgd"], ["'sgd'", "lion8/8x1Mi", "adamw8/mixed"]),
        (["--out", "/nowhere/run.jsonl"], ["cannot write", "No such file"]),
    ],
)
def test_bad_arguments_list_the_good_ones(options, arguments, said) -> None:
    result = run(cli.app, ["bench", *arguments])
    assert result.exit_code == 2
    for words in said:
        assert words in result.output
    assert options == []


def test_a_run_with_a_failure_or_a_difference_ends_with_1(monkeypatch) -> None:
    monkeypatch.setattr(bench, "run", lambda options, output, log: False)
    assert run(cli.app, ["bench"]).exit_code == 1


def test_a_device_that_is_not_there_ends_with_2_and_says_so(monkeypatch) -> None:
    def refuse(options, output, log):
        raise WorkerError("--device cuda: no GPU here")

    monkeypatch.setattr(bench, "run", refuse)
    result = run(cli.app, ["bench", "--device", "cuda"])
    assert result.exit_code == 2
    assert "Error: --device cuda: no GPU here" in result.output


def test_list_shows_every_cell_and_measures_nothing(options) -> None:
    result = run(cli.app, ["bench", "--list"])
    assert result.exit_code == 0
    for preset in PRESETS.values():
        for cell in preset.cells:
            assert cell.name in result.output
    assert options == []
