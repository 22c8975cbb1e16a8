"""An engine that the tests of preparation share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recspec.data.prepare.backend import Backend
from tests.prepare.small_tables import connect


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    with connect(folder=tmp_path_factory.mktemp("tables") / "work", threads=1) as opened:
        yield opened
