"""Triton's kernels against their twins in plain torch; FBGEMM's tables against torch's."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

import pytest
import torch
from torch import Tensor, nn

from recspec.base.errors import DataError, SettingsError
from recspec.bundle import checkpoint
from recspec.bundle import folder as bundle
from recspec.feature_spec import FeatureSpec
from recspec.loading import Ranks
from recspec.models import MODELS
from recspec.models.layers import hand_written, kernels
from recspec.models.layers.embeddings import Embeddings
from recspec.training.loop import train
from recspec.training.optimizers import Optimizers
from recspec.training.settings import OptimizerSettings, TrainSettings
from tests import made_up
from tests.closeness import assert_close
from tests.layers import plain_kernels
from tests.processes import ended

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def why_triton_is_not_tested() -> str:
    """Nothing where it can be; on a CPU the interpreter has to be chosen before Triton is imported (conftest.py)."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if DEVICE.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "TRITON_INTERPRET is not 1, and there is no GPU"
        try:
            _let_one_number_count()
        except ImportError as error:
            return str(error)
    return ""


def _let_one_number_count() -> None:
    """Let an array of one number end a loop in Triton 3.6's interpreter, as in 3.7's; numpy 2.4 refuses it."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


WHY_NOT = why_triton_is_not_tested()
with_triton = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it runs")

WHY_NO_FBGEMM = kernels.why_not("fbgemm", torch.device("cpu"))
with_fbgemm = pytest.mark.skipif(bool(WHY_NO_FBGEMM), reason=WHY_NO_FBGEMM or "it runs")

BACKENDS = [pytest.param("triton", marks=with_triton), pytest.param("fbgemm", marks=with_fbgemm)]

WIDTHS = [1, 19, 128]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


# --- looking rows up -------------------------------------------------------------------------------------------------

SIZES = (5, 3, 40)


def tables(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """A store of three tables, where they begin and where they end."""
    stops = torch.tensor(SIZES, device=DEVICE).cumsum(0)
    return drawn(sum(SIZES), width), stops - torch.tensor(SIZES, device=DEVICE), stops


def ids_of(rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.stack([torch.randint(size, (rows,), device=DEVICE) for size in SIZES], dim=1).to(dtype)


@with_triton
@pytest.mark.parametrize("width", [*WIDTHS, 300])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_rows_of_many_tables_are_gathered_as_by_torch(width: int, rows: int) -> None:
    torch.manual_seed(0)
    store, firsts, stops = tables(width)
    ids = ids_of(rows, torch.int32 if rows == 1 else torch.int64)
    found, places = kernels.gather_rows(store, ids, firsts, stops, torch.float32)
    expected, their_places = plain_kernels.gather_rows(store, ids, firsts, stops, torch.float32)
    assert torch.equal(found, expected)
    assert torch.equal(places, their_places)


@with_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gathered_rows_come_in_the_type_asked_for(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    store, firsts, stops = tables(19)
    ids = ids_of(8)
    found, _ = kernels.gather_rows(store, ids, firsts, stops, dtype)
    assert found.dtype == dtype
    # An interval between neighbouring numbers: a GPU rounds to the nearest, the interpreter cuts bf16 off.
    torch.testing.assert_close(found.float(), store[ids + firsts], rtol=2**-7, atol=1e-6)


@with_triton
def test_an_id_outside_its_table_gives_no_other_tables_row() -> None:
    store, firsts, stops = tables(4)
    ids = torch.tensor([[4, 2, 39], [5, 0, 0], [0, -1, 0], [0, 0, 40]], device=DEVICE)
    for gather in (kernels.gather_rows, plain_kernels.gather_rows):
        found, places = gather(store, ids, firsts, stops, torch.float32)
        assert places.tolist() == [[4, 7, 47], [-1, 5, 8], [0, -1, 8], [0, 5, -1]]
        assert found.isnan().any(2).tolist() == (places < 0).tolist()


@with_triton
@pytest.mark.parametrize("sparse", [True, False])
def test_the_gradient_of_a_gather_is_the_embeddings(sparse: bool) -> None:
    torch.manual_seed(2)
    start, firsts, stops = tables(19)
    ids, slope = ids_of(16), drawn(16, 3, 19)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    hand_written.Gather.apply(ours, ids, firsts, stops, torch.float32, sparse).mul(slope).sum().backward()
    torch.nn.functional.embedding(ids + firsts, theirs).mul(slope).sum().backward()
    assert ours.grad.is_sparse == sparse
    torch.testing.assert_close(ours.grad.to_dense() if sparse else ours.grad, theirs.grad)


# --- updating the rows seen ------------------------------------------------------------------------------------------

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")


def states_of(rule: kernels.Rule, weight: Tensor) -> list[Tensor]:
    shapes = {"sgd": [], "adagrad": [weight.shape], "rowwise_adagrad": [(len(weight), 1)], "adam": [weight.shape] * 2}
    return [torch.rand(shape, device=DEVICE) for shape in shapes[rule]]


ID_LISTS = {
    "none": [],
    "one": [3],
    "one, many times": [7] * 41,
    "none twice": list(range(29, -1, -1)),
    "some many times": [5, 2, 5, 0, 5, 29, 2, *[11] * 33, 0],
    "as many as a block": [4] * 16 + [9] * 32,
}


def updated(
    rule: kernels.Rule, ids: Tensor, weight: Tensor, gradient: Tensor, *updates: Callable[..., None]
) -> list[tuple[Tensor, ...]]:
    """Weight and states after a step of each of `updates`, all from the same start."""
    corrections, states = torch.tensor([0.19, 0.0199], device=DEVICE), states_of(rule, weight)
    ends = []
    for update in updates:
        own, state = weight.clone(), [each.clone() for each in states]
        update(rule, own, ids, gradient, state, lr=0.3, eps=1e-8, betas=(0.9, 0.99), corrections=corrections)
        ends.append((own, *state))
    return ends


@with_triton
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [1, 19])
@pytest.mark.parametrize("name", ID_LISTS)
def test_rows_are_updated_as_by_torch(rule: kernels.Rule, width: int, name: str) -> None:
    torch.manual_seed(3)
    ids = torch.tensor(ID_LISTS[name], dtype=torch.int64, device=DEVICE)
    weight, gradient = drawn(30, width), drawn(len(ids), width)
    results = updated(rule, ids, weight, gradient, kernels.update_rows, plain_kernels.update_rows)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    untouched = torch.ones(30, dtype=torch.bool, device=DEVICE)
    untouched[ids] = False
    assert torch.equal(results[0][0][untouched], weight[untouched])


@with_triton
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [4, 12])
def test_equal_ids_of_any_number_are_summed_over_the_borders_of_chunks(
    rule: kernels.Rule, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CHUNK", chunk)
    torch.manual_seed(8)
    times = (5, 2, 1, 4, 5, 3, 8, 9, 10, 1, 1, 25, 13)  # those of -1 and of the last id, outside the table, are skipped
    ids = torch.arange(-1, len(times) - 1).repeat_interleave(torch.tensor(times)).to(DEVICE)
    weight, gradient = drawn(len(times) - 2, 300), drawn(len(ids), 300)
    for found, expected in zip(
        *updated(rule, ids, weight, gradient, kernels.update_rows, plain_kernels.update_rows), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@with_triton
@pytest.mark.parametrize("rule", RULES)
def test_the_sum_of_one_id_is_shared_by_many_programs_and_repeats(
    rule: kernels.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Criteo has tables of 4 ids: at a batch of 65,536, each occurs 16,384 times."""
    rows = 65_536
    if DEVICE.type == "cpu":
        rows = 100
        monkeypatch.setattr(kernels, "CHUNK", 4)
    torch.manual_seed(9)
    ids, weight = torch.randint(4, (rows,), device=DEVICE), drawn(4, 19)
    gradient = drawn(rows, 19) / rows**0.5
    ends = updated(rule, ids, weight, gradient, kernels.update_rows, kernels.update_rows, plain_kernels.update_rows)
    for first, second, expected in zip(*ends, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)


