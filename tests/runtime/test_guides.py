"""docs/migration.md has every name that Accelerate's guides and reference use, and what it says of each is true.

``tests/data/record_guide_names.py`` has written down the names; ``test_migration.py`` covers what Accelerate exports.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from typing import Any

import pytest

from .test_migration import CLASSES, HOMES, PAGE, ROOT, TABLES

pytestmark = pytest.mark.torch

GUIDES: dict[str, Any] = json.loads((ROOT / "tests/data/accelerate-1.15-guides.json").read_text())
NAMED = {
    name.rpartition(".")[2]: verdict
    for heading, table in TABLES.items()
    if heading not in CLASSES.values()
    for name, verdict in table.items()
}
"""The page's verdict on each class, function and constant."""


def test_there_are_enough_names() -> None:
    assert len(GUIDES["names"]) > 100
    assert len(GUIDES["imports"]) > 30
    assert len(GUIDES["members"]["Accelerator"]) > 30


@pytest.mark.parametrize("name", GUIDES["names"])
def test_name_of_the_guides_is_in_a_table(name: str) -> None:
    assert name in NAMED or name in CLASSES


@pytest.mark.parametrize("path", GUIDES["imports"])
def test_import_of_the_guides_works_or_gives_the_reason(path: str) -> None:
    module, _, name = path.rpartition(".")
    statement = f"from {f'hpcaccel.{module}' if module else 'hpcaccel'} import {name}"
    if NAMED[name] == "not here":
        with pytest.raises(ImportError, match=rf"hpcaccel has no {name}\. .{{20}}"):
            exec(statement, {})
    else:
        scope: dict[str, Any] = {}
        exec(statement, scope)
        assert scope[name] is not None


@pytest.mark.parametrize(
    ("kind", "member"), [(kind, member) for kind, found in GUIDES["members"].items() for member in found]
)
def test_member_of_the_guides_is_in_the_table_of_its_class(kind: str, member: str) -> None:
    assert member in TABLES[CLASSES[kind]]


def home(name: str) -> Any:
    for page in (HOMES.get(name, "hpcaccel"), "hpcaccel", "hpcaccel.utils"):
        module = import_module(page)
        if name in getattr(module, "__all__", vars(module)):
            return getattr(module, name)
    raise AssertionError(f"{name} is exported neither by hpcaccel nor by hpcaccel.utils")


@pytest.mark.parametrize(
    ("kind", "keyword"),
    [
        (kind, keyword)
        for kind, found in GUIDES["keywords"].items()
        for keyword in found
        if NAMED.get(kind, "same") != "not here"
    ],
)
def test_class_takes_the_keyword_that_the_guides_pass(kind: str, keyword: str) -> None:
    parameters = inspect.signature(home(kind)).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    assert keyword in parameters or (takes_any and f"`{keyword}`" in PAGE)


@pytest.mark.parametrize("variable", GUIDES["variables"])
def test_variable_of_the_guides_is_on_the_page(variable: str) -> None:
    assert f"`{variable}`" in PAGE
