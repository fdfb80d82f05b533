"""Workers that misbehave: short scripts that are given a worker's arguments."""

from __future__ import annotations

import os
import sys

import pytest

from pageahead.experiment import runner
from pageahead.experiment.evidence import Environment
from pageahead.experiment.messages import CellRequest, ProbeRequest, Progress
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.runner import WorkerError, ask
from tests.experiment.support import cell

REQUEST = CellRequest(
    run="now",
    cell="adamw32/8x1Mi",
    strategies=["streamed"],
    device="cpu",
    protocol=Protocol(1, 1, 1),
)
SAY = "import os, sys, time\nchannel = os.fdopen(int(sys.argv[1]), 'w')\n"


def worker(script: str) -> list[str]:
    return [sys.executable, "-c", SAY + script]


def sends(line: str) -> str:
    return f"channel.write({line!r} + '\\n'); channel.flush()\n"


def test_the_answer_and_the_progress_before_it_arrive() -> None:
    answer = cell()
    heard: list[Progress] = []
    script = (
        sends('{"kind":"progress","phase":"warming up","steps":1}')
        + "print('noise on the standard streams'); assert '8x1Mi' in sys.argv[2]\n"
        + sends('{"kind":"progress","phase":"measuring","steps":2}')
        + sends(answer.model_dump_json())
    )
    assert ask(REQUEST, heard.append, command=worker(script)) == answer
    assert [(one.phase, one.steps) for one in heard] == [("warming up", 1), ("measuring", 2)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot be told")
@pytest.mark.parametrize("forked", [True, False])
def test_what_lies_in_the_working_directory_is_not_imported(forked, tmp_path, monkeypatch) -> None:
    for name in ("pageahead.py", "queue.py"):
        (tmp_path / name).write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    if not forked:
        monkeypatch.setattr(runner._nursery, "bear", lambda *_: None)
    probe = ProbeRequest(run="now", argv=[], device="cpu")
    assert isinstance(ask(probe, lambda progress: None), Environment)


def test_a_failure_is_the_reason() -> None:
    script = sends('{"kind":"failure","reason":"no such cell"}') + "sys.exit(1)"
    with pytest.raises(WorkerError, match=r"^no such cell$"):
        ask(REQUEST, lambda progress: None, command=worker(script))


def test_a_worker_that_ends_itself_is_reported_with_its_last_words() -> None:
    # As bitsandbytes does after a CUDA error.
    script = "print('Error invalid argument at line 80 in file /src/csrc/ops.cu'); os._exit(1)"
    script = script.replace("os._exit", "sys.stdout.flush(); os._exit")
    with pytest.raises(WorkerError, match=r"exit status 1; last output: Error .* in file ops\.cu$"):
        ask(REQUEST, lambda progress: None, command=worker(script))


def test_a_worker_that_is_killed_is_reported_with_the_signal() -> None:
    with pytest.raises(WorkerError, match="without an answer, killed by SIGKILL"):
        ask(REQUEST, lambda progress: None, command=worker("os.kill(os.getpid(), 9)"))


def test_an_answer_outlives_a_bad_end() -> None:
    script = sends(cell().model_dump_json()) + "channel.close(); os.abort()"
    with pytest.raises(WorkerError, match=r"answered, but then ended badly.*SIGABRT") as caught:
        ask(REQUEST, lambda progress: None, command=worker(script))
    assert caught.value.answer == cell()


def test_a_silent_worker_is_ended_and_what_it_was_doing_is_said(tmp_path) -> None:
    note = tmp_path / "pid"
    script = (
        f"open({str(note)!r}, 'w').write(str(os.getpid()))\n"
        + sends('{"kind":"progress","phase":"comparing bits","steps":3}')
        + "time.sleep(600)"
    )
    with pytest.raises(WorkerError, match="without a sign of life while comparing bits"):
        ask(REQUEST, lambda progress: None, command=worker(script), silence_seconds=3.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_an_interruption_ends_the_worker(tmp_path) -> None:
    note = tmp_path / "pid"
    script = (
        f"open({str(note)!r}, 'w').write(str(os.getpid()))\n"
        + sends('{"kind":"progress","phase":"measuring","steps":3}')
        + "time.sleep(600)"
    )

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(REQUEST, interrupt, command=worker(script))
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
