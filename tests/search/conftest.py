"""What the tests of searches share: a made-up dataset that none writes to, and short measurements of latency."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recspec.feature_spec import FeatureSpec
from recspec.training.search import finish
from tests import made_up


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> FeatureSpec:
    return made_up.interactions(tmp_path_factory.mktemp("data") / "data", num_rows=1200)


@pytest.fixture(scope="module", autouse=True)
def quick_latency() -> Iterator[None]:
    """A line's latency is measured for as long as three calls take; the figure itself is nobody's promise here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "SECONDS", 0.0)
        yield
