"""Pages of evidence: whole, their own, and with the gate's figures."""

from __future__ import annotations

import json
import re
from statistics import median

import pytest

from pageahead.experiment.cells import CELLS
from pageahead.experiment.gate.decision import decide
from pageahead.experiment.gate.reading import read
from pageahead.experiment.gate.wording import why
from pageahead.experiment.report import rendering
from pageahead.experiment.report.model import build
from pageahead.experiment.table import amount, milliseconds
from tests.experiment.gate.support import GOOD, NEEDED, moved
from tests.experiment.gate.support import record as gate_record
from tests.experiment.report.support import (
    B300,
    CPU,
    H200,
    cpu_records,
    evidence,
    parsed,
    table,
    written,
)
from tests.experiment.support import environment

KINDS = ("B300", "H200", "GO", "CPU")
DASH = "\N{EN DASH}"


@pytest.fixture(params=KINDS)
def paths(request, tmp_path):
    return evidence(tmp_path)[request.param]


@pytest.fixture
def page(paths):
    return parsed(rendering.html(build(paths)))


def decisions(paths):
    found = read(paths)
    strategies = {one.strategy for record in found.cells for one in record.candidates}
    strategies |= {record.strategy for record in found.summaries}
    return [decide(found, strategy) for strategy in sorted(strategies)]


def test_a_page_is_well_formed_and_its_links_lead_somewhere(page) -> None:
    assert page.all("html")[0].attributes["lang"] == "en"
    identities = [one.attributes["id"] for one in page.all() if "id" in one.attributes]
    assert len(identities) == len(set(identities))
    links = [one.attributes["href"] for one in page.all("a")]
    assert links
    assert {link[1:] for link in links} <= set(identities)
    for one in page.all():
        for name in ("aria-labelledby",):
            assert one.attributes.get(name, identities[0]) in identities
    assert len(page.all("h1")) == 1


def test_a_page_needs_nothing_but_itself(paths) -> None:
    text = rendering.html(build(paths))
    page = parsed(text)
    assert page.all("script") == page.all("link") == page.all("iframe") == []
    assert "@import" not in text
    assert "url(" not in text
    assert [one.attributes["src"][:5] for one in page.all("img")] == []
    assert re.findall(r"https?:", text) == []
    (policy,) = [one for one in page.all("meta") if "http-equiv" in one.attributes]
    assert policy.attributes["content"].startswith("default-src 'none'")


def test_the_same_evidence_makes_the_same_page(paths) -> None:
    assert rendering.html(build(paths)) == rendering.html(build(paths))
    assert rendering.markdown(build(paths)) == rendering.markdown(build(paths))


def test_what_is_drawn_is_also_said(page) -> None:
    charts = page.all("div", class_="strip")
    drawn = [one for one in charts if "axis" not in one.attributes["class_"[:5]].split()]
    for strip in drawn:
        (picture,) = [
            one for one in strip.children if not isinstance(one, str) and one.tag == "svg"
        ]
        assert picture.attributes["role"] == "img"
        assert picture.attributes["aria-label"]
    for header in page.all("th"):
        assert header.attributes["scope"] in ("col", "row")


def test_every_finding_is_the_gates(paths, page) -> None:
    for decision in decisions(paths):
        heading = f"{decision.strategy} on {decision.device}: {decision.verdict}"
        (section,) = [
            one
            for one in page.all("section")
            if any(title.text == heading for title in one.all("h2"))
        ]
        (findings,) = section.all("ul", class_="findings")
        items = [one for one in findings.children if not isinstance(one, str)]
        assert len(items) == len(decision.findings) == 9
        for item, finding in zip(items, decision.findings, strict=True):
            assert finding.name in item.text
            for figure in finding.figures:
                assert " ".join(figure.split()) in item.text
            for missing in finding.missing:
                name, _, reason = missing.partition(": ")
                assert name in item.text
                assert reason in item.text
    cards = page.all("article")
    assert len(cards) == len(decisions(paths))
    said = " ".join(card.text for card in cards)
    for decision in decisions(paths):
        assert decision.verdict in said
        assert why(decision)[1:] in said


def test_every_figure_of_every_cell_is_the_gates(paths, page) -> None:
    counted = 0
    for decision in decisions(paths):
        rows = table(page, f"Every cell of {decision.strategy}")
        for name, one in decision.collection.cells.items():
            counted += 1
            row = rows[name if one.raw else f"{name} *"]
            assert row[1:7] == [
                amount(one.state_bytes),
                milliseconds(one.legacy_ms),
                milliseconds(one.candidate_ms),
                f"{one.ratio:.3f}",
                f"{one.verdict.low:.3f}{DASH}{one.verdict.high:.3f}",
                one.verdict.name,
            ]
            assert row[7] == ("equal" if one.equal else "DIFFER")
            limits = (one.limit.overlap, one.limit.link)
            assert row[10:] == [DASH if value is None else f"{value:.2f}" for value in limits]
    assert counted or paths[0].name == "cpu.jsonl"


