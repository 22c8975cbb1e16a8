"""NVIDIA's Triton Inference Server, as the nvidia-pytriton wheel contains it: version 2.51 for a CPU, with the Python
backend alone. Started and ended here for the benchmarks that speak to it.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

REQUIREMENTS = ("nvidia-pytriton==0.7.0", "tritonclient[http,grpc]==2.73.0", "numpy==1.26.4", "onnxruntime==1.31.1")
"""numpy 1.26: the Python backend of this server corrupts tensors of numpy 2."""

TRIES = 5
"""Sets of ports that are tried; Triton takes no port 0."""


@contextmanager
def triton(
    python: Path, repository: Path, folder: Path, before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]:
    """Triton on a repository, without a model loaded: its process and its ports.

    Args:
        before: Command that starts it, such as `taskset`.
    """
    told = "import sysconfig, sys; print(sysconfig.get_paths()['purelib']); print(sysconfig.get_config_var('LIBDIR'))"
    told += "; print(f'{sys.version_info.major}.{sys.version_info.minor}')"
    shown = subprocess.run([str(python), "-c", told], capture_output=True, text=True, check=True)
    site, libraries, version = shown.stdout.split()
    parts = Path(site) / "pytriton" / "tritonserver"
    home = folder / "tritonserver"
    for name in ("bin", "backends", "caches"):
        shutil.copytree(parts / name, home / name, symlinks=True)
    stub = parts / "python_backend_stubs" / version / "triton_python_backend_stub"
    shutil.copy2(stub, home / "backends" / "python" / stub.name)
    command = [
        *before,
        str(home / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={home / 'backends'}",
        f"--cache-directory={home / 'caches'}",
        "--model-control-mode=explicit",
    ]
    environ = {
        **os.environ,
        # The stub must find the library of the interpreter it stands for, not another one of the system's.
        "LD_LIBRARY_PATH": f"{Path(site) / 'nvidia_pytriton.libs'}:{libraries}",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    with ExitStack() as running:
        for tries_left in reversed(range(TRIES)):
            ports = dict(zip(("http", "grpc", "metrics"), _free_ports(3), strict=True))
            listening = [f"--{name}-port={port}" for name, port in ports.items()]
            try:
                process = running.enter_context(_running("triton", [*command, *listening], folder, environ, ports))
                break
            except SystemExit as error:
                if not tries_left or "already in use" not in str(error):
                    raise
        yield process, ports


@contextmanager
def recspec(
    command: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]:
    """`recspec serve` on free ports: its process and its ports. `command` ends in the models and its other options."""
    ports: dict[str, int] = {}
    command = [*command, "--http-port", "0", "--grpc-port", "0", "--json"]
    with _running("recspec", command, folder, environ, ports) as process:
        yield process, ports


@contextmanager
def _running(
    name: str, command: Sequence[str], folder: Path, environ: Mapping[str, str], ports: dict[str, int]
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers, and whose log is `folder/NAME.log`; it is ended in the end.

    Ports that are not known beforehand are read from the log.
    """
    file = folder / f"{name}.log"
    with file.open("wb") as log:
        process = subprocess.Popen(command, env=dict(environ), stdout=log, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + 60
            while not _answers(ports, file):
                if time.monotonic() > end or process.poll() is not None:
                    raise SystemExit(f"{name} did not start:\n{file.read_text()[-4000:]}")
                time.sleep(0.1)
            yield process
        finally:
            process.terminate()
            process.wait(60)


def _answers(ports: dict[str, int], log: Path) -> bool:
    if not ports:
        ports |= {name: int(port) for name, port in re.findall(r'"(http|grpc)": "[^"]*:(\d+)"', log.read_text())}
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['http']}/v2/health/ready", timeout=1):
            return True
    except (KeyError, OSError):
        return False


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now; another program may take one before Triton does."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
