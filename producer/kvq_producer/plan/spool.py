"""The token ids of a batch, in an unnamed temporary file instead of memory."""

from __future__ import annotations

import os
import tempfile
from types import TracebackType

import numpy as np

from kvq.errors import UsageError
from kvq.store.keys import TokenIds

#: Bytes of one token id.
WIDTH = 4


class Spool:
    """Appends and reads token ids. Only this process can open the file, and it goes with it.

    Ids are big-endian in the file, so that comparing bytes compares ids.
    `folder` is where the file is made; by default the system's folder for temporary files.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder or tempfile.gettempdir()
        self._file = tempfile.TemporaryFile(dir=self._folder, buffering=1 << 20)  # noqa: SIM115
        self._unflushed = False
        #: Tokens appended so far.
        self.tokens = 0

    def append(self, ids: TokenIds) -> int:
        """Append `ids` (uint32); returns their offset in tokens.

        Raises UsageError when the folder is full.
        """
        offset = self.tokens
        try:
            self._file.write(ids.astype(">u4").tobytes())
        except OSError as error:
            raise self._full(error) from error
        self._unflushed = True
        self.tokens += len(ids)
        return offset

    def read(self, offset: int, tokens: int) -> bytes:
        """`tokens` ids from `offset` on, 4 big-endian bytes each."""
        if self._unflushed:
            try:
                self._file.flush()
            except OSError as error:
                raise self._full(error) from error
            self._unflushed = False
        return os.pread(self._file.fileno(), tokens * WIDTH, offset * WIDTH)

    def ids(self, offset: int, tokens: int) -> TokenIds:
        """`tokens` ids from `offset` on, uint32."""
        return np.frombuffer(self.read(offset, tokens), dtype=">u4").astype(np.uint32)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _full(self, error: OSError) -> UsageError:
        return UsageError(
            f"cannot put the batch's token ids into {self._folder} ({error.strerror}); "
            "point TMPDIR at a folder with 4 bytes free for every token of the batch"
        )
