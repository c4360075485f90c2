"""Fault injection: switches per node, for all of its routes or for some.

Probabilities are numbers from 0 to 1 (true is 1). `FaultRules.decide` draws the faults of one request from a
seedable random generator. `times` limits how often a probabilistic fault occurs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from devnet.frauds import Fraud
from devnet.lies import Lie

Probability = Annotated[float, Field(ge=0, le=1)]
KeyStatus = Literal["ready", "not_started", "warming", "failed"]
"""Status of the verifying keys of a node."""

# In the order in which they are drawn; the first fault that occurs decides how the request ends.
FAULTS_BEFORE_HANDLING = ("refuse", "status_503", "status_502", "status_400", "bad_proof")
FAULTS_AFTER_HANDLING = ("status_502_after", "drop_reply", "html", "half_json")
FATES = ("never_include", "include_failed")
_ALL_ROUTES = "*"


class Switches(BaseModel):
    """The switches of one rule. Omitted switches keep their value."""

    model_config = ConfigDict(extra="forbid")

    latency_ms: float = Field(0, ge=0, description="delay before the request is processed, in milliseconds")
    refuse: Probability = Field(0, description="close the connection immediately; the request is not processed")
    status_503: Probability = Field(0, description="return 503 (keys are warming up); the request is not processed")
    status_502: Probability = Field(0, description="return 502 (consensus engine lost); the request is not processed")
    status_400: Probability = Field(0, description="return 400 (malformed); the request is not processed")
    bad_proof: Probability = Field(0, description="return 422 (invalid proof); the request is not processed")
    status_502_after: Probability = Field(0, description="process the request, then return the same 502")
    drop_reply: Probability = Field(0, description="process the request, then close the connection without a response")
    html: Probability = Field(0, description="process the request, then return an HTML page with status 200")
    half_json: Probability = Field(0, description="process the request, then return the first half of the body")
    trickle: float = Field(0, ge=0, description="interval between single bytes of the response, in seconds")
    never_include: Probability = Field(0, description="reveals: accepted, but never included in a block")
    include_failed: Probability = Field(0, description="reveals: included as failed, as if preceded by another's")
    hide_tx: bool = Field(False, description="transaction lookups return 404")
    empty_blocks: bool = Field(False, description="blocks and their results are served without transactions")
    freeze_blocks: bool = Field(False, description="the node stops at its current height")
    stale: float = Field(0, ge=0, description="age of the chain state that the node serves, in seconds")
    reset_height: int | None = Field(None, ge=1, description="the node returns to this height and continues from it")
    catching_up: bool = Field(False, description="the node reports that it is syncing")
    chain_id: str | None = Field(None, description="chain id that the node reports")
    wrong_root: bool = Field(False, description="the node returns wrong tree roots")
    round_status: int | None = Field(None, ge=0, le=255, description="every round's status; 0: not found")
    anchor_unknown: int = Field(0, ge=0, description="broadcasts: number of latest blocks whose roots are unknown")
    keys: KeyStatus = Field("ready", description="verifying keys; unless ready, every POST is refused with 503")
    engine_failures: int = Field(0, ge=0, description="broadcasts: attempts to reach the consensus engine that fail")
    engine_seconds: float = Field(10, ge=0, description="broadcasts: duration of a failed attempt, in seconds")
    engine_delivers: bool = Field(False, description="broadcasts: a failed attempt delivers the transaction")
    fraud: Fraud | None = Field(None, description="what the node changes in its responses about finished rounds")


class FaultRequest(Switches):
    """The body of `POST /devnet/faults`: switches, their routes, and settings of the whole chain."""

    routes: list[str] | None = Field(None, description="route names; omitted: all routes of this node")
    reset: bool = Field(False, description="first delete the rules for these routes (without routes: all rules)")
    seed: int | None = Field(None, description="seed of this node's random generator")
    lies: list[Lie] | None = Field(None, description="what this node tells falsely from now on, on all routes")
    times: int | None = Field(None, ge=1, description="maximum number of times that each of these faults occurs")
    halt_chain: bool | None = Field(None, description="whole chain: stop the block timer")
    clock_offset_seconds: float | None = Field(None, description="whole chain: offset of block times in seconds")
    duplicates: str | None = Field(
        None, pattern="^(both|filter)$", description="whole chain: handling of duplicate reveals"
    )
    circuit: str | None = Field(
        None, pattern="^k1[01]$", description="whole chain: circuit that is verified from now on"
    )
    version: str | None = Field(None, description="whole chain: build version in node_info")


@dataclass
class FaultRule:
    """The switches of one route (or all), and their state."""

    switches: dict[str, Any] = field(default_factory=dict)
    times_left: dict[str, int] = field(default_factory=dict)
    frozen_at: int = 0
    reset_at: int = 0


@dataclass(frozen=True)
class FaultDecision:
    """The faults of one request, the height up to which the node serves the chain, and the other switches."""

    height: int
    response_fault: str | None = None
    fate: str | None = None
    switches: Switches = field(default_factory=Switches)

    @property
    def fault_names(self) -> list[str]:
        """The faults that occurred, for the request log."""
        return [name for name in (self.response_fault, self.fate) if name is not None]


class FaultRules:
    """The fault rules of one node."""

    def __init__(self) -> None:
        self.rules: dict[str, FaultRule] = {}
        self._rng = random.Random(0)

    def apply_request(self, request: FaultRequest, height: int) -> None:
        """Set switches. Some apply from `height`, the height of the newest block."""
        routes = request.routes or [_ALL_ROUTES]
        if request.reset:
            for route in list(self.rules) if request.routes is None else routes:
                self.rules.pop(route, None)
        if request.seed is not None:
            self._rng = random.Random(request.seed)
        values = {
            name: value
            for name, value in request.model_dump(exclude_unset=True).items()
            if name in Switches.model_fields
        }
        if not values:
            return
        for route in routes:
            rule = self.rules.setdefault(route, FaultRule())
            if values.get("freeze_blocks") and not rule.switches.get("freeze_blocks"):
                rule.frozen_at = height
            if values.get("reset_height"):
                rule.reset_at = height
            rule.switches.update(values)
            for name in values:
                rule.times_left.pop(name, None)
                if request.times is not None and name in (*FAULTS_BEFORE_HANDLING, *FAULTS_AFTER_HANDLING, *FATES):
                    rule.times_left[name] = request.times

    def to_json(self) -> dict[str, Any]:
        """The current rules."""
        return {
            route: {**rule.switches, **({"times_left": dict(rule.times_left)} if rule.times_left else {})}
            for route, rule in self.rules.items()
        }

    def decide(self, route: str, newest_height: int, height_before: Callable[[float], int]) -> FaultDecision:
        """Draw the faults of one request. `height_before(seconds)` is the chain's height that long ago."""
        if not self.rules:
            return FaultDecision(newest_height)
        ending = next(
            (name for name in (*FAULTS_BEFORE_HANDLING, *FAULTS_AFTER_HANDLING) if self._draw_fault(route, name)), None
        )
        # A request that is not processed is never in a block.
        fates = [] if ending in FAULTS_BEFORE_HANDLING else [name for name in FATES if self._draw_fault(route, name)]
        switches = self._switches(route)
        height = self._served_height(route, switches, newest_height, height_before)
        return FaultDecision(height, ending, fates[0] if fates else None, switches)

    def _switches(self, route: str) -> Switches:
        """The switches of a route. Those that its rule omits come from the rule for all routes."""
        rules = [self.rules[key].switches for key in (_ALL_ROUTES, route) if key in self.rules]
        return Switches.model_construct(**{name: value for rule in rules for name, value in rule.items()})

    def _find_rule(self, route: str, name: str) -> FaultRule | None:
        """The rule with this switch: that of the route, else that of all routes."""
        for key in (route, _ALL_ROUTES):
            rule = self.rules.get(key)
            if rule is not None and name in rule.switches:
                return rule
        return None

    def _draw_fault(self, route: str, name: str) -> bool:
        """Draw one probabilistic fault and count it against its limit."""
        rule = self._find_rule(route, name)
        if rule is None or rule.times_left.get(name) == 0 or self._rng.random() >= rule.switches[name]:
            return False
        if name in rule.times_left:
            rule.times_left[name] -= 1
        return True

    def _served_height(
        self, route: str, switches: Switches, newest_height: int, height_before: Callable[[float], int]
    ) -> int:
        """The height up to which the node serves the chain in this request."""
        height = newest_height
        frozen = self._find_rule(route, "freeze_blocks")
        if frozen is not None and switches.freeze_blocks:
            height = min(height, frozen.frozen_at)
        if switches.stale:
            height = min(height, height_before(switches.stale))
        reset = self._find_rule(route, "reset_height")
        if reset is not None and switches.reset_height:
            height = min(height, switches.reset_height + newest_height - reset.reset_at)
        return max(height, 1)
