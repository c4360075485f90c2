"""The HTTP routes: wallets over TCP, operators over an owner-only socket. One module a subject.

app.py       the wallets' application, put together
wallet.py    what wallets ask
body.py      reading a request's body within its limits
connection.py  a connection's limits, before there is a request
openapi.py   the API's description, made from the code
guard.py     around every request: CORS, tokens, and errors as JSON
limits.py    how much a client may have refused; clients.py  who a client is
operator.py  what operators ask
views.py     the JSON that operators get, the same from the daemon and from the file
"""
