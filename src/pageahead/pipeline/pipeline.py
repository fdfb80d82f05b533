"""The one place where the order of a step is written down.

Four streams take part. The **caller's** produces gradients and reads parameters afterwards. The
**compute** stream runs the updates. The **fetch** stream brings chunks in, the **write-back**
stream takes them home. Each line below that says ``wait`` is one happens-before edge, and its
comment names it; nothing else orders these streams.

The same code runs every strategy: `streamed` over an arena and as many slots as the ring has,
`lookahead` over managed memory one chunk ahead, `sequential` none ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pageahead.device.protocol import Device, Event
from pageahead.memory.layout import Chunk
from pageahead.memory.ring import Ring, Slot
from pageahead.memory.transfer import Transfer

__all__ = ["Pipeline", "Plan", "Update"]

EARLY = 2
"""Chunks sent for before the host has prepared a step: enough to keep the link busy for so long.
The rest follows the first update, which should not wait for their enqueuing: the way home starts
with it."""

Update = Callable[[Chunk, Slot | None], None]
"""Launches the updates of a chunk on the compute stream; the slot is None where nothing moved."""


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """What a step moves, and how.

    Attributes:
        chunks: in step order.
        transfer: how they reach the device.
        ring: the slots, for a transfer that copies.
        depth: how many chunks may be fetched ahead of the one being updated; 0 means that each
            is fetched when its turn comes and the device is synchronized after it.
        fresh: indices of chunks whose state is all zeros in this step, so that nothing has to be
            fetched.
        early: how many chunks are sent for before the step is prepared, if `depth` allows that.
        repeats: whether several chunks hold the same bytes: a parameter is listed twice.
    """

    chunks: tuple[Chunk, ...]
    transfer: Transfer
    ring: Ring | None
    depth: int
    fresh: set[int] = field(default_factory=set)
    early: int = EARLY
    repeats: bool = field(init=False)

    def __post_init__(self) -> None:
        repeats = any(chunk.after is not None for chunk in self.chunks)
        object.__setattr__(self, "repeats", repeats)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A chunk that was sent for and is not updated yet."""

    slot: Slot | None
    fetched: Event


