"""The arithmetic of a step and its reason."""

from __future__ import annotations

import pytest
import torch

from recspec.errors import SettingsError
from recspec.training.precision import pick_precision

CPU = torch.device("cpu")


def test_auto_says_why_and_fp16_on_a_cpu_is_refused() -> None:
    precision, why = pick_precision("auto", CPU)
    told = {"bf16": "multiplies bf16 faster", "tf32": "through oneDNN", "fp32": "multiplies nothing faster"}
    assert told[precision] in why
    precision, why = pick_precision("auto", CPU, steady=False)
    assert (precision, "products change shape at every step" in why) == ("fp32", True)
    with pytest.raises(SettingsError, match="fp16, which a CPU does many times slower than fp32; use bf16 or fp32"):
        pick_precision("fp16", CPU)
