"""A model of a grown dataset that starts from the weights of the model before.

Ids grow at the end of their vocabularies. So the old values of a table are its first rows, and of any other tensor the
first entries of each dimension. New rows keep the values that the model gives them at first; their optimizer state is
that of a row that no step has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from recspec.errors import SettingsError
from recspec.nn import Embeddings
from recspec.training.optimizers import Optimizers

Copy = Callable[[Tensor, Tensor], None]
"""Copies the values of an old tensor into the new one."""


def warm_start(model: nn.Module, before: nn.Module, optimizers: Optimizers, state: Mapping[str, Tensor]) -> list[str]:
    """Give a model the weights of the one before, and its optimizers their `state`; returns notes.

    Raises:
        SettingsError: if a tensor has become smaller, or has other dimensions.
    """
    copies = dict(_of_tables(model, before))
    old, own = before.state_dict(), model.state_dict()
    kept = {name for name, _ in before.named_parameters()} | {name for name, _ in _plain_buffers(before)}
    problems = []
    for name, tensor in old.items():
        if name not in kept or name not in own:
            continue
        if _fits(tensor, own[name]):
            with torch.no_grad():
                copies.get(name, _leading)(tensor, own[name])
        else:
            problems.append(f"'{name}' was {tuple(tensor.shape)}, and is {tuple(own[name].shape)} now")
    if problems:
        raise SettingsError.of("the model can't go on from its weights; train it anew", problems)
    return _restore(optimizers, state, own, copies)


def _of_tables(model: nn.Module, before: nn.Module) -> Iterable[tuple[str, Copy]]:
    """How to copy each store of embeddings: its tables one by one."""
    olds = {name: each for name, each in before.named_modules() if isinstance(each, Embeddings)}
    for prefix, module in model.named_modules():
        if isinstance(module, Embeddings) and prefix in olds:
            for key in module.stores:
                yield f"{prefix}.stores.{key}", _by_table(olds[prefix].tables[key], module.tables[key])


def _by_table(old: Mapping[str, range], new: Mapping[str, range]) -> Copy:
    def copy(source: Tensor, target: Tensor) -> None:
        for vocabulary, rows in old.items():
            place = new[vocabulary].start
            target[place : place + len(rows)] = source[rows.start : rows.stop]

    return copy


def _leading(source: Tensor, target: Tensor) -> None:
    target[tuple(slice(0, size) for size in source.shape)] = source


def _fits(old: Tensor, new: Tensor) -> bool:
    sizes = zip(old.shape, new.shape, strict=False)
    return old.dim() == new.dim() and old.dtype == new.dtype and all(was <= now for was, now in sizes)


def _plain_buffers(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Buffers that training changes; what a module learns of the data by itself (`know_ids`, `set`) is left to it."""
    for prefix, part in module.named_modules():
        if not (hasattr(part, "know_ids") or (hasattr(part, "make_room") and hasattr(part, "set"))):
            yield from part.named_buffers(prefix, recurse=False)


def _restore(
    optimizers: Optimizers, state: Mapping[str, Tensor], own: Mapping[str, Tensor], copies: Mapping[str, Copy]
) -> list[str]:
    """Grow the optimizers' state and restore it; a note if there is none."""
    if not state:
        return ["the run before has no checkpoint with the state of its optimizers, which start anew"]
    grown: dict[str, Tensor] = {}
    for key, value in state.items():
        name = key.rpartition("/")[0].partition("/")[2]
        weight = own.get(name)
        if weight is None or not value.dim():
            grown[key] = value
            continue
        shape = tuple(weight.shape) if value.dim() == weight.dim() and value.shape[1:] == weight.shape[1:] else None
        if shape is None:  # one number a row, or a tensor that grew in another dimension
            shape = tuple(max(was, now) for was, now in zip(value.shape, weight.shape, strict=False))
            shape = (*shape, *value.shape[len(shape) :])
        if value.dim() == weight.dim() and value.shape[-1] == 1 and weight.dim() > 1:
            shape = (*shape[:-1], 1)
        target = value.new_zeros(shape)
        copies.get(name, _leading)(value, target)
        grown[key] = target
    optimizers.restore(grown)
    return []
