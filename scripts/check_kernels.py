"""Compile every Triton kernel for GPUs that need not be here, and print registers, shared memory and spills.

    make check-kernels                                # every variant, for three generations of GPUs
    make check-kernels ARGS="--only update --for 90"  # some of them

Spills are bytes of a thread that its registers cannot hold; they go to memory. At the benchmarks' sizes, a spill is an
error. The variants are those that `kernels` and `recurrence_kernels` of `recspec.models.layers` launch. Their functions
run here on tensors without data.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from recspec.models.layers import kernels, recurrence_kernels
from recspec.models.layers.events import Events

GENERATIONS = (80, 90, 100)
"""A100; H100 and H200; B200."""

META = torch.device("meta")
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "i1",
}


Launch = tuple[Callable[..., None], tuple[tuple[str, Any], ...], tuple[tuple[str, int], ...]]
"""A kernel, its arguments' types, its options."""


@dataclass(frozen=True)
class Variant:
    """A kernel with the types and the constants of a launch."""

    kernel: Callable[..., None]
    arguments: tuple[tuple[str, Any], ...]
    """The type of each argument, or `constexpr` and its value."""
    options: tuple[tuple[str, int], ...]
    """The number of warps, and any limit of registers."""
    case: str
    is_benchmark: bool


def cases() -> Iterator[tuple[str, bool, Callable[[], object]]]:
    """Calls of the kernels' functions, each with a name and whether a benchmark makes it."""
    halves = (torch.bfloat16, torch.float16)
    for width, out, ids in itertools.product((1, 19, 64, 128, 300), kernels.FLOATS, (torch.int64, torch.int32)):
        name = f"gather {width} {TYPES[ids]} {TYPES[out]}"
        yield name, width in (1, 64, 128), partial(_gather, width, out, ids)
    for rule, width in itertools.product(get_args(kernels.Rule), (1, 16, 19, 64, 128, 300, kernels.MAX_WIDTH)):
        yield f"update {rule} {width}", width in (1, 16, 64, 128), partial(_update, rule, width, 1 << 20)
    for rule in get_args(kernels.Rule):
        yield f"update {rule} 128 of 2^31 rows", False, partial(_update, rule, 128, 1 << 31)
        for half in halves:
            yield f"update {rule} 128 {TYPES[half]}", False, partial(_update, rule, 128, 1 << 20, half)
    for width, number in itertools.product((1, 16, 64, 128, 256), kernels.FLOATS):
        yield f"add {width} {TYPES[number]}", width in (16, 64, 128, 256), partial(_add, width, number)
    for length, columns, heads, mean in ((90, 2, 1, False), (50, 2, 1, True), (190, 3, 4, False), (256, 4, 4, True)):
        for number in kernels.FLOATS:
            name = f"attend {length}x{columns}x{heads} {TYPES[number]}"
            yield name, columns == 2, partial(_attend, length, columns, heads, mean, number)
    for features, width in ((2, 1), (5, 19), (27, 64), (27, 128), (kernels.MAX_FEATURES, 128)):
        for number, matmul in (
            (torch.float32, "highest"),
            (torch.float32, "high"),
            *((half, "high") for half in halves),
        ):
            name = f"dots {features}x{width} {TYPES[number]}" + ("" if matmul == "high" else " ieee")
            yield name, features == 27, partial(_dots, features, width, number, matmul)
    for hidden, attentive, even in itertools.product((1, 16, 32, 96, 256), (False, True), (False, True)):
        for matmul in ("highest", "high"):
            name = f"recur {hidden}" + " attentive" * attentive + " even" * even + " ieee" * (matmul == "highest")
            yield name, hidden in (32, 96), partial(_recur, hidden, attentive, even, matmul)


def _add(width: int, number: torch.dtype) -> None:
    kernels.add_rows(
        _numbers(1 << 20, width), torch.empty(512, dtype=torch.int64, device=META), _numbers(512, width, number)
    )


def _attend(length: int, columns: int, heads: int, mean: bool, number: torch.dtype) -> None:
    rows = torch.empty(512, length, columns, dtype=torch.int64, device=META)
    present = torch.empty(512, length, dtype=torch.bool, device=META)
    store, queries = _numbers(1 << 20, 16, number), _numbers(512, heads, columns * 16)
    _, sums = kernels.attend(store, rows, present, queries, mean=mean)
    if number == torch.float32:
        kernels.attend_backward(store, rows, present, queries, sums, _numbers(1 << 20, 16), mean=mean)


def _gather(width: int, out: torch.dtype, ids: torch.dtype) -> None:
    rows = torch.empty(26, dtype=torch.int64, device=META)
    kernels.gather_rows(_numbers(1 << 20, width), torch.empty(512, 26, dtype=ids, device=META), rows, rows, out)


def _update(rule: kernels.Rule, width: int, rows: int, number: torch.dtype = torch.float32) -> None:
    weight, ids = _numbers(rows, width, number), torch.empty(512, dtype=torch.int64, device=META)
    column = rule == "rowwise_adagrad"
    states = [_numbers(rows, 1 if column else width, number)] * {"sgd": 0, "adam": 2}.get(rule, 1)
    corrections = _numbers(2) if rule == "adam" else None
    kernels.update_rows(rule, weight, ids, _numbers(512, width, number), states, lr=0.1, corrections=corrections)


