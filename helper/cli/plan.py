"""`svote-helper plan`: what a round will take of this helper, before it begins."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import typer

from helper.cli.conventions import ExitCode, JsonOption, emit, fail, print_message
from helper.cli.operator_api import UNIT_SECONDS
from helper.cli.terminal import emit_fields
from helper.config.sections import Config
from helper.core.json_records import fact
from helper.core.load_forecast import (
    CLOSING_SECONDS,
    MAX_BLOCK_SECONDS,
    MAX_REVEALS_PER_BLOCK,
    REFERENCE_PROOF_SECONDS,
    Distribution,
    ProofRate,
    RoundPlan,
    RoundSize,
    make_plan,
)
from helper.core.text_forms import format_duration
from helper.doctor.proving import measure_proof_seconds
from helper.errors import ProverError

MIN_ROUND_SECONDS: Final = 60
MAX_ROUND_SECONDS: Final = 366 * 86_400
_DURATION: Final = re.compile(r"([0-9]{1,9})(s|min|m|h|d)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRound(RoundPlan):
    """`plan`."""

    cores: int = fact("Cores of this helper.", ge=1)
    circuit: str = fact("Circuit generation.")
    seconds_per_proof: float = fact("Seconds per proof and core.", gt=0)
    measured: bool = fact("Whether the time of a proof was measured now.")
    round_seconds: int = fact("Length of the round in seconds.", ge=MIN_ROUND_SECONDS)
    distribution: Distribution = fact("When the shares become due.")


def plan(
    voters: Annotated[int, typer.Option(min=1, max=100_000_000, help="Number of voters.")],
    proposals: Annotated[int, typer.Option(min=1, max=50, help="Number of proposals; each voter votes on all.")],
    helpers: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of helpers in the voting configuration, with this one.")
    ],
    bundles: Annotated[
        int, typer.Option(min=1, max=1000, help="Bundles of notes per voter. Each casts its own votes.")
    ] = 1,
    round_length: Annotated[
        str, typer.Option(help="Time from the creation of the round to its end: seconds, or such as 90min, 24h, 7d.")
    ] = "7d",
    distribution: Annotated[
        Distribution,
        typer.Option(
            help="When shares become due. wallet: voters vote evenly over the round, wallets choose the times. "
            "uniform: evenly over the round. deadline: all votes in the last-moment window, the worst case."
        ),
    ] = Distribution.WALLET,
    cores: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Cores of this helper, one prover each (default: those of this machine)."),
    ] = None,
    circuit: Annotated[str, typer.Option(help="Circuit generation.")] = "k10",
    block_seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds between two blocks of the chain.")
    ] = MAX_BLOCK_SECONDS,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure the time of a proof on this machine now, instead of using that of `make bench`."
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    """Compute what a round will take: proofs, time, cores, disk and memory.

    The plan counts on no other helper: this one reveals every share that it
    gets. The lines "together" assume that all helpers have as many cores.
    """
    seconds = parse_round_length(round_length)
    slots = cores or len(os.sched_getaffinity(0))
    rate = ProofRate(get_proof_seconds(circuit, slots, measure=measure), slots, block_seconds)
    size = RoundSize(voters, proposals, helpers, bundles, seconds, distribution)
    figures: dict[str, Any] = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(make_plan(size, rate)).items()
    }
    result = PlannedRound(
        **figures,
        cores=slots,
        circuit=circuit,
        seconds_per_proof=round(rate.seconds_per_proof or 0.0, 4),
        measured=measure,
        round_seconds=seconds,
        distribution=distribution,
    )
    emit(result, _print_plan, json=json)


def parse_round_length(text: str) -> int:
    """Return the length of a round in seconds. Ends the command if the text is invalid."""
    match = _DURATION.fullmatch(text)
    seconds = int(match[1]) * UNIT_SECONDS[match[2] or "s"] if match else 0
    if not MIN_ROUND_SECONDS <= seconds <= MAX_ROUND_SECONDS:
        fail("--round-length must be 60 s to 366 d: seconds, or a number with s, min, h or d (7d)", ExitCode.USAGE)
    return seconds


def get_proof_seconds(circuit: str, cores: int, *, measure: bool) -> float:
    """Return the time of a proof in seconds. Ends the command if the circuit is unknown or cannot be measured."""
    if not measure:
        if circuit not in REFERENCE_PROOF_SECONDS:
            known = ", ".join(REFERENCE_PROOF_SECONDS)
            fail(f"the time of a proof is known for {known} only: use --measure", ExitCode.USAGE)
        return REFERENCE_PROOF_SECONDS[circuit]
    if cores > len(os.sched_getaffinity(0)):
        fail("--measure needs a core for each prover: this machine has fewer than --cores", ExitCode.USAGE)
    print_message(f"measuring {circuit} with a prover per core, {cores} in total")
    try:
        return asyncio.run(measure_proof_seconds(circuit, provers=cores, nice=Config().prover.nice))
    except ProverError as error:
        fail(f"proofs could not be measured: {error}")


def _print_plan(values: dict[str, Any]) -> None:
    source = "measured now" if values["measured"] else "reference"
    done = format_duration(values["done_seconds"])
    needed = values["cores_needed"]
    rows = {
        "shares of this helper": f"{values['shares']:,} of {values['reveals']:,}",
        "proofs": f"{values['proofs']:,}, {values['proofs_per_second']:.1f} per second on {values['cores']} cores",
        "time of a proof": f"{values['seconds_per_proof']:.2f} s ({values['circuit']}, {source})",
        "longest backlog": f"{values['max_backlog']:,} shares",
        "done": f"{done} after the beginning, {_format_slack(values['slack_seconds'])}",
        "together": f"with {values['cores']} cores each, {_format_slack(values['together_slack_seconds'])}",
        "cores needed": "no number is enough" if needed is None else str(needed),
        "disk": f"{values['disk_bytes'] / 1e6:,.0f} MB",
        "memory": f"{values['memory_bytes'] / 1e6:,.0f} MB",
    }
    emit_fields(rows)
    sys.stdout.flush()
    print_message(_describe_result(values))


def _format_slack(seconds: float) -> str:
    if seconds < 0:
        return f"{format_duration(-seconds)} after the end"
    return f"{format_duration(seconds)} before the end"


def _describe_result(values: dict[str, Any]) -> str:
    """Return whether the round can be finished, and what to do if not."""
    if values["limit"] == "chain":
        return (
            f"The chain includes at most {MAX_REVEALS_PER_BLOCK} reveals per block, fewer than this round needs in"
            " time. More cores do not help. Extend the round or use fewer proposals."
        )
    if values["limit"] is None:
        return f"All shares are revealed in time. Votes in the last {CLOSING_SECONDS} s are not included."
    late = f"{values['unfinished']:,} shares of this helper are not revealed in time by this helper alone."
    together = " All helpers together are in time." if values["together_done_before_end"] else ""
    needed = values["cores_needed"]
    if needed is None:
        return f"{late}{together} No number of cores is enough."
    return f"{late}{together} Use {needed} cores, or several hosts (docs/cluster.md)."
