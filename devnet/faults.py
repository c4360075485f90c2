"""Fault injection: switches per node, for all of its routes or for some.

Probabilities are numbers from 0 to 1 (true is 1). `FaultRules.decide` draws the faults of one request from a
seedable random generator. `times` limits how often a probabilistic fault occurs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, le=1)]

# In the order in which they are drawn; the first fault that occurs decides how the request ends.
FAULTS_BEFORE_HANDLING = ("refuse", "status_503", "status_502", "status_400", "bad_proof")
FAULTS_AFTER_HANDLING = ("status_502_after", "drop_reply", "html", "half_json")
FATES = ("never_include", "include_failed")
_ALL_ROUTES = "*"


class Switches(BaseModel):
    """The switches of one rule. Omitted switches keep their value."""

    model_config = ConfigDict(extra="forbid")

    latency_ms: float = Field(0, ge=0, description="wait before acting")
    refuse: Probability = Field(0, description="close the connection at once, without acting")
    status_503: Probability = Field(0, description="answer 503 (keys are warming up), without acting")
    status_502: Probability = Field(0, description="answer 502 (consensus engine lost), without acting")
    status_400: Probability = Field(0, description="answer 400 (malformed), without acting")
    bad_proof: Probability = Field(0, description="answer 422 as to a proof that is refused, without acting")
    status_502_after: Probability = Field(0, description="act, then answer that 502")
    drop_reply: Probability = Field(0, description="act, then close the connection without an answer")
    html: Probability = Field(0, description="act, then answer a page of HTML with status 200")
    half_json: Probability = Field(0, description="act, then answer the first half of the body")
    trickle: float = Field(0, ge=0, description="answer a byte every so many seconds")
    never_include: Probability = Field(0, description="reveals: accepted, never in a block")
    include_failed: Probability = Field(0, description="reveals: included and failing, another helper was first")
    hide_tx: bool = Field(False, description="tx look-ups answer 404")
    freeze_blocks: bool = Field(False, description="the node stops following the chain where it is now")
    stale: float = Field(0, ge=0, description="the node serves the chain as it was so many seconds ago")
    reset_height: int | None = Field(None, ge=1, description="the node falls back to this height and follows from it")
    catching_up: bool = Field(False, description="the node says that it is syncing")
    chain_id: str | None = Field(None, description="the node says that it is on this chain")
    wrong_root: bool = Field(False, description="tree roots are served wrong")
    round_status: int | None = Field(None, ge=0, le=255, description="every round's status; 0: not found")
    anchor_unknown: int = Field(0, ge=0, description="broadcasts: roots of the newest so many blocks are unknown")


class FaultRequest(Switches):
    """The body of `POST /devnet/faults`: switches, their routes, and settings of the whole chain."""

    routes: list[str] | None = Field(None, description="route names; left out: every route of this node")
    reset: bool = Field(False, description="first forget the rules for these routes (without routes: all rules)")
    seed: int | None = Field(None, description="seed this node's dice")
    times: int | None = Field(None, ge=1, description="how often each of these probabilities may strike")
    halt_chain: bool | None = Field(None, description="whole chain: make no blocks on the timer")
    clock_offset_seconds: float | None = Field(None, description="whole chain: block times off by this")
    duplicates: str | None = Field(
        None, pattern="^(both|filter)$", description="whole chain: second reveals of a share"
    )
    circuit: str | None = Field(
        None, pattern="^k1[01]$", description="whole chain: verify with this circuit from now on"
    )
    version: str | None = Field(None, description="whole chain: the build version that node_info serves")


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
        """Set switches. `height` is the newest block's, for switches that depend on when they were set."""
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
        # A request that ends before it acts is never in a block.
        fates = [] if ending in FAULTS_BEFORE_HANDLING else [name for name in FATES if self._draw_fault(route, name)]
        switches = self._switches(route)
        height = self._served_height(route, switches, newest_height, height_before)
        return FaultDecision(height, ending, fates[0] if fates else None, switches)

    def _switches(self, route: str) -> Switches:
        """The switches of a route; those that its rule omits are of the rule for all routes."""
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
