from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.token_histogram import TokenHistogram

BOUNDS = (0.0005, 0.001, 0.5, 1.0, 600.0)
VALUES = (0.0, 0.0005, 0.00051, 0.001, 0.7, 1.0, 599.9, 600.0, 601.0)


def samples(registry):
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_it_tells_what_the_histogram_of_prometheus_client_tells():
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    expected = Histogram("x_seconds", "An x.", ["model"], buckets=BOUNDS, registry=theirs)
    histogram = TokenHistogram("x_seconds", "An x.", {"model": "m"}, BOUNDS)
    ours.register(histogram)
    expected.labels(model="m")
    assert samples(ours) == samples(theirs)
    for value in VALUES:
        expected.labels(model="m").observe(value)
        histogram.observe(value)
    assert samples(ours) == samples(theirs)
