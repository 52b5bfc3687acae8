"""deploy/launchd/: property lists that launchd takes, and scripts that can be run again and again.

launchctl, pmset, sysctl and plutil are stand-ins that note what they were told.
"""

from __future__ import annotations

import getpass
import os
import plistlib
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

LAUNCHD = Path(__file__).parents[2] / "deploy" / "launchd"
PLISTS = sorted(LAUNCHD.glob("*.plist"))

#: Keeps what is loaded in a file; a worker that was told to end takes a moment.
LAUNCHCTL = """#!/bin/sh
echo "launchctl $*" >>"$CALLS"
loaded=$FAKE/loaded
touch "$loaded"
case "$1" in
bootstrap)
    label=$(sed -n '/<key>Label/{n;s/.*<string>\\(.*\\)<.string>/\\1/p;}' "$3")
    if grep -qx "$2/$label" "$loaded"; then echo "Bootstrap failed: 5" >&2; exit 5; fi
    echo "$2/$label" >>"$loaded" ;;
bootout)
    grep -qx "$2" "$loaded" || { echo "Boot-out failed: 3: No such process" >&2; exit 3; }
    echo 2 >"$FAKE/ending" ;;
print)
    if [ -s "$FAKE/ending" ]; then
        left=$(cat "$FAKE/ending")
        if [ "$left" -gt 0 ]; then echo $((left - 1)) >"$FAKE/ending"; exit 0; fi
        grep -vx "$2" "$loaded" >"$loaded.new"; mv "$loaded.new" "$loaded"
        : >"$FAKE/ending"
    fi
    grep -qx "$2" "$loaded" ;;
esac
"""
NOTES = """#!/bin/sh
echo "{name} $*" >>"$CALLS"
{then}
"""


