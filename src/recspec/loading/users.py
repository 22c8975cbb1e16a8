"""Rows of users, for models that know each user's events and learn from whole lists of them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType

from recspec.loading.blocks import Block
from recspec.models import Ids
from recspec.spec import FeatureSpec
from recspec.storage import Columns


class UserRows:
    """A row for each of some users, which holds the user's id."""

    num_values: Mapping[str, int] = MappingProxyType({})
    bytes_read = 0

    def __init__(self, spec: FeatureSpec, users: Ids) -> None:
        self._name, self._users = spec.user_id, users

    def cut(self, rows: int) -> list[Block]:
        """Blocks of at most `rows` users."""
        ends = [*range(0, len(self._users), rows), len(self._users)]
        return [Block(0, first, last, last - first) for first, last in pairwise(ends)]

    def read(self, block: Block) -> Columns:
        """The users of a block."""
        return {self._name: self._users[block.first : block.last]}
