"""What a model writes: text, reasoning and tool calls, found in its output while it grows."""
