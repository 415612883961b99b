"""What a bench says of its figures."""

import json

import pytest

from terracekv.bench.figures import break_even_tokens, report


@pytest.mark.fault(121)
def test_the_length_from_which_a_load_pays_is_that_whose_prefill_takes_as_long() -> None:
    assert break_even_tokens(cold_s=8.1, own_s=0.1, tier_s=0.9, tokens=2000) == 200
    assert break_even_tokens(cold_s=8.1, own_s=0.1, tier_s=0.1, tokens=2000) == 0, "as quick as the engine's own cache"
    assert break_even_tokens(cold_s=1.0, own_s=0.5, tier_s=2.0, tokens=100) == 300, "longer than what was asked"
    assert break_even_tokens(cold_s=0.1, own_s=0.1, tier_s=0.2, tokens=100) > 10**6, "nothing is gained by a cache"


def test_a_figure_is_one_line_with_its_reference(capsys: pytest.CaptureFixture[str]) -> None:
    report("copy", 1.23456, "GB/s", "memcpy", 2.0, 5, break_even_tokens=7)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "name": "copy", "value": 1.235, "unit": "GB/s", "reference": "memcpy", "reference_value": 2.0,
        "ratio": 0.6173, "runs": 5, "break_even_tokens": 7,
    }  # fmt: skip
