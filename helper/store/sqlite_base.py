"""What the parts of the SQLite store share."""

from __future__ import annotations

from helper.clock import Clock
from helper.store.reading import Reader
from helper.store.writer import Writer


class SqlitePart:
    """The writer, the readers and the clock of one store: operators' questions may take long, and hold nobody up."""

    _clock: Clock
    _writer: Writer
    _reader: Reader
    _operators: Reader

    def _now_ms(self) -> int:
        return int(self._clock.now() * 1000)