@with_triton
@pytest.mark.parametrize("update", [kernels.update_rows, plain_kernels.update_rows])
def test_an_update_by_hand(update: object) -> None:
    # Row 1 is seen twice, with (1, 2) and (2, 2): its gradient is (3, 4), whose squares' mean is 12.5.
    ids, gradient = torch.tensor([1, 0, 1], device=DEVICE), torch.tensor([[1.0, 2.0], [0, 0], [2, 2]], device=DEVICE)
    weight, state = torch.ones(2, 2, device=DEVICE), torch.full((2, 1), 3.5, device=DEVICE)
    update("rowwise_adagrad", weight, ids, gradient, [state], lr=0.4)  # type: ignore[operator]
    torch.testing.assert_close(state.cpu(), torch.tensor([[3.5], [16.0]]))
    torch.testing.assert_close(weight.cpu(), torch.tensor([[1.0, 1.0], [0.7, 0.6]]))


@with_triton
def test_ids_outside_the_table_update_nothing() -> None:
    for update in (kernels.update_rows, plain_kernels.update_rows):
        weight = torch.zeros(3, 2, device=DEVICE)
        update("sgd", weight, torch.tensor([-1, 3, 1], device=DEVICE), torch.ones(3, 2, device=DEVICE), [], lr=1.0)
        assert weight.tolist() == [[0, 0], [-1, -1], [0, 0]]


