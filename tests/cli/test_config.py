"""`hpcaccel config`: the questions on a real terminal, and the other commands for Accelerate's configuration file."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Shell

DOWN, UP, ENTER, INTERRUPT = "\x1b[B", "\x1b[A", "\r", "\x03"
SECONDS = 60


class Terminal:
    """The program on a pseudo-terminal."""

    def __init__(self, shell: Shell, *words: str) -> None:
        pid, self.screen = pty.fork()
        if pid == 0:
            os.chdir(shell.folder)
            environment = {**shell.environment, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
            os.execve(sys.executable, [sys.executable, "-m", "hpcaccel", *words], environment)
        self.pid = pid
        self.seen = ""
        self.code: int | None = None

    def wait_for(self, text: str) -> None:
        """Read until ``text`` is on the screen, after what was found before."""
        end = time.monotonic() + SECONDS
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not appear: {self.seen[-2000:]}"
            self._read(1)
        self.seen = self.seen.partition(text)[2]

    def _read(self, seconds: float) -> bool:
        if not select.select([self.screen], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.screen, 65536)
        except OSError:  # the program has ended
            return False
        if b"\x1b[6n" in data:  # the program asks where the cursor is
            os.write(self.screen, b"\x1b[1;1R")
        self.seen += data.decode(errors="replace")
        return bool(data)

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def answer(self, question: str, keys: str = "") -> None:
        self.wait_for(question)
        self.type(keys + ENTER)

    def end(self) -> int:
        """The program's exit code."""
        while self._read(SECONDS):
            pass
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def close(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.screen)


@pytest.fixture
def terminal(shell: Shell) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*words: str) -> Terminal:
        opened.append(Terminal(shell, *words))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def file(shell: Shell) -> Path:
    shell.environment["HF_HOME"] = str(shell.folder / "hf")
    return shell.folder / "hf/accelerate/default_config.yaml"


