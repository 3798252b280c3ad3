"""``verify``: damage is found and named, and code in pickles is never executed."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hpcaccel import checkpoint_files
from hpcaccel.checkpoint import CheckpointEngine
from hpcaccel.checkpoint.formats import ConvertRequest, convert
from hpcaccel.checkpoint_files import manifest as sealed
from hpcaccel.checkpoint_files.checksums import covering_problem
from hpcaccel.checkpoint_files.verify import checkpoints_in, verify
from hpcaccel.errors import CheckpointError
from tests.checkpoint.test_damage import flip
from tests.checkpoint.training import Training
from tests.checkpoint.world import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_covering_problem_finds_gaps_overlaps_and_boxes_outside():
    assert covering_problem((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 3)), ((2, 3), (2, 3))]) is None
    assert covering_problem((), [((), ())]) is None
    assert covering_problem((0, 3), []) is None
    assert "20 in the chunks, 24 in the tensor" in covering_problem((4, 6), [((0, 0), (2, 6)), ((2, 0), (2, 4))])
    assert "overlap" in covering_problem((4, 6), [((0, 0), (3, 6)), ((2, 0), (2, 6))])
    assert "overlap" in covering_problem((2, 2), [((0, 0), (2, 2)), ((0, 1), (1, 1))])
    assert "not inside" in covering_problem((4,), [((2,), (3,))])


# -- checkpoints of hpcaccel


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoint of two ranks, FSDP2, step 1."""
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(_save, directory)
    return directory


def _save(rank, directory):
    training = Training("fsdp", rank=rank)
    training.steps(1)
    CheckpointEngine(directory, rank=rank, world_size=2).save(training.state(), step=1)


@pytest.fixture
def ours(saved, tmp_path):
    shutil.copytree(saved / "step_00000001", tmp_path / "step_00000001")
    return tmp_path / "step_00000001"


def test_verify_reads_every_file_of_an_intact_checkpoint(ours):
    report = verify(ours)
    assert report.good, report.problems
    assert (
        report.bytes
        == sum(file.stat().st_size for file in ours.iterdir()) - (ours / checkpoint_files.MANIFEST).stat().st_size
    )


