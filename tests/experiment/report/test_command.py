"""`pageahead report` as a user calls it."""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pageahead import cli, files
from tests.experiment.report.support import B300, H200, ROOT


def report(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["report", *map(str, arguments)], env={"COLUMNS": "120"})
    return result.exit_code, " ".join(result.output.replace("│", "").split())


def test_a_page_is_written_and_the_verdict_said(tmp_path) -> None:
    out = tmp_path / "report.html"
    status, said = report(B300, "-o", out)
    assert status == 0
    assert said == f"wrote {out} (NO-GO for lookahead on NVIDIA B300 SXM6)"
    assert out.read_text().startswith("<!doctype html>")
    assert os.listdir(tmp_path) == ["report.html"]


def test_markdown_is_printed_or_written(tmp_path) -> None:
    status, said = report(B300, "--markdown")
    assert status == 0
    assert said.startswith("## NO-GO for lookahead on NVIDIA B300 SXM6")
    status, _ = report(B300, "--markdown", "-o", tmp_path / "report.md")
    assert status == 0
    assert (tmp_path / "report.md").read_text().startswith("## NO-GO for lookahead")


def test_one_strategy_of_several(tmp_path) -> None:
    status, said = report(
        H200 / "bench-source.jsonl", "--strategy", "lookahead", "-o", tmp_path / "a.html"
    )
    assert status == 0
    assert "(NO-GO for lookahead on NVIDIA H200)" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([B300], "where to? -o report.html, or --markdown"),
        ([H200 / "none.jsonl", "-o", "report.html"], "does not exist"),
        ([B300, "--strategy", "magic", "-o", "report.html"], "there is: lookahead"),
        (
            [B300, "-o", "/nowhere/r.html"],
            "cannot write /nowhere/r.html: No such file or directory",
        ),
        ([B300, "-o", "/dev/null"], "cannot write /dev/null: it is no regular file"),
        ([B300, "-o", "report.html", "--timeline", B300], "is no PNG, JPEG or SVG picture"),
    ],
)
def test_what_does_not_work_ends_with_2_and_says_why(
    arguments, said, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, printed = report(*arguments)
    assert status == 2
    assert said in printed
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", ["write_text", "replace"])
def test_a_page_that_cannot_be_finished_leaves_the_one_before(fault, tmp_path, monkeypatch) -> None:
    out = tmp_path / "report.html"
    out.write_text("the one before")

    def half(path: Path, text: str, **settings: object) -> None:
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "no space left on device", str(path))

    def refuse(*paths: object) -> None:
        raise OSError("no space left on device")

    target = (Path, "write_text", half) if fault == "write_text" else (files.os, "replace", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(*target)
        status, said = report(B300, "-o", out)
    assert status == 2
    assert f"Error: cannot write {out}: no space left on device" in said
    assert out.read_text() == "the one before"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_link_is_written_through_and_rights_are_the_usual_ones(tmp_path) -> None:
    (tmp_path / "pages").mkdir()
    real, link = tmp_path / "pages" / "report.html", tmp_path / "latest.html"
    real.touch()
    link.symlink_to(real)
    files.write_whole(link, lambda beside: beside.write_text("a page"))
    assert link.is_symlink()
    assert real.read_text() == "a page"
    usual = tmp_path / "usual"
    usual.touch()
    assert stat.S_IMODE(real.stat().st_mode) == stat.S_IMODE(usual.stat().st_mode)


def test_the_commands_of_the_docs_do_what_they_say(tmp_path, monkeypatch) -> None:
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    commands = re.findall(r"^pageahead report (evidence/[^#\n]*)", text, re.MULTILINE)
    assert len(commands) >= 2
    monkeypatch.chdir(ROOT)
    for command in commands:
        words = shlex.split(command)
        if "-o" in words:
            words[words.index("-o") + 1] = str(tmp_path / "page")
        status, said = report(*words)
        assert status == 0, said
