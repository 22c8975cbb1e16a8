"""Every error that a user can cause: the subclasses of `RecspecError`.

A message says where, what was there, what was expected and what to do. The command line prints it and exits with
status 2; anything else that reaches it is our own mistake.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import re
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pydantic import ValidationError


class RecspecError(Exception):
    """A user's mistake, told in one message. `problems` holds each one where several were found at once."""

    told = False  # whether another process of the same run reports it

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[str, ...] = tuple(problems) or (message,)

    @classmethod
    def of(cls, where: str, problems: Iterable[str]) -> Self:
        """One message from all the problems found in one place, sorted, each named once."""
        unique = sorted(set(problems), key=_natural)
        if len(unique) == 1:
            return cls(f"{where}: {unique[0]}", unique)
        lines = "".join(f"\n  - {problem}" for problem in unique)
        return cls(f"{where}: {len(unique)} problems{lines}", unique)

    @classmethod
    def refuse(cls, where: str, problems: Iterable[str]) -> None:
        """Raise `of` the problems, if there are any."""
        if problems := [*problems]:
            raise cls.of(where, problems)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback, which says nothing about a user's mistake."""
        return [f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


def _natural(text: str) -> list[tuple[int, str]]:
    """Sorts `line 9` before `line 10`."""
    parts = re.split(r"([0-9]{1,18})", text)
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]


def problems_in(error: ValidationError) -> list[str]:
    """Where and what every problem of a file's content is."""
    return [f"{'.'.join(map(str, each['loc'])) or 'content'}: {each['msg']}" for each in error.errors()]


class SpecError(RecspecError):
    """A feature specification that is wrong, or lacks what was asked of it."""


class DataError(RecspecError):
    """Raw or prepared files that do not hold what they should."""


class SettingsError(RecspecError):
    """A recipe, a setting or a command-line value that is unknown or out of range."""


class BundleError(RecspecError):
    """A trained model's folder that is missing, damaged or of another kind."""


class CheckpointError(RecspecError):
    """A checkpoint that can't be found, read or continued from."""


class ExportError(RecspecError):
    """A model that can't be made the program that was asked for, or a program whose answers drift from the model's."""


class TrainingError(RecspecError):
    """A run that can't go on (the loss became NaN, a rank died)."""


class RequestError(RecspecError):
    """A request that a server can't answer. `status` is HTTP's; `retry_after` (seconds) is told where waiting helps."""

    def __init__(
        self, message: str, problems: Sequence[str] = (), *, status: int = 400, retry_after: int | None = None
    ) -> None:
        super().__init__(message, problems)
        self.status, self.retry_after = status, retry_after


class Interrupted(RecspecError):
    """A run that was asked to stop, and did so without losing anything."""


class MissingExtraError(RecspecError):
    """An optional library that is not installed."""


UNKNOWN_SHOWN = 10
NAMES_SHOWN, CHARACTERS_SHOWN, LIST_SHOWN = 40, 200, 2_000  # names in a message; characters of each name, of all names
MOST_COMPARED = (
    10_000  # known names that an unknown one is compared with; more take a tenth of a second and tell little
)

_OF_THE_MACHINE = re.compile(
    "E(ACCES|BUSY|DQUOT|EXIST|FBIG|IO|ISDIR|LOOP|MFILE|NAMETOOLONG|NFILE|NODEV|NOENT|NOSPC|NOTDIR|NOTEMPTY|NXIO|PERM|ROFS"
    "|STALE|TXTBSY)"
)
"""Errors of the disk, of a path or of permissions, which our own mistakes do not cause."""
_SAID_IN_WORDS = re.compile(
    "no space left on device|disk quota exceeded|read-only file system|permission denied|file too large"
    "|database or disk is full|attempt to write a readonly database|unable to open database file|input/output error"
    "|file write failed|allocate memory",
    re.IGNORECASE,
)
"""The same, from libraries that give no number."""


