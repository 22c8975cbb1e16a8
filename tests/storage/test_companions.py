"""Catalogues, vocabularies and encoders go along with a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from recspec.base.errors import DataError, SpecError
from recspec.data.storage import transcode
from tests.storage.files import spec_of


def test_transcode_takes_the_companions_along(tmp_path: Path) -> None:
    source = tmp_path / "a"
    (source / "vocabularies").mkdir(parents=True)
    for name in ("vocabularies/a.parquet", "items.parquet", "encoders.json", "prepare.json"):
        (source / name).write_text(name)
    metadata = {"catalogues": {"item": "items.parquet"}, "encoders": "encoders.json", "vocabularies": "vocabularies"}
    (source / "t.csv").write_text("0,0\n")
    sources = {"train": [{"type": "csv", "features": ["a", "label"], "files": ["t.csv"]}]}
    spec = spec_of(source, {"a": {"cardinality": 1}}, sources, metadata=metadata)
    transcode(spec, tmp_path / "b")
    for name in ("vocabularies/a.parquet", "items.parquet", "encoders.json", "prepare.json"):
        assert (tmp_path / "b" / name).read_text() == name


def test_companions_that_are_missing_or_outside_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_text("")
    (tmp_path / "in" / "encoders.json").write_text("")
    (tmp_path / "in" / "t.csv").write_text("0\n")
    sources = {"train": [{"type": "csv", "features": ["label"], "files": ["t.csv"]}]}
    metadata = {"catalogues": {"item": "../secret"}}
    with pytest.raises(SpecError, match=r"metadata.catalogues.item: '../secret' leads outside the folder"):
        spec_of(tmp_path / "in", {}, sources, metadata=metadata)
    spec = spec_of(tmp_path / "in", {}, sources, metadata={"encoders": "encoder.json"})
    with pytest.raises(DataError, match=r"names 'encoder.json', which does not exist \(did you mean 'encoders.json'"):
        transcode(spec, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "secret"], "nothing is left behind"
