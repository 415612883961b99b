"""Every kind of fault that the field knows is proved by a test, and every test that says so means a row of the page."""

import pytest

from terracekv.tests.fault_table import Marked, marked, rows

ROWS, MARKED = rows(), marked()


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test(row: int) -> None:
    assert MARKED.get(row), f"no test is marked with fault({row}): {ROWS[row]}"


def test_every_marked_test_means_a_row() -> None:
    assert {row: [str(test) for test in tests] for row, tests in MARKED.items() if row not in ROWS} == {}


def test_the_page_has_all_rows_in_order_and_each_once() -> None:
    assert len(ROWS) == 107 and list(ROWS) == sorted(ROWS)
    assert len(set(ROWS.values())) == len(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_proved_without_a_gpu_or_says_that_it_needs_one(row: int) -> None:
    assert any("gpu" not in test.marks for test in MARKED[row])


def test_a_test_that_a_plain_run_leaves_out_says_so() -> None:
    assert str(Marked("tests/test_a.py", "test_b", frozenset({"fault", "gpu"}))) == "tests/test_a.py::test_b (gpu)"
    assert str(Marked("tests/e2e/test_a.py", "test_b", frozenset())) == "tests/e2e/test_a.py::test_b (e2e)"
