"""A made-up dataset that several files search on and none writes to."""

from __future__ import annotations

import pytest

from recspec.feature_spec import FeatureSpec
from tests import made_up


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("data") / "data", num_rows=1200)
