"""URLs of stores: what is one, what is refused, and that no secret is shown."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recspec.base.files import PathError, confined, local, masked
from recspec.base.stores import parse, url_text
from recspec.base.stores.store import Url, local_of, name_problem


def test_a_url_is_taken_apart() -> None:
    assert parse("s3://bucket/a/b c", "DATA") == Url("s3", "bucket", ("a", "b c"))
    assert parse("gs://bucket", "DATA") == Url("gs", "bucket", ())
    assert parse("S3://bucket/a/", "DATA") == Url("s3", "bucket", ("a",))
    assert parse("hdfs://name:8020/user/a", "DATA") == Url("hdfs", "name:8020", ("user", "a"))
    assert parse("hdfs:///user/a", "DATA") == Url("hdfs", "", ("user", "a"))
    assert local_of(parse("file:///tmp/a", "DATA")) == Path("/tmp/a") == local_of(parse("file://localhost/tmp/a", "x"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://id:SECRET@bucket/x", r"DATA: 's3://\*\*\*@bucket/x' holds a user or a password; leave it out"),
        ("s3://bucket/x?secret_key=SECRET", r"DATA: 's3://bucket/x\?\*\*\*' holds '\?' or '#'"),
        ("ftp://id:SECRET@host/x", r"'ftp://\*\*\*@host/x' is a URL of the scheme 'ftp'.*supported: s3://, gs://"),
        ("s4://bucket/x", r"of the scheme 's4'; supported: s3://, gs://, hdfs://, file://"),
        ("s3:///x", r"'s3:///x' has no valid bucket after s3://"),
        ("s3://bucket/a/../b", r"its key holds the part '\.\.'"),
        ("s3://bucket//a", r"its key holds the part ''"),
        ("s3://bucket/a\\b", r"holds a backslash"),
        ("s3://bucket/a\nb", r"holds characters that can't be printed"),
        ("hdfs://a:b:c/x", r"has no valid host after hdfs://"),
        ("file://host/x", r"names the host 'host'; expected file:///PATH with three slashes"),
    ],
)
def test_a_url_that_could_mean_something_else_is_refused(url: str, message: str) -> None:
    with pytest.raises(PathError, match=message) as told:
        parse(url, "DATA")
    assert "SECRET" not in str(told.value)


def test_local_names_with_a_colon_stay_local() -> None:
    for name in (
        "C:\\x",
        "C:/x",
        "c:x",
        "a:b",
        "12:30/x",
        "s3:",
        "./s3://x",
        "/s3://x",
        ":",
        "//host/x",
        "",
        "x://"[:1],
    ):
        assert url_text(name) is None
    for path in (Path("C:/x"), Path("a:b"), PurePosixPath("s3"), PureWindowsPath("C:/x"), None, 3, b"s3://b"):
        assert url_text(path) is None
    assert url_text(Path("s3://bucket/x")) == "s3://bucket/x"  # which has one slash by now
    assert url_text(Path("file:///tmp/x")) == "file:///tmp/x"


def test_what_is_no_url_of_a_store_shows_no_secret_either() -> None:
    assert masked("http://me:SECRET@host/a?token=SECRET") == "http://***@host/a?***"
    with pytest.raises(PathError, match=r"RUN: 's3://\*\*\*@b/x' is a URL, and only local paths are supported here"):
        local("s3://id:SECRET@b/x", "RUN")


@pytest.mark.parametrize("name", [os.fsdecode(b"\xff\xfe.csv"), Path("rows") / os.fsdecode(b"\xff"), "\ud800"])
def test_a_name_that_is_not_utf_8_is_refused_where_it_comes_in(name: str | Path) -> None:
    shown = str(name).encode("utf-8", "backslashreplace").decode()
    with pytest.raises(PathError) as caught:
        local(name, "RAW")
    assert str(caught.value) == f"RAW: the name '{shown}' holds bytes that are not UTF-8; rename it"


NAMES = st.text(st.sampled_from("a./\\:?#%\0\n\x7f é*~ ‮"), max_size=12) | st.text(max_size=40)


@given(NAMES)
def test_a_name_that_is_taken_lies_in_its_folder(name: str) -> None:
    folder = Path("/nonexistent/folder")
    if name_problem(name) is None:
        inside = confined(folder, name)
        assert inside.resolve().is_relative_to(folder)
        assert inside.relative_to(folder).as_posix() == name
        assert parse(f"s3://bucket/{name}", "x").parts == tuple(name.split("/"))
        assert str(parse(f"s3://bucket/{name}", "x")) == f"s3://bucket/{name}"


@given(st.text(st.characters(exclude_characters="/?#"), min_size=1, max_size=20), NAMES)
def test_no_url_shows_what_stands_before_the_at(secret: str, name: str) -> None:
    with pytest.raises(PathError) as told:
        parse(f"s3://id:{secret}42secret42@bucket/{name}", "x")
    assert "42secret42" not in str(told.value)
