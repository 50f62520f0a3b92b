"""Parts of a plug-in that do not import the engine."""
