"""Inputs that broke others: checkpoints of other devices, a tight first step, a huge parameter."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch

import pageahead
from pageahead import Paging
from pageahead.memory import host

from .support import bits_of, candidate, differences, gradients, parameters

REPOSITORY = Path(__file__).parents[2]
SHAPES = ((5_000,), (4_000_000,), (300_000,))
STATE_BYTES = 2 * sum(numel for (numel,) in SHAPES[1:])
"""Of the paged parameters, at 8 bits."""


def _train(optimizer: Any, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for p, gradient in zip(params, gradients(SHAPES, torch.bfloat16, step), strict=True):
            p.grad = gradient
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


def _written(optimizer: Any, params: list[torch.nn.Parameter]) -> io.BytesIO:
    file = io.BytesIO()
    weights = [p.detach() for p in params]
    torch.save({"weights": weights, "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return file


def _resume(loaded: dict[str, Any], paging: Paging) -> tuple[Any, list[torch.nn.Parameter]]:
    params = [torch.nn.Parameter(weight.to("cuda", copy=True)) for weight in loaded["weights"]]
    optimizer = candidate("PagedAdamW", params, 8, paging)
    optimizer.load_state_dict(loaded["optimizer"])
    return optimizer, params


def _is_paged(optimizer: Any, params: list[torch.nn.Parameter], strategy: str) -> bool:
    states = [optimizer.state[p][key] for p in params[1:] for key in ("state1", "state2")]
    if strategy == "streamed":
        return all(not state.is_cuda and state.is_pinned() for state in states)
    return all(not state.is_cuda for state in states)


@pytest.mark.parametrize("strategy", ["streamed", "lookahead"])
@pytest.mark.parametrize("mapped", ["cuda", "cpu"])
@pytest.mark.parametrize("origin", ["ours", "bitsandbytes"])
def test_resumed_from_a_checkpoint_mapped_to(mapped: str, strategy: str, origin: str) -> None:
    paging = Paging(strategy=strategy, staging=4 << 20)
    params = parameters(SHAPES, torch.bfloat16)
    if origin == "ours":
        uninterrupted = candidate("PagedAdamW", params, 8, paging)
    else:  # not paged: all of its state was on the GPU
        uninterrupted = bnb.optim.AdamW8bit(params)
    _train(uninterrupted, params, range(3))
    file = _written(uninterrupted, params)
    loaded = torch.load(file, map_location=mapped, weights_only=True)
    weights = [torch.nn.Parameter(weight.to("cuda", copy=True)) for weight in loaded["weights"]]
    resumed = candidate("PagedAdamW", weights, 8, paging)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    resumed.load_state_dict(loaded["optimizer"])
    # What is not paged: absmax, the maps and the small parameter's state.
    assert torch.cuda.memory_allocated() - before < STATE_BYTES / 10
    assert _is_paged(resumed, weights, strategy)
    del loaded
    _train(uninterrupted, params, range(3, 6))
    _train(resumed, weights, range(3, 6))
    assert differences(uninterrupted, params, resumed, weights) == []
    assert _is_paged(resumed, weights, strategy)


def _renamed(file: io.BytesIO, old: str, new: str) -> io.BytesIO:
    """The same checkpoint as if its tensors had been on another device."""
    moved = io.BytesIO()

    def pickled(name: str) -> bytes:
        return b"X" + len(name).to_bytes(4, "little") + name.encode()

    with zipfile.ZipFile(file) as source, zipfile.ZipFile(moved, "w") as target:
        for entry in source.infolist():
            content = source.read(entry)
            if entry.filename.endswith("data.pkl"):
                assert pickled(old) in content
                content = content.replace(pickled(old), pickled(new))
            target.writestr(entry, content)
    moved.seek(0)
    return moved


@pytest.mark.parametrize("origin", ["ours", "bitsandbytes"])
def test_checkpoint_of_device_1_loaded_on_device_0(origin: str) -> None:
    params = parameters(SHAPES, torch.bfloat16)
    paging = Paging(staging=4 << 20)
    if origin == "ours":
        uninterrupted = candidate("PagedAdamW", params, 8, paging)
    else:
        uninterrupted = bnb.optim.AdamW8bit(params)
    _train(uninterrupted, params, range(3))
    file = _renamed(_written(uninterrupted, params), "cuda:0", "cuda:1")
    if torch.cuda.device_count() == 1:
        with pytest.raises(RuntimeError, match="deserialize"):
            torch.load(file, weights_only=True)
        file.seek(0)
        loaded = torch.load(file, map_location={"cuda:1": "cuda:0"}, weights_only=True)
    else:  # as it is: tensors of device 1 are copied to where state lives here
        loaded = torch.load(file, weights_only=True)
        assert {weight.device.index for weight in loaded["weights"]} == {1}
        loaded["weights"] = [weight.to("cuda:0") for weight in loaded["weights"]]
    resumed, weights = _resume(loaded, paging)
    for state in resumed.state.values():
        for value in state.values():
            assert not isinstance(value, torch.Tensor) or value.device.index in (None, 0)
    assert _is_paged(resumed, weights, "streamed")
    _train(uninterrupted, params, range(3, 5))
    _train(resumed, weights, range(3, 5))
    assert differences(uninterrupted, params, resumed, weights) == []


TIGHT = """
import sys
import bitsandbytes, torch, pageahead
from pageahead import Paging

