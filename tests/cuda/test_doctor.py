"""`pageahead doctor` measures this GPU."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from pageahead.cli import app
from pageahead.doctor.command import Diagnosis


def test_it_measures_and_advises() -> None:
    result = CliRunner().invoke(app, ["doctor", "--device", "cuda", "--json"])
    assert result.exit_code == 0, result.output
    found = Diagnosis.model_validate(json.loads(result.stdout))
    speeds = found.speeds
    assert speeds is not None
    assert 0 < speeds.link.duplex_median <= 1.1 * max(speeds.to_device, speeds.to_host)
    assert speeds.device_memory > speeds.to_device
    assert set(speeds.update_elements) == {8, 32}
    by_name = {one.name: one for one in found.findings}
    assert by_name["page-locking"].state == "good"
    assert {one.setting for one in found.choices} >= {"hbm_budget"}
