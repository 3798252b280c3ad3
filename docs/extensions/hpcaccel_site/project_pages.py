"""Links from the pages to files outside of docs/: pages and example files of the repository, shown on the site."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

__all__ = ["PAGES", "examples", "further_pages", "listed_pages", "page_of_file", "with_links_of_site"]

ROOT = Path(__file__).resolve().parents[3]

PAGES = {
    "README.md": "project/readme",
    "CONTRIBUTING.md": "project/contributing",
    "CHANGELOG.md": "project/changelog",
    "SECURITY.md": "project/security",
    "benchmarks/README.md": "project/benchmarks",
    "docker/README.md": "project/development-cluster",
    "jobs/README.md": "project/examples",
}
"""Pages outside of docs/, each with its page of the site."""

_LINK = re.compile(r"(?<!`)(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
_HTML_IMAGE = re.compile(r"<img\s[^>]*?src=\"([^\"]+)\"[^>]*>")
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".sh": "bash", ".jsonl": "text", ".md": "markdown"}
_NOT_SHOWN = (".ipynb",)


def page_of_file(name: str) -> str:
    """Markdown: a page outside of docs/, with links as they are from the site's root folder."""
    return with_links_of_site((ROOT / name).read_text(encoding="utf-8"), PurePosixPath(name).parent)


def with_links_of_site(text: str, folder: PurePosixPath) -> str:
    """``text`` of a page in ``folder`` (relative to the repository), with all relative links as the site needs them."""
    lines, fence = [], ""
    for line in text.splitlines(keepends=True):
        if found := _FENCE.match(line):
            fence = "" if fence and found[2].startswith(fence) else fence or found[2]
        elif not fence:
            line = _HTML_IMAGE.sub(lambda image: f"![]({_target(image[1], folder)})", line)
            line = _LINK.sub(lambda link: _link(link[1], link[2], folder), line)
        lines.append(line)
    return "".join(lines)


def _link(label: str, target: str, folder: PurePosixPath) -> str:
    if re.match(r"[a-z]+:", target) or target.startswith("#"):
        return f"{label}({target})"
    found = _target(target, folder)
    return f"{label}({found})" if found else label[1:-1]


def _target(target: str, folder: PurePosixPath) -> str:
    """The target of a link on the site; empty if the site does not have it."""
    name, hash_sign, anchor = target.partition("#")
    path = _normal(folder / name)
    if path.startswith("docs/"):
        return f"/{path.removeprefix('docs/')}{hash_sign}{anchor}"
    if path in PAGES:
        return f"/{PAGES[path]}.md{hash_sign}{anchor}"
    if path.startswith("jobs/") and (ROOT / path).exists() and not path.endswith(_NOT_SHOWN):
        return f"/{PAGES['jobs/README.md']}.md#{_anchor(path)}"
    if path in ("docker", "benchmarks", "jobs"):
        return f"/{PAGES[f'{path}/README.md']}.md"
    if (ROOT / path).exists():
        return ""
    return target  # Sphinx reports it


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _anchor(path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")


def listed_pages(text: str, folder: str) -> list[str]:
    """The pages, relative to docs/ and without suffix, that the toctrees of an index page in ``folder`` name."""
    found = []
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            name = line.partition("<")[2].rstrip(">") or line.strip()
            if name and not name.startswith(":"):
                found.append(name[1:] if name.startswith("/") else f"{folder}/{name}".removeprefix("./"))
    return found


def further_pages(folder: str) -> str:
    """Markdown: a toctree of the pages in ``docs/FOLDER`` (``.``: docs/ itself) that no index page names, by name."""
    docs = ROOT / "docs"
    named = {"index"}
    for index in docs.rglob("index.md"):
        named |= set(listed_pages(index.read_text(encoding="utf-8"), index.parent.relative_to(docs).as_posix()))
    found = [path.relative_to(docs).with_suffix("").as_posix() for path in sorted((docs / folder).glob("*.md"))]
    further = [f"/{name}" for name in found if name not in named and not name.endswith("/index")]
    return "\n".join(["```{toctree}", ":maxdepth: 1", "", *further, "```", ""]) if further else ""


def examples() -> str:
    """Markdown: the files of the folder jobs/, a section for each folder."""
    parts = []
    for folder in sorted(path for path in (ROOT / "jobs").iterdir() if path.is_dir() and path.name[0] not in "_."):
        parts.append(f"(jobs-{folder.name})=\n## jobs/{folder.name}\n")
        parts += [_shown(path) for path in sorted(folder.iterdir()) if path.suffix in _LANGUAGES]
    return "\n".join(parts)


def _shown(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"({_anchor(name)})=\n### {name}\n\n{fence}{_LANGUAGES[path.suffix]}\n{text.rstrip()}\n{fence}\n"
