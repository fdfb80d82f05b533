from __future__ import annotations

import errno
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import pageahead
from pageahead import cli
from pageahead.experiment import bench
from pageahead.experiment.cells import PRESETS
from pageahead.experiment.oracle import command as oracle
from pageahead.experiment.runner import WorkerError
from pageahead.experiment.training import cells as training_cells
from pageahead.experiment.training import command as training
from pageahead.optim.paging import STRATEGIES

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of output which goes to no terminal, whoever runs the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


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


def test_what_a_run_for_the_gate_may_ask_for(options) -> None:
    words = "bench --preset matrix --device auto --select oversubscribed --strategy streamed "
    words += "--expect H200 --oversubscribe --allow-dirty"
    assert run(cli.app, words.split()).exit_code == 0
    (asked,) = options
    assert [cell.name for cell in asked.cells] == ["adamw32/32x8Mi@oversubscribed"]
    assert (asked.expect, asked.oversubscribe, asked.allow_dirty) == ("H200", True, True)
    assert sorted(asked.argv) == sorted(words.split())


def test_nothing_is_oversubscribed_or_changed_unless_asked_for(options) -> None:
    assert run(cli.app, ["bench", "--preset", "matrix"]).exit_code == 0
    (asked,) = options
    assert (asked.expect, asked.oversubscribe, asked.allow_dirty) == (None, False, False)
    assert asked.strategies == ["streamed", "lookahead"]


def test_choices_are_those_there_are() -> None:
    assert [one.value for one in cli.PresetName] == [*PRESETS, "training"]
    assert [one.value for one in cli.StrategyName] == [*STRATEGIES, "resident"]


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


@pytest.mark.parametrize(("command", "module"), [("bench", bench), ("verify", oracle)])
def test_a_full_disk_is_said_with_the_file(command, module, monkeypatch, tmp_path) -> None:
    out = tmp_path / "run.jsonl"

    def write(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device", str(out))

    monkeypatch.setattr(module, "run", write)
    result = run(cli.app, [command, "--out", str(out)])
    assert result.exit_code == 1
    assert result.stderr == f"Error: [Errno 28] No space left on device: '{out}'\n"


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
    for training_cell in training_cells.CELLS:
        assert training_cell.name in result.output
    assert options == []


@pytest.fixture
def training_options(monkeypatch):
    seen: list[training.Options] = []
    monkeypatch.setattr(training, "run", lambda options, output, log: seen.append(options) or True)
    return seen


def test_training_defaults(training_options) -> None:
    assert run(cli.app, ["bench", "--preset", "training"]).exit_code == 0
    (asked,) = training_options
    assert asked.cells == list(training_cells.CELLS)
    assert asked.parameters is None
    assert asked.protocol == training_cells.PROTOCOL


def test_training_with_everything(training_options, tmp_path) -> None:
    out = tmp_path / "run.jsonl"
    words = "bench --preset training --device cpu --select adamw32/4096 --params 2000000 --out"
    assert run(cli.app, [*words.split(), str(out)]).exit_code == 0
    (asked,) = training_options
    assert [cell.name for cell in asked.cells] == ["adamw32/4096"]
    assert (asked.parameters, asked.out) == (2_000_000, out)
    assert asked.argv == [*words.split(), "run.jsonl"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--preset training --strategy streamed", "not for --preset training"),
        ("--preset training --params 1000", "the smallest has"),
        ("--preset training --select lion8", "adamw32/4096"),
        ("--params 2000000", "only for --preset training"),
        ("--preset training --expect H200", "not for --preset training"),
        ("--preset training --oversubscribe", "--oversubscribe"),
        ("--preset training --allow-dirty", "--allow-dirty"),
    ],
)
def test_what_does_not_go_with_training_is_named(training_options, options, words, said) -> None:
    result = run(cli.app, ["bench", *words.split()])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", "").split())
    assert training_options == options == []


def test_plotting_what_is_no_training_evidence_says_so(tmp_path) -> None:
    evidence = tmp_path / "run.jsonl"
    evidence.write_text("")
    result = run(cli.app, ["plot-training", str(evidence), "-o", str(tmp_path / "run.svg")])
    assert result.exit_code == 2
    assert "no training iterations" in result.output
    result = run(cli.app, ["plot-training", str(tmp_path / "none"), "-o", "run.svg"])
    assert result.exit_code == 2
    assert "No such file" in result.output
