"""`svote-helper audit`: checks the result of a round from public data."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Final

import anyio
import typer

from audit.archive_source import ArchiveSource, open_archived_round
from audit.auditor import Audit, audit_round
from audit.check_results import CHECKS, summarize
from audit.evidence import EvidenceSource, RecordingSource
from audit.html_report import create_report, own_share_rows
from audit.live_round import BlockCache, RoundFollower
from audit.node_source import NodeSource, open_readers
from audit.own_shares import MAX_FILE_BYTES, ShareFile, read_share_file
from audit.source import AuditSource, DataMissing
from helper.chain.node_pool import NodePool, ReadOnlyNodePool
from helper.cli.chain import open_node_pool
from helper.cli.command_inputs import read_settings
from helper.cli.conventions import (
    ConfigOption,
    ExitCode,
    JsonOption,
    emit,
    new_file,
    print_message,
)
from helper.cli.terminal import emit_table, progress_bar
from helper.clock import SystemClock
from helper.errors import NotFound, UsageError
from helper.operations.archive_reader import open_archive_bucket, read_finished_round
from helper.operations.archived_objects import parse_round_directory
from helper.runtime.process_security import acting_as_owner
from helper.server.operator_parameters import parse_hex32
from helper.store.models import MIN_REF_CHARS

_ID_CHARS: Final = 64
_EXIT_CODES: Final[dict[object, ExitCode]] = {
    "passed": ExitCode.OK,
    "failed": ExitCode.FAILURE,
    "not_checked": ExitCode.DEGRADED,
}
_OWN_EXIT_CODES: Final = {True: ExitCode.OK, False: ExitCode.FAILURE, None: ExitCode.DEGRADED}
"""Exit codes by whether all shares of the voter were counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditOptions:
    """What to audit, and which files to write."""

    round_text: Annotated[
        str,
        typer.Argument(
            metavar="ROUND",
            help=f"Round (hex, or a prefix of at least {MIN_REF_CHARS} characters); not needed with --from.",
        ),
    ] = ""
    evidence_in: Annotated[
        Path | None, typer.Option("--from", readable=False, help="Repeat the audit with an evidence file.")
    ] = None
    evidence: Annotated[
        Path | None, typer.Option(help="File to write with all data that was read, to repeat the audit.")
    ] = None
    report: Annotated[Path | None, typer.Option(help="HTML page to write, for readers without this command.")] = None
    cache: Annotated[
        Path | None,
        typer.Option(help="File that keeps the blocks that were read; an interrupted audit continues with it."),
    ] = None
    follow: Annotated[
        bool, typer.Option("--follow", help="Read and verify reveals until the round is finalized, then audit it.")
    ] = False
    archive: Annotated[
        bool,
        typer.Option(
            "--archive", help="Read the round from the archive ([archive] place), for nodes that pruned the blocks."
        ),
    ] = False
    ea_pk: Annotated[str, typer.Option(help="Election key (hex) in a signed voting configuration, to compare.")] = ""
    mine: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            help="File with the nullifiers of your shares (hex, one a line, or JSON of your wallet): was each counted?",
        ),
    ] = None
    report_mine: Annotated[
        bool,
        typer.Option("--report-mine", help="Show the shares of --mine in the report, which says which ones are yours."),
    ] = False
    config: ConfigOption = None


@dataclass(frozen=True, slots=True)
class _Opened:
    """The data of a round. `valid_proofs` has the ids of the proofs that were verified while the round ran."""

    source: AuditSource
    round_id: bytes
    valid_proofs: set[bytes] | None = None


def audit(*, options: AuditOptions, json: JsonOption = False) -> None:
    """Check the result of a finished round from public data.

    Reads all blocks of the vote from the nodes in [chain] endpoints, the archive or an evidence file, and recomputes
    all public data: reveals and their proofs, sums, partial decryptions, totals, the commitment tree and the round id.
    Each check is passed, failed or not checked (docs/audit.md). Exit code 0: all passed, 1: at least one failed, 3: at
    least one was not checked. With --mine: 0 if each share was counted once and no check failed, 3 if that is not
    known.

    No request concerns a single share. Needs no database and does not disturb a running helper.
    """
    key = parse_hex32("--ea-pk", options.ea_pk) if options.ea_pk else None
    if options.evidence_in is None and not options.round_text:
        raise UsageError("ROUND is required without --from")
    if (options.evidence_in is not None) + options.archive + bool(options.cache or options.follow) > 1:
        raise UsageError("--from, --archive, and --cache or --follow exclude each other")
    if options.report_mine and (options.mine is None or options.report is None):
        raise UsageError("--report-mine requires --mine and --report")
    own = None if options.mine is None else _read_mine(options.mine)
    completed = anyio.run(_run, options, key, own)
    code = _EXIT_CODES[completed.result.verdict]
    if completed.own is not None and code is not ExitCode.FAILURE:
        code = _OWN_EXIT_CODES[completed.own.are_counted]
    emit(completed.result.to_json(completed.own), lambda _: _print_result(completed), json=json, code=code)


def _read_mine(path: Path) -> ShareFile:
    with path.open("rb") as file:
        return read_share_file(file.read(MAX_FILE_BYTES + 1))


