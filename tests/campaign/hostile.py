"""Hostile HTTP: slow clients, floods, payloads that are broken in every way, shares that are in no tree.

How it hurts. Some hundred connections say nothing, or drip their heads or bodies, a byte a second. Floods of requests
of every kind that is refused come from one address, under forwarded addresses that change all the time and sometimes
are an honest wallet's, and through a trusted proxy. Schemathesis asks everything that the API's description allows and
much that it does not. A million broken payloads go through the parser, thousands of them over HTTP. Then shares come
that are well formed and have no vote commitment: at another vote's leaf, beyond the tree, in no round. Honest wallets
post all the while, 16 at a time. Single connections are attacked in ways of their own (`hostile_connections`).

What must hold. Each slow connection is cut within 10 s, and honest POSTs stay quick. A flooder is told 429 after its
burst, with a Retry-After that is true; whom it forwards is believed of a trusted proxy only; honest wallets are refused
nothing, duplicates neither. No 5xx, no answer that the description lacks, no row and no proof of all the rubbish.
Of the honest shares none is lost, early or counted twice.

Planted: `client_of` believes whoever forwards an address. Found: "flood, refusals that were not 429: 21107 (≤
3809.59)". Planted: no timer from the end of the head to the end of the body. Found: "slow connections, longest until
cut s: 15.1905 (≤ 10)"; that was the product's state. Planted together: only a 400 costs a token, base64 that is not
ASCII is not caught, the leaf is not compared. Found: "flood, refusals that were not 429: 2330 (≤ 1183.86)", "errors
of the parser that are not its own: 35 (= 0)", "rows of rubbish: 81 (= 0)", "proofs of rubbish: 46 (= 0)". Planted: an
answer of share-status that the description lacks. Found: "schemathesis, failures: 1 (= 0)".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

import proofs
from devnet import ballot
from devnet.ballot import Ballot
from devnet.wallet import Wallet
from helper.ingest.payload import invalid_share
from helper.observability.stats import percentile
from tests.campaign import promise_check
from tests.campaign.attack_clients import SHARES, Answer, Ask, Flooded, Line, flood, siege
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.hostile_connections import attack_connections
from tests.campaign.hostile_gateway import besiege_gateway
from tests.campaign.hostile_registration import attack_registration
from tests.campaign.mutations import Mutator
from tests.campaign.schemathesis_run import described
from tests.campaign.wallet_clients import Crowd
from tests.support.devnet import Chain
from tests.support.harness import Helper, helping

RECORDED = Path(__file__).parents[1] / "recorded" / "round" / "shares.jsonl"
SLOW, PROXY, FLOODER = "127.0.0.2", "127.0.0.3", "127.0.0.4"
FORWARDED = "203.0.113.9"
HONEST = "127.0.0.1"
BURST, PER_SECOND = 800, 50
LINES = 8
TOKEN = "of a closed set-up"
LIFTED = {"refused_burst": 10**9, "refused_per_second": 10**9, "api_token": TOKEN}


@dataclass(frozen=True, slots=True)
class Scene:
    """Where it happens: a helper as it comes, with honest wallets, and one without limits, for rubbish alone."""

    setting: Setting
    findings: Findings
    chain: Chain
    round_id: bytes
    usual: Helper
    lifted: Helper
    crowd: Crowd


async def run(setting: Setting) -> Findings:
    """Hurt it, and judge."""
    findings = Findings()
    async with httpx.AsyncClient(timeout=30) as http, _scene(setting, findings, http) as scene:
        cast = await scene.crowd.vote(scene.round_id, setting.scale(40, 6))
        for helper in (scene.usual, scene.lifted):
            await helper.knows_leaf(scene.round_id, max(position for _, position in cast))
        if setting.quick:
            await asyncio.gather(_slow_clients(scene, cast), described(findings, setting, scene.lifted.url, TOKEN))
        else:
            await _slow_clients(scene, cast)
            await described(findings, setting, scene.lifted.url, TOKEN)
        await _floods(scene, cast)
        await attack_connections(setting, findings, scene.lifted, _port(scene.lifted))
        uncast = await _uncast(scene)
        _parsed(scene)
        await _broken(scene, uncast)
        await _in_no_tree(scene, uncast, cast[0][1])
        await besiege_gateway(setting, findings, scene.chain, http)
        await attack_registration(setting, findings, scene.chain, http)
        await promise_check.drained(scene.chain, scene.crowd.ledger, 60)
        await _judge(scene)
    return findings


@contextlib.asynccontextmanager
async def _scene(setting: Setting, findings: Findings, http: httpx.AsyncClient) -> AsyncIterator[Scene]:
    folders = [setting.folder / name for name in ("usual", "lifted")]
    for folder in folders:
        folder.mkdir()
    chain = Chain(setting.folder, http, "--block-seconds", "0.3", "--stand-in-proofs")
    await chain.start()
    try:
        round_id = await chain.open_round()
        await chain.post("/devnet/voting-config", {"version": 1, "vote_servers": []})
        async with contextlib.AsyncExitStack() as stack:
            kinds: list[dict[str, Any]] = [{"helper": {"trusted_proxies": [PROXY]}}]
            kinds.append({"helper": LIFTED, **_everything(chain)})
            usual, lifted = await asyncio.gather(
                *(
                    stack.enter_async_context(helping(folder, http, chain, cluster=setting.cluster, **sections))
                    for folder, sections in zip(folders, kinds, strict=True)
                )
            )
            crowd = Crowd(chain, lambda: [usual.url], setting.dice("votes"))
            yield Scene(setting, findings, chain, round_id, usual, lifted, crowd)
    finally:
        await chain.kill()


def _everything(chain: Chain) -> dict[str, Any]:
    """Every part that may be described, switched on; but for the chain's own paths: what they answer is a node's."""
    return {
        "ui": {"enable": True},
        "operator": {"token": "of operators, who are not here"},
        "admin": {"config_url": f"{chain.url}/devnet/voting-config", "mode": "development"},
    }


def _port(helper: Helper) -> int:
    port = urlsplit(helper.url).port
    assert port is not None
    return port


# Slow clients


async def _slow_clients(scene: Scene, cast: Sequence[tuple[Ballot, int]]) -> None:
    """A siege, and honest wallets within it."""
    connections, seconds = scene.setting.scale((500, 60.0), (150, 0.0))
    before = len(scene.crowd.ledger.waits)
    pause = max(seconds, 9.0) / (len(cast) * ballot.SHARES / 16) / 2
    kept, _ = await asyncio.gather(
        siege(_port(scene.usual), SLOW, connections, seconds),
        scene.crowd.post(cast, lambda: 0, pause=pause),
    )
    waits = scene.crowd.ledger.waits[before:]
    scene.findings.figure("slow connections", len(kept))
    scene.findings.at_least("slow connections, least seconds", min(kept), 1)
    scene.findings.at_most("slow connections, longest until cut s", max(kept), 10)
    scene.findings.figure("honest POST p50 among slow clients s", percentile(waits, 0.5) or 0.0)
    # of the short form's hundred posts the 99th percentile would be the one that took longest
    rank = scene.setting.scale(99, 95)
    scene.findings.at_most(f"honest POST p{rank} among slow clients s", percentile(waits, rank / 100) or 60.0, 0.5)


# Floods


async def _floods(scene: Scene, cast: Sequence[tuple[Ballot, int]]) -> None:
    """Two floods at once, while honest wallets post what they have posted before."""
    findings, port = scene.findings, _port(scene.usual)
    dice, enough = scene.setting.dice("disguises"), scene.setting.scale(10_000, 300)
    changing = [{"X-Forwarded-For": f"198.51.100.{dice.randrange(256)}"} for _ in range(100)]
    disguises = [{}, {"X-Forwarded-For": HONEST, "Forwarded": f"for={HONEST}"}, *changing]
    through = [{"X-Forwarded-For": f"{HONEST}, {FORWARDED}"}, {"X-Forwarded-For": FORWARDED}]
    waits = len(scene.crowd.ledger.waits)
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(_again_and_again(scene, cast, over))
        direct, proxied = await asyncio.gather(
            flood(port, FLOODER, LINES, disguises, enough),
            flood(port, PROXY, LINES, through, enough),
        )
        over.set()
    for name, told in (("flood", direct), ("flood through a proxy", proxied)):
        _flooded(findings, name, told)
    findings.figure("honest POST p99 in a flood s", percentile(scene.crowd.ledger.waits[waits:], 0.99) or 0.0)
    line = Line(port, FLOODER)
    await asyncio.sleep(direct.wait)
    after = await line.ask(Ask("POST", SHARES, b"{"))
    line.close()
    findings.exactly("after Retry-After a flooder is heard, status", after.status if after else 0, 400)
    other = Line(port, PROXY)
    answer = await other.ask(Ask("GET", "/shielded-vote/v1/status", headers={"X-Forwarded-For": "203.0.113.10"}))
    other.close()
    findings.exactly("another client of the flooded proxy, status", answer.status if answer else 0, 200)
    refused = sum(count for status, count in scene.crowd.answers.items() if status != 200)
    findings.figure("honest POSTs", scene.crowd.answers.total())
    findings.exactly("honest POSTs refused", refused, 0)


def _flooded(findings: Findings, name: str, told: Flooded) -> None:
    most = BURST + PER_SECOND * told.seconds + LINES
    findings.figure(f"{name}, requests", told.statuses.total())
    findings.at_most(f"{name}, refusals that were not 429", told.passed, most)
    findings.at_least(f"{name}, refusals that were not 429, no fewer", told.passed, BURST)
    findings.at_least(f"{name}, 429", told.statuses[429], 1)
    findings.exactly(f"{name}, 429 without a number in Retry-After", told.untrue, 0)
    findings.exactly(f"{name}, 5xx", sum(told.statuses[status] for status in range(500, 600)), 0)


async def _again_and_again(scene: Scene, cast: Sequence[tuple[Ballot, int]], over: asyncio.Event) -> None:
    """The same shares once more, and once more; each time to the end, so that no connection is cut while it opens."""
    while not over.is_set():
        await scene.crowd.post(cast, lambda: 0)


# Broken payloads


def _parsed(scene: Scene) -> None:
    """Broken payloads through the parser alone."""
    payloads = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    mutator = Mutator(payloads, scene.setting.dice("parser"))
    wanted, strange = scene.setting.scale(1_000_000, 20_000), Counter[str]()
    taken = 0
    for payload in itertools.islice(mutator, wanted):
        try:
            (read,) = proofs.read_shares([payload])
            if isinstance(read, proofs.InvalidShare):
                invalid_share(read)
            else:
                taken += 1
        except Exception as error:
            strange[type(error).__name__] += 1
    findings = scene.findings
    findings.figure("broken payloads parsed", wanted)
    findings.at_least("of these refused", wanted - taken, wanted / 2)
    findings.exactly("errors of the parser", sum(strange.values()), 0)


async def _broken(scene: Scene, uncast: Sequence[Ballot]) -> None:
    """Broken payloads over HTTP: of votes that are in no tree, so that nothing of them may be taken."""
    payloads = [ballot.post_body(vote, share, 0, 0) for vote in uncast for share in vote.shares[:4]]
    mutator = Mutator(payloads, scene.setting.dice("http"))
    told, _ = await _posted(scene, itertools.islice(mutator, scene.setting.scale(2000, 500)), LINES)
    scene.findings.figure("broken payloads posted", told.total())
    scene.findings.exactly("broken payloads that were not refused by 400", told.total() - told[400] - told[429], 0)


# Shares in no tree


async def _uncast(scene: Scene) -> list[Ballot]:
    """Votes that are sealed and never cast."""
    async with Wallet(scene.chain.url, [], dice=scene.setting.dice("uncast")) as wallet:
        return [await wallet.seal(scene.round_id, 1 + number % 3, number % 2, weight=9) for number in range(4)]


def _well_formed(scene: Scene, uncast: Sequence[Ballot], leaf: int) -> Iterator[bytes]:
    """Shares at another vote's leaf, beyond the tree, of no round; no two the same."""
    dice = scene.setting.dice("no tree")
    for number in itertools.count():
        vote = uncast[number % len(uncast)]
        share = vote.shares[dice.randrange(ballot.SHARES)]
        position = leaf if number % 3 == 0 else dice.randrange(1000, 1 << 24) if number % 3 == 1 else 0
        body = ballot.post_body(vote, share, position, int(time.time()) + number)
        if number % 3 == 2:
            body["vote_round_id"] = (dice.randbytes(31) + b"\0").hex()
        yield json.dumps(body).encode()


