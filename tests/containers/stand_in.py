"""A stand-in for Apptainer's ``exec`` and ``pull`` with bubblewrap: another root file system, the same command line.

An "image" is a file that contains the path of a directory of libraries. Its root file system has the system's /usr, and
the libraries under /opt/libraries, which is on PYTHONPATH. hpcaccel, the tests and their environment are not in it.
The options follow Apptainer's help: --nv, --bind src[:dest[:opts]], --pwd.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main(words: list[str]) -> None:
    if words[0] == "pull":
        pull(words[1:])
    assert words[0] == "exec", words
    binds, workdir, rest = parse(words[1:])
    image, *command = rest
    os.environ["APPTAINER_CONTAINER"] = image
    os.environ["PYTHONPATH"] = "/opt/libraries"
    for name in [name for name in os.environ if name.startswith("APPTAINERENV_")]:
        os.environ[name.removeprefix("APPTAINERENV_")] = os.environ.pop(name)
    os.environ["PATH"] = "/usr/bin:/bin"
    # Unlike Apptainer, bubblewrap would be killed by a signal that Slurm sends to every process of a step.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    os.execvp("bwrap", ["bwrap", *root(Path(image).read_text().strip()), *binds, "--chdir", workdir, "--", *command])


def parse(words: list[str]) -> tuple[list[str], str, list[str]]:
    binds: list[str] = []
    workdir = "/"
    while words[0].startswith("--"):
        flag = words.pop(0)
        if flag == "--bind":
            source, target, *options = words.pop(0).split(":")
            binds += ["--ro-bind" if options == ["ro"] else "--bind", source, target]
        elif flag == "--pwd":
            workdir = words.pop(0)
        else:
            assert flag == "--nv", flag
    return binds, workdir, words


def root(libraries: str) -> list[str]:
    links = (["--symlink", f"usr/{name}", f"/{name}"] for name in ("bin", "lib", "lib64", "sbin"))
    packages = (
        ["--ro-bind", str(path.resolve()), f"/opt/libraries/{path.name}"] for path in sorted(Path(libraries).iterdir())
    )
    return [
        *(
            "--ro-bind",
            "/usr",
            "/usr",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--tmpfs",
            "/tmp",
            "--dir",
            "/opt/libraries",
        ),
        *("--ro-bind", "/etc/passwd", "/etc/passwd", "--ro-bind", "/etc/hosts", "/etc/hosts"),
        *(word for link in links for word in link),
        *(word for package in packages for word in package),
    ]


def pull(words: list[str]) -> None:
    flags, (target, uri) = words[:-2], words[-2:]
    assert flags == ["--force"], flags
    log = Path(os.environ["STAND_IN_LOG"])
    with log.open("a") as file:
        file.write(f"pull {uri}\n")
    if "absent" in uri:
        sys.exit("FATAL: While making image from oci registry: manifest unknown")
    Path(target).write_text(os.environ["STAND_IN_LIBRARIES"])
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
