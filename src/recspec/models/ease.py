"""EASE: the linear item-to-item model with a zero diagonal, in closed form.

Steck: Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019, equation 8; with dropout p, EDLAE (Steck:
Autoencoders that don't overfit towards the Identity, NeurIPS 2020, equation 9):

    P = (X'X + L)^-1;  B = I - P diagMat(1 / diag(P));  scores = Y B;  L = l2 I + p / (1 - p) diagMat(diag(X'X)).

X holds the weights of the events, 1 by default. Y is X, with the items of each user weighted by recency^age.

Three forms, with one result where they overlap:

    primal   inverts X'X + L, items x items
    dual     inverts K = X L^-1 X' + I, users x users. With D = Y L^-1 X' K^-1 and h_i = x_i' K^-1 x_i / L_i (x_i:
             column i of X), P = L^-1 - L^-1 X' K^-1 X L^-1, so score(u, i) = ((D X)_ui - h_i y_ui) / (1 - h_i)
    sparse   column i of B is the ridge regression of x_i on the other columns; here on the m columns that occur with
             it most often: w = (X_m' X_m + L_m)^-1 X_m' x_i. With all other columns it is EASE

Shapes: U users; N items; m neighbours; B rows; R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from recspec.base import machine
from recspec.base.errors import SettingsError
from recspec.feature_spec import FeatureSpec
from recspec.models.interactions import Interactions
from recspec.models.item_model import MEMORY_SHARE, OF_A_PAIR, Grid, KnownItemsModel, Recency, rounded
from recspec.models.known_items import ItemWeights, KnownItems, Neighbours, blocks_of_gram
from recspec.models.layers import RowsHeld

if TYPE_CHECKING:
    from scipy.sparse import csr_array


DUAL = 1.3
"""Items a user from which the dual form pays: each value of recency costs two fits, as it multiplies two matrices."""

BYTES_DENSE = 16
"""Memory of a number of that matrix: 8 in the inversion, 4 in the model, 4 in the best model so far."""

OF_AN_ITEM = 1e7
"""Operations in the time (0.5 ms) of the sparse form's matrix of one item."""

BLOCK = 1 << 24
"""Numbers of a matrix computed at once: 128 MB in fp64."""

STRENGTHS = ((30.0, 0.0), (10.0, 0.0), (100.0, 0.0), (3.0, 0.4))
"""L2 strengths, times `Interactions.scale`, and dropouts compared on valid; the first is used where there is no valid.

On nine datasets the strength 30 stays within .8 standard errors of the best NDCG@10 on valid; dense ones want 10 to 30,
sparse ones 100 to 300. With dropout less is right: on ML-100K 3 and .4 reach .0752 on test, and 30 alone .0707."""

Form = Literal["auto", "primal", "dual", "sparse"]


class EaseSettings(Recency):
    """Settings of EASE."""

    l2: float = Field(
        500.0,
        ge=1e-3,
        le=1e9,
        description=(
            "L2 penalty on the weights between items; by default chosen on valid, or by the number of interactions"
        ),
    )
    dropout: float = Field(
        0.0,
        ge=0,
        le=0.99,
        description="share of a user's items that EDLAE hides, in expectation; by default chosen on valid",
    )
    form: Form = Field(
        "auto",
        description=(
            "inverted matrix: primal, items x items; dual, users x users; sparse, an approximation by one small matrix"
            " per item; auto: the cheapest exact one that fits in memory, otherwise sparse"
        ),
    )
    neighbours: int = Field(
        100, ge=1, description="items from which the sparse form predicts an item: those seen with it most often"
    )


