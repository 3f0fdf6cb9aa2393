"""Regions of every data-plane adapter: sizes, contents, and the ports that they satisfy."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import msgspec
import pytest

from common.dataplane.fake import FakeDataPlane
from common.dataplane.fake_network import FakeNetwork, FakeRegion
from common.dataplane.port import DataPlane, DataPlaneError, Outcome, Region, RemoteRegion
from common.dataplane.shm_region import ShmRegion
from common.dataplane.tcp_region import TcpRegion
from contracts.errors import InvalidValueError
from tests.contract.dataplane.bench import GOOD, GRANT, NOW, NUM_CELLS, Bench, soon


def test_allocation_checks_its_sizes(bench: Bench) -> None:
    """An empty region or one without cells is refused by name, and a closed data plane allocates nothing."""
    with pytest.raises(InvalidValueError, match="nbytes"):
        bench.owner.allocate(0, 1)
    with pytest.raises(InvalidValueError, match="num_cells"):
        bench.owner.allocate(1, 0)
    bench.owner.close()
    with pytest.raises(DataPlaneError):
        bench.owner.allocate(1, 1)


def test_a_new_region_is_zero_and_its_own(bench: Bench) -> None:
    """Regions of one endpoint have different ids and memory; data and cells begin as zeros."""
    first, second = bench.owner.allocate(100, 3), bench.owner.allocate(100, 3)
    assert first.descriptor.region_id != second.descriptor.region_id
    first.data[0] = 1
    assert (bytes(second.data), [second.generation(cell) for cell in range(3)]) == (bytes(100), [0, 0, 0])
    assert (first.descriptor.length, first.descriptor.num_cells) == (100, 3)


def test_a_foreign_region_is_not_local(bench: Bench) -> None:
    """A local region of another adapter, or something that is none, is a programming error, said by name."""
    other = FakeDataPlane(FakeNetwork(), peer_id="x", incarnation="i1", now=NOW).allocate(16, 1)
    foreign: object = object() if bench.adapter == "fake" else other
    with pytest.raises(InvalidValueError, match="local"):
        bench.remote.write([GOOD], foreign, GRANT, soon())  # type: ignore[arg-type] # that is the point


def test_memory_that_peers_reach_is_there_before_they_do(bench: Bench) -> None:
    """All pages of a fresh region are resident: no transfer waits for the kernel to find memory (not asked of the fake)."""
    if bench.adapter == "fake":
        assert isinstance(bench.target, FakeRegion)
        return
    fresh = bench.owner.allocate(8 << 20, NUM_CELLS)
    assert isinstance(fresh, ShmRegion | TcpRegion)
    assert num_resident_bytes(fresh.memory.address) >= 8 << 20


def num_resident_bytes(address: int) -> int:
    """Bytes in memory of the mapping around an address, as the kernel counts them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_memory_that_is_not_touched_is_not_counted_as_there() -> None:
    """The measurement can fail: a mapping that nobody has touched has no page in memory."""
    with mmap.mmap(-1, 8 << 20) as untouched:
        address = ctypes.addressof(ctypes.c_char.from_buffer(untouched))
        assert num_resident_bytes(address) < 8 << 20


def test_opening_a_grant_is_checked_like_raising_generations(bench: Bench) -> None:
    """A cell outside the header, an older generation or, where secrets are checked over a network, a short one is refused."""
    bad = [
        msgspec.structs.replace(GRANT, cells=(NUM_CELLS,)),
        msgspec.structs.replace(GRANT, generation=6),
        *([msgspec.structs.replace(GRANT, secret=b"short")] if bench.adapter == "tcp" else []),
    ]
    for grant in bad:
        with pytest.raises(InvalidValueError):
            bench.target.open_grant(grant)
    assert bench.write([GOOD]).outcome is Outcome.DONE


def check_ports(plane: DataPlane, region: Region, remote: RemoteRegion) -> tuple[bool, bool, bool]:
    """Typed as the ports, so that the checker compares the adapters with them."""
    capabilities = plane.capabilities
    return capabilities.revocable, region.descriptor == remote.descriptor, capabilities.max_batch >= 1024


def test_adapters_satisfy_the_ports(bench: Bench) -> None:
    """All adapters check generations themselves and describe the same region on both sides."""
    assert check_ports(bench.owner, bench.target, bench.remote) == (True, True, True)
