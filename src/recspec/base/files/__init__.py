"""Files and folders: confined paths, whole outputs, manifests, archives."""

from recspec.base.files import manifest
from recspec.base.files.archives import (
    LINE_BYTES,
    LineError,
    bounded_lines,
    check_unpacked,
    extract,
    is_gzip,
    lines,
    most_unpacked,
    open_zip,
    opened,
    packing,
    too_much,
    unpacked_name,
)
from recspec.base.files.outputs import (
    clear_abandoned,
    hidden_sibling,
    is_locked,
    is_own,
    locked,
    locked_inside,
    mkdir_or_undo,
    open_parquet,
    put_in_place,
    removed,
    staging,
    temporary_name,
    turn,
    whole_file,
    whole_folder,
    write_whole,
)
from recspec.base.files.paths import (
    PathError,
    confine,
    confined,
    copy,
    local,
    masked,
    named_path,
    parse_json,
    read_json,
    read_text,
    special,
)
