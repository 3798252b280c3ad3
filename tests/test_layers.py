"""Allowed imports: a subpackage (a room in docs/design.md) imports the base and those to its left in its row."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hpcaccel"

BASE = ["errors", "core", "checkpoint_files", "slurm"]
PAGES = [
    "accelerator", "big_modeling", "checkpointing", "commands", "data_loader", "hooks", "inference", "launchers",
    "local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config", "scheduler", "state", "test_utils",
    "tracking", "utils",
]  # fmt: skip
"""Accelerate's import paths: modules that only re-export names of the runtime, and of ``launch``."""
ROWS = {
    "login": ["spec", "render", "submission", "sweeps", "launch", "view", "service", "top", "cli"],
    "batch step": ["node"],
    "rank": ["checkpoint", "runtime", "integrations"],
}
LIBRARIES = {
    **dict.fromkeys(BASE, frozenset[str]()),
    "node": frozenset({"pynvml"}),
    "checkpoint": frozenset({"torch", "numpy", "isal"}),
    "runtime": frozenset({"torch", "numpy"}),
    "integrations": frozenset({"torch"}),
    "spec": frozenset({"pydantic", "pydantic_core", "yaml"}),
    "render": frozenset({"pydantic", "jinja2", "markupsafe", "yaml"}),
    "submission": frozenset({"pydantic", "jinja2", "yaml", "submitit", "cloudpickle", "rich", "matplotlib"}),
    "sweeps": frozenset({"pydantic", "yaml", "optuna", "scipy"}),
    "launch": frozenset({"yaml", "questionary"}),
    "view": frozenset({"pydantic", "rich", "jinja2", "markupsafe", "matplotlib"}),
    "service": frozenset({"pydantic", "fastapi", "starlette", "uvicorn", "anyio"}),
    "top": frozenset({"textual", "rich"}),
    "cli": frozenset({"pydantic", "yaml", "typer", "click", "rich"}),
}
ALLOWED_ELSEWHERE = {
    ("submission", "remote"): {"fabric", "paramiko"},
    ("service", "page"): {"dash", "dash_ag_grid", "dash_mantine_components", "plotly", "yaml"},
    ("service", "mcp"): {"mcp"},
}
"""By subpackage and folder inside it."""
TRAINERS = {
    "transformers": {"transformers"},
    "transformers_data": {"transformers", "safetensors"},
    "lightning": {"lightning", "pytorch_lightning"},
    "torchtitan": {"torchtitan"},
    "accelerate": {"accelerate"},
}
"""Packages that a module of ``integrations`` may import: its own trainer's, so that it works without the others."""
TRAINER_BRIDGE = "submission/entrypoint/trainer_bridge/sitecustomize.py"
RANK_PROGRAMS = {
    "node/failures/preflight_program.py", "node/torchrun_program.py", "launch/torch_program.py",
    "launch/parameter_program.py", "launch/elastic_agent.py", "launch/tpu_program.py", TRAINER_BRIDGE,
}  # fmt: skip
"""Programs that run in the ranks' Python and not where they are stored. Nothing imports them."""
OPTIONAL = {
    "deepspeed", "timm", "transformers",
    "bitsandbytes", "safetensors", "torchao", "torchdata", "tqdm", "transformer_engine", "aim", "clearml", "comet_ml",
    "dvclive", "matplotlib", "mlflow", "rich", "swanlab", "tensorboard", "tensorboardX", "trackio", "wandb", "yaml",
}  # fmt: skip
"""Packages that a rank imports only inside the function that needs them."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in ("__init__", "__main__"):
            yield parts[0], path


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            assert node.module is not None
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module == "hpcaccel")
    return found


def running_imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports at run time: inside functions too, but not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_graph() -> dict[str, set[str]]:
    """For each module, the modules of this package that it imports."""
    files = {
        ".".join(("hpcaccel", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        found = {next((one for one in _prefixes(target) if one in files), None) for target in running_imports(path)}
        graph[name] = {one for one in found if one is not None} - {name, "hpcaccel"}
    return graph


def _prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def test_imports_have_no_cycle() -> None:
    left = import_graph()
    while done := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in done}
    while ends := left.keys() - {target for targets in left.values() for target in targets}:
        left = {name: targets for name, targets in left.items() if name not in ends}
    assert not left, "these import each other: " + ", ".join(sorted(left))


RUNTIME = {
    "config": ["configuration", "enums", "handlers", "launch_env", "parallelism_config", "settings"],
    "signals": ["child_signals", "stop_flag"],
    "distributed": ["distributed", "rank_logger"],
    "rng": ["rng"],
    "health": ["health"],
    "parallel": ["parallel"],
    "offload": ["offload"],
    "checkpointing": ["checkpointing"],
    "data": ["data"],
    "training": ["training"],
    "tracking": ["tracking"],
    "deepspeed": ["deepspeed"],
    "session": ["training_session"],
    "states": ["states"],
    "batch inference": ["batch_inference", "pipeline"],
    "accelerator": [
        "accelerator", "accelerator_mixins", "accelerator_setup", "forked_ranks", "local_launch", "model_preparation",
        "notebook_cells", "preparation", "rank_output", "save_state", "script_api",
    ],
    "self-test": ["selftest"],
}  # fmt: skip
"""Rows of folders and modules inside ``runtime``: each imports from its row and those above. ``compat`` is exempt."""


SWEEPS = {
    "journal": ["journal", "journal_file", "journal_notes", "journal_reader", "journal_segments"],
    "definition": ["definition"],
    "study": ["pruning", "sampler", "space", "study"],
    "results": ["analysis", "results"],
    "trials": ["running_trial", "trial_files", "trial_result", "tuner_protocol"],
    "budget": ["compute_account", "budget"],
    "overview": ["retry", "sweep_overview"],
    "workers": ["worker_jobs"],
    "tuner": ["next_trial", "tuner", "worker"],
    "commands": ["best_spec", "control_commands", "start_sweep", "study_export", "sweep_handle"],
}
"""Rows inside ``sweeps``, as above."""


SUBMISSION = {
    "code": ["calls", "code"],
    "entrypoint": ["entrypoint"],
    "clusters": ["clusters"],
    "jobs": ["jobs"],
    "runs": ["runs"],
    "submit": ["submit"],
    "remote": ["remote"],
}
"""Rows inside ``submission``, as above: ``submit`` looks up runs to wait for, and returns a run."""


@pytest.mark.parametrize(
    ("room", "rows", "beside"),
    [("runtime", RUNTIME, "compat"), ("sweeps", SWEEPS, ""), ("submission", SUBMISSION, "")],
)
def test_modules_import_only_from_their_row_and_rows_above(room: str, rows: dict[str, list[str]], beside: str) -> None:
    row = {part: number for number, parts in enumerate(rows.values()) for part in parts}
    graph = import_graph()
    parts = {name: name.split(".")[2] for name in graph if name.startswith(f"hpcaccel.{room}.")}
    assert set(parts.values()) == {*row, *filter(None, [beside])}
    for name, part in parts.items():
        targets = {target: parts[target] for target in graph[name] if target in parts}
        wrong = [target for target, found in targets.items() if beside not in (part, found) and row[found] > row[part]]
        assert not wrong, f"{name} imports {', '.join(wrong)}"


NODE = {
    "notices": ["notices"],
    "batch step": ["batch", "lease"],
    "allocation": ["allocation"],
    "environment": ["environment"],
    "warm": ["warm"],
    "rank": ["rank", "torchrun_agent", "torchrun_program"],
    "launchers": ["launchers"],
    "failures": ["failures"],
    "samples": ["samples"],
    "ledger": ["ledger"],
    "chain": ["chain"],
    "preparation": ["preparation"],
    "stop sequence": ["stop_sequence", "stop_timing"],
    "decision": ["decision"],
    "job": ["job"],
    "attempt": ["attempt"],
    "supervisor": ["supervisor"],
    "sweep": ["sweep"],
    "program": ["__main__"],
}
"""Rows inside ``node``, as above."""


def test_node_modules_import_only_from_their_row_and_rows_above() -> None:
    row = {part: number for number, parts in enumerate(NODE.values()) for part in parts}
    graph = import_graph()
    parts = {name: name.split(".")[2] for name in graph if name.startswith("hpcaccel.node.")}
    assert set(parts.values()) == set(row)
    for name, part in parts.items():
        wrong = [target for target in graph[name] if target in parts and row[parts[target]] > row[part]]
        assert not wrong, f"{name} imports {', '.join(wrong)}"


def at_the_top(path: Path) -> set[str]:
    """Packages that a file imports at module level."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def may_import(room: str) -> set[str]:
    if room in BASE:
        return {*BASE[: BASE.index(room) + 1]}
    if room in PAGES:
        return {*BASE, *ROWS["rank"], *PAGES, "launch"}
    row = next(row for row in ROWS.values() if room in row)
    return {*BASE, *row[: row.index(room) + 1]}


