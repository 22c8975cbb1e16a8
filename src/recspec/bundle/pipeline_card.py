"""What makes a bundle a pipeline: the content of its `pipeline.json`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from recspec.bundle import card_file

FILE_NAME = "pipeline.json"
FORMAT = 1
RETRIEVERS = "retrievers"
"""Folder of a pipeline that holds the bundle of each retriever."""
MOST_RETRIEVERS = 15
MOST_CANDIDATES = 100_000
POPULARITY = "popularity"
"""What brings the items that fill up a list of candidates."""

NAME = "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
"""Names of retrievers, which are names of folders too."""


class RetrieverCard(BaseModel):
    """One retriever of a pipeline; its bundle is the folder `retrievers/NAME`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=NAME)
    has_index: bool
    """Whether it searches an index of item vectors; otherwise it scores all items."""


class PipelineCard(BaseModel):
    """The content of `pipeline.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    candidates: int = Field(ge=1, le=MOST_CANDIDATES)
    """Items that the ranker scores for each request."""
    filter: str | None = Field(None, max_length=10_000)
    """Expression over the columns of the item catalogue; other items are never candidates."""
    retrievers: tuple[RetrieverCard, ...] = Field(min_length=1, max_length=MOST_RETRIEVERS)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [each.name for each in self.retrievers]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two retrievers are called '{min(twice)}'")
        return self

    @property
    def described(self) -> str:
        """The candidates in words."""
        names = " and ".join(each.name for each in self.retrievers)
        kept = "" if self.filter is None else f", of items with {self.filter}"
        return f"{self.candidates:,} candidates of {names}{kept}"


def read_pipeline(folder: Path) -> PipelineCard | None:
    """The pipeline of a bundle; None if the bundle is a model alone.

    Raises:
        BundleError: if the file is damaged, or of another format.
    """
    if not os.path.lexists(folder / FILE_NAME):  # a link that leads nowhere is refused
        return None
    return card_file.read(folder, FILE_NAME, PipelineCard, what="pipeline", version=FORMAT)
