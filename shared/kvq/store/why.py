"""Why a prompt resumes where it does: in each space of its model, and what other models have.

Reads names and headers, no tensors, and changes nothing: what is damaged stays where it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvq.errors import DamagedFile, UnsupportedFormat
from kvq.store import layout
from kvq.store.blockfile import read_header
from kvq.store.disk import UNREADABLE, store_errors
from kvq.store.keys import BLOCK, TokenIds, as_ids, first_code
from kvq.store.reason import End, Reason, explain
from kvq.store.restorable import Restorable
from kvq.store.space import Space
from kvq.store.store import Store
from kvq.store.walk import Walk, walk

#: Token ids to their text.
Decode = Callable[[Sequence[int]], str]
#: Tokens shown on each side of a difference.
AROUND = 8
#: Siblings that are opened to show what is stored at a difference.
_OPENED = 3


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Some token ids and, where a decoder was given, their text."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first token (number `position`, from 0) in which prompt and store differ.

    `before` are the tokens that lead to it, `asked` the prompt's from it on, `stored` those of a
    block that is stored there: empty when none could be read. `siblings` counts those blocks.
    """

    position: int
    before: Tokens
    asked: Tokens
    stored: Tokens
    siblings: int


@dataclass(frozen=True, kw_only=True)
class InSpace:
    """What one space has of the prompt.

    `tokens` can be restored, `shared_tokens` are stored. `exact` says that the logits after the
    last token are stored too. `quarantined` are the reasons for which blocks that would go on
    were taken out.
    """

    space: str
    codec: str
    dtype: str
    max_kv_size: int | None
    tokens: int
    shared_tokens: int
    exact: bool
    reason: Reason
    difference: Difference | None = None
    quarantined: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OtherModel:
    """A space of another model that holds the first `shared_tokens` of the same ids.

    `models` are the names under which caches of it were stored.
    """

    fingerprint: str
    models: tuple[str, ...]
    space: str
    codec: str
    shared_tokens: int


