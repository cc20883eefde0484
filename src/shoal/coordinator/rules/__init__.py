"""Every decision of the swarm as pure functions: no SQL, no HTTP, no clock."""
