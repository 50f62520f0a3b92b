"""What a method kept of a prompt, and what the answer would have missed, as one page and as a short text."""
