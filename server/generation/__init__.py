"""Live generations: checked requests go to an engine, its events become messages. Knows no protocol."""
