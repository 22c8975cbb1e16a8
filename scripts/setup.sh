#!/bin/sh
# Make or refresh .venv: `scripts/setup.sh demo` with what README's commands need, `scripts/setup.sh dev` with everything.
# PYTHON names the interpreter; without it the .venv that is there is kept, or the first fitting python3 taken.
set -eu
cd "$(dirname "$0")/.."

fits() { [ "$("$1" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }
version() { "$1" -c 'import sys; print(sys.version_info[:2])'; }

if [ -n "${PYTHON:-}" ]; then
    if ! fits "$PYTHON"; then
        echo "setup: PYTHON=$PYTHON is not a Python of version 3.11 or newer; name another: make PYTHON=python3.12" >&2
        exit 2
    fi
    python=$PYTHON
else
    for python in .venv/bin/python python3 python3.14 python3.13 python3.12 python3.11 python none; do
        if fits "$python"; then break; fi
    done
    if [ "$python" = none ]; then
        echo "setup: found no Python of version 3.11 or newer; name one: make PYTHON=/path/to/python3.12" >&2
        exit 2
    fi
fi

# One setup at a time; the lock lasts as long as this shell, whose file it is.
exec 9> .venv.lock
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'

# another version than the one .venv was made with: made anew
if [ -n "${PYTHON:-}" ] && fits .venv/bin/python && [ "$(version .venv/bin/python)" != "$(version "$PYTHON")" ]; then
    rm -rf .venv
fi
if ! fits .venv/bin/python; then
    echo "setup: making .venv with $("$python" --version); the first time takes some minutes" >&2
    rm -rf .venv
    "$python" -m venv .venv
fi

# What pip says goes to a file, and is shown only where it fails.
log=.venv/setup.log
: > "$log"
pip() {
    if ! .venv/bin/python -m pip "$@" --no-input --disable-pip-version-check >> "$log" 2>&1; then
        tail -n 40 "$log" >&2
        echo "setup: pip failed; all it said is in $log. Mend what it names (network, disk, proxy) and try again" >&2
        exit 1
    fi
}

# PyPI's torch for Linux brings 2 GB of GPU libraries. Where there is no GPU the CPU build is taken, from pip's own
# configuration or from PyTorch's index where that answers.
torch=$(grep '^torch==' constraints.txt)
cpu_index=https://download.pytorch.org/whl/cpu
if [ "$(uname -s)" = Linux ] && [ ! -e /proc/driver/nvidia ] && ! .venv/bin/python -c \
    "import importlib.metadata as m; exit(m.version('torch').split('+')[0] != '${torch#torch==}')" 2>/dev/null; then
    if .venv/bin/python -c "import urllib.request as u; u.urlopen('$cpu_index/torch/', timeout=5)" 2>/dev/null; then
        pip install --no-deps --extra-index-url "$cpu_index" "$torch"
    else
        pip install --no-deps "$torch"
    fi
fi

# Files whose SHA-256 is known, and no others. Not the default: where a mirror or another index builds wheels of its own,
# their hashes differ, and nothing could be installed.
if [ -n "${HASHES:-}" ]; then pip install --no-deps --require-hashes -r requirements.lock; fi

case "${1:-dev}" in
    demo) pip install -c constraints.txt -e '.[baselines,serve,loop,report]' ;;
    dev) pip install -c constraints.txt -e '.[dev]' ;;
    *) echo "setup: '$1' is neither demo nor dev" >&2; exit 2 ;;
esac
