"""HTTP servers: wallets over TCP, operators over an owner-only unix socket; `routes/` holds the routes."""
