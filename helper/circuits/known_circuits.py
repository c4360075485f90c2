"""All circuit generations, and lookups by name, kind and chain version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from helper.circuits.generation import CircuitGeneration, parse_version
from helper.circuits.single_choice import SingleChoiceGeneration
from proofs import CIRCUITS, CircuitError, CircuitInfo

if TYPE_CHECKING:
    from helper.ingest.validator import Result

GENERATIONS: Final[dict[str, CircuitGeneration]] = {
    generation.info.name: generation
    for generation in (
        SingleChoiceGeneration(CIRCUITS["k11"], first_version=(0, 0, 0), proof_cost=6.0),
        SingleChoiceGeneration(CIRCUITS["k10"], first_version=(1, 3, 0), proof_cost=1.0),
    )
}
"""The generations by name, oldest first. Costs were measured with one prover: 0.29 s for k10, 1.85 s for k11."""


def get_generation(name: str) -> CircuitGeneration:
    """Return a generation by name. Raises `proofs.CircuitError` if there is none."""
    generation = GENERATIONS.get(name)
    if generation is None:
        raise CircuitError("unknown circuit")
    return generation


def circuit_of_proof(proof: bytes) -> CircuitInfo | None:
    """Return the constants of the generation whose proofs have this length; None if there is none."""
    infos = (generation.info for generation in GENERATIONS.values())
    return next((info for info in infos if info.proof_bytes == len(proof)), None)


def share_body_schema() -> Mapping[str, Any]:
    """Return the JSON schema of a posted share, of any kind if there are several."""
    kinds = {generation.kind: generation.fields.schema() for generation in GENERATIONS.values()}
    return {"anyOf": list(kinds.values())} if len(kinds) > 1 else next(iter(kinds.values()))


def circuits_of_kind(kind: str) -> tuple[str, ...]:
    """Return the names of the generations that prove shares of this kind, newest first; empty if there are none."""
    return tuple(name for name, generation in reversed(GENERATIONS.items()) if generation.kind == kind)


def generation_of_kind(kind: str) -> CircuitGeneration:
    """Return the newest generation of a kind of shares. Raises `proofs.CircuitError` if there is none."""
    return get_generation(next(iter(circuits_of_kind(kind)), ""))


def circuit_for_version(version: str) -> str | None:
    """Return the generation that a node of this version verifies.

    None if the version cannot be parsed.
    """
    parsed = parse_version(version)
    return None if parsed is None else _newest_circuit(parsed)


def default_circuit() -> str:
    """Return the generation that is tried first if the chain's version is unknown: that of the newest version."""
    return _newest_circuit((10**6, 0, 0))


def _newest_circuit(version: tuple[int, int, int]) -> str:
    return next(
        name
        for name, generation in reversed(GENERATIONS.items())
        if generation.first_version is not None and generation.first_version <= version
    )


def read_shares(bodies: Sequence[bytes]) -> Sequence[Result]:
    """Parse and validate posted bodies, each by the newest generation that recognizes it, else as a share of k10."""
    kinds = {generation.kind: generation for generation in GENERATIONS.values()}
    if len(kinds) == 1:
        return kinds[SingleChoiceGeneration.kind].read_shares(bodies)
    newest_first = list(reversed(kinds.values()))
    selected = [
        next((generation for generation in newest_first if generation.recognizes(body)), newest_first[-1])
        for body in bodies
    ]
    results: dict[int, Result] = {}
    for generation in newest_first:
        indices = [index for index, choice in enumerate(selected) if choice is generation]
        if indices:
            results |= zip(indices, generation.read_shares([bodies[index] for index in indices]), strict=True)
    return [results[index] for index in range(len(bodies))]
