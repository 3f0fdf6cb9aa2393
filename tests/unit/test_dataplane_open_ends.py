"""What a data plane has open: kept while it is, closed with it, whichever thread comes last."""

import pytest

from common.dataplane.open_ends import OpenEnds
from common.dataplane.port import DataPlaneError


class End:
    """Counts how often it was closed."""

    def __init__(self, closed: list["End"]) -> None:
        self._closed = closed

    def close(self) -> None:
        """Note it."""
        self._closed.append(self)


def test_connections_close_before_regions_and_numbers_count_regions() -> None:
    """A peer's end goes first: it may still be writing into one of ours."""
    closed: list[End] = []
    ends = OpenEnds[End, End]()
    numbers: list[int] = []

    def make(number: int) -> End:
        numbers.append(number)
        return End(closed)

    regions = [ends.allocated(make) for _ in range(2)]
    remote = ends.connected(End(closed))
    ends.close()
    assert numbers == [0, 1]
    assert closed == [remote, *regions]


def test_after_the_end_nothing_is_allocated_and_a_late_connection_is_closed() -> None:
    """A connect that was under way meanwhile must not leave a connection behind."""
    closed: list[End] = []
    ends = OpenEnds[End, End]()
    ends.close()
    late = ends.connected(End(closed))
    assert closed == [late]
    with pytest.raises(DataPlaneError, match="closed"):
        ends.allocated(lambda _number: End(closed))


def test_what_was_closed_by_itself_is_not_closed_again() -> None:
    """It is forgotten, once or twice."""
    closed: list[End] = []
    ends = OpenEnds[End, End]()
    remote = ends.connected(End(closed))
    ends.forget(remote)
    ends.forget(remote)
    ends.close()
    assert closed == []


def test_a_region_that_could_not_be_made_is_not_kept() -> None:
    """Its number goes to the next one."""
    ends = OpenEnds[End, End]()

    def fail(_number: int) -> End:
        raise DataPlaneError("no memory")

    with pytest.raises(DataPlaneError, match="no memory"):
        ends.allocated(fail)
    numbers: list[int] = []

    def make(number: int) -> End:
        numbers.append(number)
        return End([])

    ends.allocated(make)
    assert numbers == [0]
