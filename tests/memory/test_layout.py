"""Chunks cover every byte of state once per listing, and land where their slices say."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pageahead.memory.layout import (
    ALIGNMENT,
    BLOCK,
    LARGEST_PITCH,
    Chunk,
    Item,
    Piece,
    StateShape,
    cut,
    pack,
)

ADAM32 = ((1, 4), (1, 4))
ADAM8 = ((1, 1), (1, 1))
LION8 = ((1, 1),)
ADEMAMIX32 = ((2, 4), (1, 4))

shapes = st.builds(
    StateShape,
    numel=st.integers(1, 6_000),
    tensors=st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from([1, 2, 4])), min_size=1, max_size=3
    ).map(tuple),
)


@dataclass(frozen=True)
class Step:
    items: list[Item]
    target: int
    limit: int

    def cut(self) -> tuple[Chunk, ...]:
        return cut(self.items, target=self.target, limit=self.limit)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Random parameters, packed into an arena in any order, some resident, some listed twice."""
    found = draw(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=6))
    known: list[Item] = []
    end = 0
    for identity, (shape, resident) in enumerate(found):
        known.append(Item(identity, shape, None if resident else end))
        end = pack(shape, shape.numel, end)[1]
        end += draw(st.sampled_from([0, 0, 4096]))  # another segment of the arena
    listed = draw(st.lists(st.sampled_from(known), min_size=1, max_size=9))
    # Room for a block of the widest state above: 3 tensors of 2 rows of 4 bytes.
    limit = draw(st.integers(8 * 1024, 60_000))
    return Step(listed, draw(st.integers(1, limit)), limit)


def item_slices(chunks: Sequence[Chunk], item: int) -> list[tuple[int, int]]:
    return [
        (part.start, part.stop) for chunk in chunks for part in chunk.slices if part.item == item
    ]


@given(steps())
@settings(max_examples=200, deadline=None)
def test_slices_cover_each_listing_once_and_start_at_blocks(step: Step) -> None:
    chunks = step.cut()
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    order = [part.item for chunk in chunks for part in chunk.slices]
    assert order == sorted(order)  # step order
    for number, item in enumerate(step.items):
        slices = item_slices(chunks, number)
        assert [start for start, _ in slices] == [0, *(stop for _, stop in slices[:-1])]
        assert slices[-1][1] == item.state.numel
        assert all(start % BLOCK == 0 for start, _ in slices)
        assert item.offset is not None or len(slices) == 1


@given(steps())
@settings(max_examples=200, deadline=None)
def test_pieces_carry_the_bytes_that_slices_name(step: Step) -> None:
    """What a slice finds in the slot is its part of the arena, row by row, and of no other."""
    for chunk in step.cut():
        assert_disjoint([(row.slot, row.nbytes) for row in rows_of(chunk)])
        assert_disjoint([(row.arena, row.nbytes) for row in rows_of(chunk)])
        for part in chunk.slices:
            item = step.items[part.item]
            if item.offset is None:
                assert part.offsets == ()
                continue
            sources, _ = pack(item.state, item.state.numel, item.offset)
            for (rows, itemsize), source, offset in zip(
                item.state.tensors, sources, part.offsets, strict=True
            ):
                length = (part.stop - part.start) * itemsize
                for row in range(rows):  # rows of a slice follow each other directly
                    arena = source + (row * item.state.numel + part.start) * itemsize
                    assert carried(chunk, arena, offset + row * length, length)


def assert_disjoint(ranges: Sequence[tuple[int, int]]) -> None:
    ordered = sorted(ranges)
    for (start, nbytes), (following, _) in itertools.pairwise(ordered):
        assert start + nbytes <= following


def rows_of(chunk: Chunk) -> list[Piece]:
    """The pieces of a chunk, each of one row."""
    return [
        Piece(
            piece.arena + row * piece.arena_pitch, piece.slot + row * piece.slot_pitch, piece.nbytes
        )
        for piece in chunk.pieces
        for row in range(piece.rows)
    ]


def carried(chunk: Chunk, arena: int, slot: int, nbytes: int) -> bool:
    """Whether one row brings these bytes of the arena to these of the slot."""
    return any(
        row.slot <= slot
        and slot + nbytes <= row.slot + row.nbytes
        and arena - row.arena == slot - row.slot
        for row in rows_of(chunk)
    )


