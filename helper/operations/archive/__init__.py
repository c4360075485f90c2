"""Archive in an object store: proof bundles, and the data for audits.

It contains all confirmed reveals of the chain, so that it does not show which of them this helper sent.

    object_names.py   names of the objects, content of index and progress  (pure)
    round_data.py     content of blocks, documents and results of audits  (pure)
    writer.py         reads the chain's blocks and writes the archive
    reader.py         finds the bundle of a reveal and checks it; reads blocks and documents of a round
    audits.py         results of audits, for the page
    finished_rounds.py  starts the process that archives and audits a finished round
    factory.py        creates bucket and writer from the configuration

Objects:

    ROUND/TRANSACTION.zip           a proof bundle, by round id and transaction hash
    ROUND/index/FIRST-LAST.jsonl    reveals in these blocks: height, transaction, nullifier, hash of the bundle
    blocks/CHAIN/FIRST-LAST.jsonl   all these blocks: time, hashes of the reveals, other voting transactions
    progress/CHAIN.json             the first part of the chain that is not archived
    ROUND/documents/NUMBER.zlib     nodes' data about a finished round, in pieces
    rounds/ROUND.json               manifest of these documents
    audits/ROUND.json               result of the audit of a finished round

Blocks and an index part are written after their bundles, and the progress after all index parts. A manifest is written
after its pieces.
"""
