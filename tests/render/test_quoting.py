"""Quoting of hostile values: each passes through a real bash byte for byte, or is refused."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import SpecError
from hpcaccel.render import render
from hpcaccel.render.context import checked, comment, directive, pattern
from hpcaccel.spec import ClusterProfile

from .conftest import Shell, make_spec

PIECES = [
    "'", '"', "\\", "$(touch pwned)", "`touch pwned`", "${HOME}", "$HOME", "~", "*", "?", "[a]", "{a,b}", "!x", "#",
    " # ", " ", "\t", ";", "&", "|", "<", ">", "(", ")", "%j", "%%", "%", "-n", "--", "=", "a", "é", "☃", "😀", "\x01",
    "\x1b[0m", "\x7f", "\u0085", "\u00a0", "\u2028", "{{ x }}", "{% if %}", "&amp;", "\\n", "$'\\n'", "EOF", "'\"'\"'",
]  # fmt: skip

lines = st.lists(
    st.one_of(st.sampled_from(PIECES), st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r"))
).map("".join)
words = lines.filter(lambda text: bool(text.strip()))
file_names = words.filter(lambda text: "/" not in text and len(text.encode()) <= 200 and text not in (".", ".."))
LONG = "".join(PIECES) * 60  # more than 7,000 characters


@pytest.fixture(scope="module")
def shells() -> Iterator[Callable[[], Shell]]:
    made: list[Path] = []

    def make() -> Shell:
        made.append(Path(tempfile.mkdtemp(prefix="hpcaccel-quoting-")))
        return Shell(made[-1])

    yield make
    for folder in made:
        shutil.rmtree(folder)


def records(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\0")[:-1] if path.exists() else []


NOTED = '() { printf "%s\\0" "$@" >> "$HOME/noted"; }'


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=lines, word=words, name=file_names, site=lines)
@example(value=LONG, word=LONG, name="a b", site=LONG)
@example(value="", word="-x", name="-n 'q' \"$(touch pwned)\" `id` # é", site="")
@example(value="\\", word="\\", name="\\", site="\\")
@example(value="'", word="''", name="'", site="'")
def test_hostile_values_reach_the_supervisor_unchanged(
    shells: Callable[[], Shell], value: str, word: str, name: str, site: str
) -> None:
    shell = shells()
    place = shell.folder / name
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "activate").write_text("export ACTIVATED=yes\n")
    stub = place / "python"
    shutil.copy(shell.python, stub)
    spec = make_spec(
        environment={
            "env": {"VALUE": value},
            "venv": str(place),
            "modules": [word],
            "setup": [f"export FROM_SETUP={shlex.quote(value)}", f"true # {value}"],
        },
        slurm={"comment": word, "mail_user": word, "extra": {"bb": value}},
        workdir=str(place),
    )
    run = RunDir(place / "run")
    try:
        text = render(
            spec,
            run_dir=run,
            python=str(stub),
            profile=ClusterProfile(name="alps", env={"SITE": site}),
            header={"spec": value, "commit": word},
        )
    except SpecError as error:
        if "\\" not in name:  # Slurm cannot escape a backslash in a log path
            raise AssertionError("refused without need") from error
        return
    started = shell.run(text, {"BASH_FUNC_module%%": NOTED}, python=stub)
    assert started.code == 0, started.output
    assert started.argv == [f"{run.path}/node.pyz", "batch", "supervise", str(run.path)]
    assert started.cwd == str(place)
    env = started.env
    assert (env["VALUE"], env["SITE"], env["FROM_SETUP"], env["ACTIVATED"]) == (value, site, value, "yes")
    assert records(shell.folder / "noted") == ["load", word]
    assert not list(shell.folder.rglob("pwned"))
    options = sbatch_options(text)
    assert options["comment"] == options["mail-user"] == word
    assert options["bb"] == value
    assert options["output"].replace("%%", "%") == str(run.slurm_log)


@settings(max_examples=15, deadline=None)
@given(word=words)
@example(word=LONG)
def test_hostile_setup_line_and_conda_name_arrive_unchanged(shells: Callable[[], Shell], word: str) -> None:
    shell = shells()
    run = RunDir(shell.folder / "run")
    line = f"false # {word}"
    spec = make_spec(environment={"conda": word, "setup": [line]})
    text = render(spec, run_dir=run, python=str(shell.python), header={}, workdir=shell.folder)
    started = shell.run(text, {"BASH_FUNC_conda%%": NOTED})
    assert started.argv[1:] == ["setup-failed", str(run.path), "1", f"environment.setup: {line}"]
    assert records(shell.folder / "noted") == ["activate", word]


def sbatch_options(text: str) -> dict[str, str]:
    """The #SBATCH options as sbatch parses them: single and double quotes, and backslash escapes inside both."""
    options = {}
    for line in text.split("\n"):
        if not line.startswith("#SBATCH "):
            continue
        word, quote, escaped = "", "", False
        for character in line.removeprefix("#SBATCH "):
            if escaped:
                word, escaped = word + character, False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
            elif not quote and character in "'\"":
                quote = character
            elif not quote and (character.isspace() or character == "#"):
                break
            else:
                word += character
        name, _, value = word.removeprefix("--").partition("=")
        options[name] = value
    return options


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\0b", "\ud800"])
def test_characters_that_no_script_can_hold_are_refused(text: str) -> None:
    for quote in (checked, directive, pattern):
        with pytest.raises(SpecError, match="not allowed in a batch script"):
            quote(text)


@pytest.mark.parametrize("value", [None, True, ["a"], {"a": 1}])
def test_values_other_than_text_and_numbers_are_refused(value: object) -> None:
    with pytest.raises(SpecError, match="cannot be written"):
        checked(value)


def test_comment_with_line_breaks_stays_on_one_line() -> None:
    assert comment("a\nb\u2028rm -rf\x1b[0m\ud800") == "a b rm -rf [0m?"


def test_log_path_escapes_percent_and_refuses_backslash() -> None:
    assert pattern("/runs/50%/x y") == "/runs/50%%/x y"
    with pytest.raises(SpecError, match="backslash"):
        pattern("/runs/a\\b")
