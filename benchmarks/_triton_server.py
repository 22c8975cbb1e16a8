"""NVIDIA's Triton Inference Server, as the nvidia-pytriton wheel contains it: version 2.51 for a CPU, with the Python
backend alone. Started and ended here for the benchmarks that speak to it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

REQUIREMENTS = ("nvidia-pytriton==0.7.0", "tritonclient[http,grpc]==2.73.0", "numpy==1.26.4", "onnxruntime==1.31.1")
"""numpy 1.26: the Python backend of this server corrupts tensors of numpy 2."""


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
    ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
    command = [
        *before,
        str(home / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={home / 'backends'}",
        f"--cache-directory={home / 'caches'}",
        "--model-control-mode=explicit",
        *(f"--{name}-port={port}" for name, port in ports.items()),
    ]
    environ = {
        **os.environ,
        # The stub must find the library of the interpreter it stands for, not another one of the system's.
        "LD_LIBRARY_PATH": f"{Path(site) / 'nvidia_pytriton.libs'}:{libraries}",
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    with started("triton", command, ports["http"], folder, environ) as process:
        yield process, ports


@contextmanager
def started(
    name: str, command: Sequence[str], port: int, folder: Path, environ: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers at a port, and whose log is `folder/NAME.log`; it is ended in the end."""
    file = folder / f"{name}.log"
    with file.open("wb") as log:
        process = subprocess.Popen(command, env=dict(environ), stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(process, port, file)
            yield process
        finally:
            process.terminate()
            process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path, seconds: float = 60) -> None:
    """Return when the server answers; its log is the error otherwise."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"{log.stem} did not start:\n{log.read_text()[-4000:]}")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
