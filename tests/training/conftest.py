"""Made-up datasets that several files train on and none writes to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from recspec.feature_spec import FeatureSpec
from tests import made_up


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, FeatureSpec]:
    folder = tmp_path_factory.mktemp("datasets")
    return {
        "interactions": made_up.interactions(folder / "interactions"),
        "clicks": made_up.clicks(folder / "clicks"),
        "sequences": made_up.sequences(folder / "sequences"),
    }
