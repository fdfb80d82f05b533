"""Scales by rows: the same element, the same scale, wherever blocks lie."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise
from hypothesis import given
from hypothesis import strategies as st

from pageahead.memory.layout import BLOCK
from pageahead.optim import blocks
from pageahead.optim.blocks import by_blocks, by_rows, first_scales, row_width

QMAP = create_dynamic_map(signed=True)


def quantized(numel: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of values whose size differs from block to block."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(-(-numel // 100), generator=generator).repeat_interleave(100)[:numel]
    values = torch.randn(numel, generator=generator) * scale
    codes, state = quantize_blockwise(values, code=QMAP, blocksize=BLOCK)
    return codes, state.absmax


def values_of(codes: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    return dequantize_blockwise(codes, absmax=absmax, code=QMAP, blocksize=BLOCK)


@given(st.integers(0, 40), st.integers(0, 700))
def test_rows_and_back(rows: int, row_numel: int) -> None:
    absmax = torch.arange(1.0, 1 + -(-rows * row_numel // BLOCK))
    scales = by_rows(absmax, rows, row_numel)
    assert scales.shape == (rows, row_width(row_numel))
    assert torch.equal(first_scales(scales, rows * row_numel, row_numel), absmax)


@given(st.integers(1, 40), st.integers(1, 700), st.data())
def test_every_element_finds_its_scale(rows: int, row_numel: int, data: st.DataObject) -> None:
    absmax = torch.arange(1.0, 1 + -(-rows * row_numel // BLOCK))
    element = data.draw(st.integers(0, rows * row_numel - 1))
    row, column = divmod(element, row_numel)
    place, *scales = by_rows(absmax, rows, row_numel)[row].tolist()
    assert scales[(int(place) + column) // BLOCK] == absmax[element // BLOCK]


def test_two_lines_of_scales() -> None:
    absmax = torch.rand(2, 6)
    scales = by_rows(absmax, 5, 300)
    for line in range(2):
        assert torch.equal(scales[line], by_rows(absmax[line], 5, 300))
    assert torch.equal(first_scales(scales, 1500, 300), absmax)


@pytest.mark.parametrize("at_once", [BLOCK, 4096 * BLOCK])
@pytest.mark.parametrize(("rows", "row_numel"), [(10, 256), (9, 333), (1000, 3), (2, 5000)])
def test_parts_that_are_joined_and_parted(
    rows: int, row_numel: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved in two parts, read as one: blocks inside the first part keep their bits."""
    monkeypatch.setattr(blocks, "ELEMENTS_AT_ONCE", at_once)
    first_rows = rows // 2 + rows % 2
    first, second = first_rows * row_numel, (rows - first_rows) * row_numel
    parts = quantized(first), quantized(second, seed=1)
    codes = torch.cat([codes for codes, _ in parts])
    scales = torch.cat(
        [
            by_rows(parts[0][1], first_rows, row_numel),
            by_rows(parts[1][1], rows - first_rows, row_numel),
        ]
    )
    expected = torch.cat([values_of(*part) for part in parts])
    source = codes.clone()
    into = codes.clone().view(rows, row_numel)
    absmax = by_blocks(codes.view(rows, row_numel), scales, QMAP, into)
    assert torch.equal(codes, source)
    kept = first // BLOCK
    assert torch.equal(into.view(-1)[: kept * BLOCK], codes[: kept * BLOCK])
    assert torch.equal(absmax[:kept], parts[0][1][:kept])
    if first % BLOCK == 0:
        assert torch.equal(into.view(-1), codes)
        assert torch.equal(absmax, torch.cat([scale for _, scale in parts]))
    else:
        assert not torch.equal(into.view(-1), codes)
    found = values_of(into.view(-1), absmax)
    for block in range(-(-rows * row_numel // BLOCK)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        bound = 0.008 * expected[part].abs().max()
        assert bool(((found[part] - expected[part]).abs() <= bound).all())


def test_in_place() -> None:
    codes, absmax = quantized(3 * 333)
    scales = by_rows(absmax, 3, 333)[1:]
    part = codes[333:].clone()
    into = torch.empty_like(part)
    expected = by_blocks(part, scales, QMAP, into)
    assert torch.equal(by_blocks(part, scales, QMAP, part), expected)
    assert torch.equal(part, into)


def test_no_elements() -> None:
    nothing = torch.empty(0, 300, dtype=torch.uint8)
    scales = by_rows(torch.empty(0), 0, 300)
    assert by_blocks(nothing, scales, QMAP, nothing).numel() == 0
