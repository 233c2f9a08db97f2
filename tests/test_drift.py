"""Drift measured on some rows of a weight estimates that of the whole weight."""

import pytest
import torch
from torch import Tensor

from qurl_megatron.config.schema import MEASURED_ROWS
from qurl_megatron.quantization.quantize import code_flips, dequantize, quantize
from qurl_megatron.weight_sync import conversion
from qurl_megatron.weight_sync.conversion import DriftMeter, WeightDrift


def sum_of_squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def drift_in(meter: DriftMeter) -> WeightDrift:
    names, drift = meter.results()
    assert names == ["w"]
    return WeightDrift(*drift[0].tolist())


@pytest.mark.parametrize(("num_rows", "tolerance"), [(MEASURED_ROWS, 1e-6), (1001, 0.05)])
def test_drift_is_that_of_the_whole_weight(
    num_rows: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is exact for a weight of few rows, and otherwise an estimate."""
    monkeypatch.setattr(conversion, "BATCH_ELEMENTS", 64 * 30)  # 30 rows, which do not divide 128
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(num_rows, 64, generator=generator)
    new = old + 0.01 * torch.randn(num_rows, 64, generator=generator)
    meter = DriftMeter()
    old_quantized, new_quantized = quantize(old, "int8"), quantize(new, "int8")
    meter.measure("w", old, old_quantized)
    first = drift_in(meter)
    assert first.update_norm == first.code_flip_fraction == 0
    meter.measure("w", new, new_quantized)
    drift = drift_in(meter)
    error = dequantize(new_quantized) - new
    flips = int(code_flips(old_quantized.codes, new_quantized.codes))
    assert drift.num_codes == pytest.approx(new.numel())
    assert drift.quant_error == pytest.approx(
        sum_of_squares(error) / sum_of_squares(new), rel=tolerance
    )
    assert drift.update_norm == pytest.approx(
        sum_of_squares(new - old) / sum_of_squares(old), rel=tolerance
    )
    assert drift.code_flip_fraction == pytest.approx(flips / new.numel(), rel=tolerance)


def test_total_drift_is_a_ratio_of_sums() -> None:
    small = WeightDrift(num_codes=10, code_flips=5, error_squares=1, weight_squares=2)
    large = WeightDrift(num_codes=90, code_flips=5, error_squares=1, weight_squares=6)
    total = WeightDrift.total([small, large])
    assert total.code_flip_fraction == 0.1
    assert total.quant_error == 0.25
    assert WeightDrift.total([]).quant_error == 0
