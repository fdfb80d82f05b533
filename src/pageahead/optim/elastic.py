"""Which state stays on the device, and when that changes: ``hbm_budget="auto"`` and `release`.

With ``"auto"`` the budget is 0 until a backward has shown how much memory the model needs. The
first step after it takes what is free beyond ``hbm_reserve`` (see `pageahead.optim.reserve`),
before state is made if there is none yet. From then on each step looks first:

* **Giving back.** Where less than the reserve is free, state goes to the host until the reserve
  holds again; in whole blocks, because only those return to the driver.
* **Taking more.** State returns when there was room for it, beyond the reserve *and* a quarter of
  it, at `PATIENCE` looks in a row; it takes what was free at the worst of them. Each time that
  state was given back or released, the patience doubles, up to `MOST_PATIENCE`: memory that comes
  and goes is not followed for long.

Moves happen between steps only, and change no bit of any result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import TYPE_CHECKING

import torch

from pageahead.device import device_for
from pageahead.memory.host import HostMemoryError
from pageahead.memory.layout import BLOCK, StateShape
from pageahead.memory.residency import spread
from pageahead.optim.first_backward import FirstBackward
from pageahead.optim.homes import Home, choose_homes
from pageahead.optim.moving import KEYS, Member, groups, to_device, to_host
from pageahead.optim.paging import Paging
from pageahead.optim.plan import ring_bytes
from pageahead.optim.reserve import Reserve
from pageahead.optim.routing import PAGED_NUMEL, Candidate, budget_words

if TYPE_CHECKING:
    from pageahead.optim.engine import Engine
    from pageahead.optim.states import StatePlaces

__all__ = ["MOST_PATIENCE", "PATIENCE", "Elastic", "Residency"]

logger = logging.getLogger("pageahead")

PATIENCE = 8
"""Steps for which there has to be room before state that was given back returns."""

MOST_PATIENCE = 1024


@dataclass(frozen=True, slots=True)
class Residency:
    """Bytes of an optimizer's pageable state (parameters of 100,000 elements or more), by place.

    Sums over all devices. For managed memory (`lookahead`, `sequential`) all of it counts as on the
    host, wherever its pages are.

    Attributes:
        resident: state tensors that stay on a device.
        host: state tensors that travel.
        slots: device memory of the rings.
    """

    resident: int
    host: int
    slots: int


@dataclass(slots=True)
class _Record:
    """What ``"auto"`` remembers of one device.

    Attributes:
        patience: looks in a row that have to find room before more is taken.
        roomy: how many did.
        least: the least room that they found.
        rest: looks to skip, because the host had no room for what was to be given back.
        lowered: state was given back and nothing taken since.
        told: the log has said that state was given back.
        totals: number of homes, and the bytes of them that are resident and streamed and of the
            smallest streamed one.
    """

    patience: int = field(default_factory=lambda: PATIENCE)
    roomy: int = 0
    least: int = 0
    rest: int = 0
    lowered: bool = False
    told: bool = False
    totals: tuple[int, int, int, int] | None = None

    def lower(self) -> None:
        """Note that state left the device, or could not come."""
        self.patience = min(2 * self.patience, MOST_PATIENCE)
        self.roomy = 0
        self.lowered = True


class Elastic:
    """Decides residency for one optimizer, which is passed to each call and never kept."""

    def __init__(self, paging: Paging) -> None:
        self._paging = paging
        self._auto = paging.strategy == "streamed" and paging.hbm_budget == "auto"
        self._reserve = Reserve(paging.hbm_reserve)
        self._backward = FirstBackward(self._reserve.backward_began)
        self._decided = False
        self._records: dict[torch.device, _Record] = {}

    def watch(self, optimizer: StatePlaces) -> None:
        """Wait for the first backward of the optimizer's parameters."""
        if self._auto:
            parameters = [parameter for _, _, parameter in optimizer._listed()]
            self._backward.watch(parameters)
            self._reserve.watch(parameters)

    def changed(self) -> None:
        """Note that the optimizer's homes were replaced."""
        for record in self._records.values():
            record.totals = None

    # --- before state is made -----------------------------------------------------------------

    def choose(self, optimizer: StatePlaces, candidates: Sequence[Candidate]) -> list[Home]:
        """Decide where state that is made now will live. See `choose_homes`."""
        name = optimizer.optimizer_name
        if not self._auto:
            budgeted = self._paging.hbm_budget not in ("auto", 0)
            pageable = optimizer._pageable_bytes() if budgeted else 0
            known = [*optimizer._homes.values(), *optimizer._reserved.values()]
            return choose_homes(candidates, self._paging, name, known, pageable)
        by_device: dict[torch.device, list[int]] = {}
        for number, candidate in enumerate(candidates):
            by_device.setdefault(candidate.parameter.device, []).append(number)
        chosen: dict[int, Home] = {}
        for device, numbers in by_device.items():
            group = [candidates[number] for number in numbers]
            budget = self._budget(optimizer, device, group)
            homes = choose_homes(group, self._paging, name, (), 0, budget)
            chosen.update(zip(numbers, homes, strict=True))
        return [chosen[number] for number in range(len(candidates))]

    def _budget(
        self, optimizer: StatePlaces, device: torch.device, candidates: Sequence[Candidate]
    ) -> int:
        """Bytes that state of these candidates may take of the device now."""
        large = [one for one in candidates if one.large]
        must = sum(one.shape.nbytes for one in large if one.limits_update_norm)
        record = self._records.get(device)
        waits = not self._decided or (record is not None and record.lowered)
        if not large or (waits and not must):
            return 0
        room = self._room(device) - sum(_beside(one) for one in candidates)
        if waits:
            return max(0, min(must, room))
        self._records.setdefault(device, _Record())  # decided here, not at the next look
        if sum(one.shape.nbytes for one in large) > room:
            engine = optimizer._engines.get(device)
            room -= self._ring_to_come(engine, [one.shape for one in large])
        return max(0, room)

    def _room(self, device: torch.device) -> int:
        free = device_for(device).free_bytes()
        return free - self._reserve.of(device, free)

    def _ring_to_come(self, engine: Engine | None, shapes: Sequence[StateShape]) -> int:
        """Bytes of device memory that the next step takes for slots."""
        if engine is not None and engine.ring is not None:
            return 0  # taken already: no longer among what is free
        return ring_bytes(shapes, self._paging)

    def _ring_after(self, optimizer: StatePlaces, device: torch.device, engine: Engine) -> int:
        """The same if resident state is given back, which travels from then on."""
        shapes = [one.home.shape for one in _members(optimizer, device)]
        return self._ring_to_come(engine, shapes) if shapes else 0

    # --- before a step ------------------------------------------------------------------------

    def before_step(self, optimizer: StatePlaces) -> None:
        """Adapt residency to the memory that there is now. Where a step is under way, not yet."""
        if not self._auto:
            return
        if not self._backward.seen:
            self.watch(optimizer)  # parameters that were added or unfrozen since
            return
        if not self._decided:
            self._backward.stop()
            self._reserve.learn(parameter for _, _, parameter in optimizer._listed())
            self._decided = True
        for device, engine in optimizer._engines.items():
            # A capture is refused later, with the reason.
            if not engine.busy and not device_for(device).capturing():
                self._look(optimizer, device, engine)

    def _look(self, optimizer: StatePlaces, device: torch.device, engine: Engine) -> None:
        record = self._records.get(device)
        first = record is None
        if record is None:
            record = self._records[device] = _Record()
        if record.rest:
            record.rest -= 1
            return
        free = device_for(device).free_bytes()
        reserve = self._reserve.of(device, free)
        room = free - reserve
        _, resident, streamed, smallest = self._totals(optimizer, device, record)
        if room < 0:
            record.roomy = 0
            if resident:
                self._give_back(optimizer, device, engine, -room, reserve)
        elif not streamed:
            record.roomy = 0
        elif first:
            # State was there before the first backward, or is there only in part.
            self._take(optimizer, device, engine, room)
        else:
            room -= reserve // 4
            if room < smallest:
                record.roomy = 0
                return
            record.least = min(record.least, room) if record.roomy else room
            record.roomy += 1
            if record.roomy >= record.patience:
                self._take(optimizer, device, engine, record.least)

    def _totals(
        self, optimizer: StatePlaces, device: torch.device, record: _Record
    ) -> tuple[int, int, int, int]:
        count = len(optimizer._homes)
        if record.totals is None or record.totals[0] != count:
            homes = [one.home for one in _members(optimizer, device)]
            resident = sum(home.shape.nbytes for home in homes if not home.paged)
            streamed = [home.shape.nbytes for home in homes if home.paged]
            record.totals = count, resident, sum(streamed), min(streamed, default=0)
        return record.totals

    def _give_back(
        self,
        optimizer: StatePlaces,
        device: torch.device,
        engine: Engine,
        nbytes: int,
        reserve: int,
    ) -> None:
        record = self._records[device]
        nbytes += self._ring_after(optimizer, device, engine)
        freed = self._shrink(optimizer, device, engine, nbytes)
        record.lower()
        if not freed:  # the host had no room, and said so
            record.rest = record.patience
            return
        level = logging.DEBUG if record.told else logging.WARNING
        record.told = True
        logger.log(
            level,
            "less than hbm_reserve=%s bytes of %s were free: %s bytes of optimizer state were "
            "given back to the host",
            f"{reserve:,}",
            device,
            f"{freed:,}",
        )

    # --- moving -------------------------------------------------------------------------------

    def _take(
        self, optimizer: StatePlaces, device: torch.device, engine: Engine, room: int
    ) -> None:
        """Move streamed state of up to `room` bytes to the device."""
        record = self._records[device]
        members = _members(optimizer, device)
        streamed = [one for one in members if one.home.paged]
        if sum(one.home.shape.nbytes for one in streamed) > room:
            room -= self._ring_to_come(engine, [one.home.shape for one in streamed])
        kept = spread([one.home.shape.nbytes for one in streamed], room)
        record.roomy = 0
        if not kept:
            return
        try:
            to_device(engine, optimizer.state, [streamed[number] for number in sorted(kept)])
        except torch.OutOfMemoryError:
            record.lower()  # there was less than the driver said; the step goes on
            logger.info("%s had no room for the optimizer state that was to return to it", device)
            return
        record.lowered = False
        if len(kept) == len(streamed):
            engine.drop_ring()
        self._moved(members, device)
        logger.info(
            "hbm_budget='auto': %s of %s bytes of optimizer state stay on %s",
            f"{sum(one.home.shape.nbytes for one in members if not one.home.paged):,}",
            f"{sum(one.home.shape.nbytes for one in members):,}",
            device,
        )

    def _shrink(
        self, optimizer: StatePlaces, device: torch.device, engine: Engine, nbytes: int
    ) -> int:
        """Move resident state of at least `nbytes` to the host; return how much went."""
        members = _members(optimizer, device)
        resident = groups(one for one in members if not one.home.paged)
        leaving = _leaving(resident, nbytes)
        try:
            self._send_home(optimizer, engine, leaving)
        except HostMemoryError as error:
            logger.warning(
                "optimizer state stays on %s, though its memory is wanted: %s", device, error
            )
            # What has a place on the host already needs no more of it.
            placed = [group for group in resident if all(one.home.placed for one in group)]
            leaving = _leaving(placed, nbytes)
            self._send_home(optimizer, engine, leaving)
        if leaving:
            self._moved(members, device)
        return sum(one.home.shape.nbytes for one in leaving)

    def _send_home(self, optimizer: StatePlaces, engine: Engine, leaving: Sequence[Member]) -> None:
        if leaving:
            to_host(engine, optimizer.state, leaving)
        for member in leaving:
            member.home.reason = "given back by release()"

    def _moved(self, members: Sequence[Member], device: torch.device) -> None:
        """Keep counts and reasons true: under ``"auto"``, what is resident now is the budget."""
        if not self._auto:
            return
        self._records[device].totals = None
        held = sum(one.home.shape.nbytes for one in members if not one.home.paged)
        words = budget_words(self._paging, held)
        for member in members:
            member.home.reason = (
                f"{PAGED_NUMEL:,} elements or more, beyond {words}"
                if member.home.paged
                else f"within {words}"
            )

    # --- what users ask -----------------------------------------------------------------------

    def release(self, optimizer: StatePlaces, nbytes: int) -> int:
        """Give back device memory. See `PagedOptimizer.release`."""
        if isinstance(nbytes, bool) or not isinstance(nbytes, int):
            raise TypeError(f"release() takes bytes (an int), not {nbytes!r}")
        if nbytes < 0:
            raise ValueError(f"release({nbytes}): bytes cannot be negative")
        freed = 0
        engines = {key: one for key, one in optimizer._engines.items() if not one.busy}
        for device, engine in engines.items():
            if freed < nbytes:
                # Not to be taken right back: the next look must not be the first.
                self._records.setdefault(device, _Record()).lower()
                wanted = nbytes - freed + self._ring_after(optimizer, device, engine)
                freed += self._shrink(optimizer, device, engine, wanted)
        for engine in engines.values():
            if freed < nbytes:
                freed += engine.drop_ring()
        return freed

    def residency(self, optimizer: StatePlaces) -> Residency:
        """See `PagedOptimizer.residency`."""
        large = [home for home in optimizer._homes.values() if home.large]
        rings = [engine.ring for engine in optimizer._engines.values()]
        return Residency(
            sum(home.shape.nbytes for home in large if not home.paged),
            sum(home.shape.nbytes for home in large if home.paged),
            sum(ring.nbytes for ring in rings if ring is not None),
        )


