"""What a run is: leases, buffer, line of policies, evaluations; and how each recorded decision changes it."""
