"""Vectors of texts: by hand, against an exact decomposition, and read back from hostile files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from recspec.base.errors import DataError
from recspec.data.encoding import text_vectors
from recspec.data.encoding.encoder_kinds import TextEncoder
from recspec.data.encoding.encoders import Encoders, load_projection, save_projection
from recspec.data.encoding.text_vectors import fit_projection, grams_of

WORDS = ("red", "blue", "old", "small", "chair", "table", "lamp", "büro", "x1")
TEXTS = [" ".join(np.random.default_rng(at).choice(WORDS, 3)) for at in range(200)]


def cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_grams_are_words_pairs_and_letters_in_a_row() -> None:
    assert grams_of("Ab, a!") == [b"wab", b"wa", b"pab a", b"c<ab", b"cab>", b"c<ab>", b"c<a>"]
    assert grams_of("") == grams_of(" ?! ") == []
    assert len(grams_of("word " * 10_000)) < 5_000  # the first letters alone are read


def test_a_case_by_hand() -> None:
    """Both texts hold `a` and `<a>`, each of rarity 1 + ln(3/3) = 1; all other grams occur once and are left out."""
    made = fit_projection(["a", "a b"], 2)
    assert len(made.buckets) == 2
    assert made.rarity.tolist() == [1, 1]
    # both weigh (1, 1) / sqrt(2), the one direction there is, so the first number is 1 before the mean square becomes 1
    np.testing.assert_allclose(
        made.vectors(["a", "a b", "b", ""]), np.array([[1, 0], [1, 0], [0, 0], [0, 0]]) * 2**0.5, rtol=1e-6
    )
    # counted twice, `a` weighs 1 + ln 2 beside 1
    first = 1 + np.log(2)
    expected = (first + first) / np.hypot(first, first)
    np.testing.assert_allclose(made.vectors(["a a"])[0, 0], expected, rtol=1e-6)


def test_the_directions_are_the_largest_singular_vectors() -> None:
    made = fit_projection(TEXTS, 6)
    rows, places, values = made.weighed(TEXTS)
    matrix = np.zeros((len(TEXTS), len(made.buckets)))
    matrix[rows, places] = values
    _, lengths, right = np.linalg.svd(matrix, full_matrices=False)
    own = made.weights.astype(np.float64)
    share = np.square(matrix @ own).sum() / np.square(own).sum(axis=0).mean()
    assert share == pytest.approx(np.square(lengths[:6]).sum(), rel=1e-3)
    assert np.abs(own[:, 0] / np.linalg.norm(own[:, 0]) @ right[0]) == pytest.approx(1, abs=1e-4)
    assert (own[np.abs(own).argmax(axis=0), np.arange(6)] > 0).all()
    assert np.square(made.vectors(TEXTS)).mean() == pytest.approx(1, rel=1e-5)


def test_texts_with_common_words_are_near_and_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fit_projection(TEXTS, 6)
    red, also, other = made.vectors(["red chair", "chairs, RED", "small lamp"])
    assert cosine(red, also) > 0.8 > cosine(red, other) + 0.3
    whole = made.vectors(TEXTS)
    monkeypatch.setattr(text_vectors, "AT_ONCE", 7)
    np.testing.assert_allclose(made.vectors(TEXTS), whole, atol=1e-6)
    np.testing.assert_allclose(fit_projection(TEXTS, 6).vectors(TEXTS), whole, atol=1e-4)


@pytest.mark.parametrize("texts", [[], [""], ["?"], ["one"], ["one", "two"], ["\ud800", "\x00"]])
def test_few_and_odd_texts_make_finite_vectors(texts: list[str]) -> None:
    vectors = fit_projection(texts, 3).vectors([*texts, "one", ""])
    assert vectors.shape == (len(texts) + 2, 3)
    assert np.isfinite(vectors).all()
    assert not vectors[-1].any()


def test_an_encoder_is_loaded_with_its_projection(tmp_path: Path) -> None:
    encoder = TextEncoder(projection="words", length=3).holding(fit_projection(TEXTS, 3))
    Encoders({"title": encoder}).save(tmp_path)
    raw = ["red chair", None, "", "old lamp"]
    made, offsets = Encoders.load(tmp_path).encode_column("title", raw)
    assert offsets.tolist() == [0, 3, 6, 9, 12]
    np.testing.assert_array_equal(made.reshape(4, 3), encoder.vectors(pa.array(raw)))
    many, _ = Encoders.load(tmp_path).encode_column("title", raw * 1500)  # each different text once
    np.testing.assert_allclose(many.reshape(-1, 3)[-4:], made.reshape(4, 3), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bucket": [2, 1]}, "is no projection of texts: its numbers are out of range"),
        ({"bucket": [1, 2**40]}, "is no projection of texts: its numbers are out of range"),
        ({"rarity": [1.0, float("nan")]}, "is no projection of texts: its numbers are out of range"),
        ({"weights": [[1.0, 2.0], [float("inf"), 0.0]]}, "is no projection of texts: its numbers are out of range"),
        ({"weights": [[1.0], [2.0]]}, "can't be read as a projection of texts to 2 numbers"),
        ({"rarity": ["a", "b"]}, "can't be read as a projection of texts to 2 numbers"),
        ({"rarity": None}, "can't be read as a projection of texts to 2 numbers"),
    ],
)
def test_a_file_that_is_none_is_refused(change: dict[str, object], problem: str, tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    save_projection(fit_projection(["a", "a b"], 2), file)
    assert load_projection(file, 2).weights.shape == (2, 2)
    columns = {"bucket": [1, 2], "rarity": [1.0, 1.0], "weights": [[1.0, 2.0], [3.0, 4.0]], **change}
    pq.write_table(pa.table({name: held for name, held in columns.items() if held is not None}), file)
    with pytest.raises(DataError, match=problem):
        load_projection(file, 2)


def test_a_projection_outside_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "encoders.json").write_text('{"t": {"kind": "text", "projection": "../../x", "length": 2}}')
    with pytest.raises(DataError, match="leads outside"):
        Encoders.load(tmp_path)
