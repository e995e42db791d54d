"""The folders of `fsdp.py --checkpoint`: a checkpoint is there as a whole or not at all.

    DIR/epoch00003/              the last whole one
        .metadata                which file has which rows of which tensor
        __0_0.distcp ...         of each rank, what it has written
        training.json            settings and history
    DIR/.epoch00004.tmp/         being written, or left by a rank that was killed: never read

All ranks write into the temporary folder. When all are done, it gets its name, in one step.
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path, PosixPath

import torch
import torch.distributed as dist
from common.checkpoint import NotSavedError, require_settings
from common.cli import given, refuse, require_writable_folder, shortened, starts_rank
from torch.distributed.checkpoint import DefaultLoadPlanner, filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem

ABOUT = "training.json"
# The types of which dcp makes its metadata, a pickle.
PLAIN = {(kind.__module__, kind.__qualname__) for kind in (
    metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.Metadata,
    metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties,
    metadata.TensorStorageMetadata, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo,
    torch.Size, PosixPath)} | {("torch", str(kind).removeprefix("torch.")) for kind in (
        torch.float32, torch.float64)} | {("torch.serialization", "_get_layout")}


def begin(folder: Path, epoch: int) -> Path:
    """Return the empty temporary folder of an epoch. All ranks must call this."""
    temporary = folder / f".epoch{epoch:05}.tmp"
    if dist.get_rank() == 0:
        remove_temporaries(folder)  # of an earlier run that was killed
    dist.barrier()  # or rank 0 could remove what another one has begun to write
    return temporary


def publish(temporary: Path, epoch: int, about: dict) -> None:
    """Give the folder its name, and remove the older ones; on rank 0, when all have written.

    Raises:
        NotSavedError: if the disk is full, or the folder has become read-only.
    """
    whole = temporary.with_name(f"epoch{epoch:05}")
    with errors_in_one_line(temporary):
        (temporary / ABOUT).write_text(json.dumps(about))
        os.rename(temporary, whole)
        for older in whole_ones(whole.parent)[:-1]:
            # Removing takes several steps, between which we can be killed. In another name, what is
            # left is not taken for a whole one.
            shutil.rmtree(older.rename(older.with_name(f".{older.name}.tmp")))


def whole_ones(folder: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, the last one at the end."""
    found = [path for path in folder.glob("epoch*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def latest(folder: Path) -> Path | None:
    """Return the last whole checkpoint, None if there is none.

    Raises:
        UnpicklingError: if dcp would unpickle from it anything but its metadata.
        EOFError, OSError: if a part of it is too short, or is not there.
    """
    if not (whole := whole_ones(folder)):
        return None
    with (whole[-1] / ".metadata").open("rb") as file:
        layout = _PlainMetadata(file).load()
    for part in layout.storage_data.values():
        if (whole[-1] / part.relative_path).stat().st_size < part.offset + part.length:
            raise EOFError(f"{part.relative_path} is too short")
    return whole[-1]


class _PlainMetadata(pickle.Unpickler):
    """Unpickles dcp's metadata, and nothing else: a pickle can run any code."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in PLAIN:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")
        return super().find_class(module, name)


class PlainValues(DefaultLoadPlanner):
    """Reads what is not a tensor with `weights_only=True`, which dcp by itself does not."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value.

        Raises:
            UnpicklingError: if it is anything but plain.
        """
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


@contextlib.contextmanager
def errors_in_one_line(folder: Path) -> Iterator[None]:
    """Turn what dcp raises in here, a traceback of each rank, into one line.

    Raises:
        NotSavedError: if the folder cannot be written or read.
    """
    try:
        yield
    except (CheckpointException, OSError) as error:
        failures = getattr(error, "failures", {dist.get_rank(): (error, None)})
        cause, _ = failures.get(dist.get_rank()) or next(iter(failures.values()))
        why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise NotSavedError(f"could not use {folder}: {why.splitlines()[0]}") from None


def about(folder: Path) -> dict:
    """Read the settings and the history of a whole checkpoint."""
    return json.loads((folder / ABOUT).read_text())


def require_useful(args: argparse.Namespace) -> None:
    """Refuse, before any process starts, a folder in which this training cannot begin or go on."""
    if args.folder is None:
        if args.resumed:
            refuse("--resume requires --checkpoint DIR, the folder to continue from")
        return
    if args.sharding != "full":
        refuse(f"--checkpoint {shortened(args.folder)} requires --sharding full: "
               "the other ways have nothing that a single file could not hold")
    if not starts_rank(args, 0):
        return
    require_writable_folder("--checkpoint", args.folder)
    where = f"--checkpoint {shortened(args.folder)}"
    try:
        found = latest(args.folder)
        saved = found and about(found)
        history = found and [float(row["loss"]) for row in saved["history"]]
        if found and saved["example"] != args.example:
            raise ValueError
        theirs = dict(saved["settings"]) if found else {}
    except Exception:  # whatever comes of bytes that we did not write
        refuse(f"{where} has no whole checkpoint of {args.example}; give another folder")
    if found and not args.resumed:
        refuse(f"{where} has a training of {len(history)} epochs; give --resume, or another folder")
    if args.resumed and not found:
        refuse(f"{where} must have a checkpoint with --resume, and has none")
    require_settings(args, theirs, where)
    if found and len(history) >= args.epochs:
        refuse(f"{given(args, 'epochs')} must be above {len(history)}, the epochs that {where} has")


def remove_temporaries(folder: Path) -> None:
    """Remove what ranks began to write, or to remove, and did not finish; none may be at it now."""
    for left in folder.glob(".epoch*.tmp"):
        shutil.rmtree(left, ignore_errors=True)


def clean_up(args: argparse.Namespace) -> None:
    """Remove what killed ranks have left: after a run, where rank 0 was started."""
    if args.folder is not None and starts_rank(args, 0):
        remove_temporaries(args.folder)
