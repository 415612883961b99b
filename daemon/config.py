"""The settings: what they are, where each value came from, and whether this machine can give what they ask for.

Owns nothing. The only module that reads settings from the environment and their file; the daemon and the command line
each call it once, before any thread starts. Imports msgspec, ``bounds``, the other ``config_`` modules,
``tiers.budget``, ``errors`` and ``tier``.

A flag goes before the environment, that before the file, that before the default. An unknown key is an error that
names the nearest known one: a setting that is silently ignored is worse than none.
"""

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from terracekv.daemon import bounds, config_access, config_encryption
from terracekv.daemon.config_gpu import Gpu, check_gpu
from terracekv.daemon.config_s3 import S3, Count, Size, SizeOrAuto, check_s3
from terracekv.tiers import budget
from terracekv.tiers.budget import GIB, MIB, Budget, parse_size, show
from terracekv.tiers.errors import ConfigError
from terracekv.tiers.tier import PAGE

Seconds = Annotated[float, Meta(ge=0, le=3600)]

PREFIX = "TERRACEKV_"
TOKEN_FILE = f"{PREFIX}TOKEN_FILE"
NO_SETTINGS = (f"{PREFIX}CONFIG", f"{PREFIX}FAILPOINTS", TOKEN_FILE)
ARENA = "arena"
SLAB_AUTO_MIN, SLAB_AUTO_MAX, SLAB_STEP = 16 * MIB, 256 * MIB, 2 * MIB
SOCKET_PATH_MAX = 107
_NOT_OURS = re.compile(r".*_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_\w+)?)")
"""Kubernetes puts these into every container of a namespace that has a Service called terracekv."""


class Daemon(Struct, frozen=True, forbid_unknown_fields=True):
    """Folders, doors and the daemon's own limits. ``queue`` counts bytes of write-through that wait."""

    runtime_dir: Path = Path("/dev/shm/terracekv")
    state_dir: Path = Path("~/.local/state/terracekv")
    http: str = "127.0.0.1:7411"
    token_file: str = ""
    io_threads: Count = 4
    queue: SizeOrAuto = None
    drain_s: Seconds = 10.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    stuck_s: Seconds = 10.0
    lookup_log: str = ""


class Host(Struct, frozen=True, forbid_unknown_fields=True):
    """The arena."""

    size: SizeOrAuto = None
    slab: SizeOrAuto = None
    prefault: bool = True
    eviction: Literal["lru", "frequency", "auto"] = "lru"
    numa: Annotated[str, Meta(pattern="^(auto|off|[0-9]{1,3})$")] = "auto"


