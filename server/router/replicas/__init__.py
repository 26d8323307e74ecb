"""The servers behind the router: connections to them, what is known of them, and which one is chosen."""
