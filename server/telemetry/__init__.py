"""The server's logs, counters, latency histograms and spans. Decides nothing."""
