"""`pageahead run`: a script sees what it sees under ``python``; its paged optimizers are ours."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import pageahead
from tests.processes import finished, python, torchrun

LOOK = """
import json, os, sys
print(json.dumps({
    "name": __name__, "argv": sys.argv[1:], "program": os.path.abspath(sys.argv[0]),
    "file": __file__, "path": sys.path, "torch": "torch" in sys.modules,
    "main": sys.modules["__main__"].__dict__ is globals(), "doc": __doc__,
    "package": __package__ or "", "hook": sys.excepthook is sys.__excepthook__,
}))
"""

TRAIN = """
import importlib.util, json, sys
assert importlib.util.find_spec("bitsandbytes")  # transformers asks so, too
import bitsandbytes, torch

torch.manual_seed(0)
parameters = [torch.nn.Parameter(torch.randn(100_000))]
optimizer = bitsandbytes.optim.AdamW(parameters, is_paged=True, optim_bits=8)
parameters[0].grad = torch.ones(100_000)
optimizer.step()
print(json.dumps([route.path for route in optimizer.routes()]))
"""

OURS = ("pageahead", "run")
FAULT = "def fail():\n    raise LookupError('of the script')\nfail()\n"


def execute(
    *words: str, folder: Path, ours: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    how = ("-m", *OURS) if ours else ()
    return finished(python(*how, *words, folder=folder, **environment))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts" / "tool").mkdir(parents=True)
    for name in ("scripts/look.py", "scripts/tool/__init__.py", "scripts/tool/__main__.py"):
        (tmp_path / name).write_text(LOOK if name != "scripts/tool/__init__.py" else "")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "fault.py").write_text(FAULT)
    (tmp_path / "leave.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    (tmp_path / "needs.py").write_text("import nowhere_to_be_found\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["scripts/look.py"], "."),
        (["scripts/look.py", "--help", "-m", "x", "--", "-", "--lr=1 2", ""], "."),
        (["scripts"], "."),
        (["-m", "tool", "--version", "--", "-m"], "scripts"),
        (["-m", "look", "run"], "scripts"),
        (["look.py"], "scripts"),
    ],
)
def test_a_script_sees_what_it_sees_under_python(
    folder: Path, words: list[str], where: str
) -> None:
    if words == ["scripts"]:
        (folder / "scripts" / "__main__.py").write_text(LOOK)
    expected, found = (
        json.loads(execute(*words, folder=folder / where, ours=ours).stdout)
        for ours in (False, True)
    )
    assert found == expected
    assert found["name"] == "__main__"
    assert not found["torch"]  # it may still set what PyTorch and CUDA read when they start


@pytest.mark.parametrize("words", [["-m", "tool"], ["look.py"], ["tool"]])
def test_the_command_that_pip_makes(folder: Path, words: list[str]) -> None:
    """Python puts the folder of the command first, which is not to be the script's."""
    command = folder / "bin" / "pageahead"
    command.parent.mkdir()
    command.write_text("import sys\nfrom pageahead.__main__ import main\nsys.exit(main())\n")
    expected, found = (
        json.loads(execute(*how, *words, folder=folder / "scripts", ours=False).stdout)
        for how in ([], [str(command), "run"])
    )
    assert found == expected


def test_its_paged_optimizer_is_ours_and_one_line_says_so(folder: Path) -> None:
    done = execute("train.py", folder=folder)
    assert json.loads(done.stdout) == ["streamed"]
    said = [line for line in done.stderr.splitlines() if line.startswith("pageahead")]
    assert said == [
        "pageahead: replaced bitsandbytes' paged optimizer: bitsandbytes.optim.adamw.AdamW, 8-bit, "
        f"is now paged by pageahead {pageahead.__version__} (streamed)"
    ]


def test_a_script_that_imports_our_modules_first(folder: Path) -> None:
    # Whichever of our modules imports bitsandbytes, installing runs in the middle of it.
    modules = ("update", "adopting")
    for module in modules:
        (folder / f"{module}.py").write_text(f"import pageahead.optim.{module}\n{TRAIN}")
    runs = [python("-m", *OURS, f"{module}.py", folder=folder) for module in modules]
    for run in runs:
        assert json.loads(finished(run).stdout) == ["streamed"]


def test_nothing_to_replace_is_said(folder: Path) -> None:
    done = execute("scripts/look.py", folder=folder)
    assert done.stderr == (
        "pageahead: replaced nothing: no paged bitsandbytes optimizer was made\n"
    )


@pytest.mark.parametrize("code", ["0", "1", "7"])
def test_the_exit_status_is_the_scripts(folder: Path, code: str) -> None:
    assert execute("leave.py", code, folder=folder).returncode == int(code)


def test_an_exception_of_the_script_is_shown_as_pythons(folder: Path) -> None:
    done = execute("fault.py", folder=folder)
    assert done.returncode == 1
    assert 'fault.py", line 3, in <module>\n    fail()\n' in done.stderr
    assert "\nLookupError: of the script\n" in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["none.py"], 2, "Error: cannot open 'none.py': there is no such file\n"),
        (["-m", "nothing.here"], 1, "Error: there is no module named 'nothing.here'\n"),
        (["--nope", "train.py"], 2, "No such option: --nope"),
        ([], 2, "Missing argument 'SCRIPT'"),
        (["-m", "needs"], 1, "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
    ],
)
def test_what_cannot_be_run_is_named(
    folder: Path, words: list[str], status: int, said: str
) -> None:
    done = execute(*words, folder=folder)
    assert done.returncode == status
    assert said in done.stderr


def test_a_wrong_setting_is_named_before_the_script_starts(folder: Path) -> None:
    done = execute("scripts/look.py", folder=folder, PAGEAHEAD_STRATEGY="magic")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: PAGEAHEAD_STRATEGY='magic'" in done.stderr


def test_torchrun(folder: Path) -> None:
    (folder / "train.py").write_text(
        TRAIN + "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "open(f'rank{dist.get_rank()}', 'w').write(f'{total.item()} {sys.argv[1:]}')\n"
        "dist.destroy_process_group()\n"
        "sys.exit(3 if sys.argv[1:] == ['--fail'] else 0)\n"
    )
    done = execute(*torchrun(2), "-m", *OURS, "train.py", "--fail", folder=folder, ours=False)
    assert done.returncode == 1
    assert "exitcode  : 3" in done.stderr
    for rank in (0, 1):
        assert (folder / f"rank{rank}").read_text() == "2.0 ['--fail']"
    assert done.stdout.count('["streamed"]') == 2
    assert done.stderr.count("pageahead: replaced") == 1


def test_accelerate_launch(folder: Path) -> None:
    (folder / "train.py").write_text(f"{TRAIN}print(sys.argv[1:])\nsys.exit(5)\n")
    launch = ("-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes=1")
    done = execute(*launch, "-m", *OURS, "train.py", "--lr=1", folder=folder, ours=False)
    assert done.returncode == 1  # accelerate's, of a script that fails
    assert "exit status 5" in done.stderr
    assert done.stdout == "[\"streamed\"]\n['--lr=1']\n"
    assert done.stderr.count("pageahead: replaced") == 1
