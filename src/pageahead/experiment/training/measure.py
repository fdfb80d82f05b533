"""One cell of training iterations from beginning to end, in the process made for it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pageahead.experiment.compare import compare
from pageahead.experiment.evidence import (
    Comparison,
    LinkRecord,
    Timings,
    TrainingArm,
    TrainingGroup,
    TrainingRecord,
)
from pageahead.experiment.identity import Identity, identify
from pageahead.experiment.link import measure_link, merged
from pageahead.experiment.measure import Phases, Report
from pageahead.experiment.messages import TrainingRequest
from pageahead.experiment.protocol import Protocol
from pageahead.experiment.summary import ratio, spread
from pageahead.experiment.training import planning
from pageahead.experiment.training.arms import BATCHES, Arm, batches
from pageahead.experiment.training.cells import (
    ARMS,
    BASELINE,
    ArmSpec,
    TrainingCell,
    cell_named,
)
from pageahead.experiment.training.determinism import difference, repeatable
from pageahead.experiment.training.gpt import GPT, Shape, shape_for
from pageahead.experiment.training.turns import Turns

__all__ = ["SEED", "measure_training"]

SEED = 1234


def measure_training(request: TrainingRequest, report: Report) -> TrainingRecord:
    """Measure the ways of training that are asked for and fit in memory, in turns.

    Raises:
        IdentityError: this is not the device that was asked for.
        DoesNotFitError: there is too little memory for anything; nothing was allocated.
        RouteError: state took another path than the one to be measured.
    """
    identity = identify(request.device)
    with repeatable(identity.device):
        return _measure(request, identity, Phases(report))


@dataclass(frozen=True)
class _Setting:
    """What all groups of a cell have in common."""

    cell: TrainingCell
    shape: Shape
    identity: Identity
    texts: Sequence[torch.Tensor]
    protocol: Protocol
    phases: Phases

    def model(self) -> GPT:
        """The same initial values each time."""
        return GPT(self.shape, self.identity.device, SEED)


def _measure(request: TrainingRequest, identity: Identity, phases: Phases) -> TrainingRecord:
    cell = cell_named(request.cell)
    shape = shape_for(request.parameters)
    sequences, length = cell.batch_on(identity.type)
    grouping = planning.group(
        [ARMS[name] for name in request.strategies],
        shape,
        cell,
        sequences * length,
        planning.available(identity.device),
    )
    links = _link(identity, phases)
    phases.enter("comparing gradients with themselves")
    texts = batches(shape.vocabulary, sequences, length, identity.device, SEED)
    setting = _Setting(cell, shape, identity, texts, request.protocol, phases)
    nondeterminism = difference(setting.model(), texts[0])
    groups = []
    for number, arms in enumerate(grouping.groups, start=1):
        place = f", group {number} of {len(grouping.groups)}" if len(grouping.groups) > 1 else ""
        groups.append(_measure_group(arms, setting, nondeterminism, place))
        # All of it goes before the next group comes.
        gc.collect()
        if identity.type == "cuda":
            torch.cuda.empty_cache()
    links += _link(identity, phases)
    link = merged(links) if links else None
    return TrainingRecord(
        run=request.run,
        cell=cell.name,
        bits=cell.bits,
        device=identity.type,
        device_name=identity.name,
        library=identity.library,
        parameters=shape.parameters,
        layers=shape.layers,
        width=shape.width,
        vocabulary=shape.vocabulary,
        sequences=sequences,
        length=length,
        protocol=request.protocol,
        seed=SEED,
        batches=BATCHES,
        deterministic=nondeterminism is None,
        nondeterminism=nondeterminism,
        groups=[_with_bounds(group, link) for group in groups],
        left_out=grouping.left_out,
        link=link,
        phase_seconds=phases.seconds(),
    )


def _measure_group(
    specs: Sequence[ArmSpec], setting: _Setting, nondeterminism: str | None, place: str
) -> TrainingGroup:
    device = setting.identity.device
    setting.phases.enter(f"making models{place}")
    model = setting.model()
    # Copies are made before the baseline, the first, changes the original.
    arms = [Arm(spec, setting.cell, model, setting.texts, device) for spec in (BASELINE, *specs)]
    turns = Turns(arms, device, setting.phases.stepped)
    setting.phases.enter(f"warming up{place}")
    turns.warm_up(setting.protocol.warmups)
    setting.phases.enter(f"measuring{place}")
    timings = [
        Timings.of(rounds)
        for rounds in turns.measure(setting.protocol.rounds, setting.protocol.repetitions)
    ]
    setting.phases.enter(f"comparing bits{place}")
    return TrainingGroup(
        arms=[
            _record(arm, timing, arms[0], timings[0], nondeterminism)
            for arm, timing in zip(arms, timings, strict=True)
        ]
    )


def _record(
    arm: Arm, timings: Timings, baseline: Arm, reference: Timings, nondeterminism: str | None
) -> TrainingArm:
    spec = arm.spec
    routes = arm.routes()
    streamed = routes["streamed"].state_bytes if "streamed" in routes else 0
    comparison, not_compared = _compare(arm, baseline, nondeterminism)
    return TrainingArm(
        arm=spec.name,
        way=spec.way,
        budget=spec.budget,
        optimizer_class=arm.class_name,
        paging=arm.paging,
        wall=spread(timings.wall_ms),
        ratio=ratio(reference.wall_ms, timings.wall_ms),
        timings=timings,
        state_bytes=arm.state_bytes,
        hbm_state_bytes=arm.state_bytes - streamed + arm.slot_bytes,
        slot_bytes=arm.slot_bytes,
        streamed_bytes=streamed,
        link_bound_ms=None,
        bound_ms=None,
        occupancy=arm.occupancy,
        routes=routes,
        comparison=comparison,
        not_compared=not_compared,
    )


def _compare(
    arm: Arm, baseline: Arm, nondeterminism: str | None
) -> tuple[Comparison | None, str | None]:
    way = arm.spec.way
    if way == "hbm":
        return None, "it is what the others are compared with"
    if way == "model":
        return None, "it changes nothing"
    if way == "torch":
        return None, "its state has the parameters' dtype, and its kernel rounds differently"
    if nondeterminism is not None:
        return None, nondeterminism
    return compare(baseline.optimizer, arm.optimizer), None


def _with_bounds(group: TrainingGroup, link: LinkRecord | None) -> TrainingGroup:
    """Add to each of our arms how fast its iterations could be at best."""
    if link is None:
        return group
    medians = {arm.way: arm.wall.median for arm in group.arms}
    whole = medians["hbm"]
    model = medians.get("model", whole)
    arms = []
    for arm in group.arms:
        if arm.way in ("after", "during"):
            moving = arm.streamed_bytes / (link.duplex_median * 1e6)
            after = model + max(whole - model, moving)
            bound = after if arm.way == "after" else max(whole, moving)
            arm = arm.model_copy(update={"link_bound_ms": moving, "bound_ms": bound})
        arms.append(arm)
    return TrainingGroup(arms=arms)


def _link(identity: Identity, phases: Phases) -> list[LinkRecord]:
    """One measurement on a GPU; none on the CPU, which has no link to itself."""
    if identity.type == "cpu":
        return []
    phases.enter("measuring the link")
    return [measure_link(identity.device)]
