"""What one address may hold of a server: addresses, connections, requests under way, rates."""
