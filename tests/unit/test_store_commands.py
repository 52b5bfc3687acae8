"""`kvq ls`, `show`, `why`, `rm`, `rename`, `pin`, `unpin` and `expire`, as they are typed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from dummystore import KV, KV_ONLY, files_in, make_space, save, save_cache
from tinymodel import tiny_model

from kvq.errors import CacheNotFound, InvalidName, KvqError, StoreNotFound, UsageError
from kvq.model.chat import encode_messages, encode_text, load_tokenizer
from kvq.model.fingerprint import fingerprint
from kvq.store import Store, layout
from kvq_producer import cli

PROMPT = tuple(range(1000, 1600))
TEXT = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVQ_STORE", raising=False)
    monkeypatch.setenv("KVQ_CACHE_DIR", str(tmp_path / "digests"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "store")
    save_cache(made, KV_ONLY, "chat-1", PROMPT, model="org/Big", metadata={"team": "blue"})
    save_cache(made, KV_ONLY, "chat-2", (*PROMPT[:256], 1, 2), model="org/Big", expires=1.0)
    lossy = make_space(KV, codec="q8")
    quality = {"mean_kl": 0.00123456, "top1_agreement": 0.98}
    save_cache(made, lossy, "doc", PROMPT, model="/m/Small", pinned=True, quality=quality)
    return made


def kvq(store: Store | None, command: str, *arguments: object, **how: object) -> Result:
    given = [command, *map(str, arguments)]
    given += [] if store is None else ["--store", str(store.path)]
    return CliRunner(catch_exceptions=True).invoke(cli.cli, given, **how)


def facts(store: Store, command: str, *arguments: object) -> dict:
    done = kvq(store, command, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def error(done: Result) -> KvqError:
    assert done.exit_code != 0
    assert isinstance(done.exception, KvqError), done.output
    return done.exception


# ls


def test_ls_says_what_each_takes(store: Store) -> None:
    found = facts(store, "ls")
    assert found["store"] == str(store.path)
    assert [one["name"] for one in found["caches"]] == ["chat-1", "chat-2", "doc"]
    on_disk = sum(
        path.stat().st_size
        for path in files_in(layout.spaces_dir(store.path))
        if path.suffix == layout.SUFFIX
    )
    assert found["disk_bytes"] == on_disk
    shared = {one["shared_bytes"] for one in found["caches"][:2]}
    assert len(shared) == 1
    assert sum(one["own_bytes"] for one in found["caches"]) + shared.pop() == on_disk
    for one in found["caches"]:
        assert one["disk_bytes"] == one["own_bytes"] + one["shared_bytes"]
        assert one["missing_blocks"] == 0
        assert one["last_used"] >= one["created"]
    assert [one["expired"] for one in found["caches"]] == [False, True, False]
    assert "chain" not in found["caches"][0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--sort", "size"), ["chat-1", "doc", "chat-2"]),
        (("--sort", "name", "--reverse"), ["doc", "chat-2", "chat-1"]),
        (("--codec", "q8"), ["doc"]),
        (("--model", "Big"), ["chat-1", "chat-2"]),
        (("--name", "*-2"), ["chat-2"]),
        (("--expired",), ["chat-2"]),
        (("--pinned",), ["doc"]),
        (("--pinned", "--expired"), []),
    ],
)
def test_ls_filters_and_sorts(
    store: Store, arguments: tuple[str, ...], expected: list[str]
) -> None:
    found = facts(store, "ls", *arguments)
    sizes = {one["name"]: one["disk_bytes"] for one in facts(store, "ls")["caches"]}
    if "size" in arguments:
        expected = sorted(expected, key=lambda name: (-sizes[name], name))
    assert [one["name"] for one in found["caches"]] == expected
    # Sizes do not depend on what is shown.
    assert {one["name"]: one["disk_bytes"] for one in found["caches"]}.items() <= sizes.items()


def test_ls_is_a_table(store: Store) -> None:
    done = kvq(store, "ls")
    lines = done.stdout.splitlines()
    assert lines[0].split() == [
        "name", "model", "codec", "tokens", "size", "own", "created", "used",
    ]  # fmt: skip
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["chat-1", "Big", "raw", "600"],
        ["chat-2", "Big", "raw", "258"],
        ["doc", "Small", "q8", "600"],
    ]
    assert lines[2].rstrip().endswith("expired")
    assert lines[3].rstrip().endswith("pinned")
    assert lines[4].startswith("3 caches; ")
    assert kvq(store, "ls", "--name", "c*").stdout.splitlines()[-1].startswith("2 of 3 caches; ")


def test_ls_names_what_it_cannot_read(store: Store) -> None:
    layout.manifest_path(store.path, "doc").write_text("{}")
    done = kvq(store, "ls")
    assert done.exit_code == 0
    assert "left out" in done.stderr
    assert "doc.json" in done.stderr
    assert list(facts(store, "ls")["unreadable"]) == ["doc"]


def test_an_empty_store_has_no_table(tmp_path: Path) -> None:
    done = kvq(Store.create(tmp_path / "empty"), "ls")
    assert done.stdout == "0 caches; all of them take 0 B, shared blocks counted once\n"


def test_a_folder_that_is_no_store_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.cli, ["ls", "--store", str(tmp_path)])
    assert isinstance(error(done), StoreNotFound)


def test_the_store_comes_from_the_environment(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVQ_STORE", str(store.path))
    assert kvq(None, "ls").stdout.splitlines()[-1].startswith("3 caches")


# show


def test_show_has_every_field_of_the_manifest(store: Store) -> None:
    manifest = store.manifest("doc")
    found = facts(store, "show", "doc")
    for name in manifest.__dataclass_fields__:
        given = getattr(manifest, name)
        assert found[name] == json.loads(json.dumps(given)), name
    assert found["blocks"] == 3
    assert sum(one["nbytes"] for one in found["files"]) == found["disk_bytes"]
    for one in found["files"]:
        assert (store.path / one["path"]).stat().st_size == one["nbytes"]


def test_show_is_for_people_too(store: Store) -> None:
    shown = kvq(store, "show", "doc").stdout
    rows = dict(line.strip().split(None, 1) for line in shown.splitlines())
    assert rows["name"] == "doc"
    assert rows["quality"] == "mean_kl 0.001235, top1_agreement 0.98"
    assert rows["pinned"] == "yes"
    assert rows["expires"] == "never"
    assert "spaces/" not in shown
    files = kvq(store, "show", "doc", "--files").stdout
    assert files.startswith(shown.rstrip("\n"))
    assert "512-600" in files
    assert "metadata         team blue" in kvq(store, "show", "chat-1").stdout


def test_show_of_another_name_says_what_is_alike(store: Store) -> None:
    reason = error(kvq(store, "show", "chat1"))
    assert isinstance(reason, CacheNotFound)
    assert "did you mean chat-1" in str(reason)


# rm


def test_rm_forgets_one_at_once(store: Store) -> None:
    done = kvq(store, "rm", "chat-1")
    assert done.stdout == "chat-1: forgotten\n"
    assert "kvq gc" in done.stderr
    assert store.names() == ["chat-2", "doc"]


@pytest.mark.parametrize("names", [("chat-1", "chat-2"), ("chat-*",), ("*-1",)])
def test_rm_of_more_wants_a_yes(store: Store, names: tuple[str, ...]) -> None:
    assert isinstance(reason := error(kvq(store, "rm", *names)), UsageError)
    assert "--yes" in str(reason)
    assert store.names() == ["chat-1", "chat-2", "doc"]
    gone = facts(store, "rm", *names, "--yes")["forgotten"]
    assert gone == (["chat-1"] if names == ("*-1",) else ["chat-1", "chat-2"])
    assert store.names() == sorted({"chat-1", "chat-2", "doc"} - set(gone))


def test_rm_asks_at_a_terminal(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvq_producer.caches.at_terminal", lambda: True)
    done = kvq(store, "rm", "chat-*", input="n\n")
    assert done.exit_code == 1
    assert "chat-1" in done.stderr
    assert "forget 2 caches?" in done.stderr
    assert store.names() == ["chat-1", "chat-2", "doc"]
    done = kvq(store, "rm", "chat-*", input="y\n")
    assert done.exit_code == 0
    assert store.names() == ["doc"]


def test_rm_takes_pinned_caches_only_by_name(store: Store) -> None:
    done = kvq(store, "rm", "*", "--yes")
    assert "doc is pinned and stays" in done.stderr
    assert store.names() == ["doc"]
    assert facts(store, "rm", "d*", "--yes") == {
        "store": str(store.path), "forgotten": [], "kept_pinned": ["doc"],
    }  # fmt: skip
    assert kvq(store, "rm", "doc").exit_code == 0
    assert store.names() == []


def test_rm_of_a_wrong_name_forgets_nothing(store: Store) -> None:
    assert isinstance(error(kvq(store, "rm", "chat-1", "none", "--yes")), CacheNotFound)
    assert store.names() == ["chat-1", "chat-2", "doc"]


# rename, pin, expire


def test_rename(store: Store) -> None:
    assert kvq(store, "rename", "doc", "paper").stdout == "doc: now paper\n"
    assert store.names() == ["chat-1", "chat-2", "paper"]
    assert "--force" in str(error(kvq(store, "rename", "paper", "chat-1")))
    found = facts(store, "rename", "paper", "chat-1", "--force")
    assert (found["old"], found["name"]) == ("paper", "chat-1")
    assert store.names() == ["chat-1", "chat-2"]
    assert store.manifest("chat-1").codec == "q8"
    assert isinstance(error(kvq(store, "rename", "chat-1", "a/b")), InvalidName)


def test_pin_and_unpin(store: Store) -> None:
    found = facts(store, "pin", "chat-*")
    assert [one["name"] for one in found["caches"]] == ["chat-1", "chat-2"]
    assert store.manifest("chat-2").pinned
    assert kvq(store, "unpin", "chat-2", "doc").stdout == "chat-2: not pinned\ndoc: not pinned\n"
    assert [one.pinned for one in store.manifests()] == [True, False, False]


def test_expire(store: Store) -> None:
    before = time.time()
    found = facts(store, "expire", "chat-1", "doc", "7d")["caches"]
    assert [one["name"] for one in found] == ["chat-1", "doc"]
    expires = store.manifest("chat-1").expires
    assert expires is not None
    assert before + 7 * 86400 <= expires <= time.time() + 7 * 86400
    assert kvq(store, "expire", "chat-*", "never").exit_code == 0
    assert store.manifest("chat-2").expires is None
    done = kvq(store, "expire", "doc", "2031-05-01T12:00:00Z")
    assert done.stdout.startswith("doc: expires 2031-")
    assert done.stdout.endswith(", but is pinned\n")
    assert store.manifest("doc").expires == 1935403200.0


@pytest.mark.parametrize("arguments", [("doc", "soon"), ("doc",), ("7d",)])
def test_expire_wants_a_name_and_a_time(store: Store, arguments: tuple[str, ...]) -> None:
    done = kvq(store, "expire", *arguments)
    assert done.exit_code == 2
    assert store.manifest("doc").expires is None


# why


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def texts(model: Path, tmp_path: Path) -> Store:
    """A store with TEXT."""
    made = Store.create(tmp_path / "texts")
    space = make_space(KV, fingerprint=fingerprint(model))
    save(made, space, encode_text(load_tokenizer(model), TEXT).tolist())
    return made


def test_why_shows_both_sides_of_the_first_difference(texts: Store, model: Path) -> None:
    asked = TEXT[:100] + "?" + TEXT[101:]
    found = facts(texts, "why", "--model", model, "--prompt", asked)
    ids = encode_text(load_tokenizer(model), asked).tolist()
    stored = encode_text(load_tokenizer(model), TEXT).tolist()
    at = next(i for i, (a, b) in enumerate(zip(ids, stored, strict=False)) if a != b)
    assert found["tokens"] == at
    assert found["asked_tokens"] == len(ids)
    one = found["spaces"][0]
    assert one["reason"]["end"] == "diverged"
    assert one["difference"]["position"] == at
    assert one["difference"]["asked"]["text"].lstrip().startswith("?")
    assert one["difference"]["asked"]["ids"] == ids[at : at + 8]
    assert one["difference"]["stored"]["ids"] == stored[at : at + 8]

    shown = kvq(texts, "why", "--model", model, "--prompt", asked).stdout
    assert f"{at} of {len(ids)} tokens can be resumed" in shown
    assert f"at token {at}" in shown
    assert repr(one["difference"]["asked"]["text"]) in shown
    assert repr(one["difference"]["stored"]["text"]) in shown


def test_every_form_of_a_prompt_is_the_same(texts: Store, model: Path, tmp_path: Path) -> None:
    ids = encode_text(load_tokenizer(model), TEXT).tolist()
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "ids.json").write_text(json.dumps({"token_ids": ids}))
    forms = [
        (("--prompt", TEXT), None),
        (("--prompt-file", tmp_path / "text.txt"), None),
        (("--token-ids", tmp_path / "ids.json"), None),
        (("--stdin",), TEXT),
    ]
    for arguments, given in forms:
        done = kvq(texts, "why", "--model", model, *arguments, "--json", input=given)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["tokens"], found["asked_tokens"]) == (len(ids), len(ids))
        assert found["spaces"][0]["exact"]


def test_why_of_a_chat(model: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello there"}]
    made = Store.create(tmp_path / "chats")
    ids = encode_messages(load_tokenizer(model), chat).tolist()
    save(made, make_space(KV, fingerprint=fingerprint(model)), ids)
    file = tmp_path / "chat.json"
    for content in (chat, {"messages": chat, "tools": None, "custom_id": "x"}):
        file.write_text(json.dumps(content))
        found = facts(made, "why", "--model", model, "--messages", file)
        assert found["tokens"] == found["asked_tokens"] == len(ids)
    file.write_text('{"prompt": "x"}')
    reason = error(kvq(made, "why", "--model", model, "--messages", file))
    assert isinstance(reason, UsageError)


def test_why_knows_other_models_and_empty_stores(store: Store, model: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(PROMPT))
    done = kvq(store, "why", "--model", model, "--token-ids", tmp_path / "ids.json")
    assert done.exit_code == 0, done.output
    assert "0 of 600 tokens" in done.stdout
    assert "nothing of this model" in done.stdout
    assert "another model, /m/Small, org/Big" in done.stdout
    assert "has the first 600 of these tokens in raw" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "exactly one of"),
        (("--prompt", "a", "--stdin"), "exactly one of"),
        (("--prompt", "a", "--chat-template-kwargs", "{}"), "goes with --messages"),
        (("--messages", "FILE"), "--messages is not JSON"),
        (("--token-ids", "FILE"), "--token-ids is not a JSON list"),
        (("--prompt-file", "FILE"), "--prompt-file is not UTF-8 (byte 1)"),
    ],
)
def test_why_refuses_what_is_no_prompt(
    texts: Store, model: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "FILE").write_bytes(b"[\xff")
    given = [tmp_path / "FILE" if one == "FILE" else one for one in arguments]
    reason = error(kvq(texts, "why", "--model", model, *given))
    assert isinstance(reason, UsageError)
    assert said in str(reason)
