"""Circuit generations: fields of a share, validation, statement, proof, and the chain versions that verify them.

`known_circuits.GENERATIONS` lists all of them. No other module depends on the ciphertexts of a share
or on a statement.
"""
