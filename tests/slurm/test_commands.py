"""Tests of Slurm's commands: how they are run, and how their failures are reported."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core import progress_notes
from hpcaccel.errors import ClusterError, SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm import JobState, Slurm
from hpcaccel.slurm.programs import submission_environment

RECORDED = Path(__file__).parents[1] / "data" / "slurm"


class Terminal:
    """Replacement for subprocess.run: returns the given results in order and records its calls."""

    def __init__(self, *answers: tuple[int, str, str]) -> None:
        self.answers = list(answers)
        self.commands: list[list[str]] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.options.append(options)
        code, stdout, stderr = self.answers.pop(0)
        return subprocess.CompletedProcess(command, code, stdout, stderr)


def failing(stderr: str) -> tuple[Terminal, Slurm]:
    terminal = Terminal((1, "", stderr))
    return terminal, Slurm(terminal)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --time=01:00:00\n")
    return path


def test_commands_run_in_c_locale_with_timeout_and_without_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    terminal = Terminal((0, "", ""))
    Slurm(terminal, timeout_seconds=7).queue(["46_3", "45"])
    (command,), (options,) = terminal.commands, terminal.options
    assert isinstance(command, list)
    assert "--jobs=45,46_3" in command
    assert options["timeout"] == 7
    assert not options.get("shell")
    assert options["env"]["LC_ALL"] == "C"
    assert options["env"]["SLURM_TIME_FORMAT"] == "standard"
    assert "SQUEUE_FORMAT" not in options["env"]


def test_sbatch_returns_the_job_id(script: Path) -> None:
    sentence = "Submitted batch job 123 on cluster alps\n"
    for answer in ("123\n", "123;alps\n", "a site's greeting\n123\n", sentence):
        assert Slurm(Terminal((0, answer, ""))).sbatch(script) == "123"
    for answer in ("", "123 jobs are before yours\n", "9: 123\n"):
        with pytest.raises(SlurmCommandError):
            Slurm(Terminal((0, answer, ""))).sbatch(script)


@pytest.mark.parametrize("version", ["22.05", "26.11"])
def test_error_for_unknown_partition_lists_existing_ones(script: Path, version: str) -> None:
    refusal = (RECORDED / version / "sbatch-bad-partition.txt").read_text().replace("nope", "gpuu")
    sinfo = "gpu*|up|4|8|20000|1-00:00:00|n/a|REQUEUE|1|gpu:2\nurgent|up|4|8|20000|1-00:00:00|n/a|OFF|10|gpu:2\n"
    with pytest.raises(ClusterError) as error:
        Slurm(Terminal((1, "", refusal), (0, sinfo, ""))).sbatch(script)
    message = str(error.value)
    assert "Invalid partition name specified" in message
    assert "has: gpu, urgent" in message
    assert "Did you mean 'gpu'?" in message


def test_failing_sinfo_does_not_hide_error_of_sbatch(script: Path) -> None:
    refusal = "sbatch: error: invalid partition specified: nope\n"
    with pytest.raises(ClusterError, match="invalid partition specified: nope"):
        Slurm(Terminal((1, "", refusal), (1, "", "slurm_load_partitions: no"))).sbatch(script)


@pytest.mark.parametrize(
    "stderr",
    [
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    ],
)
def test_sbatch_without_controller_raises_slurm_command_error(script: Path, stderr: str) -> None:
    _, slurm = failing(stderr)
    with pytest.raises(SlurmCommandError):
        slurm.sbatch(script)


@pytest.mark.parametrize(
    ("failure", "nothing_was_handed_in"),
    [("connect", True), ("send", False), ("receive", False), ("shutdown", False)],
)
def test_slurm_unreachable_is_raised_only_for_a_failed_connection(
    script: Path, failure: str, nothing_was_handed_in: bool
) -> None:
    words = f"Batch job submission failed: Unable to contact slurm controller ({failure} failure)"
    _, slurm = failing(f"sbatch: error: {words}")
    with pytest.raises(SlurmCommandError, match="Unable to contact") as caught:
        slurm.sbatch(script)
    assert isinstance(caught.value, SlurmUnreachable) is nothing_was_handed_in
    _, slurm = failing(f"slurm_load_jobs error: Unable to contact slurm controller ({failure} failure)")
    with pytest.raises(SlurmCommandError, match="Unable to contact"):
        slurm.job("99")


def test_job_unknown_to_slurm_is_none() -> None:
    _, slurm = failing("slurm_load_jobs error: Invalid job id specified")
    assert slurm.job("99") is None


def test_unreachable_controller_is_not_reported_as_unknown_job() -> None:
    words = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    for method, argument in [("job", "99"), ("queue", ["99"]), ("cancel", "99"), ("requeue", "99")]:
        _, slurm = failing(words)
        with pytest.raises(SlurmCommandError, match="Unable to contact"):
            getattr(slurm, method)(argument)


def test_missing_sbatch_program_is_reported(script: Path) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError(command[0])

    with pytest.raises(ClusterError, match="sbatch was not found on this machine"):
        Slurm(run).sbatch(script)


def test_command_timeout_raises_slurm_command_error() -> None:
    def run(command: list[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, timeout)

    with pytest.raises(SlurmCommandError, match="no response within 3 s"):
        Slurm(run, timeout_seconds=3).job("1")


def test_job_finds_one_task_of_an_array() -> None:
    text = (RECORDED / "22.05" / "scontrol-show-job-array.txt").read_text()
    job = Slurm(Terminal((0, text, ""))).job("46_0")
    assert job is not None
    assert (job.job_id, job.state) == ("48", JobState.RUNNING)


def test_queue_omits_ended_jobs_unless_requested() -> None:
    lines = "".join(
        f"{job_id}|{state}|gpu|ann||1|N/A|N/A|N/A|5:00|None|x\n"
        for job_id, state in [("1", "RUNNING"), ("2", "COMPLETED"), ("3_0", "COMPLETING"), ("3_1", "PENDING")]
    )
    assert list(Slurm(Terminal((0, lines, ""))).queue()) == ["1", "3_0", "3_1"]
    assert list(Slurm(Terminal((0, lines, ""))).queue(["2", "3"], include_ended=True)) == ["2", "3_0", "3_1"]


def test_query_without_job_ids_runs_no_command() -> None:
    terminal = Terminal()
    assert Slurm(terminal).queue([]) == {}
    assert Slurm(terminal).accounting([]) == {}
    assert terminal.commands == []


def test_queue_of_30000_job_ids_has_short_arguments() -> None:
    terminal = Terminal((0, "70000|RUNNING|gpu|ann||1|N/A|N/A|N/A|5:00|None|x\n9|RUNNING|||||||||||\n", ""))
    found = Slurm(terminal).queue([str(number) for number in range(60_000, 90_000)])
    assert list(found) == ["70000"]
    assert max(len(argument) for argument in terminal.commands[0]) < 1000


def test_accounting_is_empty_if_site_disabled_it() -> None:
    _, slurm = failing("Slurm accounting storage is disabled")
    assert slurm.accounting(["1"]) == {}


def test_unreachable_accounting_raises_slurm_command_error() -> None:
    _, slurm = failing("sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection")
    with pytest.raises(SlurmCommandError):
        slurm.accounting(["1"])


def test_requeue_addresses_one_task() -> None:
    terminal = Terminal((0, "", ""))
    assert Slurm(terminal).requeue("46_0")
    assert terminal.commands == [["scontrol", "requeue", "46_0"]]


def test_requeue_of_pending_job_returns_false() -> None:
    _, slurm = failing("Requested operation is presently disabled: Job is pending execution for job 46")
    assert slurm.requeue("46") is False


def test_requeue_of_non_requeueable_job_raises_cluster_error() -> None:
    _, slurm = failing("Requested operation is presently disabled for job 46")
    with pytest.raises(ClusterError, match="presently disabled"):
        slurm.requeue("46")


def test_cancel_runs_scancel_and_ignores_unknown_jobs() -> None:
    terminal = Terminal((0, "", ""), (0, "", ""), (1, "", "scancel: error: Kill job error on job id 9: Invalid job id"))
    slurm = Slurm(terminal)
    slurm.cancel("46_0")
    slurm.cancel("46", only_pending=True)
    slurm.cancel("9")
    assert terminal.commands == [["scancel", "46_0"], ["scancel", "--state=PENDING", "46"], ["scancel", "9"]]


def test_shell_command_joins_running_job_with_srun_overlap() -> None:
    command = Slurm().shell_command("46_0", node="n2")
    assert command[0] == "srun"
    assert {"--jobid=46_0", "--overlap", "--nodelist=n2", "--pty"} <= set(command)


def test_shell_command_without_terminal_omits_pty() -> None:
    assert "--pty" not in Slurm().shell_command("46_0", terminal=False)


def test_failed_nodes_are_down_or_not_responding() -> None:
    # one line for each partition of a node
    terminal = Terminal((0, "n1|idle\nn2|down*\nn2|down*\nn3|mixed*\nn4|draining\nn5|down\n", ""))
    assert Slurm(terminal).failed_nodes(["n1", "n2", "n3", "n4", "n5"]) == ["n2", "n3", "n5"]
    assert "--nodes=n1,n2,n3,n4,n5" in terminal.commands[0]


def test_signal_step_signals_the_step_with_scancel() -> None:
    terminal = Terminal((0, "", ""))
    Slurm(terminal).signal_step("46_0", 0, "TERM")
    assert terminal.commands == [["scancel", "--signal=TERM", "46_0.0"]]


@pytest.mark.parametrize("job_id", ["", "--help", "1;rm", "1 2", "46_[0-3]", "n1"])
def test_cancel_rejects_invalid_job_id_and_runs_no_command(job_id: str) -> None:
    terminal = Terminal()
    with pytest.raises(ValueError, match="job ID"):
        Slurm(terminal).cancel(job_id)
    assert terminal.commands == []


def test_submission_environment_omits_variables_of_surrounding_job() -> None:
    base = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "8",
        "SLURM_CPU_BIND": "x",
        "SBATCH_ACCOUNT": "phys",
    }
    kept = submission_environment(base, script="#SBATCH --partition=gpu\n")
    assert kept == {"PATH": "/bin", "SLURM_CONF": "/etc/slurm/slurm.conf"}


def test_submission_environment_omits_sbatch_variables_overriding_script() -> None:
    base = {
        "SBATCH_ACCOUNT": "phys",
        "SBATCH_PARTITION": "debug",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_ARRAY_INX": "0-9",
        "SBATCH_NO_REQUEUE": "1",
    }
    script = "#SBATCH --partition=gpu\n#SBATCH --time=01:00:00\n#SBATCH --requeue\n"
    assert submission_environment(base, script=script) == {"SBATCH_ACCOUNT": "phys"}


def test_step_state_is_that_of_newest_record_or_none() -> None:
    terminal = Terminal(
        (0, "RUNNING\nOUT_OF_ME+\n", ""), (0, "", ""), (1, "", "Slurm accounting storage is disabled\n")
    )
    slurm = Slurm(terminal)
    assert slurm.step_state("45", 0) is JobState.OUT_OF_MEMORY  # the newest record of a requeued job
    assert slurm.step_state("45", "1") is None
    assert slurm.step_state("45", "1") is None
    assert "--jobs=45.0" in terminal.commands[0]


def test_exclude_updates_pending_job_and_rejects_invalid_node_name() -> None:
    terminal = Terminal((0, "", ""), (1, "", "Job is no longer pending execution for job 45\n"))
    Slurm(terminal).exclude("46_3", ["n1", "n2"])
    assert terminal.commands == [["scontrol", "update", "JobId=46_3", "ExcNodeList=n[1-2]"]]
    with pytest.raises(SlurmCommandError, match="no longer pending"):
        Slurm(terminal).exclude("45", [])
    with pytest.raises(ValueError, match="is not a node name"):
        Slurm(terminal).exclude("45", ["n1 Requeue=0"])


def test_note_is_shown_while_command_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    sentences: list[str] = []

    def tell(sentence: str) -> None:
        sentences.append(sentence)
        told.set()

    def slowly(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert told.wait(30)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(progress_notes, "SILENT_SECONDS", 0.01)
    token = progress_notes.SHOW_NOTE.set(tell)
    try:
        Slurm(slowly, timeout_seconds=60).cancel("46")
    finally:
        progress_notes.SHOW_NOTE.reset(token)
    assert sentences[0].startswith("scancel has not responded for 0.01 s; waiting for up to 60 s.")


def test_jobs_and_workers_are_found_by_script_through_symbolic_link(script: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    there = tmp_path / "link" / script.name
    lines = f"45|45|{script}\n46|46|{script.with_name('other.sbatch')}\n47|47|bash\n"
    assert Slurm(Terminal((0, lines, ""))).jobs_of_script(there) == ["45"]
    lines = f"48|0|{script}\n48|1|{script}\n49|2|{script} 4\n50|0|{script.with_name('other.sbatch')} 4\n"
    assert Slurm(Terminal((0, lines, ""))).workers_of_script(there) == {0: "48_0", 1: "48_1", 6: "49_2"}
