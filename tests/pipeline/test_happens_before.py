"""No two accesses of the same bytes are left in any order, whatever is trained how.

The real optimizer runs on the recording device. A caller and a host around it use everything they
may use, as early as they may; see `tests.pipeline.recorded`. What the checker then finds is a race.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pageahead.device.trace import Names, Operation
from pageahead.memory.layout import StateShape
from pageahead.pipeline import Pipeline
from pageahead.pipeline.ordering import find_conflicts
from tests.pipeline.bare import Bare, BareScenario, BareStep
from tests.pipeline.recorded import record
from tests.pipeline.scenarios import Action, Load, Refused, Save, Scenario, Step

OPTIMIZERS = [f"Paged{family}{bits}" for family in ("AdamW", "Lion", "AdEMAMix")
              for bits in ("8bit", "32bit")]  # fmt: skip


@st.composite
def actions(draw: st.DrawFn, parameters: int) -> tuple[Action, ...]:
    """Steps over a few sets of parameters, which come and go, and checkpoints in between."""
    some = st.lists(st.integers(0, parameters - 1), unique=True).map(lambda one: tuple(sorted(one)))
    sets = draw(st.lists(st.one_of(st.none(), some), min_size=1, max_size=3))
    made: list[Action] = []
    for kind in draw(st.lists(st.sampled_from("sssssflpr"), min_size=1, max_size=6)):
        active = draw(st.sampled_from(sets))
        stream = draw(st.sampled_from(["caller", "caller", "side"]))
        if kind == "f" and active != ():
            count = parameters if active is None else len(active)
            made.append(Step(active, stream, fails_at=draw(st.integers(0, count - 1))))
        elif kind == "p":
            made.append(Save())
        elif kind == "l" and Save() in made:
            made.append(Load())
        elif kind == "r":
            made.append(Refused(capturing=draw(st.booleans())))
        else:
            made.append(Step(active, stream))
    return tuple(made)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    numels = draw(st.lists(st.integers(1, 4000), min_size=1, max_size=6))
    slots = draw(st.integers(1, 5))
    ring = st.integers(4096, 12_288).map(lambda nbytes: nbytes * slots)
    return Scenario(
        "random",
        tuple(numels),
        draw(actions(len(numels))),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
        strategy=draw(st.sampled_from(["streamed", "streamed", "lookahead", "sequential"])),
        write_back=draw(st.sampled_from(["before_return", "overlap"])),
        hbm_budget=draw(st.sampled_from([0.0, 0.3, 0.7])),
        twice=tuple(draw(st.lists(st.integers(0, len(numels) - 1), max_size=2))),
        chunk=draw(st.sampled_from([4096, 8192, 16_384])),
        staging=draw(st.one_of(st.none(), ring)),
        slots=slots,
    )


def complaints(trace: list[Operation], names: Names) -> str:
    return "\n".join(
        f"{names.describe(one.earlier)}\n{names.describe(one.later)}\n  {one}"
        for one in find_conflicts(trace)
    )


@given(scenario=scenarios())
@settings(max_examples=400, deadline=None)
def test_the_optimizer_leaves_nothing_unordered(scenario: Scenario) -> None:
    outcome, error = record(scenario, execute=False)
    if error is not None:
        raise error
    device = outcome.device
    assert complaints(device.trace, device.names) == ""
    assert outcome.promises == []


SHAPES = st.builds(
    StateShape,
    numel=st.integers(1, 3000),
    tensors=st.sampled_from([((1, 1),), ((1, 1), (1, 1)), ((2, 1), (1, 1))]),
)


@st.composite
def bare_scenarios(draw: st.DrawFn) -> BareScenario:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    positions = st.integers(0, len(shapes) - 1)
    listings = draw(st.lists(st.lists(positions, min_size=1, max_size=6), min_size=1, max_size=2))
    swaps = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6)
    steps = draw(
        st.lists(
            st.builds(
                BareStep,
                active=st.sampled_from(listings).map(tuple),
                swaps=swaps.map(tuple),
                primed=st.booleans(),
                refused=st.sampled_from([False, False, False, True]),
            ),
            min_size=1,
            max_size=5,
        )
    )
    slots = draw(st.integers(2, 5))
    return BareScenario(
        tuple(shapes),
        tuple(steps),
        resident=tuple(draw(st.lists(positions, max_size=2))),
        slots=slots,
        spare=draw(st.integers(1, slots - 1)),
        overlap=draw(st.booleans()),
    )


@given(scenario=bare_scenarios())
@settings(max_examples=400, deadline=None)
def test_the_pipeline_leaves_nothing_unordered_in_any_order_of_chunks(
    scenario: BareScenario,
) -> None:
    bare = Bare(scenario, Pipeline)
    bare.run()
    assert complaints(bare.device.trace, bare.device.names) == ""
    assert bare.wrong() == []
