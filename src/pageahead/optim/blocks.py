"""8-bit state that is cut elsewhere: its scales by rows, so that they move with their elements.

bitsandbytes quantizes 256 elements at a time, a **block**, and keeps one scale (``absmax``) for
each. Blocks are counted from the first element that a process has, so where they lie depends on how
a parameter is sharded. A checkpoint of a sharded parameter therefore has its scales by rows of the
parameter (a row: everything at one index of dimension 0): each row lists the scales of all blocks
that it has elements of, and where in its first block it starts. Rows are what sharding deals out,
so any process can tell the scale of every element it is given.

A block whose elements all had one scale keeps its bits. One whose elements come from several blocks
is dequantized and quantized again.
"""

from __future__ import annotations

import torch
from bitsandbytes.functional import quantize_blockwise

from pageahead.memory.layout import BLOCK

__all__ = ["by_blocks", "by_rows", "first_scales", "row_width"]

ELEMENTS_AT_ONCE = 4096 * BLOCK
"""So many are spread out and quantized at a time, which bounds the memory it takes."""


def row_width(row_numel: int) -> int:
    """How many values `by_rows` gives each row of so many elements.

    The place of its first element in its block, and the scale of every block it can touch.
    """
    return 1 + (row_numel + BLOCK - 2) // BLOCK + 1


def by_rows(absmax: torch.Tensor, rows: int, row_numel: int) -> torch.Tensor:
    """Arrange scales by rows.

    Args:
        absmax: float32, one for each block of ``rows * row_numel`` elements; or two such lines.
        rows: how many rows these elements are.
        row_numel: elements of a row.

    Returns:
        float32 of shape ``(rows, row_width(row_numel))``, or two of them: the place of the row's
        first element in its block, scales, zeros.
    """
    starts = torch.arange(rows, device=absmax.device) * row_numel
    first, last = starts // BLOCK, (starts + row_numel - 1) // BLOCK
    index = first[:, None] + torch.arange(row_width(row_numel) - 1, device=absmax.device)
    lines = absmax.shape[:-1]
    if not rows or not row_numel:
        return absmax.new_zeros((*lines, rows, row_width(row_numel)))
    scales = absmax[..., index.clamp(max=absmax.shape[-1] - 1)]
    scales = torch.where(index <= last[:, None], scales, 0.0)
    places = (starts % BLOCK).to(torch.float32)[:, None].expand((*lines, rows, 1))
    return torch.cat((places, scales), dim=-1)


def by_blocks(
    codes: torch.Tensor, scales: torch.Tensor, qmap: torch.Tensor, into: torch.Tensor
) -> torch.Tensor:
    """Take quantized elements and their scales by rows, and write them as blocks from the first on.

    Args:
        codes: uint8, ``(rows, ...)``.
        scales: of these rows, as `by_rows` made them of blocks that may lie elsewhere.
        qmap: float32, the 256 values that the codes stand for.
        into: uint8 of as many elements, on the CPU or where `codes` are copied to; may be `codes`.

    Returns:
        The scale of each block of `into`, float32 on the CPU.
    """
    rows, numel = scales.shape[0], codes.numel()
    if not numel:
        return torch.zeros(0)
    row_numel = numel // rows
    scales, qmap = scales.cpu(), qmap.cpu()
    absmax = torch.empty(-(-numel // BLOCK))
    source, target = codes.reshape(-1), into.view(-1)
    for start in range(0, numel, ELEMENTS_AT_ONCE):
        stop = min(start + ELEMENTS_AT_ONCE, numel)
        spread = _scale_of(scales, torch.arange(start, stop), row_numel)
        part, found = _requantized(source[start:stop].cpu(), spread, qmap)
        target[start:stop].copy_(part)
        absmax[start // BLOCK : -(-stop // BLOCK)] = found
    return absmax


def first_scales(scales: torch.Tensor, numel: int, row_numel: int) -> torch.Tensor:
    """For each block the scale of its first element: the block's, if blocks lie as they did.

    Args:
        scales: by rows, of so many elements; or two such.
        numel: elements of all rows.
        row_numel: elements of one.
    """
    return _scale_of(scales, torch.arange(0, numel, BLOCK), row_numel)


def _scale_of(scales: torch.Tensor, elements: torch.Tensor, row_numel: int) -> torch.Tensor:
    row, column = elements // max(row_numel, 1), elements % max(row_numel, 1)
    place = scales[..., row, 0].long() + column
    index = row * scales.shape[-1] + 1 + place // BLOCK
    return scales.flatten(-2).gather(-1, index)


def _requantized(
    codes: torch.Tensor, scale: torch.Tensor, qmap: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of whole blocks (the last may be a part of one), given each element's."""
    again, state = quantize_blockwise(qmap[codes.long()] * scale, code=qmap, blocksize=BLOCK)
    missing = -codes.numel() % BLOCK
    padded = torch.cat((scale, scale[-1:].expand(missing))).view(-1, BLOCK)
    first = padded[:, :1]
    kept = (padded == first).all(dim=1)
    element_kept = kept.repeat_interleave(BLOCK)[: codes.numel()]
    return torch.where(element_kept, codes, again), torch.where(kept, first[:, 0], state.absmax)
