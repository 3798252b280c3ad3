"""User templates: extending the default, replacing it, and errors in a template."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import SpecError
from hpcaccel.render import render
from hpcaccel.spec import ClusterProfile

from .conftest import Shell, make_spec


def rendered(shell: Shell, source: str, *, name: str = "sbatch.j2", direct: bool = False) -> str:
    folder = shell.folder / "templates"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(source)
    profile = ClusterProfile(name="alps", templates=str(folder), env={"SITE": "it's"})
    return render(
        make_spec(environment={"setup": ["export A='b c'"]}),
        run_dir=RunDir(shell.folder / "run"),
        python=str(shell.python),
        workdir=shell.folder,
        header={},
        profile=None if direct else profile,
        template=folder / name if direct else None,
    )


MACRO = """{% extends "sbatch.j2" %}
{% macro exported(name, value) %}export {{ name | verbatim }}={{ value }}{% endmacro %}
{% block after_setup %}
{{ super() }}
{{ exported("FIRST", "it's <&> 1") }}
{{ exported("SECOND", site_env[0][1]) }}
export THIRD={{ "it's" }} FOURTH={{ "a" ~ "'b" }} FIFTH={{ "a b" if array else "'" }}
{% endblock %}
"""


def test_literals_and_macro_arguments_are_quoted(shell: Shell) -> None:
    env = shell.run(rendered(shell, MACRO)).env
    assert [env[name] for name in ("FIRST", "SECOND", "THIRD", "FOURTH", "FIFTH")] == [
        "it's <&> 1", "it's", "it's", "a'b", "'",
    ]  # fmt: skip


EXTENDED = """{% extends "sbatch.j2" %}
{% block after_setup %}
{{ super() }}
export MINE={{ spec.name ~ " & 'co' $(id)" }}
{% endblock %}
"""


@pytest.mark.parametrize("direct", [False, True])
def test_user_template_extends_a_block_of_the_default(shell: Shell, direct: bool) -> None:
    started = shell.run(rendered(shell, EXTENDED, direct=direct))
    assert started.argv[1:3] == ["batch", "supervise"]
    assert (started.env["MINE"], started.env["A"]) == ("gpt & 'co' $(id)", "b c")
    assert started.env["PYTHONUNBUFFERED"] == "1"


def test_template_that_replaces_the_default_still_quotes_values(shell: Shell) -> None:
    source = (
        "#!/bin/bash\n#SBATCH --comment={{ 'a \"b' | directive }}\n"
        "export X={{ site_env[0][1] }}\nexec {{ python }} {{ run_dir }} {{ 3 }}\n"
    )
    text = rendered(shell, source)
    assert '#SBATCH --comment="a \\"b"\n' in text
    started = shell.run(text)
    assert started.argv == [str(shell.folder / "run"), "3"]
    assert started.env["X"] == "it's"


def test_default_is_used_if_folder_has_no_template_of_this_name(shell: Shell) -> None:
    assert "hpcaccel_setup_failed" in rendered(shell, "other", name="other.j2")


def test_template_includes_a_file_from_its_folder(shell: Shell) -> None:
    (shell.folder / "templates").mkdir()
    (shell.folder / "templates" / "site.j2").write_text("export SITE_FILE={{ backend_name }}\n")
    source = (
        '{% extends "sbatch.j2" %}\n{% block after_setup %}{{ super() }}'
        '{% with backend_name = "a b" %}{% include "site.j2" %}{% endwith %}{% endblock %}'
    )
    assert shell.run(rendered(shell, source)).env["SITE_FILE"] == "a b"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("#!/bin/bash\n{{ sepc.name }}\n", r"sbatch\.j2:2: 'sepc' is undefined"),
        ("#!/bin/bash\n{{ spec.nmae }}\n", r"sbatch\.j2:2: .*nmae"),
        ("a\n{% if %}\n", r"sbatch\.j2:2: "),
        ('{% extends "nothing.j2" %}', r"nothing\.j2"),
        ("{{ spec.slurm }}", r"sbatch\.j2:1: .*cannot be written into a batch script"),
        ("a\n{{ 'a\\nb' }}", r"sbatch\.j2:2: .*contains a line break"),
        ("{{ none }}", r"sbatch\.j2:1: None cannot be written"),
        ("\n{{ spec.workdir | verbatim }}", r"sbatch\.j2:2: None cannot be written.*condition such as \{% if"),
    ],
)
def test_template_error_names_its_cause(shell: Shell, source: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        rendered(shell, source)


def test_missing_template_is_refused(shell: Shell) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        render(
            make_spec(),
            run_dir=RunDir(shell.folder),
            python="python",
            header={},
            template=Path("/no/such/place"),
        )
