"""Blocks of ranks: the files of more than ``BLOCK`` ranks lie in one folder per block. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hpcaccel.checkpoint.shard_files import rank_file
from hpcaccel.core.durable_files import DIRECTORY_MODE

__all__ = ["BLOCK", "Block", "block_name", "block_of", "make_block_folder", "stored_file"]

BLOCK = 64
"""Largest number of ranks of a block."""


class Block(NamedTuple):
    """The name of a block's folder, and the number of its ranks."""

    name: str
    ranks: int


def block_of(rank: int, ranks: int) -> Block | None:
    """The block of ``rank`` among ``ranks`` ranks; None if all of them fit in one block, which has no folder."""
    if ranks <= BLOCK:
        return None
    first = rank // BLOCK * BLOCK
    return Block(block_name(rank), min(BLOCK, ranks - first))


def block_name(rank: int) -> str:
    """The folder of the block of ``rank``, if there are several blocks."""
    return f"block_{rank // BLOCK:05d}"


def stored_file(rank: int, ranks: int) -> str:
    """Path of a rank's file in a checkpoint: ``rank_00003.bin`` or ``block_00001/rank_00067.bin``."""
    block = block_of(rank, ranks)
    return rank_file(rank) if block is None else f"{block.name}/{rank_file(rank)}"


def make_block_folder(checkpoint: Path, file: str) -> None:
    """Create the folder of a block, unless ``file`` lies in the checkpoint's own folder. Several ranks may do this."""
    if "/" in file:
        (checkpoint / file).parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