def test_the_means_beside_the_verdict_are_criterion_2s(paths, page) -> None:
    for decision, card in zip(
        decisions(paths),
        sorted(page.all("article"), key=lambda one: one.all("p", class_="what")[0].text),
        strict=True,
    ):
        figures = " ".join(decision.criteria[1].figures)
        shown = [one.text.removesuffix(" so far") for one in card.all("dd")[:2]]
        for bits, value in zip((8, 32), shown, strict=True):
            said = f"{bits}-bit: no cell" if value == "missing" else f"geometric mean {value} of"
            assert said in figures


def test_what_is_good_so_far_is_not_said_to_be_enough(tmp_path) -> None:
    some = [one for one in GOOD if one.kind != "cell" or "64MiB" not in one.cell]
    cards = []
    for records in (GOOD, some):
        path = written(tmp_path / f"{len(records)}.jsonl", records)
        (card,) = parsed(rendering.html(build([path]))).all("article")
        cards.append([(one.text, one.attributes["class"]) for one in card.all("dd")])
    whole, partial = cards
    assert all(tone == "good" and "so far" not in value for value, tone in whole)
    changed = [(f"{value} so far", "open") for value, _ in whole]
    changed[2] = whole[2]  # no public cell is missing
    left = len(NEEDED) - (len(GOOD) - len(some))
    changed[-1] = (f"{left} of {left} so far", "open")
    assert partial == changed
    bad = parsed(rendering.html(build([B300]))).all("dd", class_="bad")
    assert [one.text for one in bad] == ["1.13", "0.9735"]


def test_the_bandwidth_is_that_of_the_raw_times() -> None:
    path = H200 / "bench-source.jsonl"
    page = parsed(rendering.html(build([path], "streamed")))
    rows = table(page, "Every cell of streamed")
    counted = 0
    for record in read([path]).cells:
        (ours,) = [one for one in record.candidates if one.strategy == "streamed"]
        step = median(value for one in ours.timings.wall_ms for value in one)
        rate = ours.routes["streamed"].state_bytes / step / 1e6
        share = rate / median(record.link.duplex)
        (row,) = [row for name, row in rows.items() if name.split()[0] == record.cell]
        assert row[8:10] == [f"{rate:.1f}", f"{share:.0%}"]
        counted += 1
    assert counted >= 6


def test_legacy_has_no_bandwidth_where_it_does_not_page(tmp_path) -> None:
    name = "resident32/8x4Mi"
    alone = [environment(), gate_record(CELLS[name], 0.3)]
    page = parsed(rendering.html(build([written(tmp_path / "run.jsonl", [*GOOD, *alone[1:]])])))
    (strip,) = [one for one in bandwidth_strips(page) if one.all("span")[0].text == name]
    assert strip.all("rect", class_="bar-ours")
    assert not strip.all("rect", class_="bar-legacy")
    assert "legacy" not in strip.all("svg")[0].attributes["aria-label"]
    others = [one for one in bandwidth_strips(page) if one is not strip]
    assert others
    assert all(one.all("rect", class_="bar-legacy") for one in others)
    assert "where it does not page it has no bar" in page.text
    page = parsed(rendering.html(build([written(tmp_path / "alone.jsonl", alone)])))
    assert "legacy does not page here" in page.text
    assert not page.all("rect", class_="bar-legacy")


def bandwidth_strips(page):
    return [one for one in page.all("div", class_="strip") if one.all("rect", class_="bar-ours")]


def test_ratios_lie_on_the_page_as_they_compare(tmp_path) -> None:
    paths = [written(tmp_path / "run.jsonl", moved("adamw32/8x1Mi", 0.9))]
    page = parsed(rendering.html(build(paths)))
    places, means = {}, {}
    for strip in page.all("div", class_="strip"):
        label = strip.all("span", class_="label")[0].text
        gate = strip.all("line", class_="gate")
        line = float(gate[0].attributes["x1"][:-1]) if gate else None
        if dots := strip.all("circle"):
            places[label] = (float(dots[0].attributes["cx"][:-1]), line)
        elif "mean" in label:
            place = [one.attributes["x"] for one in strip.all("svg") if "x" in one.attributes]
            means[label] = (float(place[0][:-1]), line)
    at, line = places["adamw32/8x1Mi"]
    assert at < line
    at, line = places["adamw8/8x1Mi"]
    assert at > line
    at, line = means["8-bit geometric mean"]
    assert at > line
    at, line = means["32-bit geometric mean"]
    assert at < line


