"""Tests of the use of resources, the advice for the next spec, and how status and report show them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from hpcaccel.core.durable_files import append_line, write_json
from hpcaccel.core.rank_records import Beat
from hpcaccel.core.records import to_dict
from hpcaccel.core.samples import GpuSample, Sample, idle_now
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.view.hints import hints
from hpcaccel.view.run_overview import overview
from hpcaccel.view.run_tables import print_status
from hpcaccel.view.text_tables import console_for
from hpcaccel.view.usage import usage
from hpcaccel.view.usage_table import print_usage

from .conftest import HandMade

GIB = 1 << 30
A, B = "GPU-aaaaaaaa-0000", "GPU-bbbbbbbb-1111"
START = 100_000.0


def gpu(uuid: str, busy: float | None = 90.0, **facts: Any) -> GpuSample:
    known = {"name": "A100", "memory_used": 8 * GIB, "memory_total": 80 * GIB, **facts}
    return GpuSample(uuid=uuid, utilization=busy, idle_seconds=15.0 if busy is not None and busy < 2 else 0.0, **known)


class Samples:
    """Writes samples as a sampler does, one each 15 s."""

    def __init__(self, hand_made: HandMade, *, attempt: int = 1, node: str = "n1", **facts: Any) -> None:
        self._path = hand_made.run.sample_file(attempt, node)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._facts: dict[str, Any] = {"source": "cgroup2", "cpus": 32, "memory_bytes": 6 * GIB, **facts}
        self._number = 0

    def add(self, count: int, *gpus: GpuSample, step: int | None = None, each: int = 10, cpu: float = 15.0) -> None:
        """Add ``count`` lines. ``step`` is the first one's step, ``cpu`` the CPU seconds of 15 s."""
        for number in range(count):
            sample = Sample(
                time=START + 15 * self._number,
                seconds=15.0 if self._number else 0.0,
                step=None if step is None else step + each * number,
                cpu_seconds=cpu * self._number,
                gpus=[
                    GpuSample(**{**to_dict(one), "energy_mj": 15_000 * 300 * self._number})  # 300 W
                    for one in gpus
                ],
                **self._facts,
            )
            append_line(self._path, to_dict(sample))
            self._number += 1


def spec(hand_made: HandMade, **slurm: Any) -> None:
    write_json(hand_made.run.spec, {"version": 1, "spec": {"slurm": slurm}})


@pytest.fixture
def trained(hand_made: HandMade) -> HandMade:
    """Half an hour of training on one of two GPUs; the other one has stopped at step 120."""
    hand_made.start(1)
    samples = Samples(hand_made, memory_limit=100 * GIB)
    samples.add(12, gpu(A), gpu(B), step=10)
    samples.add(108, gpu(A), gpu(B, 0), step=130)
    return hand_made


def test_run_without_samples_has_no_usage(hand_made: HandMade) -> None:
    hand_made.start(1)
    assert usage(hand_made.run) is None
    assert hints(hand_made.run, None) == []
    assert idle_now(hand_made.run) == []


def test_means_peaks_and_energy(trained: HandMade) -> None:
    found = usage(trained.run)
    assert found is not None
    (node,) = found.nodes
    assert (node.seconds, node.cpu_share, node.memory_peak_bytes) == (119 * 15, 1 / 32, 6 * GIB)
    assert [one.uuid for one in found.gpus] == [A, B]
    assert [one.mean_utilization for one in found.gpus] == [90.0, pytest.approx(90 * 11 / 119)]
    assert found.energy_kwh == pytest.approx(2 * 0.3 * 119 * 15 / 3600)
    assert (found.since, found.until) == (START, START + 119 * 15)


def test_gpu_that_stopped_is_idle_since_its_last_step(trained: HandMade) -> None:
    found = usage(trained.run)
    assert found is not None
    assert [(one.uuid, one.idle_since_step) for one in found.idle_gpus] == [(B, 120)]
    assert found.idle_gpu_hours == pytest.approx(108 * 15 / 3600)


def test_rank_of_a_gpu_is_known_by_uuid(trained: HandMade) -> None:
    folder = trained.run.heartbeats(1)
    folder.mkdir()
    # The rank with the lower number has the GPU that NVML lists second, and torch writes its UUID in its own way.
    for rank, uuid in ((0, B.upper().replace("GPU-", "")), (1, A)):
        beat = Beat(
            rank=rank, host="n1", pid=1, number=1, time=0.0, interval_seconds=10.0, phase="training", step=1, gpu=uuid
        )  # fmt: skip
        write_json(folder / f"{rank}.json", to_dict(beat))
    found = usage(trained.run)
    assert found is not None
    assert {one.uuid: one.rank for one in found.gpus} == {A: 1, B: 0}


def test_short_idle_time_does_not_count(hand_made: HandMade) -> None:
    samples = Samples(hand_made)
    samples.add(2, gpu(A), gpu(B), step=1)
    samples.add(39, gpu(A), gpu(B, 0), step=100)
    samples.add(1, gpu(A), gpu(B), step=500)
    found = usage(hand_made.run)
    assert found is not None
    assert (found.idle_gpu_hours, found.idle_gpus) == (0.0, [])


