"""Files of a new cluster: directories, keys, devices, configuration, host names; and its ports."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shlex
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from . import config, hosts, requirements
from .build_pyxis import PLUGIN
from .errors import DevClusterError
from .state import Options, Ports, State, is_root, load

# Below the kernel's range for outgoing connections, which might take a port after it is chosen and before it is bound.
PORTS = range(20000, 32000)
# A job step has the socket <root>/spool/<node>/<node>_<job>.<step>, and the path of a socket has at most 107 bytes.
MAX_ROOT_BYTES = 60
NULL_DEVICE = os.makedev(1, 3)
LOGIN_SCRIPTS = Path("/etc/profile.d")


def claim(root: Path) -> None:
    """Make the root if it does not exist. It must be empty or an earlier cluster's root, because `up` empties it."""
    if len(os.fsencode(root)) > MAX_ROOT_BYTES or any(c.isspace() or c in "#%" for c in str(root)):
        raise DevClusterError(
            f"--root {str(root)!r} cannot be used: at most {MAX_ROOT_BYTES} bytes (paths of Unix sockets are short), "
            "without spaces, # and %"
        )
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()) and not is_root(root):
        raise DevClusterError(
            f"--root {root} contains other files, and `up` empties its root: choose a new or empty directory"
        )


def create(root: Path, options: Options, *, pyxis: str = "") -> State:
    """Create a cluster's files, with names and ports that no other cluster on this machine has. Saves the state."""
    if pyxis and not (plugin := Path(pyxis, PLUGIN)).is_file():
        raise DevClusterError(f"--pyxis {pyxis}: there is no {plugin}; create such a prefix with build-pyxis")
    clear(root, keep_logs=False)
    root.chmod(0o755)  # munge requires that every user can reach its socket
    for name in ("etc/daemons", "run", "spool/slurmctld", "log", "dev", "tmp"):
        (root / name).mkdir(parents=True)
    with hosts.locked():
        _drop_lost_hosts()
        options = dataclasses.replace(options, prefix=options.prefix or _free_prefix(options))
        ports, folders = _free_ports(options.nodes), requirements.slurm_folders()
        state = State(root=root, options=options, ports=ports, slurm_folders=folders, pyxis=pyxis)
        if taken := {*state.nodes, state.controller} & hosts.taken_names():
            raise DevClusterError(
                f"--prefix {options.prefix!r}: {hosts.HOSTS} already contains {', '.join(sorted(taken))}, for another "
                "cluster or machine. Choose another prefix, or omit --prefix to use a free one"
            )
        state.save()
        hosts.add([*state.nodes, state.controller], root)
    for node in state.nodes:
        (root / "spool" / node).mkdir()
    _write_files(state)
    return state


def clear(root: Path, *, keep_logs: bool) -> None:
    """Remove a cluster's files from its root."""
    root.chmod(0o755)  # munge requires that every user can reach its socket
    for name in ("etc", "run", "spool", "dev", "tmp", "mysql", *([] if keep_logs else ["log"])):
        if (root / name).exists():
            shutil.rmtree(root / name)


def _write_files(state: State) -> None:
    # Nodes connect to an srun outside them through 127.0.0.1. With loopback_only it listens at this machine's own name.
    _write(state.slurm_conf, config.slurm_conf(state, loopback_only=_this_host_is_loopback()))
    _write(state.daemons_conf, config.slurm_conf(state, loopback_only=True))
    _write(state.daemons_conf.with_name("slurmdbd.conf"), config.slurmdbd_conf(state), mode=0o600)
    if state.options.gpus:
        _write(state.daemons_conf.with_name("gres.conf"), config.gres_conf(state))
    if state.folders:
        _write_login_scripts(state)
    if state.pyxis:
        for conf in (state.slurm_conf, state.daemons_conf):
            _write(conf.with_name("plugstack.conf"), config.plugstack_conf(state))
    _write(state.root / "etc" / "munge.key", os.urandom(128), mode=0o600)
    for i in range(state.options.gpus):
        # The same device as /dev/null: Slurm only needs a character device, and this one is no real GPU.
        os.mknod(state.root / "dev" / f"nvidia{i}", stat.S_IFCHR | 0o666, NULL_DEVICE)


def _write_login_scripts(state: State) -> None:
    """Copy the system's login scripts and add one that sets PATH, because /etc/profile resets PATH in a login shell."""
    if LOGIN_SCRIPTS.is_dir():
        shutil.copytree(LOGIN_SCRIPTS, state.login_scripts, symlinks=True)
    else:
        raise DevClusterError(
            f"{LOGIN_SCRIPTS} is missing: the nodes' login shells need it to find the programs in {state.folders[0]}"
        )
    folders = os.pathsep.join(map(shlex.quote, state.folders))
    _write(state.login_scripts / "zz-slurm.sh", f'PATH={folders}:"$PATH"\n')


def _write(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    data = content.encode() if isinstance(content, str) else content
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)


def _this_host_is_loopback() -> bool:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except socket.gaierror:
        return False
    return found[0][4][0] == "127.0.0.1"


def _drop_lost_hosts() -> None:
    """Remove the lines of clusters whose state file no longer exists."""
    for root in hosts.marked_roots():
        if load(root) is None:
            hosts.remove(root)


def _free_prefix(options: Options) -> str:
    taken = hosts.taken_names()
    for prefix in _prefixes():
        state = State(Path(), dataclasses.replace(options, prefix=prefix), Ports(0, 0, ()))
        if not {*state.nodes, state.controller} & taken:
            return prefix
    raise DevClusterError(f"every prefix from n to nzz is taken in {hosts.HOSTS}: choose another with --prefix")


def _prefixes() -> Iterator[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    for length in range(3):
        for rest in itertools.product(letters, repeat=length):
            yield "n" + "".join(rest)


def _free_ports(nodes: int) -> Ports:
    reserved: set[int] = set()
    for root in hosts.marked_roots():
        if (other := load(root)) is not None:
            reserved |= other.ports.all()
    wanted = nodes + 2
    found = []
    for port in random.sample(PORTS, k=len(PORTS)):
        if port not in reserved and _can_bind(port):
            found.append(port)
        if len(found) == wanted:
            return Ports(slurmctld=found[0], slurmdbd=found[1], slurmd=tuple(found[2:]))
    raise DevClusterError(f"found only {len(found)} of {wanted} free ports from {PORTS.start} to {PORTS.stop - 1}")


def _can_bind(port: int) -> bool:
    with socket.socket() as candidate:
        try:
            candidate.bind(("", port))
        except OSError:
            return False
        return True
