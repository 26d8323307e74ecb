"""Parts that few servers need. server/main.py and tools import one where a flag needs it."""
