"""Client libraries against a live server: what works, as a table. The scripts run in environments of the clients."""
