"""Tokens and tenants: what a file may say, what becomes of one that changes, and who is taken for whom."""

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from terracekv.daemon.access import OPERATOR, Access, Denied
from terracekv.daemon.access_file import Caller, Right, read_table
from terracekv.daemon.peers import Peer
from terracekv.tests.people import settings
from terracekv.tiers.errors import ConfigError

SECRET = b"secret of the nodes that share it"
ROUTER, WORKER, ADMIN = "router-secret-0001", "worker-secret-0001", "admin-secret-00001"
FILE = f"""
[[tokens]]
name = "router"
secret = "{ROUTER}"
tenant = "red"
rights = ["read"]

[[tokens]]
name = "worker"
sha256 = "{hashlib.sha256(WORKER.encode()).hexdigest()}"
tenant = "blue"
rights = ["read", "write"]

[[tokens]]
name = "admin"
secret = "{ADMIN}"
rights = ["read", "write", "admin", "metrics"]

[tenants.red]
uids = [4001]
host = "1MiB"
disk = 4096

[tenants.blue]
uids = [4002]
rights = ["read"]
"""


def opened(folder: Path, text: str = FILE, **values: str) -> Access:
    (folder / "access.toml").write_text(text)
    return Access(settings(folder, access_file=str(folder / "access.toml"), **values))


def peer(uid: int, gid: int = 9, *more: int) -> Peer:
    return Peer(1, uid, gid, frozenset({gid, *more}))


