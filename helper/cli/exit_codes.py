"""Maps errors to exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from helper.cli.output import Exit, fail
from helper.errors import BucketError, BucketRefused, ChainUnavailable, DaemonSilent, NothingThere, StoreUnreachable


@contextmanager
def map_errors_to_exit_codes() -> Iterator[None]:
    """End the command with 2 (invalid argument), 4 (no permission), 5 (not found) or 6 (unreachable).

    All other `HelperError`s end the command with 1 (`helper.cli.main`).
    """
    try:
        yield
    except NothingThere as error:
        fail(f"{error}\n{error.advice}", Exit.NOT_FOUND)
    except BucketRefused as error:
        fail(f"{error}\n{error.advice}", Exit.NOT_AUTHORISED)
    except (DaemonSilent, ChainUnavailable, BucketError, StoreUnreachable) as error:
        fail(f"{error}\n{error.advice}", Exit.UNREACHABLE)
    except PermissionError as error:
        fail(str(error), Exit.NOT_AUTHORISED)
    except ValueError as error:
        fail(str(error), Exit.USAGE)