async def _in_no_tree(scene: Scene, uncast: Sequence[Ballot], leaf: int) -> None:
    shares = itertools.islice(_well_formed(scene, uncast, leaf), scene.setting.scale(10_000, 800))
    told, seconds = await _posted(scene, shares, 512)
    findings = scene.findings
    findings.figure("shares in no tree, told 429", told[429])
    findings.exactly("shares in no tree that were not refused", told.total() - told[400] - told[429], 0)
    # A share whose leaf or round is missing is answered 429 until it is proven that the chain lacks it.
    # The rate depends on the machine, so it is a figure and not a promise.
    findings.figure("shares in no tree, refusals a second", round((told[400] + told[429]) / seconds))


async def _posted(scene: Scene, bodies: Iterable[bytes], lines: int) -> tuple[Counter[int], float]:
    """Post all of these; how often each status came (0 for none), and the seconds that it took."""
    told, waiting = Counter[int](), iter(bodies)

    async def one() -> None:
        line = Line(_port(scene.lifted))
        for body in waiting:
            answer: Answer | None = await line.ask(Ask("POST", SHARES, body, {"X-Helper-Token": TOKEN}))
            told[answer.status if answer else 0] += 1
        line.close()

    begun = time.monotonic()
    await asyncio.gather(*(one() for _ in range(lines)))
    return told, time.monotonic() - begun


async def _judge(scene: Scene) -> None:
    findings = scene.findings
    await promise_check.judge(findings, scene.chain, scene.crowd.ledger)
    reveals, ours = await scene.chain.reveals(), await promise_check.broadcasts(scene.chain, scene.crowd.ledger)
    findings.exactly("reveals that no honest wallet posted", len(reveals) - len(ours), 0)
    counts = await scene.lifted.counts()
    findings.exactly("proofs of rubbish", counts.get("proven", 0) + counts.get("failures", 0), 0)
    rows = sum(
        scene.lifted.rows(f"SELECT count(*) FROM {table}")[0][0] for table in ("shares", "tombstones", "history")
    )
    findings.exactly("rows of rubbish", rows, 0)
    findings.exactly("honest shares refused for good", len(scene.crowd.refused), 0)
    written = scene.usual.log.read_bytes() + scene.usual.bytes_on_disk()
    addresses = (SLOW, FLOODER, FORWARDED, "198.51.100.")
    findings.exactly("client addresses in log and files", sum(written.count(one.encode()) for one in addresses), 0)


CAMPAIGN = Campaign("hostile", run)
