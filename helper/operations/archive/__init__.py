"""Archive of proof bundles in an object store.

It contains all confirmed reveals of the chain, so that it does not show which of them this helper sent.

    object_names.py   names of the objects, content of index and progress  (pure)
    writer.py         reads the chain's blocks and writes the archive
    reader.py         finds the bundle of a reveal and checks it
    factory.py        creates bucket and writer from the configuration

Objects:

    ROUND/TRANSACTION.zip           a proof bundle, by round id and transaction hash
    ROUND/index/FIRST-LAST.jsonl    reveals in these blocks: height, transaction, nullifier, hash of the bundle
    progress/CHAIN.json             the first part of the chain that is not archived

An index part is written after all its bundles, and the progress after all index parts.
"""
