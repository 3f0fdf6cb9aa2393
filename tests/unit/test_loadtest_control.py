"""What `python -m loadtest control` makes of what it has seen."""

import msgspec

from loadtest.control_level import Held, Level, report_control
from loadtest.report import Machine, Report
from loadtest.statistics import spread

MIB = 1 << 20


def level(num_in_flight: int, rate: float, before: int, after: int) -> Level:
    """A level with these figures."""
    whole, alone = spread([3.0, 5.0, 7.0]), spread([1.0, 2.0, 3.0])
    assert whole is not None
    assert alone is not None
    return Level(
        num_in_flight=num_in_flight,
        num_handoffs=1000,
        rate=rate,
        whole=whole,
        bus_alone=alone,
        broker_cpu_ms=2.5,
        server_cpu_ms=1.25,
        bytes_before=before,
        bytes_at_peak=before + 8 * 100 * 1024,
        num_held=100,
        bytes_after=after,
    )


def report_of(*levels: Level) -> Report:
    """The report about these levels."""
    report = Report("control", {}, Machine(num_cores=2, load_average=0.5, processor="x", python="3"))
    report_control(report, list(levels))
    return report


def test_memory_is_flat_when_no_level_ends_with_more_than_it_began_with() -> None:
    """That a higher level needs more than a lower one is no growth; what one level gains while it runs is."""
    flat = report_of(level(1, 100.0, 40 * MIB, 40 * MIB), level(64, 150.0, 50 * MIB, 50 * MIB))
    grown = report_of(level(1, 100.0, 40 * MIB, 42 * MIB), level(64, 150.0, 50 * MIB, 50 * MIB))
    assert flat.verdict == "passed; aims: 1 met, 1 missed"
    assert grown.verdict == "passed; aims: 0 met, 2 missed"
    assert "5.00% in 1000 handoffs, 1 in flight" in grown.text()


def test_the_best_rate_is_held_against_the_aim() -> None:
    """Whichever number in flight it comes from; the table has the processor time of both processes."""
    report = report_of(level(1, 2500.0, MIB, MIB), level(64, 1500.0, MIB, MIB))
    assert report.verdict == "passed; aims: 2 met, 0 missed"
    assert "2500 with 1 in flight" in report.text()
    assert "2.500" in report.text()
    assert "1.250" in report.text()


def test_memory_is_of_all_handoffs_that_are_held() -> None:
    """What ended and is remembered shares it with what is in flight: one in flight did not take all of it."""
    one = level(1, 100.0, MIB, MIB)
    assert one.bytes_each == 8 * 1024
    never_larger = msgspec.structs.replace(one, bytes_at_peak=MIB, num_held=0)
    assert never_larger.bytes_each is None
    rows = report_of(one, never_larger).text().splitlines()
    assert [line.split()[10:12] for line in rows if line.startswith("  1 ")] == [["100", "8.0"], ["-", "-"]]


def test_what_has_ended_is_held_for_as_long_as_it_is_remembered() -> None:
    """Those in flight, and those that ended less than two seconds ago; only memory beyond all before it is a peak."""
    held = Held(keep_ended_s=2.0, own_bytes=1000)
    for _ in range(3):
        held.began()
    held.ended(10.0)
    held.ended(11.0)
    assert [held.count(now) for now in (11.0, 11.9, 12.0, 13.0)] == [3, 3, 2, 1]
    assert held.num_ended == 2
    for own_bytes, num_held in ((900, 5), (1600, 3), (1500, 9)):
        held.note(own_bytes, num_held)
    assert (held.peak_bytes, held.num_at_peak) == (1600, 3)
