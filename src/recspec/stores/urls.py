"""URLs of stores: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `hdfs://HOST:PORT/PATH`, and `file:///PATH` of this machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePath

from recspec.files import PathError, masked

SCHEMES = ("s3", "gs", "hdfs", "file")
MOST_NAME_BYTES, MOST_PART_BYTES = 1024, 255
"""Of a key, as S3 and GCS allow; of a part of it, as local file systems allow."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)
_SHORTENED = re.compile(rf"({'|'.join(SCHEMES)}):/(?!/)(.*)", re.DOTALL)
"""What is left of a URL that was made a `Path`, which takes two slashes for one."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_HDFS_HOST = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(:[0-9]{1,5})?)?")


@dataclass(frozen=True)
class Url:
    """A place in a store: the parts of its key lie in the bucket or under the host."""

    scheme: str
    host: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join((self.host, *self.parts))}"

    @property
    def name(self) -> str:
        """Its last part, or the bucket."""
        return self.parts[-1] if self.parts else self.host or self.scheme

    @property
    def parent(self) -> Url:
        """The folder that it lies in."""
        return Url(self.scheme, self.host, self.parts[:-1])

    def below(self, name: str) -> Url:
        """The place of a relative name in it."""
        return Url(self.scheme, self.host, (*self.parts, *name.split("/")))


def url_text(value: object) -> str | None:
    """The URL that a text or a path spells; None for anything else, such as `C:\\x`, `a:b` and `./s3:/x`."""
    if not isinstance(value, (str, os.PathLike)):
        return None
    text = os.fspath(value)
    if not isinstance(text, str):
        return None
    if _URL.fullmatch(text):
        return text
    if isinstance(value, PurePath) and (found := _SHORTENED.fullmatch(text)):
        return f"{found[1]}:///{found[2]}" if found[1] == "file" else f"{found[1]}://{found[2]}"
    return None


def parse(text: str, what: str) -> Url:
    """The URL that a user typed as `what`.

    Raises PathError, which shows no secret, for an unknown scheme, a user or password, a query, and a name that could
    lead elsewhere.
    """
    found = _URL.fullmatch(text)
    where = f"{what}: '{masked(text)}'"
    if found is None:
        raise PathError(f"{where} is no URL; expected such as s3://BUCKET/KEY")
    scheme, rest = found[1].lower(), found[2]
    if scheme not in SCHEMES:
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise PathError(f"{where} is a URL of the scheme '{scheme}'; supported: {known}")
    host, _, key = rest.partition("/")
    if "@" in host:
        raise PathError(f"{where} holds a user or a password; leave it out: credentials come from the environment or a "
                        "profile of the store")  # fmt: skip
    if "?" in rest or "#" in rest:
        raise PathError(f"{where} holds '?' or '#'; expected a bucket and a key alone: settings of the store, such as "
                        "AWS_ENDPOINT_URL, come from the environment")  # fmt: skip
    if scheme == "file":
        if host not in ("", "localhost"):
            raise PathError(f"{where} names the host '{host}'; expected file:///PATH with three slashes")
        return Url(scheme, "", tuple(part for part in key.split("/") if part))
    if not (_HDFS_HOST if scheme == "hdfs" else _HOST).fullmatch(host):
        raise PathError(f"{where} has no valid {'host' if scheme == 'hdfs' else 'bucket'} after {scheme}://")
    key = key.rstrip("/")
    if key and (problem := name_problem(key)):
        raise PathError(f"{where}: its key {problem}")
    return Url(scheme, host, tuple(key.split("/")) if key else ())


def local_of(url: Url) -> Path:
    """The local path of a `file://` URL."""
    return Path("/", *url.parts)


def name_problem(name: str) -> str | None:
    """Why a key can't be the name of a local file below a folder; None if it can.

    Names with `..`, empty parts, backslashes, drive letters or control characters lead elsewhere somewhere.
    """
    if not name:
        return "is empty"
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    if len(encoded) > MOST_NAME_BYTES:
        return f"is longer than {MOST_NAME_BYTES:,} bytes"
    if not name.isprintable():
        return "holds characters that can't be printed"
    if "\\" in name:
        return "holds a backslash"
    if "?" in name or "#" in name:
        return "holds '?' or '#', which have a meaning in a URL"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"holds the part '{part}'; expected names between single slashes"
        if len(part.encode()) > MOST_PART_BYTES:
            return f"holds a part longer than {MOST_PART_BYTES} bytes"
    return None