# --- dot products of all pairs ---------------------------------------------------------------------------------------


@with_triton
@pytest.mark.parametrize("features", [1, 5, 27])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 3])
def test_dot_products_and_their_gradient_are_torchs(features: int, width: int, rows: int) -> None:
    torch.manual_seed(4)
    start, pairs = drawn(rows, features, width), features * (features - 1) // 2
    slope = drawn(rows, pairs)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    found, expected = hand_written.Dots.apply(ours), plain_kernels.dots(theirs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    (found * slope).sum().backward()
    (expected * slope).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.grad, plain_kernels.dots_backward(start, slope), rtol=1e-4, atol=1e-4)


@with_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_products_in_half_precision(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bf16 by its bits")
    torch.manual_seed(5)
    x, slope = drawn(3, 7, 19, dtype=dtype), drawn(3, 21, dtype=dtype)
    close = {"rtol": 2e-2, "atol": 5e-2}
    assert kernels.dots(x).dtype == dtype
    torch.testing.assert_close(kernels.dots(x).float(), plain_kernels.dots(x.float()), **close)
    found = kernels.dots_backward(x, slope)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), plain_kernels.dots_backward(x.float(), slope.float()), **close)


@with_triton
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_a_rate_that_lies_beside_the_table_is_read_when_rows_are_updated(rule: kernels.Rule) -> None:
    ends = []
    for rate in (0.25, torch.full((), 0.25, device=DEVICE)):
        weight, gradient = torch.ones(5, 3, device=DEVICE), torch.ones(4, 3, device=DEVICE)
        ids = torch.tensor([4, 0, 4, -1], device=DEVICE)
        states = [torch.ones(5, 1 if rule == "rowwise_adagrad" else 3, device=DEVICE) for _ in range(2)]
        kept = {"sgd": 0, "adam": 2}.get(rule, 1)
        corrections = torch.tensor([0.5, 0.5], device=DEVICE)
        betas = (0.9, 0.99)
        kernels.update_rows(
            rule, weight, ids, gradient, states[:kept], lr=rate, eps=1e-8, betas=betas, corrections=corrections
        )
        ends.append(weight)
    assert_close(ends[0], ends[1])
    assert torch.equal(ends[0][1], torch.ones(3, device=DEVICE))
    assert not torch.equal(ends[0][4], ends[0][0])


# --- without a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@with_triton
def test_every_kernel_compiles_for_a_gpu_that_need_not_be_here() -> None:
    """The interpreter runs what the compiler refuses: names from outside the kernel, types that do not fit."""
    some = ["gather 19", *(f"update {rule} 19" for rule in RULES), "update adam 128 bf16", "dots 5x19"]
    command = [sys.executable, "-m", "scripts.check_kernels", "--for", "90", "--processes", "1", "--only", *some]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("variants compiled; 0 spill at sizes of the benchmarks")


# --- behind the one interface ----------------------------------------------------------------------------------------

