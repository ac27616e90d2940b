"""What all measurements have in common."""

from __future__ import annotations

from moexport.bench.measure.roofline import Rates
from moexport.common.timing import Protocol
from moexport.perf.measure import results


def test_results_have_the_medians_of_the_rates_that_every_part_measured() -> None:
    rates = [
        Rates(stream_gb_s=rate, matmul_gflop_s=2 * rate, cached_gb_s={"1024": 9.0})
        for rate in (1.0, 2.0, 6.0)
    ]
    protocol = results("runtimes", [], [], Protocol(), rates).protocol
    assert protocol["stream_gb_s"] == 2.0
    assert protocol["matmul_gflop_s"] == 4.0
    assert "int8_gop_s" not in protocol
    assert "cached_gb_s" not in protocol
