"""Commands do not write over what they read, nor over what they have just written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pageahead import cli
from pageahead.experiment import bench
from pageahead.experiment.oracle import command as oracle
from pageahead.experiment.profile import command as profile
from pageahead.experiment.training import command as training
from tests.experiment.report.support import B300


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder: evidence, and names for it by a link, a hard link and a linked folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profile, "run", lambda *args: pytest.fail("was run"))
    (tmp_path / "a.jsonl").write_bytes(B300.read_bytes())
    (tmp_path / "link.html").symlink_to("a.jsonl")
    (tmp_path / "hard.html").hardlink_to(tmp_path / "a.jsonl")
    (tmp_path / "here").symlink_to(".")
    (tmp_path / "a.svg").write_text("<svg/>")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "report a.jsonl -o a.jsonl",
        "report a.jsonl -o here/a.jsonl",
        "report a.jsonl -o link.html",
        "report a.jsonl -o hard.html",
        "report a.jsonl --markdown -o a.jsonl",
        "report a.jsonl --timeline a.svg -o a.svg",
        "profile adamw32/8x1Mi --device cpu --out a.jsonl --trace a.jsonl",
        "profile adamw32/8x1Mi --device cpu --out a.jsonl --trace hard.html",
        "profile adamw32/8x1Mi --device cpu --out new.jsonl --trace here/new.jsonl",
        "profile adamw32/8x1Mi --device cpu --trace x.png --picture x.png",
        "profile adamw32/8x1Mi --nsys a.jsonl --out a.jsonl",
        "plot-training a.jsonl -o a.jsonl",
        "plot-training a.svg -o ./a.svg",
    ],
)
def test_an_output_that_is_another_file_of_the_command_is_refused(words, folder) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = CliRunner().invoke(cli.app, words.split(), env={"COLUMNS": "120"})
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "too, and one would destroy the other; name another file" in said
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_files_of_their_own_are_written(folder) -> None:
    result = CliRunner().invoke(cli.app, ["report", "a.jsonl", "-o", "b.html"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    "words", ["bench", "bench --preset training", "verify --device cpu", "profile adamw32/8x1Mi"]
)
@pytest.mark.parametrize("there", ["/dev/null", "pipe"])
def test_evidence_goes_to_a_regular_file(words, there, folder, monkeypatch) -> None:
    os.mkfifo(folder / "pipe")  # opened, it would wait for a reader
    for command in (bench, training, oracle):
        monkeypatch.setattr(command, "run", lambda *args: pytest.fail("was run"))
    arguments = [*words.split(), "--out", there]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"})
    assert result.exit_code == 2
    assert f"{there} is no regular file" in " ".join(result.output.replace("│", " ").split())