@dataclass(frozen=True, kw_only=True)
class Why:
    """The answer: `spaces` are those of the model, the longest match first."""

    fingerprint: str
    asked_tokens: int
    tokens: int
    message: str
    spaces: tuple[InSpace, ...]
    others: tuple[OtherModel, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as JSON's types."""
        facts: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return facts


def why(
    store: Store,
    fingerprint: str,
    token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    codecs: Sequence[str] | None = None,
    decode: Decode | None = None,
    around: int = AROUND,
) -> Why:
    """What `store` has of `token_ids` for the model, and why it is not more.

    With `decode`, tokens come with their text. Raises ValueError for ids that are not token ids,
    StoreError when the store cannot be read.
    """
    ids = as_ids(token_ids)
    every = store.spaces()
    mine = [
        one
        for one in every
        if one.fingerprint == fingerprint and (codecs is None or one.codec in codecs)
    ]
    show = _Shower(decode, around)
    with store_errors(store.path):
        spaces = [_in_space(store, one, ids, show) for one in mine]
        others = list(_others(store, fingerprint, every, ids))
    spaces.sort(key=lambda one: (one.tokens, one.exact, one.shared_tokens), reverse=True)
    if spaces:
        tokens, message = spaces[0].tokens, spaces[0].reason.message
    else:
        tokens, message = 0, store.match(fingerprint, ids, codecs).reason.message
    return Why(
        fingerprint=fingerprint,
        asked_tokens=len(ids),
        tokens=tokens,
        message=message,
        spaces=tuple(spaces),
        others=tuple(others),
    )


class _Shower:
    """Cuts tokens out and decodes them."""

    def __init__(self, decode: Decode | None, around: int) -> None:
        self.decode = decode
        self.around = around

    def first(self, ids: TokenIds) -> Tokens:
        return self._tokens(ids[: self.around])

    def last(self, ids: TokenIds) -> Tokens:
        return self._tokens(ids[max(0, len(ids) - self.around) :])

    def _tokens(self, ids: TokenIds) -> Tokens:
        listed = tuple(int(one) for one in ids)
        return Tokens(ids=listed, text=self.decode(listed) if self.decode else None)


def _in_space(store: Store, space: Space, ids: TokenIds, show: _Shower) -> InSpace:
    walked = walk(store.space_folder(space), ids)
    restorable = Restorable(walked, space.needs)
    plan = restorable.deepest()
    reason = explain(walked, restorable, plan)
    whole = plan.tokens == len(ids)
    leaves = walked.extent < len(ids) and reason.end is not End.DAMAGED
    return InSpace(
        space=space.digest,
        codec=space.codec,
        dtype=space.dtype,
        max_kv_size=space.max_kv_size,
        tokens=plan.tokens,
        shared_tokens=walked.extent,
        exact=whole and plan.logits is not None,
        reason=reason,
        difference=_difference(walked, show) if leaves else None,
        quarantined=() if whole else tuple(_quarantined(store, space, walked)),
    )


def _difference(walked: Walk, show: _Shower) -> Difference | None:
    """Where the prompt leaves what is stored; None where what is stored merely ends."""
    ids, at = walked.ids, walked.extent
    stored: TokenIds | None = None
    siblings = 0
    for step in walked.tails:
        if step.end == at and not step.whole:
            siblings += 1
            if stored is None:
                stored = step.header.meta.token_ids[step.common :]
    if not walked.tails and walked.children.count:
        siblings = walked.children.count
        stored = _any_child(walked)
    if not siblings:
        return None
    return Difference(
        position=at,
        before=show.last(ids[:at]),
        asked=show.first(ids[at:]),
        stored=Tokens(ids=()) if stored is None else show.first(stored),
        siblings=siblings,
    )


def _any_child(walked: Walk) -> TokenIds | None:
    """The tokens of a block after the chain: the longest, none of which the prompt shares."""
    node = walked.node(len(walked.chain))
    folder = layout.node_dir(walked.space, node)
    try:
        names = [one.name for one in folder.iterdir()]
    except FileNotFoundError:
        return None
    parsed = [(name, one) for name in names if (one := layout.parse_name(node, name))]
    blocks = [(one.block.n, name) for name, one in parsed if one.record == "kv"]
    for _, name in sorted(blocks, reverse=True)[:_OPENED]:
        try:
            return read_header(folder / name).meta.token_ids
        except (DamagedFile, UnsupportedFormat, FileNotFoundError):
            continue
    return None


def _quarantined(store: Store, space: Space, walked: Walk) -> Iterator[str]:
    """Reasons of the files in quarantine that could have made the match longer."""
    number = len(walked.chain)
    node, code = walked.node(number), first_code(walked.ids[number * BLOCK :])
    keys = {step.block.key for step in (*walked.chain, *walked.tails)}
    for note in sorted(layout.quarantine_dir(store.path).glob("*.json")):
        try:
            facts = json.loads(note.read_bytes())
            path, reason = Path(facts["file"]), str(facts["reason"])
            parsed = layout.parse_name(bytes.fromhex(path.parent.name), path.name)
        except (OSError, *UNREADABLE):
            continue
        if parsed is None or space.digest not in path.parts:
            continue
        follows = parsed.block.parent == node and parsed.block.first[0] == code[:1]
        if follows or parsed.block.key in keys:
            yield f"{path.name}: {reason}"


def _others(
    store: Store, fingerprint: str, spaces: Sequence[Space], ids: TokenIds
) -> Iterator[OtherModel]:
    found = []
    for space in spaces:
        if space.fingerprint != fingerprint:
            shared = walk(store.space_folder(space), ids).extent
            if shared:
                found.append((shared, space))
    if not found:
        return
    names: dict[str, set[str]] = {}
    for manifest in store.manifests():
        names.setdefault(manifest.fingerprint, set()).add(manifest.model)
    for shared, space in sorted(found, key=lambda one: -one[0]):
        yield OtherModel(
            fingerprint=space.fingerprint,
            models=tuple(sorted(names.get(space.fingerprint, ()))),
            space=space.digest,
            codec=space.codec,
            shared_tokens=shared,
        )
