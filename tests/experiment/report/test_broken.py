"""Pages of evidence that is broken, hostile or missing."""

from __future__ import annotations

import json
import re

import pytest

from pageahead.experiment.evidence import FailedRecord, LeftOutRecord, SetupFailedRecord
from pageahead.experiment.gate.decision import EvidenceError, decide
from pageahead.experiment.gate.reading import gather
from pageahead.experiment.report import rendering
from pageahead.experiment.report.model import build
from tests.experiment.gate.support import GOOD
from tests.experiment.report.support import B300, H200, parsed, table, written
from tests.experiment.support import RUN, environment

HOSTILE = "<script>alert('1')</script> & \"<img src=x onerror=alert(2)>\" | `x` @someone"


def test_a_corrupt_line_is_named_by_its_number(tmp_path) -> None:
    path = written(tmp_path / "run.jsonl", GOOD)
    lines = path.read_text().splitlines()
    lines.insert(3, '{"kind": "cell", "run"')
    path.write_text("\n".join([*lines, ""]))
    report = build([path])
    assert report.judgements[0].decision.verdict == "GO"
    for text in (parsed(rendering.html(report)).text, rendering.markdown(report)):
        assert "run.jsonl, line 4: Invalid JSON" in text
    assert "1 line is no record and was not counted" in rendering.html(report)


def test_failed_set_ups_are_shown_and_change_no_verdict(tmp_path) -> None:
    setup = SetupFailedRecord(run=RUN, argv=["bench", "--expect", "H100"], reason="no such GPU")
    report = build([written(tmp_path / "run.jsonl", [*GOOD, setup])])
    assert report.judgements[0].decision.verdict == "GO"
    for text in (parsed(rendering.html(report)).text, rendering.markdown(report)):
        assert "pageahead bench --expect H100" in text
        assert "no such GPU" in text


def test_a_run_that_only_failed_has_a_page_without_a_verdict(tmp_path) -> None:
    setup = SetupFailedRecord(run=RUN, argv=["bench"], reason="no GPU here")
    report = build([written(tmp_path / "run.jsonl", [setup])])
    assert report.judgements == []
    page = parsed(rendering.html(report))
    assert page.all("h1")[0].text == "No cell was measured"
    assert "no GPU here" in page.text
    assert "No verdict: no cell was measured" in rendering.markdown(report)


def test_failed_and_left_out_cells_are_listed_with_their_reasons(tmp_path) -> None:
    failed = FailedRecord(
        run=RUN, cell="lion8/2MiB", strategies=["streamed"], reason="out of memory"
    )
    peak = failed.model_copy(update={"cell": "adamw8/gpt2", "what": "peak memory"})
    left = LeftOutRecord(run=RUN, cell="adamw8/gpt2", strategy="lookahead", reason="too large")
    report = build([written(tmp_path / "run.jsonl", [*GOOD, failed, peak, left])])
    page = parsed(rendering.html(report))
    rows = table(page, "Cells that were asked for and not measured")
    assert rows["lion8/2MiB"] == ["streamed", "failed steps", "out of memory"]
    for text in (page.text, rendering.markdown(report)):
        assert "too large" in text
        assert "peak memory" in text


def test_cells_that_cannot_be_used_are_kept_apart(tmp_path) -> None:
    """No rounds; a cell of a later version; too few warm-ups: each with its reason."""
    cells = [one for one in GOOD if one.kind == "cell"]
    empty = cells[0].legacy.timings.model_copy(update={"wall_ms": []})
    broken = cells[0].model_copy(
        update={"legacy": cells[0].legacy.model_copy(update={"timings": empty})}
    )
    unknown = cells[1].model_copy(update={"cell": "sgd8/1TiB"})
    few = cells[2].model_copy(
        update={"protocol": type(cells[2].protocol)(warmups=1, rounds=7, repetitions=8)}
    )
    records = [environment(), broken, unknown, few, *cells[3:]]
    page = parsed(rendering.html(build([written(tmp_path / "run.jsonl", records)])))
    rows = table(page, "Every cell of streamed")
    assert rows[f"{broken.cell} †"][1:] == ["no figures"]
    assert rows["sgd8/1TiB †"][1:] == ["no figures"]
    assert rows[f"{few.cell} †"][4] == "1.155"
    assert "a cell that this version does not know" in page.text
    assert "not counted: 1 warm-ups" in page.text