@pytest.mark.parametrize(("room", "path"), [pytest.param(r, p, id=str(p.relative_to(PACKAGE))) for r, p in modules()])
def test_file_imports_only_what_its_subpackage_may_import(room: str, path: Path) -> None:
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "hpcaccel":
            target = rest.partition(".")[0]
            if target == "integrations" and path == PACKAGE / TRAINER_BRIDGE:
                continue
            assert not target or target == "__version__" or target in may_import(room), f"{path} imports {name}"
        elif top not in sys.stdlib_module_names:
            allowed = LIBRARIES.get(room, frozenset()) | ALLOWED_ELSEWHERE.get((room, path.parent.name), set())
            optional = room == "runtime" and top in OPTIONAL and top not in at_the_top(path)
            in_ranks = top in ("torch", "torch_xla") and path.relative_to(PACKAGE).as_posix() in RANK_PROGRAMS
            trainer = room == "integrations" and top in TRAINERS.get(path.stem, set())
            assert top in allowed or optional or in_ranks or trainer, f"{path} imports {name}"


def test_no_module_imports_the_programs_of_the_ranks() -> None:
    programs = {f"hpcaccel.{name.removesuffix('.py').replace('/', '.')}" for name in RANK_PROGRAMS}
    graph = import_graph()
    assert programs <= graph.keys()
    assert not programs & set().union(*graph.values())