async def _run(options: AuditOptions, signed_ea_pk: bytes | None, mine: ShareFile | None) -> Audit:
    """Make the audit and write the files."""
    with _optional_file(options.evidence) as evidence, _optional_file(options.report) as report:
        async with _open_source(options) as opened:
            is_recorded = evidence is not None or report is not None  # hashing takes time too
            with (
                closing(RecordingSource(opened.source, opened.round_id, evidence)) as recording,
                progress_bar("block {task.fields[shown]}") as update,
            ):
                search = None if mine is None else mine.search(opened.round_id)
                completed = await audit_round(
                    recording if is_recorded else opened.source,
                    opened.round_id,
                    signed_ea_pk=signed_ea_pk,
                    valid_proofs=opened.valid_proofs,
                    search=search,
                    on_progress=lambda done: update(
                        total=done.expected or None, completed=done.reveals, shown=done.height
                    ),
                )
                recording.finish()
        if search is not None and not search.found:  # not before: where the audit ends must not depend on the file
            raise UsageError("--mine has no share of this round")
        if report is not None:
            command = _command(options, completed)
            page = create_report(completed, recording.hashes, command, has_own_shares=options.report_mine)
            report.write(page.encode())
    return completed


@asynccontextmanager
async def _open_source(options: AuditOptions) -> AsyncIterator[_Opened]:
    text = options.round_text.lower()
    if options.evidence_in is not None:
        if not options.evidence_in.exists():
            raise FileNotFoundError(2, "no such file", str(options.evidence_in))
        with closing(EvidenceSource(options.evidence_in)) as stored:
            if not stored.round_id.hex().startswith(text):
                raise NotFound(
                    f"the evidence is of round {stored.round_id.hex()}", advice="Leave ROUND out, or use another file."
                )
            yield _Opened(stored, stored.round_id)
        return
    if options.archive:
        async with _open_archived_round(options.config, text) as opened:
            yield opened
        return
    async with open_node_pool(options.config) as nodes, open_readers(nodes) as readers:
        round_id = await _find_round(nodes, text)
        source = NodeSource(readers, round_id)
        if options.cache is None and not options.follow:
            yield _Opened(source, round_id)
            return
        with _cache_file(options.cache) as path, closing(BlockCache(source, path, round_id)) as cache:
            valid_proofs = await _follow(readers, cache, round_id) if options.follow else None
            yield _Opened(cache, round_id, valid_proofs)


@asynccontextmanager
async def _open_archived_round(config: Path | None, text: str) -> AsyncIterator[_Opened]:
    """A round in the archive. Nodes are read only if the archive has no more than its reveals."""
    bucket = open_archive_bucket(read_settings(config).config, SystemClock())
    folders = await bucket.list_folders() if len(text) < _ID_CHARS else []
    round_id = _match_round(text, {folder for folder in folders if parse_round_directory(folder) is not None})
    archived = await read_finished_round(bucket, round_id)
    if archived is not None:
        yield _Opened(await open_archived_round(bucket, round_id, archived), round_id)
        return
    async with open_node_pool(config) as nodes, open_readers(nodes) as readers:
        source = NodeSource(readers, round_id)
        yield _Opened(ArchiveSource(bucket, round_id, source), round_id)


async def _find_round(nodes: NodePool, text: str) -> bytes:
    """The round of the chain with this id or prefix."""
    if not MIN_REF_CHARS <= len(text) < _ID_CHARS:
        return _match_round(text, set())
    listed = await nodes.call(lambda client: client.rounds())
    return _match_round(
        text, {entry.round_id.hex() for entry in listed.rounds} | {entry.hex() for entry in listed.unknown_status}
    )


def _match_round(text: str, ids: Set[str]) -> bytes:
    """The round with this id, or the only one of `ids` with this prefix."""
    if len(text) == _ID_CHARS:
        return parse_hex32("ROUND", text)
    if len(text) < MIN_REF_CHARS:
        raise UsageError(f"ROUND must be 64 hex characters, or a prefix of at least {MIN_REF_CHARS}")
    known = [round_hex for round_hex in ids if round_hex.startswith(text)]
    if len(known) != 1:
        raise NotFound(f"{len(known)} rounds begin with {text}", advice="List them with `svote-helper rounds`.")
    return bytes.fromhex(known[0])


@contextmanager
def _cache_file(path: Path | None) -> Iterator[Path]:
    """The file for the blocks that were read; a temporary one if none is given."""
    if path is None:
        with tempfile.TemporaryDirectory(prefix="svote-audit-") as directory:
            yield Path(directory) / "blocks.jsonl"
    else:
        with acting_as_owner(path) as real:
            yield real


async def _follow(nodes: ReadOnlyNodePool, cache: BlockCache, round_id: bytes) -> set[bytes]:
    """Read blocks into the cache until the round is finalized. Returns the ids of the proofs found to be valid."""
    follower = RoundFollower(cache, lambda: NodeSource(nodes, round_id), round_id, print_message)
    try:
        await follower.run()
    except DataMissing as error:
        raise NotFound(f"the round cannot be followed: {error}", advice="Use other nodes.") from None
    return follower.valid_proofs


def _optional_file(path: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    return nullcontext() if path is None else new_file(path)


def _command(options: AuditOptions, completed: Audit) -> str:
    """The command that repeats the audit."""
    source = f"--from {options.evidence.name}" if options.evidence is not None else completed.result.round_id.hex()
    return f"svote-helper audit {source}"


def _print_result(completed: Audit) -> None:
    result, own = completed.result, completed.own
    rows = [
        (check.id, check.verdict.replace("_", " "), check.count, check.why or CHECKS[check.id])
        for check in result.checks
    ]
    emit_table(("check", "verdict", "items", "what or why"), rows)
    print_message(f"round {result.round_id.hex()}: {result.verdict.replace('_', ' ')}: {summarize(result.checks)}")
    if own is not None:
        emit_table(("share", "state", "block", "proposal", "option", "proof"), own_share_rows(own))
        print_message(
            f"{len(own.shares)} shares: {own.counted} counted, {own.missing} missing, {own.counted_twice} counted "
            f"twice, {own.not_checked} not checked"
        )
