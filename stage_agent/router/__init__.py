"""One URL for clients: ``/v1/*`` of any node leads to the present head's engine."""
