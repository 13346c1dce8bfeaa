"""`python -m keras_shardopt.checkpoint`: lists, verifies and consolidates sharded checkpoints."""

from __future__ import annotations

import argparse
import os
import sys

from keras_shardopt.checkpoint.sharded.consolidate import consolidate
from keras_shardopt.checkpoint.sharded.pieces import Checkpoint
from keras_shardopt.checkpoint.sharded.saves import complete_saves, incomplete_saves, is_complete, newest


def main(arguments: list[str] | None = None) -> int:
    """Run the command in `arguments` (None: in `sys.argv`). Return the exit status: 0, or 1 after an error."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_shardopt.checkpoint",
        description="List, verify and consolidate sharded checkpoints. No job needs to run.",
        epilog="example: python -m keras_shardopt.checkpoint consolidate checkpoints model.keras",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="list the checkpoints in a directory, oldest first")
    listing.add_argument("directory", help="a directory of checkpoints, or one checkpoint")
    verifying = commands.add_parser("verify", help="read all files of a checkpoint and compare their hashes")
    verifying.add_argument("path", help="a checkpoint, or a directory whose complete checkpoints are all verified")
    consolidating = commands.add_parser("consolidate", help="write a checkpoint as one Keras file")
    consolidating.add_argument("path", help="a checkpoint, or a directory whose newest complete checkpoint is used")
    consolidating.add_argument("file", help="the file to write, ending in .keras or .weights.h5")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            return _list(options.directory)
        if options.command == "verify":
            return _verify(options.path)
        consolidate(options.path, options.file)
        print(f"wrote {options.file}")
        return 0
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _list(directory: str) -> int:
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"There is no such directory: {directory!r}")
    folders, incomplete = complete_saves(directory), incomplete_saves(directory)
    if is_complete(directory):
        folders = [directory]
    elif not folders and not incomplete:
        print(f"no checkpoints in {directory}")
    for folder in folders:
        try:
            manifest = Checkpoint(folder).manifest
        except (OSError, ValueError) as error:
            print(f"{folder}  {error}")
            continue
        megabytes = sum(manifest["files"].values()) / 1e6
        processes = manifest["num_processes"]
        print(
            f"{folder}  step {manifest['step']}  epoch {manifest['epoch']}  {megabytes:.1f} MB  "
            f"{processes} {'process' if processes == 1 else 'processes'}"
        )
    for folder in incomplete:
        print(f"{folder}  incomplete: it has no manifest, and is ignored")
    return 0


def _verify(path: str) -> int:
    folders = complete_saves(path) or [newest(path).folder]
    damaged = 0
    for folder in folders:
        try:
            Checkpoint(folder).verify()
            print(f"{folder}  OK")
        except OSError as error:
            damaged = 1
            print(f"{folder}  {error}")
    return damaged


if __name__ == "__main__":
    sys.exit(main())
