"""Device operations without waiting on the host, and the precision of products."""