def _dots(features: int, width: int, number: torch.dtype, matmul: str) -> None:
    torch.set_float32_matmul_precision(matmul)
    vectors = _numbers(512, features, width, number)
    if kernels.can_dot(vectors):
        kernels.dots_backward(vectors, kernels.dots(vectors))


def _recur(hidden: int, attentive: bool, even: bool, matmul: str) -> None:
    """Even: all rows at every step, of which the last state alone is used, as in SIM."""
    torch.set_float32_matmul_precision(matmul)
    rows = torch.empty(512, dtype=torch.int64, device=META)
    held, sizes = (rows, (256, 256)) if even else (None, (300, 212))
    events = Events(rows, rows, rows[:300], 2, held=held, sizes=sizes, order=rows[:300], starts=rows[:2])
    gates, weights = _numbers(512, 3 * hidden), _numbers(3 * hidden, hidden)
    attention = _numbers(512) if attentive else None
    states, last, recalled = recurrence_kernels.recur(gates, attention, weights, events)
    of_states = None if attentive else states
    recurrence_kernels.recur_backward(
        of_states, last if attentive else None, gates, attention, weights, states, recalled, events
    )


def _numbers(*given: Any) -> Tensor:
    """A tensor without data, of a shape and perhaps a type."""
    number = given[-1] if isinstance(given[-1], torch.dtype) else torch.float32
    return torch.empty([each for each in given if isinstance(each, int)], dtype=number, device=META)


def variants(only: Sequence[str]) -> list[Variant]:
    """The distinct variants of all cases whose names begin with one of `only`."""
    found: dict[tuple[Any, ...], Variant] = {}
    for case, is_benchmark, call in cases():
        if case.startswith(tuple(only)):
            for key in _launches(call):
                if key not in found or (is_benchmark and not found[key].is_benchmark):
                    found[key] = Variant(*key, case, is_benchmark)
    return list(found.values())


def _launches(call: Callable[[], object]) -> list[Launch]:
    """Every launch of a call."""
    found = list[Launch]()

    class Recorded:
        def __init__(self, kernel: Callable[..., None]) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return self.launch

        def launch(self, *given: Any, **options: int) -> None:
            hints = self.kernel.__annotations__.values()
            typed = tuple(_typed(value, hint) for value, hint in zip(given, hints, strict=False))
            found.append((self.kernel, typed, tuple({"num_warps": 4, **options}.items())))

    compiled, kernels._compiled = kernels._compiled, Recorded  # type: ignore[assignment]
    try:
        call()
    finally:
        kernels._compiled = compiled
    return found


def _typed(value: Any, hint: str) -> tuple[str, Any]:
    """An argument's type as Triton writes it, and its value if the compiler knows it."""
    if value is None or hint == "tl.constexpr":
        return "constexpr", value
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}", None
    return ("fp32" if isinstance(value, float) else "i32" if value < 1 << 31 else "i64"), None


def resources(variant: Variant, generation: int) -> tuple[int, int, int]:
    """Registers of a thread, bytes of shared memory, bytes of a thread that spill."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler as nvidia
    from triton.compiler import ASTSource

    kernel = kernels._compiled(variant.kernel)
    named = dict(zip(kernel.arg_names, variant.arguments, strict=True))
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature={name: kind for name, (kind, _) in named.items()},
        constexprs={places[name]: value for name, (kind, value) in named.items() if kind == "constexpr"},
        # Tensors begin at addresses that 16 divides, so that they are read 16 bytes at a time.
        attrs={places[name]: [["tt.divisibility", 16]] for name, (kind, _) in named.items() if kind.startswith("*")},
    )
    made = compile(source, target=GPUTarget("cuda", generation, 32), options=dict(variant.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        said = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (int(re.search(rf"{what}:(\d+)", said)[1]) for what in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return registers, made.metadata.shared, max(stack, local)


def main() -> int:
    """Print the table; returns 1 if a kernel spills at a benchmark's size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of cases' names, such as 'update adam'")
    parser.add_argument("--for", type=int, nargs="+", default=GENERATIONS, dest="generations", help="such as 90")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        sys.exit("triton is not installed; run `make check-kernels`, or pip install triton")
    os.environ.pop("TRITON_INTERPRET", None)
    chosen, failed = variants(given.only), 0
    pairs = [(variant, generation) for variant in chosen for generation in given.generations]
    _say(f"{'case':34} {'kernel':15} {'sm':>4} {'warps':>5} {'registers':>9} {'shared':>7} {'spills':>7}")
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(given.processes) as pool:
        os.environ["TRITON_CACHE_DIR"] = cache
        for (variant, generation), (registers, shared, spills) in zip(pairs, pool.map(_of_pair, pairs), strict=True):
            kernel, warps = variant.kernel.__name__.lstrip("_"), dict(variant.options)["num_warps"]
            # Recurrences' tiles suit Hopper and Blackwell, which hold products' operands in shared memory.
            wrong = variant.is_benchmark and spills > (256 if "recur" in kernel and generation < 90 else 0)
            failed += wrong
            _say(
                f"{variant.case:34} {kernel:15} {generation:4} {warps:5} "
                f"{registers:9} {shared:7} {spills:7}{'  spills at a size of the benchmarks' if wrong else ''}"
            )
    _say(f"{len(pairs)} variants compiled; {failed} spill at sizes of the benchmarks")
    return int(failed > 0)


def _of_pair(pair: tuple[Variant, int]) -> tuple[int, int, int]:
    return resources(*pair)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
