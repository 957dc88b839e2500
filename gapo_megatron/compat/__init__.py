"""What libraries keep private, or do otherwise than their users need. One file a library."""