SPEC = FeatureSpec.from_dict(
    {
        "feature_spec": {
            "page": {"dtype": "int64", "cardinality": 7, "vocabulary": "pages"},
            "hour": {"dtype": "int8", "cardinality": 4},
            "shop": {"dtype": "int32", "cardinality": 5},
            "seen": {"dtype": "int64", "cardinality": 7, "vocabulary": "pages", "length": 3, "padding": 0},
            "tags": {"dtype": "int64", "cardinality": 6, "length": 2, "padding": 0},
            "label": {"dtype": "float32"},
        },
        "channel_spec": {"context": ["page", "hour", "shop", "seen", "tags"], "label": ["label"]},
    }
)
INPUTS = {
    "page": torch.tensor([1, 6, 1, 0, 2]),
    "hour": torch.tensor([0, 3, 3, 1, 2], dtype=torch.int8),
    "shop": torch.tensor([4, 4, 4, 0, 1], dtype=torch.int32),
    "seen": torch.tensor([[1, 2, 0], [0, 0, 0], [6, 6, 6], [0, 5, 0], [1, 0, 2]]),
    "tags": torch.tensor([[5, 0], [0, 0], [1, 5], [2, 2], [0, 3]]),
}
BATCH = {name: ids.to(DEVICE) for name, ids in INPUTS.items()}
WIDE = {"page": 3, "hour": 3, "shop": 5, "seen": 3, "tags": 3}


def embeddings_of(combiner: Literal["sum", "mean"] = "sum", max_rows: int | None = None) -> Embeddings:
    torch.manual_seed(6)
    made = Embeddings(SPEC, WIDE, combiner=combiner, start="uniform", max_rows=max_rows)
    return made.to(DEVICE)


def optimizers_of(embeddings: Embeddings, optimizer: str, backend: kernels.Backend) -> Optimizers:
    settings = OptimizerSettings.model_validate(
        {"optimizer": optimizer, "learning_rate": 0.1, "initial_accumulator": 0.1}
    )
    made = Optimizers(embeddings.named_parameters(), settings)
    embeddings.backend = backend
    made.use_backend(backend)
    if backend == "fbgemm":
        embeddings.updates = {key: made.fused_update(f"stores.{key}") for key in embeddings.stores}
    else:
        embeddings.sparse = set(embeddings.stores)
    return made


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("max_rows", [None, 3])
def test_every_backend_looks_up_the_same_vectors(
    backend: kernels.Backend, combiner: Literal["sum", "mean"], max_rows: int | None
) -> None:
    plain, other = embeddings_of(combiner, max_rows), embeddings_of(combiner, max_rows)
    optimizers_of(other, "sgd", backend)
    assert plain.state_dict().keys() == other.state_dict().keys()
    for names in (None, ("page", "shop"), ("seen",), ("hour", "tags")):
        torch.testing.assert_close(other(BATCH, names), plain(BATCH, names))
    nothing = {name: ids[:0] for name, ids in BATCH.items()}
    assert other(nothing).shape == (0, sum(WIDE.values()))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rmsprop"])
def test_every_backend_takes_the_same_steps(
    backend: kernels.Backend, combiner: Literal["sum", "mean"], optimizer: str
) -> None:
    """Two features share a table, so a row's gradients come from both and have to be summed before they are squared."""
    if backend == "fbgemm" and optimizer not in kernels.FBGEMM_RULES:
        pytest.skip("fbgemm has no such update on a CPU")
    found = []
    for which in ("torch", backend):
        embeddings = embeddings_of(combiner)
        optimizers = optimizers_of(embeddings, optimizer, cast(kernels.Backend, which))
        for _ in range(3):
            (embeddings(BATCH) ** 2).sum().backward()
            optimizers.step()
            optimizers.zero_grad()
        found.append({**embeddings.state_dict(), **optimizers.tensors()})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        torch.testing.assert_close(
            found[1][name], expected, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n} {text}"
        )


@with_triton
def test_vectors_that_are_summed_to_logits_keep_their_tables_type_under_autocast() -> None:
    embeddings = embeddings_of()
    embeddings.backend, embeddings.in_autocast_type = "triton", False
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert embeddings(BATCH, ("page", "shop")).dtype == torch.float32


@with_triton
def test_vectors_are_gathered_in_autocasts_type() -> None:
    embeddings, plain = embeddings_of(), embeddings_of()
    embeddings.backend = "triton"
    assert embeddings(BATCH).dtype == torch.float32
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        found = embeddings(BATCH, ("page", "shop"))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), plain(BATCH, ("page", "shop")), rtol=2**-7, atol=1e-6)
    found.float().sum().backward()
    assert embeddings.stores["3"].grad.dtype == torch.float32


