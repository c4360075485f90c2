"""HTTP servers: wallet API over TCP, operator API over an owner-only unix socket. `routes/` contains the routes."""
