"""A Ray cluster: an existing one, or one that is started on this machine alone."""

# Generated from nbs/core/ray_cluster.ipynb; after an edit here run `python -m minivllm.literate write-back`.

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import urlsplit

from minivllm.core.kv_connector import runs

logger = logging.getLogger("minivllm.runtime")

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # one machine, 127.0.0.1
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # Ray would run its workers behind everybody else
    "RAY_worker_register_timeout_seconds": "600",  # a busy machine takes longer than Ray's minute to import torch
}


def import_ray() -> Any:
    """The module `ray`. Raises ImportError that says how to get it."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ImportError("this needs Ray, which is not installed: pip install 'minivllm[scale]'") from error
    return ray


_VITAL = "MINIVLLM_RAY_PROCESSES"  # for processes of this machine that join

_GUARD = """
import glob, os, shutil, signal, sys, time
folder = sys.argv[1]
ended = not sys.stdin.read()
for _ in range(100 * ended):
    found = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link).startswith(folder):
                found.add(int(link.split("/")[2]))
        except OSError:
            pass
    found -= {os.getpid(), os.getppid()}
    if not found:
        break
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.05)
shutil.rmtree(folder, ignore_errors=True)
"""


def start_guard(folder: str) -> "subprocess.Popen[bytes]":
    """A process that, once this one has ended, kills every process that has a file in `folder` open, and removes the folder.

    It finds processes by `/proc`; without one (macOS) it only removes the folder. It also does only that after any message.
    """
    command = [sys.executable, "-I", "-S", "-c", _GUARD, folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


class _Connection:
    """This process's connection: users, and what has to be ended with the last of them."""

    users = 0
    foreign = False  # made by someone else
    folder = ""
    guard: "subprocess.Popen[bytes] | None" = None
    vital: ClassVar[dict[str, int]] = {}  # processes of a cluster of this machine without which there is none
    death = ""  # which of them has ended
    told: ClassVar[list[Callable[[str], None]]] = []


def join_cluster() -> Any:
    """Ray, connected; `leave_cluster` must follow.

    Returns:
        The module `ray`. If nothing is connected yet and `RAY_ADDRESS` is not set, a cluster of this machine has been started.

    Raises:
        ImportError: Ray is not installed. ConnectionError: there is no cluster at `RAY_ADDRESS`, or it does not start.
    """
    address = os.environ.get("RAY_ADDRESS") or None
    with _changed_environment(_LOOPBACK if _is_here(address) else {}):
        ray = import_ray()
        if _Connection.users == 0:
            _Connection.foreign = ray.is_initialized()
            if not _Connection.foreign:
                _connect(ray, address)
    _Connection.users += 1
    return ray


def leave_cluster() -> None:
    """Undo one `join_cluster`. With the last one, a cluster that was started for it ends."""
    _Connection.users -= 1
    if _Connection.users or _Connection.foreign:
        return
    _Connection.vital = {}
    import_ray().shutdown()
    _end_guard(b"" if _Connection.death else b"all is well")
    _Connection.death, _Connection.told = "", []


def on_cluster_death(callback: Callable[[str], None]) -> None:
    """Have a function called if the cluster of this machine loses its raylet or its GCS, with a message that names it.

    It is called in a thread that watches, or at once if that has happened. Ray itself would notice after a minute, and then end this process.
    """
    _Connection.told.append(callback)
    if _Connection.death:
        callback(_Connection.death)


def cluster_death() -> str:
    """A message that names the process that the cluster has lost: it answers no call any more. Empty while it lives."""
    return _Connection.death


def _watch(vital: dict[str, int]) -> None:
    """Look at the processes of the cluster, and start its guard again if that was killed, until the cluster is left or has lost one."""
    while True:
        ended = next((f"{name} (process {pid})" for name, pid in vital.items() if not runs(pid)), None)
        unguarded = _Connection.guard is not None and _Connection.guard.poll() is not None
        if _Connection.vital is not vital:  # the cluster was left: its processes were to end
            return
        if ended is not None:
            _Connection.death = f"Ray's {ended} has ended, and its cluster with it"
            for callback in _Connection.told:
                callback(_Connection.death)
            return
        if unguarded:
            _Connection.guard = start_guard(_Connection.folder)
        time.sleep(0.2)


