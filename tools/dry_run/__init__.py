"""What `train --dry-run` does."""