class Ease(KnownItemsModel):
    """EASE (Steck, 2019): a linear item-to-item model, fitted in closed form in one of three forms."""

    name = "ease"
    Settings = EaseSettings
    settings: EaseSettings
    space = MappingProxyType(
        {"settings.l2": "3.0..10000.0 log", "dropout": [0.0, 0.2, 0.4], "settings.recency": "0.5..1.0"}
    )

    def __init__(self, spec: FeatureSpec, settings: EaseSettings, table_rows: RowsHeld | None = None) -> None:
        super().__init__(spec, settings, table_rows)
        self.form, self.why_form = _pick_form(settings, self.num_users, self.num_items)
        self.settings = settings.model_copy(update={"form": self.form})
        self.weights: ItemWeights | UserWeights | Neighbours
        if self.form == "dual":
            self.weights = UserWeights(self.num_users, self.num_items, weighted="event_weight" in spec.metadata)
        elif self.form == "sparse":
            self.weights = Neighbours(self.num_items, settings.neighbours)
        else:
            self.weights = ItemWeights(self.num_items)

    @classmethod
    def grid(cls, interactions: Interactions) -> Grid:
        return [{"l2": rounded(l2 * interactions.scale), "dropout": dropout} for l2, dropout in STRENGTHS]

    def how(self) -> str:
        _check_room(self.settings, self.num_users, self.num_items)
        super().how()
        return f"form {self.form}: {self.why_form}"

    def operations(self) -> float:
        if self.form == "sparse":
            return OF_A_PAIR * self.num_items**2 + OF_AN_ITEM * self.num_items
        size = self.num_users if self.form == "dual" else self.num_items
        return float(size) ** 3 / torch.get_num_threads()  # LAPACK takes all threads

    def _fit(self, interactions: Interactions, seed: int) -> None:  # noqa: ARG002
        matrix = interactions.matrix()
        penalties = self._penalties(matrix)
        if isinstance(self.weights, ItemWeights):
            self.weights.weight = torch.from_numpy(fit_primal(matrix, penalties))
        elif isinstance(self.weights, UserWeights):
            self.weights.fit(interactions, self.settings.weigh(interactions), penalties)
        else:
            items, weight = fit_sparse(matrix, penalties, self.weights.k)
            self.weights.items, self.weights.weight = torch.from_numpy(items), torch.from_numpy(weight)
        super().know(interactions)

    def know(self, interactions: Interactions) -> None:
        if isinstance(self.weights, UserWeights):
            self.weights.know(self.settings.weigh(interactions), self._penalties)
        super().know(interactions)

    def _penalties(self, matrix: csr_array) -> NDArray[np.float64]:
        """L (N,), from X (U, N)."""
        p = self.settings.dropout
        squares = np.bincount(matrix.indices, matrix.data.astype(np.float64) ** 2, matrix.shape[1])
        return np.asarray(self.settings.l2 + p / (1 - p) * squares, np.float64)

    def _pairs(self, users: Tensor, items: Tensor) -> Tensor:
        return self.weights.score_pairs(self.known, users, items)

    def score_users(self, users: Tensor) -> Tensor:
        return self.weights.score_users(self.known, users)