@pytest.mark.parametrize("name", ["adamw32/8x4Mi", "adamw8/gpt2", "adamw32/2MiB@resident"])
@pytest.mark.parametrize(
    ("legacy", "ours"), [(1e300, 1.0), (1.0, 1e300), (1.0, 1e-300), (1e-300, 1.0), (1e150, 1e-150)]
)
def test_times_of_no_machine_are_not_drawn(tmp_path, name, legacy, ours) -> None:
    records = [
        stretched(one, legacy, ours) if one.kind == "cell" and one.cell == name else one
        for one in GOOD
    ]
    report = build([written(tmp_path / "run.jsonl", records)])
    (judgement,) = report.judgements
    assert judgement.decision.verdict == decide(gather(records), None).verdict
    page = parsed(rendering.html(report))
    assert f"no axis has room for their figures: {name}" in page.text
    drawn = [
        one.all("span")[0].text for one in page.all("div", class_="strip") if one.all("circle")
    ]
    assert name not in drawn
    assert len(drawn) == sum(one.kind == "cell" for one in GOOD) - 1
    (axis,) = [one.ratios.axis for one in report.judgements]
    assert 0.5 < axis.low < axis.high < 5
    rows = table(page, "Every cell of streamed")
    assert all(len(figure) < 20 for figures in rows.values() for figure in figures)


def stretched(record, legacy: float, ours: float):
    """A cell whose times are so many times as long."""

    def changed(arm, factor: float):
        wall = [[factor * one for one in values] for values in arm.timings.wall_ms]
        return arm.model_copy(update={"timings": arm.timings.model_copy(update={"wall_ms": wall})})

    (candidate,) = record.candidates
    return record.model_copy(
        update={
            "legacy": changed(record.legacy, legacy),
            "candidates": [changed(candidate, ours)],
        }
    )


def test_nothing_in_evidence_becomes_markup(tmp_path) -> None:
    hostile = environment(
        argv=["bench", HOSTILE], platform=HOSTILE, python=HOSTILE, commit=HOSTILE, library=HOSTILE
    )
    summary = json.loads(B300.read_text().splitlines()[0])
    records = [
        hostile,
        SetupFailedRecord(run=HOSTILE, argv=[HOSTILE], reason=HOSTILE),
        FailedRecord(run=RUN, cell=HOSTILE, strategies=[HOSTILE], reason=HOSTILE),
        LeftOutRecord(run=RUN, cell=HOSTILE, strategy=HOSTILE, reason=HOSTILE),
    ]
    path = written(tmp_path / "<b>run.jsonl", records)
    with path.open("a") as file:
        for name in ("source", "strategy", "device_name"):
            summary[name] = HOSTILE
        file.write(json.dumps(summary) + "\n<script>\n")
    report = build([path])
    page = parsed(rendering.html(report))
    assert page.all("script") == page.all("img") == page.all("b", onerror="alert(2)>") == []
    assert "<script>alert('1')</script>" in page.text
    text = rendering.markdown(report)
    outside = re.sub(r"^(`{3,})\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"`[^`\n]*`", "", outside)
    assert not re.search(r"(?<!\\)<(script|img)", outside)
    assert not re.search(r"(?<![\\\w])@someone", outside)


@pytest.mark.parametrize("text", ["a|b", "a`b", "a` |b", "a\n|b", "a\\|b"])
def test_nothing_ends_a_cell_of_a_markdown_table(text) -> None:
    for name in ("code", "md"):
        said = rendering.FILTERS[name](text)
        assert "\n" not in said
        assert re.fullmatch(r"(`[^`|]*`)|((\\.|[^\\|`])*)", said)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "run.jsonl is empty"),
        ("\n\n", "run.jsonl is empty"),
        ("no record\n", "run.jsonl has no record in 1 line(s); run.jsonl, line 1: Invalid JSON"),
    ],
)
def test_a_file_without_a_record_is_an_error_that_says_so(tmp_path, content, said) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    with pytest.raises(EvidenceError, match=re.escape(said)):
        build([B300, path])


@pytest.mark.parametrize(
    ("paths", "strategy", "said"),
    [
        ([H200 / "verify.jsonl"], None, "no measured cell in this evidence"),
        ([H200 / "bench-training.jsonl"], None, "`pageahead plot-training FILE -o PICTURE`"),
        ([B300], "streamed", "no evidence of streamed; there is: lookahead"),
    ],
)
def test_evidence_that_no_page_can_be_about(paths, strategy, said) -> None:
    with pytest.raises(EvidenceError, match=said):
        build(paths, strategy)
