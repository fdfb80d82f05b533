"""Names for the memory of a step, so that a recorded one reads as chunks and parameters."""

from __future__ import annotations

from pageahead.device.trace import Names
from pageahead.optim.paged import PagedOptimizer
from pageahead.optim.sharded import local

__all__ = ["name_memory"]


def name_memory(names: Names, optimizer: PagedOptimizer) -> None:
    """Name what the last step of `optimizer` used: parameters, gradients, state and chunks.

    A chunk's bytes in the arena are called ``chunk 3``; in a slot they are that slot's. Managed
    state, which stays where it is, is called by its own name, as resident state is.
    """
    for number, (_, _, parameter) in enumerate(optimizer._listed()):
        names.give(local(parameter), f"parameter {number}")
        if parameter.grad is not None:
            names.give(local(parameter.grad), f"gradient {number}")
        for key, tensor in optimizer.state.get(parameter, {}).items():
            if key.startswith(("state", "absmax", "qmap")):
                names.give(tensor, f"{key} of {number}")
    for engine in optimizer._engines.values():
        if engine.arena is None or engine._plan is None:
            continue
        for chunk in engine._plan[0].chunks:
            for piece in chunk.pieces:
                for row in range(piece.rows):
                    start = piece.arena + row * piece.arena_pitch
                    names.give(engine.arena.bytes_at(start, piece.nbytes), f"chunk {chunk.index}")
