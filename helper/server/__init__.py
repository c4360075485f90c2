"""HTTP servers: wallet API over TCP, operator API over an owner-only unix socket. `*_routes.py` contain the routes."""
