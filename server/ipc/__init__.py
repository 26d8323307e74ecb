"""The link between the engine's process and front ends in processes of their own."""
