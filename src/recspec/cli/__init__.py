"""The command line: what `recspec --help` lists."""

from recspec.cli.app import main
