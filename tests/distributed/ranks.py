"""A pool of processes that run a function as the ranks of one process group, over gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 120
"""How long a function may take; a rank that waits for one that failed would wait for ever."""


class Ranks:
    """Processes that are started once, because importing PyTorch takes longer than most tests."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on `world` ranks; return what each returned, by rank."""
        self._start()
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:world]):
                pipe.send((rank, world, str(Path(folder) / "store"), function, args))
            waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[:world])}
            results: dict[int, Any] = {}
            while waiting:
                ready = wait(list(waiting), SECONDS)
                if not ready:
                    self.stop()
                    raise AssertionError(f"ranks {sorted(waiting.values())} did not answer")
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    good, results[rank] = pipe.recv()
                    if not good:
                        self.stop()  # the others may wait for this one
                        raise AssertionError(f"rank {rank} of {world} failed:\n{results[rank]}")
        return [results[rank] for rank in range(world)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < self._most:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def _serve(pipe: Connection) -> None:
    import torch
    from bitsandbytes.optim import GlobalOptimManager

    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        rank, world, store, function, args = job
        GlobalOptimManager.get_instance().initialize()
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=SECONDS),
        )
        try:
            answer = True, function(*args)
        except BaseException:
            pipe.send((False, traceback.format_exc()))
            return
        torch.distributed.barrier()  # nobody closes the connection that another still reads
        torch.distributed.destroy_process_group()
        pipe.send(answer)
