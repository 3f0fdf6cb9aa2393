"""What a process may still take: the tightest of what the machine and the control groups say."""

from pathlib import Path

from common.runtime.host_memory import available_memory

MIB = 1024 * 1024


def machine(root: Path, available_mib: int, group: str = "/") -> Path:
    """A file system that says so much memory is available, to a process in `group`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       99999999 kB\nMemAvailable:   {available_mib * 1024} kB\nBuffers: 1 kB\n"
    )
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    return root


def limit(root: Path, group: str, most: str, used_mib: int, inactive_mib: int = 0) -> None:
    """A control group with a limit, and what it uses."""
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used_mib * MIB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_mib * MIB}\nactive_file 7\n")


def test_a_machine_without_groups_has_what_it_says(tmp_path: Path) -> None:
    """Without a limit it is MemAvailable; where nothing is said, nothing is known."""
    assert available_memory(tmp_path) is None
    found = available_memory(machine(tmp_path, 100))
    assert found is not None
    assert (found.num_bytes, found.bound) == (100 * MIB, "MemAvailable of this machine")


def test_a_limit_below_it_counts_without_what_is_used(tmp_path: Path) -> None:
    """File pages that nobody uses are given up for whoever needs memory, so they are not used."""
    machine(tmp_path, 100)
    limit(tmp_path, "", str(64 * MIB), used_mib=30, inactive_mib=10)
    found = available_memory(tmp_path)
    assert found is not None
    assert found.num_bytes == 44 * MIB
    assert found.bound == f"the limit {tmp_path}/sys/fs/cgroup/memory.max"


def test_a_limit_of_a_group_around_the_own_one_counts(tmp_path: Path) -> None:
    """The tightest of all groups up to the root; one without a limit says nothing."""
    machine(tmp_path, 100, "/outer/inner")
    limit(tmp_path, "outer/inner", "max", used_mib=1)
    limit(tmp_path, "outer", str(20 * MIB), used_mib=5)
    found = available_memory(tmp_path)
    assert found is not None
    assert found.num_bytes == 15 * MIB
    limit(tmp_path, "outer/inner", str(4 * MIB), used_mib=5)
    found = available_memory(tmp_path)
    assert found is not None
    assert found.num_bytes == 0


def test_a_group_path_that_leads_nowhere_leaves_the_mounted_group(tmp_path: Path) -> None:
    """In a container without a namespace of its own the path is the host's; the limit lies at the mount."""
    machine(tmp_path, 100, "/docker/0123")
    limit(tmp_path, "", str(8 * MIB), used_mib=2)
    found = available_memory(tmp_path)
    assert found is not None
    assert found.num_bytes == 6 * MIB


def test_this_machine_says_something() -> None:
    """The real files are read as these are."""
    found = available_memory()
    assert found is not None
    assert found.num_bytes > MIB