def of_the_machine(error: BaseException | None) -> str | None:
    """The message for a full disk, a folder that can't be written to, and the like; None for anything else."""
    first = error
    while error is not None:
        if isinstance(error, MemoryError):
            return "there is not enough memory for this; ask for less at once, or take a larger machine"
        if isinstance(error, OSError) and _OF_THE_MACHINE.fullmatch(errno.errorcode.get(error.errno or 0, "")):
            names = [str(name) for name in (error.filename, error.filename2) if name is not None]
            text = error.strerror or str(error)
            return f"{' -> '.join(names)}: {text}" if names else text
        if _SAID_IN_WORDS.search(str(error)):
            return str(error).strip().splitlines()[0]
        error = error.__cause__ or error.__context__
    if isinstance(first, OSError) and first.errno is None and "requested and" in str(first):
        return f"a file could not be written whole ({first}); is the disk full?"  # numpy says only this
    return None


def missing_library(error: BaseException) -> str | None:
    """The message for a library that recspec needs and that is not installed; None for anything else."""
    name = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name in ("", "recspec"):
        return None
    return f"this needs the library '{name}', which is not installed: pip install recspec"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known name closest to `name` or with these initials (`lr`); else nothing."""
    own = name.lower()
    if len(own) > CHARACTERS_SHOWN:  # matching takes the square of the length
        return ""
    lowered = {each.lower(): each for each in known if each != name and len(each) <= CHARACTERS_SHOWN}
    if len(lowered) > MOST_COMPARED:
        return ""
    matches = difflib.get_close_matches(own, lowered, n=1, cutoff=0.6)
    matches += [candidate for candidate in lowered if len(own) > 1 and _initials(candidate) == own]
    return f" (did you mean '{lowered[matches[0]]}'?)" if matches else ""


def _initials(text: str) -> str:
    return "".join(word[:1] for word in re.split(r"[^a-z0-9]+", text))


def how_many(count: int, thing: str) -> str:
    """`1 row`, `1,234 rows`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def listed(names: Iterable[str]) -> str:
    """Names as they stand in a message: `'a', 'b'`, or `none`; of many or long ones the first."""
    names = list(names)
    shown: list[str] = []
    for name in names[:NAMES_SHOWN]:
        shown.append(f"'{shortened(name)}'")
        if sum(map(len, shown)) > LIST_SHOWN:
            break
    more = f" and {len(names) - len(shown):,} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more or "none"


def shortened(name: str) -> str:
    """A text as it stands in a message: a long one is cut."""
    return name if len(name) <= CHARACTERS_SHOWN else f"{name[:CHARACTERS_SHOWN]}..."


def quoted(value: object) -> str:
    """Any value from outside as it stands in a message, quoted; one whose text can't be made is named by its type."""
    try:
        return repr(shortened(str(value)))
    except (RecursionError, ValueError):  # lists in lists in lists; a whole number of more than 4,300 digits
        return f"{'an' if isinstance(value, int) else 'a'} {type(value).__name__} that is too deep or too long to show"


def unknown(kind: str, name: str | Sequence[str], known: Iterable[str]) -> str:
    """The sentence for a name, or several, not known: what it is, the nearest one, and all known ones once."""
    names, known = [name] if isinstance(name, str) else name, list(known)
    kinds = kind if len(names) == 1 else f"{kind}s"
    told = ", ".join(f"'{shortened(one)}'{nearest(one, known)}" for one in names[:UNKNOWN_SHOWN])
    more = f" and {len(names) - UNKNOWN_SHOWN:,} more" if len(names) > UNKNOWN_SHOWN else ""
    return f"unknown {kinds} {told}{more}; known: {listed(known)}"


def require_extra(module: str, extra: str) -> ModuleType:
    """Import a library that only an extra installs; a `MissingExtraError` gives the command that installs it."""
    library = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != library:
            raise
        how = f"pip install 'recspec[{extra}]'"
        raise MissingExtraError(f"this needs the library '{library}', which is not installed: {how}") from None
