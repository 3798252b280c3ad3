"""Submission: what it creates, and that a failed submission leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jinja2
import pytest

from hpcaccel.core import progress_notes
from hpcaccel.core.durable_files import read_json
from hpcaccel.core.registered_runs import index_lines
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError, RunDirectoryError, SlurmCommandError, SpecError, UserError
from hpcaccel.render import templates
from hpcaccel.spec import JobSpec, from_json, load_spec, spec_hash
from hpcaccel.spec.loading import layers
from hpcaccel.submission import Run, all_runs
from hpcaccel.submission.calls import ItemCall
from hpcaccel.submission.submit.api import submit, submit_prepared
from hpcaccel.submission.submit.prepare import prepare
from tests.slurm.fake_slurm import FakeSlurm
from tests.submission.conftest import ROOT, Project


def launch_of(run: Run) -> dict[str, Any]:
    document = read_json(run.dir.spec)
    assert document is not None
    launch: dict[str, Any] = document["launch"]
    return launch


def submitted(project: Project, *overrides: str, **options: Any) -> Run:
    run = project.queue(*overrides, **options)
    assert isinstance(run, Run)
    return run


def test_submitted_script_is_the_one_in_the_run_directory(project: Project) -> None:
    run = submitted(project)
    (submission,) = project.slurm.submissions
    assert submission.script == run.dir.script
    assert submission.text == run.dir.script.read_text()
    assert f"{run.path}" in submission.text
    assert run.job_id == submission.job_id
    assert run.path.parent == project.runs / "demo"


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], False),
        (["slurm.gpus_per_node=2"], False),
        (["slurm.gpus_per_task=1"], True),
        (["slurm.gpus_per_task=1", "slurm.gpu_bind=single:1"], False),
        (["slurm.gpus_per_task=1", "srun.extra=[--gpu-bind=single:1]"], False),
    ],
)
def test_unbound_gpus_per_task_are_shared_by_the_ranks_of_a_node(
    project: Project, overrides: list[str], share: bool
) -> None:
    assert launch_of(submitted(project, *overrides))["share_gpus"] is share


def test_run_directory_contains_spec_code_and_node_program(project: Project) -> None:
    run = submitted(project, "args.depth=4")
    document = read_json(run.dir.spec)
    assert document is not None
    spec = from_json(json.dumps(document["spec"]))
    assert document["hash"] == spec_hash(spec) == run.record.spec_hash
    assert load_spec(run.dir.spec_yaml) == spec
    assert spec.arguments() == ["--lr", "3e-4", "--depth", "4"]
    assert (run.dir.code / "train.py").exists()
    assert run.dir.node_program.exists()
    assert run.dir.control.is_dir()
    assert [path.name for path in run.path.parent.iterdir()] == [run.run_id]


def test_record_contains_commit_packages_and_origin(project: Project) -> None:
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"]):
        subprocess.run(["git", *words], check=True)
    submitted(project)
    record = submitted(project).record
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert (record.git_commit, record.git_dirty) == (commit, False)  # runs in the same folder do not count as changes
    project.write("new.py", "")
    assert submitted(project).record.git_dirty
    assert record.packages["pydantic"]
    assert record.submitted_from.endswith(f":{project.path}")
    assert record.job_ids == ["101"]


def test_submitted_run_is_added_to_the_index(project: Project) -> None:
    run = submitted(project)
    assert [line["path"] for line in index_lines()] == [str(run.path)]


def test_loaded_jobspec_is_submitted_like_its_file(project: Project) -> None:
    from_file = submitted(project)
    prepared = prepare(load_spec("job.yaml"), cluster="slurm", slurm=project.slurm)
    from_spec = submit_prepared(prepared)
    assert from_spec.record.spec_hash == from_file.record.spec_hash


def test_spec_overrides_profile_defaults(project: Project, home: Path) -> None:
    folder = home / "config" / "hpcaccel" / "clusters"
    folder.mkdir(parents=True)
    (folder / "alps.yaml").write_text("default: true\nruns_dir: /nowhere\nslurm: {partition: big, time: 5}\n")
    run = submit_prepared(prepare("job.yaml", runs_dir=project.runs, slurm=project.slurm))
    text = project.slurm.submissions[0].text
    assert "--partition=big" in text
    assert "--time=00:10:00" in text
    assert run.record.cluster == "alps"


# -- the program of the ranks ---------------------------------------------------------------------------------------


def test_script_runs_from_its_copy(project: Project) -> None:
    run = submitted(project)
    assert launch_of(run)["program"] == ["{python}", str(run.dir.code / "train.py"), "--lr", "3e-4"]
    assert launch_of(run)["pythonpath"] == [str(run.dir.code)]
    assert launch_of(run)["workdir"] == str(project.path)
    assert launch_of(run)["python"] == sys.executable


def test_original_script_runs_without_a_code_copy(project: Project) -> None:
    run = submitted(project, "code.copy=false")
    assert launch_of(run)["program"][1] == str(project.path / "train.py")
    assert not run.dir.code.exists()


def test_module_runs_from_its_copy_even_beside_the_original(project: Project) -> None:
    project.write("pkg/__init__.py", "")
    project.write("pkg/go.py", "import sys, __main__; print(__name__, __main__.__file__, sys.argv[1:])")
    project.write("job.yaml", "name: m\nentrypoint: {module: pkg.go, args: {a: 1}}\n")
    run = submitted(project)
    program = launch_of(run)["program"]
    done = subprocess.run([sys.executable, *program[1:]], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=2) == ["__main__", str(run.dir.code / "pkg" / "go.py"), "['--a', '1']\n"]


def test_installed_module_is_started_by_its_name(project: Project) -> None:
    project.write("job.yaml", "name: m\nentrypoint: {module: json.tool}\n")
    run = submitted(project)
    assert launch_of(run)["program"] == ["{python}", "-m", "json.tool"]
    assert not run.dir.code.exists()


def test_program_beside_the_spec_runs_from_its_copy(project: Project) -> None:
    project.write("tools/go.sh", "#!/bin/sh\n").chmod(0o755)
    project.write("job.yaml", "name: c\nentrypoint: {command: [./tools/go.sh, -x], args: [y]}\n")
    run = submitted(project)
    copy = run.dir.code / "tools" / "go.sh"
    assert launch_of(run)["program"] == [str(copy), "-x", "y"]
    assert os.access(copy, os.X_OK)
    assert launch_of(run)["stop"] == "signals"


def test_program_on_path_copies_no_code(project: Project) -> None:
    project.write("job.yaml", "name: c\nentrypoint: {command: [echo, a]}\n")
    run = submitted(project)
    assert launch_of(run)["program"] == ["echo", "a"]
    assert not run.dir.code.exists()


def test_python_of_a_venv_is_found_on_the_node(project: Project) -> None:
    assert launch_of(submitted(project, "environment.venv=/opt/env"))["python"] is None


# -- refusals -------------------------------------------------------------------------------------------------------


def test_job_refused_by_slurm_leaves_nothing(project: Project) -> None:
    project.slurm.refuse = "invalid partition"
    with pytest.raises(ClusterError, match="invalid partition"):
        project.queue()
    assert not project.runs.exists()
    assert all_runs(slurm=project.slurm) == []


def test_refused_job_keeps_the_folders_of_other_runs(project: Project) -> None:
    kept = submitted(project)
    project.slurm.refuse = "no"
    with pytest.raises(ClusterError):
        project.queue()
    assert [path.name for path in (project.runs / "demo").iterdir()] == [kept.run_id]


def test_unreachable_controller_leaves_nothing(project: Project) -> None:
    project.slurm.unreachable = "Unable to contact slurm controller (connect failure)"
    with pytest.raises(SlurmCommandError):
        project.queue()
    assert not project.runs.exists()


def test_run_directory_is_kept_if_slurm_may_have_accepted_the_job(project: Project) -> None:
    project.slurm.unreachable = "Unable to contact slurm controller (receive failure)"
    with pytest.raises(SlurmCommandError):
        project.queue()
    assert len(list(project.runs.glob("demo/*"))) == 1


def test_interrupted_submission_leaves_nothing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpcaccel.submission.submit.build.copy_code", interrupt)
    with pytest.raises(KeyboardInterrupt):
        project.queue()
    assert not project.runs.exists()


@pytest.mark.parametrize("other_threads", [0, 1])
def test_ctrl_c_during_sbatch_cancels_the_job(
    project: Project, monkeypatch: pytest.MonkeyPatch, other_threads: int
) -> None:
    """Any thread can receive the signal; Python interrupts the main thread."""
    taken = FakeSlurm.sbatch

    def slowly(slurm: FakeSlurm, script: Path, args: Any = (), env: Any = None) -> str:
        os.kill(os.getpid(), 2)
        return taken(slurm, script, args, env)

    monkeypatch.setattr(FakeSlurm, "sbatch", slowly)
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(other_threads)]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            project.queue()
    finally:
        end.set()
    assert project.slurm.cancelled == ["100"]
    assert not project.runs.exists()


def test_job_that_cannot_be_recorded_is_cancelled(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcaccel.submission.jobs.run_state.write_record", full)
    with pytest.raises(RunDirectoryError, match="No space left on device"):
        project.queue()
    assert project.slurm.cancelled == ["100"]
    assert not project.runs.exists()


def test_write_failure_leaves_no_run_directory(project: Project) -> None:
    code = (
        "import resource, hpcaccel\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"  # node.pyz is larger
        "try: hpcaccel.submit('job.yaml', cluster='local')\n"
        "except hpcaccel.HpcaccelError as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("RunDirectoryError cannot write the run directory")
    assert not project.runs.exists()


def test_runs_dir_that_cannot_be_created_is_refused(project: Project) -> None:
    project.write("file", "")
    with pytest.raises(RunDirectoryError, match="--runs-dir"):
        project.queue(runs_dir="file/runs")
    assert project.slurm.submissions == []


def test_runs_dir_with_a_submitit_placeholder_is_refused(project: Project) -> None:
    with pytest.raises(RunDirectoryError, match="contains %a"):
        project.queue(runs_dir="50%a")


def test_deleted_current_directory_is_reported(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UserError, match="current directory"):
        prepare(project.path / "job.yaml", cluster="local")


def test_parent_folders_are_removed_if_the_run_directory_fails(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_half(run: RunDir) -> None:
        run.path.parent.parent.mkdir(parents=True)
        raise RunDirectoryError("No space left on device")

    monkeypatch.setattr(RunDir, "create", make_half)
    with pytest.raises(RunDirectoryError):
        project.queue()
    assert not project.runs.exists()


def test_existing_run_with_the_same_id_is_not_touched(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    first = submitted(project)
    monkeypatch.setattr("hpcaccel.submission.submit.request.new_run_id", lambda: "20260101-000000-abcd")
    prepared = [prepare("job.yaml", cluster="slurm", slurm=project.slurm) for _ in range(2)]
    second = submit_prepared(prepared[0])
    with pytest.raises(RunDirectoryError):
        submit_prepared(prepared[1])
    assert sorted(path.name for path in first.path.parent.iterdir()) == sorted([first.run_id, second.run_id])
    assert second.status().state == "pending"


def test_missing_slurm_suggests_the_local_backend(project: Project) -> None:
    project.slurm.installed = False
    with pytest.raises(ClusterError, match="--cluster local"):
        project.queue()
    assert not project.runs.exists()


def test_secret_value_is_not_written_to_the_run_directory(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"environment\.secrets: THE_KEY is not set"):
        project.queue("environment.secrets=[THE_KEY]")
    monkeypatch.setenv("THE_KEY", "hunter2secret")
    run = submitted(project, "environment.secrets=[THE_KEY]")
    for path in run.path.rglob("*"):
        assert not path.is_file() or b"hunter2secret" not in path.read_bytes(), path


def test_arguments_without_a_function_are_refused(project: Project) -> None:
    with pytest.raises(UserError, match="only for Python functions"):
        submit("job.yaml", 1, cluster="local")


def test_function_without_a_spec_is_refused(project: Project) -> None:
    with pytest.raises(UserError, match="needs a spec"):
        submit(print, cluster="local")


def test_missing_workdir_is_refused(project: Project) -> None:
    with pytest.raises(SpecError, match="workdir"):
        project.queue("workdir=/no/such/place")


def test_name_argument_overrides_the_name_of_the_spec(project: Project) -> None:
    run = submitted(project, name="other")
    assert (run.name, run.path.parent.name) == ("other", "other")


def test_run_lookup_imports_no_heavy_library() -> None:
    code = (
        "import sys, hpcaccel.submission as s; s.find_run, s.Run, s.statuses\n"
        "print(*{'pydantic', 'submitit', 'jinja2', 'torch', 'yaml'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == []


def test_spec_built_in_python_is_submitted(project: Project) -> None:
    spec = JobSpec.model_validate({"name": "py", "entrypoint": {"script": str(project.path / "train.py")}})
    run = submit_prepared(prepare(spec, cluster="slurm", slurm=project.slurm))
    assert isinstance(run, Run)
    assert launch_of(run)["program"] == ["{python}", str(run.dir.code / "train.py")]


def test_grid_above_max_array_size_is_refused_before_expansion(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSlurm, "config", lambda _: {"MaxArraySize": "1001"})
    monkeypatch.setattr("hpcaccel.submission.submit.request.combinations", lambda _: pytest.fail("they were made"))
    values = ",".join(map(str, range(20_000)))
    with pytest.raises(
        SpecError,
        match=r"--grid creates 20,000 tasks, but an array on this cluster can have at most 1,001 tasks "
        r"\(MaxArraySize\)",
    ):
        project.queue(grid=[f"args.lr={values}"])
    assert project.slurm.submissions == []


def test_map_of_too_many_items_is_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSlurm, "config", lambda _: {"MaxArraySize": "1001"})
    axis = "args.item=" + ",".join(map(str, range(2000)))
    with pytest.raises(
        SpecError, match=r"hpcaccel\.map\(\) creates 2,000 tasks, one per item, but an array on this cluster"
    ):
        prepare(ItemCall(print, [()]), spec="job.yaml", cluster="slurm", grid=[axis], slurm=project.slurm)


def test_grid_parses_its_spec_and_template_once(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    templates._environment.cache_clear()
    compiled, read = [], []
    compile_, parse = jinja2.Environment.compile, layers.parse_yaml  # type: ignore[attr-defined]
    monkeypatch.setattr(
        jinja2.Environment, "compile", lambda *args, **more: (compiled.append(1), compile_(*args, **more))[1]
    )
    monkeypatch.setattr(layers, "parse_yaml", lambda *args: (read.append(1), parse(*args))[1])
    project.queue(grid=["args.lr=1,2,3,4"])
    assert (len(compiled), len(read)) == (1, 1)


def test_long_grid_shows_its_progress(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(progress_notes, "SILENT_SECONDS", 0.0)
    token = progress_notes.SHOW_NOTE.set(told.append)
    try:
        project.queue(grid=["args.lr=1,2,3"])
    finally:
        progress_notes.SHOW_NOTE.reset(token)
    assert "1 of 3 combinations checked" in told
    assert "2 of 3 tasks created" in told


def test_grid_opens_the_spec_file_and_its_base_once(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write("base.yaml", "resilience: {requeue: false}\n")
    spec = project.path / "job.yaml"
    spec.write_text("extends: base.yaml\n" + spec.read_text())
    read: list[str] = []
    opened = Path.open

    def counting_open(path: Path, *args: Any, **options: Any) -> Any:
        read.append(path.name)
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", counting_open)
    prepared = prepare("job.yaml", cluster="slurm", grid=["args.lr=1,2,3", "runtime.seed=4,5"], slurm=project.slurm)
    assert len(prepared.tasks) == 6
    assert [name for name in read if name.endswith(".yaml")] == ["job.yaml", "base.yaml"]
