"""Pure domain types and rules: shares, due times, host roles. No I/O."""
