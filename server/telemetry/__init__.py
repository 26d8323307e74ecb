"""What a server records of itself: logs, counts, latencies and spans. Decides nothing."""
