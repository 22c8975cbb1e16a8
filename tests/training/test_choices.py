"""The choices of a run and their reasons."""

from __future__ import annotations

import pytest
import torch

from recspec.base.errors import SettingsError
from recspec.models import MODELS, Shapes
from recspec.models.din import SequenceModel
from recspec.training.choices import Choice, pick_batch_size, pick_event_products, pick_precision
from recspec.training.product_rates import ProductRates


@pytest.mark.parametrize(
    ("asked", "resumed", "samples", "device", "size", "why"),
    [
        (7, 9, 10, "cpu", 7, "as asked"),
        (None, 9, 10, "cpu", 9, "as at the start of the run"),
        (None, None, 0, "cpu", 256, "the smallest automatic size, for an epoch of 0 samples"),
        (None, None, 10_000, "cpu", 256, "the smallest automatic size, for an epoch of 10,000 samples"),
        (None, None, 1_000_000, "cpu", 4096, "200 to 400 steps for an epoch of 1,000,000 samples"),
        (None, None, 10**8, "cpu", 65536, "the most chosen on a cpu, for an epoch of 100,000,000 samples"),
        (None, None, 10**8, "cuda", 131072, "the most chosen on a cuda, for an epoch of 100,000,000 samples"),
    ],
)
def test_an_unset_batch_size_makes_some_hundred_steps(
    asked: int | None, resumed: int | None, samples: int, device: str, size: int, why: str
) -> None:
    assert pick_batch_size(asked, resumed, samples, torch.device(device)) == Choice(size, why)


CPU = torch.device("cpu")
WITHOUT_BF16 = ProductRates(wide_fp32=138, wide_tf32=118, wide_bf16=28, narrow_fp32=102, narrow_tf32=70)
"""As measured on an Intel Xeon (Ice Lake)."""
WITH_BF16 = ProductRates(wide_fp32=115, wide_tf32=248, wide_bf16=450, narrow_fp32=40, narrow_tf32=165)
"""As measured on an AMD EPYC (Zen 5)."""
WITH_AMX = ProductRates(wide_fp32=146, wide_tf32=393, wide_bf16=321, narrow_fp32=124, narrow_tf32=104)
"""As measured on an Intel Xeon (Sapphire Rapids)."""
WITH_HALF_UNITS = ProductRates(wide_fp32=97, wide_tf32=105, wide_bf16=182, narrow_fp32=81.6, narrow_tf32=81.2)
"""As measured on an AMD EPYC (Zen 4)."""
SLOW_BLAS = ProductRates(wide_fp32=35, wide_tf32=118, wide_bf16=28, narrow_fp32=20, narrow_tf32=70)


@pytest.mark.parametrize(
    ("shapes", "rates", "precision", "why"),
    [
        ("steady", WITHOUT_BF16, "fp32", "multiplies nothing faster (measured: tf32 0.86, bf16 0.2 times)"),
        ("few", WITHOUT_BF16, "fp32", "multiplies nothing faster (measured: tf32 0.93, bf16 0.37 times)"),
        ("steady", WITH_BF16, "bf16", "multiplies 3.9 times as fast as in fp32 (measured; tf32: 2.2)"),
        ("few", WITH_BF16, "bf16", "multiplies 4.1 times as fast as in fp32 (measured; tf32: 3.3)"),
        ("steady", WITH_AMX, "bf16", "multiplies 2.2 times as fast as in fp32 (measured; tf32: 2.7)"),
        ("steady", WITH_HALF_UNITS, "bf16", "multiplies 1.9 times as fast as in fp32 (measured; tf32: 1.1)"),
        ("few", WITH_HALF_UNITS, "bf16", "multiplies 1.3 times as fast as in fp32 (measured; tf32: 1)"),
        ("few", WITH_AMX, "tf32", "multiplies 1.4 times as fast through oneDNN (measured; bf16: 1.3 times)"),
        ("steady", SLOW_BLAS, "tf32", "multiplies 3.4 times as fast through oneDNN (measured; bf16: 0.8 times)"),
        ("few", SLOW_BLAS, "tf32", "multiplies 3.5 times as fast through oneDNN"),
        ("changing", WITH_BF16, "fp32", "products change shape at every step"),
    ],
)
def test_auto_takes_what_this_cpu_multiplies_fastest(
    shapes: Shapes, rates: ProductRates, precision: str, why: str
) -> None:
    choice = pick_precision("auto", CPU, shapes, lambda: rates)
    assert (choice.value, why in choice.reason) == (precision, True), choice


@pytest.mark.parametrize(
    ("rates", "value", "why"),
    [
        (WITH_BF16, "onednn", "multiplies narrow matrices 4.1 times as fast through oneDNN (measured)"),
        (WITH_HALF_UNITS, "blas", "narrow matrices no faster through oneDNN (measured); it pays from 2 times on"),
        (WITH_AMX, "blas", "multiplies narrow matrices 0.84 times as fast through oneDNN (measured)"),
    ],
)
def test_products_over_events_go_the_faster_way(rates: ProductRates, value: str, why: str) -> None:
    for precision in ("tf32", "bf16"):
        choice = pick_event_products(precision, CPU, "few", lambda: rates)
        assert choice is not None
        assert (choice.value, why in choice.reason) == (value, True), choice
        again = pick_event_products(precision, CPU, "few", lambda: WITH_AMX, resumed="onednn")
        assert again == Choice("onednn", "as at the start of the run")


def test_where_products_over_events_have_one_way_nothing_is_chosen() -> None:
    def measure() -> ProductRates:
        raise AssertionError

    assert pick_event_products("fp32", CPU, "few", measure) is None
    assert pick_event_products("bf16", CPU, "steady", measure) is None
    assert pick_event_products("bf16", torch.device("cuda"), "few", measure) is None


def test_nothing_is_measured_for_a_setting_or_a_run_that_continues() -> None:
    def measure() -> ProductRates:
        raise AssertionError

    assert pick_precision("bf16", CPU, "few", measure) == Choice("bf16", "as asked")
    assert pick_precision("auto", CPU, "few", measure, resumed="bf16") == Choice("bf16", "as at the start of the run")
    assert pick_precision("fp32", CPU, "few", measure, resumed="bf16") == Choice("fp32", "as asked")
    for unknown in (None, "auto", "fp16", "fp8", 3, ["bf16"]):
        assert pick_precision("auto", CPU, "few", lambda: WITHOUT_BF16, resumed=unknown).value == "fp32"
    with pytest.raises(SettingsError, match="fp16, which a CPU does many times slower than fp32; use bf16 or fp32"):
        pick_precision("fp16", CPU, "steady", measure)


def test_models_of_histories_have_few_shapes_where_their_attention_is_computed_in_blocks() -> None:
    for name, model in MODELS.items():
        settings = model.Settings()
        if not issubclass(model, SequenceModel):
            assert model.shapes(settings) == ("changing" if name == "mult_vae" else "steady"), name
            continue
        assert model.shapes(settings) == "few"
        for kind, shapes in {"relu": "few", "prelu": "changing", "dice": "changing"}.items():
            assert model.shapes(model.Settings.model_validate({"attention_activation": kind})) == shapes
