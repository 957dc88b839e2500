"""Planning, launching, converting and reporting runs. Nothing outside this package imports it."""
