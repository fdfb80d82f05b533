"""Where the state of an optimizer's parameters is made, and where it is put when it is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pageahead.device import Block, device_for
from pageahead.memory.layout import BLOCK
from pageahead.optim import checkpoint
from pageahead.optim.active import Active, Listing
from pageahead.optim.base import BitsandbytesOptimizer
from pageahead.optim.elastic import Elastic
from pageahead.optim.engine import Engine, StateSource
from pageahead.optim.homes import Home
from pageahead.optim.moving import KEYS, give_blocks
from pageahead.optim.paging import Paging
from pageahead.optim.routing import PAGED_NUMEL, Candidate, state_dtype, state_shape
from pageahead.optim.sharded import check_shard, is_sharded, local

__all__ = ["StatePlaces"]


class StatePlaces(BitsandbytesOptimizer):
    """The part of `PagedOptimizer` that gives state its place."""

    paging: Paging
    _engines: dict[torch.device, Engine]
    _homes: dict[torch.Tensor, Home]
    _reserved: dict[torch.Tensor, Home]
    _listing: Listing
    _elastic: Elastic
    _source: StateSource | Block | None

    def _engine(self, device: torch.device) -> Engine:
        if device not in self._engines:
            self._engines[device] = Engine(device_for(device), self.optimizer_name, self.paging)
        return self._engines[device]

    def _make_state(self, new: Sequence[Active]) -> None:
        """Decide routes, take memory, and let bitsandbytes initialize the state; all or nothing."""
        first: dict[torch.Tensor, Active] = {}
        for active in new:
            first.setdefault(active.parameter, active)
        unique = list(first.values())
        if not unique:
            return
        reserved = {one.parameter for one in unique if one.parameter in self._reserved}
        homes, grown = self._reserve_homes(unique)
        try:
            for active, home in zip(unique, homes, strict=True):
                self._init_home(active, home)
            for active in new:
                active.home = self._homes[active.parameter]
                active.state = self.state[active.parameter]
        except BaseException:
            for active, home in zip(unique, homes, strict=True):
                self.state.pop(active.parameter, None)
                self._homes.pop(active.parameter, None)
                self._reserved.pop(active.parameter, None)
                if active.parameter in reserved:
                    self._reserved[active.parameter] = home
            for engine in grown:
                engine.release_last()
            raise

    def _reserve_homes(self, actives: Sequence[Active]) -> tuple[list[Home], list[Engine]]:
        """Give every parameter a home with room for its state, and make that room.

        Returns:
            The homes, and the engines that grew for them.
        """
        new = {
            active.parameter: self._candidate(active.parameter, active.gindex, active.pindex)
            for active in actives
            if active.parameter not in self._homes and active.parameter not in self._reserved
        }
        grown: list[Engine] = []
        if new:
            homes = self._choose_homes(list(new.values()))
            grown = self._reserve(homes)
            self._reserved.update(zip(new, homes, strict=True))
        return [self._home_of(active.parameter) for active in actives], grown

    def _home_of(self, parameter: torch.Tensor) -> Home:
        return self._homes.get(parameter) or self._reserved[parameter]

    def _reserve(self, homes: Sequence[Home]) -> list[Engine]:
        """Make room for paged homes on every device, or on none; say where resident ones go."""
        give_blocks([home for home in homes if home.movable and not home.paged])
        by_device: dict[torch.device, list[Home]] = {}
        for home in homes:
            if home.paged:
                by_device.setdefault(home.device, []).append(home)
        reserved: list[Engine] = []
        try:
            for device, group in by_device.items():
                self._engine(device).reserve(group)
                reserved.append(self._engine(device))
        except BaseException:
            for engine in reserved:
                engine.release_last()
            raise
        return reserved

    def _choose_homes(self, candidates: Sequence[Candidate]) -> list[Home]:
        return self._elastic.choose(self, candidates)

    def _candidate(self, parameter: torch.Tensor, gindex: int, pindex: int) -> Candidate:
        config = self.get_config(gindex, pindex, self.param_groups[gindex])
        dtype = state_dtype(config, parameter.numel())
        check_shard(parameter, config, dtype)
        shape = state_shape(self.optimizer_name, dtype, local(parameter).numel())
        limited = config["max_unorm"] > 0.0 and dtype == torch.float32
        return Candidate(parameter, shape, limited)

    def _pageable_bytes(self) -> int:
        sizes = {
            parameter: self._candidate(parameter, gindex, pindex).shape.nbytes
            for gindex, pindex, parameter in self._listed()
            if parameter.requires_grad and parameter.numel() >= PAGED_NUMEL
        }
        return sum(sizes.values())

    def _listed(self) -> Iterable[tuple[int, int, torch.Tensor]]:
        for gindex, group in enumerate(self.param_groups):
            for pindex, parameter in enumerate(group["params"]):
                yield gindex, pindex, parameter

    def _init_home(self, active: Active, home: Home) -> None:
        parameter = active.parameter
        self._source = self._engine(home.device).source(home) if home.paged else home.block
        try:
            self.init_state(active.group, parameter, active.gindex, active.pindex)
        finally:
            self._source = None
        state = self.state[parameter]
        if is_sharded(parameter):
            _fit_scales(state, local(parameter))
        home.tensors = tuple(state[key] for key in KEYS if key in state)
        home.scales = state.get("absmax1"), state.get("absmax2")
        self._homes[parameter] = home
        self._reserved.pop(parameter, None)

    def get_state_buffer(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """bitsandbytes asks here for a zeroed state tensor shaped like `p`."""
        p = local(p)
        if self._source is not None:
            return self._source.tensor(tuple(p.shape), dtype)
        # Contiguous whatever `p` is, which will be, too, when the kernel runs over their bytes.
        return torch.zeros(p.shape, dtype=dtype, device=p.device)

    def _get_state_double_buffer(
        self, p: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """AdEMAMix asks here for its `state1`, which holds two moments."""
        p = local(p)
        if self._source is not None:
            return self._source.tensor((2, *p.shape), dtype)
        return torch.zeros((2, *p.shape), dtype=dtype, device=p.device)

    def _adopt_state(
        self, saved: Sequence[checkpoint.Saved], groups: Sequence[dict[str, Any]]
    ) -> None:
        """Replace all state by checked state. Takes the memory it needs before it changes any."""
        made = checkpoint.small(saved)
        known = {**self._reserved, **self._homes}
        if saved and all(
            (home := known.get(one.parameter)) is None
            or (home.shape == one.candidate.shape and home.device == one.parameter.device)
            for one in saved
        ):
            self._add_homes([one for one in saved if one.parameter not in self._homes])
            self._drop_homes(self._homes.keys() - {one.parameter for one in saved})
        else:
            self._replace_homes(saved)
        for one, entries in zip(saved, made, strict=True):
            state = self.state[one.parameter]
            checkpoint.fill(state, one, entries)
            self._homes[one.parameter].scales = state.get("absmax1"), state.get("absmax2")
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        for engine in self._engines.values():
            engine.forget_plan()
        self._elastic.changed()
        self._listing = Listing()  # the known one still holds the state that was replaced

    def _add_homes(self, new: Sequence[checkpoint.Saved]) -> None:
        """Make places for state that had none, or after an error none."""
        reserved = {one.parameter: self._reserved.get(one.parameter) for one in new}
        unplaced = [one for one in new if reserved[one.parameter] is None]
        homes = dict(
            zip(
                (one.parameter for one in unplaced),
                self._choose_homes([one.candidate for one in unplaced]),
                strict=True,
            )
        )
        grown = self._reserve(list(homes.values()))
        try:
            for one in new:
                self._empty_home(one, reserved[one.parameter] or homes[one.parameter])
                self._reserved.pop(one.parameter, None)
        except BaseException:
            for parameter, home in reserved.items():
                self.state.pop(parameter, None)
                self._homes.pop(parameter, None)
                if home is not None:
                    self._reserved[parameter] = home
            for engine in grown:
                engine.release_last()
            raise

    def _drop_homes(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget state of parameters. Their places in the arena are kept, should it come again."""
        for parameter in parameters:
            self.state.pop(parameter, None)
            home = self._homes.pop(parameter)
            if home.placed and home.paged:
                for tensor in home.tensors:
                    tensor.detach().zero_()  # as new state is expected there
                self._reserved[parameter] = home
            home.tensors, home.scales = (), (None, None)

    def _replace_homes(self, saved: Sequence[checkpoint.Saved]) -> None:
        """Make new places beside the old ones: whatever fails here leaves those as they were."""
        before = self._homes, self._reserved, self._engines, self.state
        self._homes, self._reserved, self._engines = {}, {}, {}
        self.state = defaultdict(dict)
        try:
            homes = self._choose_homes([one.candidate for one in saved])
            self._reserve(homes)
            for one, home in zip(saved, homes, strict=True):
                self._empty_home(one, home)
        except BaseException:
            self._homes, self._reserved, self._engines, self.state = before
            raise

    def _leave_shared_memory(self) -> None:
        """Take state tensors back to the arena that were shared with another process.

        PyTorch shares a tensor by moving its storage, so it would show the state of that moment
        for good. What the arena has is the state.
        """
        for parameter, home in self._homes.items():
            if home.placed and home.paged and any(one.is_shared() for one in home.tensors):
                source = self._engine(home.device).source(home)
                home.tensors = tuple(
                    source.tensor(tuple(one.shape), one.dtype) for one in home.tensors
                )
                self.state[parameter].update(zip(KEYS, home.tensors, strict=False))
                self._engine(home.device).forget_plan()

    def _empty_home(self, saved: checkpoint.Saved, home: Home) -> None:
        """Make the state tensors that `saved` will be copied to."""
        parameter = saved.parameter
        self._source = self._engine(home.device).source(home) if home.paged else home.block
        state: dict[str, Any] = {}
        try:
            for key in KEYS:
                if key in saved.entries:
                    like = saved.entries[key]
                    state[key] = (
                        self._source.tensor(tuple(like.shape), like.dtype)
                        if self._source is not None
                        else torch.empty(like.shape, dtype=like.dtype, device=parameter.device)
                    )
        finally:
            self._source = None
        self.state[parameter] = state
        home.tensors = tuple(state.values())
        self._homes[parameter] = home


def _fit_scales(state: dict[str, Any], part: torch.Tensor) -> None:
    """Give a sharded parameter's state the scales of this process's blocks; it has the whole's."""
    for key in ("absmax1", "absmax2"):
        if key in state:
            state[key] = state[key].new_zeros((*state[key].shape[:-1], -(-part.numel() // BLOCK)))
