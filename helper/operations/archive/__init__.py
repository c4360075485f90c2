"""An archive of proof bundles in an object store: all the chain's counted reveals, so that none tells whose it was.

    names.py    what an object is called, and what is in an index  (pure)
    writer.py   reads the chain's blocks and writes them there, beside the service
    reader.py   finds a reveal's bundle there, and looks whether it is what was written
    making.py   both, from the settings

Below the archive's place:

    ROUND/TRANSACTION.zip             a bundle (`helper.operations.proof_bundle`), by the round's id and the
    transaction's hash ROUND/index/FIRST-LAST.jsonl      its reveals in these blocks: height, transaction, nullifier,
    the bundle's hash progress/CHAIN.json               up to where the blocks of a chain are in it

A part of the index is written after all its bundles, and the progress after all parts.
"""
