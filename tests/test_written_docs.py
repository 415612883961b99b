"""The pages that a program writes are those it would write now."""

from pathlib import Path

import pytest

from terracekv.connector import client
from terracekv.daemon.http_routes import PARAMETERS
from terracekv.daemon.store import Store
from terracekv.tests.written_docs import pages


@pytest.mark.fault(114)
@pytest.mark.parametrize("name", ["metrics.md", "api.md"])
def test_a_page_has_what_the_door_has_and_nothing_else(name: str) -> None:
    (text, page), *_ = [(text, file.read_text()) for file, text in pages() if file.name == name]
    assert page == text, "run make docs"


def test_nothing_says_that_durable_is_disk_where_a_bucket_may_be_the_lowest_tier() -> None:
    assert "lowest tier" in PARAMETERS["durable"]
    for said in (client.Stored.__doc__, client.Client.store.__doc__, Store.commit.__doc__):
        assert said is not None and "durable" in said and "lowest tier" in said


def test_the_first_page_names_both() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert "docs/metrics.md" in readme and "docs/api.md" in readme
