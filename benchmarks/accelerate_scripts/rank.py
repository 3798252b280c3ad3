"""One rank of one of Accelerate's test scripts, with ``accelerate`` replaced by ``hpcaccel`` in its imports.

    python benchmarks/accelerate_scripts/rank.py SCRIPT REPORT [ARGUMENTS]

SCRIPT is read from the installed wheel and never copied. Each of its checks (functions whose names match ``CHECK``) is
wrapped: if a check fails, the error is recorded and the script continues with the next one, so that a run reports the
result of every check. A check that passes runs as it would without the wrapper.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

IMPORT = re.compile(r"^(\s*(?:from|import)\s+)accelerate\b", re.MULTILINE)
CHECK = re.compile(r"_?test_|check_|.*_check$|training_function$")


def script_path(name: str) -> Path:
    """Path of the script in the wheel. Accelerate itself is not imported."""
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None, "accelerate is not installed: pip install 'hpcaccel[bench]'"
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations))) / "test_utils" / "scripts" / name


class Watch:
    """Which checks ran, how often, and their errors."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._depth = 0
        self.checks: dict[str, dict[str, Any]] = {}

    def around(self, name: str, check: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(check)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._depth:  # a part of another check
                return check(*args, **kwargs)
            key = f"{name}{_shown(args, kwargs)}"
            entry = self.checks.setdefault(key, {"runs": 0, "errors": []})
            entry["runs"] += 1
            self._depth += 1
            try:
                return check(*args, **kwargs)
            except Exception as error:
                entry["errors"].append("".join(traceback.format_exception(error)))
                return None
            finally:
                self._depth -= 1
                self.write()

        return watched

    def write(self) -> None:
        self._path.write_text(json.dumps(self.checks))


def _shown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The arguments of simple types, which distinguish the calls of one check."""
    plain = [str(value) for value in args if isinstance(value, bool | int | str) or not value]
    plain += [f"{key}={value}" for key, value in kwargs.items()]
    return f"({', '.join(plain)})" if plain else ""


def checks_of(tree: ast.Module) -> list[str]:
    """The names of the script's functions that look like checks, whether ``main`` calls them or not."""
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [name for name in functions if CHECK.match(name)]


def main() -> None:
    name, report, *arguments = sys.argv[1:]
    path = script_path(name)
    source = IMPORT.sub(r"\1hpcaccel", path.read_text())
    sys.argv = [str(path), *arguments]
    scope: dict[str, Any] = {"__name__": "accelerate_script", "__file__": str(path)}
    sys.modules["accelerate_script"] = module = type(sys)("accelerate_script")
    module.__dict__.update(scope)
    exec(compile(source, str(path), "exec"), module.__dict__)
    watch = Watch(Path(report))
    for check in checks_of(ast.parse(source)):
        module.__dict__[check] = watch.around(check, module.__dict__[check])
    watch.write()
    module.__dict__["main"]()


if __name__ == "__main__":
    main()