class UserWeights(nn.Module):
    """The dual form: weights from the users that it was fitted to, whose items are in `of_items`."""

    weight: Tensor
    leverage: Tensor

    def __init__(self, num_users: int, num_items: int, *, weighted: bool) -> None:
        super().__init__()
        self.of_items = KnownItems(num_items, num_users, weighted=weighted)  # the users of each item
        self.register_buffer("weight", torch.zeros(num_users, num_users))  # D
        self.register_buffer("leverage", torch.zeros(num_items))  # h / (1 - h)
        # K^-1, X' and the diagonal of L, once `know` has asked for them; `knowing` shares the list.
        self._fit: list[tuple[NDArray[np.float64], csr_array, NDArray[np.float64]]] = []

    def fit(self, interactions: Interactions, known: Interactions, penalties: NDArray[np.float64]) -> None:
        """Invert K; `known` is Y, the same interactions as they are scored."""
        matrix = interactions.matrix()
        self.of_items.set(interactions.by_item())
        inverse, by_item = _inverted(matrix, penalties), matrix.T.tocsr()
        leverage = np.empty(matrix.shape[1])
        exact = by_item.astype(np.float64)
        for rows in _blocks(matrix.shape[1], matrix.shape[0]):
            part = exact[rows]
            # h_i = x_i' K^-1 x_i / L_i of each item, without the N x N matrix X' K^-1 X.
            leverage[rows] = part.multiply(part @ inverse).sum(axis=1) / penalties[rows]
        self.leverage = torch.from_numpy(leverage / (1 - leverage)).float()
        if known is not interactions:
            self._fit[:] = [(inverse, by_item, penalties)]
            self.know(known, lambda _: penalties)
            self._fit.clear()
            return
        np.negative(inverse, out=inverse)
        inverse.flat[:: len(inverse) + 1] += 1.0  # X L^-1 X' K^-1 = I - K^-1
        self.weight = torch.from_numpy(inverse).float()

    def know(self, known: Interactions, penalties_of: Callable[[csr_array], NDArray[np.float64]]) -> None:
        """D = Y L^-1 X' K^-1 of users with other interactions Y; the diagonal of L is made from X (U, N)."""
        # From I - D = K^-1, a small penalty would leave nothing but the rounding of D.
        if not self._fit:
            by_item = self.of_items.interactions().matrix()
            fitted = by_item.T.tocsr()
            penalties = penalties_of(fitted)
            self._fit.append((_inverted(fitted, penalties), by_item, penalties))
        inverse, by_item, penalties = self._fit[0]
        found = np.empty((known.num_users, len(inverse)), np.float32)
        matrix = _over(known.matrix(), penalties)
        for rows in _blocks(*found.shape):
            found[rows] = (matrix[rows] @ by_item).toarray() @ inverse
        self.weight = torch.from_numpy(found).to(None if self.weight.is_meta else self.weight.device)

    def score_pairs(self, known: KnownItems, users: Tensor, items: Tensor) -> Tensor:
        """(B,) scores of pairs."""
        parts = []
        for rows in self.of_items.blocks(items):
            others, weights = self.of_items.lists(items[rows])
            parts.append((self.weight[users[rows].unsqueeze(1), others] * weights).sum(1))
        own = []
        for rows in known.blocks(users):
            lists, weights = known.lists(users[rows])
            own.append(((lists == items[rows].unsqueeze(1)) * weights).sum(1))
        return self._joined(torch.cat(parts), torch.cat(own), self.leverage[items])

    def score_users(self, known: KnownItems, users: Tensor) -> Tensor:
        """(R, N) scores of every item."""
        if torch.compiler.is_compiling():
            everything = torch.arange(len(self.leverage), device=users.device)
            linear = self.weight[users] @ self.of_items.acted(everything).T
        else:
            others, first, weights = self.of_items.bags(torch.arange(len(self.leverage), device=users.device))
            table = self.weight[users].T.contiguous()
            linear = F.embedding_bag(others, table, first, mode="sum", per_sample_weights=weights).T
        return self._joined(linear, known.acted(users), self.leverage)

    @staticmethod
    def _joined(linear: Tensor, own: Tensor, leverage: Tensor) -> Tensor:
        return linear * (1 + leverage) - own * leverage  # 1 / (1 - h) = 1 + h / (1 - h)


# --- the fits --------------------------------------------------------------------------------------------------------


def _inverted(fitted: csr_array, penalties: NDArray[np.float64]) -> NDArray[np.float64]:
    """K^-1 of the dual form, from X (U, N)."""
    return _inverse_of_gram(_over(fitted, np.sqrt(penalties)).T.tocsr(), 1.0, "users")


def fit_primal(matrix: csr_array, penalties: NDArray[np.float64]) -> NDArray[np.float32]:
    """B (N, N), from X (U, N) and the diagonal of L (N,)."""
    weight = _inverse_of_gram(matrix, penalties, "items")
    # B_ij = -P_ij / P_jj off the diagonal (equation 8 of the paper), 0 on it.
    weight /= -np.diag(weight).copy()
    weight.flat[:: len(weight) + 1] = 0.0
    return weight.astype(np.float32)


