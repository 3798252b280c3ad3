"""CRC32 of checkpoint files: equal to zlib's, whichever library computes it."""

import json
import subprocess
import sys
import zlib
from itertools import pairwise

import pytest

from hpcaccel.checkpoint import shard_files, writer
from hpcaccel.checkpoint_files import manifest


def test_crc32_equals_that_of_zlib():
    data = bytes(range(256)) * 5000
    assert shard_files.crc32(data) == zlib.crc32(data)
    assert shard_files.crc32(data[7:], shard_files.crc32(data[:7])) == zlib.crc32(data)


@pytest.mark.parametrize("cuts", [(), (1,), (64, 64, 4096)])
def test_combined_crc_of_parts_equals_the_crc_of_the_whole(cuts):
    data = bytes(range(256)) * 40
    edges = [0, *cuts, len(data)]
    parts = [(zlib.crc32(data[start:stop]), stop - start) for start, stop in pairwise(edges)]
    assert manifest.combined_crc(parts) == zlib.crc32(data)


def test_writer_process_uses_the_same_crc_library_as_its_rank():
    program = writer.PROGRAM.replace(
        "writer import main; main(sys.argv[2:])", "shard_files import crc32; print(crc32.__module__)"
    )
    places = json.dumps(writer.package_paths())
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, places], capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == str(shard_files.crc32.__module__)
