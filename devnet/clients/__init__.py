"""The clients that exist, simulated from their sources: how they deliver shares and read each response."""
