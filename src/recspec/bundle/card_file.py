"""The JSON files of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from recspec.errors import BundleError, problems_in
from recspec.files import PathError, confined, read_json

CardType = TypeVar("CardType", bound=BaseModel)


def read(folder: Path, name: str, kind: type[CardType], *, what: str, version: int) -> CardType:
    """The content of a file of a bundle, which is a `what` of a known version.

    Raises:
        BundleError: if the file is damaged, or of another version.
    """
    file = folder / name
    try:
        confined(folder, name)
        data = read_json(file)
        if isinstance(data, dict) and data.get("format") != version:
            raise BundleError(f"{file}: {what} format {data.get('format')!r}; this recspec reads {version}")
        return kind.model_validate(data)
    except PathError as error:
        raise BundleError(str(error)) from None
    except ValidationError as error:
        raise BundleError.of(f"{file}: damaged", problems_in(error)) from None
