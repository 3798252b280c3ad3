"""Commands for runs on a fake Slurm, whose programs are scripts; ``tests/cluster`` uses a real one."""

from __future__ import annotations

import json

import pytest

from hpcaccel.core.durable_files import append_line
from hpcaccel.core.records import AttemptStart, to_dict
from hpcaccel.core.run_dir import RunDir

SQUEUE = "45|{state}|gpu|me|n[1-2]|2|2026-11-20T10:00:00|N/A|2026-11-20T09:00:00|1:00:00|{reason}|hello"


@pytest.fixture
def submitted(shell, spec):
    """A run submitted as job 45."""
    shell.program("sbatch", "echo 45")
    shell.program("squeue", f"echo '{SQUEUE.format(state='RUNNING', reason='None')}'")
    result = shell("submit", "job.yaml", "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def start(run):
    """Record the start of the ranks, as the batch step does."""
    line = AttemptStart(attempt=1, time=1.0, job_id="45", nodes=["n1", "n2"], ranks=2)
    append_line(RunDir(run["path"]).ledger, to_dict(line))


def test_slurm_is_the_default_backend_where_it_is_installed(shell, submitted):
    assert submitted["job_id"] == "45"
    assert json.loads(shell("status", "45", "--json").stdout)["backend"] == "slurm"


def test_status_of_a_pending_job_gives_its_reason(shell, submitted):
    shell.program("squeue", f"echo '{SQUEUE.format(state='PENDING', reason='Resources')}'")
    status = json.loads(shell("status", "45", "--json").stdout)
    assert status["state"] == "pending"
    assert "Resources" in status["detail"]
    assert "Resources" in shell("status", "hello").stdout


@pytest.mark.parametrize(
    ("arguments", "place"),
    [([], "--nodelist=n1"), (["--node", "1"], "--nodelist=n2"), (["--node", "n2"], "--nodelist=n2")],
)
def test_shell_opens_on_the_chosen_node(shell, submitted, arguments, place):
    start(submitted)
    shell.program("srun", 'echo "$@"')
    result = shell("shell", "hello", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["--jobid=45", "--overlap", "--nodes=1", "--ntasks=1", place, "bash"]


def test_shell_on_a_node_outside_the_job_is_refused(shell, submitted, refused):
    start(submitted)
    assert "n1, n2" in refused(shell("shell", "hello", "--node", "7"))


def test_shell_in_a_pending_job_is_refused(shell, submitted, refused):
    shell.program("squeue", f"echo '{SQUEUE.format(state='PENDING', reason='Priority')}'")
    assert "pending" in refused(shell("shell", "hello"))


def test_unreachable_controller_is_an_error_with_exit_code_1(shell, submitted):
    shell.program("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    shell.program("scancel", "echo 'Unable to contact slurm controller' >&2; exit 1")
    result = shell("cancel", "hello")
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Unable to contact" in result.stderr
    assert "Traceback" not in result.stderr


def test_array_is_submitted_with_one_call_of_sbatch(shell, spec):
    shell.program("sbatch", 'echo "$@" >> calls; echo 46')
    shell.write("job.yaml", spec.read_text().replace("[echo, hello]", "[echo]\n  args: {x: 0}"))
    result = shell("submit", "job.yaml", "--grid", "args.x=1,2,3", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["job_id"] == "46"
    assert len((shell.folder / "calls").read_text().splitlines()) == 1