class Disk(Struct, frozen=True, forbid_unknown_fields=True):
    """The segments. ``path`` is never empty once loaded."""

    enabled: bool = True
    path: str = ""
    size: SizeOrAuto = None
    segment: Size = 256 * MIB
    direct: Literal["auto", "on", "off"] = "auto"
    admission: Literal["all", "second_touch", "auto"] = "all"
    codec: Literal["auto", "on", "off"] = "off"
    free_floor: Size = 1 * GIB


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings. ``sources`` says, for each ``section.key``, where its value came from."""

    daemon: Daemon = Daemon()
    host: Host = Host()
    disk: Disk = Disk()
    s3: S3 = S3()
    gpu: Gpu = Gpu()
    access: config_access.Access = config_access.Access()
    encryption: config_encryption.Encryption = config_encryption.Encryption()
    failpoints: str = ""
    sources: dict[str, str] = {}

    @property
    def arena_path(self) -> Path:
        return self.daemon.runtime_dir / ARENA

    @property
    def disk_path(self) -> Path:
        return Path(self.disk.path)


SECTIONS: dict[str, type[Struct]] = {
    "daemon": Daemon,
    "host": Host,
    "disk": Disk,
    "s3": S3,
    "gpu": Gpu,
    "access": config_access.Access,
    "encryption": config_encryption.Encryption,
}
OWN_FILES = ("daemon.token_file", "daemon.lookup_log", "s3.credentials_file", "s3.ca_bundle")
FILES = OWN_FILES + config_access.FILES + config_encryption.FILES
TYPES: dict[str, Any] = {
    f"{section}.{field.name}": field.type
    for section, struct in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
}
"""Each known ``section.key`` and its type."""


def version() -> str:
    """Of the installed package; a checkout that is only on the path has none."""
    try:
        return metadata.version("terracekv")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def load_config(
    file: Path | None = None, flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Read all settings; ``flags`` are ``section.key`` to text. What is ``auto`` stays None: see ``resolve``.

    Without ``environ`` this process's environment is read; without ``file``, the one that TERRACEKV_CONFIG names.
    ConfigError names the setting, where it was set, what is wrong and what would do.
    """
    environ = os.environ if environ is None else environ
    if file is None and environ.get(f"{PREFIX}CONFIG"):
        file = Path(environ[f"{PREFIX}CONFIG"])
    values: dict[str, Any] = {}
    sources = dict.fromkeys(TYPES, "default")
    layers = [_from_file(file) if file else {}, _from_environment(environ)]
    layers.append({key: (value, "flag --set") for key, value in (flags or {}).items()})
    for layer in layers:
        for key, (raw, source) in layer.items():
            values[key] = _value(key, raw, source)
            sources[key] = source
    home = environ.get("HOME") or str(Path.home())
    for key in ("daemon.runtime_dir", "daemon.state_dir"):
        section, _, name = key.partition(".")
        path = values.get(key, getattr(SECTIONS[section](), name))
        values[key] = Path(_absolute(str(path), home))
    path = values.get("disk.path")
    values["disk.path"] = _absolute(path, home) if path else str(values["daemon.state_dir"] / "disk")
    for key in FILES:
        if values.get(key):
            values[key] = _absolute(values[key], home)
    built = {
        section: struct(**{name: values[f"{section}.{name}"] for name in _names(section, values)})
        for section, struct in SECTIONS.items()
    }
    config = Config(**built, failpoints=environ.get(f"{PREFIX}FAILPOINTS", ""), sources=sources)  # type: ignore[arg-type]
    _check(config)
    return config


def survey(config: Config) -> Budget:
    """What this machine has for a daemon with these folders, now. ConfigError when they cannot be looked at."""
    try:
        return budget.survey(config.arena_path, config.disk_path)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or 'a folder'} cannot be looked at: {error.strerror}",
            "check daemon.runtime_dir, daemon.state_dir and disk.path, and who may enter them",
        ) from None


def require_folders(config: Config) -> None:
    """Whether this process may make the daemon's folders and write into them; ConfigError names the first setting
    whose folder it may not. Changes nothing."""
    folders = {"daemon.runtime_dir": config.daemon.runtime_dir, "daemon.state_dir": config.daemon.state_dir}
    if config.disk.enabled:
        folders["disk.path"] = config.disk_path
    for key, folder in folders.items():
        bounds.check_folder(key, folder, config.sources.get(key, "default"))


