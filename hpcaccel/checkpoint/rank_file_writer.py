"""The part of the writer process that writes a rank's file from the snapshot in memory. Does not import torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from hpcaccel.checkpoint.rank_blocks import make_block_folder
from hpcaccel.checkpoint.shard_files import ShardFile, crc32, why_not_written
from hpcaccel.checkpoint.unchanged_bytes import Base, KnownFile, LastSave, Layout, base_file
from hpcaccel.checkpoint.write_pace import WritePace
from hpcaccel.checkpoint.written_file import WrittenFile
from hpcaccel.checkpoint_files import SavePaths, manifest

__all__ = ["RankFileWriter"]


class RankFileWriter:
    """Writes the files of one rank, one after the other.

    Args:
        memory: the memory that holds the snapshots.
        hurry: set while somebody waits for the save.
    """

    def __init__(self, memory: memoryview, hurry: threading.Event) -> None:
        self._memory = memory
        self._hurry = hurry
        self._last: LastSave | None = None
        self.waited = 0.0
        """Seconds for which the last ``write`` has waited, to spread its writes."""

    def write(self, order: dict[str, Any], paths: SavePaths) -> WrittenFile:
        """Write and sync the file that ``order`` describes (see ``SaveOperation.order``), and compute its CRCs at the
        same time. Unchanged chunks are not written if the file that contains them can be linked.

        Raises:
            OSError: the file cannot be written.
        """
        self.waited = 0.0
        last, self._last = self._last, None
        lengths: list[int] = order["lengths"]
        name: str = order["file"]
        make_block_folder(paths.temporary, name)
        base = None
        if last is not None and last.step == order["base"]:
            base = last.link(order["unchanged"], lengths, paths.temporary, base_file(name))
        layout = Layout(lengths, base)
        pace = WritePace(layout.size, order["seconds"], self._hurry)
        written = self._write(paths.temporary, name, layout, base, lengths, pace)
        known = {name: KnownFile.of(paths.temporary / name, written.crc32)}
        if base is not None:
            known[base.file] = base.known
        self._last = LastSave(paths.step, paths.final, written, known)
        return written

    def _write(
        self, folder: Path, name: str, layout: Layout, base: Base | None, lengths: list[int], pace: WritePace
    ) -> WrittenFile:
        path = folder / name
        file = ShardFile(path)
        crcs = _Checksums(self._memory, layout, pace)
        try:
            for extent in layout.extents:
                start = extent.start
                while start < extent.stop:
                    offset = extent.offset + start - extent.start
                    self.waited += pace.wait(offset)
                    pace.set_io_class()
                    stop = start + pace.step(extent.stop - start)
                    file.write(self._memory[start:stop], offset)
                    start = stop
            file.finish(layout.size)
        except OSError as error:
            self._hurry.set()  # do not wait for the CRCs
            raise OSError(error.errno, why_not_written(error, path.parent, layout.size), str(path)) from None
        finally:
            file.close()
            crcs.thread.join()
        if base is None:
            return WrittenFile.of(name, crcs.of_chunks, lengths)
        for number, place in base.chunks.items():
            crcs.of_chunks[number] = place.crc32
        return WrittenFile(name, layout.size, crcs.of_file(), crcs.of_chunks, lengths, layout.offsets, base.to_json())


class _Checksums:
    """Computes CRC32s in a thread.

    Attributes:
        of_chunks: of each chunk of the snapshot; 0 of those that are not in the file.
    """

    def __init__(self, memory: memoryview, layout: Layout, pace: WritePace) -> None:
        self._memory = memory
        self._layout = layout
        self._pace = pace
        self.of_chunks = [0] * len(layout.offsets)
        self._of_parts: list[tuple[int, int]] = []
        self.thread = threading.Thread(target=self._compute)
        self.thread.start()

    def of_file(self) -> int:
        """The CRC32 of the whole file, after the end of the thread."""
        return manifest.combined_crc(self._of_parts)

    def _compute(self) -> None:
        done = 0
        for part in self._layout.parts():
            crc, start, stop = 0, part.start, part.start + part.length
            while start < stop:
                self._pace.wait(done)
                step = self._pace.step(stop - start)
                crc = crc32(self._memory[start : start + step], crc)
                start, done = start + step, done + step
            self._of_parts.append((crc, part.length))
            if part.chunk is not None:
                self.of_chunks[part.chunk] = crc
