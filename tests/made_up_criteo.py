"""Raw files in the shape of Criteo's click logs, of any size, with clicks that can be foreseen.

A row's log-odds are the sum of a number of its own for each value of a few categories, and of what a few integers add;
the label is drawn from them. Categories follow power laws and are written as 32-bit hashes; integers are skewed, some
are negative, and values of either kind are missing. Rows are written as bytes of fixed places from which the padding
is then taken out, with no Python a row: 5 million rows (1.2 GB) in about a minute on one core.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recspec.data.storage.transcode import power_law

SIZES: tuple[int, ...] = (1_400, 550, 5_000_000, 1_500_000, 300, 20, 12_000, 600, 3, 60_000, 5_500, 4_000_000, 3_100)
SIZES += (26, 12_000, 3_000_000, 10, 4_800, 2_100, 4, 4_000_000, 17, 15, 200_000, 90, 100_000)
"""How many values each category may take, much like Kaggle's file; further ones begin from the first again."""
MISSING: tuple[float, ...] = (0, 0, 0.03, 0.03, 0, 0.12, 0, 0, 0, 0, 0, 0.03, 0)
MISSING += (0, 0, 0.03, 0, 0, 0.44, 0.44, 0.03, 0.76, 0, 0.03, 0.44, 0.44)
"""Share of rows without a value."""
SIGNAL = (1, 2, 6, 9, 13, 17, 19)
"""Places of the categories that the label depends on."""
ALPHA = 1.1
BLOCK_ROWS = 100_000
MAX_DIGITS = 8

Numbers = NDArray[np.int64]
_HEX = np.array([list(f"{number:02x}".encode()) for number in range(256)], np.uint8)


def write(
    path: Path, *, num_rows: int, seed: int = 0, num_numerical: int = 13, num_categorical: int = 26
) -> NDArray[np.float32]:
    """Write one file, compressed where its name ends in .gz; gives back the probability each label was drawn from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    chances = []
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        for number, size in enumerate(_blocks(num_rows)):
            text, chance = _rows(np.random.default_rng((seed, number)), size, num_numerical, num_categorical)
            file.write(text)
            chances.append(chance)
    return np.concatenate(chances) if chances else np.zeros(0, np.float32)


def write_days(folder: Path, rows: Sequence[int], *, seed: int = 0, suffix: str = "") -> Path:
    """Files day_0, day_1, ... of so many rows each."""
    for day, count in enumerate(rows):
        write(folder / f"day_{day}{suffix}", num_rows=count, seed=seed * 1000 + day)
    return folder


def _blocks(num_rows: int) -> Iterator[int]:
    for start in range(0, num_rows, BLOCK_ROWS):
        yield min(BLOCK_ROWS, num_rows - start)


def _rows(
    rng: np.random.Generator, size: int, num_numerical: int, num_categorical: int
) -> tuple[bytes, NDArray[np.float32]]:
    numbers = [
        np.floor(rng.lognormal(1.5 + place % 4, 1.5, size)).astype(np.int64) - 1 - place % 3 % 2
        for place in range(num_numerical)
    ]
    no_number = [rng.random(size) < 0.1 * (place % 4) for place in range(num_numerical)]
    hashes = [_hashes(power_law(rng, size, SIZES[place % 26], ALPHA), place) for place in range(num_categorical)]
    no_value = [rng.random(size) < MISSING[place % 26] for place in range(num_categorical)]
    odds = np.full(size, -1.6)
    for place in (place for place in SIGNAL if place < num_categorical):
        odds += np.where(no_value[place], 0.3, _weights(hashes[place]))
    for place in range(min(num_numerical, 3)):
        odds += np.where(no_number[place], 0, 0.15 * (np.log(np.maximum(numbers[place] + 3, 1)) - 2))
    chance = (1 / (1 + np.exp(-odds))).astype(np.float32)
    label = rng.random(size) < chance
    cells = [(48 + label.astype(np.uint8))[:, None]]
    cells += [_decimal(values, missing) for values, missing in zip(numbers, no_number, strict=True)]
    cells += [_hexadecimal(values, missing) for values, missing in zip(hashes, no_value, strict=True)]
    tab, end = np.full((size, 1), 9, np.uint8), np.full((size, 1), 10, np.uint8)
    parts = [part for cell in cells for part in (cell, tab)]
    whole = np.concatenate([*parts[:-1], end], axis=1)
    return whole[whole != 0].tobytes(), chance


def _hashes(ids: Numbers, place: int) -> NDArray[np.uint32]:
    """32 bits for each id, different ones for different ids of a column."""
    mixed = (ids.astype(np.uint32) + np.uint32(place * 77_777_777 % 2**32)) * np.uint32(2_654_435_761)
    return (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2_246_822_519)


def _weights(hashes: NDArray[np.uint32]) -> NDArray[np.float64]:
    """A number of its own for each value, spread evenly over -0.9 to 0.9."""
    return ((hashes * np.uint32(3_266_489_917)) >> np.uint32(8)) / 2**24 * 1.8 - 0.9


def _decimal(values: Numbers, missing: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Digits at the right, a sign before them, zero bytes for what is not there."""
    values = np.clip(values, -9, 10**MAX_DIGITS - 1)
    powers = 10 ** np.arange(MAX_DIGITS - 1, -1, -1)
    left = np.abs(values)[:, None] // powers
    digits = (48 + left % 10).astype(np.uint8)
    digits[:, :-1][left[:, :-1] == 0] = 0
    sign = np.where(values < 0, 45, 0).astype(np.uint8)[:, None]
    cells = np.concatenate([sign, digits], axis=1)
    cells[missing] = 0
    return cells


def _hexadecimal(values: NDArray[np.uint32], missing: NDArray[np.bool_]) -> NDArray[np.uint8]:
    cells = _HEX[values.astype(">u4").view(np.uint8).reshape(-1, 4)].reshape(-1, 8)
    cells[missing] = 0
    return cells
