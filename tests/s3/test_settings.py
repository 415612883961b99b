"""Settings that can never work are refused by name before anything is served; who we are, and what a server has to say
about that; what is shown of a bucket that has not answered."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest

from terracekv.daemon.config import load_config
from terracekv.tests.blocks import get, name, put
from terracekv.tests.s3_stub import BUCKET, S3Stub
from terracekv.tests.s3_tiers import Node, Nodes, soon, until
from terracekv.tiers.breaker import State
from terracekv.tiers.bucket import Bucket
from terracekv.tiers.errors import ConfigError, TierDown
from terracekv.tiers.s3_errors import Refused
from terracekv.tiers.s3_settings import S3Settings
from terracekv.tiers.tier import Outcome

HTTP = "http" + "://"
TIMES = ["connect_timeout_s", "read_timeout_s", "timeout_s", "present_ttl_s", "absent_ttl_s", "epoch_ttl_s", "ttl_s"]
WRONG: list[tuple[str, Any]] = [("bucket", value) for value in ("A_b", "ab", "a b", "", "a" * 64)]
WRONG += [("prefix", value) for value in ("a b", "/a", "a/", "a//b", "ä", ".", "..", "a/../../x", "a/.", "./a", "a\n")]
WRONG += [("region", value) for value in ("x y", "", "-", "123", "a_b", "é", "a\n", "a" * 70)]
WRONG += [
    ("endpoint", value)
    for value in (
        "localhost:1",
        "ftp://a",
        HTTP,
        f"{HTTP}:80",
        f"{HTTP}a b",
        f"{HTTP}a:99999",
        f"{HTTP}a:0",
        f"{HTTP}a:x",
    )
]
WRONG += [
    ("endpoint", f"{HTTP}{value}")
    for value in ("a?x=1", "a#b", "[::1", "a\n", "ä", "u:secret@a", "u@a", "u:secret@a:99999?x", "a\\b", "a_b..c")
]
WRONG += [("endpoint", "u:secret@a:80"), ("codec", "maybe"), ("profile", "nobody")]
WRONG += [(time, value) for time in TIMES for value in (math.inf, -math.inf, math.nan, -1.0, 1e300)]
WRONG += [("ca_bundle", value) for value in ("/nowhere/ca.pem", "FOLDER", "GARBAGE", "EMPTY")]
WRONG += [("credentials_file", value) for value in ("/nowhere/credentials", "FOLDER", "GARBAGE", "HALF", "BINARY")]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    contents = {
        "GARBAGE": b"not what it should be\n",
        "EMPTY": b"",
        "HALF": b"[default]\naws_access",
        "BINARY": bytes(range(128, 256)),
    }
    for label, content in contents.items():
        (tmp_path / label).write_bytes(content)
    return {label: str(tmp_path / label) for label in contents} | {"FOLDER": str(tmp_path)}


@pytest.mark.parametrize(("setting", "value"), WRONG, ids=repr)
def test_a_setting_that_can_never_work_is_refused_by_name(
    stub: S3Stub, files: dict[str, str], setting: str, value: Any
) -> None:
    usual = {"bucket": BUCKET, "endpoint": stub.endpoint, "credentials_file": str(stub.credentials)}
    with pytest.raises(ConfigError) as refused:
        Bucket(S3Settings(**usual | {setting: files.get(value, value) if isinstance(value, str) else value}))
    said = str(refused.value)
    assert "\n" not in said and "secret" not in said.replace("secret key", "")
    if value != f"{HTTP}a_b..c" and value not in ("GARBAGE", "HALF", "BINARY"):  # found out by boto3, in its own words
        assert setting.removesuffix("_s") in said
    assert stub.asked.total() == 0


@pytest.mark.parametrize(
    "right",
    [{"endpoint": f"{HTTP}{url}"} for url in ("localhost:8333", "[::1]:80", "a.b/storage/v1/s3", "10.0.0.1")]
    + [{"prefix": prefix} for prefix in ("", "a", "a/b.c", "..a", "v1.2")]
    + [{"region": region} for region in ("auto", "us-east-1", "garage")]
    + [{"ttl_s": 315_360_000.0}, {"present_ttl_s": 0.0}],
    ids=repr,
)
def test_what_can_work_is_not_refused(right: dict[str, Any]) -> None:
    Bucket(S3Settings(**{"bucket": BUCKET} | right)).close()


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_a_password_in_the_endpoint_is_refused_and_not_repeated(enabled: str) -> None:
    flags = {"s3.enabled": enabled, "s3.bucket": BUCKET, "s3.endpoint": f"{HTTP}user:pa55word@localhost:1"}
    with pytest.raises(ConfigError, match="s3.endpoint") as refused:
        load_config(None, flags, {"HOME": "/"})
    assert "pa55word" not in str(refused.value)


@pytest.mark.parametrize(
    "setting", ["ttl", "present_ttl", "absent_ttl", "epoch_ttl", "read_timeout", "timeout", "prefill_tokens_per_s"]
)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-1", "1e300"])
def test_no_number_of_the_section_may_be_without_bounds(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"s3.{setting}"):
        load_config(None, {f"s3.{setting}": value}, {"HOME": "/"})


def test_the_longest_lifetime_can_be_used(nodes: Nodes) -> None:
    with nodes(ttl_s=315_360_000.0) as a:
        assert put(a.tier, a.now, name(1)) is Outcome.STORED
        assert get(a.tier, a.now, name(1))[0] is Outcome.HIT


# Credentials.


@pytest.mark.parametrize("why", ["unknown", "skewed", "absent"])
def test_whoever_is_refused_is_told_so_and_not_that_a_permission_is_missing(
    stub: S3Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    stub.switches.skewed = why == "skewed"
    stub.switches.unknown = {"first"} if why == "unknown" else set()
    if why == "absent":
        stub.credentials.write_text("")
    bucket = Bucket(S3Settings(BUCKET, endpoint=stub.endpoint, credentials_file=str(stub.credentials)))
    with pytest.raises(Refused):
        bucket.found(soon())
    assert why != "absent" or stub.asked.total() == 0
    bucket.close()


def test_a_bucket_of_which_nothing_may_be_known_is_told_apart(a: Node, stub: S3Stub) -> None:
    assert a.tier._bucket.found(soon()) is True
    stub.switches.forbid_all = True
    assert a.tier._bucket.found(soon()) is None
    stub.switches.forbid_all = False
    stub.buckets.clear()
    assert a.tier._bucket.found(soon()) is False


@pytest.mark.parametrize(
    "content", ["[default]\naws_access", "", "[default", "[default]\naws_access_key_id = x\n", "\x00" * 9]
)
def test_credentials_that_are_half_written_are_waited_for(
    a: Node, stub: S3Stub, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    a.tier.breaker._pause_s_min = a.tier.breaker._pause_s_max = a.tier.breaker.pause_s = 0.05
    stub.switches.expired = {"first"}
    stub.credentials.write_text(content)
    for index in range(3):
        assert put(a.tier, a.now, name(index)) is Outcome.FAILED
    assert a.tier.status().mode == "down" and a.tier.status().last_error
    states = set[State]()

    def tried() -> bool:
        states.add(a.tier.breaker.state)
        return State.HALF_OPEN in states

    until(tried, "a trial is made with them")
    stub.login("second")
    until(lambda: a.tier.status().mode == "up", "they are whole")
    assert put(a.tier, a.now, name(9)) is Outcome.STORED
    assert not [record for record in caplog.records if record.exc_info]


# Before the first answer.


@pytest.mark.parametrize("trouble", ["stall", "gone"])
def test_a_bucket_is_down_until_it_has_answered(nodes: Nodes, stub: S3Stub, trouble: str) -> None:
    with nodes(probe=False, read_timeout_s=0.3) as a:
        if trouble == "gone":
            stub.go()
        stub.switches.stall = trouble == "stall"
        assert a.tier.status().mode == "down" and a.tier.status().last_error == "it has not answered yet"
        assert put(a.tier, a.now, name(1)) is Outcome.FAILED
        assert stub.asked.total() == 0, "and nobody pays for finding out"
        probing = threading.Thread(target=a.tier.probe, args=(1.0,))
        probing.start()
        assert a.tier.status().mode == "down"
        probing.join()
        assert a.tier.status().mode == "down" and a.tier.status().last_error != "it has not answered yet"
        stub.switches.stall = False
        if trouble == "gone":
            stub.come_back()
        until(lambda: a.tier.status().mode == "up", "it answers")


def test_a_probe_that_ends_after_the_tier_was_closed_does_not_bring_it_up(nodes: Nodes, stub: S3Stub) -> None:
    with nodes(probe=False) as a:
        stub.switches.delay_s = 0.2
        probing = threading.Thread(target=a.tier.probe)
        probing.start()
        until(lambda: a.tier.breaker.state is State.HALF_OPEN, "the probe begins")
        a.tier.close()
        probing.join()
        assert a.tier.breaker.state is State.OPEN
        with pytest.raises(TierDown):
            a.tier.breaker.check()
