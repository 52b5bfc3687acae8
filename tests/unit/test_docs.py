"""The documents say what the code does: commands, options, settings, errors, figures and files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, command, documents, made, options

from kvq import errors
from kvq.queue.results import error_code
from kvq.settings import VARIABLES
from kvq_producer.cli import COMMANDS
from kvq_producer.prompts.fields import check_fields
from kvq_producer.prompts.forms import content_of

PAGES = documents()
TEXT = {str(path.relative_to(ROOT)): path.read_text() for path in PAGES}
#: Where KVQ_* variables and `kvq ...` calls stand, besides the documents.
SCRIPTS = sorted(
    path
    for path in (ROOT / "deploy").rglob("*")
    if path.is_file() and path.suffix in {".sh", ".env", ".service", ".yaml", ".plist", ".in"}
)
#: Variables that a script hands to another program, or that belong to the demo and the tests.
NOT_SETTINGS = {"KVQ_LISTEN", "KVQ_HOST", "KVQ_STORE_FOLDER", "KVQ_DEMO_MODEL"}

_VARIABLE = re.compile(r"\bKVQ_[A-Z_]+\b")
_REST = r"kvq ([a-z]+)([^`\n|&;#]*)"
#: Where `kvq` is a command and no word: in a document's code, and in scripts.
_CALL = re.compile(rf"(?:^|[\s`(]|bin/){_REST}", re.MULTILINE)
_SCRIPT_CALL = re.compile(rf"(?:^\s*|\bas \"?\$?\w+\"? |bin/|\"\$1\" ){_REST}", re.MULTILINE)
_FENCE = re.compile(r"^ *```\w*\n.*?^ *```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`[^`]+`")


def calls(path: Path) -> list[tuple[str, str]]:
    """Every `kvq COMMAND ...` in a document's code or in a script: the command, and the rest."""
    text = path.read_text().replace("\\\n", " ")
    if path.suffix != ".md":
        return _SCRIPT_CALL.findall(text)
    spans = (" ".join(one.split()) for one in _SPAN.findall(_FENCE.sub("", text)))
    code = "\n".join([*_FENCE.findall(text), *spans])
    return _CALL.findall(re.sub(r"^\s*#.*$", "", code, flags=re.MULTILINE))


@pytest.mark.parametrize("page", TEXT)
def test_what_is_made_from_the_code_is_up_to_date(page: str) -> None:
    assert made(TEXT[page]) == TEXT[page], "run: python tests/documents.py"


@pytest.mark.parametrize("page", TEXT)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    headings = {
        name: {
            re.sub(r"[^\w\- ]", "", line.lstrip("# ")).strip().lower().replace(" ", "-")
            for line in text.splitlines()
            if line.startswith("#")
        }
        for name, text in TEXT.items()
    }
    for target in re.findall(r"\]\(([^)]+)\)", TEXT[page]):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (folder / file).resolve() if file else ROOT / page
        known_later = path.name in {Path(name).name for name in DOCUMENTS}
        assert path.exists() or known_later, f"{page}: {target}"
        if anchor and path.suffix == ".md" and path.exists():
            assert anchor in headings[str(path.relative_to(ROOT))], f"{page}: {target}"


def test_every_setting_is_in_the_worker_s_page_and_no_other_is_anywhere() -> None:
    known = {one.variable for one in VARIABLES}
    assert known <= set(_VARIABLE.findall(TEXT["worker/README.md"]))
    for path in (*PAGES, *SCRIPTS):
        found = set(_VARIABLE.findall(path.read_text())) - NOT_SETTINGS
        assert found <= known, path


def test_every_command_is_in_the_producer_s_page() -> None:
    page = TEXT["producer/README.md"]
    for name in COMMANDS:
        assert f"### `kvq {name}" in page
    for path in (*PAGES, *SCRIPTS):
        assert {name for name, _ in calls(path)} <= set(COMMANDS), path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_help_and_every_option_does(name: str) -> None:
    assert command(name).help
    for written, said in options(name):
        assert said, f"kvq {name} {written}"


def test_options_that_documents_and_scripts_use_exist() -> None:
    for path in (*PAGES, *SCRIPTS):
        for name, rest in calls(path):
            known = {word.rstrip(",") for written, _ in options(name) for word in written.split()}
            known |= {"--help", "--version", "--debug"}
            used = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest))
            rqs_own = {"--max-jobs", "-q", "--pid"} if name == "worker" else set()
            assert used <= known | rqs_own, f"{path}: kvq {name}{rest}"


def test_forms_of_prompts_are_accepted_as_they_are_shown() -> None:
    shown = re.findall(r"```jsonl\n(.*?)```", TEXT["producer/README.md"], re.DOTALL)
    lines = [line for block in shown for line in block.splitlines()]
    assert len(lines) >= 8
    for line in lines:
        value = json.loads(line)
        assert content_of(value)
        if isinstance(value, dict):
            assert check_fields(value)[1] == []


def test_fields_of_a_line_are_the_documented_ones() -> None:
    page = TEXT["producer/README.md"]
    (passage,) = re.findall(r"Beside its prompt a line may have (.*?)\n\n", page, re.DOTALL)
    line = {
        "custom_id": "a", "name": "n", "model": "m", "codec": "q8", "ttl": "30d", "pin": True,
        "priority": 1, "metadata": {},
    }  # fmt: skip
    found, wrong = check_fields(line)
    assert wrong == []
    assert set(found) == set(line)
    assert all(f"`{name}`" in passage for name in line)


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    defined = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KvqError)
    ]
    assert sorted(drawn) == sorted(set(defined) - {"KvqError"})
    depth = {"KvqError": -1}
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ([│ ]*)[├└]── (\w+)", line)
        if found:
            level = len(found[1]) // 4
            depth[found[2]] = level
            (base,) = getattr(errors, found[2]).__bases__
            assert depth[base.__name__] == level - 1, found[2]


def test_codes_of_results_are_those_that_workers_return() -> None:
    page = TEXT["shared/README.md"]
    assert f"`{error_code(errors.PromptTooLong('x'))}`" in page
    assert "`worker_failed`" in page
