"""Measurements of a background save's commit with processes as ranks, without torch: operations, files, seconds.

Every process writes a small file and reports it as a rank's writer does; the parent then gathers, completes the index
and publishes as rank 0's writer does. ``strace`` counts the operations on the checkpoint's folders.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["commit", "main", "operations", "traced"]

CHUNKS = 16
"""Chunks of each rank's file."""
OPERATIONS = (
    "openat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,fsync,fdatasync,getdents64,stat,lstat,"
    "newfstatat,statx,ftruncate"
)
_OF_OPEN_FILE = re.compile(r'newfstatat\(\d+<[^>]*>, "",')
ROOT = Path(__file__).parents[2]


def commit(ranks: int, *, folder: Path) -> dict[str, Any]:
    """One save by ``ranks`` processes in ``folder``, with the time and counts of rank 0's part."""
    from hpcaccel.checkpoint import commit as protocol
    from hpcaccel.checkpoint import save_reports
    from hpcaccel.checkpoint.rank_blocks import block_of
    from hpcaccel.checkpoint_files import SavePaths

    paths = SavePaths(folder / "checkpoints", 1, "1")
    protocol.begin(paths.temporary)
    protocol.begin(paths.results)
    children = [_fork_writer(rank, ranks, paths) for rank in range(ranks)]
    for child in children:
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            raise RuntimeError(f"a writer of {ranks} failed")
    (folder / "all-written").exists()  # a mark in strace's output
    begun = time.perf_counter()
    block, files, blocks = block_of(0, ranks), [], None
    if block is None:
        files = save_reports.gather(paths, ranks, lambda: None)
    else:
        blocks = save_reports.gather_blocks(paths, ranks, lambda: None)
    gathered = time.perf_counter()
    facts = {"version": 1, "step": 1}
    protocol.write_manifest(paths.temporary, files=files, facts=facts, block=block, blocks=blocks)
    protocol.publish(paths.temporary, paths.final)
    ended = time.perf_counter()
    (folder / "all-published").exists()
    folders = [*os.walk(paths.final), *os.walk(paths.results)]
    return {
        "entries": max(len(names) + len(files) for _, names, files in folders),
        "gather_seconds": gathered - begun,
        "publish_seconds": ended - gathered,
        "index_bytes": sum(path.stat().st_size for path in paths.final.rglob("index.json")),
        "load_bytes": sum((paths.final / name).stat().st_size for name in _read_by_a_rank(block)),
        "manifest_bytes": (paths.final / "COMMITTED").stat().st_size,
    }


def _read_by_a_rank(block: Any) -> list[str]:
    """The JSON files that describe what a rank of ``block`` loads, if it loads what it has saved."""
    parts = [] if block is None else [f"{block.name}/files.json", f"{block.name}/index.json"]
    return ["COMMITTED", "index.json", *parts]


def _fork_writer(rank: int, ranks: int, paths: Any) -> int:
    from hpcaccel.checkpoint import rank_blocks, save_reports
    from hpcaccel.checkpoint.shard_files import BLOCK_BYTES, ShardFile
    from hpcaccel.checkpoint.written_file import PlannedChunk, WrittenFile

    child = os.fork()
    if child:
        return child
    code = 1
    try:
        memory = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        name = rank_blocks.stored_file(rank, ranks)
        rank_blocks.make_block_folder(paths.temporary, name)
        file = ShardFile(paths.temporary / name)
        file.write(memory, 0)
        file.finish(BLOCK_BYTES)
        length = BLOCK_BYTES // CHUNKS
        size, at, block = [length * ranks], [rank * length], rank_blocks.block_of(rank, ranks)
        chunks = [
            PlannedChunk(
                f"models.0.layer.{number}.weight", "uint8", size, at, [length], length, in_block=block is not None
            )
            for number in range(CHUNKS)
        ]
        written = WrittenFile.of(name, [0] * CHUNKS, [length] * CHUNKS, chunks)
        save_reports.deliver(paths, written, block=block)
        code = 0
    finally:
        os._exit(code)


def operations(ranks: int) -> dict[str, int]:
    """Operations on the checkpoint's folders: by each writer on average, and by rank 0 after all files are written.

    Raises:
        FileNotFoundError: ``strace`` is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        place.mkdir()
        lines = traced([__file__, str(ranks), str(place)])
    parent = lines[0][0]
    written, published = (
        next(number for number, (_, call) in enumerate(lines) if mark in call)
        for mark in ("all-written", "all-published")
    )
    here = [(pid, call) for pid, call in lines if str(place) in call and "resumed>" not in call]
    after = [call for pid, call in lines[written + 1 : published] if pid == parent and str(place) in call]
    return {"writer": round(sum(pid != parent for pid, _ in here) / ranks), "first": len(after)}


def traced(arguments: list[str], **environment: str) -> list[tuple[str, str]]:
    """Operations on files by a Python program and its children: process id and call, in their order. Without questions
    about open files, which differ between versions of Python and cost little.

    Raises:
        FileNotFoundError: ``strace`` is not installed.
    """
    if shutil.which("strace") is None:
        raise FileNotFoundError("strace is not installed: without it operations on files cannot be counted")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        command = ["strace", "-f", "-y", "-o", str(trace), "-e", f"trace={OPERATIONS}", sys.executable, *arguments]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        subprocess.run(command, env=variables, check=True, capture_output=True, timeout=300)
        lines = [line.split(maxsplit=1) for line in trace.read_text().splitlines()]
    return [(pid, call) for pid, call in lines if not _OF_OPEN_FILE.match(call)]


def main() -> None:
    print(json.dumps(commit(int(sys.argv[1]), folder=Path(sys.argv[2]))))


if __name__ == "__main__":
    main()