def test_arrow_keys_choose_and_the_answers_are_written(file: Path, terminal: Callable[..., Terminal]) -> None:
    screen = terminal("config")
    screen.answer("Where will the training run?")  # the default: several GPUs
    screen.answer("How many machines", "\x7f2")  # another number
    screen.answer("Which of them is this one?", DOWN)
    screen.answer("Address of machine 0", "n01")
    screen.answer("Its port")
    screen.answer("local network")
    screen.answer("Compare shapes", UP)  # yes
    screen.answer("torch.compile")
    screen.answer("Shard the model?", DOWN)
    screen.answer("Free gathered")
    screen.answer("in CPU memory")
    screen.answer("Which modules")
    screen.answer("class names", "Block")
    screen.answer("How are models saved", DOWN)
    screen.answer("rank 0 only")
    screen.answer("Recompute")
    screen.answer("Combine")
    screen.answer("How many GPUs", "\x7f8")
    screen.answer("Which devices")
    screen.answer("near their GPU")
    screen.answer("Precision?", UP)
    screen.wait_for("wrote")
    assert screen.end() == 0
    written = yaml.safe_load(file.read_text())
    expected = {
        "distributed_type": "FSDP", "num_machines": 2, "machine_rank": 1, "main_process_ip": "n01",
        "main_process_port": 29500, "num_processes": 8, "debug": True, "mixed_precision": "fp16", "same_network": True,
    }  # fmt: skip
    assert {key: written[key] for key in expected} == expected
    assert written["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    assert written["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "Block"


def test_wrong_number_is_refused_at_once(file: Path, terminal: Callable[..., Terminal]) -> None:
    screen = terminal("config")
    screen.answer("Where will")
    screen.answer("How many machines", "\x7fmany")
    screen.wait_for("a whole number of at least 1")
    screen.type("\x7f" * 4 + "1" + ENTER)
    screen.wait_for("Compare shapes")


@pytest.mark.parametrize("after", ["Where will", "Compare shapes"])
def test_interrupt_leaves_the_old_file_untouched(file: Path, terminal: Callable[..., Terminal], after: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("debug: true\n")
    screen = terminal("config")
    if after != "Where will":
        screen.answer("Where will")
        screen.answer("How many machines")
    screen.wait_for(after)
    screen.type(INTERRUPT)
    assert screen.end() == 130
    assert "Traceback" not in screen.seen
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    assert file.read_text() == "debug: true\n"


def test_without_a_terminal_the_message_names_the_option(shell: Shell, file: Path, refused: Callable[..., str]) -> None:
    assert "`hpcaccel config --default` writes a file without questions" in refused(shell("config"))
    assert not file.exists()


@pytest.mark.parametrize("words", [["config", "default"], ["config", "--default"]])
def test_default_asks_nothing_and_keeps_an_existing_file(shell: Shell, file: Path, words: list[str]) -> None:
    result = shell(*words)
    assert result.returncode == 0, result.stderr
    assert json.loads(file.read_text())["num_processes"] == 1
    assert "there is no GPU here" in result.stderr
    file.write_text("debug: true\n")
    again = shell(*words)
    assert (again.returncode, "already exists and is kept" in again.stderr) == (0, True)
    assert file.read_text() == "debug: true\n"


def broken_torch(shell: Shell) -> None:
    shell.write("torch.py", "raise ImportError('libcudart.so.12: cannot open shared object file')")
    shell.environment["PYTHONPATH"] = f"{shell.folder}:{shell.environment['PYTHONPATH']}"


@pytest.mark.parametrize("option", ["--config-file", "--config_file"])
def test_default_takes_accelerates_options(shell: Shell, option: str) -> None:
    broken_torch(shell)
    shell("config", "default", option, "my.yaml", "--mixed_precision", "bf16")
    assert json.loads((shell.folder / "my.yaml").read_text())["mixed_precision"] == "bf16"


def test_precision_without_questions(shell: Shell, file: Path, refused: Callable[..., str]) -> None:
    broken_torch(shell)
    assert "--mixed-precision needs --default" in refused(shell("config", "--mixed-precision", "bf16"))
    assert "go with `hpcaccel config` alone" in refused(shell("config", "--mixed-precision", "bf16", "show"))
    shell("config", "--default", "--mixed-precision", "bf16")
    assert json.loads(file.read_text())["mixed_precision"] == "bf16"


def test_default_without_torch_says_so(shell: Shell, file: Path) -> None:
    broken_torch(shell)
    result = shell("config", "default")
    assert result.returncode == 0
    assert "torch cannot be imported here" in result.stderr
    assert "libcudart.so.12" in result.stderr


def test_show_and_update(shell: Shell, file: Path, refused: Callable[..., str]) -> None:
    assert "there is no configuration file in" in refused(shell("config", "show"))
    file.parent.mkdir(parents=True)
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\nipex_config: {}\n")
    shown = shell("config", "show")
    assert yaml.safe_load(shown.stdout) == {"distributed_type": "MULTI_GPU", "num_processes": 4}
    assert f"# {file}\n" in shown.stdout
    assert "ipex_config has no effect" in shown.stdout
    document = json.loads(shell("config", "show", "--json").stdout)
    assert document == {"path": str(file), "config": {"distributed_type": "MULTI_GPU", "num_processes": 4}}
    updated = shell("config", "update")
    assert "removed ipex_config\n" in updated.stdout
    assert f"kept the old one as {file}.bak" in updated.stdout
    assert shell("config", "update").stdout == f"{file} is up to date\n"
    assert "is not a known key" in refused(shell("config", "show", "--config-file", str(shell.write("x", "a: 1"))))


def test_to_spec_is_valid_for_validate(shell: Shell, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\nmixed_precision: bf16\n")
    shell.write("my_train.py", "import hpcaccel\n")
    made = shell("config", "to-spec", "my_train.py")
    assert made.returncode == 0, made.stderr
    shell.write("job.yaml", made.stdout)
    result = shell("validate", "job.yaml", "--json")
    assert result.returncode == 0, result.stderr
    spec = json.loads(result.stdout)["spec"]
    assert (spec["name"], spec["slurm"]["nodes"], spec["slurm"]["gpus_per_node"]) == ("my_train", "2", "4")
    assert spec["runtime"]["mixed_precision"] == "bf16"


SCRIPT = """\
import os, sys
print(os.environ["ACCELERATE_MIXED_PRECISION"], os.environ.get("RANK"), sys.argv[1])
"""


def test_accelerate_launches_with_our_file(shell: Shell, terminal: Callable[..., Terminal]) -> None:
    """The real `accelerate launch`, with a file that the questions have made."""
    pytest.importorskip("accelerate")
    screen = terminal("config", "--config-file", "ours.yaml")
    screen.answer("Where will", UP)  # one process
    screen.answer("on the CPU", UP)  # yes
    screen.answer("torch.compile")
    screen.answer("Precision?")
    assert screen.end() == 0
    script = shell.write("train.py", SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "ours.yaml", str(script), "word"]
    done = subprocess.run(
        launch, cwd=shell.folder, env=shell.environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["bf16", "None", "word"]


def test_page_names_only_commands_and_options_that_exist(shell: Shell) -> None:
    import re

    page = (Path(__file__).parents[2] / "docs/config.md").read_text()
    found = set(re.findall(r"`(hpcaccel (?:config|env|estimate-memory)[^`]*)`", page))
    assert len(found) >= 8
    helps: dict[str, str] = {}
    for line in found:
        words = line.split()
        group = words[1:3] if words[1] == "config" and len(words) > 2 and words[2][0].islower() else words[1:2]
        name = " ".join(group)
        if name not in helps:
            result = shell(*group, "--help")
            assert result.returncode == 0, line
            helps[name] = result.stdout
    for option in re.findall(r"`(--[a-z-]+)[^`]*`", page):
        assert any(option in text for text in helps.values()), option
