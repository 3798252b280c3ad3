"""Writes down the names that Accelerate's guides use, beside this file. In an environment with Accelerate, and with a
clone of it:

    python tests/data/record_guide_names.py CLONE/docs/source COMMIT

Names only: of classes, functions and constants; the paths that programs import; names of members and of keywords, by
class; of environment variables. Those of other packages are left out: each name is looked up in Accelerate.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils

GUIDES = ("basic_tutorials", "usage_guides", "concept_guides", "package_reference", "quicktour.md", "index.md")
OBJECTS = {
    r"(?:self\.)?accelerator": "Accelerator",
    r"(?:distributed_state|partial_state|state|PartialState\(\))": "PartialState",
    r"(?:accelerator\.state|AcceleratorState\(\))": "AcceleratorState",
}
"""Expressions by which the guides' programs call an object, and its class."""
CODE = re.compile(r"^```(?:python|py|diff)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CALLED = {"Accelerator", "PartialState"}


def find(path: str) -> Any:
    """The object that a page names, such as ``utils.DeepSpeedPlugin`` or ``Accelerator.prepare``; None if it is not
    Accelerate's."""
    parts = path.removeprefix("accelerate.").split(".")
    for start in ("accelerate", "accelerate.utils", "accelerate.hooks", "accelerate.big_modeling"):
        found: Any = importlib.import_module(start)
        for part in parts:
            if not hasattr(found, part) and inspect.ismodule(found):
                try:
                    importlib.import_module(f"{found.__name__}.{part}")
                except ImportError:
                    found = None
                    break
            found = getattr(found, part, None)
            if found is None:
                break
        if found is not None:
            return found
    return None


def is_ours(value: Any) -> bool:
    return getattr(value, "__module__", "accelerate").startswith("accelerate") and not inspect.ismodule(value)


def trees(page: str) -> Iterator[ast.AST]:
    """The programs of a page that can be parsed; of a diff, the new side."""
    for code in CODE.findall(page):
        kept = "".join(line[1:] if line[:1] in "+ " else line for line in code.splitlines(True) if line[:1] != "-")
        for text in (code, kept):
            try:
                yield ast.parse(inspect.cleandoc(text))
                break
            except SyntaxError:
                continue


def imported(page: str) -> Iterator[str]:
    for module, names in re.findall(r"^[+ ]*from (accelerate[\w.]*) import \(?([^()#\n]+)", page, re.MULTILINE):
        for name in names.split(","):
            if word := name.split(" as ")[0].strip(" ."):
                yield f"{module}.{word}".removeprefix("accelerate.")


def main() -> None:
    folder, commit = Path(sys.argv[1]), sys.argv[2]
    names: set[str] = set()
    imports: set[str] = set()
    members: dict[str, set[str]] = defaultdict(set)
    keywords: dict[str, set[str]] = defaultdict(set)
    variables: set[str] = set()
    pages = [path for path in sorted(folder.rglob("*.md")) if path.relative_to(folder).parts[0] in GUIDES]
    for page in (path.read_text() for path in pages):
        shown = re.findall(r"\[\[autodoc\]\] ([\w.]+)", page) + re.findall(r"\[`~?([\w.]+)`\]", page)
        shown += re.findall(r"`(utils\.[A-Z_]+)`", page)
        for path in [*shown, *imported(page)]:
            owner, _, last = path.rpartition(".")
            value, of = find(path), find(owner) if owner else None
            if inspect.isclass(of) and is_ours(of):
                members[of.__name__].add(last)
                names.add(of.__name__)
            elif value is not None and is_ours(value):
                names.add(last)
        imports |= {path for path in imported(page) if is_ours(find(path)) and find(path) is not None}
        for expression, kind in OBJECTS.items():
            for member in re.findall(rf"\b{expression}\.(\w+)", page):
                if hasattr(getattr(accelerate.state, kind, None) or accelerate.Accelerator, member):
                    members[kind].add(member)
        for tree in trees(page):
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                name = ast.unparse(call.func).rpartition(".")[2]
                value = find(name)
                if inspect.isclass(value) and is_ours(value):
                    takes = set(inspect.signature(value).parameters)
                    keywords[name] |= {word.arg for word in call.keywords if word.arg in takes}
        variables |= set(re.findall(r"\b(?:ACCELERATE|FSDP)_[A-Z0-9_]*[A-Z0-9]\b", page)) - set(vars(accelerate.utils))
    record = {
        "version": accelerate.__version__,
        "commit": commit,
        "names": sorted(names),
        "imports": sorted(imports),
        "members": {name: sorted(found) for name, found in sorted(members.items())},
        "keywords": {name: sorted(found) for name, found in sorted(keywords.items()) if found},
        "variables": sorted(variables),
    }
    version = ".".join(accelerate.__version__.split(".")[:2])
    path = Path(__file__).parent / f"accelerate-{version}-guides.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
