"""Checks that need no server: packages, mounts, the store's folder, and what a Mac says."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvq.store.store import Store
from kvq_producer.cli import run
from kvq_producer.doctor import behaviour, checks, device, folder, macos, mounts, packages
from kvq_producer.doctor.checks import CHECKS, examine, worst
from kvq_producer.doctor.finding import Finding, State
from kvq_producer.doctor.machine import Given, Machine, Role, guess_role

ROOT = Path(__file__).parents[2]
HERE = dict(os.environ)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def machine(store: Store | None = None, role: Role = Role.WORKER, **other: object) -> Machine:
    given = Given(store=store.path if store else None)
    base = {k: v for k, v in HERE.items() if not k.startswith(("KVQ_", "RQ_"))}
    one = Machine(role, given, environment=base)
    return replace(one, **other)  # type: ignore[arg-type]


class TestPackages:
    def installed(self, monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
        have = {name.replace("_", "-"): version for name, version in versions.items()}
        real = Machine.installed
        monkeypatch.setattr(
            Machine,
            "installed",
            lambda self, name: have[name] if name in have else real(self, name),
        )

    def test_what_is_installed_here_is_right(self) -> None:
        for role in Role:
            assert packages.check_packages(machine(role=role)).state is State.OK
        assert packages.check_pairs(machine()).state is State.OK
        assert packages.check_python(machine()).state is State.OK

    @pytest.mark.parametrize(
        ("name", "version", "said"),
        [
            ("rq", "2.6.1", "rq 2.6.1 is not <3.1,>=3.0"),
            ("rq", "3.1.0", "rq 3.1.0 is not"),
            ("mlx_lm", "0.31.3", "mlx-lm 0.31.3 is not"),
            ("redis", None, "redis is missing"),
        ],
    )
    def test_a_version_out_of_bounds_is_named(
        self, monkeypatch: pytest.MonkeyPatch, name: str, version: str | None, said: str
    ) -> None:
        self.installed(monkeypatch, **{name: version})
        found = packages.check_packages(machine())
        assert found.state is State.BROKEN
        assert said in found.message
        assert found.mend == "pip install --upgrade 'kvq[worker]'"

    def test_two_builds_of_mlx_and_unequal_parts_are_named(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.installed(monkeypatch, mlx_cuda_13="0.32.4", mlx_cpu="0.32.4")
        assert "overwrite each other" in packages.check_pairs(machine()).message
        self.installed(monkeypatch, mlx="0.33.0", mlx_cpu="0.32.4", mlx_cuda_13=None)
        assert "mlx 0.33.0 with mlx-cpu 0.32.4" in packages.check_pairs(machine()).message
        self.installed(monkeypatch, mlx="0.32.4", mlx_cpu="0.32.4", rq_exporter="3.1.0")
        assert packages.check_pairs(machine()).state is State.WARNING

    def test_the_bounds_are_those_of_the_project(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        lines = [f"{one}; extra == 'queue'" for one in project["optional-dependencies"]["queue"]]
        found = {one.package: one for one in packages.needed("queue", "linux", lines)}
        assert set(found) == {"redis", "rq"}
        assert found["rq"].admits("3.0.4")
        assert not found["rq"].admits("3.1")
        assert not found["rq"].admits("2.9")
        assert "click" in {one.package for one in packages.needed("worker", "linux")}

    def test_needs_of_another_system_do_not_count(self) -> None:
        lines = ["mlx>=0.32.0; (sys_platform == 'darwin') and extra == 'mlx'",
                 "mlx[cpu]>=0.40; (sys_platform == 'linux') and extra == 'mlx'"]  # fmt: skip
        (found,) = packages.needed("mlx", "darwin", lines)
        assert found.bounds == ">=0.32.0"

    @pytest.mark.parametrize(
        ("have", "role"),
        [
            ({"mlx-lm", "rq"}, Role.WORKER),
            ({"mlx-lm"}, Role.APP),
            ({"rq"}, Role.PRODUCER),
            (set(), Role.PRODUCER),
        ],
    )
    def test_the_role_is_guessed_from_them(self, have: set[str], role: Role) -> None:
        assert guess_role(lambda name: "1" if name in have else None) is role


class TestDevice:
    def test_mlx_computes(self) -> None:
        found = device.check_mlx(machine())
        assert found.state is State.OK, found
        assert "MLX computes on Device(cpu, 0)" in found.message

    def test_an_mlx_that_does_not_start_is_told_with_its_last_words(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device, "_PROBE", "import sys; sys.exit('no Metal here')")
        found = device.check_mlx(machine())
        assert (found.state, found.message) == (State.BROKEN, "MLX does not work: no Metal here")

    def test_blas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Machine, "installed", lambda self, name: "1")
        bare = {k: v for k, v in HERE.items() if k != "LD_PRELOAD"}
        monkeypatch.setattr("kvq_worker.environment.openblas", lambda: None)
        assert device.check_blas(machine(environment=bare)).state is State.WARNING  # type: ignore[union-attr]
        monkeypatch.setattr("kvq_worker.environment.openblas", lambda: "/lib/o.so")
        found = device.check_blas(machine(environment=bare))
        assert found is not None
        assert found.mend == "export LD_PRELOAD=/lib/o.so"
        loaded = machine(environment={**bare, "LD_PRELOAD": "/lib/libopenblas.so.0"})
        assert device.check_blas(loaded).state is State.OK  # type: ignore[union-attr]
        assert device.check_blas(machine(platform="darwin")) is None

    def test_models_that_are_not_there(self, tmp_path: Path) -> None:
        named = f"{tmp_path}/gone,mlx-community/*,{tmp_path}/*"
        found = device.check_models(machine(environment={**HERE, "KVQ_MODELS": named}))
        assert found.state is State.WARNING
        assert f"{tmp_path}/gone" in found.message

    def test_rq_variables(self) -> None:
        from kvq_worker.environment import RQ_CLASSES

        def say(**variables: str) -> State:
            found = device.check_rq_variables(machine(environment=variables))
            assert found is not None
            return found.state

        assert say() is State.OK
        assert say(**RQ_CLASSES) is State.OK
        assert say(RQ_WORKER_CLASS="rq.Worker") is State.BROKEN
        assert say(RQ_WORKER_CLASS=RQ_CLASSES["RQ_WORKER_CLASS"]) is State.BROKEN


class TestFolder:
    def test_a_good_store_has_nothing_wrong(self, store: Store) -> None:
        one = machine(store)
        for check in CHECKS:
            if check.name.startswith("store") and not check.needs_redis:
                found = check.function(one)
                assert found is None or found.state is State.OK, (check.name, found)
        assert [path.name for path in store.path.iterdir()] == ["kvq-store.json"]

    def test_without_a_store_only_one_check_speaks(self) -> None:
        one = machine(role=Role.APP)
        said = [check.name for check in CHECKS
                if check.name.startswith("store") and check.function(one) is not None]  # fmt: skip
        assert said == ["store"]

    def test_no_store_a_newer_one_and_a_damaged_one(self, store: Store, tmp_path: Path) -> None:
        file = store.path / "kvq-store.json"
        for content, words in (
            ('{"format": 99, "block": 256, "id": "x"}', "upgrade kvq"),
            ('{"format": 1}', "cannot be read"),
            ("{", "cannot be read"),
        ):
            file.write_text(content)
            found = folder.check_store(machine(store))
            assert found is not None
            assert found.state is State.BROKEN
            assert words in found.message + found.mend
        file.unlink()
        found = folder.check_store(machine(store))
        assert found is not None
        assert "is not a kvq store" in found.message

    def test_no_room(self, store: Store) -> None:
        full = machine(store, environment={**HERE, "KVQ_MIN_FREE": "9000TB"})
        found = folder.check_space(full)
        assert found is not None
        assert (found.state, "less than KVQ_MIN_FREE" in found.message) == (State.BROKEN, True)

    def test_a_store_that_everybody_reads(self, store: Store) -> None:
        caches = store.path / "caches"
        caches.mkdir()
        os.chmod(caches, 0o755)
        assert folder.check_privacy(machine(store)).state is State.OK  # type: ignore[union-attr]
        os.chmod(store.path, 0o755)
        assert folder.check_privacy(machine(store)).state is State.WARNING  # type: ignore[union-attr]

    def test_no_folder_for_temporary_files(self, tmp_path: Path) -> None:
        one = machine(environment={**HERE, "TMPDIR": str(tmp_path / "gone")})
        assert folder.check_spool(one).state is State.BROKEN


class TestBehaviour:
    def test_a_rename_that_copies(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def copying(source: Path, target: Path) -> None:
            target.write_bytes(source.read_bytes())

        monkeypatch.setattr(behaviour.os, "rename", copying)
        found = behaviour.check_rename(machine(store))
        assert found is not None
        assert (found.state, "in one step" in found.message) == (State.BROKEN, True)

    def test_a_rename_under_the_eyes_of_a_reader(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def overwriting(source: Path, target: Path) -> None:
            target.write_bytes(source.read_bytes())
            source.unlink()

        monkeypatch.setattr(behaviour.os, "rename", overwriting)
        found = behaviour.check_rename(machine(store))
        assert found is not None
        assert "a mixture" in found.message

    def test_no_hard_links(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(behaviour.os, "link", refuse)
        found = behaviour.check_rename(machine(store))
        assert found is not None
        assert (found.state, "no hard links" in found.message) == (State.NOTE, True)

    def test_an_fsync_that_fails(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(behaviour.os, "fsync", refuse)
        found = behaviour.check_fsync(machine(store))
        assert found is not None
        assert (found.state, "a power cut" in found.message) == (State.BROKEN, True)

    def test_folders_that_cannot_be_flushed(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.fsync

        def only_files(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(22, "Invalid argument")
            real(descriptor)

        monkeypatch.setattr(behaviour.os, "fsync", only_files)
        found = behaviour.check_fsync(machine(store))
        assert found is not None
        assert found.state is State.NOTE

    def test_names_without_case(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Path.exists
        monkeypatch.setattr(Path, "exists", lambda path: real(path.with_name(path.name.lower())))
        found = behaviour.check_names(machine(store))
        assert found is not None
        assert (found.state, "`a` and `A`" in found.message) == (State.WARNING, True)

    @pytest.mark.parametrize(
        ("skew", "state"), [(1, State.OK), (-60, State.WARNING), (3600, State.BROKEN)]
    )
    def test_a_file_server_whose_clock_is_off(
        self, store: Store, skew: float, state: State
    ) -> None:
        import time

        one = machine(store, clock=lambda: time.time() + skew)
        assert behaviour.check_file_times(one).state is state  # type: ignore[union-attr]

    def test_modes_that_do_not_hold(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(behaviour, "FILE_MODE", 0o644)
        found = behaviour.check_modes(machine(store))
        assert found is not None
        assert found.state is State.WARNING
        assert "0600 became 0644" in found.message


class TestMounts:
    @pytest.fixture
    def fstab(self, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
        def write(text: str) -> Path:
            (tmp_path / "fstab").write_text(text)
            return tmp_path / "fstab"

        return write  # type: ignore[return-value]

    def test_a_share_that_is_not_mounted(
        self, store: Store, tmp_path: Path, fstab: Callable[[str], Path]
    ) -> None:
        table = fstab(f"# comment\nnas:/kv  {tmp_path}  nfs  hard  0 0\nproc /proc proc d 0 0\n")
        found = folder.check_mount(machine(store, fstab=table, platform="linux"))
        assert found is not None
        assert found.state is State.BROKEN
        assert f"nothing is mounted at {tmp_path}" in found.message

    def test_blanks_in_names(self, tmp_path: Path, fstab: Callable[[str], Path]) -> None:
        (tmp_path / "my share").mkdir()
        table = fstab(f"nas:/kv {tmp_path}/my\\040share nfs hard 0 0\n")
        place = mounts.empty_mount_point(
            tmp_path / "my share" / "store", fstab=table, platform="linux"
        )
        assert place == tmp_path / "my share"

    def test_a_volume_of_a_mac(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Path, "is_dir", lambda path: True)
        monkeypatch.setattr(Path, "is_mount", lambda path: str(path) == "/Volumes/there")
        look = lambda text: mounts.empty_mount_point(  # noqa: E731
            Path(text), fstab=Path("/nowhere"), platform="darwin"
        )
        assert look("/Volumes/kv/store") == Path("/Volumes/kv")
        assert look("/Volumes/there/store") is None
        assert look("/Users/me/store") is None

    def test_the_deepest_mount_counts_and_soft_nfs_is_warned_of(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        info = tmp_path / "mountinfo"
        info.write_text(
            "22 1 0:1 / / rw shared:1 - ext4 /dev/sda rw\n"
            f"23 22 0:2 / {tmp_path} rw,relatime shared:2 - nfs4 nas:/kv rw,vers=4.2,soft\n"
            "rubbish\n"
        )
        mount = mounts.mount_of(store.path, info)
        assert mount is not None
        assert (mount.kind, mount.point) == ("nfs4", tmp_path.resolve())
        assert mounts.mount_of(store.path, tmp_path / "none") is None
        monkeypatch.setattr(folder, "mount_of", lambda path: mount)
        found = folder.check_mount(machine(store))
        assert found is not None
        assert (found.state, found.mend) == (State.WARNING, "mount it with `hard`")


PMSET = """System-wide power settings:
Currently in use:
 standby              0
 Sleep On Power Button 1
 womp                 1
 autorestart          {autorestart}
 hibernatefile        /var/vm/sleepimage
 powernap             0
 networkoversleep     0
 disksleep            0
 sleep                {sleep} (sleep prevented by powerd, bluetoothd)
 ttyskeepawake        1
 displaysleep         10
