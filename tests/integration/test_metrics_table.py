"""Every metric is documented, every documented metric exists, and each exposition is what Prometheus expects."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.runtime.metrics import Metrics
from tests.integration.metrics_table import FILE, registries, services_of, table

MAX_LABELS = 3
NOT_LABELS = {"request_id", "handoff_id", "worker_id", "incarnation", "trace_id", "path"}


@pytest.fixture(scope="module")
def shown() -> dict[str, Metrics]:
    """Each service's registry."""
    return registries()


def test_the_table_is_what_the_services_register(shown: dict[str, Metrics]) -> None:
    """`python -m tests.integration.metrics_table` writes it anew."""
    assert FILE.read_text(encoding="utf-8") == table(shown)


def test_a_metric_means_the_same_in_every_service(shown: dict[str, Metrics]) -> None:
    """One name, one type, one set of labels, one text: Prometheus joins them by name."""
    names = Counter(row.name for row in services_of(shown))
    assert [name for name, count in names.items() if count > 1] == []


def test_labels_are_few_and_never_those_of_one_request(shown: dict[str, Metrics]) -> None:
    """What grows with traffic would grow the server's memory."""
    for row in services_of(shown):
        assert len(row.labels) <= MAX_LABELS
        assert not set(row.labels) & NOT_LABELS
        assert row.text
        assert row.kind != "histogram" or row.name.endswith(("_seconds", "_tokens", "_sequences"))


def test_each_exposition_can_be_read(shown: dict[str, Metrics]) -> None:
    """Help and type stand before each family, no series comes twice, and buckets grow up to the count."""
    for metrics in shown.values():
        text = metrics.exposition().decode()
        families = list(text_string_to_metric_families(text))
        declared = Counter(re.findall(r"^# (HELP|TYPE) (\S+) ", text, re.MULTILINE))
        assert set(declared.values()) == {1}
        assert {name for kind, name in declared if kind == "HELP"} == {
            name for kind, name in declared if kind == "TYPE"
        }
        assert {row.name for row in metrics.described} <= {name for _, name in declared}
        series = Counter(
            (sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples
        )
        assert set(series.values()) == {1}
        for family in families:
            assert family.documentation
            assert family.type in {"counter", "gauge", "histogram"}
            last: dict[tuple[tuple[str, str], ...], float] = {}
            for sample in family.samples:
                key = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
                if sample.name.endswith("_bucket"):
                    assert sample.value >= last.get(key, 0.0)
                    last[key] = sample.value
                elif family.type == "histogram" and sample.name.endswith("_count"):
                    assert sample.value == last[key]


def test_a_metric_has_a_text_and_one_meaning() -> None:
    """What the checks above could not see is refused when it is registered."""
    metrics = Metrics()
    metrics.gauge("free_blocks", "Blocks.")
    with pytest.raises(ValueError, match="free_blocks"):
        metrics.gauge("free_blocks", "Something else.")
    with pytest.raises(ValueError, match="text"):
        metrics.gauge("held_blocks", "")