@pytest.mark.parametrize(("count", "counts"), [(60, False), (130, True)])
def test_gpus_that_are_all_idle_without_steps_count_after_half_an_hour(
    hand_made: HandMade, count: int, counts: bool
) -> None:
    Samples(hand_made).add(count, gpu(A, 0), gpu(B, 0))
    found = usage(hand_made.run)
    assert found is not None
    assert bool(found.idle_gpus) is counts


def test_other_nodes_work_makes_a_gpu_idle(hand_made: HandMade) -> None:
    Samples(hand_made, node="n1").add(60, gpu(A))
    Samples(hand_made, node="n2").add(60, gpu(B, 0))
    found = usage(hand_made.run)
    assert found is not None
    assert [(one.node, one.uuid) for one in found.idle_gpus] == [("n2", B)]


def test_attempts_are_added_up(trained: HandMade) -> None:
    once = usage(trained.run)
    trained.start(2)
    Samples(trained, attempt=2).add(10, gpu(A), gpu(B), step=700)
    found = usage(trained.run)
    assert once is not None
    assert found is not None
    assert found.idle_gpu_hours == once.idle_gpu_hours
    assert found.idle_gpus == []  # in the newest attempt, all work
    assert found.energy_kwh == pytest.approx((once.energy_kwh or 0) + 2 * 0.3 * 9 * 15 / 3600)
    assert found.nodes[0].seconds == 128 * 15


def test_counter_that_starts_again_does_not_count_backwards(hand_made: HandMade) -> None:
    samples = Samples(hand_made)
    samples.add(3, gpu(A))
    samples._number = 1  # the driver was loaded again
    samples.add(2, gpu(A))
    found = usage(hand_made.run)
    assert found is not None
    assert found.energy_kwh == pytest.approx(0.3 * 3 * 15 / 3600)


# -- advice -----------------------------------------------------------------------------------------------------------


def test_advice_names_memory_cpus_and_the_idle_gpu(trained: HandMade) -> None:
    spec(trained, mem="100G", cpus_per_task=16, gpus_per_node=2)
    assert hints(trained.run, usage(trained.run)) == [
        "GPU GPU-bbbbbbbb of node n1 idle since step 120 (0.45 GPU-hours): `hpcaccel stacks` shows what "
        "its rank is doing",
        "memory: used 6 of 100 GB: request 10G (slurm.mem)",
        "CPUs: used 1.0 of 32 per node on average: set slurm.cpus_per_task to 2 instead of 16",
        "GPU memory: used at most 8 of 80 GB: a larger batch may be faster, or a smaller GPU or MIG device may be "
        "enough (slurm.gpus_per_node)",
    ]


def test_wait_for_data_asks_for_workers_and_keeps_the_cpus(trained: HandMade) -> None:
    spec(trained, cpus_per_task=16)
    found = hints(trained.run, usage(trained.run), data_wait_share=0.41)
    assert "41 % of the time is spent waiting for data: use more workers (num_workers of the DataLoader)" in found
    assert not any(line.startswith("CPUs") for line in found)
    assert hints(trained.run, usage(trained.run), data_wait_share=0.05) == hints(trained.run, usage(trained.run))


def test_wait_for_data_with_busy_cpus_asks_for_cpus(hand_made: HandMade) -> None:
    Samples(hand_made).add(50, gpu(A, memory_used=60 * GIB), step=1, cpu=15.0 * 31)
    (found,) = hints(hand_made.run, usage(hand_made.run), data_wait_share=0.41)
    shown = "41 % of the time is spent waiting for data: request more CPUs (slurm.cpus_per_task; 96.9 % are in use)"
    assert found == shown


def test_short_run_gets_no_advice(hand_made: HandMade) -> None:
    spec(hand_made, mem="100G", cpus_per_task=16)
    Samples(hand_made, memory_limit=100 * GIB).add(30, gpu(A), step=1)
    assert hints(hand_made.run, usage(hand_made.run)) == []


def test_long_run_without_steps_gets_advice(hand_made: HandMade) -> None:
    spec(hand_made, mem="100G")
    Samples(hand_made, memory_limit=100 * GIB).add(130)
    assert hints(hand_made.run, usage(hand_made.run)) == ["memory: used 6 of 100 GB: request 10G (slurm.mem)"]


@pytest.mark.parametrize(
    ("slurm", "limit", "advice"),
    [
        ({}, 100, []),  # nothing was requested
        ({"mem": "0"}, 100, []),  # all memory of the node
        ({"mem": "12G"}, 12, []),  # little to save
        ({"mem": "16G"}, 16, ["memory: used 6 of 16 GB: request 10G (slurm.mem)"]),
        ({"mem_per_cpu": "4G"}, 128, ["memory: used 6 of 128 GB: request 512M per CPU (slurm.mem_per_cpu)"]),
        ({"mem": "6G"}, 6, ["memory: used 6 of 6 GB of node n1, which is nearly all of it: request more"]),
    ],
)
def test_advice_about_memory(hand_made: HandMade, slurm: dict[str, str], limit: int, advice: list[str]) -> None:
    spec(hand_made, **slurm)
    Samples(hand_made, memory_limit=limit * GIB).add(60, step=1)
    assert hints(hand_made.run, usage(hand_made.run)) == advice


