"""The checker on traces made by hand: what is ordered, what is not, and which bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageahead.device.trace import HOST, Operation, Range
from pageahead.pipeline.ordering import Conflict, find_conflicts


class Trace:
    """Writes a trace down; bytes are given as ``(start, stop)``."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def add(self, agent: str, what: str = "does", **details: object) -> None:
        for kind in ("reads", "writes", "migrates"):
            if kind in details:
                details[kind] = (Range(*details[kind]),)  # type: ignore[misc]
        self.operations.append(
            Operation(len(self.operations), agent, what, **details)  # type: ignore[arg-type]
        )

    def conflicts(self) -> list[Conflict]:
        return find_conflicts(self.operations)

    def pairs(self) -> list[tuple[int, int]]:
        return sorted((one.earlier.number, one.later.number) for one in self.conflicts())


def test_one_stream_runs_in_order() -> None:
    trace = Trace()
    trace.add("a", writes=(0, 10))
    trace.add("a", reads=(0, 10))
    trace.add("a", writes=(5, 15))
    assert trace.conflicts() == []


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [("reads", "reads", False), ("reads", "writes", True), ("writes", "reads", True),
     ("writes", "writes", True)],
)  # fmt: skip
def test_two_streams_are_not_ordered(first: str, second: str, conflict: bool) -> None:
    trace = Trace()
    trace.add("a", **{first: (0, 10)})
    trace.add("b", **{second: (9, 20)})
    assert trace.pairs() == ([(0, 1)] if conflict else [])
    if conflict:
        assert trace.conflicts()[0].ranges == (Range(9, 10),)


def test_neighbouring_bytes_do_not_conflict() -> None:
    trace = Trace()
    trace.add("a", writes=(0, 10))
    trace.add("b", writes=(10, 20))
    assert trace.conflicts() == []


def test_an_event_orders_what_is_before_its_record_and_after_its_wait() -> None:
    trace = Trace()
    trace.add("a", writes=(0, 10))
    trace.add("a", records="a 1")
    trace.add("a", writes=(10, 20))
    trace.add("b", reads=(0, 10))
    trace.add("b", waits=("a 1",))
    trace.add("b", reads=(0, 10))
    trace.add("b", reads=(10, 20))
    assert trace.pairs() == [(0, 3), (2, 6)]


def test_order_is_handed_on() -> None:
    trace = Trace()
    trace.add("a", writes=(0, 10))
    trace.add("a", records="a 1")
    trace.add("b", waits=("a 1",))
    trace.add("b", records="b 1")
    trace.add("c", waits=("b 1",))
    trace.add("c", writes=(0, 10))
    assert trace.conflicts() == []


def test_a_stream_starts_after_the_host_but_not_the_host_after_a_stream() -> None:
    trace = Trace()
    trace.add(HOST, writes=(0, 10))
    trace.add("a", writes=(0, 10))
    trace.add(HOST, reads=(0, 10))
    assert trace.pairs() == [(1, 2)]


def test_the_host_waits_for_an_event_and_what_it_enqueues_then_is_ordered() -> None:
    trace = Trace()
    trace.add("a", writes=(0, 10))
    trace.add("a", records="a 1")
    trace.add(HOST, waits=("a 1",))
    trace.add(HOST, reads=(0, 10))
    trace.add("b", writes=(0, 10))
    assert trace.conflicts() == []


def test_draining_waits_for_the_streams_it_names() -> None:
    trace = Trace()
    trace.add("a", writes=(0, 10))
    trace.add("b", writes=(10, 20))
    trace.add(HOST, idles=("a",))
    trace.add(HOST, writes=(0, 20))
    assert trace.pairs() == [(1, 3)]