def fit_sparse(
    matrix: csr_array, penalties: NDArray[np.float64], m: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The m items (N, m) seen most often with each item, and the item's weights from them (N, m).

    An item that was seen with fewer has the weight 0 from the others, unless m is all of them.
    """
    from scipy import linalg

    num_items = matrix.shape[1]
    items, weight = np.zeros((num_items, m), np.int32), np.zeros((num_items, m), np.float32)
    by_item = matrix.T.tocsr()
    for first, together in blocks_of_gram(matrix) if m else ():
        for item, row in enumerate(range(len(together.indptr) - 1), first):
            ours = slice(together.indptr[row], together.indptr[row + 1])
            neighbours, counts = together.indices[ours], together.data[ours].astype(np.float64)
            others = neighbours != item
            neighbours, counts = neighbours[others], counts[others]
            if m == num_items - 1:
                every = np.delete(np.arange(num_items), item)
                neighbours, counts = every, np.bincount(neighbours, counts, num_items)[every]
            if len(neighbours) > m:
                best = np.argpartition(counts, len(counts) - m)[len(counts) - m :]
                neighbours, counts = neighbours[best], counts[best]
            if not len(neighbours):
                continue
            theirs = by_item[neighbours]
            gram = (theirs @ theirs.T).toarray().astype(np.float64)
            # The normal equations of a ridge regression: (X_m' X_m + L_m) w = X_m' x_i.
            gram.flat[:: len(gram) + 1] += penalties[neighbours]
            items[item, : len(gram)] = neighbours
            weight[item, : len(gram)] = linalg.solve(gram, counts, assume_a="pos", overwrite_a=True)
    return items, weight


def _over(matrix: csr_array, divisors: NDArray[np.float64]) -> csr_array:
    """The matrix (U, N) in fp64 with each column divided by its divisor (N,)."""
    from scipy import sparse

    return sparse.csr_array((matrix.data / divisors[matrix.indices], matrix.indices, matrix.indptr), shape=matrix.shape)


def _inverse_of_gram(matrix: csr_array, penalties: NDArray[np.float64] | float, of: str) -> NDArray[np.float64]:
    """(X'X + L)^-1 in fp64, in place, from X as CSR and the diagonal of L: the memory is that of one matrix."""
    size = matrix.shape[1]
    gram = np.empty((size, size))
    by_column = matrix.T.tocsr()
    for rows in _blocks(size, size):
        gram[rows] = (by_column[rows] @ matrix).toarray()
    gram.flat[:: size + 1] += penalties
    # The matrix is symmetric, so its transpose is the column-major matrix that LAPACK needs; no copy is made. torch
    # releases the interpreter's lock, so that a signal can end the process; scipy would hold it for half a minute.
    factor = torch.from_numpy(gram).mT
    _, failed = torch.linalg.cholesky_ex(factor, out=(factor, torch.zeros((), dtype=torch.int32)))
    if failed:
        raise SettingsError(
            f"settings.l2 is too small to invert the {of} x {of} matrix of these interactions; take a larger one, for "
            "example 1"
        )
    torch.cholesky_inverse(factor, out=factor)
    return gram


def _pick_form(settings: EaseSettings, num_users: int, num_items: int) -> tuple[Form, str]:
    """The form, and the reason."""
    if settings.form != "auto":
        return settings.form, "as asked"
    sizes: dict[Form, tuple[int, str]] = {"primal": (num_items, "items"), "dual": (num_users, "users")}
    cheaper: tuple[Form, Form] = ("dual", "primal") if DUAL * num_users < num_items else ("primal", "dual")
    for form in cheaper:
        size, of = sizes[form]
        if _bytes(size) <= _room():
            return form, f"it inverts {size:,} x {size:,} {of}, in {_bytes(size) / 1e9:,.1f} GB"
    size, of = min(sizes.values())
    needs = f"{_bytes(size) / 1e9:,.1f} GB, and {_room() / 1e9:,.1f} GB are free for it (half of memory)"
    return "sparse", f"a matrix of {size:,} x {size:,} {of} needs {needs}"


def _check_room(settings: EaseSettings, num_users: int, num_items: int) -> None:
    """Refuse an inversion that the machine's memory can't hold."""
    sizes = {"primal": (num_items, "items"), "dual": (num_users, "users")}
    size, of = sizes.get(settings.form, (0, ""))
    if _bytes(size) > _room():
        raise SettingsError(
            f"settings.form is {settings.form}: a matrix of {size:,} x {size:,} {of} needs {_bytes(size) / 1e9:,.1f} "
            f"GB, and {_room() / 1e9:,.1f} GB are free for it (half of the machine's memory); take form sparse, or "
            "leave it at auto"
        )


def _bytes(size: int) -> float:
    return float(BYTES_DENSE) * size * size


def _room() -> float:
    return MEMORY_SHARE * machine.total_memory()


def _blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, BLOCK // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
