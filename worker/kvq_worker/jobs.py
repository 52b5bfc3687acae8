"""The only function that a worker runs. Imports without MLX, which the job itself brings in."""

from __future__ import annotations

from typing import Any

from kvq.errors import (
    CacheError,
    FileFormatError,
    MissingExtra,
    ModelError,
    PromptTooLong,
    StoreNotFound,
    UnsupportedFormat,
    UsageError,
)
from kvq.queue.messages import PrefillMessage
from kvq.queue.results import failed, stored
from kvq.store.keys import unpack
from kvq_worker.exports import export_folder, write_stock_files
from kvq_worker.session import Session, current_session

#: Faults of the prompt or of what it asks for: another try, here or elsewhere, cannot help.
_FINAL = (UsageError, ModelError, CacheError, StoreNotFound, FileFormatError, UnsupportedFormat)


def prefill(message: dict[str, Any]) -> dict[str, Any]:
    """Prefill one prompt, or a prefix that several share, into a store.

    Returns what became of it. A prompt that can never succeed is a result too, with the reason;
    whatever is the machine's fault is raised, and RQ runs the job again.
    """
    session = current_session()
    try:
        return _prefill(PrefillMessage.decode(message), session)
    except MissingExtra:
        raise
    except _FINAL as error:
        return failed(error, session.worker)
    except (MemoryError, RuntimeError) as error:
        if _out_of_memory(error):
            session.models.drop_all()
        raise
    finally:
        session.models.give_back()


def _prefill(message: PrefillMessage, session: Session) -> dict[str, Any]:
    limit = session.settings.max_tokens
    if message.tokens > limit:
        raise PromptTooLong(
            f"the prompt has {message.tokens} tokens, this worker takes {limit} (KVQ_MAX_TOKENS)"
        )
    session.models.check_allowed(message.model, message.adapter)
    token_ids = unpack(message.token_ids(session.fetch))
    store = session.stores.find(message.store)
    folder = export_folder(message.export, session.settings.export)
    outcomes = [
        session.models.run(
            store,
            message.model,
            message.adapter,
            on_chunk=session.control.on_chunk,
            token_ids=token_ids,
            name=cache.name if cache else None,
            codec=message.codec,
            keep=message.keep,
            window_records=message.window_records,
            keep_every=message.keep_every,
            max_kl=message.max_kl,
            ttl=cache.ttl if cache else None,
            pin=cache.pin if cache else False,
            worker=session.worker,
            metadata=cache.metadata if cache else {},
        )
        for cache in message.caches or (None,)
    ]
    if folder is not None:
        names = [cache.name for cache in message.caches]
        write_stock_files(store, names, folder, check=session.control.check)
    first = outcomes[0]
    return stored(
        store=str(store.path),
        **({} if folder is None else {"export": str(folder)}),
        model=message.model,
        space=first.space,
        codec=first.codec,
        tokens=first.tokens,
        reused_tokens=first.reused_tokens,
        prefilled_tokens=first.prefilled_tokens,
        lossy_prefix_tokens=first.lossy_prefix_tokens,
        quality=first.quality,
        bytes=first.bytes,
        bytes_written=sum(one.bytes_written for one in outcomes),
        prefill_seconds=round(first.prefill_seconds, 4),
        seconds=round(sum(one.seconds for one in outcomes), 4),
        worker=session.worker,
    )


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "memory" in text or "malloc" in text
