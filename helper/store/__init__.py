"""Where shares are kept: the `Store` protocol with its row types, and SQLite behind it."""