def test_every_pair_is_reported_with_all_its_bytes() -> None:
    trace = Trace()
    trace.add("a", reads=(0, 30))
    trace.add("a", reads=(0, 4))
    trace.add("b", writes=(20, 30))
    trace.add("c", writes=(0, 10))
    trace.add("d", writes=(0, 30))
    assert trace.pairs() == [(0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (2, 4), (3, 4)]
    ranges = {(one.earlier.number, one.later.number): one.ranges for one in trace.conflicts()}
    assert ranges[0, 4] == (Range(0, 30),)
    assert ranges[1, 3] == (Range(0, 4),)
    assert ranges[3, 4] == (Range(0, 10),)


def test_a_migration_goes_on_beside_earlier_accesses_but_before_later_ones() -> None:
    trace = Trace()
    trace.add("a", writes=(0, 10))
    trace.add("b", migrates=(0, 10))
    trace.add("c", migrates=(0, 10))
    assert trace.conflicts() == []
    trace.add("a", reads=(0, 10))
    assert trace.pairs() == [(1, 3), (2, 3)]


def test_a_wait_for_what_nobody_recorded_is_refused() -> None:
    trace = Trace()
    trace.add("a", waits=("b 1",))
    with pytest.raises(ValueError, match="operation 0: a does waits for 'b 1'"):
        trace.conflicts()


def test_a_conflict_names_both_operations_and_the_bytes() -> None:
    trace = Trace()
    trace.add("fetch", "copies", writes=(16, 32))
    trace.add("compute", "updates", reads=(24, 64))
    assert str(trace.conflicts()[0]) == (
        "operation 1: compute updates is not ordered after operation 0: fetch copies: both access "
        "8 bytes from 0x18 on"
    )


AGENTS = st.sampled_from(["a", "b", "c", HOST])
SPANS = st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda one: (one[0], sum(one)))
STEPS = st.one_of(
    st.tuples(st.just("reads"), AGENTS, SPANS),
    st.tuples(st.just("writes"), AGENTS, SPANS),
    st.tuples(st.just("migrates"), AGENTS, SPANS),
    st.tuples(st.just("records"), AGENTS, st.none()),
    st.tuples(st.just("waits"), AGENTS, st.integers(0, 20)),
    st.tuples(st.just("idles"), st.just(HOST), st.sets(st.sampled_from("abc"))),
)


def naive_pairs(operations: list[Operation]) -> set[tuple[int, int]]:
    """The definition itself: every two operations, and the reachability between them."""
    before: list[set[int]] = []
    recorded: dict[str, int] = {}
    last: dict[str, int] = {}
    for operation in operations:
        known: set[int] = set()
        direct = [last.get(operation.agent), last.get(HOST)]
        direct += [recorded[event] for event in operation.waits]
        direct += [last.get(stream) for stream in operation.idles]
        for one in direct:
            if one is not None:
                known |= {one} | before[one]
        before.append(known)
        last[operation.agent] = operation.number
        if operation.records is not None:
            recorded[operation.records] = operation.number

    def bytes_of(*kinds: tuple[Range, ...]) -> set[int]:
        return {byte for kind in kinds for one in kind for byte in range(one.start, one.stop)}

    return {
        (one.number, other.number)
        for other in operations
        for one in operations[: other.number]
        if one.number not in before[other.number]
        and (
            bytes_of(one.writes, one.migrates) & bytes_of(other.reads, other.writes)
            or bytes_of(one.reads) & bytes_of(other.writes)
        )
    }


@given(steps=st.lists(STEPS, max_size=25))
@settings(max_examples=500, deadline=None)
def test_it_finds_what_the_definition_says(steps: list[tuple[str, str, object]]) -> None:
    trace = Trace()
    events: list[str] = []
    for kind, agent, value in steps:
        if kind == "records":
            events.append(f"event {len(events)}")
            trace.add(agent, records=events[-1])
        elif kind == "waits":
            if events:
                trace.add(agent, waits=(events[value % len(events)],))  # type: ignore[operator]
        elif kind == "idles":
            trace.add(agent, idles=tuple(sorted(value)))  # type: ignore[call-overload]
        else:
            trace.add(agent, **{kind: value})
    assert set(trace.pairs()) == naive_pairs(trace.operations)