def test_gpu_that_never_worked_was_requested_in_vain(hand_made: HandMade) -> None:
    spec(hand_made, gpus_per_node="a100:2")
    Samples(hand_made).add(61, gpu(A, memory_used=70 * GIB), gpu(B, 0, memory_used=0), step=0)
    assert hints(hand_made.run, usage(hand_made.run)) == [
        "1 GPU was never used (GPU-bbbbbbbb of node n1; 0.25 GPU-hours): request fewer with slurm.gpus_per_node, or "
        "start a rank for each"
    ]


# -- now --------------------------------------------------------------------------------------------------------------


def test_idle_now_names_the_gpu_and_how_long(trained: HandMade) -> None:
    (found,) = idle_now(trained.run, now=START + 119 * 15 + 20)
    assert (found.node, found.uuid, found.seconds, found.since_step) == ("n1", B, 108 * 15, 120)
    assert idle_now(trained.run, now=START + 119 * 15 + 1000) == []  # the last sample is old


def test_gpus_that_are_idle_together_are_not_idle_now(hand_made: HandMade) -> None:
    hand_made.start(1)
    Samples(hand_made).add(60, gpu(A, 0), gpu(B, 0))
    assert idle_now(hand_made.run, now=START + 60 * 15) == []


# -- shown ------------------------------------------------------------------------------------------------------------


def test_status_shows_gpus_idle_ones_energy_and_advice(trained: HandMade) -> None:
    spec(trained, mem="100G")
    now = overview(trained.run, RunStatus(run_id=trained.run.run_id, name="gpt", state="running", attempts=1))
    text = io.StringIO()
    print_status(now, stream=text)
    lines = [line.strip() for line in text.getvalue().splitlines()]
    assert "GPUs           2 GPUs, 49 % busy on average, memory up to 8 of 80 GB" in lines
    assert "idle GPUs      GPU-bbbbbbbb of node n1" in lines
    assert "idle GPU time  0.45 GPU-hours" in lines
    assert "GPU energy     0.30 kWh" in lines
    assert "CPUs, memory   1.0 of 32 CPUs in use, memory up to 6 of 100 GB" in lines
    assert "memory: used 6 of 100 GB: request 10G (slurm.mem)" in lines
    json.dumps(now.to_json(), allow_nan=False)


def test_report_has_a_row_for_each_node_and_gpu(trained: HandMade) -> None:
    found = usage(trained.run)
    assert found is not None
    text = io.StringIO()
    print_usage(found, ["ask for less"], console=console_for(text))
    assert text.getvalue() == (
        "\n"
        "NODE  CPUS  IN USE  MEMORY      OF  READ  WRITTEN\n"
        "n1      32   3.1 %    6 GB  100 GB     -        -\n"
        "\n"
        "GPU           NODE  RANK  TYPE  BUSY     IDLE  MEMORY     OF    ENERGY\n"
        "GPU-aaaaaaaa  n1       -  A100  90 %        -    8 GB  80 GB  0.15 kWh\n"
        "GPU-bbbbbbbb  n1       -  A100   8 %  27m 00s    8 GB  80 GB  0.15 kWh\n"
        "\n"
        "idle GPUs: 0.45 GPU-hours\n"
        "energy of the GPUs: 0.30 kWh\n"
        "\n"
        "for the next run:\n"
        "  ask for less\n"
    )


def test_run_without_samples_shows_nothing_about_them(hand_made: HandMade) -> None:
    now = overview(hand_made.run, RunStatus(run_id=hand_made.run.run_id, name="gpt", state="pending", attempts=0))
    text = io.StringIO()
    print_status(now, stream=text)
    assert now.usage is None
    assert not any(word in text.getvalue() for word in ("GPU", "memory", "next time"))


def test_result_is_kept_until_a_sample_is_added(trained: HandMade) -> None:
    found = usage(trained.run)
    assert usage(trained.run) is found
    append_line(trained.run.sample_file(1, "n1"), to_dict(Sample(time=START + 5000, seconds=15.0, cpu_seconds=1e9)))
    later = usage(trained.run)
    assert later is not None
    assert later.until == START + 5000


def test_lines_of_another_release_are_skipped(trained: HandMade) -> None:
    path = trained.run.sample_file(1, "n1")
    for line in ({"seconds": 15.0}, {"time": 1.0, "gpus": [{"name": "no uuid"}]}, {"time": 1.0, "gpus": 3}):
        append_line(path, line)
    append_line(path, {"time": START + 5000, "seconds": 15.0, "fan_speed": 30, "gpus": [{"uuid": A, "ecc": 0}]})
    found = usage(trained.run)
    assert found is not None
    assert found.until == START + 5000
