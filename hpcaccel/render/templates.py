"""Finds and renders batch script templates. A value is quoted for the shell unless the template applies a filter to
it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hpcaccel.errors import SpecError
from hpcaccel.render import context as quoting
from hpcaccel.render.template_cache import template_cache

__all__ = ["NAME", "fill", "html_template", "our_folder", "own_template"]

NAME = "sbatch.j2"


def our_folder() -> Path:
    """The directory of hpcaccel's templates: inside an installed package, beside the package in a working tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def html_template(name: str) -> jinja2.Template:
    """One of hpcaccel's HTML pages. Values are escaped, and an unknown name is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(our_folder()),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def own_template(place: Path) -> Path | None:
    """The user's template: the file ``place``, or ``sbatch.j2`` in the directory ``place`` (None if it has none).

    Raises:
        SpecError: ``place`` does not exist.
    """
    if not place.exists():
        raise SpecError(f"templates: {str(place)!r} does not exist. Correct the path, or remove templates")
    if place.is_dir():
        return place / NAME if (place / NAME).is_file() else None
    return place


def fill(names: Mapping[str, Any], *, own: Path | None) -> str:
    """Render the user's template ``own`` or, if it is None, hpcaccel's template, with the variables ``names``.

    Raises:
        SpecError: a template cannot be read or rendered, or a value cannot be quoted.
    """
    environment = _environment(own)
    template = NAME if own is None else f"own:{own.name}"
    try:
        text = environment.get_template(template).render(names)
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"{error.filename or own or NAME}:{error.lineno}: {error.message}") from None
    except jinja2.TemplateNotFound as error:
        raise SpecError(f"{own or NAME}: template {error.message!r} was not found") from None
    except jinja2.TemplateError as error:
        raise SpecError(f"{_place(error, own)}: {error.message or error}") from None
    except SpecError as error:
        raise SpecError(f"{_place(error, own)}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{own or NAME}: cannot read the template: {error}") from None
    return str(text)


class _ShellEnvironment(jinja2.Environment):
    """A Jinja environment in which ``{{ value }}`` is quoted for the shell.

    ``Markup`` marks text that is already quoted: the output of filters, and that of blocks and macros, whose parts
    ``concat`` joins. Jinja's autoescape is for HTML and stays off.
    """

    concat = staticmethod(lambda parts: Markup("".join(parts)))


@functools.lru_cache(maxsize=8)
def _environment(own: Path | None) -> jinja2.Environment:
    environment = _ShellEnvironment(
        loader=_loader(own),
        bytecode_cache=template_cache(ours=our_folder(), settings=Path(__file__)),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: Markup(quoting.shell(value))
    environment.filters["directive"] = lambda value: Markup(quoting.directive(value))
    environment.filters["comment"] = lambda value: Markup(quoting.comment(value))
    environment.filters["verbatim"] = lambda value: Markup(quoting.checked(value))
    return environment


def _finalize(value: object) -> object:
    if isinstance(value, Markup | jinja2.Undefined):
        return value
    return Markup(quoting.shell(value))


def _loader(own: Path | None) -> jinja2.BaseLoader:
    ours = jinja2.FileSystemLoader(our_folder())
    if own is None:
        return ours
    # In a user's sbatch.j2, `{% extends "sbatch.j2" %}` refers to hpcaccel's template. Templates that hpcaccel does not
    # have are loaded from the directory of the user's template.
    beside = jinja2.FileSystemLoader(own.parent)
    return jinja2.ChoiceLoader([_Renamed(f"own:{own.name}", own.name, beside), ours, beside])


class _Renamed(jinja2.BaseLoader):
    """Loads one template of another loader under a different name."""

    def __init__(self, name: str, real: str, loader: jinja2.BaseLoader) -> None:
        self._name, self._real, self._loader = name, real, loader

    def get_source(self, environment: jinja2.Environment, template: str) -> Any:
        if template != self._name:
            raise jinja2.TemplateNotFound(template)
        return self._loader.get_source(environment, self._real)


def _place(error: BaseException, own: Path | None) -> str:
    """File and line of the innermost template in the error's traceback; only the main template's file if the traceback
    has no template."""
    place = str(own or NAME)
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name.endswith(".j2") or (own is not None and name == str(own)):
            place = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