def cluster_folder() -> str | None:
    """The folder of a cluster that this process has started, which ends with it; None for another cluster."""
    return _Connection.folder or None


def cluster_environment() -> dict[str, str]:
    """What another process of this machine needs in its environment to join the cluster that this one has joined."""
    ray = import_ray()
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, _VITAL: json.dumps(_Connection.vital)}


def is_local_cluster() -> bool:
    """Whether the cluster that this process has joined keeps to this machine."""
    return _is_here(import_ray().get_runtime_context().gcs_address)


def _is_here(address: str | None) -> bool:
    """Whether a cluster is one that keeps to this machine."""
    return address is None or urlsplit(f"//{address}").hostname in ("127.0.0.1", "localhost", "::1")


def _find_vital(ray: Any, address: str | None) -> dict[str, int]:
    if address is not None:
        return dict(json.loads(os.environ.get(_VITAL, "{}")))
    started = ray._private.worker._global_node.all_processes
    return {name: started[name][0].process.pid for name in ("gcs_server", "raylet")}


@contextmanager
def _changed_environment(changes: dict[str, str]) -> Iterator[None]:
    """Variables that only Ray's processes inherit."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _connect(ray: Any, address: str | None) -> None:
    from ray._private import ray_constants

    on_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if on_main else None
    try:
        _start_or_join(ray, address, ray_constants)
    finally:
        if on_main:  # Ray has put its own there
            signal.signal(signal.SIGTERM, before)
    if vital := _find_vital(ray, address):
        _Connection.vital = vital
        threading.Thread(target=_watch, args=(vital,), name="minivllm-ray-watch", daemon=True).start()


def _start_or_join(ray: Any, address: str | None, ray_constants: Any) -> None:
    ray_constants.ENABLE_RAY_CLUSTER = not _is_here(address)  # it was read when Ray was imported, maybe long ago
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    if address is not None:
        del options["include_dashboard"]
        try:
            ray.init(address=address, **options)
        except Exception as error:
            raise ConnectionError(f"there is no Ray cluster at RAY_ADDRESS={address!r}: {error}") from error
        return
    options |= {"_node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20, "num_cpus": os.cpu_count()}
    for attempt in (1, 2):  # its agents have 15 s to import their modules, which from a cold disk is not always enough
        # sockets are in the folder, and their names must be short
        _Connection.folder = tempfile.mkdtemp(prefix="mv-ray-", dir="/tmp" if os.path.isdir("/tmp") else None)
        _Connection.guard = start_guard(_Connection.folder)
        try:
            with _changed_environment({"PYTHONPATH": _without_slow_imports(_Connection.folder)}):
                ray.init(address="local", _temp_dir=_Connection.folder, **options)
            return
        except Exception as error:
            ray.shutdown()
            _end_guard(b"")  # part of it may run
            if attempt == 2:
                raise ConnectionError(f"a Ray cluster does not start here: {error}") from error
            logger.warning("a Ray cluster has not started; trying once more: %s", error)


def _without_slow_imports(folder: str) -> str:
    """A PYTHONPATH with which Ray's ten processes do not build a grammar of internationalised addresses each, as jsonschema
    does where the packages of its optional formats are installed (JupyterLab brings them). That takes a second of each."""
    with open(os.path.join(folder, "rfc3987_syntax.py"), "w", encoding="utf-8") as file:
        file.write("raise ImportError('not in a process of Ray')\n")
    return os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def _end_guard(message: bytes = b"all is well") -> None:
    """Have the guard remove the folder and, without a message, first end what is left. If it was killed, another guard does that."""
    if (guard := _Connection.guard) is not None:
        guard.communicate(message)
        if guard.returncode:
            start_guard(_Connection.folder).communicate(message)
    _Connection.guard, _Connection.folder = None, ""
