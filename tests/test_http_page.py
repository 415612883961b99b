"""The status page's files: what is sent with them, and that nothing else is."""

import gzip
import re

import pytest

from terracekv.daemon.cli_explain import REASONS
from terracekv.daemon.http_page import FOLDER
from terracekv.tests.people import People, fetch, served
from terracekv.tiers.tier import Miss


@served()
async def test_the_root_is_a_page_that_may_load_nothing_from_elsewhere(people: People) -> None:
    status, body, headers = await fetch(people, "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'; ") and "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"<style" not in body and b" style=" not in body and not re.search(rb"\son\w+=", body)
    assert all(b"src=" in line for line in body.split(b"\n") if b"<script" in line)


@served()
async def test_each_file_comes_plain_or_compressed_and_once_to_whoever_keeps_it(people: People) -> None:
    for path in FOLDER.iterdir():
        where, tags = f"/page/{path.name}", set[str]()
        for accepted in ("identity", "gzip"):
            async with people.client.get(where, headers={"Accept-Encoding": accepted}, auto_decompress=False) as sent:
                body = await sent.read()
                assert sent.status == 200 and sent.headers["Vary"] == "Accept-Encoding"
                assert (gzip.decompress(body) if accepted == "gzip" else body) == path.read_bytes()
                assert sent.headers.get("Content-Encoding") == ("gzip" if accepted == "gzip" else None)
                tag = sent.headers["ETag"]
            assert tag[0] == tag[-1] == '"', "a strong one"
            status, again, _ = await fetch(people, where, **{"If-None-Match": tag, "Accept-Encoding": accepted})
            assert (status, again) == (304, b"")
            assert (await fetch(people, where, **{"If-None-Match": '"other"', "Accept-Encoding": accepted}))[0] == 200
            tags.add(tag)
        assert len(tags) == 2, "the two forms are not the same bytes"


def test_every_reason_of_a_miss_has_words_on_the_page_and_in_explain() -> None:
    reasons = re.search(r"REASONS = \{(.*?)\n\};", (FOLDER / "words.js").read_text(), re.DOTALL)
    assert reasons is not None
    assert set(re.findall(r"^  (\w+): \[", reasons[1], re.MULTILINE)) == {str(reason) for reason in Miss} == {*REASONS}


@pytest.mark.parametrize("name", ["nothing.js", "..%2F__main__.py", "%2e%2e%2fhttp_page.py", "."])
def test_no_name_leads_out_of_the_folder(name: str, shm_dir: object, request: pytest.FixtureRequest) -> None:
    @served()
    async def scenario(people: People) -> None:
        status, body, _ = await fetch(people, f"/page/{name}")
        assert status == 404 and b"not_found" in body

    scenario(shm_dir=shm_dir, loop="uvloop")


@served()
async def test_answers_with_data_are_kept_by_nobody(people: People) -> None:
    for route in ("/v1/status", "/v1/namespaces", "/v1/nothing"):
        assert (await fetch(people, route))[2]["Cache-Control"] == "no-store"
