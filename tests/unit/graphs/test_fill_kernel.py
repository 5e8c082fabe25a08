"""The PTX of the fill kernel, run thread by thread against what a memset of the same parameters writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ptx_machine import PtxMachine

from gapless.graphs.device.fill_kernel import NAME, PTX, Fill
from gapless.graphs.device.memset_nodes import fill_of
from gapless.graphs.device.raw_graph import MemsetParams

TEXT = PTX.decode()
BLOCK = 16
"""Instead of 256: the smallest that fills the ends of rows, so that threads take several words."""


def bytes_of(params: MemsetParams) -> dict[int, int]:
    """What the driver's documentation says that a memset writes."""
    size = params.element_size
    element = params.value.to_bytes(4, "little")[:size]
    return {
        params.dst + row * params.pitch + column * size + i: element[i]
        for row in range(params.height)
        for column in range(params.width)
        for i in range(size)
    }


def run(fill: Fill, grid: tuple[int, int, int]) -> PtxMachine:
    machine = PtxMachine(TEXT)
    params = {"p_dst": fill.dst, "p_pitch": fill.pitch, "p_width": fill.width, "p_height": fill.height}
    machine.launch(grid, BLOCK, params | {"p_pattern": fill.pattern})
    return machine


@st.composite
def memsets(draw: st.DrawFn) -> MemsetParams:
    size = draw(st.sampled_from([1, 2, 4]))
    width, height = draw(st.integers(1, 90)), draw(st.integers(1, 4))
    gap = draw(st.integers(0, 40))
    return MemsetParams(
        dst=(1 << 45) + draw(st.integers(0, 40)) * size,
        pitch=(width + gap) * size,
        value=draw(st.integers(0, (1 << 32) - 1)),
        element_size=size,
        width=width,
        height=height,
    )


@settings(max_examples=40, deadline=None)
@given(memsets(), st.integers(1, 3), st.integers(1, 3))
@example(MemsetParams(dst=1 << 45, pitch=0, value=0, element_size=1, width=1, height=1), 1, 1)
@example(MemsetParams(dst=(1 << 45) + 1, pitch=0, value=7, element_size=1, width=1600, height=1), 2, 1)
def test_every_byte_is_written_once_and_no_other(params: MemsetParams, columns: int, rows: int) -> None:
    fill = fill_of(params)
    assert fill is not None
    machine = run(fill, (columns, rows, 1))
    assert machine.memory == bytes_of(params)
    assert set(machine.writes.values()) == {1}


def test_rows_far_apart_and_addresses_beyond_32_bits() -> None:
    params = MemsetParams(dst=(1 << 46) + 5, pitch=(1 << 33) + 1, value=3, element_size=1, width=40, height=3)
    fill = fill_of(params)
    assert fill is not None
    assert run(fill, (1, 2, 1)).memory == bytes_of(params)


def test_the_driver_finds_an_entry_of_this_name_in_text_that_begins_with_its_version() -> None:
    assert PTX.startswith(b".version ")
    assert b".entry " + NAME + b"(" in PTX


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_100"])
def test_the_kernel_compiles(architecture: str, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not ptxas.exists():
        pytest.skip("this Triton has no ptxas")
    source = tmp_path / "fill.ptx"
    source.write_bytes(PTX)
    command = [str(ptxas), f"-arch={architecture}", "-v", str(source), "-o", str(tmp_path / "fill.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr
