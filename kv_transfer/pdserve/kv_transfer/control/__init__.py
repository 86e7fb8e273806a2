"""Control of transfers: `Attach` streams, leases and states of both sides."""
