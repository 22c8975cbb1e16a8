"""The arithmetic of a step, and how fast this CPU multiplies matrices in each.

The name of a CPU and its flags do not tell. Intel's AVX-512 BF16 without AMX multiplies bf16 half as fast as fp32, and
AMD's twice as fast; at narrow products a BLAS may reach a quarter of oneDNN's rate (docs/decisions.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recspec.base import machine
from recspec.base.errors import RecspecError
from recspec.base.files import read_json, whole_file
from recspec.loading import Ranks


@contextmanager
def arithmetic(precision: str, deterministic: bool) -> Iterator[None]:
    """Set the precision of matrix products and, if asked, deterministic kernels until the end of the block."""
    before, was_deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    if deterministic:  # cuBLAS needs this variable and reads it at its first use
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        if deterministic:  # torch's function loads its compiler
            torch.use_deterministic_algorithms(was_deterministic)


SHAPES = {"wide": (512, 256, 256), "narrow": (2048, 32, 80)}
"""Rows, inputs and outputs of a layer of an MLP, and of a layer over events (of DIN's attention)."""
ROUNDS = 7
"""Measurements, in CPU time, of which the fastest counts: other work on the machine slows some."""
ONEDNN_PAYS = 2.0
"""Speed of narrow products through oneDNN, relative to the BLAS, from which they go that way.

oneDNN needs even steps (recspec.models.layers.events): more places, a mask, more copies. At equal rates they make a
step of SIM 1.05, of DIN 1.19 and of DIEN 1.26 times as long (docs/decisions.md). Narrow products are a third to a
half of it."""
SWITCHES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_")
"""Prefixes of variables of the environment that change the rates."""
MOST_BYTES = 1 << 12
"""Size of a file of rates, ten times as large as needed."""

Rate = Annotated[float, Field(gt=0, lt=1e6, allow_inf_nan=False)]


class ProductRates(BaseModel):
    """GFLOP/s of a layer's three products (forward, and the gradients of input and weight) by `train.precision`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    wide_fp32: Rate
    wide_tf32: Rate
    wide_bf16: Rate
    """With the conversions of autocast."""
    narrow_fp32: Rate
    narrow_tf32: Rate

    @property
    def onednn(self) -> float:
        """The speed of narrow products through oneDNN, relative to fp32 through the BLAS."""
        return self.narrow_tf32 / self.narrow_fp32

    @property
    def onednn_pays(self) -> bool:
        """Whether narrow products go through oneDNN."""
        return self.onednn >= ONEDNN_PAYS

    def speed(self, precision: Literal["tf32", "bf16"], *, narrow: bool) -> float:
        """The speed of products relative to fp32; with `narrow`, half of the operations are narrow products.

        In bf16 as in tf32, narrow products over events have tensors in fp32, and go through oneDNN where that pays.
        """
        wide = self.wide_tf32 if precision == "tf32" else self.wide_bf16
        if not narrow:
            return wide / self.wide_fp32
        narrow_rate = self.narrow_tf32 if self.onednn_pays else self.narrow_fp32
        return (1 / self.wide_fp32 + 1 / self.narrow_fp32) / (1 / wide + 1 / narrow_rate)


def rates_of_all(ranks: Ranks) -> ProductRates:
    """The first rank's rates, on every rank: all have to choose the same arithmetic."""
    own = kept_rates()
    if ranks.world_size == 1:
        return own
    names = [*ProductRates.model_fields]
    found = ranks.gather(torch.tensor([getattr(own, name) for name in names], dtype=torch.float64))
    return ProductRates(**dict(zip(names, found[: len(names)].tolist(), strict=True)))


def kept_rates() -> ProductRates:
    """This machine's rates, measured at the first call for this CPU, torch, switches and number of threads."""
    switches = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(SWITCHES))
    return _kept_rates((torch.__version__, str(torch.get_num_threads()), machine.processor(), *switches), _folder())


@cache
def _kept_rates(surroundings: tuple[str, ...], folder: Path | None) -> ProductRates:
    if folder is None:
        return measure_rates()
    digest = hashlib.sha256("\0".join(surroundings).encode("utf-8", "surrogateescape")).hexdigest()
    file = folder / f"product-rates-{digest[:32]}.json"
    found = _read(file)
    if found is None:
        found = measure_rates()
        text = json.dumps({name: round(rate, 3) for name, rate in found.model_dump().items()})
        # A folder that can't be written to costs the next process a measurement.
        with suppress(RecspecError, OSError), whole_file(file) as temporary:
            temporary.write_text(text, "utf-8")
    return found


def _folder() -> Path | None:
    """The cache folder of the user: $XDG_CACHE_HOME or ~/.cache; None for a user without a home."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):
        return (given if given.is_absolute() else Path.home() / ".cache") / "recspec"
    return None


def _read(file: Path) -> ProductRates | None:
    """The rates of a file; None if it is missing, damaged or not a file of rates."""
    with suppress(RecspecError, OSError, ValidationError):
        return ProductRates.model_validate(read_json(file, most=MOST_BYTES))
    return None


def measure_rates() -> ProductRates:
    """Measure, in a quarter of a second on a core of a server."""
    layers = {name: _layer(*name.split("_")) for name in ProductRates.model_fields}
    for layer in layers.values():  # oneDNN compiles
        layer()
    best = dict.fromkeys(layers, 0.0)
    for _ in range(ROUNDS):  # in turns: what slows the machine for a while slows all
        for name, layer in layers.items():
            best[name] = max(best[name], layer())
    return ProductRates(**{name: max(1e-6, min(rate, 1e6 - 1)) for name, rate in best.items()})


def _layer(shape: str, precision: str) -> Callable[[], float]:
    """A function that computes a layer's products, and returns their GFLOP/s in CPU time."""
    rows, inputs, outputs = SHAPES[shape]
    x, weight, slope = torch.rand(rows, inputs), torch.rand(outputs, inputs), torch.rand(rows, outputs)
    times = 1 if shape == "wide" else 3

    def layer() -> float:
        half = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
        with torch.no_grad(), arithmetic(precision, deterministic=False), half:
            start = time.process_time()
            for _ in range(times):
                x @ weight.t(), slope @ weight, slope.t() @ x
            return times * 6e-9 * rows * inputs * outputs / max(time.process_time() - start, 1e-9)

    return layer