MIB = 1 << 20
total = torch.cuda.get_device_properties(0).total_memory
# Parameters and gradients take 256 MiB each, state 512 MiB; the cap leaves 128 MiB beside the
# first two.
torch.cuda.set_per_process_memory_fraction(640 * MIB / total, 0)
params = [torch.nn.Parameter(torch.ones(8 * MIB, device="cuda")) for _ in range(8)]
for p in params:
    p.grad = torch.ones_like(p)
if sys.argv[1] == "pageahead":
    optimizer = pageahead.PagedAdamW(params, lr=0.5, paging=Paging(staging=32 * MIB))
else:
    optimizer = bitsandbytes.optim.AdamW(params, lr=0.5)
try:
    optimizer.step()
except torch.OutOfMemoryError:
    print("out of memory")
    sys.exit()
torch.cuda.synchronize()
small = torch.nn.Parameter(torch.ones(4096, device="cuda"))
small.grad = torch.ones_like(small)
bitsandbytes.optim.AdamW([small], lr=0.5).step()
torch.cuda.synchronize()
assert all(bool((p == small[0]).all()) for p in params), (params[0][:4], small[:4])
assert small[0] != 1
assert all(not s["state1"].is_cuda and s["state1"].is_pinned() for s in optimizer.state.values())
assert torch.cuda.max_memory_allocated() < 640 * MIB
print("stepped")
"""


@pytest.mark.parametrize(
    ("library", "says"), [("pageahead", "stepped"), ("bitsandbytes", "out of memory")]
)
def test_the_first_step_fits_where_state_does_not(library: str, says: str) -> None:
    """The cap holds parameters and gradients and not the state; all state on the GPU would fail."""
    if torch.cuda.mem_get_info()[0] < 4 << 30:
        pytest.skip("needs 4 GiB of free device memory")
    done = subprocess.run(
        [sys.executable, "-c", TIGHT, library],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.stdout.split("\n")[-2:-1] == [says], done.stdout + done.stderr


def test_the_last_elements_of_a_parameter_beyond_an_int32() -> None:
    """2**31 + 8 elements: bitsandbytes counts the elements of a launch in an int32."""
    numel, tail = (1 << 31) + 8, 8
    device_needs, host_needs = 10 << 30, 5 << 30
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < device_needs:
        pytest.skip("needs 10 GiB of free device memory")
    if host.available_bytes() < host_needs:
        pytest.skip("needs 5 GiB of free host memory")
    large = torch.nn.Parameter(torch.zeros(numel, dtype=torch.bfloat16, device="cuda"))
    small = torch.nn.Parameter(torch.zeros(tail, dtype=torch.bfloat16, device="cuda"))
    settings: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.0, "min_8bit_size": 1}
    optimizer = pageahead.PagedAdamW8bit([large], **settings)
    expected = bnb.optim.AdamW8bit([small], **settings)  # 2**31 is a multiple of the block's 256
    large.grad = torch.zeros_like(large, requires_grad=False)
    for step in range(2):
        [values] = gradients(((tail,),), torch.bfloat16, step)
        large.grad[-tail:] = values
        small.grad = values
        optimizer.step()
        expected.step()
        torch.cuda.synchronize()
        assert torch.equal(bits_of(large[-tail:]), bits_of(small))
        assert bool((large[-tail:] != 0).all())
    state, right = optimizer.state[large], expected.state[small]
    for key in ("state1", "state2"):
        assert not state[key].is_cuda
        assert torch.equal(bits_of(state[key][-tail:]), bits_of(right[key]))
    for key in ("absmax1", "absmax2"):
        assert torch.equal(bits_of(state[key][-1:]), bits_of(right[key]))
    with torch.no_grad():
        for part in large[:-tail].split(1 << 28):
            assert not bool(part.any())
    del optimizer, state, part
    large.grad = None
    torch.cuda.empty_cache()
