"""The Sphinx extension of hpcaccel's site: generated parts, links to files outside of docs/, and the check of links.

A page asks for a generated part with a comment on a line of its own::

    <!-- generated: spec-fields -->

``page FILE`` is a page outside of docs/. ``pages FOLDER`` is a list of the pages of a folder that the index pages do
not name, so that a new page appears on the site as soon as it exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from hpcaccel_site import (
    api_reference,
    command_reference,
    environment_reference,
    project_pages,
    run_reference,
    spec_reference,
)

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["PARTS", "expanded", "setup"]

PARTS: Mapping[str, Callable[[], str]] = {
    "spec-fields": spec_reference.job_fields,
    "sweep-fields": spec_reference.sweep_fields,
    "profile-fields": spec_reference.profile_fields,
    "commands": command_reference.commands_page,
    "api": api_reference.public_names,
    "environment": environment_reference.environment_tables,
    "exit-codes": run_reference.exit_codes,
    "failure-causes": run_reference.failure_causes,
    "run-directory": run_reference.run_directory,
    "sweep-directory": run_reference.sweep_directory,
    "examples": project_pages.examples,
}
"""The generated parts, by name; each function returns Markdown."""

_PART = re.compile(r"^<!-- generated: ([\w-]+)(?: (\S+))? -->$", re.MULTILINE)


def expanded(text: str) -> str:
    """``text`` of a page with the generated parts in place of their comments.

    Raises:
        KeyError: there is no generated part of this name.
    """

    def part(found: re.Match[str]) -> str:
        if found[1] == "page":
            return project_pages.page_of_file(found[2])
        if found[1] == "pages":
            return project_pages.further_pages(found[2])
        return PARTS[found[1]]()

    return _PART.sub(part, text)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    folder = PurePosixPath("docs") / PurePosixPath(page).parent
    text = project_pages.with_links_of_site(source[0], folder)
    source[0] = expanded(text)


def _check_links(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        from sphinx.util import logging

        from hpcaccel_site.html_links import broken_links

        log = logging.getLogger(__name__)
        for problem in broken_links(app.outdir):
            log.warning(problem)


def _outdated(app: Any, env: Any, added: Any, changed: Any, removed: Any) -> Iterable[str]:
    """All pages: generated parts depend on the code."""
    return set(env.found_docs)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _read)
    app.connect("env-get-outdated", _outdated)
    app.connect("build-finished", _check_links)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
