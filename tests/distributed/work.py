"""What ranks do in the tests: functions that a process can import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pageahead
from pageahead import Paging
from pageahead.optim.paged import PagedOptimizer
from tests.support import TINY_RING, legacy, ours

Shapes = Sequence[tuple[int, ...]]
Weights = list[np.ndarray[Any, Any]]


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


def whole(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
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


def backward_updates(micro_batches: int) -> tuple[Weights, Weights, list[int]]:
    """Train with updates in backward and without; also how often one was in backward."""
    results = []
    counts: list[int] = []
    for in_backward in (False, True):
        paging = Paging(in_backward=in_backward, free_grads=in_backward, staging=1 << 20)
        model = sharded(Mlp())
        optimizer = ours("PagedAdamW32bit", model.parameters(), lr=1e-2, paging=paging)
        for step in range(4):
            with optimizer.accumulate():
                for number in range(1, micro_batches):
                    model.loss(10 * step + number, dist.get_rank()).backward()
            model.loss(10 * step, dist.get_rank()).backward()
            if in_backward:
                wave = optimizer._backward._wave  # type: ignore[union-attr]
                counts.append(len(wave.updated) if wave is not None else 0)
                gradient = next(model.parameters()).grad
                assert gradient.to_local().isnan().all()  # a placeholder
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
    return results[0], results[1], counts


def edits_gradients_after_updates(edit: Callable[[Any], None]) -> str:
    """Change gradients after they were used; the error's text."""
    model = sharded(Mlp())
    paging = Paging(in_backward=True, free_grads=True)
    optimizer = ours("PagedAdamW32bit", model.parameters(), paging=paging)
    model.loss(0, dist.get_rank()).backward()
    try:
        edit(model)
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def clip(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def scale(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def replace(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def clipped(steps: int) -> Weights:
    """Train with clipped gradients after backward: what is clipped is used."""
    model = sharded(Mlp())
    optimizer = ours("PagedAdamW32bit", model.parameters(), lr=1e-2)
    for step in range(steps):
        model.loss(step, dist.get_rank()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def torch_clipped(steps: int) -> Weights:
    """The same gradients in a model of whole parameters, updated by stock bitsandbytes."""
    model, plain = sharded(Mlp()), Mlp()
    optimizer = legacy("PagedAdamW32bit", plain.parameters(), lr=1e-2)
    for step in range(steps):
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                first, rows = dist.get_rank() * -(-len(theirs) // 2), len(mine.to_local())
                mine.to_local().copy_(theirs[first : first + rows])
        model.loss(step, dist.get_rank()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.grad = mine.grad.full_tensor()
        optimizer.step()
        model.zero_grad()
    return [whole(parameter) for parameter in plain.parameters()]


def eight_bit(shapes: Shapes, steps: int, name: str) -> Any:
    return fsdp(name, lambda: Product(shapes), steps)


def layouts(name: str, shapes: Shapes) -> list[tuple[str, str, list[int], int, int]]:
    """After a step: path, dtype of the state, its local shape, its blocks, the count of steps."""
    model = sharded(Product(shapes))
    optimizer = ours(name, model.parameters())
    train(model, optimizer, range(1))
    return [
        (
            route.path,
            str(optimizer.state[parameter]["state1"].dtype),
            list(optimizer.state[parameter]["state1"].shape),
            len(optimizer.state[parameter].get("absmax1", ())),
            optimizer.state[parameter]["step"],
        )
        for route, parameter in zip(optimizer.routes(), model.parameters(), strict=True)
    ]


def refusal(how: str) -> str:
    """Do what is refused; the error's text. Nothing may have changed."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    dim = 1 if how == "8-bit by columns" else 0
    parameter = nn.Parameter(distribute_tensor(torch.randn(64, 128), mesh, [Shard(dim)]))
    name = "PagedAdamW8bit" if "8-bit" in how else "PagedAdam32bit"
    if how == "kept gradients":
        try:
            pageahead.PagedAdam([parameter], paging=Paging(in_backward=True))
        except ValueError as error:
            return str(error)
    optimizer = getattr(pageahead, name)([parameter])
    if how == "max_unorm":
        optimizer.args.max_unorm = 1.0
    parameter.grad = torch.ones_like(parameter)
    if how == "placements":
        # The setter takes it: only the local parts differ.
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    before = whole(parameter)
    try:
        optimizer.step()
    except (TypeError, ValueError) as error:
        assert before.tobytes() == whole(parameter).tobytes()
        assert not optimizer.state.get(parameter)
        return str(error)
    return ""


def hybrid(steps: int) -> Weights:
    """Two groups of two ranks, each with a whole copy (HSDP); every rank has the same batch."""
    model = Product([(333, 401), (16, 256), (3,)])
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts")))
    optimizer = ours("PagedAdamW8bit", model.parameters(), lr=1e-2, paging=TINY_RING)
    train(model, optimizer, range(steps))
    return weights(model)


def ddp(name: str, steps: int, **kwargs: Any) -> tuple[Weights, list[dict[str, Any]], list[str]]:
    """Train under DistributedDataParallel, which keeps a whole model and state on each rank."""
    model = Mlp()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ours(name, wrapped.parameters(), lr=1e-2, paging=TINY_RING, **kwargs)
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        wrapped(torch.randn(4, 401, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), state(optimizer), [route.path for route in optimizer.routes()]


def ddp_in_backward() -> str:
    wrapped = nn.parallel.DistributedDataParallel(Mlp())
    optimizer = ours("PagedAdamW", wrapped.parameters(), paging=Paging(in_backward=True))
    before = weights(wrapped)
    try:
        wrapped(torch.randn(4, 401)).square().mean().backward()
    except RuntimeError as error:
        assert not optimizer.state
        assert all((a == b).all() for a, b in zip(before, weights(wrapped), strict=True))
        return str(error)
    return ""