class Pipeline:
    """Drives the chunks of one optimizer on one device, step after step."""

    def __init__(self, device: Device, *, fetch: str, overlap: bool) -> None:
        """Args:
        device: where updates run.
        fetch: role of the stream that brings chunks in, ``fetch`` or ``prefetch``.
        overlap: let write-backs go on after `finish` returned.
        """
        self._device = device
        self._overlap = overlap
        self._compute = device.compute_stream()
        self._fetch = device.stream(fetch)
        self._write_back = device.stream("write_back")
        self._plan: Plan | None = None
        self._open = False  # between `prime` or `begin` and `finish`
        self._last_written: Event | None = None
        """The write-back stream runs in order: this event stands for every byte written so far."""
        self._last_updated: Event | None = None
        # The next three outlive a step, for the next one of the same plan.
        self._free: deque[Slot] = deque()
        self._emptied: dict[int, Event] = {}  # by slot
        self._written: dict[int, Event] = {}  # by chunk
        self._start()

    def _start(self) -> None:
        self._primed: Plan | None = None
        self._update: Update | None = None
        self._next = 0
        self._flights: dict[int, _Flight] = {}
        self._advanced: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether a step has been primed or begun, and neither finished nor abandoned."""
        return self._open

    def prime(self, plan: Plan, most: int | None = None) -> None:
        """Send for the first chunks of a step: they depend on nothing that the caller does.

        Optional: `begin` does it otherwise. Called as soon as a step is likely to follow `plan`, it
        hides the time the host takes to prepare that step. `abandon` takes it back.

        Args:
            plan: the step's.
            most: how many chunks, if the plan's depth allows that; by default `Plan.early`.
        """
        self._start()
        self._open = True
        self._prime(plan, plan.early if most is None else most)

    def begin(self, plan: Plan, update: Update) -> None:
        """Open a step: order updates after the caller's work, and send for the first chunks."""
        if plan is not self._primed:
            self._recall()
            self._start()
        self._open = True
        self._update = update
        # caller → compute: gradients are written, parameters are no longer read.
        self._compute.wait(self._device.caller_stream().record())
        if plan is not self._primed:
            self._prime(plan, plan.early)

    def _prime(self, plan: Plan, most: int) -> None:
        another = plan is not self._plan
        if plan.ring is not None and another:
            # compute → fetch, new slots: their memory comes from the compute stream's pool, where
            # whoever had it before may not be done with it.
            self._fetch.wait(self._compute.record())
        if self._last_written is not None and (another or plan.repeats):
            # write-back → fetch, across plans: every slot is empty and every byte is home. Within
            # one plan each slot and each chunk is waited for by itself, in `_send_for`.
            self._fetch.wait(self._last_written)
        if another:
            self._all_free(plan)
        self._plan = self._primed = plan
        self._fetch_ahead(plan, min(most, plan.depth))

    def _all_free(self, plan: Plan | None) -> None:
        """Nothing is in a slot or on its way home, or whatever is has been waited for."""
        self._free = deque(plan.ring.slots if plan is not None and plan.ring is not None else ())
        self._emptied.clear()
        self._written.clear()

    def _recall(self) -> None:
        """Free the slots of chunks that were sent for and not updated."""
        if self._flights:
            # fetch → compute: what was sent for in vain has come. Nothing outlives its step.
            self._compute.wait(self._fetch.record())
            flown = [flight.slot for flight in self._flights.values() if flight.slot is not None]
            self._free.extend(flown)
            self._flights.clear()

    def advance(self, chunk: Chunk, *, ready: Event | None = None) -> None:
        """Update one chunk, send it home and send for the next.

        If the update raises, the chunk still goes home: what was updated keeps its state.

        Args:
            chunk: one of the plan's; in any order, except that a parameter listed twice comes in
                its own.
            ready: its gradients are written, where that happens after `begin`.
        """
        plan, update = self._plan, self._update
        assert plan is not None and update is not None
        if ready is not None:
            # caller → compute: these gradients are written, these parameters no longer read.
            self._compute.wait(ready)
        self._advanced.add(chunk.index)
        if not chunk.nbytes:
            update(chunk, None)
            return
        flight = self._flights.pop(chunk.index, None)
        if flight is None:
            flight = self._send_for(chunk, plan)
        # fetch → compute: the chunk has arrived.
        self._compute.wait(flight.fetched)
        try:
            update(chunk, flight.slot)
            self._send_home(chunk, flight.slot, plan)
        except BaseException:
            # Also where the way home failed: once more, or what was updated would lose its state.
            with suppress(Exception):  # the first error is the one to show
                self._send_home(chunk, flight.slot, plan)
            raise
        if plan.depth == 0:
            self._device.synchronize()
        self._fetch_ahead(plan, plan.depth)

    def finish(self, *, failed: bool = False) -> None:
        """Close the step: order the caller after it, and wait for what must be complete.

        Args:
            failed: an exception is on its way out. Everything in flight is waited for, and a
                second error is not raised over the first.
        """
        if failed:
            self.abandon()  # the host waits for every stream, and so whoever it calls next
            return
        updated = self._compute.record()
        # compute → caller: parameters are written, gradients are no longer read.
        self._device.caller_stream().wait(updated)
        self._last_updated = updated
        if not self._overlap:
            # compute, write-back → host: the completed-step contract. Any stream may read now.
            self._complete()
        self._recall()
        self._open = False
        self._start()

    def forget_plan(self) -> None:
        """Let go of the last plan, and so of its slots; the next `begin` brings another."""
        self._plan = self._primed = None

    def abandon(self) -> None:
        """Wait for whatever is in flight and forget it; an error in it is not raised."""
        if self._open:
            with suppress(Exception):
                self._device.drain()
            self._last_written = self._last_updated = None  # an event may carry the failure
            self._all_free(self._plan)
        self._open = False
        self._start()

    def settle(self) -> None:
        """Block the host until all state is complete: updated, and home again if it travels."""
        if self._open:
            # compute, write-back → host: in the middle of a step, nothing has been handed on yet.
            self._device.drain()
        self._complete()

    def _complete(self) -> None:
        if self._last_updated is not None:
            # compute → host: managed state is updated where the host reads it.
            self._last_updated.synchronize()
            self._last_updated = None
        if self._last_written is not None:
            # write-back → host: the arena is complete.
            self._last_written.synchronize()
            self._last_written = None
            self._emptied.clear()
            self._written.clear()

    def _fetch_ahead(self, plan: Plan, depth: int) -> None:
        while self._next < len(plan.chunks) and len(self._flights) < depth:
            chunk = plan.chunks[self._next]
            if chunk.after is not None and chunk.after not in self._advanced:
                return  # a parameter listed twice: its first update is not launched yet
            self._next += 1
            if chunk.nbytes and chunk.index not in self._advanced:
                self._flights[chunk.index] = self._send_for(chunk, plan)

    def _send_for(self, chunk: Chunk, plan: Plan) -> _Flight:
        stream = self._fetch if plan.depth else self._compute
        slot = self._free.popleft() if plan.transfer.copies else None
        emptied = None if slot is None else self._emptied.get(slot.index)
        if emptied is not None:
            # write-back → fetch, same slot: what it held has left it.
            stream.wait(emptied)
        written = self._written.get(chunk.index if chunk.after is None else chunk.after)
        if written is not None:
            # write-back → fetch, same bytes: they are home again, from the step before or, of a
            # parameter listed twice, from its first update.
            stream.wait(written)
        if slot is not None and chunk.index in plan.fresh:
            plan.transfer.clear(slot, chunk.nbytes, stream=stream)
        else:
            plan.transfer.fetch(chunk, slot, stream=stream)
        return _Flight(slot, stream.record())

    def _send_home(self, chunk: Chunk, slot: Slot | None, plan: Plan) -> None:
        if slot is None:
            return
        # compute → write-back: the update is done with the slot.
        self._write_back.wait(self._compute.record())
        plan.transfer.write_back(chunk, slot, stream=self._write_back)
        written = self._write_back.record()
        self._emptied[slot.index] = self._written[chunk.index] = self._last_written = written
        self._free.append(slot)