def _members(optimizer: StatePlaces, device: torch.device) -> list[Member]:
    """The parameters of a device whose state may move, in step order."""
    members: dict[int, Member] = {}
    for _, _, parameter in optimizer._listed():
        home = optimizer._homes.get(parameter)
        if home is None or not home.movable or not home.device == parameter.device == device:
            continue
        state = optimizer.state.get(parameter, {})
        found = [state[key] for key in KEYS if key in state]
        # State that somebody replaced is refused by the step, which has yet to see it.
        if len(found) == len(home.tensors) and all(map(is_, found, home.tensors)):
            members[id(parameter)] = Member(parameter, home)
    return list(members.values())


def _leaving(resident: Sequence[list[Member]], nbytes: int) -> list[Member]:
    """Members of whole groups, of `nbytes` or more if there is so much, evenly over step order."""
    sizes = [sum(one.home.shape.nbytes for one in group) for group in resident]
    kept = spread(sizes, sum(sizes) - nbytes)
    return [one for number, group in enumerate(resident) if number not in kept for one in group]


def _beside(candidate: Candidate) -> int:
    """Bytes of device memory that its state takes in any case: small state, absmax."""
    shape = candidate.shape
    if not candidate.large:
        return shape.nbytes
    blocks = -(-shape.numel // BLOCK)
    return sum(4 * rows * blocks for rows, itemsize in shape.tensors if itemsize == 1)
