"""The container files are what their specifications ask for, fit together, and name what the image really has."""

import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from terracekv.daemon.config import load_config
from terracekv.tests.containers import (
    COMPOSE,
    KUBERNETES,
    ROOT,
    SMALL,
    Container,
    Image,
    compose,
    env_file,
    free_port,
    kubernetes,
    make_secrets,
)
from terracekv.tiers.budget import DAEMON_BYTES, MIB, SHM_MARGIN_BYTES, parse_size

KUBERNETES_VERSION = "1.29"
"""The first in which a container that starts before the others may go on beside them."""
S3_BYTES = 256 * MIB
"""What the s3 tier may take: bodies on their way, the codec's scratch memory, the table of presence."""
FORBIDDEN = re.compile(r"hostIPC|hostPID|hostNetwork|privileged|ipc: *host|pid: *host|network_mode|:latest\b")


def schema_errors(file: Path) -> str:
    """What the compose specification's schema has against a file; empty when nothing."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def binary(text: str) -> int:
    """Bytes of a quantity as containers write it: k, m, g and Ki, Mi, Gi are all powers of 1024."""
    number, unit = re.fullmatch(r"(\d+)([kmgKMG]?)i?", text).groups()  # type: ignore[union-attr]
    return int(number) << {"": 0, "k": 10, "m": 20, "g": 30}[unit.lower()]


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    return spec


def sidecar() -> dict[str, Any]:
    (found,) = pod()["initContainers"]
    assert isinstance(found, dict)
    return found


def settings_of_pod() -> dict[str, Any]:
    return tomllib.loads(kubernetes()["ConfigMap"]["data"]["terracekv.toml"])


def test_compose_is_what_the_compose_specification_allows(tmp_path: Path) -> None:
    assert schema_errors(COMPOSE) == ""
    broken = compose()
    broken["services"]["node-a"]["healthcheck"]["tset"] = ["CMD", "true"]
    (tmp_path / "compose.yml").write_text(yaml.safe_dump(broken))
    assert "tset" in schema_errors(tmp_path / "compose.yml")


def test_the_manifest_is_what_kubernetes_allows() -> None:
    documents = list(yaml.safe_load_all(KUBERNETES.read_text()))
    for document in documents:
        kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)
    documents[-1]["spec"]["template"]["spec"]["initContainers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[-1], KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("file", [COMPOSE, KUBERNETES, ROOT / "Dockerfile"], ids=lambda path: path.name)
def test_nothing_asks_for_more_of_the_machine_than_a_volume(file: Path) -> None:
    assert FORBIDDEN.findall(file.read_text()) == []


def test_all_that_compose_names_is_there(tmp_path: Path) -> None:
    file = compose()
    secrets = make_secrets(tmp_path)
    for secret in file["secrets"].values():
        assert (tmp_path / secret["file"]).stat().st_size >= 32
    for service in file["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in file["volumes"] or (source[:2] == "./" and (ROOT / source).exists())
        for secret in service.get("secrets", []):
            assert (secret if isinstance(secret, str) else secret["source"]) in file["secrets"]
        assert {tmp_path / path for path in service.get("env_file", ())} <= {secrets / "s3.env"}
        assert re.search(r":v?\d+\.\d+", service["image"])
    assert "secrets/" in (ROOT / ".gitignore").read_text().split()


def test_the_two_nodes_of_compose_share_the_bucket_and_the_secret_and_nothing_else() -> None:
    services = compose()["services"]
    a, b = services["node-a"], services["node-b"]
    assert b["profiles"] == ["cluster"] and "profiles" not in a
    assert {key for key in a if a[key] != b.get(key)} == {"ports", "volumes"}
    volumes = {volume.partition(":")[0] for node in (a, b) for volume in node["volumes"]}
    assert len(volumes) == len(a["volumes"]) + len(b["volumes"])


def test_the_memory_of_compose_holds_the_arena() -> None:
    file = compose()
    for name in ("a", "b"):
        node = file["services"][f"node-{name}"]
        arena = parse_size(node["environment"]["TERRACEKV_HOST_SIZE"])
        options = dict(
            part.partition("=")[::2] for part in file["volumes"][f"memory-{name}"]["driver_opts"]["o"].split(",")
        )
        assert file["volumes"][f"memory-{name}"]["driver_opts"]["type"] == "tmpfs"
        assert binary(options["size"]) >= arena + SHM_MARGIN_BYTES
        assert binary(node["mem_limit"]) >= arena + DAEMON_BYTES + S3_BYTES
        assert options["uid"] == Image().last("USER").partition(":")[0]


def test_the_memory_of_the_pod_holds_the_arena_and_its_disk_the_segments() -> None:
    settings, volumes = settings_of_pod(), {volume["name"]: volume for volume in pod()["volumes"]}
    arena, disk = (parse_size(settings[tier]["size"]) for tier in ("host", "disk"))
    resources = sidecar()["resources"]
    assert volumes["memory"]["emptyDir"]["medium"] == "Memory"
    assert binary(volumes["memory"]["emptyDir"]["sizeLimit"]) >= arena + SHM_MARGIN_BYTES
    assert binary(volumes["state"]["emptyDir"]["sizeLimit"]) > disk
    assert binary(resources["requests"]["memory"]) >= arena + DAEMON_BYTES + S3_BYTES
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert binary(resources["limits"]["ephemeral-storage"]) > disk


def test_engine_and_daemon_of_the_pod_are_one_user_with_one_memory() -> None:
    (engine,) = pod()["containers"]
    runtime = Path(settings_of_pod()["daemon"]["runtime_dir"])
    for container in (engine, sidecar()):
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "memory"]
        assert runtime.is_relative_to(mount["mountPath"])
        assert "runAsUser" not in container["securityContext"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
    security = pod()["securityContext"]
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == Image().last("USER")
    assert security["runAsNonRoot"] is True
    assert sidecar()["restartPolicy"] == "Always"


def test_what_the_pods_settings_name_is_mounted(tmp_path: Path) -> None:
    file = tmp_path / "terracekv.toml"
    file.write_text(kubernetes()["ConfigMap"]["data"]["terracekv.toml"])
    config = load_config(file, {}, {"HOME": "/"})
    assert config.daemon.token_file == "/run/secrets/terracekv/token"
    mounts = {mount["mountPath"]: mount for mount in sidecar()["volumeMounts"]}
    assert mounts[str(config.daemon.state_dir)]["name"] == "state"
    assert mounts[f"{config.daemon.state_dir}/secret"]["subPath"] == "cluster"
    assert str(Path(config.daemon.token_file).parent) in mounts
    assert str(Path(sidecar()["args"][2]).parent) in mounts


@pytest.mark.parametrize("name", ["node-a", "node-b"])
def test_the_settings_in_compose_are_settings(name: str) -> None:
    service = compose()["services"][name]
    config = load_config(None, {}, {"HOME": "/"} | Image().environment | service["environment"])
    assert str(config.daemon.runtime_dir).startswith("/cache/")
    targets = [secret["target"] for secret in service["secrets"] if isinstance(secret, dict)]
    assert targets == [f"{config.daemon.state_dir}/secret"]
    assert config.daemon.token_file == "/run/secrets/token"


def test_the_image_is_built_from_what_is_there_and_runs_as_nobody_in_particular() -> None:
    image = Image()
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    sources = [shlex.split(rest)[:-1] for word, rest in image.stages[0] if word == "COPY"]
    copied = {source for line in sources for source in line}
    for source in copied:
        assert (ROOT / source).exists() and f"!{source}" in ignored
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {package.removeprefix("terracekv.") for package in packages} <= copied
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", image.last("USER"))
    assert all("python:3.11-slim" in stage[0][1] for stage in image.stages)


def test_the_image_has_the_daemon_the_s3_tier_the_cipher_and_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (install,) = [rest for word, rest in Image().stages[0] if word == "RUN" and "pip install" in rest]
    extras = re.findall(r'"\.\[([\w,]+)\]"', install)
    assert extras == ["s3,encryption"] and "--constraint constraints.txt" in install
    wanted = {*project["dependencies"], *project["optional-dependencies"]["s3"]}
    assert not wanted & {"torch", "transformers", "accelerate"}


def test_the_secrets_that_the_pod_takes_are_those_that_the_page_makes() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    made = dict(re.findall(r"kubectl create secret generic (\S+) (.+)", page))
    (taken,) = [source["secretRef"]["name"] for source in sidecar()["envFrom"]]
    assert made[taken] == "--from-env-file=secrets/s3.env"
    (volume,) = [volume["secret"] for volume in pod()["volumes"] if "secret" in volume]
    assert made[volume["secretName"]] == "--from-file=secrets/token --from-file=secrets/cluster"
    assert set(made) == {taken, volume["secretName"]}


@pytest.mark.fault(56)
def test_every_health_check_is_a_command_that_its_image_has() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    services = compose()["services"]
    for name in ("node-a", "node-b"):
        assert services[name]["healthcheck"]["test"][:2] == ["CMD", Image().healthcheck[0]]
    assert Image().entrypoint[0] in scripts and Image().healthcheck[0] in scripts
    assert services["bucket"]["healthcheck"]["test"][:2] == ["CMD", "wget"]  # of Alpine's base system


@pytest.mark.fault(56)
def test_the_pods_command_runs_and_answers_its_probes_while_there_is_no_bucket(shm_dir: Path, tmp_path: Path) -> None:
    port, secrets = free_port(), make_secrets(tmp_path)
    here = {
        "/cache": str(shm_dir),
        "/var/lib/terracekv": str(tmp_path / "state"),
        "/etc/terracekv": str(tmp_path),
        "/run/secrets/terracekv": str(secrets),
        "0.0.0.0:7411": f"127.0.0.1:{port}",
        "http://seaweedfs-s3:8333": "http://127.0.0.1:1",
    }
    keys = env_file(secrets / "s3.env")
    with Container(tmp_path / "home", Image().environment | keys | SMALL, here) as container:
        text = kubernetes()["ConfigMap"]["data"]["terracekv.toml"]
        (tmp_path / "terracekv.toml").write_text(container.map(text))
        container.start([*Image().entrypoint, *sidecar()["args"]])
        container.healthy(Image().healthcheck)
        for probe in ("livenessProbe", "readinessProbe"):
            asked = sidecar()[probe]["httpGet"]
            assert asked["port"] == sidecar()["ports"][0]["name"] and sidecar()["ports"][0]["containerPort"] == 7411
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{asked['path']}", timeout=10) as answer:
                assert answer.status == 200
        assert container.end() == 0
        assert container.run(Image().healthcheck).returncode == 1
