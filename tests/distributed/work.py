"""What ranks do in the tests: functions that a process can import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pageahead import Paging
from pageahead.optim.paged import PagedOptimizer
from tests.support import TINY_RING, legacy, ours

Shapes = Sequence[tuple[int, ...]]
Weights = list[numpy.ndarray[Any, Any]]


class Mlp(nn.Sequential):
    """Layers with one weight that is paged (133,533 elements) and shards that are empty or uneven.

    At two ranks the last layer has no element on the second; 333 rows are 167 and 166.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(401, 333), nn.Tanh(), nn.Linear(333, 15), nn.Linear(15, 1))

    def loss(self, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return self(torch.randn(4, 401, generator=generator)).square().mean()


class Product(nn.Module):
    """Parameters of any shapes, each multiplied by a seeded tensor, which is then its gradient."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.shapes = shapes
        self.weights = nn.ParameterList(torch.randn(one, generator=generator) for one in shapes)

    def forward(self, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        products = (
            (weight * factor).sum() for weight, factor in zip(self.weights, factors, strict=True)
        )
        return sum(products, torch.zeros(()))

    def loss(self, step: int, rank: int) -> torch.Tensor:
        """The same on every rank: so is the mean, however many there are."""
        generator = torch.Generator().manual_seed(step)
        factors = [torch.randn(one, generator=generator) for one in self.shapes]
        result: torch.Tensor = self(factors)
        return result


def sharded(model: Any) -> Any:
    """FSDP2 over all ranks: one group for each child that is called, one for the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in model.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: Sequence[int]) -> None:
    for step in steps:
        model.loss(step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_alone(
    model: Any, optimizer: torch.optim.Optimizer, steps: Sequence[int], world: int
) -> None:
    """What `world` ranks do, in one process: gradients are summed in order and divided."""
    parameters = list(model.parameters())
    for step in steps:
        sums: list[torch.Tensor] = []
        for rank in range(world):
            gradients = torch.autograd.grad(model.loss(step, rank), parameters)
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else [*gradients]
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total / world
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: torch.Tensor) -> numpy.ndarray[Any, Any]:
    """All of a tensor, gathered where it is sharded; every rank has to call this."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().copy()


def weights(model: nn.Module) -> Weights:
    return [whole(parameter) for parameter in model.parameters()]


def state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """For each parameter its state, gathered; ``absmax*`` of sharded 8-bit state are by rows."""
    found = []
    for entries in optimizer.state_dict()["state"].values():
        flat = {**entries, **entries.get("__bnb_optimizer_quant_state__", {})}
        found.append(
            {
                key: whole(value) if isinstance(value, torch.Tensor) else value
                for key, value in flat.items()
                if not isinstance(value, dict)
            }
        )
    return found


def fsdp(
    name: str, make: Callable[[], Any], steps: int, paging: Paging = TINY_RING, **kwargs: Any
) -> tuple[Weights, list[dict[str, Any]], list[str]]:
    """Train a sharded model; return its weights, the state, and the local paths."""
    model = sharded(make())
    optimizer = ours(name, model.parameters(), lr=1e-2, paging=paging, **kwargs)
    train(model, optimizer, range(steps))
    return weights(model), state(optimizer), [route.path for route in optimizer.routes()]


def alone(
    name: str, make: Callable[[], Any], steps: int, world: int
) -> tuple[Weights, list[dict[str, Any]]]:
    """Train in one process, with bitsandbytes' own optimizer that is not paged."""
    model = make()
    optimizer = legacy(name, model.parameters(), lr=1e-2)
    train_alone(model, optimizer, range(steps), world)
    return weights(model), state(optimizer)


def is_ours(optimizer: Any) -> bool:
    return isinstance(optimizer, PagedOptimizer)