@with_triton
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "rmsprop", "ftrl"])
@pytest.mark.parametrize("sparse", [True, False])
def test_an_id_outside_its_table_ends_in_a_loss_of_nan_with_every_optimizer(optimizer: str, sparse: bool) -> None:
    """And in no error of its own: on a GPU, that would be the last that the process does there."""
    embeddings = embeddings_of()
    optimizers = optimizers_of(embeddings, optimizer, "triton")
    embeddings.sparse = set(embeddings.stores) if sparse else set()
    hour, page = torch.tensor([[0, 3, 4, 1, 2], [0, -2, 0, 0, 700]], device=DEVICE)
    wrong = {**BATCH, "hour": hour, "page": page}
    for batch in (wrong, wrong, BATCH):
        loss = (embeddings(batch) ** 2).sum()
        assert loss.isnan() or batch is BATCH
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()


def test_the_setting_torch_keeps_triton_out_of_dlrm(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: object) -> Tensor:
        raise RuntimeError("a kernel was launched")

    monkeypatch.setattr(kernels, "_picks_triton", lambda _: True)  # as on a GPU
    monkeypatch.setattr(kernels, "_compiled", launched)
    spec = FeatureSpec.from_dict(
        {
            "feature_spec": {"I1": {"dtype": "float32"}, **{name: {"cardinality": 3} for name in "AB"}, "label": {}},
            "channel_spec": {"context": ["I1", "A", "B"], "label": ["label"]},
        }
    )
    sizes = MODELS["dlrm"].Settings.model_validate({"embedding_dim": 4, "bottom": (4,), "top": (8,)})
    model = MODELS["dlrm"](spec, sizes)
    ids = torch.tensor([0, 2])
    batch = {"I1": torch.ones(2), "A": ids, "B": ids, "label": torch.ones(2)}
    with pytest.raises(RuntimeError, match="a kernel was launched"):
        model.loss(batch)
    model.embeddings.backend = "torch"
    model.embeddings.sparse = set(model.embeddings.stores)
    optimizers = Optimizers(model.named_parameters(), OptimizerSettings(optimizer="adagrad", learning_rate=0.1))
    optimizers.use_backend("torch")
    model.loss(batch).backward()
    optimizers.step()


@with_fbgemm
def test_fbgemm_is_given_no_id_outside_its_table() -> None:
    embeddings = embeddings_of()
    optimizers_of(embeddings, "sgd", "fbgemm")
    wrong = {**BATCH, "hour": torch.tensor([0, 3, 4, 1, 2]), "page": torch.tensor([0, -2, 0, 0, 0])}
    with pytest.raises(DataError) as caught:
        embeddings(wrong)
    assert "feature 'hour': ids from 0 to 4; its table has rows 0 to 3" in str(caught.value)
    assert "feature 'page': ids from -2 to 0; its table has rows 0 to 6" in str(caught.value)


# --- a training run --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.clicks(tmp_path_factory.mktemp("kernels") / "clicks", num_rows=400)


def run(spec: FeatureSpec, folder: Path, backend: str, *, resume: bool = False, **values: object) -> Path:
    """A DLRM's run; the same rows and steps whatever the backend."""
    chosen = {
        "batch_size": 80,
        "epochs": 1,
        "optimizer": "rowwise_adagrad",
        "learning_rate": 0.05,
        "tensorboard": False,
    }
    settings = TrainSettings.model_validate(
        {**chosen, "sparse_gradients": "always", "embedding_backend": backend, "precision": "fp32", **values}
    )
    sizes = MODELS["dlrm"].Settings.model_validate({"embedding_dim": 4, "bottom": (8, 4), "top": (8,)})
    ranks = Ranks(device=DEVICE if backend in ("torch", "triton") else torch.device("cpu"))
    train("dlrm", spec, folder, settings=settings, model_settings=sizes, ranks=ranks, resume=resume)
    return folder