"""


class TestMac:
    def mac(self, tmp_path: Path, **variables: str) -> Machine:
        return machine(
            platform="darwin",
            environment={"PATH": f"{tmp_path}:/usr/bin:/bin", **variables},
        )

    def program(self, folder: Path, name: str, says: str, status: int = 0) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {status}\n")
        path.chmod(0o755)

    def test_a_mac_that_sleeps(self, tmp_path: Path) -> None:
        self.program(tmp_path, "pmset", PMSET.format(sleep=10, autorestart=0))
        found = macos.check_sleep(self.mac(tmp_path))
        assert found is not None
        assert found.state is State.WARNING
        assert "sleep 10" in found.message
        assert found.mend == "sudo pmset -a sleep 0 autorestart 1"

    def test_a_mac_that_does_not(self, tmp_path: Path) -> None:
        self.program(tmp_path, "pmset", PMSET.format(sleep=0, autorestart=1))
        assert macos.check_sleep(self.mac(tmp_path)).state is State.OK  # type: ignore[union-attr]

    def test_a_mac_that_stays_off_after_a_power_cut(self, tmp_path: Path) -> None:
        self.program(tmp_path, "pmset", PMSET.format(sleep=0, autorestart=0))
        assert macos.check_sleep(self.mac(tmp_path)).state is State.NOTE  # type: ignore[union-attr]

    def test_a_pmset_that_fails_or_is_not_there(self, tmp_path: Path) -> None:
        assert macos.check_sleep(self.mac(tmp_path)).state is State.NOTE  # type: ignore[union-attr]
        self.program(tmp_path, "pmset", "", status=1)
        assert macos.check_sleep(self.mac(tmp_path)).state is State.NOTE  # type: ignore[union-attr]

    def test_elsewhere_nothing_is_said(self) -> None:
        one = machine(platform="linux")
        assert macos.check_sleep(one) is None
        assert macos.check_fork_safety(one) is None
        assert macos.check_wired_memory(one) is None

    def test_the_fork_flag(self, tmp_path: Path) -> None:
        flag = {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}
        assert macos.check_fork_safety(self.mac(tmp_path, **flag)).state is State.NOTE  # type: ignore[union-attr]
        assert macos.check_fork_safety(self.mac(tmp_path)).state is State.OK  # type: ignore[union-attr]

    def test_more_models_than_the_gpu_may_hold(self, tmp_path: Path) -> None:
        self.program(tmp_path, "sysctl", "24576")
        found = macos.check_wired_memory(self.mac(tmp_path, KVQ_MODEL_MEMORY="40GiB"))
        assert found is not None
        assert found.state is State.WARNING
        self.program(tmp_path, "sysctl", "0")
        assert macos.check_wired_memory(self.mac(tmp_path)).state is State.OK  # type: ignore[union-attr]


class TestCommand:
    def test_bad_settings_are_all_that_is_said(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("KVQ_STEP", "many")
        assert run(["doctor", "--json", "--role", "app"]) == 1
        facts = json.loads(capsys.readouterr().out)
        assert [one["check"] for one in facts["findings"]] == ["settings"]
        assert "KVQ_STEP" in facts["findings"][0]["message"]

    def test_an_app_s_machine_needs_no_redis(
        self, store: Store, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["doctor", "--role", "app", "--store", str(store.path)]) == 0
        out = capsys.readouterr().out
        assert "redis" not in out.replace("redis-", "")
        assert "checks for the role app: all well" in out
        assert f"{store.path} is a kvq store" in out

    def test_what_a_check_raises_is_a_finding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(one: Machine) -> None:
            raise ZeroDivisionError("never mind")

        monkeypatch.setattr(checks, "CHECKS", (checks.Check("odd", frozenset(Role), fail),))
        (found,) = examine(machine())
        assert found.state is State.BROKEN
        assert "ZeroDivisionError: never mind" in found.message

    def test_names_are_unique_and_the_worst_counts(self) -> None:
        names = [check.name for check in CHECKS]
        assert len(set(names)) == len(names)
        assert worst([]) is State.OK
        some = [Finding(check="x", state=one, message="") for one in (State.NOTE, State.BROKEN)]
        assert worst(some) is State.BROKEN


def refuse(*args: object) -> None:
    raise OSError(95, "Operation not supported")