@given(steps())
@settings(max_examples=200, deadline=None)
def test_chunks_stay_within_the_limit_and_pieces_within_the_chunk(step: Step) -> None:
    for chunk in step.cut():
        assert chunk.nbytes <= step.limit
        for row in rows_of(chunk):
            assert row.slot >= 0
            assert row.nbytes > 0
            assert row.slot + row.nbytes <= chunk.nbytes
        for part in chunk.slices:
            assert all(offset % ALIGNMENT == 0 for offset in part.offsets)
        assert bool(chunk.pieces) == bool(chunk.nbytes)


@given(steps())
@settings(max_examples=200, deadline=None)
def test_after_is_the_last_earlier_chunk_with_the_same_parameter(step: Step) -> None:
    chunks = step.cut()
    paged = [
        {part.item for part in chunk.slices if step.items[part.item].offset is not None}
        for chunk in chunks
    ]
    for chunk in chunks:
        earlier = [
            other.index
            for other in chunks[: chunk.index]
            for mine in paged[chunk.index]
            for theirs in paged[other.index]
            if mine != theirs and step.items[mine].identity == step.items[theirs].identity
        ]
        assert chunk.after == max(earlier, default=None)
        identities = [step.items[number].identity for number in paged[chunk.index]]
        assert len(identities) == len(set(identities))  # never twice in one slot


def test_after_counts_every_repeated_parameter_of_a_chunk() -> None:
    small, large = StateShape(256, ADAM8), StateShape(512, ADAM8)
    a, b = Item(0, small, 0), Item(1, small, 512)
    chunks = cut([a, Item(2, large, 1024), b, Item(3, large, 2048), a, b], target=1024, limit=1024)
    assert [[part.item for part in chunk.slices] for chunk in chunks] == [
        [0],
        [1],
        [2],
        [3],
        [4, 5],
    ]
    assert [chunk.after for chunk in chunks] == [None, None, None, None, 2]


@example([StateShape(4609, ((1, 2), (2, 4), (2, 4))), StateShape(1, ((1, 1),))], 8192)
@given(st.lists(shapes, min_size=2, max_size=8), st.integers(8 * 1024, 60_000))
@settings(max_examples=100, deadline=None)
def test_parameters_share_a_chunk_as_long_as_it_is_below_the_target(
    found: list[StateShape], target: int
) -> None:
    items = [Item(identity, shape, 0) for identity, shape in enumerate(found)]
    chunks = cut(items, target=target, limit=10 * target)
    for one, other in itertools.pairwise(chunks):
        last = one.slices[-1]
        if last.stop - last.start < items[last.item].state.numel:
            continue  # the end of a parameter that was cut stays alone
        following = items[other.slices[0].item].state
        whole = pack(following, following.numel)[1]
        assert one.nbytes + whole > target or whole > 10 * target


@given(st.lists(shapes, min_size=1, max_size=5))
def test_a_run_of_whole_parameters_is_one_copy(found: list[StateShape]) -> None:
    items = []
    end = 0
    for identity, shape in enumerate(found):
        items.append(Item(identity, shape, end))
        end = pack(shape, shape.numel, end)[1]
    (chunk,) = cut(items, target=end, limit=end)
    assert len(chunk.pieces) == 1
    assert (chunk.pieces[0].arena, chunk.pieces[0].slot) == (0, 0)
    assert chunk.nbytes == end


@given(found=st.lists(shapes, min_size=1, max_size=6), order=st.randoms())
def test_a_run_of_whole_parameters_is_one_copy_in_any_order(
    found: list[StateShape], order: random.Random
) -> None:
    """Backward updates them in another order than they have in the arena."""
    items: list[Item] = []
    end = 0
    for identity, shape in enumerate(found):
        items.append(Item(identity, shape, end))
        end = pack(shape, shape.numel, end)[1]
    order.shuffle(items)
    (chunk,) = cut(items, target=end, limit=end)
    assert [part.item for part in chunk.slices] == list(range(len(items)))
    assert len(chunk.pieces) == 1
    assert chunk.nbytes == end


def test_a_gap_in_the_arena_parts_copies() -> None:
    shape = StateShape(256, ADAM8)
    (chunk,) = cut([Item(0, shape, 0), Item(1, shape, 512 + 4096)], target=2048, limit=2048)
    assert chunk.pieces == (Piece(0, 0, 512), Piece(4608, 512, 512))


def test_padding_between_state_tensors_travels_along() -> None:
    shape = StateShape(300, ADAM8)
    (chunk,) = cut([Item(0, shape, 0)], target=2048, limit=2048)
    assert chunk.slices[0].offsets == (0, 512)
    assert chunk.pieces == (Piece(0, 0, 812),)
    assert chunk.nbytes == 1024


