"""The columns of a run that gpulab 0.1 stored, so that it opens as if it had been stored today."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import IO

import numpy as np

from gpulab.store.table_file import Table, Tables

NPZ = "columns.npz"
_TORN = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError)


def is_npz(file: IO[bytes]) -> bool:
    file.seek(0)
    return file.read(2) == b"PK"


def read_npz(file: IO[bytes], skip: tuple[str, ...] = ()) -> Tables:
    """Of uncompressed columns alone: it never unpacks to more than it weighs. Raises OSError, ValueError."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > file.seek(0, io.SEEK_END):
                raise ValueError("its members are larger than the file")
            names = {member.filename.removesuffix(".npy"): member for member in members}
            tables = {name: _array(archive.read(m), m) for name, m in names.items() if not name.startswith(skip)}
    except _TORN as e:
        raise ValueError(e) from e
    return Tables({}, tables, whole=True)


def _array(data: bytes, member: zipfile.ZipInfo) -> Table:
    stream = io.BytesIO(data)
    try:
        if member.compress_type != zipfile.ZIP_STORED or np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("not as gpulab writes it")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        rows = np.frombuffer(data, dtype, offset=stream.tell())
        if shape != rows.shape:
            raise ValueError(f"{len(rows)} rows instead of {shape}")
        return rows
    except Exception as e:  # the header is a Python literal: Python's own tokenizer and parser raise here
        raise ValueError(f"{member.filename} is no plain column: {e}") from e