def test_two_strategies_have_a_verdict_each() -> None:
    report = build([H200 / "bench-source.jsonl", H200 / "verify.jsonl"])
    verdicts = {one.decision.strategy: one.decision.verdict for one in report.judgements}
    assert verdicts == {"streamed": "INCOMPLETE", "lookahead": "NO-GO"}
    assert report.title == (
        "pageahead: INCOMPLETE for streamed, NO-GO for lookahead on NVIDIA H200"
    )
    assert report.again == [
        "pageahead gate bench-source.jsonl verify.jsonl --strategy streamed",
        "pageahead gate bench-source.jsonl verify.jsonl --strategy lookahead",
        "pageahead report bench-source.jsonl verify.jsonl -o report.html",
    ]


def test_several_devices_have_a_verdict_each(tmp_path) -> None:
    paths = [B300, H200 / "bench-source.jsonl", written(tmp_path / "cpu.jsonl", cpu_records())]
    report = build(paths)
    found = [(one.decision.strategy, one.decision.device) for one in report.judgements]
    assert found == [
        ("streamed", "NVIDIA H200"),
        ("lookahead", "NVIDIA H200"),
        ("streamed", CPU),
        ("lookahead", "NVIDIA B300 SXM6"),
    ]
    assert report.again[0] == "pageahead gate bench-source.jsonl --strategy streamed"
    assert report.again[2] == "pageahead gate cpu.jsonl"
    assert report.again[3] == "pageahead gate source-b300.jsonl"
    for judgement in report.judgements:
        alone = decide(read(_of(paths, judgement.decision.device)), judgement.decision.strategy)
        assert judgement.decision.verdict == alone.verdict
        assert judgement.decision.findings == alone.findings


def _of(paths, device):
    return [path for path in paths if device in path.read_text()]


def test_what_published_figures_do_not_say_is_named() -> None:
    text = parsed(rendering.html(build([B300]))).text
    assert "Missing: no cell says how fast the link was" in text
    assert "Missing: no record of peak memory" in text
    assert "Missing: there is no profile among the evidence" in text
    assert "Missing: published figures come without a record of their environment" in text
    assert "Missing: nothing says by which commands the published figures were made" in text
    assert "bitsandbytes 95f9af3" in text


def test_the_cpus_times_are_shown_and_said_to_be_no_evidence(tmp_path) -> None:
    page = parsed(rendering.html(build([written(tmp_path / "cpu.jsonl", cpu_records())])))
    assert "times are no evidence of speed" in page.text
    assert list(table(page, "Every cell of streamed")) == ["adamw32/8x1Mi †"]
    assert "† adamw32/8x1Mi: not counted: measured on the CPU" in page.text
    assert page.all("div", class_="uncounted")


def test_commands_commit_and_digest_are_the_evidences() -> None:
    text = parsed(rendering.html(build([H200 / "bench-source.jsonl", H200 / "verify.jsonl"]))).text
    for path in ("bench-source.jsonl", "verify.jsonl"):
        recorded = json.loads((H200 / path).read_text().splitlines()[0])
        assert f"pageahead {' '.join(recorded['argv'])}" in text
        assert recorded["source_sha256"] in text
        assert recorded["torch"] in text
        assert recorded["gpu"]["driver"] in text
        assert f"git checkout {recorded['commit']}" in text


@pytest.mark.parametrize(
    ("dirty", "said"),
    [
        (True, "The package differed from this commit"),
        (None, "Whether the package differed from this commit is not known"),
        (False, ""),
    ],
)
def test_how_the_code_differed_from_its_commit(dirty, said, tmp_path) -> None:
    paths = [written(tmp_path / "run.jsonl", [environment(dirty=dirty), *GOOD[1:]])]
    for text in (parsed(rendering.html(build(paths))).text, rendering.markdown(build(paths))):
        assert said in text
        assert ("differed from this commit" in text) == (dirty is not False)


def test_a_commit_that_is_not_known_is_not_made_up(tmp_path) -> None:
    changed = environment(commit=None, dirty=None)
    paths = [written(tmp_path / "run.jsonl", [changed, *GOOD[1:]])]
    for text in (parsed(rendering.html(build(paths))).text, rendering.markdown(build(paths))):
        assert "git checkout" not in text
        assert "names no commit" in text
        assert "None" not in text


def test_markdown_tables_are_whole_and_have_the_gates_figures(paths) -> None:
    text = rendering.markdown(build(paths))
    width = 0
    for line in text.splitlines():
        columns = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        if columns and width:
            assert columns == width, line
        width = columns
    for decision in decisions(paths):
        assert f"**{decision.verdict}** for `{decision.strategy}` on " in text
        for name, one in decision.collection.cells.items():
            (row,) = [
                line
                for line in text.splitlines()
                if line.startswith(f"| `{name}`")
                and f"| {milliseconds(one.candidate_ms)} |" in line
            ]
            assert f"| {one.ratio:.3f} | {one.verdict.low:.3f}{DASH}{one.verdict.high:.3f} |" in row
            assert f"| {one.verdict.name} |" in row