def resolve(config: Config, room: Budget) -> Config:
    """Settle what is ``auto`` and refuse what the machine cannot give. Changes nothing when all is settled and fits.

    Under ``auto`` an arena that an earlier life left keeps its size, if it is near, so that it is adopted.
    NoRoom has the numbers, the setting to turn and the largest value that fits.
    """
    sources = dict(config.sources)
    host_size, slab, queue, disk_size = config.host.size, config.host.slab, config.daemon.queue, config.disk.size
    if host_size is None:
        host_size, why = budget.host_auto(room), "a quarter of the memory, within shared memory"
        # The free memory is never twice the same; an arena of another order was made under other settings.
        if host_size // 2 <= room.arena_size <= host_size * 2:
            host_size, why = room.arena_size, "that of the arena that an earlier life left"
        sources["host.size"] = f"auto: {why}"
    if slab is None:
        slab = slab_of(host_size)
        sources["host.slab"] = "auto: a sixteenth of host.size, 16MiB to 256MiB"
    if slab > host_size:
        raise ConfigError(f"host.slab is {show(slab)}, more than host.size {show(host_size)}", "lower host.slab")
    if config.host.size is None:
        host_size = host_size // slab * slab
    if queue is None:
        queue = host_size // 4
        sources["daemon.queue"] = "auto: a quarter of host.size"
    s3_queue = config.s3.queue
    if s3_queue is None:
        s3_queue = host_size // 8
        sources["s3.queue"] = "auto: an eighth of host.size"
    if not config.disk.enabled:
        disk_size = 0
    elif disk_size is None:
        disk_size = budget.disk_auto(room, config.disk.free_floor)
        sources["disk.size"] = "auto: a quarter of the free space, at most 16GiB"
        bounds.check_disk_auto(room, disk_size, config.disk.free_floor, config.disk.segment)
    elif config.disk.enabled:
        bounds.check_disk(disk_size, config.disk.segment)
    budget.require_all(room, host_size, disk_size, config.disk.free_floor)
    replace = msgspec.structs.replace
    return replace(
        config,
        daemon=replace(config.daemon, queue=queue),
        host=replace(config.host, size=host_size, slab=slab),
        disk=replace(config.disk, size=disk_size),
        s3=replace(config.s3, queue=s3_queue),
        sources=sources,
    )


def slab_of(host_size: int) -> int:
    """What ``host.slab`` comes to under auto."""
    sixteenth = host_size // 16 // SLAB_STEP * SLAB_STEP
    return min(host_size // PAGE * PAGE, max(SLAB_AUTO_MIN, min(SLAB_AUTO_MAX, sixteenth)))


def own_token() -> str:
    """What the command line sends where the daemon asks for a token: that in the file which ``TERRACEKV_TOKEN_FILE``
    names, or "". ConfigError where there is none in it."""
    if not (path := os.environ.get(TOKEN_FILE)):
        return ""
    try:
        token = Path(path).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{TOKEN_FILE}: {path} cannot be read: {error}", "name another file, or unset it") from None
    if not token or not token.isprintable():
        raise ConfigError(f"{TOKEN_FILE}: {path} has not one line of text", "write the token into it, and no more")
    return token


def describe(config: Config) -> dict[str, dict[str, str | int | float | bool | None]]:
    """Every setting in force: ``section.key`` to its value and source. Holds no secret."""
    table = {}
    for key in TYPES:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if isinstance(value, Path):
            value = str(value)
        table[key] = {"value": value, "source": config.sources.get(key, "default")}
    return table


def summary(config: Config, room: Budget) -> str:
    """One line for the log: what this daemon takes in all, of what. For a resolved config."""
    host, disk = config.host.size, config.disk.size
    assert host is not None and disk is not None
    line = (
        f"memory: host.size {show(host)} + daemon {show(budget.DAEMON_BYTES)}, whatever the number of engines, of "
        f"{show(room.memory_free)} ({room.memory.limited_by})"
    )
    if config.disk.enabled:
        line += f"; disk: disk.size {show(disk)} of {show(room.disk_free)} at {config.disk.path}"
    if config.gpu.enabled:
        line += f"; gpu: gpu.size {show(config.gpu.size)} of {config.gpu.device or 'the first GPU'}"
    if config.s3.enabled:
        line += f"; s3: bucket {config.s3.bucket} at {config.s3.endpoint or 'AWS'}"
    return line


def tcp_address(http: str) -> tuple[str, int] | None:
    """``host:port`` or ``[v6]:port`` apart; None when the TCP door is off. ConfigError for anything else."""
    if not http:
        return None
    host, colon, port = http.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"daemon.http: {http!r} is not host:port", 'write 127.0.0.1:7411, or "" for no TCP door')
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``. A name other than localhost is taken to be reachable by all."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _from_file(file: Path) -> dict[str, tuple[Any, str]]:
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file cannot be read: {error}", "check --config") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not TOML: {error}") from None
    found: dict[str, tuple[Any, str]] = {}
    for section, table in content.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{section} in {file} stands in no section", _nearest(section))
        if section not in SECTIONS:
            raise ConfigError(f"unknown section [{section}] in {file}", f"sections are {', '.join(SECTIONS)}")
        found |= {f"{section}.{name}": (value, f"file {file}") for name, value in table.items()}
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    names = {PREFIX + key.replace(".", "_").upper(): key for key in TYPES}
    found: dict[str, tuple[Any, str]] = {}
    for variable in sorted(environ):
        if variable in names:
            found[names[variable]] = (environ[variable], f"environment {variable}")
        elif not variable.startswith(PREFIX) or variable in NO_SETTINGS:
            continue
        elif not _NOT_OURS.fullmatch(variable):
            near = difflib.get_close_matches(variable, names, 1, 0.5)
            raise ConfigError(
                f"the environment variable {variable} is no setting", f"did you mean {near[0]}?" if near else "unset it"
            )
    return found


