"""Training records as a GPU would leave them, with times made up to be about right."""

from __future__ import annotations

from pageahead.experiment.evidence import (
    Comparison,
    LinkRecord,
    Occupancy,
    PathSummary,
    TrainingArm,
    TrainingGroup,
    TrainingRecord,
)
from pageahead.experiment.summary import ratio, spread
from pageahead.experiment.training import measure
from pageahead.experiment.training.cells import BASELINE, PROTOCOL, ArmSpec, arms_of, cell_named
from pageahead.experiment.training.gpt import DEFAULT
from tests.experiment.support import RUN, timings

LINK = LinkRecord(to_device=[55.0], to_host=[54.0], duplex=[50.0])
GB = 1e9


def record(cell: str = "adamw32/16384", *, differences: int = 0) -> TrainingRecord:
    found = cell_named(cell)
    model = 250.0 if found.tokens > 10_000 else 70.0
    state = 2 * DEFAULT.parameters * found.bits // 8
    arms = [_arm(spec, model, state, differences) for spec in (BASELINE, *arms_of(found))]
    sequences, length = found.batch_on("cuda")
    group = TrainingGroup(arms=arms)
    # The last pair did not fit, as with 16,384 tokens on an H200.
    groups = [TrainingGroup(arms=arms[:-2]), TrainingGroup(arms=[*arms[:2], *arms[-2:]])]
    return TrainingRecord(
        run=RUN,
        cell=cell,
        bits=found.bits,
        device="cuda",
        device_name="A GPU",
        library="libbitsandbytes_cuda130.so",
        parameters=DEFAULT.parameters,
        layers=DEFAULT.layers,
        width=DEFAULT.width,
        vocabulary=DEFAULT.vocabulary,
        sequences=sequences,
        length=length,
        protocol=PROTOCOL,
        seed=1,
        batches=4,
        deterministic=True,
        nondeterminism=None,
        groups=[
            measure._with_bounds(one, LINK)
            for one in (groups if found.tokens > 10_000 else [group])
        ],
        left_out={},
        link=LINK,
    )


def _arm(spec: ArmSpec, model: float, state: int, differences: int) -> TrainingArm:
    share = float(spec.budget or 0)
    streamed = int((1 - share) * state) if spec.ours else 0
    moving = 1.05 * streamed / 50e6
    update = 0.0 if spec.way == "model" else state / 10.7 / GB * 12
    time = {
        "hbm": model + update,
        "model": model,
        "torch": model + update,
        "after": model + max(moving, update),
        "during": max(model + update, moving + 10),
    }[spec.way]
    mine = timings(*[[time * (1 + 0.01 * turn) for turn in (0, -1, 2)]] * 5)
    base = model + state / 10.7 / GB * 12
    reference = timings(*[[base * (1 + 0.01 * turn) for turn in (0, -1, 2)]] * 5)
    slots = 128 << 20 if spec.ours else 0
    taken = 0 if spec.way == "model" else state // 2 if spec.way == "torch" else state
    return TrainingArm(
        arm=spec.name,
        way=spec.way,
        budget=spec.budget,
        optimizer_class="pageahead.PagedAdamW",
        paging="Paging()" if spec.ours else None,
        wall=spread(mine.wall_ms),
        ratio=ratio(reference.wall_ms, mine.wall_ms),
        timings=mine,
        state_bytes=taken,
        hbm_state_bytes=taken - streamed + slots,
        slot_bytes=slots,
        streamed_bytes=streamed,
        link_bound_ms=None,
        bound_ms=None,
        occupancy=Occupancy(own_peak=45 * 10**9, process_peak=95 * 10**9, driver_used=101 * 10**9),
        routes={"streamed": PathSummary(parameters=100, state_bytes=streamed, reasons=["large"])}
        if spec.ours
        else {},
        comparison=Comparison(
            tensors=500,
            nbytes=state,
            differences=differences,
            examples=["parameter 3, state1: 1 of 9 bytes differ"] * differences,
        )
        if spec.ours
        else None,
        not_compared=None if spec.ours else "it changes nothing",
    )