def test_a_file_says_who_has_what_secret_which_rights_and_how_much_room(tmp_path: Path) -> None:
    access = opened(tmp_path)
    assert access.of_token(ROUTER.encode()) == Caller("router", "red", frozenset({Right.READ}))
    assert access.of_token(WORKER.encode()) == Caller("worker", "blue", frozenset({Right.READ, Right.WRITE}))
    assert access.of_token(b"worker") is access.of_token(b"") is access.of_token(ROUTER[:-1].encode()) is None
    assert access.table.quotas == {"gpu": {}, "host": {"red": 1 << 20}, "disk": {"red": 4096}}
    assert access.table.uids[4002] == Caller("uid 4002", "blue", frozenset({Right.READ}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[tokens]]\nname = 'a'\nrights = ['read']", "has not one of secret and sha256"),
        ("[[tokens]]\nname = 'a'\nsecret = 'short'\nrights = ['read']", "a secret of 5 characters"),
        ("[[tokens]]\nname = 'a'\nsecret = 'sixteen letters!'\nrights = []", "no rights"),
        ("[[tokens]]\nname = 'a'\nsecret = 'sixteen letters!'\nrights = ['reed']", "reed"),
        ("[[tokens]]\nname = 'a b'\nsecret = 'sixteen letters!'\nrights = ['read']", "name"),
        ("[[tokens]]\nname = 'a'\nsha256 = 'abc'\nrights = ['read']", "sha256"),
        (
            "[[tokens]]\nname = 'a'\nsecret = 'sixteen letters!'\nrights = ['read']\ntenant = 'x'",
            "'x', which is not there",
        ),
        ("[[tokens]]\nname = 'a'\nsecrets = 'sixteen letters!'\nrights = ['read']", "secrets"),
        ("[tenants.x]\nhost = '4 elephants'", "4 elephants"),
        ("[tenants.x]\nhost = -1", "negative"),
        ("[tenants.x]\nuids = [1]\n[tenants.y]\nuids = [1]", "uid 1 is of tenants 'x' and 'y'"),
        ("[tenants.x]\nuids = [1]\nrights = ['metrics']", "whose figures are of all tenants"),
        ("[tenants.'x y']", "x y|key"),
        ("nonsense", "is not TOML"),
    ],
)
def test_what_cannot_be_meant_is_named_and_no_secret_is_repeated(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        opened(tmp_path, text)
    assert "sixteen" not in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("twice", [("name = 'admin'", "name"), (f"secret = '{ADMIN}'", "secret")], ids=lambda t: t[1])
def test_two_tokens_share_neither_name_nor_secret(tmp_path: Path, twice: tuple[str, str]) -> None:
    other = {"name": "name = 'other'", "secret": "secret = 'sixteen letters!'"} | {twice[1]: twice[0]}
    with pytest.raises(ConfigError, match="admin"):
        opened(tmp_path, FILE + "\n[[tokens]]\nrights = ['read']\n" + "\n".join(other.values()))


def test_a_changed_file_is_in_force_without_a_restart_and_a_broken_one_never_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = opened(tmp_path)
    assert not access.refresh(), "nothing has changed"
    fresh = FILE.replace(ROUTER, "router-secret-0002")
    (tmp_path / "access.new").write_text(fresh)
    os.replace(tmp_path / "access.new", tmp_path / "access.toml")
    assert access.refresh() and not access.refresh()
    assert access.of_token(ROUTER.encode()) is None
    assert access.of_token(b"router-secret-0002") == Caller("router", "red", frozenset({Right.READ}))
    for broken in ("[[tokens]", None):
        path = tmp_path / "access.toml"
        path.unlink() if broken is None else path.write_text(broken)
        assert not access.refresh()
        assert access.of_token(b"router-secret-0002") is not None, "the table before is in force"
        assert "access.file" in access.report()["last_error"] and "stay as they were" in caplog.text
    (tmp_path / "access.toml").write_text(FILE)
    assert access.refresh() and access.report()["last_error"] is None
    assert access.of_token(ROUTER.encode()) is not None


def test_a_single_token_changes_without_a_restart_too(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the first of two secrets\n")
    access = Access(settings(tmp_path, daemon_token_file=str(token)))
    assert access.at_http(b"the first of two secrets", None, tcp=True) == OPERATOR
    token.write_text("the second of the two\n")
    assert access.refresh(force=True)
    assert access.at_http(b"the second of the two", None, tcp=True) == OPERATOR
    with pytest.raises(Denied):
        access.at_http(b"the first of two secrets", None, tcp=True)
    token.write_text("short")
    assert not access.refresh(force=True) and access.last_error
    assert access.at_http(b"the second of the two", None, tcp=True) == OPERATOR


def test_every_secret_is_compared_in_constant_time_and_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    real = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        assert len(a) == len(b) == 32, "digests have one length whatever is presented"
        return real(a, b)

    access = opened(tmp_path)
    monkeypatch.setattr(hmac, "compare_digest", counting)
    for given in (ROUTER.encode(), WORKER.encode(), b"", b"x" * 100_000):
        compared.clear()
        access.of_token(given)
        assert len(compared) == 3, "the first that fits does not end the search"


def test_whose_user_it_is_counts_only_where_no_token_is_given(tmp_path: Path) -> None:
    access = opened(tmp_path)
    assert access.at_http(None, peer(4001), tcp=False).tenant == "red"
    assert access.at_http(WORKER.encode(), peer(4001), tcp=False).tenant == "blue"
    assert access.at_http(None, peer(os.getuid()), tcp=False) is OPERATOR
    for given, who, tcp in (
        (None, peer(4003), False),
        (None, None, False),
        (None, peer(os.getuid()), True),
        (b"wrong", peer(os.getuid()), False),
        (b"", peer(os.getuid()), False),
    ):
        with pytest.raises(Denied) as caught:
            access.at_http(given, who, tcp=tcp)
        assert not caught.value.known
    assert access.report()["refused"] == 5


def test_the_daemons_own_user_can_be_made_to_need_a_token(tmp_path: Path) -> None:
    access = opened(tmp_path, access_own_user="false")
    with pytest.raises(Denied):
        access.at_http(None, peer(os.getuid()), tcp=False)
    with pytest.raises(Denied):
        access.at_engine_door(b"", peer(os.getuid()), write=False, secret=SECRET)


@pytest.mark.fault(28)
def test_a_salt_is_the_tenants_whatever_its_token_and_nobody_elses(tmp_path: Path) -> None:
    second = f"[[tokens]]\nname='r2'\nsecret='{ROUTER}2'\ntenant='red'\nrights=['read','write']\n"
    access = opened(tmp_path, FILE + second)

    def salt(credential: str, uid: int, write: bool = False) -> bytes:
        return access.at_engine_door(credential.encode(), peer(uid), write=write, secret=SECRET)[1]

    red = salt(ROUTER, 1)
    assert red == salt(ROUTER + "2", 1, write=True) == salt("", 4001, write=True), "a new token finds the old blocks"
    assert len({red, salt(WORKER, 1), salt(ADMIN, 1)}) == 3
    assert salt(ADMIN, 1) == b"" == salt("", os.getuid())
    other = access.at_engine_door(ROUTER.encode(), None, write=False, secret=b"another secret")[1]
    assert other != red, "a salt cannot be computed without the nodes' secret"
    for credential in ("red", "tenant red", red.hex()):  # what a stranger might know of the tenant
        with pytest.raises(Denied):
            salt(credential, 4003)


def test_a_session_needs_the_rights_for_what_it_says_it_will_do(tmp_path: Path) -> None:
    access = opened(tmp_path, FILE + "[[tokens]]\nname='graphs'\nsecret='graphs-secret-0001'\nrights=['metrics']\n")
    for credential, uid, write in ((ROUTER, 1, True), ("", 4002, True), ("graphs-secret-0001", 1, False)):
        with pytest.raises(Denied) as caught:
            access.at_engine_door(credential.encode(), peer(uid), write=write, secret=SECRET)
        assert caught.value.known


def test_without_an_access_file_a_credential_is_a_tenant_of_its_own_as_ever(tmp_path: Path) -> None:
    access = Access(settings(tmp_path))
    salts = {access.at_engine_door(c, None, write=True, secret=SECRET)[1] for c in (b"", b"a", b"b")}
    assert len(salts) == 3 and b"" in salts
    assert access.at_http(None, None, tcp=True) is OPERATOR and not access.guarded


@pytest.mark.parametrize(
    ("values", "who", "may"),
    [
        ({}, peer(7), True),
        ({"access_uids": "7 8"}, peer(7), True),
        ({"access_uids": "7,8"}, peer(9), False),
        ({"access_gids": "50"}, peer(9, 50), True),
        ({"access_gids": "50"}, peer(9, 60, 50), True),
        ({"access_gids": "50"}, peer(50, 60), False),
        ({"access_uids": "7", "access_gids": "50"}, peer(9, 50), True),
        ({"access_uids": "7"}, peer(os.getuid()), True),
        ({"access_uids": "root"}, peer(0), True),
        ({"access_uids": "7"}, None, False),
    ],
)
def test_who_may_connect_is_who_is_named(tmp_path: Path, values: dict[str, str], who: Peer | None, may: bool) -> None:
    refusal = Access(settings(tmp_path, **values)).admission.refusal(who)
    assert (refusal is None) == may
    assert may or who is None or str(who.uid) in str(refusal)


def test_who_is_taken_out_of_the_file_is_not_known_any_more(tmp_path: Path) -> None:
    access = opened(tmp_path)
    callers = [
        access.at_http(ROUTER.encode(), None, tcp=True),
        access.at_http(None, peer(4002), tcp=False),
        access.at_http(None, peer(os.getuid()), tcp=False),
    ]
    assert all(map(access.knows, callers))
    for old, new, known in (
        (ROUTER, "router-secret-0002", [False, True, True]),
        ("uids = [4002]", "uids = [4003]", [True, False, True]),
        ('tenant = "red"', 'tenant = "blue"', [False, True, True]),
    ):
        (tmp_path / "access.toml").write_text(FILE.replace(old, new))
        assert access.refresh(force=True)
        assert list(map(access.knows, callers)) == known


def test_a_tenants_secret_that_is_the_daemons_token_too_is_the_tenants(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(ROUTER)
    access = opened(tmp_path, daemon_token_file=str(tmp_path / "token"))
    assert access.of_token(ROUTER.encode()) == Caller("router", "red", frozenset({Right.READ}))


@pytest.mark.parametrize("key", ["access_uids", "access_gids", "access_socket_owner", "access_socket_group"])
def test_a_name_that_this_machine_does_not_know_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=key.replace("_", ".", 1)):
        settings(tmp_path, **{key: "nobody-has-this-name"})


def test_a_file_that_is_configured_and_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Access(settings(tmp_path, access_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError):
        read_table(str(tmp_path))


def test_a_file_in_whose_place_a_pipe_comes_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody writes into it: who opens it waits for ever."""
    for name in ("token", "access.toml"):
        (tmp_path / name).write_text("a secret of enough length\n" if name == "token" else "")
    access = Access(settings(tmp_path, daemon_token_file=str(tmp_path / "token")))
    (tmp_path / "token").unlink()
    os.mkfifo(tmp_path / "token")
    assert not access.refresh()
    assert "no plain file" in str(access.last_error) and access.of_token(b"a secret of enough length") is not None
    access = Access(settings(tmp_path, access_file=str(tmp_path / "access.toml")))
    (tmp_path / "access.toml").unlink()
    os.mkfifo(tmp_path / "access.toml")
    assert not access.refresh() and "no plain file" in str(access.last_error)