def test_every_subpackage_is_listed_in_a_row() -> None:
    rooms = {room for room, _ in modules()}
    assert rooms <= {*BASE, *PAGES, *(room for row in ROWS.values() for room in row)}


@pytest.mark.parametrize("path", [pytest.param(p, id=str(p.relative_to(PACKAGE))) for r, p in modules() if r in PAGES])
def test_accelerate_import_paths_contain_no_code(path: Path) -> None:
    """A docstring, imports, and ``__all__``."""
    docstring, *rest = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    for node in rest:
        names = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
        assert isinstance(node, ast.ImportFrom) or names == ["__all__"], f"{path}:{node.lineno}"


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def loaded_by(statement: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_after(statement)}


def test_import_of_hpcaccel_loads_no_heavy_library() -> None:
    assert loaded_by("import hpcaccel") & {"torch", "numpy", "pydantic", "submitit", "jinja2", "fabric"} == set()


def test_batch_step_imports_only_the_standard_library() -> None:
    loaded = loaded_by("import hpcaccel.node.supervisor, hpcaccel.node.rank")
    assert {name for name in loaded if not name.startswith("_")} - sys.stdlib_module_names - {"hpcaccel"} <= {
        "sitecustomize"
    }


def test_import_of_accelerator_loads_no_login_side_library() -> None:
    assert loaded_by("import hpcaccel.runtime.accelerator") & {"pydantic", "submitit", "optuna", "fabric"} == set()


def test_import_of_accelerator_leaves_the_training_loop_to_its_constructor() -> None:
    """The loop, the process groups and the rest of the runtime take ten times as long to import as the class."""
    ours = {name for name in modules_after("from hpcaccel import Accelerator") if name.startswith("hpcaccel.")}
    assert ours & {"hpcaccel.runtime.training_session", "hpcaccel.runtime.distributed.world"} == set()
    assert len(ours) <= 20, sorted(ours)