def _value(key: str, raw: Any, source: str) -> Any:
    """One setting, checked against its type."""
    if key not in TYPES:
        raise ConfigError(f"unknown setting {key} ({source})", _nearest(key))
    kind = TYPES[key]
    try:
        if kind in (Size, SizeOrAuto) and isinstance(raw, str):
            raw = None if kind == SizeOrAuto and raw.strip() == "auto" else parse_size(raw)
        if kind == SizeOrAuto and raw is not None:
            kind = Size
        return msgspec.convert(raw, kind, strict=False, dec_hook=lambda made, value: made(value))
    except (ValueError, TypeError) as error:
        choices = ", ".join(get_args(kind)) if get_origin(kind) is Literal else ""
        hint = f"it is one of {choices}" if choices else "see docs/configuration.md"
        raise ConfigError(f"{key} is {raw!r} ({source}): {error}", hint) from None


def _nearest(key: str) -> str:
    elsewhere = [known for known in TYPES if known.rpartition(".")[2] == key.rpartition(".")[2]]
    near = elsewhere or difflib.get_close_matches(key, TYPES, 1, 0.5)
    return f"did you mean {near[0]}?" if near else f"settings are {', '.join(TYPES)}"


def _names(section: str, values: Mapping[str, Any]) -> list[str]:
    return [name for known, _, name in (key.partition(".") for key in values) if known == section]


def _absolute(path: str, home: str) -> str:
    """``~`` and relative paths made absolute, so that a later change of folder changes nothing."""
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return os.path.abspath(path)


def _check(config: Config) -> None:
    """Contradictions that no machine can resolve."""
    address = tcp_address(config.daemon.http)
    if address and not is_loopback(address[0]) and not (config.daemon.token_file or config.access.file):
        raise ConfigError(
            f"daemon.http binds {address[0]}, which other machines can reach, and daemon.token_file is empty",
            "set daemon.token_file to a file with a secret, or access.file to one of many, or bind 127.0.0.1",
        )
    socket = str(config.daemon.runtime_dir / "engine.sock")
    if len(os.fsencode(socket)) > SOCKET_PATH_MAX:
        raise ConfigError(
            f"daemon.runtime_dir: {socket} has {len(os.fsencode(socket))} bytes, a Unix socket's path at most "
            f"{SOCKET_PATH_MAX}",
            "choose a shorter folder",
        )
    if config.daemon.queue == 0:
        raise ConfigError("daemon.queue cannot be 0", "set a size, or leave it auto")
    bounds.check_host(config.host.size, config.host.slab)
    bounds.check_segment(config.disk.segment)
    if config.disk.enabled and config.disk.size is not None:
        bounds.check_disk(config.disk.size, config.disk.segment)
    if config.s3.queue == 0:
        raise ConfigError("s3.queue cannot be 0", "set a size, or leave it auto")
    check_s3(config.s3)
    check_gpu(config.gpu)
    config_access.check_access(config.access)
