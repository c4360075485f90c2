"""How what went wrong ends a command: one place that gives errors their exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from helper.cli.output import Exit, fail
from helper.errors import BucketError, BucketRefused, ChainUnavailable, DaemonSilent, NothingThere, StoreUnreachable


@contextmanager
def map_errors_to_exit_codes() -> Iterator[None]:
    """End with 2 for a wrong word (ValueError), 4 for what this user may not, 5 and 6 for what or who is not there.

    Every other error of ours ends the command with 1 (`helper.cli.main`).
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
