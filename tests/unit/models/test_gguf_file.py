"""The GGUF container against the ``gguf`` package's writer and reader, and against damage."""

from __future__ import annotations

import contextlib
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import ModelError
from gapless.models.gguf import read_tensor
from gapless.models.gguf_file import GGUFFile


def _written(path: Path, *, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -5)
    writer.add_uint16("a.uint16", 60000)
    writer.add_int16("a.int16", -300)
    writer.add_uint32("a.uint32", 4_000_000_000)
    writer.add_int32("a.int32", -7)
    writer.add_uint64("a.uint64", 2**60)
    writer.add_int64("a.int64", -(2**60))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "Grüße 世界 🙂")
    writer.add_array("a.strings", ["", "x", "Ġthe", "日本"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.add_tensor("matrix", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("vector", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "llama"),
        ("a.uint8", 200),
        ("a.int8", -5),
        ("a.uint16", 60000),
        ("a.int16", -300),
        ("a.uint32", 4_000_000_000),
        ("a.int32", -7),
        ("a.uint64", 2**60),
        ("a.int64", -(2**60)),
        ("a.float32", 0.5),
        ("a.float64", 0.1),
        ("a.bool", True),
        ("a.string", "Grüße 世界 🙂"),
        ("a.strings", ["", "x", "Ġthe", "日本"]),
        ("a.ints", [1, -2, 3]),
        ("a.floats", [0.5, -1.5]),
    ],
)
def test_metadata_of_every_type_is_read(key: str, value: object, tmp_path: Path) -> None:
    assert GGUFFile.open(_written(tmp_path / "x.gguf")).metadata[key] == value


@pytest.mark.parametrize("alignment", [None, 8, 64, 256])
def test_tensors_are_found_at_any_alignment(alignment: int | None, tmp_path: Path) -> None:
    file = GGUFFile.open(_written(tmp_path / "x.gguf", alignment=alignment))
    assert list(file.tensors) == ["matrix", "vector"]
    matrix = read_tensor(file, file.tensors["matrix"])
    assert torch.equal(matrix, torch.arange(12, dtype=torch.float32).view(3, 4))
    vector = read_tensor(file, file.tensors["vector"])
    assert torch.equal(vector, torch.arange(5, dtype=torch.float16))


@pytest.mark.parametrize(
    "kind",
    [
        GGMLQuantizationType.Q2_K,
        GGMLQuantizationType.Q3_K,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
        GGMLQuantizationType.IQ4_NL,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q8_0,
    ],
)
@pytest.mark.parametrize("num_rows", [1, 3, 48, 50])
def test_quantised_rows_are_expanded_row_by_row(
    kind: GGMLQuantizationType, num_rows: int, tmp_path: Path
) -> None:
    block, size = gguf.constants.GGML_QUANT_SIZES[kind]
    row_bytes = 512 // block * size
    raw = np.random.default_rng(0).integers(0, 60, (num_rows, row_bytes)).astype(np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile.open(tmp_path / "x.gguf")
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    read = read_tensor(file, file.tensors["t"])
    assert read.shape == (num_rows, 512)
    torch.testing.assert_close(read, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_every_truncation_is_an_error(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    whole = _written(folder / "x.gguf").read_bytes()
    keep = data.draw(st.integers(0, len(whole) - 33))
    (folder / "x.gguf").write_bytes(whole[:keep])
    with pytest.raises(ModelError, match=r"truncated|cannot be read|not a GGUF"):
        _read_all(folder / "x.gguf")


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (b"GGML", "does not start with GGUF"),
        (b"PK\x03\x04", "does not start with GGUF"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack("<I", 4), "version 4"),
        (b"GGUF" + struct.pack(">I", 3), "version"),
    ],
)
def test_other_files_and_versions_are_refused(start: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(start + b"\0" * 64)
    with pytest.raises(ModelError, match=says):
        GGUFFile.open(tmp_path / "x.gguf")


@pytest.mark.parametrize("name", ["missing.gguf", "empty.gguf", "folder.gguf"])
def test_what_cannot_be_mapped_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        GGUFFile.open(tmp_path / name)


@pytest.mark.parametrize(("kind", "says"), [(999, "unknown quantisation 999"), (4, "unknown quantisation 4")])
def test_unknown_quantisation_is_named(kind: int, says: str, tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    info = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, kind, 0)
    (tmp_path / "x.gguf").write_bytes(header + info + b"\0" * 256)
    file = GGUFFile.open(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=f"'t' has the {says}"):
        read_tensor(file, file.tensors["t"])


def test_rows_that_do_not_fill_blocks_are_named(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    kind = int(GGMLQuantizationType.Q8_0)
    info = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 33, kind, 0)
    (tmp_path / "x.gguf").write_bytes(header + info + b"\0" * 256)
    file = GGUFFile.open(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="rows of 33 do not divide into Q8_0 blocks of 32"):
        read_tensor(file, file.tensors["t"])


def test_unknown_metadata_type_is_refused(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    (tmp_path / "x.gguf").write_bytes(
        header + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 99) + b"\0" * 64
    )
    with pytest.raises(ModelError, match="value type 99"):
        GGUFFile.open(tmp_path / "x.gguf")


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_damaged_bytes_never_raise_anything_but_model_errors(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = _written(tmp_path_factory.mktemp("gguf") / "x.gguf")
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    with contextlib.suppress(ModelError):
        _read_all(path)


def _read_all(path: Path) -> None:
    file = GGUFFile.open(path)
    for tensor in file.tensors.values():
        assert read_tensor(file, tensor).shape == tensor.shape


def test_missing_gguf_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GGUFFile.open(_written(tmp_path / "x.gguf"))
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(ModelError, match="pip install gguf"):
        read_tensor(file, file.tensors["matrix"])
