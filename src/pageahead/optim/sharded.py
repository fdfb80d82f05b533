"""Parameters that are sharded over processes: `DTensor`, which ``fully_shard`` (FSDP2) makes.

An update is elementwise, so each process updates its own shard: kernels get local tensors, and
``optimizer.state`` holds local ones, under the `DTensor` parameter. What a parameter's size decides
(the width of its state, whether it is paged) is decided from the size of the whole, so that it does
not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Replicate
else:  # pragma: no cover  (a build of PyTorch without it)

    class DTensor(torch.Tensor):  # type: ignore[no-redef]
        """Nothing is an instance of it."""


__all__ = [
    "DTensor",
    "check_gradient",
    "check_shard",
    "is_sharded",
    "local",
    "moved_placements",
    "shards",
    "wait_for",
    "wrap",
]


def is_sharded(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Whether this is one process's part of a tensor; of a replicated one the part is the whole."""
    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a kernel may read and write: of a `DTensor`, what this process has of it."""
    if type(tensor) is torch.Tensor or not isinstance(tensor, DTensor):
        return tensor
    return tensor._local_tensor


def shards(parameter: torch.Tensor) -> bool:
    """Whether other processes have parts of this parameter that this one has not."""
    return is_sharded(parameter) and not all(
        isinstance(placement, Replicate) for placement in parameter.placements
    )


def check_shard(parameter: torch.Tensor, config: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Check that a parameter is sharded in a way in which its state can be updated and saved.

    Args:
        parameter: the parameter.
        config: bitsandbytes' hyperparameters for it.
        dtype: of its state.

    Raises:
        ValueError: it is not.
    """
    if not is_sharded(parameter):
        return
    what = f"a parameter of shape {tuple(parameter.shape)} with placements {parameter.placements}"
    nothing = "Nothing was updated."
    if any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(f"{what} is a sum that is yet to be reduced; it cannot be updated")
    if not shards(parameter):
        return
    if config["max_unorm"] > 0.0 and dtype == torch.float32:
        raise ValueError(
            f"max_unorm={config['max_unorm']} limits the norm of a whole parameter's update, but "
            f"each process has a part of {what}. Set max_unorm=0. {nothing}"
        )
    by_rows = all(
        isinstance(placement, Replicate) or getattr(placement, "dim", None) == 0
        for placement in parameter.placements
    )
    if dtype == torch.uint8 and not by_rows:
        raise ValueError(
            f"{what} is not sharded by rows. 8-bit state has one scale for 256 elements in a row, "
            f"so it can be saved and loaded by rows only. Use 32-bit state for this parameter "
            f"(bitsandbytes' GlobalOptimManager.override_config), or shard dimension 0. {nothing}"
        )


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor, what: str) -> None:
    """Check that the local parts of a gradient and its parameter belong together.

    Raises:
        TypeError, ValueError: one of them is no `DTensor`, or they are placed differently.
    """
    if is_sharded(parameter) and is_sharded(gradient):
        if parameter.device_mesh == gradient.device_mesh and (
            parameter.placements == gradient.placements
        ):
            return
        raise ValueError(
            f"{what} has placements {parameter.placements}, its gradient "
            f"{gradient.placements}. Set its grad to "
            f"grad.redistribute(placements=parameter.placements) first. Nothing was updated."
        )
    raise TypeError(
        f"{what} is a {type(parameter).__name__}, its gradient a {type(gradient).__name__}; both "
        f"must be DTensor or neither. Nothing was updated."
    )


def wait_for(gradient: torch.Tensor) -> None:
    """Complete a collective operation whose result a gradient's local part still waits for."""
    if is_sharded(gradient) and type(gradient._local_tensor) is not torch.Tensor:
        waiting: Any = gradient._local_tensor
        if hasattr(waiting, "wait"):
            gradient._local_tensor = waiting.wait()


def wrap(
    like: DTensor, part: torch.Tensor, shape: tuple[int, ...], dimensions_before: int = 0
) -> DTensor:
    """Make the `DTensor` of which this process has `part`, placed as `like` is.

    Args:
        like: a parameter.
        part: the local tensor; it is not copied, and may be on the host while `like` is on a GPU.
        shape: of the whole.
        dimensions_before: how many dimensions `shape` has before the one that is `like`'s first.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    strides = [1] * len(shape)
    for dimension in range(len(shape) - 2, -1, -1):
        strides[dimension] = strides[dimension + 1] * max(shape[dimension + 1], 1)
    meta = TensorMeta(torch.Size(shape), tuple(strides), part.dtype)
    placements = moved_placements(like, dimensions_before)
    spec = DTensorSpec(like.device_mesh, placements, tensor_meta=meta)
    # `DTensor.from_local` would copy `part` to the mesh's kind of device.
    return DTensor(part, spec, requires_grad=False)


def moved_placements(like: DTensor, dimensions: int) -> tuple[Any, ...]:
    """The placements of a tensor that has so many dimensions before those of `like`."""
    return tuple(_moved(placement, dimensions) for placement in like.placements)


def _moved(placement: Any, dimensions: int) -> Any:
    if not dimensions or isinstance(placement, Replicate):
        return placement
    dim = placement.dim + dimensions
    if hasattr(placement, "split_factor"):
        return type(placement)(dim, split_factor=placement.split_factor)
    return type(placement)(dim)