def started(folder: Path) -> Mapping[str, object]:
    with (folder / "log.jsonl").open(encoding="utf-8") as lines:
        return cast(Mapping[str, object], json.loads(next(lines)))


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(bundle.load(folder / "bundle").model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_ends_with_the_same_weights_and_goes_on_with_another_backend(
    backend: str, clicks: FeatureSpec, tmp_path: Path
) -> None:
    plain, other = run(clicks, tmp_path / "torch", "torch"), run(clicks, tmp_path / backend, backend)
    assert started(plain)["embedding_backend"] == "torch"
    assert started(other)["embedding_backend"] == backend
    pairs = [(weights(plain), weights(other))]
    saved = [checkpoint.load_latest(folder / "checkpoints")[0].optimizer for folder in (plain, other)]
    pairs.append((dict(saved[0]), dict(saved[1])))
    run(clicks, plain, "torch", epochs=2, resume=True)
    run(clicks, other, "torch", epochs=2, resume=True)
    pairs.append((weights(plain), weights(other)))
    for expected, found in pairs:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


@with_fbgemm
def test_a_bundle_trained_with_fbgemm_loads_without_it(clicks: FeatureSpec, tmp_path: Path) -> None:
    folder = run(clicks, tmp_path / "run", "fbgemm")
    code = (
        "import sys; sys.modules['fbgemm_gpu'] = None; from recspec.bundle import folder as bundle; "
        "from pathlib import Path; print(bundle.load(Path(sys.argv[1])).card.model)"
    )
    done = ended(code, str(folder / "bundle"))
    assert (done.returncode, done.stdout) == (0, "dlrm\n"), done.stderr


def test_auto_takes_torch_on_a_cpu(clicks: FeatureSpec, tmp_path: Path) -> None:
    assert started(run(clicks, tmp_path / "run", "auto"))["embedding_backend"] == "torch"
    assert get_args(TrainSettings.model_fields["embedding_backend"].annotation) == ("auto", *get_args(kernels.Backend))


def test_triton_without_a_gpu_is_refused(clicks: FeatureSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SettingsError) as caught:
        run(clicks, tmp_path / "run", "triton")
    message = str(caught.value)
    assert message.startswith("train.embedding_backend is triton; auto takes what is there")
    assert "triton's kernels run on a GPU, and this run is on cpu" in message


def test_what_is_not_installed_and_what_a_device_lacks_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert kernels.why_not("torch", gpu) is None
    assert "triton is not installed; it comes with torch's CUDA builds" in str(kernels.why_not("triton", gpu))
    assert "pip install 'recspec[fbgemm]'" in str(kernels.why_not("fbgemm", cpu))
    assert "fbgemm is used on a CPU, and this run is on cuda" in str(kernels.why_not("fbgemm", gpu))


def test_triton_needs_a_compiler_and_headers_to_launch_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(sysconfig, "get_paths", lambda _: {"include": str(tmp_path)})
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert "neither gcc nor clang is there" in str(kernels.why_not("triton", gpu))
    monkeypatch.setenv("CC", "/opt/cc")
    assert f"{tmp_path / 'Python.h'} is missing (apt-get install python3-dev)" in str(kernels.why_not("triton", gpu))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "Python.h").touch()
    monkeypatch.setenv("CPATH", f":{tmp_path / 'there'}")
    assert kernels.why_not("triton", gpu) is None


def test_all_that_needs_gradients_is_refused_with_fbgemm(clicks: FeatureSpec, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        run(
            clicks,
            tmp_path / "run",
            "fbgemm",
            accumulate=2,
            clip_norm=1.0,
            sparse_gradients="never",
            compile=True,
            optimizer="adam",
        )
    message = str(caught.value)
    for what in ("accumulate is 2", "clip_norm is 1.0", "sparse_gradients is never", "compile is true"):
        assert f"train.{what}, which needs gradients" in message
    assert "embeddings.stores.4: fbgemm cannot update tables by optimizer 'adam'; it has 'sgd', " in message
    with pytest.raises(SettingsError, match=r"embeddings\.stores\.4: fbgemm cannot update tables by momentum 0\.9"):
        run(clicks, tmp_path / "run", "fbgemm", optimizer="sgd", momentum=0.9)


def test_a_part_may_have_an_optimizer_of_its_own_with_fbgemm() -> None:
    weights = nn.ParameterDict({"deep": nn.Parameter(torch.ones(2, 2)), "wide": nn.Parameter(torch.ones(2, 1))})
    optimizers = Optimizers(
        weights.named_parameters(),
        OptimizerSettings(optimizer="rowwise_adagrad", learning_rate=0.5),
        {"wide": OptimizerSettings(optimizer="sgd", learning_rate=0.25)},
    )
    update = optimizers.fused_update("wide")
    assert (update.rule, update.group["lr"], update.states()) == ("sgd", 0.25, [])
    update = optimizers.fused_update("deep")
    assert (update.rule, update.group["lr"]) == ("rowwise_adagrad", 0.5)
    assert [state.shape for state in update.states()] == [(2, 1)]
