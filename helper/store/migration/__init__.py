"""Moving a queue from one store to another: every row by its key, compared, and the source marked at the end.

`tables.py` says what is carried and compares pages (pure), `side.py` is one end of a move with its two engines
`file_side.py` and `shared_side.py`, `passing.py` makes one pass over all rows, `moving.py` is the way as a whole, and
`leaving.py` what becomes of the place that was left. `places.py` knows both ends by an operator's words.
"""
