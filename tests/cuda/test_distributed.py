"""Sharded and replicated parameters over NCCL: one rank, and two where there are two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pageahead
from pageahead import Paging

WIDTH = 1024
"""Rows of whole blocks: 8-bit state is the same bit for bit on any number of ranks."""

WORLDS = [
    1,
    pytest.param(
        2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    ),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers).cuda()


def sharded() -> Any:
    found: Any = model()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in found:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(found, mesh=mesh)


def train(net: nn.Module, optimizer: Any, steps: range) -> None:
    """Every rank has the same batch, so that the mean of gradients is exact."""
    for step in steps:
        generator = torch.Generator("cuda").manual_seed(step)
        net(torch.randn(64, WIDTH, generator=generator, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach()


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    for number, (mine, theirs) in enumerate(pairs):
        assert torch.equal(whole(mine), whole(theirs)), f"parameter {number} differs"


def equals_bitsandbytes(kind: str, bits: int) -> None:
    net = model()
    stock = bnb.optim.AdamW(net.parameters(), lr=1e-3, optim_bits=bits)
    train(net, stock, range(4))
    if kind == "ddp":
        mine: Any = nn.parallel.DistributedDataParallel(model())
    else:
        mine = sharded()
    in_backward = kind == "fsdp in backward"
    optimizer = pageahead.PagedAdamW(
        mine.parameters(),
        lr=1e-3,
        optim_bits=bits,
        paging=Paging(hbm_budget=0, in_backward=in_backward, free_grads=in_backward),
    )
    train(mine, optimizer, range(4))
    assert [route.path for route in optimizer.routes()] == ["streamed", "resident"] * 3
    optimizer.synchronize()
    assert_same_weights(mine, net)
    for parameter, state in optimizer.state.items():
        large = parameter.numel() >= 100_000
        assert state["state1"].device.type == ("cpu" if large else "cuda")


def resumes(folder: Path, bits: int) -> None:
    net = sharded()
    optimizer = pageahead.PagedAdamW(
        net.parameters(), lr=1e-3, optim_bits=bits, paging=Paging(hbm_budget=0)
    )
    train(net, optimizer, range(3))
    contents = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
    }
    dcp.save(contents, checkpoint_id=folder)
    train(net, optimizer, range(3, 5))

    resumed = sharded()
    other = pageahead.PagedAdamW(
        resumed.parameters(), lr=1.0, optim_bits=bits, paging=Paging(hbm_budget=0)
    )
    contents = {
        "model": get_model_state_dict(resumed),
        "optimizer": get_optimizer_state_dict(resumed, other),
    }
    before = torch.cuda.memory_allocated()
    dcp.load(contents, checkpoint_id=folder)
    set_model_state_dict(resumed, contents["model"])
    set_optimizer_state_dict(resumed, other, contents["optimizer"])
    assert torch.cuda.memory_allocated() - before < 1 << 20  # no state has moved to the GPU
    assert [route.path for route in other.routes()] == ["streamed", "resident"] * 3
    train(resumed, other, range(3, 5))
    assert_same_weights(resumed, net)


def _rank(rank: int, world: int, store: str, function: Callable[..., None], args: Any) -> None:
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        function(*args)
        torch.cuda.synchronize()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(world: int, folder: Path, function: Callable[..., None], *args: Any) -> None:
    mp.spawn(_rank, args=(world, str(folder / "store"), function, args), nprocs=world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp in backward"])
def test_same_bits_as_bitsandbytes(kind: str, bits: int, world: int, tmp_path: Path) -> None:
    run(world, tmp_path, equals_bitsandbytes, kind, bits)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("bits", [8, 32])
def test_a_sharded_run_resumes(bits: int, world: int, tmp_path: Path) -> None:
    run(world, tmp_path, resumes, tmp_path / "saved", bits)


def test_a_gpu_and_the_cpu_have_a_pipeline_each() -> None:
    def run_on(devices: tuple[str, str]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(200_000).to(device)) for device in devices]
        optimizer = pageahead.PagedAdamW32bit(weights, lr=1e-2, paging=Paging(hbm_budget=0))
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for weight in weights:
                weight.grad = torch.randn(200_000, generator=generator).to(weight.device)
            optimizer.step()
        assert {engine.type for engine in optimizer._engines} == set(devices)
        assert [route.path for route in optimizer.routes()] == ["streamed"] * 2
        return [weight.detach().cpu() for weight in weights]

    def same(one: torch.Tensor, other: torch.Tensor) -> None:
        torch.testing.assert_close(one, other, rtol=0, atol=0)  # says how many differ, and where

    mixed = run_on(("cuda", "cpu"))
    same(mixed[0], run_on(("cuda", "cuda"))[0])
    same(mixed[1], run_on(("cpu", "cpu"))[1])