class Mac:
    """A machine with stand-ins on PATH; scripts install below a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home & <co>"
        self.root = folder / "root"
        self.home.mkdir()
        self.root.mkdir()
        programs = folder / "bin"
        programs.mkdir()
        self.calls = folder / "calls"
        self.calls.touch()
        self._program(programs / "launchctl", LAUNCHCTL)
        self._program(programs / "pmset", NOTES.format(name="pmset", then=""))
        self._program(
            programs / "sysctl",
            NOTES.format(name="sysctl", then='[ "$2" != hw.memsize ] || echo 68719476736'),
        )
        self._program(programs / "sleep", "#!/bin/sh\n")
        self.venv = folder / "venv"
        (self.venv / "bin").mkdir(parents=True)
        self._program(self.venv / "bin" / "kvq", '#!/bin/sh\nenv | sort\necho "kvq $*"\n')
        self.environment = {
            "PATH": f"{programs}:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.home),
            "DESTDIR": "",
            "CALLS": str(self.calls),
            "FAKE": str(folder),
        }

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def run(self, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(LAUNCHD / script), *arguments],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def told(self, program: str) -> list[str]:
        lines = self.calls.read_text().splitlines()
        return [line.removeprefix(f"{program} ") for line in lines if line.startswith(program)]

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("install.sh", "--venv", str(self.venv), *arguments, DESTDIR=str(self.root))

    def uninstall(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("uninstall.sh", *arguments, DESTDIR=str(self.root))

    @property
    def loaded(self) -> list[str]:
        path = self.folder / "loaded"
        return path.read_text().split() if path.exists() else []

    def below(self, path: str | Path) -> Path:
        return self.root / str(path).lstrip("/")


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path)


def settings(mac: Mac, text: str = "KVQ_STORE='/Volumes/my kv'\n") -> Path:
    path = mac.folder / "settings.env"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", PLISTS, ids=lambda path: path.name)
def test_property_lists_are_such(path: Path) -> None:
    facts = plistlib.loads(path.read_bytes())
    assert facts["Label"].startswith("kvq.")
    assert all(isinstance(word, str) for word in facts["ProgramArguments"])
    assert facts["RunAtLoad"] is True
    if shutil.which("plutil"):
        subprocess.run(["plutil", "-lint", str(path)], check=True)


@pytest.mark.parametrize("kind", ["agent", "daemon"])
def test_a_worker_is_kept_alive_and_given_time_to_end(kind: str) -> None:
    facts = plistlib.loads((LAUNCHD / f"kvq.worker.{kind}.plist").read_bytes())
    assert facts["KeepAlive"] is True
    assert facts["ExitTimeOut"] >= 120
    assert facts["ThrottleInterval"] == 10
    assert facts["Umask"] == 0o077
    assert ("UserName" in facts) == (kind == "daemon")


def test_an_agent_is_installed_twice_and_removed_twice(mac: Mac) -> None:
    support = mac.home / "Library/Application Support/kvq-worker"
    for _ in range(2):
        ran = mac.install("--env", str(settings(mac)))
        assert (ran.returncode, ran.stderr) == (0, "")
        assert mac.loaded == [f"gui/{os.getuid()}/kvq.worker"]
    plist = plistlib.loads(
        mac.below(mac.home / "Library/LaunchAgents/kvq.worker.plist").read_bytes()
    )
    logs = mac.home / "Library/Logs/kvq"
    assert plist["ProgramArguments"] == [
        "/bin/sh", f"{support}/kvq-worker.sh", str(mac.venv), str(support), str(logs),
    ]  # fmt: skip
    assert plist["StandardOutPath"] == f"{logs}/worker.log"
    env = mac.below(support / "worker.env")
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    assert env.read_text() == "KVQ_STORE='/Volumes/my kv'\n"
    # Settings that are there stay.
    assert mac.install().returncode == 0
    assert env.read_text() == "KVQ_STORE='/Volumes/my kv'\n"
    assert not list(mac.root.rglob("*.new"))

    for _ in range(2):
        ran = mac.uninstall()
        assert (ran.returncode, ran.stderr) == (0, "")
        assert mac.loaded == []
    assert sorted(p.name for p in mac.root.rglob("*") if p.is_file()) == ["worker.env"]
    assert mac.uninstall("--purge").returncode == 0
    assert [p for p in mac.root.rglob("*") if p.is_file()] == []


def test_a_worker_that_runs_is_waited_for_before_another_starts(mac: Mac) -> None:
    mac.install("--env", str(settings(mac)))
    mac.calls.write_text("")
    mac.install()
    told = [line.split()[0] for line in mac.told("launchctl")]
    assert told == ["bootout", "print", "print", "print", "enable", "bootstrap"]


def test_a_daemon_runs_as_its_user_with_its_log_rotated(mac: Mac) -> None:
    user = getpass.getuser()
    if user == "root":
        user = "nobody"
    ran = mac.install("--daemon", "--user", user, "--env", str(settings(mac)))
    assert ran.returncode == 0, ran.stderr
    assert mac.loaded == ["system/kvq.worker"]
    facts = plistlib.loads(mac.below("/Library/LaunchDaemons/kvq.worker.plist").read_bytes())
    assert facts["UserName"] == user
    rotation = mac.below("/etc/newsyslog.d/kvq.conf").read_text().splitlines()
    (line,) = [line for line in rotation if not line.startswith("#")]
    log, mode, count, size, when, flags, pid, signal = line.split()
    assert (log, pid) == ("/Library/Logs/kvq/worker.log", "/Library/Logs/kvq/worker.pid")
    assert (mode, when, flags, signal) == ("600", "*", "J", "15")
    assert int(count) > 0
    assert int(size) > 0
    assert mac.uninstall("--daemon").returncode == 0
    assert mac.loaded == []
    assert not mac.below("/etc/newsyslog.d/kvq.conf").exists()


def test_without_settings_an_example_is_put_there_and_nothing_started(mac: Mac) -> None:
    ran = mac.install()
    assert ran.returncode == 0
    assert "now write your settings into" in ran.stdout
    assert mac.loaded == []
    assert mac.install().returncode == 0
    assert len(mac.loaded) == 1


def test_what_launchd_starts_is_the_worker_with_its_settings(mac: Mac) -> None:
    text = "KVQ_STORE='/Volumes/my kv'\nKVQ_MODELS='a/*,b'\nKVQ_REDIS_URL=redis://u:p@h:1/0\n"
    mac.install("--env", str(settings(mac, text)))
    support = mac.below(mac.home / "Library/Application Support/kvq-worker")
    logs = mac.below(mac.home / "Library/Logs/kvq")
    ran = subprocess.run(
        ["/bin/sh", str(support / "kvq-worker.sh"), str(mac.venv), str(support), str(logs)],
        env={"HOME": str(mac.home)},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ran.stdout.splitlines()
    assert "KVQ_STORE=/Volumes/my kv" in lines
    assert "KVQ_MODELS=a/*,b" in lines
    assert "KVQ_REDIS_URL=redis://u:p@h:1/0" in lines
    assert lines[-1] == f"kvq worker --pid {logs}/worker.pid"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--daemon"], "--daemon needs --user"),
        (["--daemon", "--user", "root"], "does not run as root"),
        (["--daemon", "--user", "no-such-user"], "there is no user"),
        (["--user", "x"], "goes with --daemon"),
        (["--venv", "/nowhere"], "there is no /nowhere/bin/kvq"),
        (["--env", "/nowhere"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(
    mac: Mac, arguments: list[str], words: str
) -> None:
    ran = mac.install(*arguments)
    assert ran.returncode == 1
    assert words in ran.stderr
    assert list(mac.root.iterdir()) == []
    assert mac.told("launchctl") == []


def test_usage_is_the_script_s_own_head(mac: Mac) -> None:
    for script in ("install.sh", "uninstall.sh", "tune-mac.sh"):
        ran = mac.run(script, "--help")
        assert ran.returncode == 2
        assert script in ran.stdout
        assert "set -eu" not in ran.stdout


def test_a_mac_is_tuned_and_back(mac: Mac) -> None:
    root = {"DESTDIR": str(mac.root)}
    for _ in range(2):
        ran = mac.run("tune-mac.sh", "--wired-limit-mb", "57344", **root)
        assert ran.returncode == 0, ran.stderr
    assert mac.told("pmset")[-1] == "-a sleep 0 disksleep 0 autorestart 1 womp 1 powernap 0"
    assert mac.told("sysctl")[-1] == "iogpu.wired_limit_mb=57344"
    facts = plistlib.loads(mac.below("/Library/LaunchDaemons/kvq.wired-memory.plist").read_bytes())
    assert facts["ProgramArguments"][1] == "iogpu.wired_limit_mb=57344"
    assert mac.run("tune-mac.sh", "--undo", **root).returncode == 0
    assert not mac.below("/Library/LaunchDaemons/kvq.wired-memory.plist").exists()
    assert mac.told("sysctl")[-1] == "iogpu.wired_limit_mb=0"


def test_a_limit_that_starves_macos_is_refused(mac: Mac) -> None:
    for limit, status in (("65000", 1), ("lots", 2)):
        ran = mac.run("tune-mac.sh", "--wired-limit-mb", limit, DESTDIR=str(mac.root))
        assert ran.returncode == status
    assert mac.told("launchctl") == []


def test_the_settings_that_the_doctor_wants_are_those_that_tuning_makes() -> None:
    from kvq_producer.doctor.macos import WANTED_POWER

    (line,) = [
        line for line in (LAUNCHD / "tune-mac.sh").read_text().splitlines()
        if line.startswith("pmset -a ")
    ]  # fmt: skip
    words = line.split()[2:]
    assert dict(zip(words[::2], map(int, words[1::2]), strict=True)) == WANTED_POWER
