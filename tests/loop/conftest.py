"""A journal on every database: SQLite; and PostgreSQL where `RECSPEC_POSTGRES` names one, or 127.0.0.1 answers."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

LOCAL = "postgresql+psycopg://postgres@127.0.0.1:5432/test"


@cache
def postgres() -> str | None:
    """URL of a database of PostgreSQL for tests; None if there is none."""
    if named := os.environ.get("RECSPEC_POSTGRES"):
        return named
    try:
        import psycopg

        with socket.create_connection(("127.0.0.1", 5432), timeout=1):
            pass
        psycopg.connect(LOCAL.replace("+psycopg", ""), connect_timeout=2).close()
    except (ImportError, OSError, psycopg.Error):
        return None
    return LOCAL


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """A journal's URL in a schema of its own, which is dropped at the end."""
    url = postgres()
    if url is None:
        pytest.skip("no PostgreSQL: RECSPEC_POSTGRES names none, and 127.0.0.1:5432 does not answer")
    import psycopg

    schema = f"recspec_{uuid.uuid4().hex}"
    plain = url.replace("+psycopg", "")
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {schema}")
    try:
        yield f"{url}?options=-csearch_path%3D{schema}"
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(f"DROP SCHEMA {schema} CASCADE")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty journal, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'journal.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found
