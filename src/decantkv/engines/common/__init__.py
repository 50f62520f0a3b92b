"""What an engine's plug-in decides without importing the engine."""
