"""From a real reveal to a publicly verifiable proof bundle; and the content of a public transaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from devnet import ballot
from helper.operations.archived_objects import PART_BLOCKS
from tests.support.command import run_in_process
from tests.support.devnet import era_flags
from tests.support.harness import HelperProcess, run_chain_and_helper
from tests.support.s3 import BUCKET_NAME, ObjectStoreProcess
from tests.support.schemas import assert_conforms

SHARES = 2
"""Revealed shares, each with a real proof."""
ARCHIVE_CONFIG = {"place": f"s3://{BUCKET_NAME}/proofs", "check_seconds": 1}


async def run_command_line(directory: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run a command. Returns its exit code, the JSON line, and its messages."""
    result = await run_in_process(directory, *arguments)
    assert result.stdout.count("\n") <= 1
    return result.exit_code, json.loads(result.stdout) if result.stdout else {}, result.stderr


def config_without_rpc(helper: HelperProcess) -> Path:
    """Return the same settings with only the REST URLs of the nodes."""
    lines = [line for line in helper.config.read_text().splitlines() if not line.startswith("rpc =")]
    config = helper.config.with_name("rest.toml")
    config.write_text("\n".join(lines))
    return config


async def test_proof_export_of_confirmed_reveal_sends_no_node_the_nullifier(
    tmp_path: Path, object_store: ObjectStoreProcess, era: str
) -> None:
    async with (
        run_chain_and_helper(tmp_path, *era_flags(era), s3={"endpoint": object_store.url}, archive=ARCHIVE_CONFIG) as (
            chain,
            helper,
        ),
    ):
        round_id = await chain.open_round()
        async with helper.create_wallet() as wallet:
            sealed = await wallet.seal_ballot(round_id, 1, 1)
            position = await wallet.cast_ballot(sealed)
            vote = await wallet.post_shares(sealed, position, times=ballot.immediate_times(), indices=range(SHARES))
        await helper.wait_until_confirmed(vote)
        share = vote.shares[0]
        nullifier, config = share.nullifier.hex(), ("--config", str(helper.config), "--json")
        tx_hash = (await chain.transaction_hashes(round_id))[nullifier].hex().upper()
        from_chain = ("proof", "export", nullifier, "--from", "chain")
        requests_before = len(await chain.request_log())

        code, exported, messages = await run_command_line(tmp_path, *from_chain, "--output", "a.zip", *config)
        assert code == 0, messages
        assert (exported["transaction"], exported["round"], exported["circuit"]) == (tx_hash, round_id.hex(), "k10")
        assert exported["source"] == "chain"
        rest = ("--config", str(config_without_rpc(helper)), "--json")
        code, exported_again, messages = await run_command_line(tmp_path, *from_chain, "--output", "b.zip", *rest)
        assert (code, exported_again["height"]) == (0, exported["height"]), messages
        assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
        new_requests = (await chain.request_log())[requests_before:]
        assert not any(nullifier in json.dumps(entry).lower() for entry in new_requests)

        code, verified, messages = await run_command_line(tmp_path, "proof", "verify", "a.zip", "--json")
        assert (code, verified["ok"], verified["online"]) == (0, True, None), messages
        code, verified, messages = await run_command_line(tmp_path, "proof", "verify", "a.zip", "--online", *config)
        assert (code, verified["ok"], verified["online"]) == (0, True, True), messages

        code, looked_up, messages = await run_command_line(tmp_path, "tx", "lookup", tx_hash.lower(), *config)
        assert code == 0, messages
        assert (looked_up["height"], looked_up["code"], looked_up["kind"]) == (exported["height"], 0, "reveal")
        assert looked_up["reveal"]["nullifier"] == nullifier

        code, _, messages = await run_command_line(
            tmp_path, "proof", "export", "07" * 32, "--round", round_id.hex(), *config
        )
        assert code == 5, messages
        assert "no confirmed reveal" in messages
        code, stats, messages = await run_command_line(tmp_path, "queue", "stats", *config)
        assert (code, stats["total"]["submitted"]) == (0, SHARES), messages
        for name, value in (
            ("queue-stats", stats),
            ("tx-lookup", looked_up),
            ("proof-export", exported),
            ("proof-verify", verified),
        ):
            assert_conforms(name, value)
        code, rounds, messages = await run_command_line(tmp_path, "rounds", *config)
        assert (code, rounds["source"]) == (0, "daemon"), messages
        assert rounds["rounds"][0]["shares"]["submitted"] == SHARES
        assert rounds["rounds"][0]["tree_size"] >= 2

        height = (await helper.service_stats())["height"]
        await chain.mine(2 * PART_BLOCKS)
        await helper.wait_until("has archived the round", lambda facts: facts["archive"]["through"] >= height)
        names = await object_store.open_bucket_client("proofs").list_names(round_id.hex())
        assert f"{round_id.hex()}/{tx_hash}.zip" in names
        assert sum(name.endswith(".zip") for name in names) == SHARES
        await check_archived_bundle(tmp_path, object_store, helper, round_id, nullifier, tx_hash)


async def check_archived_bundle(
    directory: Path, store: ObjectStoreProcess, helper: HelperProcess, round_id: bytes, nullifier: str, tx_hash: str
) -> None:
    """A bundle is restored exactly as it was written, or not at all."""
    config = ("--config", str(helper.config), "--json")
    export = ("proof", "export", nullifier, "--from")
    code, exported, messages = await run_command_line(directory, *export, "archive", "--output", "c.zip", *config)
    assert (code, exported["source"], exported["transaction"]) == (0, "archive", tx_hash), messages
    assert_conforms("proof-export", exported)
    assert (directory / "c.zip").read_bytes() == (directory / "a.zip").read_bytes()
    code, _, messages = await run_command_line(directory, "proof", "export", "07" * 32, "--from", "archive", *config)
    assert (code, "the archive has no bundle" in messages) == (5, True), messages

    changed = (directory / "c.zip").read_bytes()[:-1] + b"x"
    await store.open_bucket_client("proofs").put(f"{round_id.hex()}/{tx_hash}.zip", changed)
    code, _, messages = await run_command_line(directory, *export, "archive", "--output", "d.zip", *config)
    assert (code, "hash does not match" in messages) == (1, True), messages
    code, exported, messages = await run_command_line(directory, *export, "auto", "--output", "d.zip", *config)
    assert (code, exported["source"], "archive not usable" in messages) == (0, "chain", True), messages
    await store.kill()
    code, _, messages = await run_command_line(directory, *export, "archive", "--output", "e.zip", *config)
    assert (code, "AWS" in messages, "not-a-secret" in messages) == (6, False, False), messages