def test_rows_of_ademamix_are_adjacent_in_the_slot() -> None:
    shape = StateShape(1024, ADEMAMIX32)
    chunks = cut([Item(0, shape, 0)], target=6144, limit=6656)
    assert [(part.start, part.stop) for chunk in chunks for part in chunk.slices] == [
        (0, 512),
        (512, 1024),
    ]
    assert chunks[1].slices[0].offsets == (0, 2 * 512 * 4)
    assert rows_of(chunks[1]) == [
        Piece(2048, 0, 2048),  # row 0 from element 512 on
        Piece(4096 + 2048, 2048, 2048),  # row 1, right behind it
        Piece(8192 + 2048, 4096, 2048),  # state2
    ]
    assert len(chunks[1].pieces) == 1  # one two-dimensional copy


def test_rows_at_uneven_distances_take_one_copy_each() -> None:
    shape = StateShape(1000, ADEMAMIX32)  # state2 is aligned, the second row of state1 is not
    chunks = cut([Item(0, shape, 0)], target=6144, limit=6656)
    assert [len(chunk.pieces) for chunk in chunks] == [3, 3]


def test_rows_too_far_apart_for_cuda_take_one_copy_each() -> None:
    for numel, pieces in ((LARGEST_PITCH - 255, 1), (LARGEST_PITCH + 1, 2)):
        chunks = cut([Item(0, StateShape(numel, ADAM8), 0)], target=1 << 30, limit=1 << 30)
        assert [len(chunk.pieces) for chunk in chunks] == [pieces] * len(chunks)


def test_slices_of_a_large_parameter_are_equal_whole_blocks() -> None:
    shape = StateShape(10 * BLOCK + 1, LION8)
    chunks = cut([Item(0, shape, 0)], target=4 * BLOCK, limit=5 * BLOCK)
    sizes = [part.stop - part.start for chunk in chunks for part in chunk.slices]
    assert sum(sizes) == shape.numel
    assert max(sizes) <= 5 * BLOCK
    assert all(size % BLOCK == 0 for size in sizes[:-1])
    assert len(set(sizes[:-1])) == 1


def test_a_parameter_up_to_the_limit_is_not_cut() -> None:
    shape = StateShape(4 * BLOCK, LION8)
    assert len(cut([Item(0, shape, 0)], target=BLOCK, limit=4 * BLOCK)) == 1
    assert len(cut([Item(0, shape, 0)], target=2 * BLOCK, limit=4 * BLOCK - 1)) > 1


def test_resident_parameters_ride_along() -> None:
    shape = StateShape(256, ADAM8)
    chunks = cut(
        [Item(0, shape), Item(1, shape, 0), Item(2, shape), Item(3, shape, 512), Item(4, shape)],
        target=512,
        limit=512,
    )
    assert [[part.item for part in chunk.slices] for chunk in chunks] == [[0, 1, 2], [3, 4]]
    assert [chunk.nbytes for chunk in chunks] == [512, 512]


def test_without_target_and_limit_each_paged_parameter_is_a_chunk() -> None:
    shape = StateShape(1_000_000, ADAM32)
    chunks = cut([Item(0, shape, 0), Item(1, shape, 0), Item(0, shape, 0)], target=0, limit=0)
    assert [len(chunk.slices) for chunk in chunks] == [1, 1, 1]
    assert [chunk.after for chunk in chunks] == [None, None, 0]


def test_a_limit_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="a chunk of 600 bytes does not hold the state of 256"):
        cut([Item(0, StateShape(1000, ADAM32), 0)], target=600, limit=600)


def test_no_items_no_chunks() -> None:
    assert cut([], target=1, limit=1) == ()


@given(shapes, st.integers(0, 10_000))
def test_pack_aligns_every_tensor_of_an_aligned_base(shape: StateShape, blocks: int) -> None:
    base = blocks * ALIGNMENT
    offsets, end = pack(shape, shape.numel, base)
    assert offsets[0] == base
    ends = [*offsets[1:], end]
    for (rows, itemsize), offset, following in zip(shape.tensors, offsets, ends, strict=True):
        assert offset % ALIGNMENT == 0
        assert 0 <= following - (offset + rows * itemsize * shape.numel) < ALIGNMENT
    assert sum(rows * size for rows, size in shape.tensors) * shape.numel == shape.nbytes
