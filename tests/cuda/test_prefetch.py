"""Prefetch on a raw stream, with the CUDA 13 signature and (where installed) the CUDA 12 one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pageahead.device import managed
from pageahead.device.prefetch import load_runtime

PROGRAM = """
import sys
import torch
torch.zeros(1, device="cuda")
from pageahead.device.prefetch import check, load_runtime, make_prefetch
runtime, major = load_runtime()
prefetch = make_prefetch(runtime, major)
nbytes = 64 << 20
address = int(check(runtime.cudaMallocManaged(nbytes, 1)))
import ctypes
ctypes.memset(address, 1, nbytes)
stream = torch.cuda.Stream()
prefetch(address, nbytes, 0, stream.cuda_stream)
stream.synchronize()
attribute = runtime.cudaMemRangeAttribute.cudaMemRangeAttributeLastPrefetchLocation
last = check(runtime.cudaMemRangeGetAttribute(4, attribute, address, nbytes))
try:
    prefetch(0, nbytes, 0, stream.cuda_stream)
except RuntimeError as error:
    refused = True
check(runtime.cudaFree(address))
print("major", major, "last prefetched to", int(last), "refusal raised", refused)
"""


def _run(extra: str | None) -> str:
    path = [one for one in (extra, *sys.path) if one]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_installed_bindings() -> None:
    _, major = load_runtime()
    assert f"major {major} last prefetched to 0 refusal raised True" in _run(None)


def test_cuda_12_bindings() -> None:
    folder = os.environ.get("PAGEAHEAD_TEST_CUDA12")
    if not folder:
        pytest.skip("PAGEAHEAD_TEST_CUDA12 names no folder with a cuda-bindings 12 in it")
    assert "major 12 last prefetched to 0 refusal raised True" in _run(os.path.abspath(folder))


def test_managed_tensor_is_prefetched() -> None:
    device = torch.device("cuda", 0)
    tensor = managed.allocate(8 << 20, device, allow_oversubscription=False)
    assert int(tensor.sum()) == 0
    stream = torch.cuda.Stream()
    managed.prefetch(tensor, device, stream.cuda_stream)
    stream.synchronize()
    assert managed.concurrent_access(device)
