"""`stagemesh ...`: arguments in, exit code out, tables and JSON."""
