"""Proof that a cache resumes as if its prompt had just been read: a few tokens, both ways."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvq import codec as codecs
from kvq.cache.container import KVCacheContainer
from kvq.errors import DamagedFile, UsageError
from kvq.generate.iterator import TokenIterator
from kvq.generate.parameters import GenerateParameters
from kvq.model.loading import LoadedModel
from kvq.store.layout import manifest_path
from kvq.store.store import Store
from kvq.store.verify.caches import token_ids


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Greedy tokens after a cache's prompt, resumed and computed anew (`cold`)."""

    name: str
    codec: str
    prompt: int
    reused: int
    resumed: tuple[int, ...]
    cold: tuple[int, ...]

    @property
    def same(self) -> bool:
        return self.resumed == self.cold

    @property
    def exact(self) -> bool:
        """Whether the codec keeps every bit, so that the tokens have to be the same."""
        return codecs.get(self.codec).exact

    @property
    def sound(self) -> bool:
        """Whether the tokens are the same, or may differ."""
        return self.same or not self.exact

    def as_json(self) -> dict[str, Any]:
        return {"same": self.same, "sound": self.sound, **asdict(self)}


def replay(store: Store, llm: LoadedModel, name: str, *, tokens: int = 8) -> Replay:
    """Continue the prompt of the cache `name` twice and compare.

    A cache with a lossy codec may differ: its quality says how often to expect that. Raises
    CacheNotFound, DamagedFile, also when a block is missing, and UsageError when the model is not
    the one that made the cache.
    """
    manifest = store.manifest(name)
    if manifest.fingerprint != llm.fingerprint:
        raise UsageError(f"{name} was made with another model than {llm.name} ({manifest.model})")
    ids = token_ids(store, manifest)
    if len(ids) < manifest.tokens:
        path = manifest_path(store.path, name)
        raise DamagedFile(str(path), f"the block after token {len(ids)} is missing or damaged")
    match = store.match(llm.fingerprint, ids, codecs=[manifest.codec])
    cache = match.load(llm.model, upto=match.resume_tokens)
    reused = cache.tokens
    parameters = GenerateParameters(max_tokens=tokens)
    resumed = tuple(TokenIterator(ids[reused:], llm.model, cache, parameters))
    cold = tuple(TokenIterator(ids, llm.model, KVCacheContainer.make(llm.model), parameters))
    return Replay(
        name=name,
        codec=manifest.codec,
        prompt=len(ids),
        reused=reused,
        resumed=resumed,
        cold=cold,
    )
