"""Key ceremony of a round: n validators with shares of the election key, of which t decrypt a sum together.

A joint Feldman ceremony. Validator j chooses a polynomial of degree t-1 and publishes its commitments; the key is the
sum of the constant terms, and validator i's share is the sum of all polynomials at i. Validators that are removed after
the ceremony leave gaps in the indices. The polynomials are derived from a seed, so a chain can be restored.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import proofs
from devnet.gojson import b64, omit_zero

GROUP_ORDER = 0x40000000000000000000000000000000224698FC0994A8DD8C46EB2100000001
"""Order of Pallas."""

_SHARE_BYTES = 48


def default_threshold(validators: int) -> int:
    """The threshold that the real chain chooses: half of the validators, but at least two of several."""
    return 1 if validators == 1 else max(2, -(-validators // 2))


@dataclass(frozen=True)
class Ceremony:
    """A ceremony that is over.

    Attributes:
        seed: seed of the polynomials.
        validators: number of validators that contributed.
        threshold: number of validators that decrypt a sum.
        removed: indices that left after the ceremony. Their contributions are part of the key but no longer listed.
        absent: indices that submit no partial decryptions.
    """

    seed: bytes
    validators: int
    threshold: int
    removed: frozenset[int] = frozenset()
    absent: frozenset[int] = frozenset()
    _coefficients: dict[int, tuple[int, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        coefficients = {
            index: tuple(self._coefficient(index, power) for power in range(self.threshold))
            for index in range(1, self.validators + 1)
        }
        object.__setattr__(self, "_coefficients", coefficients)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Ceremony:
        """Create the ceremony that `to_fields` encodes."""
        return cls(
            bytes.fromhex(fields["seed"]),
            int(fields["validators"]),
            int(fields["threshold"]),
            frozenset(fields["removed"]),
            frozenset(fields["absent"]),
        )

    def to_fields(self) -> dict[str, Any]:
        """The ceremony in the message that creates the round."""
        return {
            "seed": self.seed.hex(),
            "validators": self.validators,
            "threshold": self.threshold,
            "removed": sorted(self.removed),
            "absent": sorted(self.absent),
        }

    def _coefficient(self, index: int, power: int) -> int:
        secret, _ = proofs.elgamal_keygen(self.seed + bytes([index, power]))
        return int.from_bytes(secret, "little")

    @property
    def secret(self) -> bytes:
        """The election key's secret, which no real validator knows."""
        return _scalar(sum(coefficients[0] for coefficients in self._coefficients.values()))

    @property
    def commitments(self) -> tuple[bytes, ...]:
        """The combined commitments; the first is the election key."""
        rows = [self.commitments_of(index) for index in self._coefficients]
        return tuple(proofs.sum_points([row[power] for row in rows]) for power in range(self.threshold))

    @property
    def listed(self) -> list[int]:
        """Indices of the validators that are not removed."""
        return [index for index in self._coefficients if index not in self.removed]

    @property
    def decrypting(self) -> list[int]:
        """Indices of the validators that submit partial decryptions."""
        return [index for index in self.listed if index not in self.absent]

    def commitments_of(self, index: int) -> tuple[bytes, ...]:
        """The commitments of one contribution."""
        return tuple(proofs.multiply_generator(_scalar(value)) for value in self._coefficients[index])

    def share_of(self, index: int) -> bytes:
        """The share of the election key of one validator: a scalar."""
        return _scalar(
            sum(
                value * pow(index, power, GROUP_ORDER)
                for coefficients in self._coefficients.values()
                for power, value in enumerate(coefficients)
            )
        )

    def payloads_of(self, index: int) -> list[tuple[str, bytes, bytes]]:
        """The encrypted shares that a validator sends: receiver, ephemeral key and ciphertext. Placeholders."""
        return [
            (
                address(other),
                proofs.elgamal_keygen(self.seed + bytes([index, other, 0]))[1],
                hashlib.shake_256(self.seed + bytes([index, other])).digest(_SHARE_BYTES),
            )
            for other in self._coefficients
            if other != index
        ]

    def to_json(self, *, pending: bool) -> dict[str, Any]:
        """The ceremony's fields of a round in the REST API's format."""
        validators = [
            {
                "validator_address": address(index),
                "pallas_pk": b64(proofs.elgamal_keygen(self.seed + b"pallas" + bytes([index]))[1]),
                "shamir_index": index,
            }
            for index in self.listed
        ]
        if pending:
            return {"ceremony_validators": validators, "threshold": 0, "feldman_commitments": []}
        contributions = [
            omit_zero(
                {
                    "validator_address": address(index),
                    "feldman_commitments": [b64(point) for point in self.commitments_of(index)],
                    "payloads": [
                        {"validator_address": receiver, "ephemeral_pk": b64(key), "ciphertext": b64(text)}
                        for receiver, key, text in self.payloads_of(index)
                    ],
                }
            )
            for index in self.listed
        ]
        return {
            "ceremony_validators": validators,
            "threshold": self.threshold,
            "feldman_commitments": [b64(point) for point in self.commitments],
            "dkg_contributions": contributions,
        }


def address(index: int) -> str:
    """The operator address of a ceremony validator."""
    return f"svvaloper1devnet{index}"


def _scalar(value: int) -> bytes:
    return (value % GROUP_ORDER).to_bytes(32, "little")
