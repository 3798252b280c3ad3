"""Availability of packages and devices, and comparison of versions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.compat import availability
from hpcaccel.runtime.compat.availability import (
    BACKENDS,
    FACTS,
    PACKAGES,
    compare_versions,
    is_available,
    is_torch_version,
    torchao_required,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", sorted({*PACKAGES, *BACKENDS, *FACTS}))
def test_each_package_backend_and_feature_has_an_availability_function(name: str) -> None:
    check = getattr(availability, f"is_{name}_available")
    assert check() in (True, False)
    assert check.__name__ == f"is_{name}_available"


def test_availability_of_installed_missing_and_unknown_packages() -> None:
    assert availability.is_pytest_available()
    assert availability.is_pytest_available(min_version="8.0")
    assert not availability.is_pytest_available(min_version="999")
    assert not availability.is_deepspeed_available()
    assert not availability.is_npu_available(check_device=True)
    with pytest.raises(AttributeError, match="is_nonsense_available"):
        getattr(availability, "is_nonsense_available")  # noqa: B009
    with pytest.raises(KeyError):
        is_available("nonsense")


def test_empty_directory_is_not_an_available_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "msamp").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    availability.found.cache_clear()
    try:
        assert not availability.is_msamp_available()
        (tmp_path / "msamp" / "__init__.py").touch()
        sys.path_importer_cache.clear()
        availability.found.cache_clear()
        assert availability.is_msamp_available()
    finally:
        availability.found.cache_clear()


def test_torchao_required_raises_import_error_without_torchao() -> None:
    @torchao_required
    def convert() -> str:
        return "done"

    if availability.is_torchao_available():
        assert convert() == "done"
    else:
        with pytest.raises(ImportError, match="convert needs torchao, which is not installed: pip install torchao"):
            convert()


@pytest.mark.parametrize(
    ("version", "operation", "other", "expected"),
    [
        ("1.10.0", ">", "1.9", True),
        ("1.10.0", "<", "1.9", False),
        ("2.0", "==", "2.0.0", True),
        ("2.0", "!=", "2.0.1", True),
        ("2.0rc1", "<", "2.0", True),
        ("2.0", ">=", "2.0", True),
        ("2.0", "<=", "1.9", False),
    ],
)
def test_compare_versions_of_two_version_strings(version: str, operation: str, other: str, expected: bool) -> None:
    assert compare_versions(version, operation, other) is expected


def test_compare_versions_of_installed_packages() -> None:
    assert compare_versions("pytest", ">=", "8.2")
    assert is_torch_version(">=", "2.6")
    assert not is_torch_version("<", "2.6")
    with pytest.raises(RuntimeMisuse, match=r"unknown operation '~=' \(allowed: > >= == != <= <\)"):
        compare_versions("pytest", "~=", "8.2")
