"""deploy/: units that systemd accepts, and compose files whose parts go together."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvq_producer.cli import COMMANDS, run

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
SERVICES = [path for path in UNITS if path.suffix == ".service"]
#: The command that a unit runs, and its options.
_START = re.compile(r"^ExecStart=/opt/kvq/bin/kvq (\S+)(.*)$", re.MULTILINE)


class Unit(configparser.ConfigParser):
    """A unit file; of a key that is given more than once the last counts here."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None, delimiters=("=",))
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string(path.read_text())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    program = shutil.which("true")
    assert program is not None
    copies = []
    for path in UNITS:
        copy = tmp_path / path.name.replace("@.", "@0.")
        copy.write_text(path.read_text().replace("/opt/kvq/bin/kvq", program))
        copies.append(str(copy))
    ran = subprocess.run(
        ["systemd-analyze", "verify", *copies],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    ours = [line for line in ran.stderr.splitlines() if "kvq" in line]
    assert ours == []


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_unit_runs_a_command_that_exists(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _START.search(path.read_text())
    assert found is not None
    name, rest = found.groups()
    assert name in COMMANDS
    assert run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    for option in re.findall(r"--[a-z-]+", rest):
        assert option in shown, f"kvq {name} {option}"


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_unit_has_few_rights(path: Path) -> None:
    service = Unit(path)["Service"]
    assert service["User"] == "kvq"
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["EnvironmentFile"].startswith("/etc/kvq/")


@pytest.mark.parametrize("name", ["kvq-worker.service", "kvq-worker@.service"])
def test_a_worker_may_end_its_chunk_and_is_started_again(name: str) -> None:
    unit = Unit(DEPLOY / "systemd" / name)
    service = unit["Service"]
    assert service["Restart"] == "always"
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) >= 120
    assert service["ReadWritePaths"] == unit["Unit"]["RequiresMountsFor"]


def test_every_timer_has_its_service() -> None:
    for path in UNITS:
        if path.suffix == ".timer":
            assert path.with_suffix(".service") in UNITS
            assert Unit(path)["Timer"]["Persistent"] == "yes"


class TestCompose:
    @pytest.fixture
    def services(self) -> Any:
        return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]

    @pytest.fixture
    def over_tls(self) -> Any:
        return yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())["services"]

    def test_what_is_mounted_is_there_or_made_by_a_script(self, services: Any) -> None:
        made = {"./secrets", "./prompts", "./models"}
        for name, service in services.items():
            for volume in service.get("volumes", ()):
                source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
                if source.startswith("./") and source not in made | {"./store"}:
                    assert (DEPLOY / source).exists(), f"{name}: {source}"

    def test_nothing_is_open_to_the_network_by_itself(self, services: Any) -> None:
        for service in services.values():
            for port in service.get("ports", ()):
                assert re.sub(r"\$\{\w+:-(.*?)\}", r"\1", port).startswith("127.0.0.1:")

    def test_the_server_has_the_tested_configuration(self, services: Any, over_tls: Any) -> None:
        (command,) = services["valkey"]["command"]
        assert "valkey-server /conf/valkey.conf" in command
        assert "appendonly yes" in (DEPLOY / "valkey" / "valkey.conf").read_text()
        (secure,) = over_tls["valkey"]["command"]
        assert "valkey-server /conf/valkey-tls.conf" in secure
        for word in re.findall(
            r"/etc/valkey/([\w.]+)", (DEPLOY / "valkey" / "valkey-tls.conf").read_text()
        ):
            assert word in secure

    def test_each_service_logs_in_as_its_role(self, services: Any) -> None:
        assert services["producer"]["env_file"] == ["secrets/producer.env"]
        assert services["metrics"]["env_file"] == ["secrets/metrics.env"]

    def test_the_commands_are_kvq_s(
        self, services: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        name, *options = services["metrics"]["command"]
        assert run([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(one in shown for one in options if one.startswith("--"))

    def test_the_image_has_what_its_build_needs(self) -> None:
        text = (DEPLOY / "Dockerfile").read_text()
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
            for source in line.split()[:-1]:
                assert (DEPLOY.parent / source).exists()


def test_secrets_are_not_committed() -> None:
    assert "secrets/" in (DEPLOY / ".gitignore").read_text().splitlines()
