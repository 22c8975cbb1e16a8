"""A device that computes on the CPU, takes every branch that a GPU takes, and writes down each wait for it.

Its tensors say that they lie on the device `meta`; their numbers are in tensors of the CPU. So a step gives numbers to
compare with the CPU's, as one on a GPU does. Kernels in Triton, streams and autocast do not exist here.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

import recspec
from recspec.models import dlrm

DEVICE = torch.device("meta")

NUMBERS_READ = (
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_coalesce",
)
"""Operations whose result, or its shape, a CPU has to know."""


NO_LAUNCHES = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "_unsafe_view")
"""Operations without a kernel, besides views."""


class There(Tensor):
    """A tensor on the made-up device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> There:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return cast(There, made)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside the made-up device")


class MadeUpDevice(TorchDispatchMode):
    """Runs operations on tensors of the device, and counts waits by where they are asked for in recspec.

    It also counts operations with a kernel, or several as a sort has, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tree_flatten((args, kwargs))[0]
        if not any(isinstance(each, There) or (isinstance(each, torch.device) and each == DEVICE) for each in given):
            return func(*args, **kwargs)
        if self._waits(func, args, kwargs, given):
            self.wait(func.overloadpacket.__name__)
        if not func.is_view and func.overloadpacket.__name__ not in NO_LAUNCHES:
            self.launches[func.overloadpacket.__name__] += 1
        found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if func.overloadpacket is torch.ops.aten._to_copy and kwargs.get("device", DEVICE) != DEVICE:
            return found
        wrapped = tree_map(lambda each: There(each) if isinstance(each, Tensor) else each, found)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _waits(self, func: Any, args: Any, kwargs: Any, given: list[Any]) -> bool:
        name, tensors = func.overloadpacket.__name__, [each for each in given if isinstance(each, Tensor)]
        if name == "_to_copy":
            moves = isinstance(args[0], There) != (kwargs.get("device", args[0].device) == DEVICE)
            return moves and not kwargs.get("non_blocking")
        beside = [each for each in tensors if not isinstance(each, There) and each.dim()]
        if name == "copy_":
            return bool(beside) and not (len(args) > 2 and args[2])
        assert not beside or name in ("index", "index_put_", "_index_put_impl_"), f"{func} of tensors of two devices"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            asked = [each for each in args[1] if each is not None]
            return bool(beside) or any(each.dtype in (torch.bool, torch.uint8) for each in asked)
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        return name in NUMBERS_READ

    def wait(self, why: str) -> None:
        """Write down a wait: where recspec asks for it, or the operation of a backward pass."""
        own = Path(recspec.__file__).parent
        frames = [each for each in traceback.extract_stack() if own in Path(each.filename).parents]
        self.waits[f"{Path(frames[-1].filename).relative_to(own)}: {frames[-1].line}" if frames else why] += 1


def _held(each: Any) -> Any:
    if isinstance(each, There):
        return each.held
    return torch.device("cpu") if isinstance(each, torch.device) and each == DEVICE else each


@contextmanager
def made_up_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeUpDevice]:
    """The device; `.to(DEVICE)` moves tensors and modules there."""
    device, tensor, tolist = MadeUpDevice(), torch.tensor, Tensor.tolist

    def copied(data: Any, *, device: Any = None, **how: Any) -> Tensor:  # torch makes no numbers on `meta`
        made = tensor(data, **how)
        return made if device is None else made.to(device)

    def read(x: Tensor) -> Any:  # torch reads the numbers of its own tensors alone
        if isinstance(x, There):
            device.wait("tolist")
        return tolist(x.held if isinstance(x, There) else x)

    with monkeypatch.context() as patched, device:
        patched.setattr(torch, "tensor", cast(Callable[..., Tensor], copied))
        patched.setattr(Tensor, "tolist", read)
        patched.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it knows no such device
        patched.setattr(torch, "is_autocast_enabled", lambda *_: False)
        yield device
    dlrm._kept_lower_triangle.cache_clear()  # it holds tensors of the device
