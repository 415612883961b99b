"""Settings: who wins, what is refused and how it says so, and what ``auto`` comes to on small machines."""

import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from terracekv.daemon import config as config_module
from terracekv.daemon.access_file import read_token
from terracekv.daemon.bounds import HOST_MIN
from terracekv.daemon.config import Config, describe, load_config, require_folders, resolve, summary
from terracekv.tiers import budget
from terracekv.tiers.budget import GIB, MIB, Budget, Memory, Space, parse_size
from terracekv.tiers.errors import ConfigError, NoRoom

HOME = {"HOME": "/home/me"}


def load(file: Path | None = None, environ: dict[str, str] | None = None, **flags: str) -> Config:
    return load_config(file, {k.replace("__", "."): v for k, v in flags.items()}, HOME | (environ or {}))


def settings(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "terracekv.toml"
    file.write_text(text)
    return file


def room(memory: int = 64 * GIB, shm: int = 32 * GIB, disk: int = 400 * GIB) -> Budget:
    return Budget(
        Memory(memory, "MemAvailable", {"MemAvailable": memory}),
        Space(Path("/dev/shm"), shm, shm, "tmpfs", 1),
        Space(Path("/home/me"), disk, disk, "ext4", 2),
    )


@pytest.mark.fault(122)
@pytest.mark.fault(108)
def test_the_defaults_are_those_of_a_laptop() -> None:
    config = load()
    assert config.daemon.http == "127.0.0.1:7411"
    assert config.daemon.runtime_dir == Path("/dev/shm/terracekv")
    assert config.daemon.state_dir == Path("/home/me/.local/state/terracekv")
    assert config.disk_path == Path("/home/me/.local/state/terracekv/disk")
    assert set(config.sources.values()) == {"default"}


def test_a_flag_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = settings(tmp_path, '[host]\nsize = "1GiB"\nslab = "16MiB"\nprefault = false\n')
    environ = {"TERRACEKV_HOST_SIZE": "2GiB", "TERRACEKV_HOST_SLAB": "32MiB"}
    config = load(file, environ, host__size="3GiB")
    assert (config.host.size, config.host.slab, config.host.prefault) == (3 * GIB, 32 * MIB, False)
    assert config.sources["host.size"] == "flag --set"
    assert config.sources["host.slab"] == "environment TERRACEKV_HOST_SLAB"
    assert config.sources["host.prefault"] == f"file {file}"
    assert config.sources["disk.size"] == "default"


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = settings(tmp_path, "[daemon]\nio_threads = 7\n")
    assert load(environ={"TERRACEKV_CONFIG": str(file)}).daemon.io_threads == 7


def test_every_setting_can_be_given_in_each_of_the_three_ways(tmp_path: Path) -> None:
    for key, value in describe(load()).items():
        shown = "auto" if value["value"] is None else str(value["value"]).replace("True", "true")
        section, _, name = key.partition(".")
        file = settings(tmp_path, f'[{section}]\n{name} = "{shown}"\n')
        variable = f"TERRACEKV_{section}_{name}".upper()
        given = [load(file), load(environ={variable: shown}), load_config(None, {key: shown}, HOME)]
        assert [describe(config)[key]["value"] for config in given] == [value["value"]] * 3
        assert [config.sources[key].split()[0] for config in given] == ["file", "environment", "flag"]


@pytest.mark.fault(118)
@pytest.mark.parametrize(
    ("key", "near"), [("host.siez", "host.size"), ("disk.segments", "disk.segment"), ("daemon.size", "host.size")]
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError, match=near):
        load_config(None, {key: "1"}, HOME)
    with pytest.raises(ConfigError, match=near):
        load(settings(tmp_path, f"[{section}]\n{name} = 1\n"))


@pytest.mark.fault(118)
def test_an_unknown_variable_of_ours_is_an_error_too() -> None:
    with pytest.raises(ConfigError, match="TERRACEKV_HOST_SIZE"):
        load(environ={"TERRACEKV_HSOT_SIZE": "1GiB"})


def test_variables_that_kubernetes_makes_for_a_service_are_passed_over() -> None:
    service = {"TERRACEKV_SERVICE_HOST": "10.0.0.1", "TERRACEKV_PORT": "tcp://10.0.0.1:7411"}
    service |= {"TERRACEKV_PORT_7411_TCP_ADDR": "10.0.0.1", "TERRACEKV_HTTP_SERVICE_PORT_WEB": "7411"}
    assert load(environ=service) == load()


@pytest.mark.fault(118)
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("host.size", "0", "every block passes through host"),
        ("disk.size", "0", "set disk.enabled to false"),
        ("host.size", "1", "set 16KiB or more"),
        ("host.slab", "0", "multiple of 4096"),
        ("host.slab", "1", "multiple of 4096"),
        ("host.slab", "5000", "multiple of 4096"),
        ("disk.size", "100MiB", "raise disk.size to 514.3MiB, lower disk.segment to at most 48.8MiB, or"),
        ("disk.size", "1MiB", "raise disk.size to 514.3MiB, or set disk.enabled to false"),
        ("disk.segment", "1000", "multiple of 4096"),
        ("disk.segment", "4096", "8192 at the least"),
        ("host.size", "8GoB", "is not a size such as 8GiB"),
        ("disk.segment", "auto", "is not a size"),
        ("disk.direct", "maybe", "one of auto, on, off"),
        ("daemon.io_threads", "0", "io_threads"),
        ("daemon.drain_s", "soon", "drain_s"),
        ("daemon.http", "7411", "is not host:port"),
        ("daemon.runtime_dir", "/" + "x" * 120, "Unix socket"),
        ("access.own_user", "false", "the Unix sockets would ask nobody for a token"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_would_do(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(None, {key: value}, HOME)
    assert key.rpartition(".")[2] in str(caught.value) and caught.value.hint


@pytest.mark.fault(118)
def test_a_tier_may_be_switched_off_in_so_many_words() -> None:
    config = resolve(load(disk__enabled="false", disk__size="0"), room(disk=0))
    assert config.disk.size == 0 and not config.disk.enabled


@pytest.mark.parametrize("text", ["size = ", 'size = "1GiB"', "[hots]\nsize = 1", "\x00"])
def test_a_file_that_cannot_be_meant_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="terracekv.toml"):
        load(settings(tmp_path, text))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no.toml"):
        load(tmp_path / "no.toml")


@pytest.mark.fault(108)
@pytest.mark.parametrize("bind", ["0.0.0.0:7411", "[::]:7411", "10.1.2.3:80", "my-host:7411"])
def test_a_door_that_others_can_reach_needs_a_token(bind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token_file"):
        load(daemon__http=bind)
    token = tmp_path / "token"
    token.write_text("a secret of enough length\n")
    config = load(daemon__http=bind, daemon__token_file=str(token))
    assert read_token(config.daemon.token_file) == "a secret of enough length"


@pytest.mark.fault(108)
@pytest.mark.parametrize("bind", ["", "127.0.0.1:0", "127.9.9.9:7411", "localhost:7411", "[::1]:7411"])
def test_a_door_that_only_this_machine_can_reach_does_not(bind: str) -> None:
    assert load(daemon__http=bind).daemon.token_file == ""


@pytest.mark.fault(108)
@pytest.mark.parametrize("content", [None, "", "short\n", "\udcff"])
def test_an_unusable_token_is_an_error_and_not_an_open_door(tmp_path: Path, content: str | None) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match="token_file"):
        read_token(load(daemon__token_file=str(token)).daemon.token_file)


def test_auto_is_a_quarter_of_the_memory_and_within_shared_memory() -> None:
    assert resolve(load(), room(memory=64 * GIB)).host.size == 16 * GIB
    small = resolve(load(), room(memory=64 * GIB, shm=1 * GIB)).host.size
    assert small is not None and 1 * GIB - 64 * MIB < small < 1 * GIB


@pytest.mark.fault(78)
@pytest.mark.parametrize("memory", [1 * GIB, 3 * GIB, 24 * GIB, 700 * GIB])
@pytest.mark.parametrize("shm", [256 * MIB, 12 * GIB, 350 * GIB])
@pytest.mark.parametrize("disk", [3 * GIB, 79 * GIB, 4000 * GIB])
def test_auto_never_exceeds_what_is_there(memory: int, shm: int, disk: int) -> None:
    config = resolve(load(), room(memory, shm, disk))
    host, disk_size = config.host.size or 0, config.disk.size or 0
    assert 0 < host <= min(memory // 4, shm) and host % (config.host.slab or 1) == 0
    assert 2 * config.disk.segment <= disk_size <= min(16 * GIB, disk // 4)
    assert 0 < (config.host.slab or 0) <= host and 0 < (config.daemon.queue or 0) <= host


def test_what_is_settled_stays_settled() -> None:
    once = resolve(load(), room())
    assert resolve(once, room()) == once
    assert None not in [value["value"] for value in describe(once).values()]


@pytest.mark.fault(83)
def test_dockers_64_megabytes_are_refused_with_the_way_out() -> None:
    with pytest.raises(NoRoom, match=r"/dev/shm has 64MiB free.*--shm-size.*daemon.runtime_dir"):
        resolve(load(), room(shm=64 * MIB))


def test_where_memory_is_short_for_auto_more_memory_is_advised_and_no_more_shared_memory() -> None:
    with pytest.raises(NoRoom, match=r"comes to 74MiB, less than 128MiB.*300MiB of memory.*512MiB of memory") as said:
        resolve(load(), room(memory=300 * MIB))
    assert "shm" not in said.value.hint


@pytest.mark.fault(83)
@pytest.mark.fault(79)
def test_too_large_a_size_is_refused_with_the_largest_that_fits() -> None:
    with pytest.raises(NoRoom, match=r"/dev/shm has 4GiB left.*host.size 8GiB.*largest host.size that fits is 3.9GiB"):
        resolve(load(host__size="8GiB"), room(shm=4 * GIB))
    with pytest.raises(NoRoom, match=r"memory \(limited by MemAvailable\) has 6GiB left.*that fits is 5.9GiB"):
        resolve(load(host__size="8GiB"), room(memory=6 * GIB))
    with pytest.raises(NoRoom, match=r"disk at /home/me has 10GiB left.*largest disk.size that fits is 9GiB"):
        resolve(load(disk__size="10GiB"), room(disk=10 * GIB))


@pytest.mark.fault(79)
def test_a_disk_too_full_for_auto_is_refused_with_the_numbers_and_the_knobs() -> None:
    for free, comes_to in ((1 * GIB + 256 * MIB, "256MiB"), (512 * MIB, "0B")):
        with pytest.raises(
            NoRoom, match=f"disk.size auto comes to {comes_to}: /home/me has {budget.show(free)} free"
        ) as caught:
            resolve(load(), room(disk=free))
        assert "disk.free_floor 1GiB" in caught.value.message
        for knob in ("disk.path", "disk.size", "disk.free_floor", "disk.enabled"):
            assert knob in caught.value.hint


def test_the_disk_sizes_that_a_refusal_names_do_work() -> None:
    with pytest.raises(ConfigError) as caught:
        load(disk__size="100MiB")
    enough, segment = re.findall(r"[0-9.]+MiB", caught.value.hint)
    load(disk__size=enough)
    load(disk__size="100MiB", disk__segment=str(parse_size(segment) // 4096 * 4096))


def test_a_slab_larger_than_the_arena_is_refused() -> None:
    with pytest.raises(ConfigError, match="host.slab is 8MiB, more than host.size 4MiB"):
        resolve(load(host__size="4MiB", host__slab="8MiB"), room())


@pytest.mark.parametrize("size", [1 * MIB, 1 * MIB + 1, 1_000_000_000])
def test_any_size_of_an_arena_is_cut_into_whole_pages(size: int) -> None:
    host = resolve(load(host__size=str(size)), room()).host
    assert host.size == size and host.slab and host.slab % 4096 == 0 and host.slab <= size


@pytest.mark.fault(83)
@pytest.mark.parametrize("key", ["daemon.runtime_dir", "daemon.state_dir", "disk.path"])
def test_a_folder_that_cannot_be_made_is_refused_by_its_setting(key: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    fine = {"daemon.runtime_dir": str(tmp_path / "run"), "daemon.state_dir": str(tmp_path / "state" / "deep")}
    require_folders(load_config(None, fine, HOME))
    config = load_config(None, fine | {key: str(file / "below")}, HOME)
    with pytest.raises(ConfigError, match=rf"{key} is .*below \(flag --set\), and .*file is no folder") as caught:
        require_folders(config)
    assert key in caught.value.hint
    assert not (tmp_path / "run").exists() and not (tmp_path / "state").exists()


def test_a_folder_that_cannot_be_written_is_refused_with_who_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(daemon__runtime_dir=str(tmp_path), daemon__state_dir=str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root, who may write anywhere
    with pytest.raises(ConfigError, match=f"cannot be written by this user .uid {os.getuid()}"):
        require_folders(config)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(ConfigError, match="is on a file system mounted read-only"):
        require_folders(config)


@pytest.mark.fault(34)
def test_tiers_in_one_place_are_summed() -> None:
    both = load(host__size="4GiB", disk__size="5GiB", disk__free_floor="0")
    shared = room(shm=8 * GIB)
    shared = replace(shared, disk=replace(shared.shm, path=Path("/dev/shm/terracekv")))
    with pytest.raises(NoRoom, match=r"shared memory.*host.size 4GiB \+ disk.size 5GiB"):
        resolve(both, shared)
    with pytest.raises(NoRoom, match=r"memory.*host.size 4GiB \+ disk.size 5GiB"):
        resolve(both, replace(room(memory=8 * GIB), disk=replace(room().disk, filesystem="tmpfs")))
    resolve(both, room(memory=8 * GIB, shm=8 * GIB))


@pytest.mark.fault(34)
def test_no_setting_is_per_engine_and_the_sum_is_said() -> None:
    config = resolve(load(host__size="4GiB"), room())
    text = summary(config, room())
    assert "host.size 4GiB" in text and "64GiB (MemAvailable)" in text and "whatever the number of engines" in text
    assert not [key for key in describe(config) if "rank" in key or "worker" in key or "session" in key]


def test_a_restarted_daemon_keeps_the_size_of_the_arena_it_finds() -> None:
    """Its own arena has eaten the memory; another size would throw away what the restart is to adopt."""
    first = resolve(load(), room(memory=24 * GIB, shm=24 * GIB))
    size = first.host.size or 0
    later = replace(room(memory=24 * GIB - size, shm=24 * GIB - size), arena_size=size, arena_bytes=size)
    assert resolve(load(), later).host.size == size
    assert resolve(load(host__size="20GiB"), later).host.size == 20 * GIB
    busier = replace(room(memory=20 * GIB - size, shm=20 * GIB - size), arena_size=size, arena_bytes=size)
    assert resolve(load(), busier).host.size == size


def test_an_arena_made_under_other_settings_does_not_set_the_size_for_ever() -> None:
    tiny = replace(room(memory=24 * GIB, shm=24 * GIB), arena_size=64 * MIB, arena_bytes=64 * MIB)
    assert resolve(load(), tiny).host.size == 6 * GIB


def test_what_a_disk_tier_holds_already_counts_as_free_for_it() -> None:
    full = replace(room(disk=2 * GIB), disk_bytes=16 * GIB)
    assert resolve(load(disk__size="16GiB"), full).disk.size == 16 * GIB


def test_failpoints_come_from_the_environment_alone() -> None:
    assert load(environ={"TERRACEKV_FAILPOINTS": "disk.write=kill"}).failpoints == "disk.write=kill"
    with pytest.raises(ConfigError):
        load(failpoints="disk.write=kill")


def test_a_setting_cannot_be_changed_once_read() -> None:
    with pytest.raises(AttributeError):
        load().host.size = 1  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"siez": 1}, config_module.Host)


def test_the_documented_file_is_the_default() -> None:
    """Each setting stands in docs/configuration.md, with its default, and no other does."""
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    documented = tomllib.loads(page.partition("```toml\n")[2].partition("```")[0])
    flags = {f"{section}.{name}": str(value).lower() if isinstance(value, bool) else str(value)
             for section, table in documented.items() for name, value in table.items()}  # fmt: skip
    assert set(flags) == set(describe(load()))
    given = load_config(None, flags, HOME)
    assert msgspec.structs.replace(given, sources={}) == msgspec.structs.replace(load(), sources={})


def test_the_documented_least_arena_is_the_one_that_is_taken() -> None:
    page = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
    (least,) = re.findall(r"`host.size` (\w+) or more", page)
    assert load(host__size=least).host.size == HOST_MIN


@pytest.mark.parametrize("enabled", ["true", "false"])
@pytest.mark.parametrize("login", ["user:pass%40word@", "user:pass@word@", "password@"])
def test_an_endpoint_with_a_password_is_refused_without_repeating_it(enabled: str, login: str) -> None:
    """What is in force is printed at the start, by the command line and in the status."""
    flags = {"s3.enabled": enabled, "s3.bucket": "blocks", "s3.endpoint": f"https://{login}localhost:8333/x"}
    with pytest.raises(ConfigError) as caught:
        load_config(None, flags, {})
    assert "s3.credentials_file" in caught.value.hint and "localhost:8333" in caught.value.message
    assert "pass" not in caught.value.message.replace("or password in it", "")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("gpu.size", "0", "gpu.size is 0"),
        ("gpu.device", "MIG-1234", "a slice of a GPU"),
        ("gpu.bus_share", "0", "gpu.bus_share"),
        ("gpu.bus_share", "1.5", "gpu.bus_share"),
        ("gpu.uses", "0", "gpu.uses"),
        ("gpu.window", "0", "gpu.window"),
        ("gpu.strict", "perhaps", "gpu.strict"),
    ],
)
def test_what_no_gpu_can_give_is_refused_by_name(key: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, {"gpu.enabled": "true", key: value}, {"HOME": "/home/me"})