def test_verify_finds_a_flipped_bit_and_names_the_file(ours):
    names = sorted(file.name for file in ours.iterdir())
    assert names == [checkpoint_files.MANIFEST, "index.json", "rank_00000.bin", "rank_00001.bin"]
    for name in names:
        size = (ours / name).stat().st_size
        for at in sorted({0, size - 1, *range(0, size, max(1, size // 25))}):
            flip(ours / name, at, bit=at % 8)
            report = verify(ours)
            assert any(str(ours / name) in problem for problem in report.problems), (name, at)
            flip(ours / name, at, bit=at % 8)
    assert verify(ours).good


def test_verify_reports_every_damaged_file(ours):
    flip(ours / "rank_00000.bin", 300)
    (ours / "rank_00001.bin").unlink()
    report = verify(ours)
    assert len(report.problems) == 2
    assert any("rank_00000.bin: the CRC of models" in problem for problem in report.problems)
    assert any("rank_00001.bin is missing" in problem for problem in report.problems)


def test_verify_reads_the_other_files_if_the_index_is_damaged(ours):
    flip(ours / "index.json", 10)
    flip(ours / "rank_00001.bin", 10)
    assert len(verify(ours).problems) == 2


def test_verify_finds_swapped_files_and_a_missing_manifest(ours):
    one, other = ours / "rank_00000.bin", ours / "rank_00001.bin"
    one.rename(ours / "x")
    other.rename(one)
    (ours / "x").rename(other)
    assert not verify(ours).good
    (ours / checkpoint_files.MANIFEST).unlink()
    assert any(f"{checkpoint_files.MANIFEST} is missing" in problem for problem in verify(ours).problems)


def resealed(path, change):
    """Rewrite the index, and the manifest with the new CRC: what a bug would have committed."""
    index = json.loads((path / sealed.INDEX).read_bytes())
    change(index["tensors"])
    text = json.dumps(index).encode()
    (path / sealed.INDEX).write_bytes(text)
    manifest = json.loads((path / checkpoint_files.MANIFEST).read_bytes())
    manifest["files"][sealed.INDEX] = {"bytes": len(text), "crc32": f"{zlib.crc32(text):08x}"}
    (path / checkpoint_files.MANIFEST).write_bytes(sealed.seal(manifest))


def test_verify_finds_tensors_with_gaps_or_missing_from_the_index(ours):
    def change(tensors):
        tensors["models.0.body.0.weight"]["chunks"].pop()
        tensors["models.0.embed.weight"]["chunks"][0]["at"] = [1, 0]
        del tensors["models.0.body.0.bias"]

    resealed(ours, change)
    problems = "\n".join(verify(ours).problems)
    assert "models.0.body.0.weight has invalid chunks" in problems
    assert "models.0.embed.weight has invalid chunks" in problems
    assert "models.0.body.0.bias, which is not in the index" in problems


def test_verify_reports_a_sealed_file_that_is_not_a_manifest(ours):
    (ours / checkpoint_files.MANIFEST).write_bytes(sealed.seal({"anything": "else"}))
    assert "is not the manifest of a checkpoint" in verify(ours).problems[0]


def test_checkpoints_in_lists_those_of_a_run_and_refuses_other_paths(saved, tmp_path):
    assert checkpoints_in(saved) == [saved / "step_00000001"]
    (tmp_path / "file").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        checkpoints_in(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        checkpoints_in(tmp_path / "nothing")


def test_checkpoint_commands_do_not_import_torch(ours):
    code = "import sys; from hpcaccel.cli.main import program; program()(sys.argv[1:], standalone_mode=False); "
    code += "sys.exit(int('torch' in sys.modules))"
    for command in ("verify", "show", "list"):
        subprocess.run([sys.executable, "-c", code, "checkpoint", command, str(ours)], check=True, capture_output=True)


# -- checkpoints of DCP


@pytest.fixture(scope="module")
def stock_saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dcp") / "stock"
    run_ranks(_save_dcp, directory)
    return directory


def _save_dcp(rank, directory):
    training = Training("fsdp", rank=rank)
    training.steps(1)
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict(), "epoch": 3}
    dcp.save(state, checkpoint_id=directory)


@pytest.fixture
def stock(stock_saved, tmp_path):
    shutil.copytree(stock_saved, tmp_path / "stock")
    return tmp_path / "stock"


def test_verify_finds_flipped_bits_in_tensors_of_a_dcp_checkpoint(stock):
    report = verify(stock)
    assert report.good, report.problems
    assert report.bytes == sum(file.stat().st_size for file in stock.glob("*.distcp"))
    from hpcaccel.checkpoint_files.dcp_reader import Dcp

    places = sorted(Dcp.read(stock).places.items(), key=lambda item: str(item[0]))
    for (key, _), place in places[::7]:
        with zipfile.ZipFile(_part(stock / place.file, place)) as archive:
            records = [record for record in archive.infolist() if "/data/" in record.filename]
        file = stock / place.file
        for record in records:
            at = place.offset + record.header_offset + 30 + len(record.filename)
            at += int.from_bytes(file.read_bytes()[at - len(record.filename) - 2 : at - len(record.filename)], "little")
            flip(file, at + record.file_size // 2, bit=5)
            problems = verify(stock).problems
            assert len(problems) == 1, (key, problems)
            assert f"{file}: {key}" in problems[0]
            flip(file, at + record.file_size // 2, bit=5)
    assert verify(stock).good


def _part(file, place):
    import io

    return io.BytesIO(file.read_bytes()[place.offset : place.offset + place.length])


def test_verify_finds_missing_data_and_metadata_of_a_dcp_checkpoint(stock):
    file = sorted(stock.glob("*.distcp"))[0]
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert any("but needs at least" in problem for problem in verify(stock).problems)
    file.unlink()
    assert any("is missing" in problem for problem in verify(stock).problems)
    file.write_bytes(data)
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["model.body.0.weight"]
    tensor.chunks.pop()
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    assert any("model.body.0.weight has invalid chunks" in problem for problem in verify(stock).problems)
    (stock / ".metadata").write_bytes((stock / ".metadata").read_bytes()[:100])
    assert any("not a complete pickle" in problem for problem in verify(stock).problems)


# -- code in pickles


class Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_verify_and_convert_never_execute_a_pickle(ours, stock, tmp_path):
    marker = tmp_path / "was run"
    evil = pickle.dumps(Malice(marker))
    (stock / ".metadata").write_bytes(evil)
    [problem] = verify(stock).problems
    assert "mkdir, which no checkpoint needs" in problem
    torch.save({"weight": Malice(marker)}, tmp_path / "evil.pt")
    (tmp_path / "evil.bin").write_bytes(evil)
    for name in ("data.pkl", "tree.pkl", "function.pkl", ".metadata"):
        (ours / name).write_bytes(evil)  # never opened there
    assert verify(ours).good
    flip(ours / checkpoint_files.MANIFEST, 0)
    (ours / checkpoint_files.MANIFEST).write_bytes(evil)
    (ours / "rank_00000.bin").write_bytes(evil)
    assert not verify(ours).good
    verify(tmp_path / "evil.pt")
    assert not verify(tmp_path / "evil.bin").good
    for source in (stock, tmp_path / "evil.pt", tmp_path / "evil.bin", ours):
        for to in ("safetensors", "torch", "hpcaccel"):
            with pytest.raises(CheckpointError):
                convert(ConvertRequest(str(source), str(tmp_path / "out"), to))
    assert not marker.exists()


def test_malicious_pickle_in_a_record_of_dcp_is_not_executed(stock, tmp_path):
    from hpcaccel.checkpoint_files.dcp_reader import Dcp

    marker = tmp_path / "was run"
    torch.save(Malice(marker), tmp_path / "evil.pt")
    evil = (tmp_path / "evil.pt").read_bytes()
    metadata = pickle.loads((stock / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "model.body.0.weight":
            info.offset, info.length = (stock / info.relative_path).stat().st_size, len(evil)
            with (stock / info.relative_path).open("ab") as file:
                file.write(evil)
    (stock / ".metadata").write_bytes(pickle.dumps(metadata))
    assert Dcp.read(stock)
    assert any("model.body.0.weight" in problem for problem in verify(stock).problems)
    with pytest.raises(CheckpointError, match="could run code"):
        convert(ConvertRequest(str(stock), str(tmp_path / "out"), "hpcaccel"))
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
